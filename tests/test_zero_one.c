/* Tests 0/1 Adam: its parameters, and which values it exchanges in which steps. */
#include "optimizers/methods/zero_one_schedule.h"
#include "tests/oracle_zero_one.h"
#include "tests/support.h"
#include "tests/support_zero_one.h"

/*
 * Tests that 0/1 Adam equals the oracle in every bit of every rank's parameters after every step:
 * in the variance stage, at the freeze, in local steps and in synchronisation steps, for groups of
 * 1 to 7 ranks.
 */

static void check_case_of_zero_one(const struct zero_one_case *what) {
  struct zero_one_run run = zero_one_prepare(what);
  on_hosts(what->adam.size, what->adam.hosts ? what->adam.hosts : 1, zero_one_on_rank, &run);
  zero_one_release(&run);
}

/* A test case has a choice for each of these. Every pair of choices occurs in some case. */
enum {
  TENSORS,
  GROUP,
  PROFILE,
  CUT,
  NUMBERS,
  FREEZE,
  INTERVALS,
  BUCKET,
  PARTS,
  POISON,
  DENSE,
  ABSENT,
  GRADIENTS,
  PARAMETERS,
  CODEC,
  THREADS,
  CHOICES
};

static const struct adam_tensors *const lists[] = {&adam_tensors_odd, &adam_tensors_one,
                                                   &adam_tensors_many_words, &adam_tensors_tiny,
                                                   &adam_tensors_none};
/* Numbers of ranks and hosts. 0 hosts means that the schedule is that of one host. */
static const int groups[][2] = {{1, 0}, {2, 0}, {3, 0}, {4, 0}, {7, 0},
                                {4, 2}, {6, 3}, {6, 2}, {3, 1}};
/* The freeze comes after one step, after a compressed step, in the last step, or never in this
 * run. */
static const size_t freezes[] = {1, 2, 7, 10, 30, 31};
/* Scalers of 1, a scaler that is never reached, clippers that are not powers of two, and a clipper
 * of 1, with which ranks synchronise in every step. */
static const size_t intervals[][3] = {{2, 3, 4}, {1, 1, 6},     {3, 2, 5},
                                      {2, 1, 1}, {100, 100, 3}, {1, 4, 7}};
static const size_t bucket_sizes[] = {0, 1, 100, 2000, 5000};
static const float poisons[] = {0, NAN, INFINITY, -INFINITY};
enum { AS_ONE, MESSAGES, BUFFER, CUTS };
enum { AS_GIVEN, OTHERS, NO_FEEDBACK, NUMBERS_COUNT };
enum { COMPRESSED, SOME, SOME_AND_SMALL, ALL, DENSE_COUNT };

static const size_t lengths[CHOICES] = {[TENSORS] = LENGTH(lists),
                                        [GROUP] = LENGTH(groups),
                                        [PROFILE] = 2,
                                        [CUT] = CUTS,
                                        [NUMBERS] = NUMBERS_COUNT,
                                        [FREEZE] = LENGTH(freezes),
                                        [INTERVALS] = LENGTH(intervals),
                                        [BUCKET] = LENGTH(bucket_sizes),
                                        [PARTS] = 2,
                                        [POISON] = LENGTH(poisons),
                                        [DENSE] = DENSE_COUNT,
                                        [ABSENT] = 2,
                                        [GRADIENTS] = 3,
                                        [PARAMETERS] = 3,
                                        [CODEC] = 4,
                                        [THREADS] = 3};

/* Sets the ranks, the number of messages and their contents. Profile deepspeed has its own
 * values. */
static void choose_messages(struct zero_one_case *what, const size_t *choice) {
  onebit_optimizer_options_t *common = &what->adam.options.common;
  const int *group = groups[choice[GROUP]];
  what->adam.size = group[0];
  what->adam.form = choice[PARTS] ? BACKWARD : IN_ONE_CALL;
  common->threads = 1 + (int)choice[THREADS];
  if (choice[PROFILE]) {
    common->profile = ONEBIT_PROFILE_DEEPSPEED;
    return;
  }
  what->adam.hosts = group[1];
  common->schedule = group[1] ? ONEBIT_SCHEDULE_HIERARCHICAL : ONEBIT_SCHEDULE_AUTOMATIC;
  common->bucket_size = bucket_sizes[choice[BUCKET]];
  if (choice[CUT] == BUFFER && !group[1])
    common->block_size = ONEBIT_BLOCK_BUFFER;
  if (choice[CUT] == MESSAGES) {
    common->scale = ONEBIT_SCALE_MEAN_ABSOLUTE;
    common->block_size = 64;
    common->chunk_size = 128;
  }
}

/* Movements are sent as float32, whatever the type of the gradients is. If a gradient is not
 * finite, all ranks skip a step that exchanges. In a local step only the rank with this gradient
 * does not move. */
static void choose_gradients(struct zero_one_case *what, const size_t *choice) {
  onebit_optimizer_options_t *common = &what->adam.options.common;
  common->gradient_dtype = (onebit_dtype_t)choice[GRADIENTS];
  common->parameter_dtype = (onebit_dtype_t)choice[PARAMETERS];
  common->gradient_factor = choice[GRADIENTS] ? 0.25 : 0;
  what->adam.uncompressed = choice[DENSE] != COMPRESSED ? 0xaaa : 0;
  common->dense_below = choice[DENSE] == SOME_AND_SMALL            ? 32
                        : choice[DENSE] == ALL && !choice[PROFILE] ? 100000
                                                                   : 0;
  what->adam.absent = choice[ABSENT] ? 4 : 0;
  if (!what->adam.absent && what->adam.tensors->count > 0)
    what->poison = poisons[choice[POISON]];
  what->poisoned_rank = what->adam.size - 1;
}

static void choose_numbers(struct zero_one_case *what, const size_t *choice) {
  onebit_zero_one_adam_options_t *options = &what->options;
  what->adam.options.common.no_error_feedback = choice[NUMBERS] == NO_FEEDBACK;
  options->variance_update_scaler = intervals[choice[INTERVALS]][0];
  options->local_step_scaler = intervals[choice[INTERVALS]][1];
  options->local_step_clipper = intervals[choice[INTERVALS]][2];
  if (choice[NUMBERS] == OTHERS) {
    options->no_bias_correction = 1;
    options->beta1 = 0.8;
    options->beta2 = 0.95;
    options->epsilon = 1e-3;
  }
}

Test(zero_one, in_any_combination) {
  const struct sample sample = sample_combinations("zero_one", 16, lengths, CHOICES);
  for (size_t k = 0; k < sample.count; k++) {
    size_t choice[CHOICES];
    sample_choices(lengths, CHOICES, sample.rows[k], choice);
    struct zero_one_case what = {.adam = {.steps = 40,
                                          .options = ONEBIT_ADAM_OPTIONS_INIT,
                                          .tensors = lists[choice[TENSORS]],
                                          .still = true},
                                 .options = zero_one_options(freezes[choice[FREEZE]])};
    choose_messages(&what, choice);
    choose_gradients(&what, choice);
    choose_numbers(&what, choice);
    use_codec(test_codecs[choice[CODEC]]);
    check_case_of_zero_one(&what);
  }
  free(sample.rows);
}

/*
 * Tests the schedule of 0/1 Adam's exchanges, which the library computes from the step number. It
 * is compared with counters that advance step by step, with DeepSpeed's code, and with the volumes
 * that follow from the options.
 */

static struct ob_zero_one_schedule make_schedule(size_t freeze_step, size_t update_scaler,
                                                 size_t step_scaler, size_t clipper,
                                                 bool deepspeed) {
  return ob_zero_one_fill_defaults(
      &(struct ob_zero_one_schedule){freeze_step, update_scaler, step_scaler, clipper, deepspeed});
}

/* Compares the kind of exchange of every step, and the count of each kind over all steps so far. */
static void check_schedule_step_by_step(size_t freeze_step, size_t update_scaler,
                                        size_t step_scaler, size_t clipper, bool deepspeed,
                                        size_t steps) {
  onebit_zero_one_adam_options_t options = ONEBIT_ZERO_ONE_ADAM_OPTIONS_INIT;
  options.variance_freeze_step = freeze_step;
  options.variance_update_scaler = update_scaler;
  options.local_step_scaler = step_scaler;
  options.local_step_clipper = clipper;
  struct oracle_zero_one_clock clock = oracle_zero_one_clock_of(&options, deepspeed);
  struct ob_zero_one_schedule schedule =
      make_schedule(freeze_step, update_scaler, step_scaler, clipper, deepspeed);
  uint64_t wanted[3] = {0}, counts[3];
  check_case("freeze %zu, scalers %zu %zu, clipper %zu, deepspeed %d", freeze_step, update_scaler,
             step_scaler, clipper, deepspeed);
  for (size_t step = 1; step <= steps; step++) {
    int sends = oracle_zero_one_clock_next(&clock);
    enum ob_exchange exchange = ob_zero_one_exchange(&schedule, step);
    if (!CHECK((int)exchange == sends, "step %zu: %d, not %d", step, (int)exchange, sends))
      return;
    oracle_zero_one_clock_advance(&clock);
    wanted[sends]++;
    ob_zero_one_count_exchanges(&schedule, step, counts);
    if (!CHECK(memcmp(counts, wanted, sizeof counts) == 0,
               "%zu steps: %llu %llu %llu, not %llu %llu %llu", step, (unsigned long long)counts[0],
               (unsigned long long)counts[1], (unsigned long long)counts[2],
               (unsigned long long)wanted[0], (unsigned long long)wanted[1],
               (unsigned long long)wanted[2]))
      return;
  }
}

Test(zero_one_schedule, follows_the_counters) {
  const size_t freeze_steps[] = {1, 2, 3, 10, 64, 200, 1000}, scalers[] = {1, 2, 3, 16},
               clippers[] = {1, 2, 3, 6, 16, 1000};
  for (size_t f = 0; f < sizeof freeze_steps / sizeof freeze_steps[0]; f++)
    for (size_t u = 0; u < sizeof scalers / sizeof scalers[0]; u++)
      for (size_t l = 0; l < sizeof scalers / sizeof scalers[0]; l++)
        for (size_t c = 0; c < sizeof clippers / sizeof clippers[0]; c++)
          for (int deepspeed = 0; deepspeed < 2; deepspeed++)
            check_schedule_step_by_step(freeze_steps[f], scalers[u], 5 * scalers[l] - 4,
                                        clippers[c], deepspeed, 500);
}

Test(zero_one_schedule, defaults) {
  check_schedule_step_by_step(0, 0, 0, 0, false, 200000);
  check_schedule_step_by_step(0, 0, 0, 0, true, 200000);
}

/* Compares with flags of DeepSpeed's engine in a run of its own code. F means that gradients were
 * averaged before the step. */
Test(zero_one_schedule, is_deepspeeds) {
  struct ob_zero_one_schedule schedule = make_schedule(8, 2, 2, 4, true);
  const char wanted[] = "FFFLFLFLLLLLLLLLLLLL";
  for (uint64_t step = 1; step < sizeof wanted; step++)
    cr_expect_eq(ob_zero_one_exchange(&schedule, step) == OB_EXCHANGE_DENSE,
                 wanted[step - 1] == 'F', "step %d", (int)step);
  /* The schedules of two recorded runs. 1: gradients were averaged. */
  const char *const recorded[] = {"111110101010001000100010000000000000000000000000000000000000",
                                  "111010101010001000100000000000000000000000000000000000000000"};
  const struct ob_zero_one_schedule theirs[] = {make_schedule(24, 4, 8, 4, true),
                                                make_schedule(20, 3, 6, 8, true)};
  for (size_t k = 0; k < 2; k++)
    for (uint64_t step = 1; step <= 60; step++)
      cr_expect_eq(ob_zero_one_exchange(&theirs[k], step) == OB_EXCHANGE_DENSE,
                   recorded[k][step - 1] == '1', "run %d, step %d", (int)k, (int)step);
}

/* BERT-Large as DeepSpeed's examples train it. DeepSpeed's first call makes no step, so there is
 * one step fewer than calls. */
Test(zero_one_schedule, volumes_of_bert) {
  const struct {
    size_t freeze_step, calls;
    uint64_t counts[3];
  } runs[] = {{12500, 118000, {153, 70467, 47379}},
              {12500, 152000, {153, 74168, 77678}},
              {200000, 152000, {211, 151788, 0}}};
  for (size_t k = 0; k < sizeof runs / sizeof runs[0]; k++) {
    struct ob_zero_one_schedule schedule = make_schedule(runs[k].freeze_step, 16, 32678, 16, true);
    uint64_t counts[3];
    ob_zero_one_count_exchanges(&schedule, runs[k].calls - 1, counts);
    for (int e = 0; e < 3; e++)
      cr_expect_eq(counts[e], runs[k].counts[e], "run %d: %d of kind %d", (int)k, (int)counts[e],
                   e);
  }
}

/* Uses numbers that are larger than any run reaches. */
Test(zero_one_schedule, has_no_end) {
  struct ob_zero_one_schedule schedule = make_schedule((size_t)-1, 1, 1, (size_t)-1, false);
  uint64_t counts[3], far = (uint64_t)1 << 62;
  cr_expect_eq(ob_zero_one_exchange(&schedule, far), OB_EXCHANGE_DENSE);
  cr_expect_eq(ob_zero_one_exchange(&schedule, far + 1), OB_EXCHANGE_BITS);
  ob_zero_one_count_exchanges(&schedule, far, counts);
  cr_expect_eq(counts[OB_EXCHANGE_DENSE], 63);
  schedule = make_schedule(1, 1, 1, (size_t)-1, false);
  cr_expect_eq(ob_zero_one_exchange(&schedule, far + 1), OB_EXCHANGE_NONE);
  ob_zero_one_count_exchanges(&schedule, far, counts);
  cr_expect_eq(counts[OB_EXCHANGE_DENSE], 1);
  cr_expect_lt(counts[OB_EXCHANGE_BITS], 64);
}

/* --- Results of DeepSpeed's code, with two ranks */

struct printed {
  int step;
  float parameters[2][4]; /* of each rank, the first four of 20 */
};

static const struct printed printed[] = {{1,
                                          {{-0.6965139f, 0.0160616f, 0.7420071f, -0.30152f},
                                           {-0.6965139f, 0.0160616f, 0.7420071f, -0.30152f}}},
                                         {4,
                                          {{-0.6067497f, -0.0255444f, 0.7599675f, -0.3879715f},
                                           {-0.6067497f, -0.0255444f, 0.7599675f, -0.3879715f}}},
                                         {7,
                                          {{-0.5974359f, -0.1297771f, 0.6741043f, -0.355722f},
                                           {-0.5974359f, -0.1297771f, 0.6741043f, -0.355722f}}},
                                         {9,
                                          {{-0.6295165f, -0.1431817f, 0.6390451f, -0.3488252f},
                                           {-0.6295165f, -0.1431817f, 0.6390451f, -0.3488252f}}},
                                         {11,
                                          {{-0.6086135f, -0.2047395f, 0.6815303f, -0.4013138f},
                                           {-0.6513094f, -0.1237141f, 0.6348701f, -0.3596256f}}},
                                         {19,
                                          {{-0.5248883f, -0.3584167f, 0.7504001f, -0.4039536f},
                                           {-0.5675842f, -0.2773913f, 0.70374f, -0.4386938f}}}};

static void compare_printed(const float *parameters, int rank, int step) {
  for (size_t k = 0; k < sizeof printed / sizeof printed[0]; k++)
    for (size_t i = 0; printed[k].step == step && i < 4; i++) {
      float wanted = printed[k].parameters[rank][i];
      CHECK(fabsf(parameters[i] - wanted) <= 2e-7f + 2e-6f * fabsf(wanted),
            "step %d: parameter %zu is %.8g, not %.8g", step, i, (double)parameters[i],
            (double)wanted);
    }
}

static void repeat_printed_run(onebit_comm_t comm, void *context) {
  int rank = onebit_comm_rank(comm);
  float parameters[20], gradients[20];
  onebit_tensor_t tensor = {parameters, gradients, 20, 0.01f, 0, 0};
  onebit_optimizer_t optimizer;
  (void)context;
  onebit_zero_one_adam_options_t options = {.size = sizeof options, .variance_freeze_step = 8};
  options.variance_update_scaler = options.local_step_scaler = 2;
  options.local_step_clipper = 4;
  options.common.profile = ONEBIT_PROFILE_DEEPSPEED;
  for (int i = 0; i < 20; i++)
    parameters[i] = (float)((3 * i) % 7 - 3) / 4;
  if (!CHECK_STATUS(onebit_zero_one_adam_create(comm, &tensor, 1, &options, &optimizer), ONEBIT_OK))
    return;
  for (int step = 0; step < 20; step++) {
    for (int i = 0; i < 20; i++)
      gradients[i] = (float)((7 * i + 3 * step + 5 * rank) % 11 - 5) / 8;
    CHECK_STATUS(onebit_optimizer_step(optimizer, 0.01f), ONEBIT_OK);
    compare_printed(parameters, rank, step);
  }
  onebit_optimizer_destroy(optimizer);
}

Test(zero_one_schedule, repeats_what_deepspeed_printed) { on_ranks(2, repeat_printed_run, NULL); }
