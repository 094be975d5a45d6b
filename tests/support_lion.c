/* Lion in one bit beside its oracle. */
#include "tests/support_lion.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/oracle_lion.h"

enum { MOST_TENSORS = 10 };

struct lion_case lion_case_of(const struct adam_tensors *tensors) {
  return (struct lion_case){
      .size = 3, .hosts = 1, .options = ONEBIT_LION_OPTIONS_INIT, .tensors = tensors};
}

static void describe(const struct lion_case *what, float *parameters, float *gradients,
                     onebit_tensor_t *tensors) {
  size_t first = 0;
  for (size_t k = 0; k < what->tensors->count; k++) {
    const struct adam_tensor *one = &what->tensors->list[k];
    tensors[k] = (onebit_tensor_t){one->count ? parameters + first : NULL,
                                   one->count ? gradients + first : NULL,
                                   one->count,
                                   one->weight_decay,
                                   one->factor,
                                   (what->uncompressed >> k & 1) != 0};
    first += one->count;
  }
}

static void fill_gradient(const struct lion_run *run, float *gradient, int rank, int step) {
  for (size_t i = 0; i < run->total; i++)
    gradient[i] = run->what->still && i % 13 == 5 ? 0.0f : input_value(i, rank, step);
}

static bool on_hosts_of(const struct lion_case *what) {
  return what->options.common.schedule == ONEBIT_SCHEDULE_HIERARCHICAL;
}

/* --- The oracle's run */

static void run_oracle(struct lion_run *run) {
  const struct lion_case *what = run->what;
  onebit_tensor_t tensors[MOST_TENSORS];
  float *gradients[16];
  describe(what, run->start, run->start, tensors);
  struct oracle_lion *oracle = oracle_lion_create(what->size, what->hosts, tensors,
                                                  what->tensors->count, &what->options, run->start);
  for (int r = 0; r < what->size; r++)
    gradients[r] = allocate(run->total + 1, sizeof(float));
  for (int step = 0; step < LION_STEPS; step++) {
    for (int r = 0; r < what->size; r++)
      fill_gradient(run, gradients[r], r, step);
    oracle_lion_step(oracle, (const float *const *)gradients, adam_learning_rate(step));
    run->parameters[step] = allocate(run->total + 1, sizeof(float));
    memcpy(run->parameters[step], oracle_lion_parameters(oracle), run->total * sizeof(float));
    run->momentum_norm[step] = oracle_lion_momentum_norm(oracle);
    for (int r = 0; r < what->size && !on_hosts_of(what); r++)
      run->residual_norm[step][r] = oracle_lion_residual_norm(oracle, r);
  }
  for (int r = 0; r < what->size; r++)
    free(gradients[r]);
  oracle_lion_destroy(oracle);
}

/* --- The library's */

static void poisoned_step(const struct lion_run *run, onebit_optimizer_t optimizer, int rank,
                          int step, float *parameters, float *gradients) {
  const float *before = step ? run->parameters[step - 1] : run->start;
  fill_gradient(run, gradients, rank, step + 500);
  if (rank == run->what->poisoned_rank)
    gradients[(size_t)step * 977 % run->total] = run->what->poison;
  CHECK_STATUS(adam_step_in_parts(optimizer, run->what->tensors->count, run->what->parts, step),
               ONEBIT_SKIPPED);
  CHECK_BITS("parameters after a skipped step", parameters, before, run->total, ONEBIT_FLOAT32);
}

static bool near(double a, double b) { return fabs(a - b) <= 1e-5 * fabs(b) + 1e-30; }

/* A server tells of the momentum of its share only: the squares of all ranks' add up. */
static void check_info(const struct lion_run *run, onebit_optimizer_t optimizer, int rank,
                       int step) {
  const uint64_t made = (uint64_t)step + 1;
  onebit_optimizer_info_t info = {.size = sizeof info};
  CHECK_STATUS(onebit_optimizer_get_info(optimizer, &info), ONEBIT_OK);
  CHECK(strcmp(info.name, "lion") == 0, "the name is %s", info.name);
  CHECK(info.steps == made && info.exchanges[1] == made && info.exchanges[0] == 0,
        "step %d: %llu steps, %llu of bits", step, (unsigned long long)info.steps,
        (unsigned long long)info.exchanges[1]);
  CHECK(info.stage == ONEBIT_STAGE_COMPRESSED, "step %d: stage %d", step, (int)info.stage);
  if (run->what->size == 1)
    CHECK(near(info.momentum_norm, run->momentum_norm[step]), "step %d: momentum norm %g, not %g",
          step, info.momentum_norm, run->momentum_norm[step]);
  if (!on_hosts_of(run->what) && !run->what->uncompressed)
    CHECK(near(info.residual_norm, run->residual_norm[step][rank]),
          "step %d: error norm %g, not %g", step, info.residual_norm,
          run->residual_norm[step][rank]);
}

static void tell_case(const struct lion_case *what) {
  const onebit_optimizer_options_t *common = &what->options.common;
  check_case("lion of %zu tensors on %d ranks, %d hosts, block %zd, scale %d, threads %d, buckets "
             "of %zu%s%s",
             what->tensors->count, what->size, what->hosts, (ptrdiff_t)common->block_size,
             (int)common->scale, common->threads, common->bucket_size,
             what->parts ? ", in parts" : "", what->poison != 0.0f ? ", poisoned" : "");
}

void lion_on_rank(onebit_comm_t comm, void *context) {
  const struct lion_run *run = context;
  const struct lion_case *what = run->what;
  const int rank = onebit_comm_rank(comm);
  float *parameters = allocate(run->total + 1, sizeof(float));
  float *gradients = allocate(run->total + 1, sizeof(float));
  onebit_tensor_t tensors[MOST_TENSORS];
  onebit_optimizer_t optimizer;
  memcpy(parameters, run->start, run->total * sizeof(float));
  describe(what, parameters, gradients, tensors);
  tell_case(what);
  if (CHECK_STATUS(
          onebit_lion_create(comm, tensors, what->tensors->count, &what->options, &optimizer),
          ONEBIT_OK)) {
    for (int step = 0; step < LION_STEPS; step++) {
      if (what->poison != 0.0f)
        poisoned_step(run, optimizer, rank, step, parameters, gradients);
      fill_gradient(run, gradients, rank, step);
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

struct lion_run *lion_prepare(const struct lion_case *what) {
  struct lion_run *run = allocate(1, sizeof *run);
  run->what = what;
  for (size_t k = 0; k < what->tensors->count; k++)
    run->total += what->tensors->list[k].count;
  run->start = allocate(run->total + 1, sizeof(float));
  for (size_t i = 0; i < run->total; i++)
    run->start[i] = input_value(i, 50, 7);
  run_oracle(run);
  return run;
}

void lion_release(struct lion_run *run) {
  for (int step = 0; step < LION_STEPS; step++)
    free(run->parameters[step]);
  free(run->start);
  free(run);
}
