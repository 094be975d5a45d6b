/* What the doctor measures with messages: how ranks wait, pairs of hosts, streams. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tools/doctor/mpi.h"

static double faster(double rate, double other) { return fmax(rate, other); }
static double sooner(double time, double other) {
  return time > 0 && (other <= 0 || time < other) ? time : other;
}

/* --- Between two ranks -------------------------------------------------------------------------*/

enum { TAG = 1, WINDOW = 4 /* pieces in flight: more than a gigabit link's delay holds */ };

double doctor_transfer(MPI_Comm comm, int peer, bool sends, int pieces) {
  static char piece[WINDOW][DOCTOR_PIECE];
  MPI_Request requests[WINDOW];
  MPI_Status statuses[WINDOW]; /* MPICH's way to ignore them is a warning of gcc's */
  double start = doctor_now();
  for (int i = 0; i < WINDOW; i++)
    requests[i] = MPI_REQUEST_NULL;
  for (int i = 0; i < pieces; i++) {
    int slot = i % WINDOW;
    MPI_Wait(&requests[slot], MPI_STATUS_IGNORE);
    if (sends)
      MPI_Isend(piece[slot], DOCTOR_PIECE, MPI_BYTE, peer, TAG, comm, &requests[slot]);
    else
      MPI_Irecv(piece[slot], DOCTOR_PIECE, MPI_BYTE, peer, TAG, comm, &requests[slot]);
  }
  MPI_Waitall(WINDOW, requests, statuses);
  if (sends) /* sent is what has arrived */
    MPI_Recv(NULL, 0, MPI_BYTE, peer, TAG, comm, MPI_STATUS_IGNORE);
  else
    MPI_Send(NULL, 0, MPI_BYTE, peer, TAG, comm);
  return doctor_now() - start;
}

/* At most 1 GiB, which is a tenth of a second at 100 Gbit/s. */
enum { MOST_PIECES = 4096 };

int doctor_transfer_length(MPI_Comm comm, int peer, bool sends, double seconds) {
  double one = doctor_transfer(comm, peer, sends, 1);
  int pieces = 0;
  if (!sends) {
    MPI_Recv(&pieces, 1, MPI_INT, peer, TAG, comm, MPI_STATUS_IGNORE);
    return pieces;
  }
  pieces = (int)fmin(fmax(seconds / one, 2), MOST_PIECES);
  MPI_Send(&pieces, 1, MPI_INT, peer, TAG, comm);
  return pieces;
}

enum { MOST_SAMPLES = 512 };

double doctor_round_trips(MPI_Comm comm, int peer, bool first, double seconds, double *median) {
  double samples[MOST_SAMPLES], start = doctor_now(), last = start;
  int go = 1, count = 0;
  while (go) {
    if (first)
      go = last - start < seconds;
    if (first)
      MPI_Send(&go, 1, MPI_INT, peer, TAG, comm);
    MPI_Recv(&go, 1, MPI_INT, peer, TAG, comm, MPI_STATUS_IGNORE);
    if (!first)
      MPI_Send(&go, 1, MPI_INT, peer, TAG, comm);
    double now = doctor_now();
    samples[count++ % MOST_SAMPLES] = 1e6 * (now - last);
    last = now;
  }
  if (median)
    *median = doctor_median(samples, count < MOST_SAMPLES ? count : MOST_SAMPLES);
  return 1e6 * (last - start) / count;
}

/* --- How ranks wait ----------------------------------------------------------------------------*/

/* Long against a scheduler's time slice (some milliseconds), so that the mean sees whole ones. */
#define WAITING_SECONDS 0.25

/* A message goes round; every rank waits for it in MPI. The mean time of a hop, on the first rank.
 * All ranks of a host take part, because two of them that happen to run side by side for one time
 * slice hide in thousands of quick round trips that they then wait for several slices. */
static double hop_in_ring(MPI_Comm ring) {
  int rank, size, laps = 0, go = 1;
  MPI_Comm_rank(ring, &rank);
  MPI_Comm_size(ring, &size);
  double start = doctor_now();
  while (go) {
    if (rank == 0) {
      go = doctor_now() - start < WAITING_SECONDS;
      MPI_Send(&go, 1, MPI_INT, 1, TAG, ring);
    }
    MPI_Recv(&go, 1, MPI_INT, (rank + size - 1) % size, TAG, ring, MPI_STATUS_IGNORE);
    if (rank != 0)
      MPI_Send(&go, 1, MPI_INT, (rank + 1) % size, TAG, ring);
    laps++;
  }
  return 1e6 * (doctor_now() - start) / laps / size;
}

static void measure_local_hops(const struct doctor_team *team, struct doctor_facts *facts) {
  double hop = 0;
  doctor_wait_asleep(team->all);
  if (team->local_size >= 2)
    hop = hop_in_ring(team->local);
  doctor_wait_asleep(team->all);
  if (team->leaders == MPI_COMM_NULL)
    return;
  double *every = calloc((size_t)facts->host_count, sizeof *every);
  if (!every)
    MPI_Abort(team->all, DOCTOR_USAGE);
  MPI_Gather(&hop, 1, MPI_DOUBLE, every, 1, MPI_DOUBLE, 0, team->leaders);
  for (int h = 0; team->rank == 0 && h < facts->host_count; h++)
    facts->hosts[h].local_hop = sooner(every[h], facts->hosts[h].local_hop);
  free(every);
}

void doctor_measure_waiting(const struct doctor_team *team, struct doctor_facts *facts) {
  double two = 0, ring = 0;
  bool leads = team->leaders != MPI_COMM_NULL;
  measure_local_hops(team, facts);
  if (facts->host_count < 2)
    return;
  if (leads && team->host < 2)
    two = doctor_round_trips(team->leaders, 1 - team->host, team->host == 0, WAITING_SECONDS, NULL);
  doctor_wait_asleep(team->all);
  if (leads)
    ring = hop_in_ring(team->leaders);
  MPI_Barrier(team->all); /* where the others wait, as they do in a collective */
  facts->hop_two = sooner(two / 2, facts->hop_two);
  facts->hop_all = sooner(ring, facts->hop_all);
}

/* --- What carries the traffic ------------------------------------------------------------------*/

enum { BULK_PIECES = 16 }; /* 4 MiB: 0.35 s at 100 Mbit/s, and far more than what else is sent */

static void pass_on(const struct doctor_team *team, int hosts, int pieces) {
  static char out[DOCTOR_PIECE], in[DOCTOR_PIECE];
  for (int i = 0; i < pieces; i++)
    MPI_Sendrecv(out, DOCTOR_PIECE, MPI_BYTE, (team->host + 1) % hosts, TAG, in, DOCTOR_PIECE,
                 MPI_BYTE, (team->host + hosts - 1) % hosts, TAG, team->leaders, MPI_STATUS_IGNORE);
}

void doctor_measure_carrier(const struct doctor_team *team, struct doctor_facts *facts) {
  const struct timespec settle = {.tv_nsec = 20000000}; /* some drivers count a little later */
  if (team->leaders != MPI_COMM_NULL && facts->host_count >= 2) {
    struct doctor_host before, after, kept = facts->hosts[team->host];
    pass_on(team, facts->host_count, 1); /* connections are made with the first message */
    doctor_wait_asleep(team->leaders);
    doctor_read_host(&before);
    pass_on(team, facts->host_count, BULK_PIECES);
    doctor_wait_asleep(team->leaders);
    nanosleep(&settle, NULL);
    doctor_read_host(&after);
    doctor_subtract(&before, &after);
    kept.interface_count = after.interface_count;
    memcpy(kept.interfaces, after.interfaces, sizeof kept.interfaces);
    facts->bulk = (uint64_t)BULK_PIECES * DOCTOR_PIECE;
    struct doctor_host *every = malloc((size_t)facts->host_count * sizeof *every);
    if (!every)
      MPI_Abort(team->all, DOCTOR_USAGE);
    MPI_Allgather(&kept, sizeof kept, MPI_BYTE, every, sizeof kept, MPI_BYTE, team->leaders);
    for (int h = 0; h < facts->host_count; h++) {
      facts->hosts[h].interface_count = every[h].interface_count;
      memcpy(facts->hosts[h].interfaces, every[h].interfaces, sizeof every[h].interfaces);
    }
    free(every);
  }
  doctor_wait_asleep(team->all);
}

/* --- All pairs of hosts ------------------------------------------------------------------------*/

#define LATENCY_SECONDS   0.03
#define BANDWIDTH_SECONDS 0.15
/* At 0.35 s a round five seconds; every host of a larger cluster meets this many others. */
enum { MOST_ROUNDS = 15 };

static double measure_rate(MPI_Comm comm, int peer, bool sends) {
  int pieces = doctor_transfer_length(comm, peer, sends, BANDWIDTH_SECONDS);
  double seconds = doctor_transfer(comm, peer, sends, pieces);
  return 8e-9 * pieces * DOCTOR_PIECE / seconds;
}

static void meet(const struct doctor_team *team, int hosts, int peer, struct doctor_facts *facts) {
  bool first = team->host < peer;
  double median, rate;
  double *own_rate = &facts->bandwidth[team->host * hosts + peer];
  double *own_time = &facts->round_trip[team->host * hosts + peer];
  doctor_round_trips(team->leaders, peer, first, LATENCY_SECONDS, &median);
  if (first)
    *own_time = sooner(median, *own_time);
  for (int turn = 0; turn < 2; turn++) {
    bool sends = first == (turn == 0);
    rate = measure_rate(team->leaders, peer, sends);
    if (sends)
      *own_rate = faster(rate, *own_rate);
  }
}

/* Rows to the first leader, which completes the times: each is measured at one end. */
static void gather_rows(const struct doctor_team *team, double *matrix, int hosts) {
  double *row = matrix + team->host * hosts;
  if (team->host == 0)
    MPI_Gather(MPI_IN_PLACE, hosts, MPI_DOUBLE, matrix, hosts, MPI_DOUBLE, 0, team->leaders);
  else
    MPI_Gather(row, hosts, MPI_DOUBLE, NULL, hosts, MPI_DOUBLE, 0, team->leaders);
}

void doctor_measure_pairs(const struct doctor_team *team, struct doctor_facts *facts) {
  int hosts = facts->host_count, rounds = doctor_rounds(hosts);
  if (team->leaders != MPI_COMM_NULL) {
    for (int round = 0; round < rounds && round < MOST_ROUNDS; round++) {
      int peer = doctor_opponent(hosts, round, team->host);
      if (peer >= 0)
        meet(team, hosts, peer, facts);
      doctor_wait_asleep(team->leaders);
    }
    gather_rows(team, facts->bandwidth, hosts);
    gather_rows(team, facts->round_trip, hosts);
    for (int a = 0; team->host == 0 && a < hosts; a++)
      for (int b = 0; b < a; b++)
        facts->round_trip[a * hosts + b] = facts->round_trip[b * hosts + a];
  }
  doctor_wait_asleep(team->all);
}

/* --- Several ranks at once ---------------------------------------------------------------------*/

enum { MOST_STREAMS = 4 };

/* The world's rank of the `local`-th rank on a host. */
static int rank_on(const struct doctor_facts *facts, int host, int local) {
  for (int rank = 0; rank < facts->rank_count; rank++)
    if (facts->ranks[rank].host == host && local-- == 0)
      return rank;
  return MPI_PROC_NULL;
}

/* The rate of `streams` ranks of the first host that send to as many of the second at once. */
static double rate_of_streams(const struct doctor_team *team, const struct doctor_facts *facts,
                              int streams) {
  bool takes_part = team->host < 2 && team->local_rank < streams, sends = team->host == 0;
  int peer = takes_part ? rank_on(facts, 1 - team->host, team->local_rank) : 0, pieces = 0;
  double seconds = 0, longest;
  doctor_wait_asleep(team->all);
  if (takes_part)
    pieces = doctor_transfer_length(team->all, peer, sends, 2 * BANDWIDTH_SECONDS / streams);
  MPI_Bcast(&pieces, 1, MPI_INT, 0, team->all); /* rank 0's: the same number on all streams */
  if (takes_part)
    seconds = doctor_transfer(team->all, peer, sends, pieces);
  doctor_wait_asleep(team->all);
  MPI_Allreduce(&seconds, &longest, 1, MPI_DOUBLE, MPI_MAX, team->all);
  return 8e-9 * pieces * DOCTOR_PIECE * streams / longest;
}

void doctor_measure_streams(const struct doctor_team *team, struct doctor_facts *facts) {
  if (facts->host_count < 2)
    return;
  int streams = MOST_STREAMS;
  for (int host = 0; host < 2; host++)
    if (facts->hosts[host].ranks < streams)
      streams = facts->hosts[host].ranks;
  if (streams < 2)
    return;
  facts->message_streams = streams;
  facts->one_stream = faster(rate_of_streams(team, facts, 1), facts->one_stream);
  facts->many_streams = faster(rate_of_streams(team, facts, streams), facts->many_streams);
}

/* --- Plain TCP on every subnet that all hosts share --------------------------------------------*/

#define SOCKET_SECONDS 0.3
#define CONNECT_LIMIT  2.0  /* a connection that a firewall drops is given up after this */
#define RECEIVE_LIMIT  10.0 /* what is in the kernel's buffers drains at 10 Mbit/s in four */

/* The receiver's rate; 0 on the sender and where no connection is made. */
static double socket_rate(const struct doctor_team *team, const struct doctor_facts *facts,
                          const struct doctor_subnet *subnet, int streams, int peer) {
  const struct doctor_host *hosts = facts->hosts;
  uint32_t own = doctor_interface_in(&hosts[team->host], subnet->network, subnet->netmask)->address;
  uint32_t other = doctor_interface_in(&hosts[peer], subnet->network, subnet->netmask)->address;
  int sockets[MOST_STREAMS];
  uint16_t port = 0;
  if (team->host < peer) {
    MPI_Recv(&port, 1, MPI_UINT16_T, peer, TAG, team->leaders, MPI_STATUS_IGNORE);
    if (port && doctor_connect(own, other, port, streams, CONNECT_LIMIT, sockets))
      doctor_send_for(SOCKET_SECONDS, streams, sockets);
    return 0;
  }
  int listener = doctor_listen(own, &port);
  MPI_Send(&port, 1, MPI_UINT16_T, peer, TAG, team->leaders);
  bool connected = listener >= 0 && doctor_accept(listener, streams, 1.5 * CONNECT_LIMIT, sockets);
  if (listener >= 0)
    close(listener);
  return connected ? doctor_receive_all(RECEIVE_LIMIT, streams, sockets) : 0;
}

void doctor_measure_subnets(const struct doctor_team *team, struct doctor_facts *facts) {
  int steps = facts->host_count < 2 ? 0 : facts->subnet_count * DOCTOR_STREAMS;
  for (int step = 0; team->leaders != MPI_COMM_NULL && step < steps; step++) {
    struct doctor_subnet *subnet = &facts->subnets[step / DOCTOR_STREAMS];
    int streams = step % DOCTOR_STREAMS, peer = team->host ^ 1;
    double rate = 0, best;
    if (streams > 0 && subnet->rate[0] <= 0) /* no connection: not again two seconds for each */
      continue;
    if (peer < facts->host_count)
      rate = socket_rate(team, facts, subnet, 1 << streams, peer);
    doctor_wait_asleep(team->leaders);
    MPI_Allreduce(&rate, &best, 1, MPI_DOUBLE, MPI_MAX, team->leaders);
    subnet->rate[streams] = faster(best, subnet->rate[streams]);
  }
  doctor_wait_asleep(team->all);
}
