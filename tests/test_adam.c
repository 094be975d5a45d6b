/*
 * Tests of 1-bit Adam and LAMB beyond those of all optimizers in test_optimizers.c: the step after
 * which the variance is frozen, the published formulas, which hold without compression, LAMB's
 * per-tensor coefficients, and the bytes that a step sends.
 */
#include "optimizers/methods/lamb_tensor.h"
#include "tests/support_adam.h"

static struct adam_case make_case(const struct adam_tensors *tensors, size_t freeze_step) {
  struct adam_case what = {
      .steps = 30, .options = ONEBIT_ADAM_OPTIONS_INIT, .tensors = tensors, .still = true};
  what.options.freeze_step = freeze_step;
  return what;
}

/* Runs the case and compares its optimizer with the oracle. Returns the step after which the
 * variance was frozen, or 0 if it never was. */
static size_t run_to_freeze(const struct adam_case *what) {
  struct adam_run run = adam_prepare(what);
  const size_t freeze_step = run.moments[what->steps - 1].freeze_step;
  on_ranks(what->size, adam_on_rank, &run);
  cr_assert_eq(run.moments[what->steps - 1].compressed, freeze_step != 0);
  adam_release(&run);
  return freeze_step;
}

static struct adam_case make_automatic_case(const struct adam_tensors *tensors, double beta2) {
  struct adam_case what = make_case(tensors, ONEBIT_FREEZE_AUTOMATIC);
  what.options.beta2 = beta2;
  what.size = 2;
  return what;
}

/* The variance settles if gradients keep their size. With beta2 = 7/8 the ninth step is the first
 * that can freeze it. The oracle computes the ratio for the freeze decision from all elements. */
Test(adam, freezes_when_the_variance_has_settled) {
  struct adam_case what = make_automatic_case(&adam_tensors_odd, 0.875);
  what.steps = 40;
  for (what.size = 1; what.size <= 4; what.size++)
    cr_assert(run_to_freeze(&what) >= 9);
}

/* The freeze window has 1 / (1 - beta2) steps. In double, 1 / (1 - 0.9) is a little more than ten,
 * but the window must be ten, so that the eleventh step freezes the variance. */
Test(adam, freeze_window_is_a_whole_number_of_steps) {
  struct adam_case what = make_automatic_case(&adam_tensors_one, 0.9);
  what.options.freeze_threshold = 0.1;
  cr_assert_eq(run_to_freeze(&what), 11);
}

Test(adam, freezes_as_late_as_it_may_while_the_variance_grows) {
  struct adam_case what = make_automatic_case(&adam_tensors_odd, 0.875);
  what.growth = 1.05f; /* the variance then grows by 1.05^16 > 2 in eight steps */
  what.steps = 40;
  cr_assert_eq(run_to_freeze(&what), ONEBIT_FREEZE_LATEST * 8);
}

/* Gradients grow tenfold at every step, and the momentum follows them faster than the variance. The
 * freeze, which is set for step 8, must therefore wait. */
Test(adam, freeze_waits_for_the_variance) {
  struct adam_case what = make_case(&adam_tensors_odd, 8);
  what.options.beta1 = 0.1;
  what.growth = 10.0f;
  what.steps = 12;
  what.size = 2;
  cr_assert_eq(run_to_freeze(&what), 0);
}

/* A lower threshold freezes the variance earlier, and a threshold close to 1 later. */
Test(adam, freeze_threshold_is_heeded) {
  size_t steps[3];
  for (int k = 0; k < 3; k++) {
    struct adam_case what = make_automatic_case(&adam_tensors_odd, 0.875);
    what.options.freeze_threshold = (double[]){0.1, 0.9, 0.9999}[k];
    what.growth = 0.99f;
    steps[k] = run_to_freeze(&what) - 1; /* SIZE_MAX if it never freezes */
  }
  cr_assert(steps[0] == 8 && steps[0] <= steps[1] && steps[1] <= steps[2] && steps[2] > 8,
            "frozen after %zu, %zu, %zu", steps[0] + 1, steps[1] + 1, steps[2] + 1);
}

/* --- The published formulas, applied in double to the mean gradient: Adam as Kingma and Ba write
 * it, with AdamW's decay, and LAMB with bias correction and unlimited trust ratios. */

struct textbook {
  double *parameter, *momentum, *variance, *update;
};

static double norm_of(const double *values, size_t count) {
  double sum = 0.0;
  for (size_t i = 0; i < count; i++)
    sum += values[i] * values[i];
  return sqrt(sum);
}

static void make_textbook_step(const struct adam_case *what, struct textbook *book, size_t total,
                               int step) {
  double *mean = allocate(total, sizeof *mean), t = step + 1;
  float *gradient = allocate(total, sizeof *gradient);
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
  double ratio =
      what->kind == &kind_lamb ? norm_of(book->parameter, total) / norm_of(book->update, total) : 1;
  for (size_t i = 0; i < total; i++)
    book->parameter[i] -= (double)adam_learning_rate(step) * ratio * book->update[i];
  free(gradient);
  free(mean);
}

/* Runs a case and compares its parameters with the published formulas. In each step they may differ
 * by `lost` times the learning rate, because gradients that nearly cancel lose digits in float32,
 * and by `rounded` times the parameter. */
static void check_textbook(const struct adam_case *what, double lost, double rounded) {
  struct adam_run run = adam_prepare(what);
  const size_t total = run.total;
  double *room = allocate(4 * total, sizeof *room);
  struct textbook book = {room, room + total, room + 2 * total, room + 3 * total};
  for (size_t i = 0; i < total; i++)
    book.parameter[i] = (double)run.start[i];
  on_ranks(what->size, adam_on_rank, &run);
  for (int step = 0; step < what->steps; step++) {
    make_textbook_step(what, &book, total, step);
    for (size_t i = 0; i < total; i++) {
      double got = (double)run.moments[step].parameters[i], wanted = book.parameter[i];
      CHECK(fabs(got - wanted) <=
                (step + 1) * (lost * (double)adam_learning_rate(step) + rounded * fabs(wanted)),
            "step %d, parameter %zu is %.9g, the textbook says %.9g", step, i, got, wanted);
    }
  }
  free(room);
  adam_release(&run);
}

Test(adam, plain_adam_is_the_textbooks) {
  struct adam_case what = make_case(&adam_tensors_one, ONEBIT_FREEZE_NEVER);
  what.size = 3;
  check_textbook(&what, 1e-4, 1e-7);
}

Test(adam, plain_lamb_is_the_published_one) {
  static const onebit_lamb_options_t more = {.max_coefficient = 1e9, .min_coefficient = 1e-9};
  struct adam_case what = make_case(&adam_tensors_one, ONEBIT_FREEZE_NEVER);
  what.kind = &kind_lamb;
  what.size = 3;
  what.more = &more;
  check_textbook(&what, 3e-5, 1e-6);
}

/* --- LAMB's per-tensor coefficients at their limits */

static const struct ob_lamb_limits limits = {.min_coefficient = 0.01,
                                             .max_coefficient = 10,
                                             .coefficient_beta = 0.9,
                                             .min_factor = 0.5,
                                             .max_factor = 4,
                                             .factor_change = 0.1};

Test(adam, lambs_ratios_at_their_ends) {
  static const struct {
    double parameters, updates, ratio;
  } cases[] = {{4, 1, 2},         {0, 1, 1},
               {1, 0, 1},         {0, 0, 1},
               {1e6, 1, 10},      {1e-9, 1, 0.01},
               {INFINITY, 1, 10}, {1, INFINITY, 0.01},
               {1e-40, 1e-40, 1}, {INFINITY, INFINITY, 0.01}};
  for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
    double coefficient = 3;
    double ratio =
        ob_lamb_warmup_ratio(&coefficient, cases[k].parameters, cases[k].updates, &limits);
    CHECK(ratio == cases[k].ratio, "case %zu: ratio %g, not %g", k, ratio, cases[k].ratio);
    double wanted = ratio == 1 ? 3 : 0.9 * 3 + (1 - 0.9) * ratio;
    CHECK(coefficient == wanted, "case %zu: coefficient %g, not %g", k, coefficient, wanted);
  }
}

Test(adam, lambs_factors_at_their_ends) {
  static const struct {
    double last, plain, updates, largest, factor;
  } cases[] = {
      {1, 1, 1, 1.05, 1.05},
      {1, 1, 4, 1.08, 1.08 * 0.5 + 0.5}, /* half of the update is weight decay */
      {1, 9, 4, 1.08, 1.08},             /* the gradient's part of the update is at most 1 */
      {1, 0, 0, 0.95, 0.95},             /* no element moves, so this part is unknown */
      {1, 1, 1, 7, 1.0 * 1.1},           /* factor_change limits the factor */
      {1, 1, 1, 0, 1.0 * 0.9},           /* no element moves */
      {3.9, 1, 1, 100, 4},               /* max_factor limits the factor */
      {0.51, 1, 1, 0.1, 0.5},
      {5, 1, 1, 100, 5 * 0.9}, /* factor_change has priority over max_factor */
      {1, NAN, 1, NAN, 1.0 * 0.9},
  };
  for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
    double factor = ob_lamb_correct_factor(cases[k].last, cases[k].plain, cases[k].updates,
                                           cases[k].largest, &limits);
    CHECK(fabs(factor - cases[k].factor) <= 1e-15, "case %zu: factor %.17g, not %.17g", k, factor,
          cases[k].factor);
  }
}

Test(adam, lambs_scalings_at_their_ends) {
  CHECK(ob_lamb_level(12, 3) == 2 && ob_lamb_level(0, 0) == 0, "wrong levels");
  CHECK(ob_lamb_scaling(3, 2) == 1.5f, "not the mean over the level");
  CHECK(ob_lamb_scaling(3, 0) == 1, "scaling without momentum");
  CHECK(ob_lamb_scaling(NAN, 0) == 1, "a scaling of NaN that is not 1");
  CHECK(ob_lamb_scaling(1, 1e-300) == 1 && ob_lamb_scaling(1e-300, 1) == 1,
        "a scaling beyond float32");
}

/* Elements that never had a gradient in the warm-up keep their values. The others move. */
Test(adam, elements_without_variance_do_not_move) {
  struct adam_case what = make_case(&adam_tensors_many_words, 3);
  what.size = 2;
  struct adam_run run = adam_prepare(&what);
  on_ranks(2, adam_on_rank, &run);
  const float *last = run.moments[what.steps - 1].parameters;
  size_t moved = 0;
  for (size_t i = 0; i < what.tensors->list[0].count; i++) { /* a tensor without weight decay */
    if (i % 13 == 5)
      CHECK(last[i] == run.start[i], "parameter %zu moved", i);
    else
      moved += last[i] != run.start[i];
  }
  CHECK(moved > 50000, "only %zu parameters moved", moved);
  adam_release(&run);
}

/* Checks the bytes that steps send. A warm-up step sends as many as a dense allreduce, and a
 * compressed step at most a thirtieth of that. */
static void check_bytes(onebit_comm_t comm, void *context) {
  enum { COUNT = 1 << 18 };
  (void)context;
  float *parameter = allocate(COUNT, sizeof(float)), *gradient = allocate(COUNT, sizeof(float));
  onebit_tensor_t tensor = {parameter, gradient, COUNT, 0, 0, 0};
  onebit_optimizer_t optimizer;
  onebit_adam_options_t options = {.size = sizeof options, .freeze_step = 1};
  fill_input(gradient, ONEBIT_FLOAT32, COUNT, onebit_comm_rank(comm), 0);
  CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, &options, &optimizer), ONEBIT_OK);
  const onebit_optimizer_info_t info = optimizer_info(optimizer);
  for (int step = 0; step < 3; step++) {
    uint64_t before = onebit_comm_bytes_sent(comm);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 1e-3f), ONEBIT_OK);
    uint64_t sent = onebit_comm_bytes_sent(comm) - before;
    uint64_t told = step == 0 ? info.warmup_bytes : info.compressed_bytes;
    CHECK(sent == told, "step %d sent %llu bytes, info says %llu", step, (unsigned long long)sent,
          (unsigned long long)told);
  }
  CHECK(info.warmup_bytes >= 30 * info.compressed_bytes, "%llu bytes, compressed %llu",
        (unsigned long long)info.warmup_bytes, (unsigned long long)info.compressed_bytes);
  CHECK(info.memory_bytes < 30 * (uint64_t)COUNT, "memory of %llu bytes",
        (unsigned long long)info.memory_bytes);
  onebit_optimizer_destroy(optimizer);
  free(parameter);
  free(gradient);
}

Test(adam, sends_and_allocates_what_it_says) {
  for (int size = 2; size <= 4; size++)
    on_ranks(size, check_bytes, NULL);
}
