/* Cases of 1-bit momentum SGD against the oracle. */
#include "tests/support_momentum.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/oracle_momentum.h"

static size_t total_of(const struct adam_tensors *tensors) {
  size_t total = 0;
  for (size_t k = 0; k < tensors->count; k++)
    total += tensors->list[k].count;
  return total;
}

static void describe_tensors(const struct adam_tensors *given, float *parameters, float *gradients,
                             onebit_tensor_t *tensors) {
  size_t first = 0;
  for (size_t k = 0; k < given->count; k++) {
    const struct adam_tensor *one = &given->list[k];
    tensors[k] = (onebit_tensor_t){one->count ? parameters + first : NULL,
                                   one->count ? gradients + first : NULL,
                                   one->count,
                                   one->weight_decay,
                                   one->factor,
                                   0};
    first += one->count;
  }
}

static double norm_of(const float *values, size_t count) {
  double sum = 0.0;
  for (size_t i = 0; i < count; i++)
    sum += (double)values[i] * (double)values[i];
  return sqrt(sum);
}

static double residual_norm_of(const struct oracle_adam *state, int rank) {
  double norm = 0.0;
  for (size_t k = 0; k < state->exchange_count; k++) {
    const struct oracle *oracle = state->exchanges[k].oracle;
    norm =
        hypot(norm, norm_of(oracle_worker_error(oracle, rank), oracle_worker_count(oracle, rank)));
  }
  return norm;
}

static void keep_moment(struct momentum_run *run, const struct oracle_adam *state, int step) {
  run->parameters[step] = allocate(run->total, sizeof(float));
  memcpy(run->parameters[step], state->parameter, run->total * sizeof(float));
  run->momentum_norm[step] = norm_of(state->momentum, run->total);
  run->residual_norm[step] = allocate((size_t)run->what->size, sizeof(double));
  for (int r = 0; r < run->what->size; r++)
    run->residual_norm[step][r] = residual_norm_of(state, r);
}

static void gradient_at(float *gradient, size_t total, int rank, int step) {
  for (size_t i = 0; i < total; i++)
    gradient[i] = input_value(i, rank, step);
}

static void run_oracle(struct momentum_run *run, struct oracle_momentum *oracle) {
  size_t size = (size_t)run->what->size;
  float **gradients = allocate(size, sizeof *gradients);
  for (size_t r = 0; r < size; r++)
    gradients[r] = allocate(run->total, sizeof(float));
  for (int step = 0; step < run->what->steps; step++) {
    for (size_t r = 0; r < size; r++)
      gradient_at(gradients[r], run->total, (int)r, step);
    CHECK(oracle_momentum_step(oracle, (const float *const *)gradients, adam_learning_rate(step)),
          "the oracle skips finite gradients");
    keep_moment(run, oracle->state, step);
  }
  for (size_t r = 0; r < size; r++)
    free(gradients[r]);
  free(gradients);
}

struct momentum_run momentum_prepare(const struct momentum_case *what) {
  size_t steps = (size_t)what->steps;
  struct momentum_run run = {.what = what, .total = total_of(what->tensors)};
  onebit_tensor_t tensors[10];
  run.start = allocate(run.total, sizeof(float));
  run.parameters = allocate(steps, sizeof *run.parameters);
  run.momentum_norm = allocate(steps, sizeof(double));
  run.residual_norm = allocate(steps, sizeof *run.residual_norm);
  for (size_t i = 0; i < run.total; i++)
    run.start[i] = input_value(i, 50, 7);
  describe_tensors(what->tensors, run.start, run.start, tensors);
  struct oracle_momentum oracle = oracle_momentum_create(
      what->size, what->hosts ? what->hosts : 1, tensors, what->tensors->count, &what->options);
  run_oracle(&run, &oracle);
  oracle_momentum_destroy(&oracle);
  return run;
}

void momentum_release(struct momentum_run *run) {
  for (int step = 0; step < run->what->steps; step++) {
    free(run->parameters[step]);
    free(run->residual_norm[step]);
  }
  free(run->parameters);
  free(run->residual_norm);
  free(run->momentum_norm);
  free(run->start);
}

static bool near(double a, double b) { return fabs(a - b) <= 1e-5 * fabs(b) + 1e-30; }

static void check_info(const struct momentum_run *run, onebit_optimizer_t optimizer, int rank,
                       int step) {
  const struct momentum_case *what = run->what;
  size_t warmup = what->options.warmup_steps, made = (size_t)step + 1;
  bool compressed = made >= warmup;
  onebit_optimizer_info_t info = {.size = sizeof info};
  CHECK_STATUS(onebit_optimizer_get_info(optimizer, &info), ONEBIT_OK);
  CHECK(strcmp(info.name, "momentum") == 0, "the name is %s", info.name);
  CHECK(info.steps == made, "step %d: %llu steps", step, (unsigned long long)info.steps);
  CHECK(info.skipped == (what->poison != 0.0f ? made : 0), "step %d: %llu skipped", step,
        (unsigned long long)info.skipped);
  CHECK((info.stage == ONEBIT_STAGE_COMPRESSED) == compressed, "step %d: stage is %d", step,
        (int)info.stage);
  CHECK(info.freeze_step == (compressed ? warmup : 0), "step %d: freeze step %llu", step,
        (unsigned long long)info.freeze_step);
  CHECK(info.exchanges[0] == (made < warmup ? made : warmup) &&
            info.exchanges[1] == made - info.exchanges[0] && info.exchanges[2] == 0,
        "step %d: %llu dense, %llu of bits", step, (unsigned long long)info.exchanges[0],
        (unsigned long long)info.exchanges[1]);
  CHECK(near(info.momentum_norm, run->momentum_norm[step]), "step %d: momentum norm %g, not %g",
        step, info.momentum_norm, run->momentum_norm[step]);
  CHECK(near(info.residual_norm, run->residual_norm[step][rank]), "step %d: error norm %g, not %g",
        step, info.residual_norm, run->residual_norm[step][rank]);
}

static void poisoned_step(const struct momentum_run *run, onebit_optimizer_t optimizer, int rank,
                          int step, float *parameters, float *gradients) {
  const float *before = step ? run->parameters[step - 1] : run->start;
  gradient_at(gradients, run->total, rank, step + 500);
  if (rank == run->what->poisoned_rank)
    gradients[(size_t)step * 977 % run->total] = run->what->poison;
  CHECK_STATUS(adam_step_in_parts(optimizer, run->what->tensors->count, run->what->parts, step),
               ONEBIT_SKIPPED);
  CHECK_BITS("parameters after a skipped step", parameters, before, run->total, ONEBIT_FLOAT32);
}

static void tell_case(const struct momentum_case *what) {
  const onebit_optimizer_options_t *common = &what->options.common;
  check_case("momentum of %zu tensors on %d ranks, %d hosts, warm-up %zd, block %zd, scale %d, "
             "threads %d, buckets of %zu, schedule %d%s%s",
             what->tensors->count, what->size, what->hosts, (ptrdiff_t)what->options.warmup_steps,
             (ptrdiff_t)common->block_size, (int)common->scale, common->threads,
             common->bucket_size, (int)common->schedule, what->parts ? ", in parts" : "",
             what->poison != 0.0f ? ", poisoned" : "");
}

void momentum_on_rank(onebit_comm_t comm, void *context) {
  const struct momentum_run *run = context;
  const struct momentum_case *what = run->what;
  int rank = onebit_comm_rank(comm);
  float *parameters = allocate(run->total, sizeof(float));
  float *gradients = allocate(run->total, sizeof(float));
  onebit_tensor_t tensors[10];
  onebit_optimizer_t optimizer;
  memcpy(parameters, run->start, run->total * sizeof(float));
  describe_tensors(what->tensors, parameters, gradients, tensors);
  tell_case(what);
  if (CHECK_STATUS(
          onebit_momentum_create(comm, tensors, what->tensors->count, &what->options, &optimizer),
          ONEBIT_OK)) {
    for (int step = 0; step < what->steps; step++) {
      if (what->poison != 0.0f)
        poisoned_step(run, optimizer, rank, step, parameters, gradients);
      gradient_at(gradients, run->total, rank, step);
      CHECK_STATUS(adam_step_in_parts(optimizer, what->tensors->count, what->parts, step),
                   ONEBIT_OK);
      CHECK_BITS("parameters", parameters, run->parameters[step], run->total, ONEBIT_FLOAT32);
      check_info(run, optimizer, rank, step);
    }
    onebit_optimizer_destroy(optimizer);
  }
  free(parameters);
  free(gradients);
}
