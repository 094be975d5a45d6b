/* The links between ranks: ping-pong, messages both ways at once, and many small ones. */
#ifdef ONEBIT_HAVE_MPI
#include <string.h>

#include "base/memory.h"
#include "bench/bench.h"
#include "bench/tune_mpi.h"

#define TAG 1

/* Messages in flight, of a size that is sent eagerly; a round of 2 MiB is well beyond the burst
 * that an emulated link lets through at once. */
#define FLOW_BYTES    32768
#define FLOW_MESSAGES 64

/* Small messages in flight, whose bytes weigh nothing. */
#define SMALL_MESSAGES 64
#define ROUNDS         15

struct flow {
  MPI_Comm comm;
  int rank, size, bytes, messages;
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

/* All send to the next rank and receive from the one before. */
static double stream_once(const struct flow *flow) {
  MPI_Request requests[2 * FLOW_MESSAGES];
  int to = (flow->rank + 1) % flow->size, from = (flow->rank + flow->size - 1) % flow->size, n = 0;
  MPI_Barrier(flow->comm);
  double start = bench_now();
  for (int i = 0; i < flow->messages; i++)
    MPI_Irecv(flow->in + (size_t)i * FLOW_BYTES, flow->bytes, MPI_CHAR, from, TAG, flow->comm,
              &requests[n++]);
  for (int i = 0; i < flow->messages; i++)
    MPI_Isend(flow->out, flow->bytes, MPI_CHAR, to, TAG, flow->comm, &requests[n++]);
  MPI_Waitall(n, requests, MPI_STATUSES_IGNORE);
  return bench_now() - start;
}

/* Seconds of a round, of the slowest rank. */
static double stream(const struct flow *flow, int rounds) {
  double times[ROUNDS] = {0}, time;
  for (int round = -1; round < rounds; round++) {
    time = stream_once(flow);
    MPI_Allreduce(MPI_IN_PLACE, &time, 1, MPI_DOUBLE, MPI_MAX, flow->comm);
    if (round >= 0)
      times[round] = time;
  }
  return bench_statistics(times, (size_t)rounds).median;
}

/* The ranks of one communicator, of which every pair is alike. */
static void measure(struct flow *flow, struct ob_link *link, bool quick) {
  MPI_Comm_rank(flow->comm, &flow->rank);
  MPI_Comm_size(flow->comm, &flow->size);
  if (flow->size < 2)
    return;
  if (flow->rank < 2)
    link->latency = ping_pong(flow, 1, quick ? 10 : 40);
  tune_wait(flow->comm);
  flow->bytes = 1;
  flow->messages = SMALL_MESSAGES;
  /* Each was sent, and another received. */
  link->message = stream(flow, ROUNDS) / (2 * SMALL_MESSAGES);
  flow->bytes = FLOW_BYTES;
  flow->messages = FLOW_MESSAGES;
  double bytes = (double)FLOW_BYTES * FLOW_MESSAGES;
  link->bandwidth = bytes / stream(flow, quick ? 3 : 7);
  MPI_Bcast(link, sizeof *link, MPI_BYTE, 0, flow->comm);
}

void tune_links(const struct tune_cluster *cluster, struct ob_costs *costs, bool quick) {
  struct flow flow = {.out = ob_allocate(1, FLOW_BYTES),
                      .in = ob_allocate(FLOW_MESSAGES, FLOW_BYTES)};
  if (tune_largest(flow.out && flow.in ? 0 : 1) == 0) {
    flow.comm = cluster->mpi->host;
    measure(&flow, &costs->inside, quick);
    /* On the same core a byte is copied twice, once by each side. */
    if (cluster->most_ranks > 1)
      costs->inside.byte = 1 / costs->inside.bandwidth / 2;
    tune_wait(MPI_COMM_WORLD);
    flow.comm = cluster->mpi->leaders;
    if (flow.comm != MPI_COMM_NULL)
      measure(&flow, &costs->between, quick);
  }
  tune_wait(MPI_COMM_WORLD);
  MPI_Bcast(costs, sizeof *costs, MPI_BYTE, 0, MPI_COMM_WORLD);
  ob_release(flow.out);
  ob_release(flow.in);
}

#else
typedef int tune_no_links_here; /* ISO C wants a declaration in every file */
#endif
