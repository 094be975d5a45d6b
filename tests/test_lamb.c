/*
 * 1-bit LAMB, beside what test_optimizers.c has of all: plain LAMB equals the published formulas,
 * and a tensor's numbers are right at their ends.
 */
#include <float.h>

#include "optimizers/methods/lamb_tensor.h"
#include "tests/support_adam.h"

static struct adam_case case_of(const struct adam_tensors *tensors, size_t freeze_step) {
  struct adam_case what = {.kind = &kind_lamb,
                           .size = 3,
                           .steps = 20,
                           .options = ONEBIT_ADAM_OPTIONS_INIT,
                           .tensors = tensors,
                           .still = true};
  what.options.freeze_step = freeze_step;
  return what;
}

/* --- The published formulas, in double, of the mean gradient: bias correction, no clamp at all. */

struct textbook {
  double *parameter, *momentum, *variance, *update;
};

static double norm_of(const double *values, size_t count) {
  double sum = 0.0;
  for (size_t i = 0; i < count; i++)
    sum += values[i] * values[i];
  return sqrt(sum);
}

static void textbook_step(const struct adam_case *what, struct textbook *book, size_t total,
                          int step, float *gradient) {
  double *mean = allocate(total, sizeof *mean), t = step + 1;
  double decay = (double)what->tensors->list[0].weight_decay;
  for (int r = 0; r < what->size; r++) {
    adam_gradient(what, gradient, total, r, step);
    for (size_t i = 0; i < total; i++)
      mean[i] += (double)gradient[i] / what->size;
  }
  for (size_t i = 0; i < total; i++) {
    book->momentum[i] = 0.9 * book->momentum[i] + 0.1 * mean[i];
    book->variance[i] = 0.999 * book->variance[i] + 0.001 * mean[i] * mean[i];
    double m = book->momentum[i] / (1 - pow(0.9, t)), v = book->variance[i] / (1 - pow(0.999, t));
    book->update[i] = m / (sqrt(v) + 1e-8) + decay * book->parameter[i];
  }
  double ratio = norm_of(book->parameter, total) / norm_of(book->update, total);
  for (size_t i = 0; i < total; i++)
    book->parameter[i] -= (double)adam_learning_rate(step) * ratio * book->update[i];
  free(mean);
}

static struct textbook make_textbook(const struct adam_run *run) {
  struct textbook book = {
      allocate(run->total, sizeof(double)), allocate(run->total, sizeof(double)),
      allocate(run->total, sizeof(double)), allocate(run->total, sizeof(double))};
  for (size_t i = 0; i < run->total; i++)
    book.parameter[i] = (double)run->start[i];
  return book;
}

Test(lamb, plain_lamb_is_the_published_one) {
  static const onebit_lamb_options_t more = {.max_coefficient = 1e9, .min_coefficient = 1e-9};
  struct adam_case what = case_of(&adam_tensors_one, ONEBIT_FREEZE_NEVER);
  what.more = &more;
  struct adam_run run = adam_prepare(&what);
  struct textbook book = make_textbook(&run);
  float *gradient = allocate(run.total, sizeof(float));
  on_ranks(what.size, adam_on_rank, &run);
  for (int step = 0; step < what.steps; step++) {
    textbook_step(&what, &book, run.total, step, gradient);
    for (size_t i = 0; i < run.total; i++) {
      double got = (double)run.moments[step].parameters[i], wanted = book.parameter[i];
      CHECK(fabs(got - wanted) <= (step + 1) * (1e-7 + 1e-6 * fabs(wanted)),
            "step %d, parameter %zu is %.9g, the formulas say %.9g", step, i, got, wanted);
    }
  }
  free(gradient);
  free(book.parameter);
  free(book.momentum);
  free(book.variance);
  free(book.update);
  adam_release(&run);
}

/* --- A tensor's numbers at their ends */

static const struct ob_lamb_limits limits = {.min_coefficient = 0.01,
                                             .max_coefficient = 10,
                                             .coefficient_beta = 0.9,
                                             .min_factor = 0.5,
                                             .max_factor = 4,
                                             .factor_change = 0.1};

Test(lamb, ratios_at_their_ends) {
  static const struct {
    double parameters, updates, ratio;
  } cases[] = {{4, 1, 2},         {0, 1, 1},
               {1, 0, 1},         {0, 0, 1},
               {1e6, 1, 10},      {1e-9, 1, 0.01},
               {INFINITY, 1, 10}, {1, INFINITY, 0.01},
               {1e-40, 1e-40, 1}, {INFINITY, INFINITY, 0.01}};
  for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
    double coefficient = 3;
    double ratio = ob_lamb_warm(&coefficient, cases[k].parameters, cases[k].updates, &limits);
    CHECK(ratio == cases[k].ratio, "case %zu: ratio %g, not %g", k, ratio, cases[k].ratio);
    double wanted = ratio == 1 ? 3 : 0.9 * 3 + (1 - 0.9) * ratio;
    CHECK(coefficient == wanted, "case %zu: coefficient %g, not %g", k, coefficient, wanted);
  }
}

Test(lamb, factors_at_their_ends) {
  static const struct {
    double last, plain, updates, largest, factor;
  } cases[] = {
      {1, 1, 1, 1.05, 1.05},
      {1, 1, 4, 1.08, 1.08 * 0.5 + 0.5}, /* half of the update is weight decay */
      {1, 9, 4, 1.08, 1.08},             /* the share is 1 at most */
      {1, 0, 0, 0.95, 0.95},             /* nothing moves: no share of it is known */
      {1, 1, 1, 7, 1.0 * 1.1},           /* one step's change */
      {1, 1, 1, 0, 1.0 * 0.9},           /* no element moves */
      {3.9, 1, 1, 100, 4},               /* the most comes first */
      {0.51, 1, 1, 0.1, 0.5},
      {5, 1, 1, 100, 5 * 0.9}, /* and the change counts more */
      {1, NAN, 1, NAN, 1.0 * 0.9},
  };
  for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
    double factor =
        ob_lamb_correct(cases[k].last, cases[k].plain, cases[k].updates, cases[k].largest, &limits);
    CHECK(fabs(factor - cases[k].factor) <= 1e-15, "case %zu: factor %.17g, not %.17g", k, factor,
          cases[k].factor);
  }
}

Test(lamb, scalings_at_their_ends) {
  CHECK(ob_lamb_level(12, 3) == 2 && ob_lamb_level(0, 0) == 0, "levels");
  CHECK(ob_lamb_scaling(3, 2) == 1.5f, "the mean over the level");
  CHECK(ob_lamb_scaling(3, 0) == 1, "no momentum");
  CHECK(ob_lamb_scaling(NAN, 0) == 1, "no momentum anywhere");
  CHECK(ob_lamb_scaling(1, 1e-300) == 1 && ob_lamb_scaling(1e-300, 1) == 1, "no float32");
}
