/*
 * A case on its ranks: every rank runs its part and reports; all reports together make the result.
 * A rank that cannot go on says so before the others begin, or takes part to the end, so none is
 * left waiting.
 */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/memory.h"
#include "onebit/onebit.h"
#include "tools/replay/replay.h"

#ifdef ONEBIT_HAVE_CUDA
#include <cuda_runtime_api.h>

#include "cuda/device.h"
#endif

/* A rank at work. */
struct run {
  const struct replay_rank *rank;
  const struct replay_case *recorded;
  struct replay_report report;
  size_t steps;  /* made */
  float *memory; /* what the arrays below are parts of */
  float *input, *got, *wanted;
  /* What the library reads and writes: copies of input, and of got, on the device. */
  onebit_device_t device;
  const struct ob_memory *library;
  float *library_input, *library_output;
  /* optimizers: the parameters before the step, both, and their longest updates */
  float *got_before, *wanted_before, *length;
  onebit_tensor_t *tensors;
  /* allreduce: the residual, and after it the recorded one */
  float *worker, *server;
};

__attribute__((format(printf, 2, 3))) static void fail(struct run *run, const char *format, ...) {
  if (run->report.failed)
    return;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(run->report.error, REPLAY_ERROR, format, arguments);
  va_end(arguments);
  run->report.failed = true;
}

/* False, and the run has failed, when the library says no. */
static bool passed(struct run *run, onebit_status_t status, const char *call) {
  if (status != ONEBIT_OK)
    fail(run, "%s after %zu steps: %s: %s", call, run->steps, onebit_status_string(status),
         onebit_last_error());
  return status == ONEBIT_OK;
}

/* --- Memory of the library: the host's, or a device's ------------------------------------------*/

#ifdef ONEBIT_HAVE_CUDA
/* Where there are several devices rank r takes number r, and begins again after the last. */
static const struct ob_memory *memory_of(struct run *run, onebit_device_t device) {
  int devices = 0;
  if (device == ONEBIT_DEVICE_HOST)
    return &ob_memory_host;
  cudaError_t error = cudaGetDeviceCount(&devices);
  if (error == cudaSuccess)
    error = cudaSetDevice(devices ? run->rank->rank % devices : 0);
  if (error != cudaSuccess)
    fail(run, "CUDA: %s", cudaGetErrorString(error));
  return &ob_memory_cuda;
}

/* The library's streams do not wait for copies. */
static void end_copy(const struct run *run) {
  if (run->library != &ob_memory_host)
    cudaDeviceSynchronize();
}
#else
static const struct ob_memory *memory_of(struct run *run, onebit_device_t device) {
  if (device != ONEBIT_DEVICE_HOST)
    fail(run, "this build is without CUDA: it has no device cuda");
  return &ob_memory_host;
}

static void end_copy(const struct run *run) { (void)run; }
#endif

/* With one end in memory of the host. A device that fails leaves what was there: the rank goes on,
 * since the others wait for it. */
static void copy(struct run *run, float *to, const float *from) {
  passed(run, run->library->copy(to, from, run->recorded->count * sizeof *to), "copying");
  end_copy(run);
}

/* All that this rank needs, so that nothing of its own can fail later. */
static void allocate(struct run *run, onebit_device_t device) {
  const struct replay_case *recorded = run->recorded;
  size_t count = recorded->count, padded = recorded->padded;
  run->library = memory_of(run, device);
  run->library_input = run->library->allocate(count, sizeof(float));
  run->library_output = run->library->allocate(count, sizeof(float));
  run->memory = calloc(6 * count + 4 * padded, sizeof *run->memory);
  run->tensors = calloc(recorded->tensors + 1, sizeof *run->tensors);
  if (!run->library_input || !run->library_output || !run->memory || !run->tensors) {
    fail(run, "no memory for %zu values", count);
    return;
  }
  run->input = run->memory;
  run->got = run->input + count;
  run->wanted = run->got + count;
  run->got_before = run->wanted + count;
  run->wanted_before = run->got_before + count;
  run->length = run->wanted_before + count;
  run->worker = run->length + count;
  run->server = run->worker + 2 * padded;
}

/* --- Values ------------------------------------------------------------------------------------*/

/* A file that cannot be read gives zeros: the rank goes on, since the others wait for it. */
static void read_values(struct run *run, enum replay_file file, size_t first, size_t count,
                        float *values) {
  char error[REPLAY_ERROR];
  if (!replay_case_read(run->recorded, file, first, count, values, error))
    fail(run, "%s", error);
}

/* This rank's place in an array [steps][world][count]. */
static size_t own_position(const struct run *run, size_t step) {
  const struct replay_case *recorded = run->recorded;
  return (step * recorded->world + (size_t)run->rank->rank) * recorded->count;
}

static void read_input(struct run *run, size_t step) {
  read_values(run, REPLAY_INPUT, own_position(run, step), run->recorded->count, run->input);
  copy(run, run->library_input, run->input);
}

/* What a step left, into `got` and the digest. */
static void read_output(struct run *run) {
  copy(run, run->got, run->library_output);
  run->report.digest =
      ob_hash(run->report.digest, run->got, run->recorded->count * sizeof *run->got);
  run->steps++;
}

/* `norm` as a square: what the difference is measured by. */
static void add_drift(struct run *run, int which, const float *got, const float *recorded,
                      size_t count, double norm) {
  for (size_t i = 0; i < count; i++)
    run->report.drift[which].difference += pow((double)got[i] - (double)recorded[i], 2);
  run->report.drift[which].norm += norm;
}

static double square_sum(const float *values, size_t count) {
  double sum = 0;
  for (size_t i = 0; i < count; i++)
    sum += (double)values[i] * (double)values[i];
  return sum;
}

/* --- Allreduce ---------------------------------------------------------------------------------*/

static void compare_residuals(struct run *run, onebit_plan_t plan, size_t share) {
  size_t padded = run->recorded->padded, rank = (size_t)run->rank->rank;
  float *worker = run->worker + padded, *server = run->server + share;
  if (!passed(run, onebit_plan_export_residual(plan, run->worker, run->server),
              "onebit_plan_export_residual"))
    return;
  read_values(run, REPLAY_WORKER_ERROR, rank * padded, padded, worker);
  read_values(run, REPLAY_SERVER_ERROR, rank * share, share, server);
  /* By the last result: where compressing is exact a residual is only rounding. */
  double result = square_sum(run->wanted, run->recorded->count);
  add_drift(run, 0, run->worker, worker, padded, result);
  add_drift(run, 1, run->server, server, share, result / (double)run->rank->size);
}

static void run_allreduce_steps(struct run *run, onebit_plan_t plan, size_t share) {
  const struct replay_case *recorded = run->recorded;
  for (size_t step = 0; step < recorded->steps; step++) {
    read_input(run, step);
    read_values(run, REPLAY_OUTPUT, step * recorded->count, recorded->count, run->wanted);
    if (!passed(run, onebit_allreduce(run->library_input, run->library_output, plan),
                "onebit_allreduce"))
      return;
    read_output(run);
    replay_compare(&run->report.tally, step, run->got, run->wanted, NULL, recorded->count);
  }
  compare_residuals(run, plan, share);
}

static void run_allreduce(struct run *run) {
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  onebit_plan_info_t info = {.size = sizeof info};
  onebit_plan_t plan;
  size_t padded = run->recorded->padded, share = padded / run->recorded->world;
  options.profile = ONEBIT_PROFILE_DEEPSPEED;
  options.device = run->device;
  if (!passed(run, onebit_plan_create(run->rank->comm, run->recorded->count, &options, &plan),
              "onebit_plan_create"))
    return;
  /* Every rank finds the same here, so none goes on alone. */
  onebit_plan_get_info(plan, &info);
  if (info.worker_residual_count == padded && info.server_residual_count == share)
    run_allreduce_steps(run, plan, share);
  else
    fail(run, "padded is %zu, in shares of %zu; the library pads to %zu, in shares of %zu", padded,
         share, info.worker_residual_count, info.server_residual_count);
  onebit_plan_destroy(plan);
}

/* --- Optimizers --------------------------------------------------------------------------------*/

/* What all kinds have. To DeepSpeed a step of 0 is as good as 1: one step of warm-up. The library
 * has another use for 0. */
#define SET_COMMON(options, run, freeze)                                                           \
  do {                                                                                             \
    (options).common.profile = ONEBIT_PROFILE_DEEPSPEED;                                           \
    (options).common.device = (run)->device;                                                       \
    (options).beta1 = (run)->recorded->betas[0];                                                   \
    (options).beta2 = (run)->recorded->betas[1];                                                   \
    (options).epsilon = (run)->recorded->epsilon;                                                  \
    (options).freeze = (run)->recorded->freeze_step ? (run)->recorded->freeze_step : 1;            \
  } while (0)

static bool create_adam(struct run *run, onebit_optimizer_t *optimizer) {
  onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
  SET_COMMON(options, run, freeze_step);
  return passed(run,
                onebit_adam_create(run->rank->comm, run->tensors, run->recorded->tensors, &options,
                                   optimizer),
                "onebit_adam_create");
}

static bool create_lamb(struct run *run, onebit_optimizer_t *optimizer) {
  const struct replay_case *recorded = run->recorded;
  onebit_lamb_options_t options = ONEBIT_LAMB_OPTIONS_INIT;
  SET_COMMON(options, run, freeze_step);
  options.max_coefficient = recorded->max_coefficient;
  options.min_coefficient = recorded->min_coefficient;
  options.coefficient_beta = recorded->coefficient_beta;
  options.max_factor = recorded->max_factor;
  options.min_factor = recorded->min_factor;
  options.factor_change = recorded->factor_change;
  return passed(
      run,
      onebit_lamb_create(run->rank->comm, run->tensors, recorded->tensors, &options, optimizer),
      "onebit_lamb_create");
}

static bool create_zero_one_adam(struct run *run, onebit_optimizer_t *optimizer) {
  const struct replay_case *recorded = run->recorded;
  onebit_zero_one_adam_options_t options = ONEBIT_ZERO_ONE_ADAM_OPTIONS_INIT;
  SET_COMMON(options, run, variance_freeze_step);
  options.variance_update_scaler = recorded->variance_update_scaler;
  options.local_step_scaler = recorded->local_step_scaler;
  options.local_step_clipper = recorded->local_step_clipper;
  return passed(run,
                onebit_zero_one_adam_create(run->rank->comm, run->tensors, recorded->tensors,
                                            &options, optimizer),
                "onebit_zero_one_adam_create");
}

static bool (*const create[REPLAY_KINDS])(struct run *, onebit_optimizer_t *) = {
    [REPLAY_ADAM] = create_adam,
    [REPLAY_LAMB] = create_lamb,
    [REPLAY_ZERO_ONE_ADAM] = create_zero_one_adam};

static onebit_optimizer_info_t info_of(onebit_optimizer_t optimizer) {
  onebit_optimizer_info_t info = {.size = sizeof info};
  onebit_optimizer_get_info(optimizer, &info);
  return info;
}

/* Checks, before a step, that 1-bit Adam or LAMB is in the stage that was recorded: they average
 * gradients in full precision as long as they are in their warm-up. One rank alone does so always,
 * whatever the stage. */
static void check_stage(struct run *run, onebit_optimizer_t optimizer, size_t step) {
  bool dense = run->recorded->dense_steps[step] == '1';
  if (run->recorded->kind != REPLAY_ZERO_ONE_ADAM &&
      (info_of(optimizer).stage == ONEBIT_STAGE_WARMUP) != dense)
    fail(run, "step %zu: the optimizer is in its %s stage, the recorded one was in its %s stage",
         step, dense ? "compressed" : "warm-up", dense ? "warm-up" : "compressed");
}

/* After a step: 0/1 Adam does so by its schedule. *count: in how many steps before this one. */
static void check_exchange(struct run *run, onebit_optimizer_t optimizer, size_t step,
                           uint64_t *count) {
  bool dense = run->recorded->dense_steps[step] == '1';
  uint64_t now = info_of(optimizer).exchanges[0];
  if (run->recorded->kind == REPLAY_ZERO_ONE_ADAM && (now > *count) != dense)
    fail(run, "step %zu: the optimizer averaged gradients %s, the recorded one %s", step,
         dense ? "in bits or not at all" : "in full precision",
         dense ? "in full precision" : "did not do so in full precision");
  *count = now;
}

/* A parameter's update is the shorter one of the recorded step and ours, so that neither a damaged
 * record nor a wild result widens its own allowance; its length is that of the longest so far. */
static void compare_parameters(struct run *run, size_t step) {
  size_t count = run->recorded->count;
  for (size_t i = 0; i < count; i++) {
    float update = fminf(fabsf(run->wanted[i] - run->wanted_before[i]),
                         fabsf(run->got[i] - run->got_before[i]));
    run->length[i] = fmaxf(run->length[i], update);
  }
  replay_compare(&run->report.tally, step, run->got, run->wanted, run->length, count);
  memcpy(run->wanted_before, run->wanted, count * sizeof *run->wanted);
  memcpy(run->got_before, run->got, count * sizeof *run->got);
}

/* The library tells only the norm of its momentum. */
static void compare_momentum(struct run *run, onebit_optimizer_t optimizer) {
  if (run->rank->rank != 0)
    return;
  read_values(run, REPLAY_MOMENTUM, 0, run->recorded->count, run->wanted);
  double squares = square_sum(run->wanted, run->recorded->count);
  run->report.drift[0].difference = pow(info_of(optimizer).momentum_norm - sqrt(squares), 2);
  run->report.drift[0].norm = squares;
}

static void run_optimizer_steps(struct run *run, onebit_optimizer_t optimizer) {
  const struct replay_case *recorded = run->recorded;
  uint64_t dense_steps = 0;
  for (size_t step = 0; step < recorded->steps; step++) {
    size_t row = recorded->params_ranks == 1 ? step * recorded->count : own_position(run, step);
    read_input(run, step);
    read_values(run, REPLAY_OUTPUT, row, recorded->count, run->wanted);
    check_stage(run, optimizer, step);
    if (!passed(run, onebit_optimizer_step(optimizer, (float)recorded->learning_rate),
                "onebit_optimizer_step"))
      return;
    read_output(run);
    check_exchange(run, optimizer, step, &dense_steps);
    compare_parameters(run, step);
  }
  compare_momentum(run, optimizer);
}

static void run_optimizer(struct run *run) {
  const struct replay_case *recorded = run->recorded;
  onebit_optimizer_t optimizer;
  read_values(run, REPLAY_START, 0, recorded->count, run->got);
  copy(run, run->library_output, run->got);
  memcpy(run->wanted_before, run->got, recorded->count * sizeof *run->got);
  memcpy(run->got_before, run->got, recorded->count * sizeof *run->got);
  for (size_t t = 0, first = 0; t < recorded->tensors; first += recorded->tensor_counts[t++])
    run->tensors[t] = (onebit_tensor_t){.parameter = run->library_output + first,
                                        .gradient = run->library_input + first,
                                        .count = recorded->tensor_counts[t],
                                        .weight_decay = (float)recorded->weight_decay};
  if (!create[recorded->kind](run, &optimizer))
    return;
  run_optimizer_steps(run, optimizer);
  onebit_optimizer_destroy(optimizer);
}

/* --- What all reports come to ------------------------------------------------------------------*/

struct whole {
  struct replay_result *result;
  uint64_t fingerprint, digest; /* of rank 0 */
  bool separate;                /* ranks have parameters of their own */
  double difference[2], norm[2];
};

static void whole_fails(struct whole *whole, int rank, const char *error) {
  if (whole->result->verdict == REPLAY_FAILED)
    return;
  whole->result->verdict = REPLAY_FAILED;
  if (rank == 0)
    snprintf(whole->result->error, REPLAY_ERROR, "%s", error);
  else
    snprintf(whole->result->error, REPLAY_ERROR, "rank %d: %.*s", rank, REPLAY_ERROR - 32, error);
}

static void add_report(void *context, int rank, const struct replay_report *report) {
  struct whole *whole = context;
  if (rank == 0) {
    whole->fingerprint = report->fingerprint;
    whole->digest = report->digest;
  }
  if (report->failed)
    whole_fails(whole, rank, report->error);
  else if (report->fingerprint != whole->fingerprint)
    whole_fails(whole, rank, "its case.txt is another one than rank 0's");
  else if (report->digest != whole->digest && !whole->separate)
    whole_fails(whole, rank, "its results have other bits than rank 0's");
  if (rank == 0 || whole->separate)
    replay_tally_add(&whole->result->tally, &report->tally);
  for (int k = 0; k < 2; k++) {
    whole->difference[k] += report->drift[k].difference;
    whole->norm[k] += report->drift[k].norm;
  }
}

static void share(struct run *run, struct replay_result *result) {
  static const char *const names[2][2] = {{"worker residual", "server residual"},
                                          {"momentum norm", NULL}};
  struct whole whole = {.result = result, .separate = run->recorded->params_ranks > 1};
  *result = (struct replay_result){.verdict = REPLAY_OK};
  replay_share(run->rank, &run->report, add_report, &whole);
  for (int k = 0; k < 2; k++) {
    bool equal = whole.difference[k] == 0;
    result->drifts[k].name = names[run->recorded->kind != REPLAY_ALLREDUCE][k];
    result->drifts[k].value = equal ? 0 : sqrt(whole.difference[k] / whole.norm[k]);
  }
}

void replay_run(const struct replay_rank *rank, const struct replay_case *recorded, bool opened,
                const char *error, onebit_device_t device, struct replay_result *result) {
  struct run run = {.rank = rank, .recorded = recorded, .device = device};
  run.report.fingerprint = recorded->fingerprint;
  if (!opened)
    fail(&run, "%s", error);
  else if (recorded->world != (size_t)rank->size)
    fail(&run, "%s/case.txt: world is %zu, given %d rank%s", recorded->directory, recorded->world,
         rank->size, rank->size == 1 ? "" : "s");
  else
    allocate(&run, device);
  share(&run, result);
  if (result->verdict == REPLAY_OK) {
    (recorded->kind == REPLAY_ALLREDUCE ? run_allreduce : run_optimizer)(&run);
    share(&run, result);
    if (result->verdict == REPLAY_OK &&
        !replay_allowed(recorded->kind, &result->tally, result->error))
      result->verdict = REPLAY_FAILED;
  }
  if (run.library) {
    run.library->release(run.library_input);
    run.library->release(run.library_output);
  }
  free(run.tensors);
  free(run.memory);
}
