/* onebit-tune under mpirun: finds the hosts, and measures links, the codec and whole calls. */
#define _DEFAULT_SOURCE
#include "tools/tune/run_mpi.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/knobs.h"
#include "base/memory.h"
#include "base/process.h"
#include "compression/codec.h"

/* --- The hosts of mpirun's ranks ---------------------------------------------------------------*/

void tune_cluster_find(struct tune_cluster *cluster) {
  MPI_Comm_dup(MPI_COMM_WORLD, &cluster->all);
  MPI_Comm_rank(cluster->all, &cluster->rank);
  MPI_Comm_size(cluster->all, &cluster->size);
  MPI_Comm_split_type(cluster->all, MPI_COMM_TYPE_SHARED, cluster->rank, MPI_INFO_NULL,
                      &cluster->local);
  MPI_Comm_rank(cluster->local, &cluster->local_rank);
  MPI_Comm_size(cluster->local, &cluster->local_size);
  MPI_Comm_split(cluster->all, cluster->local_rank == 0 ? 0 : MPI_UNDEFINED, cluster->rank,
                 &cluster->leaders);
  if (cluster->leaders != MPI_COMM_NULL)
    MPI_Comm_rank(cluster->leaders, &cluster->host);
  MPI_Bcast(&cluster->host, 1, MPI_INT, 0, cluster->local);
  cluster->hosts = cluster->host + 1;
  MPI_Allreduce(MPI_IN_PLACE, &cluster->hosts, 1, MPI_INT, MPI_MAX, cluster->all);
}

void tune_cluster_free(struct tune_cluster *cluster) {
  if (cluster->leaders != MPI_COMM_NULL)
    MPI_Comm_free(&cluster->leaders);
  MPI_Comm_free(&cluster->local);
  MPI_Comm_free(&cluster->all);
}

void tune_wait_asleep(MPI_Comm comm) {
  const struct timespec moment = {.tv_nsec = 500000};
  MPI_Request request;
  int done = 0;
  MPI_Ibarrier(comm, &request);
  for (MPI_Test(&request, &done, MPI_STATUS_IGNORE); !done;
       MPI_Test(&request, &done, MPI_STATUS_IGNORE))
    nanosleep(&moment, NULL);
}

enum { MAX_SAMPLES = 512 };

double tune_pass_round(MPI_Comm comm, int next, int before, bool first, double seconds,
                       double *median) {
  double samples[MAX_SAMPLES], start = ob_seconds(), last = start;
  int go = 1, count = 0;
  while (go) {
    if (first) {
      go = last - start < seconds;
      MPI_Send(&go, 1, MPI_INT, next, 0, comm);
    }
    MPI_Recv(&go, 1, MPI_INT, before, 0, comm, MPI_STATUS_IGNORE);
    if (!first)
      MPI_Send(&go, 1, MPI_INT, next, 0, comm);
    double now = ob_seconds();
    samples[count++ % MAX_SAMPLES] = 1e6 * (now - last);
    last = now;
  }
  *median = tune_median(samples, count < MAX_SAMPLES ? count : MAX_SAMPLES);
  return 1e6 * (last - start) / count;
}

double tune_allreduce_max(double value) {
  MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return value;
}

/* Fills an array with numbers of both signs: a linear congruential generator (Knuth, TAOCP
 * 3.3.4). */
void tune_fill_random(float *values, size_t count, uint64_t seed) {
  for (size_t i = 0; i < count; i++) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    values[i] = (float)(int32_t)(seed >> 32) * 0x1p-31f;
  }
}

bool tune_have_all_succeeded(bool well) { return tune_allreduce_max(well ? 0 : 1) == 0; }

/* --- The codec, on one rank alone and on all ranks of a host, which tells the number of cores --*/

/* The elements of each of the codec's arrays, 16 MiB. Such an array does not fit into the caches,
 * but the arrays of all ranks fit into the host's memory. The codec gets blocks of the same size as
 * from a plan. */
#define ELEMENTS ((size_t)4 << 20)
#define STREAMS  8
#define BLOCK    OB_DEFAULT_BLOCK
#define TURNS    3

/* If all ranks at once are slower than one rank alone by more than this factor, they share cores. A
 * smaller slowdown may come from memory or noise. */
#define SHARING 1.4

enum { COMPRESS, REDUCE_2, REDUCE_8, STORE, COPY, PASSES };

struct arrays {
  const struct ob_codec *codec;
  float *input, *residual, *next;
  uint32_t *messages; /* the messages of all streams, one after the other */
};

static void run_codec(const struct arrays *arrays, int pass, size_t at) {
  const float scales[STREAMS] = {0.1f, 0.2f, 0.1f, 0.2f, 0.1f, 0.2f, 0.1f, 0.2f};
  const uint32_t *bits[STREAMS];
  uint32_t *first = arrays->messages + at / 32;
  for (size_t s = 0; s < STREAMS; s++)
    bits[s] = first + s * (ELEMENTS / 32);
  if (pass == COMPRESS)
    arrays->codec->compress(&(struct ob_compress_run){.count = BLOCK,
                                                      .valid = BLOCK,
                                                      .input = arrays->input + at,
                                                      .weight = 1,
                                                      .stream = true,
                                                      .decay = 1,
                                                      .scaling = 1,
                                                      .residual = arrays->residual + at,
                                                      .residual_scale = 0.1f,
                                                      .residual_out = arrays->next + at,
                                                      .bits = first});
  else if (pass == STORE)
    arrays->codec->store(&(struct ob_store_run){.count = BLOCK,
                                                .width = 1,
                                                .stream = true,
                                                .bits = first,
                                                .scale = 0.1f,
                                                .output = arrays->next + at});
  else
    arrays->codec->reduce(&(struct ob_reduce_run){.count = BLOCK,
                                                  .width = 1,
                                                  .streams = pass == REDUCE_2 ? 2 : STREAMS,
                                                  .bits = bits,
                                                  .scales = scales,
                                                  .stream = true,
                                                  .residual = arrays->residual + at,
                                                  .residual_scale = 0.1f,
                                                  .residual_out = arrays->next + at,
                                                  .out = first});
}

/* Times the codec's passes. Returns means, since medians would not show that ranks take turns on a
 * core. */
static void time_passes(const struct arrays *arrays, double seconds[PASSES]) {
  const int rounds = 5;
  for (int pass = 0; pass < PASSES; pass++)
    seconds[pass] = 0;
  for (int round = -1; round < rounds; round++)
    for (int pass = 0; pass < PASSES; pass++) {
      double start = ob_seconds();
      if (pass == COPY)
        memcpy(arrays->next, arrays->input, ELEMENTS * sizeof(float));
      for (size_t at = 0; pass != COPY && at < ELEMENTS; at += BLOCK)
        run_codec(arrays, pass, at);
      if (round >= 0)
        seconds[pass] += (ob_seconds() - start) / rounds / (double)ELEMENTS;
    }
}

/* Times the passes on the ranks with `asked`, while all other ranks sleep. Every rank gets the
 * seconds per element of rank 0. */
static void time_on_ranks(const struct arrays *arrays, bool asked, double seconds[PASSES]) {
  tune_wait_asleep(MPI_COMM_WORLD);
  if (asked)
    time_passes(arrays, seconds);
  tune_wait_asleep(MPI_COMM_WORLD);
  MPI_Bcast(seconds, PASSES, MPI_DOUBLE, 0, MPI_COMM_WORLD);
}

/* True if all ranks are on one machine, even if the names of their hosts differ. */
static bool is_one_machine(void) {
  uint64_t own = ob_machine_number(), first = own;
  MPI_Bcast(&first, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
  return tune_have_all_succeeded(own != 0 && own == first);
}

static void set_codec_costs(struct tune_run *run, const double *alone, const double *host) {
  struct ob_costs *costs = &run->costs;
  double slowdown = host[COMPRESS] / alone[COMPRESS];
  costs->compress = alone[COMPRESS];
  costs->reduce_stream = fmax(0, (alone[REDUCE_8] - alone[REDUCE_2]) / (STREAMS - 2));
  costs->reduce = fmax(0, alone[REDUCE_2] - 2 * costs->reduce_stream);
  costs->apply = alone[STORE];
  costs->load = costs->convert = alone[COPY];
  costs->add = alone[COPY] / 2; /* an addition writes less than it reads */
  costs->cores_per_host = slowdown > SHARING ? run->cluster.max_ranks / slowdown : 0;
  costs->cores_shared = run->cluster.hosts > 1 && is_one_machine() ? ob_machine_processors() : 0;
}

static bool measure_codec(struct tune_run *run, const struct ob_codec *codec) {
  struct arrays arrays = {.codec = codec,
                          .input = ob_allocate(ELEMENTS, sizeof(float)),
                          .residual = ob_allocate(ELEMENTS, sizeof(float)),
                          .next = ob_allocate(ELEMENTS, sizeof(float)),
                          .messages = ob_allocate(STREAMS * ELEMENTS / 32, sizeof(uint32_t))};
  double alone[PASSES], host[PASSES];
  int beside_first = run->team.rank == 0;
  bool well =
      tune_have_all_succeeded(arrays.input && arrays.residual && arrays.next && arrays.messages);
  MPI_Allreduce(MPI_IN_PLACE, &beside_first, 1, MPI_INT, MPI_MAX, run->team.local);
  if (well) {
    tune_fill_random(arrays.input, ELEMENTS, 1);
    tune_fill_random((float *)arrays.messages, STREAMS * ELEMENTS / 32, 2);
    for (int turn = 0; turn < TURNS; turn++) {
      time_on_ranks(&arrays, run->team.rank == 0, alone);
      time_on_ranks(&arrays, beside_first, host);
    }
    set_codec_costs(run, alone, host);
  } else if (run->team.rank == 0)
    tune_print_error("at least one rank is out of memory for arrays of %zu elements", ELEMENTS);
  ob_release(arrays.input);
  ob_release(arrays.residual);
  ob_release(arrays.next);
  ob_release(arrays.messages);
  return well;
}

/* --- Links: ping-pong, messages both ways at once, and many small ones -------------------------*/

#define TAG 1

/* A window of messages in flight, as large as a plan's window. It is smaller than the queues of a
 * switch: if packets were lost, TCP's recovery would be measured. A round has many windows, and is
 * so long that the burst which a link lets through at once has no effect. */
#define FLOW_BYTES    8192
#define FLOW_MESSAGES 16
#define FLOW_WINDOWS  8
#define ROUND_SECONDS 0.12

/* The number of windows in a round of messages that are so small that only their number takes
 * time. */
#define SMALL_WINDOWS 4
#define ROUNDS        15

#define LATENCY_SECONDS 0.02

struct flow {
  MPI_Comm comm;
  int rank, size;
};

/* Sends a window of messages from every rank to the next rank, in a ring. one_way: only rank 0
 * sends, to rank 1. */
static void send_window(const struct flow *flow, int bytes, bool one_way) {
  static char out[FLOW_BYTES], in[FLOW_MESSAGES][FLOW_BYTES];
  MPI_Request requests[2 * FLOW_MESSAGES];
  MPI_Status statuses[2 * FLOW_MESSAGES]; /* MPICH's MPI_STATUSES_IGNORE gives a gcc warning */
  int to = (flow->rank + 1) % flow->size, from = (flow->rank + flow->size - 1) % flow->size, n = 0;
  for (int i = 0; i < FLOW_MESSAGES && (!one_way || flow->rank == 1); i++)
    MPI_Irecv(in[i], bytes, MPI_CHAR, from, TAG, flow->comm, &requests[n++]);
  for (int i = 0; i < FLOW_MESSAGES && (!one_way || flow->rank == 0); i++)
    MPI_Isend(out, bytes, MPI_CHAR, to, TAG, flow->comm, &requests[n++]);
  MPI_Waitall(n, requests, statuses);
}

/* Returns the seconds of a round of windows on the slowest rank. Takes the fastest round, since
 * disturbances only make a link slower. */
static double time_windows(const struct flow *flow, int bytes, bool one_way, int windows,
                           int rounds) {
  double best = INFINITY, time;
  for (int round = -1; round < rounds; round++) {
    MPI_Barrier(flow->comm);
    double start = ob_seconds();
    for (int i = 0; i < windows; i++)
      send_window(flow, bytes, one_way);
    time = ob_seconds() - start;
    MPI_Allreduce(MPI_IN_PLACE, &time, 1, MPI_DOUBLE, MPI_MAX, flow->comm);
    if (round >= 0)
      best = fmin(best, time);
  }
  return best;
}

/* Measures the bandwidth. The time of the first rounds determines the number of windows in a round.
 * All ranks compute the same number. */
static double measure_bandwidth(const struct flow *flow, bool one_way) {
  double first = time_windows(flow, FLOW_BYTES, one_way, FLOW_WINDOWS, 3);
  int windows = (int)fmax(FLOW_WINDOWS, fmin(4096, FLOW_WINDOWS * ROUND_SECONDS / first));
  return (double)FLOW_BYTES * FLOW_MESSAGES * windows /
         time_windows(flow, FLOW_BYTES, one_way, windows, 7);
}

/* Measures the link between the ranks of a communicator. All pairs of its ranks must have the same
 * kind of link. */
static void measure_link(MPI_Comm comm, struct ob_link *link, double sharing) {
  struct flow flow = {.comm = comm};
  double median;
  MPI_Comm_rank(comm, &flow.rank);
  MPI_Comm_size(comm, &flow.size);
  if (flow.size < 2)
    return;
  if (flow.rank < 2) {
    tune_pass_round(comm, 1 - flow.rank, 1 - flow.rank, flow.rank == 0, LATENCY_SECONDS, &median);
    link->latency = 1e-6 * median / 2;
  }
  tune_wait_asleep(comm);
  /* For each message that a core sends it also receives one, hence the factor 2. `sharing`: other
   * ranks may use the same core. */
  link->message = time_windows(&flow, 1, false, SMALL_WINDOWS, ROUNDS) /
                  (2 * FLOW_MESSAGES * SMALL_WINDOWS) / sharing;
  /* This is the bandwidth of the link. The fit finds which fraction of it an exchange reaches while
   * it sends in both directions. */
  link->bandwidth = measure_bandwidth(&flow, false);
  link->bandwidth = fmax(link->bandwidth, measure_bandwidth(&flow, true));
  MPI_Bcast(link, sizeof *link, MPI_BYTE, 0, comm);
}

/* Measures the links inside and between hosts. Values that cannot be measured, since there is one
 * host or one rank per host, do not change. */
static void measure_links(struct tune_run *run) {
  double sharing = ob_cost_sharing_factor(&run->costs, &run->cluster);
  measure_link(run->team.local, &run->costs.inside, sharing);
  if (run->cluster.max_ranks > 1) /* sender and receiver each copy a byte, on two cores */
    run->costs.inside.byte = 1 / run->costs.inside.bandwidth / 2;
  tune_wait_asleep(MPI_COMM_WORLD);
  if (run->team.leaders != MPI_COMM_NULL)
    measure_link(run->team.leaders, &run->costs.between, sharing);
  tune_wait_asleep(MPI_COMM_WORLD);
  MPI_Bcast(&run->costs, sizeof run->costs, MPI_BYTE, 0, MPI_COMM_WORLD);
}

/* --- The cluster, and the tuning file ----------------------------------------------------------*/

static void find_cluster(struct tune_run *run) {
  int fewest = run->team.local_size, most = fewest;
  MPI_Allreduce(MPI_IN_PLACE, &fewest, 1, MPI_INT, MPI_MIN, run->team.all);
  MPI_Allreduce(MPI_IN_PLACE, &most, 1, MPI_INT, MPI_MAX, run->team.all);
  run->cluster = (struct ob_cost_task){.hosts = run->team.hosts,
                                       .ranks_per_host = fewest == most ? most : 0,
                                       .ranks = run->team.size,
                                       .max_ranks = most};
}

/* Finds the path of the tuning file, and checks before the measurements that the file can be
 * written. Called on rank 0. */
static bool find_path(const struct tune_options *options, char path[OB_TUNING_PATH_CAPACITY]) {
  if (options->dry_run)
    return true;
  if (!options->output && !ob_tuning_path(path))
    tune_print_error("the environment names no file to write: give --output PATH or --dry-run");
  else if (options->output &&
           (!*options->output || strlen(options->output) >= OB_TUNING_PATH_CAPACITY))
    tune_print_error("--output is not a path");
  else
    return tune_can_write(options->output ? strcpy(path, options->output) : path);
  return false;
}

/* Writes the tuning file on rank 0. Collective over the leaders, which send the names of their
 * hosts. */
static bool run_mpi_write_file(const struct tune_run *run, const char *path) {
  size_t hosts = (size_t)run->cluster.hosts;
  struct ob_tuning_origin origin = {.host_count = hosts};
  char(*names)[OB_TUNING_NAME_CAPACITY] = ob_allocate(hosts, sizeof *names),
  name[sizeof *names] = "";
  const char **list = ob_allocate(hosts, sizeof *list);
  char library[MPI_MAX_LIBRARY_VERSION_STRING];
  int length;
  time_t now = time(NULL);
  if (!names || !list) {
    tune_print_error("out of memory for the names of %zu hosts", hosts);
    MPI_Abort(MPI_COMM_WORLD, TUNE_FAILED);
  }
  gethostname(name, sizeof name - 1);
  MPI_Gather(name, sizeof name, MPI_CHAR, names, sizeof name, MPI_CHAR, 0, run->team.leaders);
  for (size_t k = 0; k < hosts; k++)
    list[k] = names[k];
  origin.hosts = list;
  MPI_Get_library_version(library, &length);
  library[strcspn(library, ",\r\n")] = '\0';
  snprintf(origin.mpi, sizeof origin.mpi, "%.*s", OB_TUNING_TEXT_CAPACITY - 1, library);
  strftime(origin.date, sizeof origin.date, "%Y-%m-%d", gmtime(&now));
  bool well = run->team.rank != 0 || tune_write_file(path, &run->costs, &origin);
  if (well && run->team.rank == 0)
    printf("\n# Written: %s\n", path);
  ob_release(list);
  ob_release(names);
  return well;
}

/* --- The whole run -----------------------------------------------------------------------------*/

static bool run_mpi_measure(struct tune_run *run, struct tune_points *points) {
  const struct ob_codec *codec;
  if (!tune_have_all_succeeded(ob_codec_choose(&codec) == ONEBIT_OK)) {
    tune_print_error("no codec: %s", onebit_last_error());
    return false;
  }
  ob_costs_default(codec->name, &run->costs);
  run->costs.hosts = run->cluster.hosts;
  run->costs.ranks_per_host = run->cluster.ranks_per_host;
  if (!measure_codec(run, codec))
    return false;
  measure_links(run);
  return run->cluster.ranks == 1 || tune_measure_calls(run, points);
}

/* Writes the tuning file, if it is wanted. A file of doubtful times is written only to a path that
 * the command line names. Collective. */
static bool write_wanted_file(struct tune_run *run, const char *path) {
  if (run->cluster.ranks == 1 || run->options->dry_run)
    return true;
  const bool doubtful =
      !tune_have_all_succeeded(run->team.rank != 0 || !tune_is_doubtful(&run->costs));
  if (doubtful && run->team.rank == 0)
    tune_print_error(
        "the times contradict each other, as on hosts that other programs use: %s",
        run->options->output
            ? "plans that read this file may choose badly"
            : "no file is written, so plans do not use these times. Repeat onebit-tune when the "
              "hosts are idle, or give --output PATH, which writes the file in any case");
  if (doubtful && !run->options->output)
    return false;
  return run->team.leaders == MPI_COMM_NULL || run_mpi_write_file(run, path);
}

static bool print_results(struct tune_run *run, const char *path,
                          const struct tune_points *points) {
  bool alone = run->cluster.ranks == 1;
  if (run->team.rank == 0) {
    tune_print_links(&run->cluster, &run->costs);
    if (alone)
      printf("# There is only one rank, so there is no exchange to measure; no file is written.\n");
    else {
      snprintf(run->costs.source, sizeof run->costs.source, "measured just now");
      tune_print_points(points, run->costs.residual);
      tune_print_decisions(&run->costs, &run->cluster,
                           run->options->output || !tune_is_doubtful(&run->costs));
    }
  }
  return write_wanted_file(run, path);
}

int tune_run(const struct tune_options *options) {
  struct tune_run run = {.options = options};
  struct tune_points points = {.count = 0};
  char path[OB_TUNING_PATH_CAPACITY] = "";
  tune_cluster_find(&run.team);
  find_cluster(&run);
  bool well = tune_have_all_succeeded(run.team.rank != 0 || find_path(options, path)) &&
              run_mpi_measure(&run, &points) && print_results(&run, path, &points);
  well = tune_have_all_succeeded(well);
  tune_cluster_free(&run.team);
  return well ? TUNE_OK : TUNE_FAILED;
}
