/* Cases of 1-bit Adam against the oracle. */
#include "tests/support_adam.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const struct adam_tensors adam_tensors_odd = {9,
                                              {{0, 0, 0},
                                               {1, 0, 0},
                                               {31, 0.01f, 0},
                                               {33, 0, 0.5f},
                                               {2049, 0.1f, 2.0f},
                                               {4097, 0, 0},
                                               {0, 0.3f, 0},
                                               {100, 0.01f, 1.0f},
                                               {1003, 0, 0}}};
const struct adam_tensors adam_tensors_one = {1, {{10007, 0.01f, 0}}};
const struct adam_tensors adam_tensors_many_words = {3,
                                                     {{65536, 0, 0}, {640, 0.1f, 0}, {2048, 0, 0}}};
const struct adam_tensors adam_tensors_tiny = {3, {{1, 0, 0}, {1, 0.1f, 0}, {2, 0, 3.0f}}};
const struct adam_tensors adam_tensors_none = {0, {{0, 0, 0}}};

/* The optimizer's arrays of one rank. */
struct learner {
  float *parameters, *gradients;
  onebit_tensor_t tensors[10];
  size_t total;
};

static struct learner make_learner(const struct adam_case *what, const float *start) {
  struct learner learner = {0};
  for (size_t k = 0; k < what->tensors->count; k++)
    learner.total += what->tensors->list[k].count;
  learner.parameters = allocate(learner.total, sizeof(float));
  learner.gradients = allocate(learner.total, sizeof(float));
  size_t first = 0;
  for (size_t k = 0; k < what->tensors->count; k++) {
    const struct adam_tensor *given = &what->tensors->list[k];
    learner.tensors[k] = (onebit_tensor_t){given->count ? learner.parameters + first : NULL,
                                           given->count ? learner.gradients + first : NULL,
                                           given->count,
                                           given->weight_decay,
                                           given->factor,
                                           0};
    first += given->count;
  }
  for (size_t i = 0; i < learner.total; i++)
    learner.parameters[i] = start ? start[i] : input_value(i, 50, 7);
  return learner;
}

static void free_learner(struct learner *learner) {
  free(learner->parameters);
  free(learner->gradients);
}

void adam_gradient(const struct adam_case *what, float *gradient, size_t total, int rank,
                   int step) {
  float factor = what->growth != 0.0f ? powf(what->growth, (float)step) : 1.0f;
  for (size_t i = 0; i < total; i++)
    gradient[i] = what->still && i % 13 == 5 ? 0.0f : input_value(i, rank, step) * factor;
}

float adam_learning_rate(int step) { return 1e-3f * (float)(1 + step % 3); }

static double norm_of(const float *values, size_t count) {
  double sum = 0.0;
  for (size_t i = 0; i < count; i++)
    sum += (double)values[i] * (double)values[i];
  return sqrt(sum);
}

struct adam_moment adam_moment_of(const struct oracle_adam *adam) {
  struct adam_moment moment = {.compressed = adam->compressed,
                               .freeze_step = adam->freeze_step,
                               .variance_ratio = adam->variance_ratio,
                               .momentum_norm = norm_of(adam->momentum, adam->total)};
  moment.parameters = allocate(adam->total, sizeof(float));
  memcpy(moment.parameters, adam->parameter, adam->total * sizeof(float));
  int ranks = adam->size * adam->each;
  moment.error_norm = allocate((size_t)ranks, sizeof(double));
  for (int r = 0; r < ranks; r++)
    for (size_t k = 0; k < adam->exchange_count; k++)
      moment.error_norm[r] =
          hypot(moment.error_norm[r], norm_of(oracle_worker_error(adam->exchanges[k].oracle, r),
                                              oracle_worker_count(adam->exchanges[k].oracle, r)));
  return moment;
}

static onebit_status_t create_adam(onebit_comm_t comm, onebit_tensor_t *tensors,
                                   const struct adam_case *what, onebit_optimizer_t *optimizer) {
  return onebit_adam_create(comm, tensors, what->tensors->count, &what->options, optimizer);
}

static void *create_oracle(const struct adam_case *what, const onebit_tensor_t *tensors) {
  return oracle_adam_create(what->size, what->hosts ? what->hosts : 1, tensors,
                            what->tensors->count, &what->options);
}

static bool step_oracle(void *oracle, const float *const *gradients, float learning_rate) {
  return oracle_adam_step(oracle, gradients, learning_rate);
}

static struct adam_moment oracle_moment(const void *oracle) { return adam_moment_of(oracle); }

static void destroy_oracle(void *oracle) { oracle_adam_destroy(oracle); }

static const struct optimizer_kind adam = {"adam",      create_adam,   create_oracle,
                                           step_oracle, oracle_moment, destroy_oracle};

static const struct optimizer_kind *kind_of(const struct adam_case *what) {
  return what->kind ? what->kind : &adam;
}

struct adam_run adam_prepare(const struct adam_case *what) {
  const struct optimizer_kind *kind = kind_of(what);
  struct learner learner = make_learner(what, NULL);
  struct adam_run run = {.what = what, .total = learner.total, .start = learner.parameters};
  void *oracle = kind->oracle(what, learner.tensors);
  float **gradients = allocate((size_t)what->size, sizeof *gradients);
  for (int r = 0; r < what->size; r++)
    gradients[r] = allocate(run.total, sizeof(float));
  run.moments = allocate((size_t)what->steps, sizeof *run.moments);
  for (int step = 0; step < what->steps; step++) {
    for (int r = 0; r < what->size; r++)
      adam_gradient(what, gradients[r], run.total, r, step);
    CHECK(kind->step(oracle, (const float *const *)gradients, adam_learning_rate(step)),
          "the oracle skips finite gradients");
    run.moments[step] = kind->moment(oracle);
  }
  for (int r = 0; r < what->size; r++)
    free(gradients[r]);
  free(gradients);
  kind->destroy(oracle);
  free(learner.gradients);
  return run;
}

void adam_release(struct adam_run *run) {
  for (int step = 0; step < run->what->steps; step++) {
    free(run->moments[step].parameters);
    free(run->moments[step].error_norm);
  }
  free(run->moments);
  free(run->start);
}

static bool near(double a, double b) { return fabs(a - b) <= 1e-5 * fabs(b) + 1e-30; }

static bool is_poisoned(const struct adam_case *what, int step) {
  return what->poison != 0.0f && step >= what->poisoned_from;
}

static uint64_t skipped_until(const struct adam_case *what, int step) {
  return is_poisoned(what, step) ? (uint64_t)(step - what->poisoned_from) + 1 : 0;
}

/* The optimizer's account of itself after a step, against the oracle's. */
static void check_info(const struct adam_run *run, onebit_optimizer_t optimizer, int rank,
                       int step) {
  const struct adam_moment *wanted = &run->moments[step];
  const onebit_adam_options_t *options = &run->what->options;
  onebit_optimizer_info_t info = {.size = sizeof info};
  CHECK_STATUS(onebit_optimizer_get_info(optimizer, &info), ONEBIT_OK);
  CHECK(info.steps == (uint64_t)step + 1, "%d steps, info says %llu", step + 1,
        (unsigned long long)info.steps);
  CHECK(info.skipped == skipped_until(run->what, step), "skipped %llu",
        (unsigned long long)info.skipped);
  CHECK((info.stage == ONEBIT_STAGE_COMPRESSED) == wanted->compressed, "step %d: stage is %d", step,
        (int)info.stage);
  CHECK(info.freeze_step == wanted->freeze_step, "step %d: freeze step is %llu, not %zu", step,
        (unsigned long long)info.freeze_step, wanted->freeze_step);
  CHECK(near(info.momentum_norm, wanted->momentum_norm), "step %d: momentum norm %g, not %g", step,
        info.momentum_norm, wanted->momentum_norm);
  CHECK(near(info.error_norm, wanted->error_norm[rank]), "step %d: error norm %g, not %g", step,
        info.error_norm, wanted->error_norm[rank]);
  if (options->freeze_step == ONEBIT_FREEZE_AUTOMATIC && !wanted->compressed)
    CHECK(near(info.variance_ratio, wanted->variance_ratio), "step %d: variance ratio %g, not %g",
          step, info.variance_ratio, wanted->variance_ratio);
}

/* A permutation that is another one for each rank and step. */
static void shuffle(size_t *order, size_t count, int rank, int step) {
  uint64_t state = (uint64_t)rank * 1009 + (uint64_t)step * 31 + 7;
  for (size_t i = count; i > 1; i--) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    size_t other = (size_t)(state >> 33) % i, kept = order[i - 1];
    order[i - 1] = order[other];
    order[other] = kept;
  }
}

/* One step in the case's form. */
static onebit_status_t make_step(const struct adam_case *what, onebit_optimizer_t optimizer,
                                 int rank, int step) {
  float rate = adam_learning_rate(step);
  size_t order[10], count = what->tensors->count;
  if (what->form == IN_ONE_CALL || (what->form == PARTLY && (rank + step) % 3 == 0))
    return onebit_optimizer_step(optimizer, rate);
  for (size_t i = 0; i < count; i++)
    order[i] = what->form == FORWARD ? i : count - 1 - i;
  if (what->form >= SHUFFLED)
    shuffle(order, count, rank, step);
  CHECK_STATUS(onebit_optimizer_begin(optimizer, rate), ONEBIT_OK);
  for (size_t i = 0; i < (what->form == PARTLY ? count / 2 : count); i++)
    CHECK_STATUS(onebit_optimizer_ready(optimizer, order[i]), ONEBIT_OK);
  return onebit_optimizer_step(optimizer, rate);
}

/* A step that all ranks must skip, before the step of that number. */
static void poisoned_step(const struct adam_run *run, struct learner *learner,
                          onebit_optimizer_t optimizer, int rank, int step) {
  const float *before = step ? run->moments[step - 1].parameters : run->start;
  adam_gradient(run->what, learner->gradients, run->total, rank, step + 500);
  if (rank == run->what->poisoned_rank)
    learner->gradients[(size_t)step * 977 % run->total] = run->what->poison;
  CHECK_STATUS(make_step(run->what, optimizer, rank, step), ONEBIT_SKIPPED);
  CHECK_BITS("parameters after a skipped step", learner->parameters, before, run->total,
             ONEBIT_FLOAT32);
}

static void tell_case(const struct adam_case *what) {
  const onebit_adam_options_t *o = &what->options;
  check_case("%s of %zu tensors on %d ranks, profile %d, freeze %zd, block %zd, scale %d, "
             "threads %d, chunk %zu, buckets of %zu, form %d, schedule %d, %d hosts%s",
             kind_of(what)->name, what->tensors->count, what->size, (int)o->common.profile,
             (ptrdiff_t)o->freeze_step, (ptrdiff_t)o->common.block_size, (int)o->common.scale,
             o->common.threads, o->common.chunk_size, o->common.bucket_size, (int)what->form,
             (int)o->common.schedule, what->hosts, what->poison != 0.0f ? ", poisoned" : "");
}

void adam_on_rank(onebit_comm_t comm, void *context) {
  const struct adam_run *run = context;
  const struct adam_case *what = run->what;
  int rank = onebit_comm_rank(comm);
  struct learner learner = make_learner(what, run->start);
  onebit_optimizer_t optimizer;
  tell_case(what);
  if (CHECK_STATUS(kind_of(what)->create(comm, learner.tensors, what, &optimizer), ONEBIT_OK)) {
    for (int step = 0; step < what->steps; step++) {
      if (is_poisoned(what, step))
        poisoned_step(run, &learner, optimizer, rank, step);
      adam_gradient(what, learner.gradients, run->total, rank, step);
      CHECK_STATUS(make_step(what, optimizer, rank, step), ONEBIT_OK);
      CHECK_BITS("parameters", learner.parameters, run->moments[step].parameters, run->total,
                 ONEBIT_FLOAT32);
      check_info(run, optimizer, rank, step);
    }
    onebit_optimizer_destroy(optimizer);
  }
  free_learner(&learner);
}
