/* Tests the compressed outer step, sparse messages, and the residual of a drift. */
#include "compression/sparse.h"
#include "tests/support.h"
#include "tests/support_outer.h"

/*
 * Tests the compressed outer step. The consensus, on which all ranks agree, must be the same on all
 * ranks and reach the optimum of dense training. A control run without error feedback must not
 * reach it. An exchange must send the promised bytes, and nothing may be sent between exchanges.
 */

enum { MAX_RANKS = 16 };

/* --- Compressed --------------------------------------------------------------------------------*/

static double distance_after(onebit_outer_rule_t rule, int bits, int no_error_feedback, int size) {
  const onebit_outer_options_t options = {.size = sizeof options,
                                          .local_steps = 10,
                                          .rule = rule,
                                          .bits = bits,
                                          .block_size = 64,
                                          .no_error_feedback = no_error_feedback};
  return outer_distance_after(&options, size, 3000, false);
}

Test(outer_bits, every_width_comes_to_the_optimum) {
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

/* A single rank keeps in its parameters everything that it does not send, so an exchange changes
 * only the consensus. With several ranks, the part that is not sent differs from rank to rank. */
static void check_unsent_stays_on_rank(onebit_comm_t comm, void *context) {
  const bool feedback = *(const bool *)context, alone = onebit_comm_size(comm) == 1;
  float p[PLAIN_ALL] = {0}, before[PLAIN_ALL], x[PLAIN_ALL];
  double change = 0, left = 0;
  onebit_outer_options_t options = {
      .size = sizeof options, .local_steps = 1, .no_error_feedback = !feedback};
  onebit_outer_t outer = plain_make(comm, p, &options);
  for (int step = 0; step < 20; step++) {
    plain_train(p, PLAIN_ALL, onebit_comm_rank(comm));
    memcpy(before, p, sizeof p);
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
    plain_consensus(outer, x);
    for (size_t i = 0; i < PLAIN_ALL; i++) {
      change = fmax(change, fabs((double)p[i] - (double)before[i]));
      left = fmax(left, fabs((double)p[i] - (double)x[i]));
    }
  }
  CHECK(feedback ? left > 1e-2 : left == 0, "a difference of %g is left", left);
  CHECK(alone && feedback ? change < 1e-5 : change > 1e-2, "a change of %g", change);
  CHECK_STATUS(onebit_outer_synchronize(outer), ONEBIT_OK);
  plain_consensus(outer, x);
  CHECK_BITS("the parameters", p, x, PLAIN_ALL, ONEBIT_FLOAT32);
  onebit_outer_destroy(outer);
}

Test(outer_bits, what_is_not_sent_stays) {
  for (int feedback = 0; feedback < 2; feedback++) {
    bool with = feedback;
    on_ranks(1, check_unsent_stays_on_rank, &with);
    on_ranks(3, check_unsent_stays_on_rank, &with);
  }
}

/* A rule with much momentum must have a default width with which it converges. */
Test(outer_bits, default_bits_follow_the_rule) {
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
  onebit_outer_t outer;
  onebit_outer_options_t options = {
      .size = sizeof options, .local_steps = 1, .schedule = ONEBIT_SCHEDULE_EXCHANGE};
  if (CHECK_STATUS(onebit_outer_create(comm, &tensor, 1, &options, &outer), ONEBIT_OK)) {
    plain_train(p, LARGE, rank);
    const uint64_t before = onebit_comm_bytes_sent(comm);
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
    bytes->sent[rank] = onebit_comm_bytes_sent(comm) - before;
    const onebit_outer_info_t info = outer_info(outer);
    CHECK(info.exchange_bytes == bytes->sent[rank], "%ju bytes were announced, %ju sent",
          (uintmax_t)info.exchange_bytes, (uintmax_t)bytes->sent[rank]);
    onebit_outer_destroy(outer);
  }
  free(p);
}

/* All ranks together receive as many bytes as they send. The bytes that two ranks send differ by at
 * most those of a block. */
Test(outer_bits, bytes_of_an_exchange) {
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

/* Tests the outer step with sparse messages. It must give the codec's results on every rank. Also
 * tests skipped steps. */

enum { SIZE = 5000, SMALL = 33, COUNT = SIZE + SMALL, ROUNDS = 6, SPARSE_RANKS = 4 };

struct oracle {
  float consensus[COUNT], residual[SPARSE_RANKS][COUNT];
};

static float local_movement(size_t i, int rank, int round) { return input_value(i, rank, round); }

/* Computes one round: the messages of all ranks are added in rank order. Tensor 1 is
 * uncompressed. */
static void oracle_round(struct oracle *oracle, int ranks, int round) {
  static _Thread_local float mean[COUNT], drift[COUNT];
  static _Thread_local uint32_t message[2 * OB_SPARSE_STRIDE];
  const float weight = 1 / (float)ranks;
  memset(mean, 0, sizeof mean);
  for (int rank = 0; rank < ranks; rank++) {
    float *residual = oracle->residual[rank];
    for (size_t i = 0; i < COUNT; i++) {
      const float parameter = oracle->consensus[i] - local_movement(i, rank, round);
      drift[i] = oracle->consensus[i] - parameter;
      residual[i] = 0.95f * residual[i] + drift[i];
    }
    ob_sparse_compress(residual, SIZE, message);
    ob_sparse_add(message, SIZE, weight, mean);
    for (size_t i = SIZE; i < COUNT; i++) {
      mean[i] += weight * residual[i];
      residual[i] = 0;
    }
  }
  for (size_t i = 0; i < COUNT; i++)
    oracle->consensus[i] -= mean[i];
}

static void train_sparse_on_rank(onebit_comm_t comm, void *context) {
  const int rank = onebit_comm_rank(comm), ranks = onebit_comm_size(comm);
  float *parameters = calloc(COUNT, sizeof *parameters);
  struct oracle *oracle = calloc(1, sizeof *oracle);
  onebit_tensor_t tensors[2] = {
      {.parameter = parameters, .count = SIZE},
      {.parameter = parameters + SIZE, .count = SMALL, .uncompressed = 1}};
  onebit_outer_t outer;
  (void)context;
  onebit_outer_options_t options = {
      .size = sizeof options, .local_steps = 2, .bits = ONEBIT_OUTER_SPARSE};
  if (CHECK_STATUS(onebit_outer_create(comm, tensors, 2, &options, &outer), ONEBIT_OK))
    for (int round = 0; round < ROUNDS; round++) {
      const bool skips = round == 3;
      CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
      for (size_t i = 0; i < COUNT; i++)
        parameters[i] -= local_movement(i, rank, round);
      if (skips)
        parameters[4097] = rank == ranks - 1 ? NAN : parameters[4097];
      CHECK_STATUS(onebit_outer_step(outer, 1), skips ? ONEBIT_SKIPPED : ONEBIT_OK);
      if (!skips)
        oracle_round(oracle, ranks, round);
      else
        memcpy(parameters, oracle->consensus, sizeof oracle->consensus);
      CHECK_BITS("the consensus", parameters, oracle->consensus, COUNT, ONEBIT_FLOAT32);
    }
  onebit_outer_destroy(outer);
  free(parameters);
  free(oracle);
}

Test(outer_sparse, is_the_codec_rank_by_rank) {
  for (int ranks = 1; ranks <= SPARSE_RANKS; ranks++)
    on_ranks(ranks, train_sparse_on_rank, NULL);
}

/*
 * Tests that the part of its drift that a rank has not sent stays in its parameters. After an
 * exchange the parameters are the consensus minus the rank's residual, for each element that has a
 * residual.
 */

struct kept {
  onebit_outer_options_t options;
  struct saved_parts parts;
};

static void train_two_rounds(onebit_comm_t comm, void *context) {
  struct kept *kept = context;
  struct outer_trained *it = outer_begin(comm, &kept->options);
  outer_train_to(it, 1, 8);
  outer_save(it, comm, &kept->parts);
  outer_end(it);
}

static size_t check_part_of_rank(const struct saved_parts *parts, int rank,
                                 const float *consensus) {
  float *p = part_values(parts, rank, SECTION_PARAMETERS);
  float *residual = part_values(parts, rank, SECTION_WORKER);
  size_t kept = 0;
  for (size_t i = 0; i < OUTER_ELEMENTS; i++) {
    const float left = isnan(residual[i]) ? 0 : residual[i];
    kept += left != 0;
    if (!CHECK(p[i] == consensus[i] - left, "rank %d, element %zu: %g, not %g - %g", rank, i,
               (double)p[i], (double)consensus[i], (double)left))
      break;
  }
  free(p);
  free(residual);
  return kept;
}

/* Checks the compressed tensors, which have 521 elements. Each rank has residuals of all of them,
 * or of half of them if a host has two ranks. */
static void check_kept(onebit_outer_options_t options, int hosts, size_t low, size_t high) {
  struct kept *kept = allocate(1, sizeof *kept);
  kept->options = options;
  check_case("%d hosts, %d bits", hosts, options.bits);
  on_hosts(4, hosts, train_two_rounds, kept);
  float *consensus = parts_values(&kept->parts, SECTION_CONSENSUS);
  for (int rank = 0; rank < 4; rank++) {
    const size_t count = check_part_of_rank(&kept->parts, rank, consensus);
    CHECK(count >= low && count <= high, "rank %d keeps %zu", rank, count);
  }
  checks_must_hold();
  free(consensus);
  free_parts(&kept->parts);
  free(kept);
}

Test(outer_keeps, the_residual_in_the_parameters) {
  onebit_outer_options_t options = outer_options(1, ONEBIT_OUTER_MEAN);
  check_kept(options, 1, 500, 521);
  options.bits = 4;
  check_kept(options, 1, 500, 521);
  options.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
  check_kept(options, 2, 150, 370);
  options.no_error_feedback = 1;
  check_kept(options, 2, 0, 0);
  options.bits = ONEBIT_OUTER_DENSE;
  options.no_error_feedback = 0;
  check_kept(options, 2, 0, 0);
}
