/* The links between ranks: ping-pong, messages both ways at once, and many small ones. */
#ifdef ONEBIT_HAVE_MPI
#include <math.h>

#include "base/memory.h"
#include "bench/bench.h"
#include "tools/tune/mpi.h"

#define TAG 1

/* Messages in flight, as large as a plan's: less than the queues of a switch hold, or what is
 * measured is how TCP recovers. Windows of these follow each other until a round takes long enough
 * that a burst which the link lets through at once does not matter. */
#define FLOW_BYTES    8192
#define FLOW_MESSAGES 16
#define FLOW_WINDOWS  8
#define ROUND_SECONDS 0.12

/* Small messages in flight, whose bytes weigh nothing. */
#define SMALL_WINDOWS 4
#define ROUNDS        15

struct flow {
  MPI_Comm comm;
  int rank, size, bytes, windows;
  bool one_way; /* from rank 0 to rank 1 alone */
  char *out, *in;
};

static double ping_pong(const struct flow *flow, int peer, int rounds) {
  double times[ROUNDS] = {0};
  char byte = 0;
  for (int round = 0; round < ROUNDS; round++) {
    double start = bench_now();
    for (int i = 0; i < rounds; i++) {
      if (flow->rank == 0)
        MPI_Send(&byte, 1, MPI_CHAR, peer, TAG, flow->comm);
      MPI_Recv(&byte, 1, MPI_CHAR, flow->rank == 0 ? peer : 0, TAG, flow->comm, MPI_STATUS_IGNORE);
      if (flow->rank == peer)
        MPI_Send(&byte, 1, MPI_CHAR, 0, TAG, flow->comm);
    }
    times[round] = (bench_now() - start) / (2 * rounds);
  }
  return bench_statistics(times, ROUNDS).median;
}

/* All send to the next rank and receive from the one before; or the first does, and the second. */
static void stream_window(const struct flow *flow) {
  MPI_Request requests[2 * FLOW_MESSAGES];
  MPI_Status statuses[2 * FLOW_MESSAGES]; /* MPICH's way to ignore them is a warning of gcc's */
  int to = (flow->rank + 1) % flow->size, from = (flow->rank + flow->size - 1) % flow->size, n = 0;
  for (int i = 0; i < FLOW_MESSAGES && (!flow->one_way || flow->rank == 1); i++)
    MPI_Irecv(flow->in + (size_t)i * FLOW_BYTES, flow->bytes, MPI_CHAR, from, TAG, flow->comm,
              &requests[n++]);
  for (int i = 0; i < FLOW_MESSAGES && (!flow->one_way || flow->rank == 0); i++)
    MPI_Isend(flow->out, flow->bytes, MPI_CHAR, to, TAG, flow->comm, &requests[n++]);
  MPI_Waitall(n, requests, statuses);
}

static double stream_once(const struct flow *flow) {
  MPI_Barrier(flow->comm);
  double start = bench_now();
  for (int i = 0; i < flow->windows; i++)
    stream_window(flow);
  return bench_now() - start;
}

/* Seconds of a round, of the slowest rank: of the best round, since a link is as fast as it once
 * was. */
static double stream(const struct flow *flow, int rounds) {
  double times[ROUNDS] = {0}, time;
  for (int round = -1; round < rounds; round++) {
    time = stream_once(flow);
    MPI_Allreduce(MPI_IN_PLACE, &time, 1, MPI_DOUBLE, MPI_MAX, flow->comm);
    if (round >= 0)
      times[round] = time;
  }
  return bench_statistics(times, (size_t)rounds).minimum;
}

/* Every rank gets the same number of windows from the time of the first ones. */
static double bandwidth(struct flow *flow, bool quick) {
  flow->bytes = FLOW_BYTES;
  flow->windows = FLOW_WINDOWS;
  double first = stream(flow, 3);
  flow->windows = (int)fmax(FLOW_WINDOWS, fmin(4096, FLOW_WINDOWS * ROUND_SECONDS / first));
  double bytes = (double)FLOW_BYTES * FLOW_MESSAGES * flow->windows;
  return bytes / stream(flow, quick ? 3 : 7);
}

/* The ranks of one communicator, of which every pair is alike. */
static void measure(struct flow *flow, struct ob_link *link, double sharing, bool quick) {
  MPI_Comm_rank(flow->comm, &flow->rank);
  MPI_Comm_size(flow->comm, &flow->size);
  if (flow->size < 2)
    return;
  if (flow->rank < 2)
    link->latency = ping_pong(flow, 1, quick ? 10 : 40);
  tune_wait(flow->comm);
  /* What an exchange reaches of the link both ways is fitted; this is what the link can do. */
  flow->one_way = false;
  flow->bytes = 1;
  flow->windows = SMALL_WINDOWS;
  /* Each was sent, and another received, on a core that may be shared. */
  link->message = stream(flow, ROUNDS) / (2 * FLOW_MESSAGES * SMALL_WINDOWS) / sharing;
  flow->bytes = FLOW_BYTES;
  link->bandwidth = bandwidth(flow, quick);
  flow->one_way = true;
  link->bandwidth = fmax(link->bandwidth, bandwidth(flow, quick));
  MPI_Bcast(link, sizeof *link, MPI_BYTE, 0, flow->comm);
}

void tune_links(const struct tune_cluster *cluster, struct ob_costs *costs, bool quick) {
  struct flow flow = {.out = ob_allocate(1, FLOW_BYTES),
                      .in = ob_allocate(FLOW_MESSAGES, FLOW_BYTES)};
  const struct ob_cost_task all = {.hosts = cluster->hosts,
                                   .ranks_per_host = cluster->ranks_per_host,
                                   .ranks = cluster->size,
                                   .most_ranks = cluster->most_ranks};
  double sharing = ob_cost_sharing(costs, &all);
  if (tune_largest(flow.out && flow.in ? 0 : 1) == 0) {
    flow.comm = cluster->mpi->host;
    measure(&flow, &costs->inside, sharing, quick);
    /* On the same core a byte is copied twice, once by each side. */
    if (cluster->most_ranks > 1)
      costs->inside.byte = 1 / costs->inside.bandwidth / 2;
    tune_wait(MPI_COMM_WORLD);
    flow.comm = cluster->mpi->leaders;
    if (flow.comm != MPI_COMM_NULL)
      measure(&flow, &costs->between, sharing, quick);
  }
  tune_wait(MPI_COMM_WORLD);
  MPI_Bcast(costs, sizeof *costs, MPI_BYTE, 0, MPI_COMM_WORLD);
  ob_release(flow.out);
  ob_release(flow.in);
}

#else
typedef int tune_no_links_here; /* ISO C wants a declaration in every file */
#endif
