/*
 * A case on its ranks: every rank runs its part and reports; all reports together make the result.
 * A rank that cannot go on says so before the others begin, or takes part to the end, so none is
 * left waiting.
 */
#include "tools/replay/run.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "onebit/onebit.h"
#include "tools/replay/create.h"
#include "tools/replay/memory.h"

/* What one rank has to say. */
struct report {
  bool failed;
  char words[REPLAY_WORDS]; /* the first thing that went wrong */
  uint64_t fingerprint;     /* of case.txt */
  uint64_t digest;          /* of all results' bits */
  struct replay_tally tally;
  struct {
    double difference, norm; /* squares */
  } drift[2];
};
_Static_assert(sizeof(struct report) <= REPLAY_PART, "a report is shared as one part");

/* A rank at work. */
struct run {
  const struct replay_rank *rank;
  const struct replay_case *recorded;
  struct report report;
  size_t steps;  /* made */
  float *memory; /* what the arrays below are parts of */
  float *input, *got, *wanted;
  struct replay_memory library; /* what it reads and writes: copies of input, and of got */
  /* optimizers: the parameters before the step, both, and their longest updates */
  float *got_before, *wanted_before, *length;
  onebit_tensor_t *tensors;
  /* allreduce: the residual, and after it the recorded one */
  float *worker, *server;
};

static void fail(struct run *run, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void fail(struct run *run, const char *format, ...) {
  if (run->report.failed)
    return;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(run->report.words, REPLAY_WORDS, format, arguments);
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

/* A file that cannot be read gives zeros: the rank goes on, since the others wait for it. */
static void read_values(struct run *run, enum replay_file file, size_t first, size_t count,
                        float *values) {
  char words[REPLAY_WORDS];
  if (!replay_case_read(run->recorded, file, first, count, values, words))
    fail(run, "%s", words);
}

/* A device that fails leaves what was there: the rank goes on, as above. */
static void copy(struct run *run, float *to, const float *from) {
  char words[REPLAY_WORDS];
  if (!replay_memory_copy(&run->library, to, from, words))
    fail(run, "%s", words);
}

/* Takes a step's results into the digest: 64-bit FNV-1a, a value at a time. */
static void digest(struct run *run, const float *values, size_t count) {
  for (size_t i = 0; i < count; i++) {
    uint32_t bits;
    memcpy(&bits, &values[i], sizeof bits);
    run->report.digest = (run->report.digest ^ bits) * 0x100000001b3u;
  }
}

/* This rank's place in an array [steps][world][count]. */
static size_t own_place(const struct run *run, size_t step) {
  const struct replay_case *recorded = run->recorded;
  return (step * recorded->world + (size_t)run->rank->rank) * recorded->count;
}

/* `norm` as a square: what the difference is measured by. */
static void add_drift(struct run *run, int which, const float *got, const float *recorded,
                      size_t count, double norm) {
  for (size_t i = 0; i < count; i++) {
    double difference = (double)got[i] - (double)recorded[i];
    run->report.drift[which].difference += difference * difference;
  }
  run->report.drift[which].norm += norm;
}

static double square_sum(const float *values, size_t count) {
  double sum = 0;
  for (size_t i = 0; i < count; i++)
    sum += (double)values[i] * (double)values[i];
  return sum;
}

/* --- Allreduce ---------------------------------------------------------------------------------*/

static void compare_kept_errors(struct run *run, onebit_plan_t plan) {
  size_t padded = run->recorded->padded, share = padded / run->recorded->world;
  size_t rank = (size_t)run->rank->rank;
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

static void run_allreduce_steps(struct run *run, onebit_plan_t plan) {
  const struct replay_case *recorded = run->recorded;
  for (size_t step = 0; step < recorded->steps; step++) {
    read_values(run, REPLAY_INPUT, own_place(run, step), recorded->count, run->input);
    read_values(run, REPLAY_OUTPUT, step * recorded->count, recorded->count, run->wanted);
    copy(run, run->library.input, run->input);
    if (!passed(run, onebit_allreduce(run->library.input, run->library.output, plan),
                "onebit_allreduce"))
      return;
    copy(run, run->got, run->library.output);
    run->steps++;
    replay_compare_results(&run->report.tally, step, run->got, run->wanted, recorded->count);
    digest(run, run->got, recorded->count);
  }
  compare_kept_errors(run, plan);
}

static void run_allreduce(struct run *run) {
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  onebit_plan_info_t info = {.size = sizeof info};
  onebit_plan_t plan;
  options.profile = ONEBIT_PROFILE_DEEPSPEED;
  options.device = run->library.device;
  if (!passed(run, onebit_plan_create(run->rank->comm, run->recorded->count, &options, &plan),
              "onebit_plan_create"))
    return;
  size_t padded = run->recorded->padded, share = padded / run->recorded->world;
  /* Every rank finds the same here, so none goes on alone. */
  if (passed(run, onebit_plan_get_info(plan, &info), "onebit_plan_get_info")) {
    if (info.worker_residual_count == padded && info.server_residual_count == share)
      run_allreduce_steps(run, plan);
    else
      fail(run, "padded is %zu, in shares of %zu; the library pads to %zu, in shares of %zu",
           padded, share, info.worker_residual_count, info.server_residual_count);
  }
  onebit_plan_destroy(plan);
}

/* --- Optimizers --------------------------------------------------------------------------------*/

static onebit_status_t create_optimizer(struct run *run, onebit_optimizer_t *optimizer) {
  const struct replay_case *recorded = run->recorded;
  for (size_t t = 0, first = 0; t < recorded->tensors; first += recorded->tensor_counts[t++])
    run->tensors[t] = (onebit_tensor_t){.parameter = run->library.output + first,
                                        .gradient = run->library.input + first,
                                        .count = recorded->tensor_counts[t],
                                        .weight_decay = (float)recorded->weight_decay};
  return replay_create(recorded, run->rank->comm, run->tensors, run->library.device, optimizer);
}

/* Checks that the optimizer is in the stage that was recorded. 1-bit Adam and LAMB average
 * gradients in full precision as long as they are in their warm-up. One rank alone does so always,
 * whatever the stage. */
static void check_stage(struct run *run, onebit_optimizer_t optimizer, size_t step) {
  onebit_optimizer_info_t info = {.size = sizeof info};
  bool dense = run->recorded->dense_steps[step] == '1';
  if (run->recorded->kind != REPLAY_ZERO_ONE_ADAM &&
      passed(run, onebit_optimizer_get_info(optimizer, &info), "onebit_optimizer_get_info") &&
      (info.stage == ONEBIT_STAGE_WARMUP) != dense)
    fail(run, "step %zu: the optimizer is in its %s stage, the recorded one was in its %s stage",
         step, dense ? "compressed" : "warm-up", dense ? "warm-up" : "compressed");
}

/* 0/1 Adam does so by its schedule. *count: in how many steps before this one. */
static void check_exchange(struct run *run, onebit_optimizer_t optimizer, size_t step,
                           uint64_t *count) {
  onebit_optimizer_info_t info = {.size = sizeof info};
  bool dense = run->recorded->dense_steps[step] == '1';
  if (run->recorded->kind != REPLAY_ZERO_ONE_ADAM ||
      !passed(run, onebit_optimizer_get_info(optimizer, &info), "onebit_optimizer_get_info"))
    return;
  if ((info.exchanges[0] > *count) != dense)
    fail(run, "step %zu: the optimizer averaged gradients %s, the recorded one %s", step,
         dense ? "in bits or not at all" : "in full precision",
         dense ? "in full precision" : "did not do so in full precision");
  *count = info.exchanges[0];
}

/* The parameters that this rank should have after a step. */
static void read_parameters(struct run *run, size_t step) {
  const struct replay_case *recorded = run->recorded;
  size_t row = recorded->params_ranks == 1 ? step * recorded->count : own_place(run, step);
  read_values(run, REPLAY_OUTPUT, row, recorded->count, run->wanted);
}

static void compare_parameters(struct run *run, size_t step) {
  size_t count = run->recorded->count;
  replay_lengthen(run->length, run->wanted_before, run->wanted, run->got_before, run->got, count);
  replay_compare_parameters(&run->report.tally, step, run->got, run->wanted, run->length, count);
  memcpy(run->wanted_before, run->wanted, count * sizeof *run->wanted);
  memcpy(run->got_before, run->got, count * sizeof *run->got);
}

/* The library tells only the norm of its momentum. */
static void compare_momentum(struct run *run, onebit_optimizer_t optimizer) {
  onebit_optimizer_info_t info = {.size = sizeof info};
  if (run->rank->rank != 0 ||
      !passed(run, onebit_optimizer_get_info(optimizer, &info), "onebit_optimizer_get_info"))
    return;
  read_values(run, REPLAY_MOMENTUM, 0, run->recorded->count, run->wanted);
  double squares = square_sum(run->wanted, run->recorded->count);
  double difference = info.momentum_norm - sqrt(squares);
  run->report.drift[0].difference = difference * difference;
  run->report.drift[0].norm = squares;
}

static void run_optimizer_steps(struct run *run, onebit_optimizer_t optimizer) {
  const struct replay_case *recorded = run->recorded;
  uint64_t dense_steps = 0;
  memcpy(run->wanted_before, run->got, recorded->count * sizeof *run->got);
  memcpy(run->got_before, run->got, recorded->count * sizeof *run->got);
  for (size_t step = 0; step < recorded->steps; step++) {
    read_values(run, REPLAY_INPUT, own_place(run, step), recorded->count, run->input);
    read_parameters(run, step);
    check_stage(run, optimizer, step);
    copy(run, run->library.input, run->input);
    if (!passed(run, onebit_optimizer_step(optimizer, (float)recorded->learning_rate),
                "onebit_optimizer_step"))
      return;
    copy(run, run->got, run->library.output);
    run->steps++;
    check_exchange(run, optimizer, step, &dense_steps);
    compare_parameters(run, step);
    digest(run, run->got, recorded->count);
  }
  compare_momentum(run, optimizer);
}

static void run_optimizer(struct run *run) {
  onebit_optimizer_t optimizer;
  read_values(run, REPLAY_START, 0, run->recorded->count, run->got);
  copy(run, run->library.output, run->got);
  if (!passed(run, create_optimizer(run, &optimizer), replay_create_name(run->recorded)))
    return;
  run_optimizer_steps(run, optimizer);
  onebit_optimizer_destroy(optimizer);
}

/* --- Before and after --------------------------------------------------------------------------*/

/* All that this rank needs, so that nothing of its own can fail later. */
static bool allocate(struct run *run) {
  const struct replay_case *recorded = run->recorded;
  size_t count = recorded->count, padded = recorded->padded;
  run->memory = calloc(6 * count + 4 * padded, sizeof *run->memory);
  run->tensors = calloc(recorded->tensors + 1, sizeof *run->tensors);
  if (!run->memory || !run->tensors)
    return false;
  run->input = run->memory;
  run->got = run->input + count;
  run->wanted = run->got + count;
  run->got_before = run->wanted + count;
  run->wanted_before = run->got_before + count;
  run->length = run->wanted_before + count;
  run->worker = run->length + count;
  run->server = run->worker + 2 * padded;
  return true;
}

static void prepare(struct run *run, bool opened, const char *words, onebit_device_t device) {
  const struct replay_case *recorded = run->recorded;
  char why[REPLAY_WORDS];
  run->report.fingerprint = recorded->fingerprint;
  if (!opened)
    fail(run, "%s", words);
  else if (recorded->world != (size_t)run->rank->size)
    fail(run, "%s/case.txt: world is %zu, given %d rank%s", recorded->directory, recorded->world,
         run->rank->size, run->rank->size == 1 ? "" : "s");
  else if (!allocate(run))
    fail(run, "no memory for %zu values", recorded->count);
  else if (!replay_memory_take(&run->library, device, run->rank->rank, recorded->count, why))
    fail(run, "%s", why);
}

/* What all reports come to. */
struct whole {
  struct replay_result *result;
  struct report first; /* of rank 0 */
  bool separate;       /* ranks have parameters of their own */
  double difference[2], norm[2];
};

static void whole_fails(struct whole *whole, int rank, const char *words) {
  if (whole->result->verdict == REPLAY_FAILED)
    return;
  whole->result->verdict = REPLAY_FAILED;
  if (rank == 0)
    snprintf(whole->result->words, REPLAY_WORDS, "%s", words);
  else
    snprintf(whole->result->words, REPLAY_WORDS, "rank %d: %.*s", rank, REPLAY_WORDS - 32, words);
}

static void take_in(void *context, int rank, const void *part) {
  struct whole *whole = context;
  const struct report *report = part;
  if (rank == 0)
    whole->first = *report;
  if (report->failed)
    whole_fails(whole, rank, report->words);
  else if (report->fingerprint != whole->first.fingerprint)
    whole_fails(whole, rank, "its case.txt is another one than rank 0's");
  else if (report->digest != whole->first.digest && !whole->separate)
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
  replay_share(run->rank, &run->report, sizeof run->report, take_in, &whole);
  for (int k = 0; k < 2; k++) {
    bool equal = whole.difference[k] == 0;
    result->drifts[k].name = names[run->recorded->kind != REPLAY_ALLREDUCE][k];
    result->drifts[k].value = equal ? 0 : sqrt(whole.difference[k] / whole.norm[k]);
  }
}

static void judge(struct run *run, struct replay_result *result) {
  if (run->recorded->kind == REPLAY_ALLREDUCE)
    run_allreduce(run);
  else
    run_optimizer(run);
  share(run, result);
  if (result->verdict == REPLAY_OK &&
      !replay_within_allowance(run->recorded->kind, &result->tally, result->words))
    result->verdict = REPLAY_FAILED;
}

void replay_run(const struct replay_rank *rank, const struct replay_case *recorded, bool opened,
                const char *words, onebit_device_t device, struct replay_result *result) {
  struct run run = {.rank = rank, .recorded = recorded};
  prepare(&run, opened, words, device);
  share(&run, result);
  if (result->verdict == REPLAY_OK)
    judge(&run, result);
  replay_memory_release(&run.library);
  free(run.tensors);
  free(run.memory);
}
