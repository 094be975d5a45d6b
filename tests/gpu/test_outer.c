/*
 * Tests the outer step on a device. Over every transport, its parameters, its consensus (the
 * parameters that all ranks agreed on) and its info must have the same bits as on the host, also
 * after it was saved or moved.
 */
#define _GNU_SOURCE
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "collectives/communicator.h"
#include "compression/numerics.h"
#include "onebit/checkpoint.h"
#include "optimizers/outer/outer.h"
#include "tests/gpu/training.h"

enum { TENSORS = 5, ELEMENTS = 320 + 77 + 1 + 2600, STEPS = 14, SKEW = 4 };

static const size_t counts[TENSORS] = {320, 77, 0, 1, 2600};

/* Flags of a case. PLAIN: the second tensor stays uncompressed. WRONG: in the seventh step a
 * parameter of the last rank is NaN. SAVED: after nine steps a new outer step replaces the old one
 * and loads its checkpoint. MOVED: each rank begins alone and is moved to the common communicator
 * after five steps. */
enum { PLAIN = 1, WRONG = 2, SAVED = 4, MOVED = 8 };

struct outer_case {
  const char *name;
  unsigned traits;
  onebit_outer_options_t options;
};

#define CASE(is_named, with, ...)                                                                  \
  {                                                                                                \
    .name = (is_named), .traits = (with), .options = {                                             \
      .size = sizeof(onebit_outer_options_t),                                                      \
      .threads = 1,                                                                                \
      __VA_ARGS__                                                                                  \
    }                                                                                              \
  }

static const struct outer_case cases[] = {
    CASE("one bit", WRONG, .bits = 1),
    CASE("two bits, uncompressed", PLAIN | WRONG, .rule = ONEBIT_OUTER_MOMENTUM, .bits = 2),
    CASE("four bits, Nesterov, saved", PLAIN | SAVED, .rule = ONEBIT_OUTER_NESTEROV),
    CASE("eight bits, fragments", WRONG, .bits = 8, .fragments = 3),
    CASE("float32, Nesterov", PLAIN, .rule = ONEBIT_OUTER_NESTEROV, .bits = ONEBIT_OUTER_DENSE),
    CASE("fragments, delay, uncompressed", PLAIN | WRONG, .fragments = 2, .delay = 2),
    CASE("delay, saved in flight", PLAIN | SAVED, .bits = 4, .delay = 1, .mixing = 0.7),
    CASE("weights", PLAIN | WRONG, .weighted = 1),
    CASE("weights, fragments, saved", SAVED, .weighted = 1, .fragments = 2, .bits = 2),
    CASE("one scale", WRONG, .block_size = ONEBIT_BLOCK_BUFFER),
    CASE("no error feedback", 0, .no_error_feedback = 1, .rule = ONEBIT_OUTER_MOMENTUM),
    CASE("bfloat16", WRONG | SAVED, .parameter_dtype = ONEBIT_BFLOAT16),
    CASE("float16, mixing", PLAIN, .parameter_dtype = ONEBIT_FLOAT16, .mixing = 0.5),
    CASE("large blocks, allgather", SAVED, .block_size = 2048,
         .schedule = ONEBIT_SCHEDULE_ALLGATHER),
    CASE("moved", PLAIN | MOVED, .bits = 1),
    CASE("moved, float16, momentum", MOVED, .rule = ONEBIT_OUTER_MOMENTUM,
         .parameter_dtype = ONEBIT_FLOAT16),
};

/* The results on the host after each step, and the consensus at the end. */
struct record {
  unsigned char parameters[TRAINING_RANKS][STEPS][ELEMENTS * sizeof(float)];
  onebit_status_t status[TRAINING_RANKS][STEPS];
  onebit_outer_info_t info[TRAINING_RANKS][STEPS];
  float consensus[TRAINING_RANKS][ELEMENTS];
  char directory[GPU_PATH]; /* for checkpoints */
};

/* --- A rank's outer step */

struct trained {
  const struct outer_case *what;
  int rank, size;
  bool device;
  onebit_outer_t outer;
  char *parameters, *memory; /* parameters on the host; on a device, memory in which they are not
                              * aligned to 16 bytes */
};

static size_t parameter_bytes(const struct outer_case *what) {
  return ELEMENTS * ob_dtype_size(what->options.parameter_dtype);
}

static char *place_of(const struct trained *learner) {
  return learner->device ? learner->memory + SKEW : learner->parameters;
}

static void send_parameters(const struct trained *learner) {
  if (learner->device)
    gpu_copy(place_of(learner), learner->parameters, parameter_bytes(learner->what));
}

static void fetch_parameters(const struct trained *learner) {
  if (learner->device)
    gpu_copy(learner->parameters, place_of(learner), parameter_bytes(learner->what));
}

static bool make_outer(struct trained *learner, onebit_comm_t comm) {
  onebit_tensor_t tensors[TENSORS];
  onebit_outer_options_t options = learner->what->options;
  const size_t size = ob_dtype_size(options.parameter_dtype);
  size_t first = 0;
  for (size_t t = 0; t < TENSORS; first += counts[t], t++)
    tensors[t] = (onebit_tensor_t){.parameter = place_of(learner) + first * size,
                                   .count = counts[t],
                                   .uncompressed = t == 1 && learner->what->traits & PLAIN};
  if (!options.block_size)
    options.block_size = 64;
  if (!options.local_steps)
    options.local_steps = 3;
  options.device = learner->device ? ONEBIT_DEVICE_CUDA : ONEBIT_DEVICE_HOST;
  return CHECK_STATUS(onebit_outer_create(comm, tensors, TENSORS, &options, &learner->outer),
                      ONEBIT_OK);
}

static bool open_trained(struct trained *learner, const struct outer_case *what, onebit_comm_t comm,
                         const struct gpu_rank *self, bool device) {
  *learner =
      (struct trained){.what = what, .rank = self->rank, .size = self->size, .device = device};
  learner->parameters = gpu_allocate(1, parameter_bytes(what));
  if (device && !CHECK_CUDA(cudaMalloc((void **)&learner->memory, parameter_bytes(what) + SKEW)))
    return false;
  send_parameters(learner);
  return make_outer(learner, comm);
}

static void close_trained(struct trained *learner) {
  onebit_outer_destroy(learner->outer);
  if (learner->device)
    CHECK_CUDA(cudaFree(learner->memory));
  free(learner->parameters);
}

/* Returns a value from -1 to 1. */
static float draw_noise(uint64_t n) {
  n = (n + 1) * UINT64_C(0x9e3779b97f4a7c15);
  n = (n ^ n >> 29) * UINT64_C(0xbf58476d1ce4e5b9);
  return (float)(n >> 40) / 8388608.0f - 1;
}

static onebit_status_t make_training_step(struct trained *learner, int step) {
  const onebit_dtype_t dtype = learner->what->options.parameter_dtype;
  fetch_parameters(learner);
  for (size_t i = 0; i < ELEMENTS; i++) {
    const float p = ob_load(learner->parameters, i, dtype);
    const float target =
        draw_noise(i) + draw_noise(i + 7919 * (uint64_t)(learner->rank + 1 + 8 * step));
    ob_store(learner->parameters, i, dtype, p - 0.1f * (p - target));
  }
  if (learner->what->traits & WRONG && step == 6 && learner->rank == learner->size - 1)
    ob_store(learner->parameters, 399, dtype, NAN);
  send_parameters(learner);
  const onebit_status_t status = onebit_outer_step(learner->outer, 1 + learner->rank + step % 2);
  fetch_parameters(learner);
  return status;
}

/* Replaces the outer step by another one, with other parameters, that loads its checkpoint. */
static bool replace_outer(struct trained *learner, onebit_comm_t comm, const char *directory) {
  if (!CHECK_STATUS(onebit_outer_save_files(learner->outer, directory), ONEBIT_OK))
    return false;
  onebit_outer_destroy(learner->outer);
  memset(learner->parameters, 0, parameter_bytes(learner->what));
  send_parameters(learner);
  return make_outer(learner, comm) &&
         CHECK_STATUS(onebit_outer_load_files(learner->outer, directory), ONEBIT_OK);
}

/* --- Recorded, and compared */

static onebit_outer_info_t read_info(const struct trained *learner) {
  onebit_outer_info_t info = {.size = sizeof info};
  CHECK_STATUS(onebit_outer_get_info(learner->outer, &info), ONEBIT_OK);
  return info;
}

static void read_consensus(const struct trained *learner, float values[ELEMENTS]) {
  size_t first = 0;
  for (size_t t = 0; t < TENSORS; first += counts[t], t++)
    CHECK_STATUS(onebit_outer_get_consensus(learner->outer, t, values + first), ONEBIT_OK);
}

static void record_step(const struct trained *learner, int step, onebit_status_t status,
                        struct record *record) {
  record->status[learner->rank][step] = status;
  record->info[learner->rank][step] = read_info(learner);
  memcpy(record->parameters[learner->rank][step], learner->parameters,
         parameter_bytes(learner->what));
}

#define CHECK_FACT(name, format, type)                                                             \
  CHECK(info.name == wanted->name, "step %d: " #name " is " format ", and should be " format,      \
        step, (type)info.name, (type)wanted->name)

static void check_info(const struct trained *learner, int step, const onebit_outer_info_t *wanted) {
  const onebit_outer_info_t info = read_info(learner);
  CHECK_FACT(steps, "%llu", unsigned long long);
  CHECK_FACT(exchanges, "%llu", unsigned long long);
  CHECK_FACT(skipped, "%llu", unsigned long long);
  CHECK_FACT(drift_norm, "%.17g", double);
  CHECK_FACT(residual_norm, "%.17g", double);
  CHECK_FACT(momentum_norm, "%.17g", double);
  CHECK_FACT(checksum, "%08x", unsigned);
  CHECK_FACT(in_flight, "%d", int);
}

static void compare_step(const struct trained *learner, int step, onebit_status_t status,
                         struct record *record) {
  CHECK(status == record->status[learner->rank][step], "step %d returned %d, not %d: %s", step,
        (int)status, (int)record->status[learner->rank][step], onebit_last_error());
  check_info(learner, step, &record->info[learner->rank][step]);
  training_check_parameters(learner->parameters, record->parameters[learner->rank][step], ELEMENTS,
                            learner->what->options.parameter_dtype, step);
}

typedef void after_step(const struct trained *learner, int step, onebit_status_t status,
                        struct record *record);

/* Makes steps, and a synchronisation in place of the last one. Returns false if the training cannot
 * continue. */
static bool make_steps(struct trained *learner, onebit_comm_t comm, struct record *record,
                       after_step *after) {
  const unsigned traits = learner->what->traits;
  for (int step = 0; step < STEPS - 1; step++) {
    if (step == 9 && learner->device && traits & SAVED &&
        !replace_outer(learner, comm, record->directory))
      return false;
    if (step == 5 && traits & MOVED &&
        !CHECK_STATUS(onebit_outer_move(learner->outer, comm), ONEBIT_OK))
      return false;
    after(learner, step, make_training_step(learner, step), record);
  }
  const onebit_status_t status = onebit_outer_synchronize(learner->outer);
  fetch_parameters(learner);
  after(learner, STEPS - 1, status, record);
  return true;
}

/* Runs case k on the host or on the device. Skips cases with MOVED over NCCL, where an outer step
 * cannot be moved. */
static void run_case(const void *all, size_t k, const struct gpu_rank *self, bool device,
                     void *at) {
  const struct outer_case *what = (const struct outer_case *)all + k;
  struct record *record = at;
  struct trained learner;
  onebit_comm_t alone = NULL;
  float consensus[ELEMENTS];
  if (what->traits & MOVED && !self->comm->transport->host_messages)
    return;
  check_case("%s, rank %d of %d%s", what->name, self->rank, self->size,
             device ? "" : " on the host");
  if (!device && self->rank == 0 && what->traits & SAVED && !record->directory[0])
    gpu_make_directory(record->directory);
  if (what->traits & MOVED)
    CHECK_STATUS(onebit_comm_create_self(&alone), ONEBIT_OK);
  if (open_trained(&learner, what, alone ? alone : self->comm, self, device) &&
      make_steps(&learner, self->comm, record, device ? compare_step : record_step)) {
    read_consensus(&learner, consensus);
    if (!device)
      memcpy(record->consensus[self->rank], consensus, sizeof consensus);
    CHECK(!memcmp(consensus, record->consensus[self->rank], sizeof consensus), "another consensus");
  }
  close_trained(&learner);
  onebit_comm_destroy(alone);
}

static bool saves_case(const void *all, size_t k) {
  return ((const struct outer_case *)all)[k].traits & SAVED;
}

static void check_own(const void *all, size_t k, int rank, const void *own, const void *record) {
  (void)all, (void)k;
  CHECK(!memcmp(((const struct record *)own)->parameters[rank],
                ((const struct record *)record)->parameters[rank],
                sizeof((const struct record *)own)->parameters[0]),
        "a rank on the host has other parameters");
}

static const struct training_table table = {
    cases, sizeof cases / sizeof cases[0], sizeof(struct record), run_case, saves_case, check_own};

static void steps_over_loopback(void) { training_run(&table, gpu_run_loopback); }
static void steps_over_device_memory(void) { training_run(&table, run_ranks_aware); }
static void steps_in_mixed_job(void) { training_run_mixed(&table); }
static void steps_over_nccl(void) { training_run(&table, run_ranks_nccl); }
static void steps_alone(void) { training_run(&table, run_ranks_self); }

/* --- Wrong calls */

static void try_create(onebit_comm_t comm, void *parameter, onebit_outer_options_t options,
                       onebit_status_t wanted, const char *message) {
  const onebit_tensor_t tensor = {.parameter = parameter, .count = 100};
  onebit_outer_t outer;
  options.device = ONEBIT_DEVICE_CUDA;
  CHECK_STATUS(onebit_outer_create(comm, &tensor, 1, &options, &outer), wanted);
  CHECK_MESSAGE(message);
  onebit_outer_destroy(outer);
}

static void check_refusals(const struct gpu_rank *self, void *context) {
  onebit_outer_options_t options = ONEBIT_OUTER_OPTIONS_INIT, sparse = ONEBIT_OUTER_OPTIONS_INIT;
  float *here = gpu_allocate(100, sizeof *here), *there;
  (void)context;
  sparse.bits = ONEBIT_OUTER_SPARSE;
  if (!CHECK_CUDA(cudaMalloc((void **)&there, 100 * sizeof *there)))
    return;
  gpu_copy(there, here, 100 * sizeof *here);
  try_create(self->comm, here, options, ONEBIT_ERROR_ARGUMENT, "tensors[0].parameter is ");
  try_create(self->comm, there, sparse, ONEBIT_ERROR_UNSUPPORTED, "ONEBIT_OUTER_SPARSE");
  here[71] = INFINITY;
  gpu_copy(there, here, 100 * sizeof *here);
  try_create(self->comm, there, options, ONEBIT_ERROR_ARGUMENT, "tensors[0].parameter[71] is inf");
  here[71] = (float)self->rank;
  gpu_copy(there, here, 100 * sizeof *here);
  try_create(self->comm, there, options, ONEBIT_ERROR_MISMATCH, "the parameters of all tensors");
  CHECK_CUDA(cudaFree(there));
  free(here);
}

static void refuses_what_is_wrong(void) { gpu_run_loopback(3, check_refusals, NULL); }

/* Flips one bit of a rank's consensus. All ranks must get an error, and none may apply the
 * exchange. */
static void check_differing_consensus(const struct gpu_rank *self, void *context) {
  static const struct outer_case what = CASE("differs", PLAIN, .local_steps = 1);
  struct trained it;
  float before[ELEMENTS], after[ELEMENTS];
  (void)context;
  if (open_trained(&it, &what, self->comm, self, true)) {
    const float wrong = 1e-3f;
    if (self->rank == 1)
      gpu_copy(it.outer->fragments[0].consensus + 400, &wrong, sizeof wrong);
    read_consensus(&it, before);
    CHECK_STATUS(make_training_step(&it, 0), ONEBIT_ERROR_MISMATCH);
    CHECK_MESSAGE("the consensus (its checksum) differs");
    read_consensus(&it, after);
    CHECK(!memcmp(before, after, sizeof before), "the consensus has changed");
  }
  close_trained(&it);
}

static void finds_ranks_that_differ(void) {
  gpu_run_loopback(3, check_differing_consensus, NULL);
  if (IS_EMULATED)
    run_ranks_aware(3, check_differing_consensus, NULL);
}

static const struct gpu_test tests[] = {
    {"over loopback", steps_over_loopback, ANY_DEVICE},
    {"over a transport of device memory", steps_over_device_memory, EMULATED},
    {"host and device in one job", steps_in_mixed_job, ANY_DEVICE},
    {"over NCCL", steps_over_nccl, ANY_DEVICE},
    {"alone", steps_alone, ANY_DEVICE},
    {"refuses what is wrong", refuses_what_is_wrong, ANY_DEVICE},
    {"finds ranks that differ", finds_ranks_that_differ, ANY_DEVICE},
};
GPU_SUITE("outer", tests)
