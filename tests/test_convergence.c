/*
 * Error feedback has its effect: with it, training on one-bit exchanges comes to the same loss as
 * training on dense ones; the control without it does not. Two small problems, the same on every
 * machine, on four ranks that each have data of their own.
 */
#include "tests/support.h"
#include "tests/support_descent.h"
#include "tests/support_optimizers.h"

/* --- Gradient descent on a sum of squares */

#define DESCENTS 800

struct descent {
  onebit_plan_options_t options;
  double excess[RANKS];
};

static void descend(onebit_comm_t comm, void *context) {
  struct descent *descent = context;
  int rank = onebit_comm_rank(comm);
  float w[UNKNOWNS] = {0}, gradient[UNKNOWNS];
  onebit_plan_t plan;
  if (!CHECK_STATUS(onebit_plan_create(comm, UNKNOWNS, &descent->options, &plan), ONEBIT_OK))
    return;
  for (int step = 0; step < DESCENTS; step++) {
    float rate = 0.5f / (1.0f + (float)step / 25.0f);
    for (size_t i = 0; i < UNKNOWNS; i++)
      gradient[i] = descent_slope(w[i], rank, i);
    CHECK_STATUS(onebit_allreduce(gradient, gradient, plan), ONEBIT_OK);
    for (size_t i = 0; i < UNKNOWNS; i++)
      w[i] -= rate * gradient[i];
  }
  descent->excess[rank] = descent_excess(w);
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
}

static double excess_after(onebit_wire_t wire, onebit_profile_t profile, int no_error_feedback) {
  struct descent descent = {.options = ONEBIT_PLAN_OPTIONS_INIT};
  descent.options.wire = wire;
  descent.options.profile = profile;
  descent.options.no_error_feedback = no_error_feedback;
  on_ranks(RANKS, descend, &descent);
  return descent_agreed(descent.excess);
}

Test(convergence, gradient_descent_needs_the_error_fed_back) {
  float zero[UNKNOWNS] = {0};
  double start = descent_excess(zero);
  double dense = excess_after(ONEBIT_WIRE_DENSE, ONEBIT_PROFILE_DEFAULT, 0);
  double fed_back = excess_after(ONEBIT_WIRE_BITS, ONEBIT_PROFILE_DEFAULT, 0);
  double deepspeed = excess_after(ONEBIT_WIRE_BITS, ONEBIT_PROFILE_DEEPSPEED, 0);
  double control = excess_after(ONEBIT_WIRE_BITS, ONEBIT_PROFILE_DEFAULT, 1);
  cr_log_info("excess loss: start %g, dense %g, one bit %g, deepspeed %g, control %g", start, dense,
              fed_back, deepspeed, control);
  cr_expect_lt(dense, 1e-4 * start, "dense: %g of %g", dense, start);
  cr_expect_lt(fed_back, 1e-3 * start, "one bit: %g of %g", fed_back, start);
  cr_expect_lt(deepspeed, 1e-3 * start, "deepspeed: %g of %g", deepspeed, start);
  cr_expect_gt(control, 20 * fed_back, "the control is no worse: %g", control);
}

/* --- 1-bit Adam and LAMB on logistic regression: rank r has samples of its own, whose features
 * lie around a centre of its own. Some labels are wrong, so the best loss is not zero. */

#define FEATURES 96
#define SAMPLES  160 /* a rank */
#define STEPS    600

static float feature(int rank, size_t sample, size_t i) {
  float centre = uniform_value(900000 + (size_t)rank * FEATURES + i);
  float size =
      exp2f(2.0f * uniform_value(800000 + i)); /* features differ in size: why Adam is wanted */
  return size * (uniform_value(1000000 + ((size_t)rank * SAMPLES + sample) * FEATURES + i) +
                 0.5f * centre);
}

static float label(int rank, size_t sample) {
  double sum = 0.0;
  for (size_t i = 0; i < FEATURES; i++)
    sum += (double)(feature(rank, sample, i) * uniform_value(700000 + i));
  bool flipped = uniform_value(600000 + (size_t)rank * SAMPLES + sample) > 0.8f;
  return (sum > 0) != flipped ? 1.0f : -1.0f;
}

struct samples {
  float x[SAMPLES][FEATURES], y[SAMPLES];
};

static struct samples *make_samples(int rank) {
  struct samples *samples = allocate(1, sizeof *samples);
  for (size_t s = 0; s < SAMPLES; s++) {
    samples->y[s] = label(rank, s);
    for (size_t i = 0; i < FEATURES; i++)
      samples->x[s][i] = feature(rank, s, i);
  }
  return samples;
}

/* Mean loss of these samples, with a little ridge so that the optimum is finite, and its gradient.
 */
static double loss_of(const struct samples *samples, const float *w, float *gradient) {
  double loss = 0.0;
  for (size_t i = 0; i < FEATURES; i++) {
    loss += 0.5e-3 * (double)(w[i] * w[i]);
    gradient[i] = 1e-3f * w[i];
  }
  for (size_t s = 0; s < SAMPLES; s++) {
    double margin = 0.0;
    for (size_t i = 0; i < FEATURES; i++)
      margin += (double)(samples->y[s] * w[i] * samples->x[s][i]);
    loss += log1p(exp(-margin)) / SAMPLES;
    float pull = (float)(1.0 / (1.0 + exp(margin))) / SAMPLES;
    for (size_t i = 0; i < FEATURES; i++)
      gradient[i] -= pull * samples->y[s] * samples->x[s][i];
  }
  return loss;
}

struct regression {
  struct any_options options;
  double loss[RANKS];
};

static void regress(onebit_comm_t comm, void *context) {
  struct regression *regression = context;
  int rank = onebit_comm_rank(comm);
  float w[FEATURES] = {0}, gradient[FEATURES];
  onebit_tensor_t tensor = {w, gradient, FEATURES, 0, 0, 0};
  struct samples *samples = make_samples(rank);
  onebit_optimizer_t optimizer;
  if (CHECK_STATUS(any_create(&regression->options, comm, &tensor, 1, &optimizer), ONEBIT_OK)) {
    for (int step = 0; step < STEPS; step++) {
      loss_of(samples, w, gradient);
      CHECK_STATUS(onebit_optimizer_step(optimizer, 0.05f * (1.0f - (float)step / (float)STEPS)),
                   ONEBIT_OK);
    }
    onebit_optimizer_destroy(optimizer);
  }
  regression->loss[rank] = loss_of(samples, w, gradient);
  free(samples);
}

static double loss_after(const struct any_case *what, size_t freeze_step, int no_error_feedback) {
  struct regression regression = {any_options_of(what->method, what->options), {0}};
  double mean = 0.0;
  any_count(&regression.options, "freeze_step", freeze_step);
  any_common(&regression.options)->no_error_feedback = no_error_feedback;
  on_ranks(RANKS, regress, &regression);
  for (int r = 0; r < RANKS; r++)
    mean += regression.loss[r] / RANKS;
  return mean;
}

/* Larger coefficients of LAMB need smaller rates: the ratio stays as it was. Three of the four
 * ranks have a share. */
static const struct {
  const char *name;
  struct any_case what;
} regressions[] = {
    {"LAMB", {ANY(lamb, .max_coefficient = 0.3)}},
    {"Adam", {ANY(adam, .freeze_step = 0)}},
    {"Adam that exchanges steps", {ANY(adam, .exchange = ONEBIT_ADAM_EXCHANGE_STEP)}},
    {"sharded steps", {ANY(adam, .shards = ONEBIT_SHARDS_STEP, .common.block_size = 32)}},
    {"sharded parameters",
     {ANY(adam, .shards = ONEBIT_SHARDS_PARAMETERS, .common.block_size = 32)}},
};

Test(convergence, regressions_come_to_the_dense_loss) {
  for (size_t k = 0; k < sizeof regressions / sizeof regressions[0]; k++) {
    const char *name = regressions[k].name;
    const double dense = loss_after(&regressions[k].what, ONEBIT_FREEZE_NEVER, 0);
    const double fed_back = loss_after(&regressions[k].what, STEPS / 6, 0);
    const double control = loss_after(&regressions[k].what, STEPS / 6, 1);
    cr_log_info("loss: dense %s %.6f, 1-bit %.6f, control %.6f", name, dense, fed_back, control);
    cr_expect_lt(dense, 0.6, "dense %s learns nothing: %g", name, dense);
    cr_expect_lt(fed_back, 1.01 * dense, "1-bit %s: %g, dense %g", name, fed_back, dense);
    cr_expect_gt(control, 1.05 * dense, "the control is no worse: %g, dense %g", control, dense);
  }
}
