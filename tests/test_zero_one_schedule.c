/*
 * When 0/1 Adam exchanges what: the library's function of the step's number against counters that
 * go on step by step, against what DeepSpeed's code does, and against the volumes that follow from
 * its options.
 */
#include "optimizers/methods/zero_one_schedule.h"
#include "tests/oracle_zero_one.h"
#include "tests/support.h"

static struct ob_zero_one_schedule schedule_of(size_t freeze_step, size_t update_scaler,
                                               size_t step_scaler, size_t clipper, bool deepspeed) {
  return ob_zero_one_resolve(
      &(struct ob_zero_one_schedule){freeze_step, update_scaler, step_scaler, clipper, deepspeed});
}

/* Step after step, and the sums of all steps until then. */
static void walk(size_t freeze_step, size_t update_scaler, size_t step_scaler, size_t clipper,
                 bool deepspeed, size_t steps) {
  onebit_zero_one_adam_options_t options = ONEBIT_ZERO_ONE_ADAM_OPTIONS_INIT;
  options.variance_freeze_step = freeze_step;
  options.variance_update_scaler = update_scaler;
  options.local_step_scaler = step_scaler;
  options.local_step_clipper = clipper;
  struct oracle_zero_one_clock clock = oracle_zero_one_clock_of(&options, deepspeed);
  struct ob_zero_one_schedule schedule =
      schedule_of(freeze_step, update_scaler, step_scaler, clipper, deepspeed);
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
    ob_zero_one_count(&schedule, step, counts);
    if (!CHECK(memcmp(counts, wanted, sizeof counts) == 0,
               "%zu steps: %llu %llu %llu, not %llu %llu %llu", step, (unsigned long long)counts[0],
               (unsigned long long)counts[1], (unsigned long long)counts[2],
               (unsigned long long)wanted[0], (unsigned long long)wanted[1],
               (unsigned long long)wanted[2]))
      return;
  }
}

Test(zero_one_schedule, follows_the_counters) {
  const size_t freezes[] = {1, 2, 3, 10, 64, 200, 1000}, scalers[] = {1, 2, 3, 16},
               clippers[] = {1, 2, 3, 6, 16, 1000};
  for (size_t f = 0; f < sizeof freezes / sizeof freezes[0]; f++)
    for (size_t u = 0; u < sizeof scalers / sizeof scalers[0]; u++)
      for (size_t l = 0; l < sizeof scalers / sizeof scalers[0]; l++)
        for (size_t c = 0; c < sizeof clippers / sizeof clippers[0]; c++)
          for (int deepspeed = 0; deepspeed < 2; deepspeed++)
            walk(freezes[f], scalers[u], 5 * scalers[l] - 4, clippers[c], deepspeed, 500);
}

Test(zero_one_schedule, defaults) {
  walk(0, 0, 0, 0, false, 200000);
  walk(0, 0, 0, 0, true, 200000);
}

/* The engine's flags in a run of DeepSpeed's code: F, gradients were averaged before the step. */
Test(zero_one_schedule, is_deepspeeds) {
  struct ob_zero_one_schedule schedule = schedule_of(8, 2, 2, 4, true);
  const char wanted[] = "FFFLFLFLLLLLLLLLLLLL";
  for (uint64_t step = 1; step < sizeof wanted; step++)
    cr_expect_eq(ob_zero_one_exchange(&schedule, step) == OB_EXCHANGE_DENSE,
                 wanted[step - 1] == 'F', "step %d", (int)step);
  /* The schedules of two recorded runs: 1, averaged. */
  const char *const recorded[] = {"111110101010001000100010000000000000000000000000000000000000",
                                  "111010101010001000100000000000000000000000000000000000000000"};
  const struct ob_zero_one_schedule theirs[] = {schedule_of(24, 4, 8, 4, true),
                                                schedule_of(20, 3, 6, 8, true)};
  for (size_t k = 0; k < 2; k++)
    for (uint64_t step = 1; step <= 60; step++)
      cr_expect_eq(ob_zero_one_exchange(&theirs[k], step) == OB_EXCHANGE_DENSE,
                   recorded[k][step - 1] == '1', "run %d, step %d", (int)k, (int)step);
}

/* BERT-Large as DeepSpeed's examples train it. Its first call makes no step, so there is one step
 * less than calls. */
Test(zero_one_schedule, volumes_of_bert) {
  const struct {
    size_t freeze_step, calls;
    uint64_t counts[3];
  } runs[] = {{12500, 118000, {153, 70467, 47379}},
              {12500, 152000, {153, 74168, 77678}},
              {200000, 152000, {211, 151788, 0}}};
  for (size_t k = 0; k < sizeof runs / sizeof runs[0]; k++) {
    struct ob_zero_one_schedule schedule = schedule_of(runs[k].freeze_step, 16, 32678, 16, true);
    uint64_t counts[3];
    ob_zero_one_count(&schedule, runs[k].calls - 1, counts);
    for (int e = 0; e < 3; e++)
      cr_expect_eq(counts[e], runs[k].counts[e], "run %d: %d of kind %d", (int)k, (int)counts[e],
                   e);
  }
}

/* Numbers that no run comes to. */
Test(zero_one_schedule, has_no_end) {
  struct ob_zero_one_schedule schedule = schedule_of((size_t)-1, 1, 1, (size_t)-1, false);
  uint64_t counts[3], far = (uint64_t)1 << 62;
  cr_expect_eq(ob_zero_one_exchange(&schedule, far), OB_EXCHANGE_DENSE);
  cr_expect_eq(ob_zero_one_exchange(&schedule, far + 1), OB_EXCHANGE_BITS);
  ob_zero_one_count(&schedule, far, counts);
  cr_expect_eq(counts[OB_EXCHANGE_DENSE], 63);
  schedule = schedule_of(1, 1, 1, (size_t)-1, false);
  cr_expect_eq(ob_zero_one_exchange(&schedule, far + 1), OB_EXCHANGE_NONE);
  ob_zero_one_count(&schedule, far, counts);
  cr_expect_eq(counts[OB_EXCHANGE_DENSE], 1);
  cr_expect_lt(counts[OB_EXCHANGE_BITS], 64);
}

/* --- What DeepSpeed's code computed, with two ranks */

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

static void repeat_printed(onebit_comm_t comm, void *context) {
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

Test(zero_one_schedule, repeats_what_deepspeed_printed) { on_ranks(2, repeat_printed, NULL); }
