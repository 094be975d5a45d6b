/*
 * Tests the outer step. In float32 it must equal the formulas, for all rules, with fragments,
 * delays and weights. If one rank makes an error, all ranks must get an error.
 */
#include "tests/support_outer.h"

/* --- In float32: the formulas ------------------------------------------------------------------*/

static void check_near(const char *what, const float *actual, const float *wanted) {
  for (size_t i = 0; i < PLAIN_ALL; i++)
    if (!CHECK(fabsf(actual[i] - wanted[i]) <= 2e-5f, "%s[%zu] is %.9g, not %.9g", what, i,
               (double)actual[i], (double)wanted[i]))
      return;
}

static void follow_formulas(onebit_comm_t comm, void *context) {
  const onebit_outer_options_t *options = context;
  const int rank = onebit_comm_rank(comm);
  struct outer_formulas *formulas = formulas_of(options, onebit_comm_size(comm), PLAIN_ALL, false);
  float p[PLAIN_ALL] = {0}, x[PLAIN_ALL];
  onebit_outer_t outer = plain_make(comm, p, options);
  for (size_t step = 1; outer && step <= 27; step++) {
    plain_train(p, PLAIN_ALL, rank);
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
    formulas_step(formulas, step);
    plain_consensus(outer, x);
    check_near("the consensus", x, formulas->x);
    check_near("the parameters", p, formulas->p[rank]);
  }
  onebit_outer_destroy(outer);
  free(formulas);
}

static onebit_outer_options_t dense_options(onebit_outer_rule_t rule) {
  onebit_outer_options_t options = ONEBIT_OUTER_OPTIONS_INIT;
  options.local_steps = 6;
  options.rule = rule;
  options.learning_rate = 0.8;
  options.momentum = rule == ONEBIT_OUTER_MEAN ? 0 : 0.6;
  options.bits = ONEBIT_OUTER_DENSE;
  options.fragments = 1;
  options.mixing = 1;
  return options;
}

Test(outer, equals_the_formulas) {
  static const int sizes[] = {1, 2, 3, 4, 8};
  for (size_t s = 0; s < 5; s++)
    for (int rule = 0; rule < 3; rule++) {
      onebit_outer_options_t options = dense_options((onebit_outer_rule_t)rule);
      if (test_wanted(s))
        on_ranks(sizes[s], follow_formulas, &options);
    }
}

Test(outer, fragments_and_delays_equal_the_formulas) {
  for (size_t delay = 0; delay < 6; delay += 5)
    for (int rule = 0; rule < 3; rule += 2) {
      onebit_outer_options_t options = dense_options((onebit_outer_rule_t)rule);
      options.fragments = PLAIN_TENSORS;
      options.block_size = 64;
      options.delay = delay;
      options.mixing = delay ? 0.5 : 1;
      on_ranks(4, follow_formulas, &options);
    }
}

/* A rank of half the speed makes half as many steps, and has half the weight. */
static void check_weights_on_rank(onebit_comm_t comm, void *context) {
  (void)context;
  const int rank = onebit_comm_rank(comm);
  const size_t steps = rank == 0 ? 2 : 4;
  float p[PLAIN_ALL] = {0}, q[2][PLAIN_ALL] = {{0}}, x[PLAIN_ALL];
  onebit_outer_options_t options = dense_options(ONEBIT_OUTER_MEAN);
  options.learning_rate = 1;
  options.local_steps = steps;
  options.weighted = 1;
  onebit_outer_t outer = plain_make(comm, p, &options);
  for (int round = 0; outer && round < 3; round++) {
    for (size_t step = 0; step < steps; step++) {
      plain_train(p, PLAIN_ALL, rank);
      CHECK_STATUS(onebit_outer_step(outer, 100), ONEBIT_OK);
    }
    for (size_t step = 0; step < 4; step++) {
      if (step < 2)
        plain_train(q[0], PLAIN_ALL, 0);
      plain_train(q[1], PLAIN_ALL, 1);
    }
    for (size_t i = 0; i < PLAIN_ALL; i++)
      q[0][i] = q[1][i] = (2 * q[0][i] + 4 * q[1][i]) / 6;
    plain_consensus(outer, x);
    check_near("the weighted consensus", x, q[0]);
  }
  onebit_outer_destroy(outer);
}

Test(outer, unequal_steps_are_weighted) { on_ranks(2, check_weights_on_rank, NULL); }

/* --- Wrong calls -------------------------------------------------------------------------------*/

static void check_skip_on_rank(onebit_comm_t comm, void *context) {
  const int rank = onebit_comm_rank(comm);
  float p[PLAIN_ALL] = {0}, kept[PLAIN_ALL], x[PLAIN_ALL], zero[PLAIN_ALL] = {0};
  onebit_outer_options_t options = {
      .size = sizeof options, .local_steps = 1, .bits = *(int *)context};
  onebit_outer_t outer = plain_make(comm, p, &options);
  plain_train(p, PLAIN_ALL, rank);
  if (rank == 1)
    p[77] = NAN;
  memcpy(kept, p, sizeof p);
  CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_SKIPPED);
  plain_consensus(outer, x);
  CHECK_BITS("the consensus", x, zero, PLAIN_ALL, ONEBIT_FLOAT32);
  CHECK_BITS("the parameters", p, rank == 1 ? zero : kept, PLAIN_ALL, ONEBIT_FLOAT32);
  CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
  const onebit_outer_info_t info = outer_info(outer);
  CHECK(info.skipped == 1 && info.exchanges == 1, "counts");
  onebit_outer_destroy(outer);
}

Test(outer, a_drift_that_is_no_number_is_skipped) {
  for (int bits = 1; bits <= 32; bits *= 4)
    if (bits != 16)
      on_ranks(3, check_skip_on_rank, &bits);
  int dense = ONEBIT_OUTER_DENSE;
  on_ranks(3, check_skip_on_rank, &dense);
}

static void pass_different_options(onebit_comm_t comm, void *context) {
  (void)context;
  const int rank = onebit_comm_rank(comm);
  float p[PLAIN_ALL] = {0};
  onebit_tensor_t tensors[PLAIN_TENSORS];
  onebit_outer_t outer;
  plain_list(tensors, p);
  onebit_outer_options_t options = {.size = sizeof options, .local_steps = rank == 1 ? 7 : 6};
  CHECK_STATUS(onebit_outer_create(comm, tensors, PLAIN_TENSORS, &options, &outer),
               ONEBIT_ERROR_MISMATCH);
  CHECK_WORDS("local_steps differs");
  options.local_steps = 1;
  p[5] = rank == 2 ? 1 : 0;
  CHECK_STATUS(onebit_outer_create(comm, tensors, PLAIN_TENSORS, &options, &outer),
               ONEBIT_ERROR_MISMATCH);
  CHECK_WORDS("the parameters of all tensors");
  p[5] = 0;
  options.bits = rank == 0 ? 3 : 1;
  CHECK_STATUS(onebit_outer_create(comm, tensors, PLAIN_TENSORS, &options, &outer),
               rank == 0 ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
  options.bits = 1;
  options.weighted = 1;
  outer = plain_make(comm, p, &options);
  CHECK_STATUS(onebit_outer_step(outer, rank == 0 ? NAN : 1),
               rank == 0 ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
  CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
  onebit_outer_destroy(outer);
}

Test(outer, what_differs_is_told_on_all_ranks) { on_ranks(3, pass_different_options, NULL); }

Test(outer, poor_pairs_warn) {
  static const struct {
    onebit_outer_rule_t rule;
    int bits;
    double momentum;
    onebit_status_t wanted;
  } pairs[] = {{ONEBIT_OUTER_MEAN, 0, 0, ONEBIT_OK},
               {ONEBIT_OUTER_MOMENTUM, 0, 0, ONEBIT_OK},
               {ONEBIT_OUTER_MOMENTUM, 0, 0.8, ONEBIT_OK},
               {ONEBIT_OUTER_NESTEROV, 0, 0, ONEBIT_OK},
               {ONEBIT_OUTER_NESTEROV, ONEBIT_OUTER_DENSE, 0, ONEBIT_OK},
               {ONEBIT_OUTER_MOMENTUM, 1, 0.5, ONEBIT_WARNING},
               {ONEBIT_OUTER_MOMENTUM, 2, 0.8, ONEBIT_WARNING},
               {ONEBIT_OUTER_NESTEROV, 2, 0, ONEBIT_WARNING},
               {ONEBIT_OUTER_NESTEROV, 1, 0, ONEBIT_WARNING}};
  onebit_comm_t comm = self_comm();
  for (size_t k = 0; k < sizeof pairs / sizeof pairs[0]; k++) {
    float p[PLAIN_ALL] = {0};
    onebit_outer_options_t options = ONEBIT_OUTER_OPTIONS_INIT;
    options.rule = pairs[k].rule;
    options.bits = pairs[k].bits;
    options.momentum = pairs[k].momentum;
    onebit_outer_t outer = plain_make(comm, p, &options);
    CHECK_STATUS(onebit_outer_check(outer), pairs[k].wanted);
    onebit_outer_destroy(outer);
  }
  onebit_comm_destroy(comm);
}

/* Rounding does not count as drift: parameters that do not change leave the consensus unchanged.
 * The drift of uncompressed tensors is exact. */
static void round_parameters(onebit_comm_t comm, void *context) {
  (void)context;
  uint16_t half[PLAIN_ALL];
  float plain[7], x[7];
  onebit_tensor_t tensor = {.parameter = half, .count = PLAIN_ALL};
  onebit_outer_t outer;
  onebit_outer_options_t options = {
      .size = sizeof options, .local_steps = 1, .parameter_dtype = ONEBIT_BFLOAT16};
  fill_input(half, ONEBIT_BFLOAT16, PLAIN_ALL, 5, 0);
  if (CHECK_STATUS(onebit_outer_create(comm, &tensor, 1, &options, &outer), ONEBIT_OK)) {
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
    half[3] ^= 1; /* changes the last bit, on every rank */
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
    CHECK_STATUS(onebit_outer_synchronize(outer), ONEBIT_OK);
    const onebit_outer_info_t info = outer_info(outer);
    CHECK(info.exchanges == 4, "%ju exchanges", (uintmax_t)info.exchanges);
    onebit_outer_destroy(outer);
  }
  for (size_t i = 0; i < 7; i++)
    plain[i] = (float)i;
  tensor = (onebit_tensor_t){.parameter = plain, .count = 7, .uncompressed = 1};
  options.parameter_dtype = ONEBIT_FLOAT32;
  if (CHECK_STATUS(onebit_outer_create(comm, &tensor, 1, &options, &outer), ONEBIT_OK)) {
    plain[2] += (float)(onebit_comm_rank(comm) * 2);
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
    CHECK_STATUS(onebit_outer_get_consensus(outer, 0, x), ONEBIT_OK);
    CHECK(x[2] == 3 && plain[2] == 3 && x[6] == 6, "%g, %g", (double)x[2], (double)plain[2]);
    onebit_outer_destroy(outer);
  }
}

Test(outer, sixteen_bits_and_uncompressed_tensors) { on_ranks(2, round_parameters, NULL); }

/* Tests destroying an outer step with an exchange in flight, no tensors, and fewer elements than
 * ranks. */
static void run_odd_ends(onebit_comm_t comm, void *context) {
  (void)context;
  float p[PLAIN_ALL] = {0};
  onebit_outer_t outer;
  onebit_outer_options_t options = {
      .size = sizeof options, .local_steps = 4, .delay = 3, .fragments = 2};
  outer = plain_make(comm, p, &options);
  for (int step = 0; step < 5; step++) {
    plain_train(p, PLAIN_ALL, onebit_comm_rank(comm));
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
  }
  onebit_outer_destroy(outer);
  p[0] = 0;
  onebit_tensor_t tensor = {.parameter = p, .count = 1};
  for (size_t count = 0; count < 2; count++)
    if (CHECK_STATUS(onebit_outer_create(comm, &tensor, count, &options, &outer), ONEBIT_OK)) {
      for (int step = 0; step < 9; step++)
        CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
      CHECK_STATUS(onebit_outer_synchronize(outer), ONEBIT_OK);
      onebit_outer_destroy(outer);
    }
}

Test(outer, odd_ends) { on_ranks(3, run_odd_ends, NULL); }
