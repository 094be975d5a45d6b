/*
 * 1-bit LAMB, beside what test_optimizers.c has of all: what travels scaled, and DeepSpeed's
 * messages; plain LAMB equals the published formulas, and a tensor's numbers are right
 * at their ends.
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

static struct adam_case deepspeed_case(const struct adam_tensors *tensors, size_t freeze_step) {
  struct adam_case what = case_of(tensors, freeze_step);
  what.options.common.profile = ONEBIT_PROFILE_DEEPSPEED;
  return what;
}

/* The fourth tensor's only element never has a gradient. */
static const struct adam_tensors with_a_still_one = {
    6, {{2, 0.1f, 0}, {0, 0, 0}, {3, 0, 2.0f}, {1, 0, 0}, {2100, 0, 0}, {777, 0.01f, 0.5f}}};

/* Momenta travel scaled; one of them is zero. */
Test(lamb, one_scale_a_buffer) {
  struct adam_case what = case_of(&adam_tensors_odd, 5);
  what.options.common.block_size = ONEBIT_BLOCK_BUFFER;
  adam_check_on_groups(what);
  what.tensors = &with_a_still_one;
  adam_check_on_groups(what);
  what.options.common.bucket_size = 1000; /* each of which has its own scalings */
  adam_check_on_groups(what);
}

Test(lamb, profile_deepspeed) {
  static const struct adam_tensors *const lists[] = {&adam_tensors_odd, &with_a_still_one,
                                                     &adam_tensors_one, &adam_tensors_tiny,
                                                     &adam_tensors_none};
  for (size_t k = 0; k < sizeof lists / sizeof lists[0]; k++) {
    adam_check_on_groups(deepspeed_case(lists[k], 6));
    adam_check_on_groups(deepspeed_case(lists[k], 1)); /* one step of warm-up all the same */
  }
}

/* Messages end inside of tensors, and in the padding. */
Test(lamb, profile_deepspeed_in_many_messages) {
  struct adam_case what = deepspeed_case(&adam_tensors_many_words, 4);
  what.options.common.chunk_size = 2048;
  adam_check_on_groups(what);
}

/* However tensors are put into buckets, the bits are the same: the library's are the oracle's. */
static void check_bucket(struct adam_case what, const struct adam_run *one_bucket) {
  struct adam_run run = adam_prepare(&what);
  const float *last = run.moments[what.steps - 1].parameters;
  on_ranks(what.size, adam_on_rank, &run);
  CHECK_BITS("parameters with other buckets", last, one_bucket->moments[what.steps - 1].parameters,
             run.total, ONEBIT_FLOAT32);
  adam_release(&run);
}

Test(lamb, buckets_in_any_form) {
  static const size_t sizes[] = {1, 1000, 5200};
  struct adam_case plain = case_of(&adam_tensors_odd, 4);
  plain.steps = 10;
  struct adam_run one_bucket = adam_prepare(&plain);
  for (int form = 0; form < ADAM_FORMS; form++)
    for (size_t b = 0; b < sizeof sizes / sizeof sizes[0]; b++) {
      struct adam_case what = plain;
      what.form = (enum adam_form)form;
      what.options.common.bucket_size = sizes[b];
      check_bucket(what, &one_bucket);
    }
  adam_release(&one_bucket);
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
