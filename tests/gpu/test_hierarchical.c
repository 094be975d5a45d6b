/*
 * Tests hierarchical plans on a device, staged over loopback and over NCCL. With the same hosts and
 * inputs, every result and residual must have the same bits as on the host. An error of one rank
 * must have the same outcome on all ranks, and change nothing.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compression/numerics.h"
#include "tests/gpu/plans.h"

enum { CALLS = 7, NOT_FINITE = 2, REFUSED = 3, CAPTURED = 4 };

#define CASE(is_named, of_elements, ...)                                                           \
  {                                                                                                \
    is_named, {                                                                                    \
      .count = of_elements, .options = {                                                           \
        .size = sizeof(onebit_plan_options_t),                                                     \
        .schedule = ONEBIT_SCHEDULE_HIERARCHICAL,                                                  \
        __VA_ARGS__                                                                                \
      }                                                                                            \
    }                                                                                              \
  }

static const struct hosts_case {
  const char *name;
  struct plan_case plan;
} cases[] = {
    CASE("defaults", 9001, .block_size = 0),
    CASE("many messages", 3001, .block_size = 64, .chunk_size = 128),
    CASE("bfloat16, mean of absolute values", 5000, .dtype = ONEBIT_BFLOAT16,
         .scale = ONEBIT_SCALE_MEAN_ABSOLUTE, .block_size = 32),
    CASE("float16, nothing kept", 4097, .dtype = ONEBIT_FLOAT16, .block_size = 256,
         .no_error_feedback = 1),
    CASE("dense", 9001, .wire = ONEBIT_WIRE_DENSE),
    CASE("dense, many messages, float16", 2999, .wire = ONEBIT_WIRE_DENSE, .dtype = ONEBIT_FLOAT16,
         .block_size = 64, .chunk_size = 64),
    CASE("8 bits", 9001, .bits = 8),
    CASE("2 bits, many messages", 3001, .bits = 2, .block_size = 64, .chunk_size = 128),
    CASE("4 bits, bfloat16, largest", 5000, .bits = 4, .dtype = ONEBIT_BFLOAT16,
         .scale = ONEBIT_SCALE_LARGEST, .block_size = 256),
    CASE("fewer elements than ranks", 3, .block_size = 32),
    CASE("none", 0, .block_size = 0),
};
#define CASES (sizeof cases / sizeof cases[0])

/* The results of a rank over loopback. */
struct record {
  struct traces traces[CALLS];
  uint64_t account;
};

/* A rank's plan. If on_stream is true, calls need no work of the host. */
struct hosted {
  struct part part;
  bool on_stream;
  cudaStream_t stream;
  cudaGraphExec_t graph;
};

static bool open_hosted(struct hosted *hosted, onebit_comm_t comm, const struct plan_case *what,
                        enum hosts_place place) {
  *hosted = (struct hosted){.on_stream = place == OVER_NCCL};
  CHECK_CUDA(cudaStreamCreateWithFlags(&hosted->stream, cudaStreamNonBlocking));
  return part_create(&hosted->part, comm, what, place != ON_PROCESSOR);
}

static void close_hosted(struct hosted *hosted) {
  part_destroy(&hosted->part);
  if (hosted->graph)
    CHECK_CUDA(cudaGraphExecDestroy(hosted->graph));
  CHECK_CUDA(cudaStreamDestroy(hosted->stream));
}

/* Makes a call by launching a graph. The first call captures the graph. */
static onebit_status_t call_in_graph(struct hosted *hosted) {
  if (!hosted->graph)
    hosted->graph = part_capture(&hosted->part, hosted->stream);
  CHECK_CUDA(cudaGraphLaunch(hosted->graph, hosted->stream));
  CHECK_CUDA(cudaStreamSynchronize(hosted->stream));
  return onebit_plan_synchronize(hosted->part.plan);
}

static onebit_status_t make_call(struct hosted *hosted, int number) {
  struct part *part = &hosted->part;
  void *in = part->in;
  if (hosted->on_stream && number >= CAPTURED)
    return call_in_graph(hosted);
  if (number == REFUSED && part->rank == 0)
    part->in = NULL;
  const onebit_status_t status = part->device && number % 2 == 0
                                     ? part_enqueue_and_wait(part, hosted->stream)
                                     : part_call(part);
  part->in = in;
  return status;
}

/* Checks that the error message names the rank with the error, which may be on another host. If
 * values are sent uncompressed, no rank is named: all ranks add the values up and find the NaN
 * themselves. */
static void check_rank_in_message(const struct part *part, int number) {
  char wanted[64] = "";
  if (part->what.count && part->what.options.wire == ONEBIT_WIRE_BITS && number == NOT_FINITE)
    snprintf(wanted, sizeof wanted, "rank %d has a value that is not finite", part->size - 1);
  if (part->what.count && number == REFUSED)
    snprintf(wanted, sizeof wanted, part->rank ? "rank 0 failed in this call" : "sendbuf is NULL");
  CHECK_MESSAGE(wanted);
}

/* Writes the input. In call NOT_FINITE the last rank's last element is NaN. */
static void make_input(struct part *part, int number) {
  part_write_input(part, (unsigned)number, false);
  if (part->what.count && number == NOT_FINITE && part->rank == part->size - 1)
    ob_store(part->sent, part->what.count - 1, part->what.options.dtype, NAN);
  part_load(part);
}

static onebit_status_t expected_status(const struct part *part, int number) {
  if (part->what.count && number == NOT_FINITE)
    return ONEBIT_SKIPPED;
  if (part->what.count && number == REFUSED)
    return part->rank ? ONEBIT_ERROR_PEER : ONEBIT_ERROR_ARGUMENT;
  return ONEBIT_OK;
}

static void make_calls(struct hosted *hosted, struct record *record) {
  struct part *part = &hosted->part;
  for (int number = 0; number < CALLS; number++) {
    make_input(part, number);
    const onebit_status_t status = make_call(hosted, number);
    if (hosted->on_stream)
      check_rank_in_message(part, number);
    const struct traces traces = part_hash_traces(part);
    if (!part->device)
      record->traces[number] = traces;
    CHECK(status == expected_status(part, number), "call %d: status %d", number, (int)status);
    CHECK(traces_equal(&traces, &record->traces[number]), "call %d: other bits", number);
  }
}

struct shared {
  const struct hosts_case *what;
  struct record *records;
};

static void compare_on_rank(const struct gpu_rank *self, const struct hosts_split *split,
                            enum hosts_place place, void *context) {
  const struct shared *shared = context;
  struct record *record = &shared->records[self->rank];
  struct hosted hosted;
  check_case("%s: %d hosts of %d%s, rank %d", shared->what->name, split->hosts, split->each,
             split->in_turns ? " in turns" : "", self->rank);
  if (open_hosted(&hosted, self->comm, &shared->what->plan, place)) {
    const uint64_t account = part_hash_info(&hosted.part);
    if (place == ON_PROCESSOR)
      record->account = account;
    CHECK(account == record->account, "the plan's account of itself differs");
    make_calls(&hosted, record);
  }
  close_hosted(&hosted);
}

static void has_the_bits_of_loopback(void) {
  struct record *records = gpu_allocate_area(HOSTS_MOST_RANKS * sizeof *records);
  const struct sample sample =
      sample_product("hierarchical", 1, (const size_t[]){HOSTS_SPLITS, CASES}, 2);
  for (size_t k = 0; k < sample.count; k++) {
    struct shared shared = {&cases[sample.rows[k] / HOSTS_SPLITS], records};
    run_on_hosts(&hosts_splits[sample.rows[k] % HOSTS_SPLITS], compare_on_rank, &shared);
  }
  free(sample.rows);
}

/* Checks that each of H hosts sends 2 (H - 1) / H bits per element, besides scales and headers. */
static void check_bytes(const struct gpu_rank *self, const struct hosts_split *split,
                        enum hosts_place place, void *context) {
  const size_t count = 1 << 21;
  const double hosts = split->hosts, ranks = split->each;
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  onebit_plan_info_t info = {.size = sizeof info};
  onebit_plan_t plan;
  (void)context;
  options.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
  options.device = place == ON_PROCESSOR ? ONEBIT_DEVICE_HOST : ONEBIT_DEVICE_CUDA;
  if (!CHECK_STATUS(onebit_plan_create(self->comm, count, &options, &plan), ONEBIT_OK))
    return;
  CHECK_STATUS(onebit_plan_get_info(plan, &info), ONEBIT_OK);
  double wanted = 2 * (hosts - 1) / hosts * (double)count / 8 / ranks;
  CHECK(info.wire_bytes >= wanted && info.wire_bytes <= 1.04 * wanted,
        "%llu bytes to other hosts, not %.0f", (unsigned long long)info.wire_bytes, wanted);
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
}

static void few_bytes_leave_a_host(void) {
  for (size_t s = 0; s < HOSTS_SPLITS; s++)
    run_on_hosts(&hosts_splits[s], check_bytes, NULL);
}

static onebit_status_t call_on_stream(void *context) {
  struct hosted *hosted = context;
  return part_enqueue(&hosted->part, hosted->stream);
}

/* Checks that a call on all ranks neither allocates memory nor waits on the host. Returns the bytes
 * that all ranks have sent together. */
static long check_counts(struct hosted *hosted) {
  make_input(&hosted->part, 0);
  const struct emulation_counters counts = count_call(call_on_stream, hosted);
  CHECK(counts.allocations == 0 && counts.synchronisations == 0, "%ld allocations, %ld waits",
        counts.allocations, counts.synchronisations);
  CHECK_STATUS(onebit_plan_synchronize(hosted->part.plan), ONEBIT_OK);
  return counts.sent_bytes;
}

static void call_and_count(const struct gpu_rank *self, const struct hosts_split *split,
                           enum hosts_place place, void *context) {
  struct hosted hosted;
  (void)split;
  if (open_hosted(&hosted, self->comm, context, place) && place == OVER_NCCL)
    check_counts(&hosted);
  close_hosted(&hosted);
}

/* The element count for tests of sent bytes. Every rank sends a segment to each other rank of its
 * host. The count makes segments a whole number of words long. */
enum { SENT_COUNT = 64 * 6 * 7 };

static void call_and_count_bytes(const struct gpu_rank *self, const struct hosts_split *split,
                                 enum hosts_place place, void *context) {
  const onebit_dtype_t dtypes[] = {ONEBIT_FLOAT32, ONEBIT_BFLOAT16, ONEBIT_FLOAT16};
  long sent[3] = {0};
  (void)context;
  for (int k = 0; place == OVER_NCCL && k < 3; k++) {
    const struct hosts_case what = CASE("bytes", SENT_COUNT, .dtype = dtypes[k], .block_size = 64);
    struct hosted hosted;
    if (open_hosted(&hosted, self->comm, &what.plan, place))
      sent[k] = check_counts(&hosted);
    close_hosted(&hosted);
  }
  long halves = 2L * SENT_COUNT * split->hosts * (split->each - 1);
  CHECK(place != OVER_NCCL || (sent[0] - sent[1] == halves && sent[0] - sent[2] == halves),
        "%ld bytes as float32, %ld as bfloat16, %ld as float16: not %ld fewer", sent[0], sent[1],
        sent[2], halves);
}

/* Checks that 16-bit inputs are sent without conversion, as 16 bits, inside a host. */
static void inputs_are_sent_as_they_are(void) {
  run_on_hosts(&hosts_splits[1], call_and_count_bytes, NULL);
}

static void no_host_waits(void) {
  struct plan_case many = cases[1].plan;
  run_on_hosts(&hosts_splits[1], call_and_count, &many);
}

/* Creates plans repeatedly, each time with another allocation of device memory that fails on one
 * rank. No rank may then get a plan. */
static void create_without_memory(const struct gpu_rank *self, const struct hosts_split *split,
                                  enum hosts_place place, void *context) {
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  onebit_status_t status = ONEBIT_ERROR_MEMORY;
  options.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
  options.device = ONEBIT_DEVICE_CUDA;
  for (long n = 1; place != ON_PROCESSOR && status != ONEBIT_OK; n++) {
    onebit_plan_t plan = NULL;
    if (self->rank == 0)
      emulation_fail_allocation(n);
    status = onebit_plan_create(self->comm, 4099, &options, &plan);
    CHECK(status == ONEBIT_OK || (status == ONEBIT_ERROR_MEMORY && !plan), "status %d, %s",
          (int)status, onebit_last_error());
    CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
  }
  emulation_fail_allocation(0);
  (void)split, (void)context;
}

static void without_memory_there_is_no_plan(void) {
  run_on_hosts(&hosts_splits[0], create_without_memory, NULL);
}

static const struct gpu_test tests[] = {
    {"has the bits of loopback", has_the_bits_of_loopback, ANY_DEVICE},
    {"no host waits", no_host_waits, EMULATED},
    {"inputs are sent as they are", inputs_are_sent_as_they_are, EMULATED},
    {"few bytes leave a host", few_bytes_leave_a_host, ANY_DEVICE},
    {"without memory there is no plan", without_memory_there_is_no_plan, EMULATED},
};
GPU_SUITE("hierarchical", tests)
