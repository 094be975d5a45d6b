/*
 * The outer step: in float32 it equals formulas written here, for all rules, with fragments, delays
 * and weights; in bits the consensus is the same on all ranks, comes to the dense optimum, which
 * the control without error feedback does not, and costs the bytes that were promised, and none
 * between exchanges. What is wrong is told on all ranks.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support.h"

TestSuite(outer, .timeout = 120);

enum { TENSORS = 3, EACH = 320, ALL = TENSORS * EACH, MAX_RANKS = 16 };

/* Where a rank's training goes: its own optimum, and in part everyone's. */
static float target(int rank, size_t i) {
  return uniform_value(i) + uniform_value(1000003 + (uint64_t)rank * 7919 + i);
}

static void train_by(float rate, float *parameters, size_t count, int rank) {
  for (size_t i = 0; i < count; i++)
    parameters[i] -= rate * (parameters[i] - target(rank, i));
}

static void train(float *parameters, size_t count, int rank) {
  train_by(0.05f, parameters, count, rank);
}

static void list_tensors(onebit_tensor_t tensors[TENSORS], float *parameters) {
  for (size_t t = 0; t < TENSORS; t++)
    tensors[t] = (onebit_tensor_t){.parameter = parameters + t * EACH, .count = EACH};
}

static onebit_outer_t make(onebit_comm_t comm, float parameters[ALL],
                           const onebit_outer_options_t *options) {
  onebit_tensor_t tensors[TENSORS];
  onebit_outer_t outer = NULL;
  list_tensors(tensors, parameters);
  CHECK_STATUS(onebit_outer_create(comm, tensors, TENSORS, options, &outer), ONEBIT_OK);
  return outer;
}

static void read_consensus(onebit_outer_t outer, float values[ALL]) {
  for (size_t t = 0; t < TENSORS; t++)
    CHECK_STATUS(onebit_outer_get_consensus(outer, t, values + t * EACH), ONEBIT_OK);
}

/* --- In float32: the formulas ------------------------------------------------------------------*/

struct oracle {
  onebit_outer_options_t options;
  int size;
  float x[ALL], m[ALL], d[ALL], p[MAX_RANKS][ALL];
};

static void oracle_begin(struct oracle *oracle, size_t first, size_t end) {
  for (size_t i = first; i < end; i++) {
    oracle->d[i] = 0;
    for (int r = 0; r < oracle->size; r++)
      oracle->d[i] += (oracle->x[i] - oracle->p[r][i]) / (float)oracle->size;
  }
}

static void oracle_apply(struct oracle *oracle, size_t first, size_t end) {
  const onebit_outer_options_t *o = &oracle->options;
  const float rate = (float)o->learning_rate, b = (float)o->momentum, mixing = (float)o->mixing;
  for (size_t i = first; i < end; i++) {
    oracle->m[i] = b * oracle->m[i] + oracle->d[i];
    const float step = o->rule == ONEBIT_OUTER_MEAN       ? oracle->d[i]
                       : o->rule == ONEBIT_OUTER_MOMENTUM ? oracle->m[i]
                                                          : oracle->d[i] + b * oracle->m[i];
    oracle->x[i] -= rate * step;
    for (int r = 0; r < oracle->size; r++)
      oracle->p[r][i] = (1 - mixing) * oracle->p[r][i] + mixing * oracle->x[i];
  }
}

static void oracle_step(struct oracle *oracle, size_t step) {
  const size_t h = oracle->options.local_steps, parts = oracle->options.fragments;
  for (int r = 0; r < oracle->size; r++)
    train(oracle->p[r], ALL, r);
  for (size_t f = 0; f < parts; f++) {
    const size_t first = f * ALL / parts, end = (f + 1) * ALL / parts, at = h * (f + 1) / parts;
    if (step >= at && (step - at) % h == 0)
      oracle_begin(oracle, first, end);
    if (step >= at + oracle->options.delay && (step - at - oracle->options.delay) % h == 0)
      oracle_apply(oracle, first, end);
  }
}

static void check_near(const char *what, const float *actual, const float *wanted) {
  for (size_t i = 0; i < ALL; i++)
    if (!CHECK(fabsf(actual[i] - wanted[i]) <= 2e-5f, "%s[%zu] is %.9g, not %.9g", what, i,
               (double)actual[i], (double)wanted[i]))
      return;
}

static void follow_oracle(onebit_comm_t comm, void *context) {
  const onebit_outer_options_t *options = context;
  const int rank = onebit_comm_rank(comm);
  struct oracle *oracle = allocate(1, sizeof *oracle);
  float p[ALL], x[ALL];
  *oracle = (struct oracle){.options = *options, .size = onebit_comm_size(comm)};
  memset(p, 0, sizeof p);
  onebit_outer_t outer = make(comm, p, options);
  for (size_t step = 1; outer && step <= 27; step++) {
    train(p, ALL, rank);
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
    oracle_step(oracle, step);
    read_consensus(outer, x);
    check_near("the consensus", x, oracle->x);
    check_near("the parameters", p, oracle->p[rank]);
  }
  onebit_outer_destroy(outer);
  free(oracle);
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
        on_ranks(sizes[s], follow_oracle, &options);
    }
}

Test(outer, fragments_and_delays_equal_the_formulas) {
  for (size_t delay = 0; delay < 6; delay += 5)
    for (int rule = 0; rule < 3; rule += 2) {
      onebit_outer_options_t options = dense_options((onebit_outer_rule_t)rule);
      options.fragments = TENSORS;
      options.block_size = 64;
      options.delay = delay;
      options.mixing = delay ? 0.5 : 1;
      on_ranks(4, follow_oracle, &options);
    }
}

/* A rank of half the speed makes half the steps, and counts half. */
static void weigh(onebit_comm_t comm, void *context) {
  (void)context;
  const int rank = onebit_comm_rank(comm);
  const size_t steps = rank == 0 ? 2 : 4;
  float p[ALL] = {0}, q[2][ALL] = {{0}}, x[ALL];
  onebit_outer_options_t options = dense_options(ONEBIT_OUTER_MEAN);
  options.learning_rate = 1;
  options.local_steps = steps;
  options.weighted = 1;
  onebit_outer_t outer = make(comm, p, &options);
  for (int round = 0; outer && round < 3; round++) {
    for (size_t step = 0; step < steps; step++) {
      train(p, ALL, rank);
      CHECK_STATUS(onebit_outer_step(outer, 100), ONEBIT_OK);
    }
    for (size_t step = 0; step < 4; step++) {
      if (step < 2)
        train(q[0], ALL, 0);
      train(q[1], ALL, 1);
    }
    for (size_t i = 0; i < ALL; i++)
      q[0][i] = q[1][i] = (2 * q[0][i] + 4 * q[1][i]) / 6;
    read_consensus(outer, x);
    check_near("the weighted consensus", x, q[0]);
  }
  onebit_outer_destroy(outer);
}

Test(outer, unequal_steps_are_weighted) { on_ranks(2, weigh, NULL); }

/* --- Compressed --------------------------------------------------------------------------------*/

enum { STEPS = 3000 };

struct descent {
  onebit_outer_options_t options;
  double distance[MAX_RANKS];
  uint32_t checksum[MAX_RANKS];
};

/* How far the consensus ends from the mean of the ranks' optima, which is that of all. */
static void descend(onebit_comm_t comm, void *context) {
  struct descent *descent = context;
  const int rank = onebit_comm_rank(comm), size = onebit_comm_size(comm);
  onebit_outer_info_t info = {.size = sizeof info};
  float p[ALL] = {0};
  onebit_outer_t outer = make(comm, p, &descent->options);
  uint64_t sent = onebit_comm_bytes_sent(comm);
  for (size_t step = 1; outer && step <= STEPS; step++) {
    train_by(0.02f / (1 + (float)step / 40), p, ALL, rank);
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
    if (step % 10)
      CHECK(onebit_comm_bytes_sent(comm) == sent, "step %zu sent something", step);
    else
      CHECK(size == 1 || onebit_comm_bytes_sent(comm) > sent, "step %zu sent nothing", step);
    sent = onebit_comm_bytes_sent(comm);
  }
  double sum = 0;
  read_consensus(outer, p);
  for (size_t i = 0; i < ALL; i++) {
    double mean = 0;
    for (int r = 0; r < size; r++)
      mean += (double)target(r, i) / size;
    sum += ((double)p[i] - mean) * ((double)p[i] - mean);
  }
  descent->distance[rank] = sqrt(sum);
  CHECK_STATUS(onebit_outer_get_info(outer, &info), ONEBIT_OK);
  CHECK(info.exchanges == STEPS / 10 && info.steps == STEPS && !info.skipped && !info.in_flight,
        "counts");
  descent->checksum[rank] = info.checksum;
  onebit_outer_destroy(outer);
}

static double distance_after(onebit_outer_rule_t rule, int bits, int no_error_feedback, int size) {
  struct descent descent = {.options = ONEBIT_OUTER_OPTIONS_INIT};
  descent.options.local_steps = 10;
  descent.options.rule = rule;
  descent.options.bits = bits;
  descent.options.block_size = 64;
  descent.options.no_error_feedback = no_error_feedback;
  on_ranks(size, descend, &descent);
  for (int r = 1; r < size; r++)
    cr_expect(descent.checksum[r] == descent.checksum[0] &&
                  descent.distance[r] == descent.distance[0],
              "rank %d differs", r);
  return descent.distance[0];
}

Test(outer, every_width_comes_to_the_optimum) {
  static const int widths[] = {1, 2, 4, 8, ONEBIT_OUTER_DENSE};
  const double control = distance_after(ONEBIT_OUTER_MEAN, 1, 1, 4);
  for (size_t w = 0; w < 5; w++) {
    const double distance = distance_after(ONEBIT_OUTER_MEAN, widths[w], 0, 4);
    cr_log_info("%d bits: %g, control %g", widths[w], distance, control);
    cr_expect_lt(distance, 0.2 * control, "%d bits: %g, control %g", widths[w], distance, control);
  }
  static const int sizes[] = {1, 2, 3, 8};
  for (size_t s = 0; s < 4; s++)
    cr_expect_lt(distance_after(ONEBIT_OUTER_MEAN, 1, 0, sizes[s]), 0.3 * control, "%d ranks",
                 sizes[s]);
}

/* Of a rank alone all that it does not send stays in its parameters: an exchange changes nothing
 * but its consensus. Of several, what they do not send is different from rank to rank. */
static void stay(onebit_comm_t comm, void *context) {
  const bool feedback = *(const bool *)context, alone = onebit_comm_size(comm) == 1;
  float p[ALL] = {0}, before[ALL], x[ALL];
  double change = 0, left = 0;
  onebit_outer_options_t options = ONEBIT_OUTER_OPTIONS_INIT;
  options.local_steps = 1;
  options.no_error_feedback = !feedback;
  onebit_outer_t outer = make(comm, p, &options);
  for (int step = 0; step < 20; step++) {
    train(p, ALL, onebit_comm_rank(comm));
    memcpy(before, p, sizeof p);
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
    read_consensus(outer, x);
    for (size_t i = 0; i < ALL; i++) {
      change = fmax(change, fabs((double)p[i] - (double)before[i]));
      left = fmax(left, fabs((double)p[i] - (double)x[i]));
    }
  }
  CHECK(feedback ? left > 1e-2 : left == 0, "a difference of %g is left", left);
  CHECK(alone && feedback ? change < 1e-5 : change > 1e-2, "a change of %g", change);
  CHECK_STATUS(onebit_outer_synchronize(outer), ONEBIT_OK);
  read_consensus(outer, x);
  CHECK_BITS("the parameters", p, x, ALL, ONEBIT_FLOAT32);
  onebit_outer_destroy(outer);
}

Test(outer, what_is_not_sent_stays) {
  for (int feedback = 0; feedback < 2; feedback++) {
    bool with = feedback;
    on_ranks(1, stay, &with);
    on_ranks(3, stay, &with);
  }
}

/* The default width of a rule with much momentum is one that it bears. */
Test(outer, default_bits_follow_the_rule) {
  const double few = distance_after(ONEBIT_OUTER_NESTEROV, 1, 0, 4);
  const double momentum = distance_after(ONEBIT_OUTER_MOMENTUM, 0, 0, 4);
  const double nesterov = distance_after(ONEBIT_OUTER_NESTEROV, 0, 0, 4);
  cr_log_info("momentum %g, Nesterov %g, with one bit %g", momentum, nesterov, few);
  cr_expect_lt(momentum, distance_after(ONEBIT_OUTER_MEAN, 0, 0, 4), "momentum: %g", momentum);
  cr_expect_lt(nesterov, 0.2 * few, "Nesterov: %g, with one bit %g", nesterov, few);
}

/* --- Bytes -------------------------------------------------------------------------------------*/

enum { LARGE = 400000 };

struct bytes {
  uint64_t sent[MAX_RANKS];
};

static void count_bytes(onebit_comm_t comm, void *context) {
  struct bytes *bytes = context;
  const int rank = onebit_comm_rank(comm);
  float *p = allocate(LARGE, sizeof *p);
  onebit_tensor_t tensor = {.parameter = p, .count = LARGE};
  onebit_outer_options_t options = ONEBIT_OUTER_OPTIONS_INIT;
  onebit_outer_t outer;
  options.local_steps = 1;
  options.schedule = ONEBIT_SCHEDULE_EXCHANGE;
  if (CHECK_STATUS(onebit_outer_create(comm, &tensor, 1, &options, &outer), ONEBIT_OK)) {
    onebit_outer_info_t info = {.size = sizeof info};
    train(p, LARGE, rank);
    const uint64_t before = onebit_comm_bytes_sent(comm);
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
    bytes->sent[rank] = onebit_comm_bytes_sent(comm) - before;
    CHECK_STATUS(onebit_outer_get_info(outer, &info), ONEBIT_OK);
    CHECK(info.exchange_bytes == bytes->sent[rank], "%ju bytes were announced, %ju sent",
          (uintmax_t)info.exchange_bytes, (uintmax_t)bytes->sent[rank]);
    onebit_outer_destroy(outer);
  }
  free(p);
}

/* What is received in all is what is sent in all; the ranks' parts are the same but for a block. */
Test(outer, bytes_of_an_exchange) {
  for (int size = 2; size <= MAX_RANKS; size *= 2) {
    struct bytes bytes = {{0}};
    double sum = 0;
    on_ranks(size, count_bytes, &bytes);
    for (int r = 0; r < size; r++)
      sum += (double)bytes.sent[r] / size;
    cr_log_info("%d ranks: %.0f bytes, %.4f of n / 4", size, sum, sum / (LARGE / 4));
    cr_expect_leq(sum, 1.05 * LARGE / 4, "%d ranks: %.0f bytes", size, sum);
  }
}

/* --- What is wrong -----------------------------------------------------------------------------*/

static void skip(onebit_comm_t comm, void *context) {
  const int rank = onebit_comm_rank(comm);
  float p[ALL] = {0}, kept[ALL], x[ALL], zero[ALL] = {0};
  onebit_outer_options_t options = ONEBIT_OUTER_OPTIONS_INIT;
  options.local_steps = 1;
  options.bits = *(int *)context;
  onebit_outer_t outer = make(comm, p, &options);
  train(p, ALL, rank);
  if (rank == 1)
    p[77] = NAN;
  memcpy(kept, p, sizeof p);
  CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_SKIPPED);
  read_consensus(outer, x);
  CHECK_BITS("the consensus", x, zero, ALL, ONEBIT_FLOAT32);
  CHECK_BITS("the parameters", p, rank == 1 ? zero : kept, ALL, ONEBIT_FLOAT32);
  CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
  onebit_outer_info_t info = {.size = sizeof info};
  CHECK_STATUS(onebit_outer_get_info(outer, &info), ONEBIT_OK);
  CHECK(info.skipped == 1 && info.exchanges == 1, "counts");
  onebit_outer_destroy(outer);
}

Test(outer, a_drift_that_is_no_number_is_skipped) {
  for (int bits = 1; bits <= 32; bits *= 4)
    if (bits != 16)
      on_ranks(3, skip, &bits);
  int dense = ONEBIT_OUTER_DENSE;
  on_ranks(3, skip, &dense);
}

static void differ(onebit_comm_t comm, void *context) {
  (void)context;
  const int rank = onebit_comm_rank(comm);
  float p[ALL] = {0};
  onebit_tensor_t tensors[TENSORS];
  onebit_outer_options_t options = ONEBIT_OUTER_OPTIONS_INIT;
  onebit_outer_t outer;
  list_tensors(tensors, p);
  options.local_steps = rank == 1 ? 7 : 6;
  CHECK_STATUS(onebit_outer_create(comm, tensors, TENSORS, &options, &outer),
               ONEBIT_ERROR_MISMATCH);
  CHECK_WORDS("local_steps differs");
  options.local_steps = 1;
  p[5] = rank == 2 ? 1 : 0;
  CHECK_STATUS(onebit_outer_create(comm, tensors, TENSORS, &options, &outer),
               ONEBIT_ERROR_MISMATCH);
  CHECK_WORDS("the parameters of all tensors");
  p[5] = 0;
  options.bits = rank == 0 ? 3 : 1;
  CHECK_STATUS(onebit_outer_create(comm, tensors, TENSORS, &options, &outer),
               rank == 0 ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
  options.bits = 1;
  options.weighted = 1;
  outer = make(comm, p, &options);
  CHECK_STATUS(onebit_outer_step(outer, rank == 0 ? NAN : 1),
               rank == 0 ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
  CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
  onebit_outer_destroy(outer);
}

Test(outer, what_differs_is_told_on_all_ranks) { on_ranks(3, differ, NULL); }

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
  onebit_comm_t comm;
  cr_assert_eq(onebit_comm_create_self(&comm), ONEBIT_OK);
  for (size_t k = 0; k < sizeof pairs / sizeof pairs[0]; k++) {
    float p[ALL] = {0};
    onebit_outer_options_t options = ONEBIT_OUTER_OPTIONS_INIT;
    options.rule = pairs[k].rule;
    options.bits = pairs[k].bits;
    options.momentum = pairs[k].momentum;
    onebit_outer_t outer = make(comm, p, &options);
    CHECK_STATUS(onebit_outer_check(outer), pairs[k].wanted);
    onebit_outer_destroy(outer);
  }
  onebit_comm_destroy(comm);
  checks_must_hold();
}

/* Rounding is no drift: parameters that nobody touches leave the consensus as it is. And what
 * uncompressed tensors drift is exact. */
static void round_parameters(onebit_comm_t comm, void *context) {
  (void)context;
  uint16_t half[ALL];
  float plain[7], x[7];
  onebit_tensor_t tensor = {.parameter = half, .count = ALL};
  onebit_outer_options_t options = ONEBIT_OUTER_OPTIONS_INIT;
  onebit_outer_t outer;
  options.local_steps = 1;
  options.parameter_dtype = ONEBIT_BFLOAT16;
  fill_input(half, ONEBIT_BFLOAT16, ALL, 5, 0);
  if (CHECK_STATUS(onebit_outer_create(comm, &tensor, 1, &options, &outer), ONEBIT_OK)) {
    onebit_outer_info_t info = {.size = sizeof info};
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
    half[3] ^= 1; /* a step of the last place, on every rank */
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
    CHECK_STATUS(onebit_outer_synchronize(outer), ONEBIT_OK);
    CHECK_STATUS(onebit_outer_get_info(outer, &info), ONEBIT_OK);
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

/* An end with an exchange in flight, no tensors, and fewer elements than ranks. */
static void odd_ends(onebit_comm_t comm, void *context) {
  (void)context;
  float p[ALL] = {0};
  onebit_outer_options_t options = ONEBIT_OUTER_OPTIONS_INIT;
  onebit_outer_t outer;
  options.local_steps = 4;
  options.delay = 3;
  options.fragments = 2;
  outer = make(comm, p, &options);
  for (int step = 0; step < 5; step++) {
    train(p, ALL, onebit_comm_rank(comm));
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

Test(outer, odd_ends) { on_ranks(3, odd_ends, NULL); }
