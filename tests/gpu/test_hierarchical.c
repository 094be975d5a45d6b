/*
 * Hierarchical plans on a device, staged over loopback and over NCCL, against those of processors:
 * the same hosts, the same inputs, and the same bits of every result and residual; and where a rank
 * is in trouble, the same end on all ranks, with nothing changed.
 */
#define _DEFAULT_SOURCE /* for barriers */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compression/numerics.h"
#include "onebit/cuda.h"
#include "tests/codec_values.h"
#include "tests/gpu/hosts.h"

#ifdef ONEBIT_EMULATED_CUDA
#include <emulation.h>
#include <pthread.h>
#endif

enum { COUNT = 9001, CALLS = 7, SPOILT = 2, REFUSED = 3, CAPTURED = 4 };

struct plan_case {
  const char *name;
  size_t count;
  onebit_plan_options_t options;
};

#define OPTIONS(...)                                                                               \
  { .size = sizeof(onebit_plan_options_t), __VA_ARGS__ }

static const struct plan_case cases[] = {
    {"defaults", COUNT, OPTIONS(.block_size = 0)},
    {"many messages", 3001, OPTIONS(.block_size = 64, .chunk_size = 128)},
    {"bfloat16, mean of absolute values", 5000,
     OPTIONS(.dtype = ONEBIT_BFLOAT16, .scale = ONEBIT_SCALE_MEAN_ABSOLUTE, .block_size = 32)},
    {"float16, nothing kept", 4097,
     OPTIONS(.dtype = ONEBIT_FLOAT16, .block_size = 256, .no_error_feedback = 1)},
    {"dense", COUNT, OPTIONS(.wire = ONEBIT_WIRE_DENSE)},
    {"dense, many messages, float16", 2999,
     OPTIONS(.wire = ONEBIT_WIRE_DENSE, .dtype = ONEBIT_FLOAT16, .block_size = 64,
             .chunk_size = 64)},
    {"8 bits", COUNT, OPTIONS(.bits = 8)},
    {"2 bits, many messages", 3001, OPTIONS(.bits = 2, .block_size = 64, .chunk_size = 128)},
    {"4 bits, bfloat16, largest", 5000,
     OPTIONS(.bits = 4, .dtype = ONEBIT_BFLOAT16, .scale = ONEBIT_SCALE_LARGEST,
             .block_size = 256)},
    {"fewer elements than ranks", 3, OPTIONS(.block_size = 32)},
    {"none", 0, OPTIONS(.block_size = 0)},
};
#define CASES (sizeof cases / sizeof cases[0])

/* The results of a rank over loopback. */
struct record {
  unsigned char results[CALLS][COUNT * sizeof(float)];
  onebit_status_t status[CALLS];
  float worker[COUNT], server[COUNT];
  onebit_plan_info_t info;
};

/* A rank's plan and buffers, where the plan is, and on the host. */
struct part {
  const struct plan_case *what;
  int rank, size;
  bool device, on_stream; /* on_stream: no host takes part */
  onebit_plan_t plan;
  size_t bytes;
  void *in, *out;
  unsigned char *sent, *received;
  cudaStream_t stream;
  cudaGraphExec_t graph;
};

static void *take(bool device, size_t bytes) {
  void *memory = NULL;
  if (!device)
    return gpu_allocate(bytes + 1, 1);
  CHECK_CUDA(cudaMalloc(&memory, bytes + 1));
  CHECK_CUDA(cudaMemset(memory, 0, bytes + 1));
  CHECK_CUDA(cudaStreamSynchronize(NULL));
  return memory;
}

static bool open_part(struct part *part, onebit_comm_t comm) {
  onebit_plan_options_t options = part->what->options;
  options.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
  options.device = part->device ? ONEBIT_DEVICE_CUDA : ONEBIT_DEVICE_HOST;
  part->bytes = part->what->count * ob_dtype_size(options.dtype);
  part->in = take(part->device, part->bytes);
  part->out = take(part->device, part->bytes);
  part->sent = gpu_allocate(part->bytes + 1, 1);
  part->received = gpu_allocate(part->bytes + 1, 1);
  if (part->device)
    CHECK_CUDA(cudaStreamCreateWithFlags(&part->stream, cudaStreamNonBlocking));
  return CHECK_STATUS(onebit_plan_create(comm, part->what->count, &options, &part->plan),
                      ONEBIT_OK);
}

static void close_part(struct part *part) {
  CHECK_STATUS(onebit_plan_destroy(part->plan), ONEBIT_OK);
  if (part->graph)
    CHECK_CUDA(cudaGraphExecDestroy(part->graph));
  if (part->device) {
    CHECK_CUDA(cudaStreamDestroy(part->stream));
    CHECK_CUDA(cudaFree(part->in));
    CHECK_CUDA(cudaFree(part->out));
  } else {
    free(part->in);
    free(part->out);
  }
  free(part->sent);
  free(part->received);
}

/* One rank's last element is not a number: only the host it is on can tell the others. */
static void make_input(struct part *part, int call) {
  const size_t count = part->what->count;
  const onebit_dtype_t dtype = part->what->options.dtype;
  for (size_t i = 0; i < count; i++)
    ob_store(part->sent, i, dtype,
             value_at(i, (uint32_t)(31 * call + part->rank), VALUES_GRADIENTS));
  if (count && call == SPOILT && part->rank == part->size - 1)
    ob_store(part->sent, count - 1, dtype, NAN);
  if (part->device)
    gpu_copy(part->in, part->sent, part->bytes);
  else
    memcpy(part->in, part->sent, part->bytes);
}

static onebit_status_t call_on_stream(struct part *part, const void *in) {
  onebit_status_t status = onebit_allreduce_stream(in, part->out, part->plan, part->stream);
  CHECK_CUDA(cudaStreamSynchronize(part->stream));
  onebit_status_t settled = onebit_plan_synchronize(part->plan);
  return status == ONEBIT_OK ? settled : status;
}

/* Captured once, and launched from then on. */
static onebit_status_t call_in_graph(struct part *part) {
  cudaGraph_t graph = NULL;
  if (!part->graph) {
    CHECK_CUDA(cudaStreamBeginCapture(part->stream, cudaStreamCaptureModeThreadLocal));
    CHECK_STATUS(onebit_allreduce_stream(part->in, part->out, part->plan, part->stream), ONEBIT_OK);
    CHECK_CUDA(cudaStreamEndCapture(part->stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&part->graph, graph, 0));
    CHECK_CUDA(cudaGraphDestroy(graph));
  }
  CHECK_CUDA(cudaGraphLaunch(part->graph, part->stream));
  CHECK_CUDA(cudaStreamSynchronize(part->stream));
  return onebit_plan_synchronize(part->plan);
}

static onebit_status_t call(struct part *part, int number) {
  const void *in = number == REFUSED && part->rank == 0 ? NULL : part->in;
  if (part->on_stream && number >= CAPTURED)
    return call_in_graph(part);
  if (part->device && number % 2 == 0)
    return call_on_stream(part, in);
  return onebit_allreduce(in, part->out, part->plan);
}

static void check_info(const onebit_plan_info_t *got, const onebit_plan_info_t *wanted) {
  CHECK(got->worker_residual_start == wanted->worker_residual_start &&
            got->worker_residual_count == wanted->worker_residual_count &&
            got->server_residual_start == wanted->server_residual_start &&
            got->server_residual_count == wanted->server_residual_count,
        "keeps other elements");
  CHECK(got->schedule == ONEBIT_SCHEDULE_HIERARCHICAL && got->wire_bytes == wanted->wire_bytes &&
            got->chunks == wanted->chunks && got->chunk_size == wanted->chunk_size,
        "%llu bytes in %zu chunks", (unsigned long long)got->wire_bytes, got->chunks);
}

/* The words name the rank that is in trouble, wherever it is. Where values themselves travel, all
 * ranks are who add it up. */
static void check_words(const struct part *part, int number) {
  char wanted[64] = "";
  if (part->what->count && part->what->options.wire == ONEBIT_WIRE_BITS && number == SPOILT)
    snprintf(wanted, sizeof wanted, "a value on rank %d is not finite", part->size - 1);
  if (part->what->count && number == REFUSED)
    snprintf(wanted, sizeof wanted, part->rank ? "rank 0 could not" : "sendbuf is NULL");
  CHECK(strstr(onebit_last_error(), wanted), "call %d: not '%s' but '%s'", number, wanted,
        onebit_last_error());
}

/* Notes what the call came to, or compares it. */
static void after_call(struct part *part, int number, onebit_status_t status,
                       struct record *record) {
  if (part->device)
    CHECK_CUDA(cudaMemcpy(part->received, part->out, part->bytes, cudaMemcpyDeviceToHost));
  else
    memcpy(part->received, part->out, part->bytes);
  if (!part->device) {
    record->status[number] = status;
    memcpy(record->results[number], part->received, part->bytes);
    return;
  }
  if (part->on_stream)
    check_words(part, number);
  CHECK(status == record->status[number], "call %d: status %d, not %d (%s)", number, (int)status,
        (int)record->status[number], onebit_last_error());
  CHECK(!memcmp(part->received, record->results[number], part->bytes),
        "call %d: the result has other bits", number);
}

static void after_all(struct part *part, struct record *record) {
  float *worker = gpu_allocate(COUNT, sizeof *worker),
        *server = gpu_allocate(COUNT, sizeof *server);
  onebit_plan_info_t info = {.size = sizeof info};
  CHECK_STATUS(onebit_plan_get_info(part->plan, &info), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_export_residual(part->plan, worker, server), ONEBIT_OK);
  if (part->device) {
    check_info(&info, &record->info);
    CHECK(!memcmp(worker, record->worker, sizeof record->worker), "other worker residuals");
    CHECK(!memcmp(server, record->server, sizeof record->server), "other server residuals");
  } else {
    record->info = info;
    memcpy(record->worker, worker, sizeof record->worker);
    memcpy(record->server, server, sizeof record->server);
  }
  free(worker);
  free(server);
}

struct shared {
  const struct plan_case *what;
  struct record *records;
};

static void on_rank(const struct gpu_rank *self, const struct hosts_split *split,
                    enum hosts_place place, void *context) {
  const struct shared *shared = context;
  struct record *record = &shared->records[self->rank];
  struct part part = {.what = shared->what,
                      .rank = self->rank,
                      .size = self->size,
                      .device = place != ON_PROCESSOR,
                      .on_stream = place == OVER_NCCL};
  check_case("%s: %d hosts of %d%s, rank %d", shared->what->name, split->hosts, split->each,
             split->in_turns ? " in turns" : "", self->rank);
  if (open_part(&part, self->comm)) {
    for (int number = 0; number < CALLS; number++) {
      make_input(&part, number);
      after_call(&part, number, call(&part, number), record);
    }
    after_all(&part, record);
  }
  close_part(&part);
}

static void has_the_bits_of_loopback(void) {
  struct record *records = gpu_area(HOSTS_MOST_RANKS * sizeof *records);
  const struct sample sample =
      sample_product("hierarchical", 1, (const size_t[]){HOSTS_SPLITS, CASES}, 2);
  for (size_t k = 0; k < sample.count; k++) {
    struct shared shared = {&cases[sample.rows[k] / HOSTS_SPLITS], records};
    hosts_run(&hosts_splits[sample.rows[k] % HOSTS_SPLITS], on_rank, &shared);
  }
  free(sample.rows);
}

/* Errors must be as over loopback; here they are also checked to be errors. */
static void check_ends(const struct gpu_rank *self, const struct hosts_split *split,
                       enum hosts_place place, void *context) {
  const struct shared *shared = context;
  const struct record *record = &shared->records[self->rank];
  on_rank(self, split, place, context);
  CHECK(record->status[SPOILT] == ONEBIT_SKIPPED, "a skipped call ends with %d",
        (int)record->status[SPOILT]);
  CHECK(record->status[REFUSED] == (self->rank ? ONEBIT_ERROR_PEER : ONEBIT_ERROR_ARGUMENT),
        "a wrong argument ends with %d", (int)record->status[REFUSED]);
  for (int number = 0; number < CALLS; number++)
    CHECK(number == SPOILT || number == REFUSED || record->status[number] == ONEBIT_OK,
          "call %d ends with %d", number, (int)record->status[number]);
}

static void trouble_reaches_all_hosts(void) {
  struct record *records = gpu_area(HOSTS_MOST_RANKS * sizeof *records);
  struct shared shared = {&cases[0], records};
  hosts_run(&hosts_splits[2], check_ends, &shared);
}

/* A host sends 2 (H - 1) / H n of n elements in bits, and scales and headers. */
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
    hosts_run(&hosts_splits[s], check_bytes, NULL);
}

#ifdef ONEBIT_EMULATED_CUDA
static pthread_barrier_t together;

/* Counts are of all ranks: they begin and end together. */
static void check_counts(struct part *part) {
  make_input(part, 0);
  pthread_barrier_wait(&together);
  emulation_reset_counts();
  pthread_barrier_wait(&together);
  CHECK_STATUS(onebit_allreduce_stream(part->in, part->out, part->plan, part->stream), ONEBIT_OK);
  pthread_barrier_wait(&together);
  struct emulation_counters counts = emulation_counts();
  pthread_barrier_wait(&together);
  CHECK(counts.allocations == 0 && counts.synchronisations == 0, "%ld allocations, %ld waits",
        counts.allocations, counts.synchronisations);
  CHECK_CUDA(cudaStreamSynchronize(part->stream));
  CHECK_STATUS(onebit_plan_synchronize(part->plan), ONEBIT_OK);
}

static void call_and_count(const struct gpu_rank *self, const struct hosts_split *split,
                           enum hosts_place place, void *context) {
  struct part part = {.what = context, .rank = self->rank, .size = self->size};
  (void)split;
  part.device = place != ON_PROCESSOR;
  if (open_part(&part, self->comm) && place == OVER_NCCL)
    check_counts(&part);
  close_part(&part);
}

/* Every rank sends the others of its host their segments, whose lengths are whole words. */
enum { SENT_COUNT = 64 * 6 * 7 };

static void call_and_count_bytes(const struct gpu_rank *self, const struct hosts_split *split,
                                 enum hosts_place place, void *context) {
  const onebit_dtype_t dtypes[] = {ONEBIT_FLOAT32, ONEBIT_BFLOAT16, ONEBIT_FLOAT16};
  long sent[3] = {0};
  (void)context;
  for (int k = 0; place == OVER_NCCL && k < 3; k++) {
    const struct plan_case what = {"bytes", SENT_COUNT,
                                   OPTIONS(.dtype = dtypes[k], .block_size = 64)};
    struct part part = {.what = &what, .rank = self->rank, .size = self->size, .device = true};
    if (open_part(&part, self->comm)) {
      check_counts(&part);
      sent[k] = emulation_counts().sent_bytes;
    }
    pthread_barrier_wait(&together);
    close_part(&part);
  }
  long halves = 2L * SENT_COUNT * split->hosts * (split->each - 1);
  CHECK(place != OVER_NCCL || (sent[0] - sent[1] == halves && sent[0] - sent[2] == halves),
        "%ld bytes as float32, %ld as bfloat16, %ld as float16: not %ld fewer", sent[0], sent[1],
        sent[2], halves);
}
#endif

/* Inputs of 16 bits travel as they are inside a host. */
static void inputs_are_sent_as_they_are(void) {
#ifdef ONEBIT_EMULATED_CUDA
  const struct hosts_split *split = &hosts_splits[1];
  pthread_barrier_init(&together, NULL, (unsigned)(split->hosts * split->each));
  hosts_run(split, call_and_count_bytes, NULL);
  pthread_barrier_destroy(&together);
#else
  SKIP("only the emulated device counts bytes");
#endif
}

static void no_host_waits(void) {
#ifdef ONEBIT_EMULATED_CUDA
  struct plan_case many = cases[1];
  pthread_barrier_init(&together, NULL, (unsigned)(hosts_splits[1].hosts * hosts_splits[1].each));
  hosts_run(&hosts_splits[1], call_and_count, &many);
  pthread_barrier_destroy(&together);
#else
  SKIP("only the emulated device counts waits");
#endif
}

/* Each allocation of a device's fails in its turn, on some rank: then no rank has a plan. */
#ifdef ONEBIT_EMULATED_CUDA
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
#endif

static void without_memory_there_is_no_plan(void) {
#ifdef ONEBIT_EMULATED_CUDA
  hosts_run(&hosts_splits[0], create_without_memory, NULL);
#else
  SKIP("only on the emulated device can an allocation be made to fail");
#endif
}

static const struct gpu_test tests[] = {
    {"has the bits of loopback", has_the_bits_of_loopback, false},
    {"trouble reaches all hosts", trouble_reaches_all_hosts, false},
    {"no host waits", no_host_waits, false},
    {"inputs are sent as they are", inputs_are_sent_as_they_are, false},
    {"few bytes leave a host", few_bytes_leave_a_host, false},
    {"without memory there is no plan", without_memory_there_is_no_plan, false},
};
GPU_SUITE("hierarchical", tests)
