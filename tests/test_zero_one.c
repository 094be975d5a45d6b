/*
 * 0/1 Adam equals the oracle's in every bit of every rank's parameters after every step: variance
 * stage, freeze, steps that send nothing, meetings; for groups of 1 to 7 ranks.
 */
#include "tests/support_zero_one.h"

static void check_case_of_zero_one(const struct zero_one_case *what) {
  struct zero_one_run run = zero_one_prepare(what);
  on_hosts(what->size, what->hosts ? what->hosts : 1, zero_one_on_rank, &run);
  zero_one_release(&run);
}

static void check_on_groups(struct zero_one_case what) {
  static const int sizes[] = {1, 2, 3, 4, 7};
  for (size_t p = 0; p < sizeof sizes / sizeof sizes[0]; p++) {
    what.size = sizes[p];
    if (test_wanted(p))
      check_case_of_zero_one(&what);
  }
}

/* Ten steps of the variance stage, of which the fifth is the first in bits; in the local stage
 * meetings after 1, 2 and 4 steps. */
static struct zero_one_case case_of(const struct adam_tensors *tensors) {
  return (struct zero_one_case){
      .steps = 30, .options = zero_one_options(10), .tensors = tensors, .still = true};
}

Test(zero_one, any_tensors) {
  static const struct adam_tensors *const lists[] = {&adam_tensors_odd, &adam_tensors_one,
                                                     &adam_tensors_many_words, &adam_tensors_tiny,
                                                     &adam_tensors_none};
  for (size_t k = 0; k < sizeof lists / sizeof lists[0]; k++)
    check_on_groups(case_of(lists[k]));
}

Test(zero_one, profile_deepspeed) {
  struct zero_one_case what = case_of(&adam_tensors_odd);
  what.options.common.profile = ONEBIT_PROFILE_DEEPSPEED;
  check_on_groups(what);
  what.tensors = &adam_tensors_none;
  check_on_groups(what);
}

/* Each alone, and then all of them. */
Test(zero_one, options_are_heeded) {
  enum { BLOCKS, BUFFER, UNCORRECTED, FORGETFUL, BETAS, ALL };
  for (int changed = BLOCKS; changed <= ALL; changed++) {
    struct zero_one_case what = case_of(&adam_tensors_odd);
    if (changed == BLOCKS || changed == ALL) {
      what.options.common.scale = ONEBIT_SCALE_MEAN_ABSOLUTE;
      what.options.common.block_size = 64;
      what.options.common.chunk_size = 128;
    }
    if (changed == BUFFER)
      what.options.common.block_size = ONEBIT_BLOCK_BUFFER;
    what.options.no_bias_correction = changed == UNCORRECTED || changed == ALL;
    what.options.common.no_error_feedback = changed == FORGETFUL || changed == ALL;
    if (changed == BETAS || changed == ALL) {
      what.options.beta1 = 0.8;
      what.options.beta2 = 0.95;
      what.options.epsilon = 1e-3;
    }
    check_on_groups(what);
  }
}

Test(zero_one, every_codec_and_any_number_of_threads) {
  for (size_t c = 0; c < test_codecs_count; c++)
    for (int k = 0; k < 6 && use_codec(test_codecs[c]); k++) {
      struct zero_one_case what = case_of(&adam_tensors_odd);
      what.size = 3;
      what.options.common.threads = 1 + k / 2;
      what.options.common.profile = k % 2 ? ONEBIT_PROFILE_DEEPSPEED : ONEBIT_PROFILE_DEFAULT;
      check_case_of_zero_one(&what);
    }
}

/* After one step, never in this run, and after a step in bits. */
Test(zero_one, freezes_early_and_late) {
  struct zero_one_case what = case_of(&adam_tensors_odd);
  const size_t steps[] = {1, 2, 7, 30, 31};
  for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
    what.options.variance_freeze_step = steps[i];
    what.options.common.profile = ONEBIT_PROFILE_DEFAULT;
    what.size = 3;
    check_case_of_zero_one(&what);
    what.options.common.profile = ONEBIT_PROFILE_DEEPSPEED;
    check_case_of_zero_one(&what);
  }
}

/* Scalers of 1, one that is never reached, clippers that are no power of two, and 1: the ranks meet
 * in every step. */
Test(zero_one, other_intervals) {
  const size_t others[][3] = {{1, 1, 6}, {3, 2, 5}, {2, 1, 1}, {100, 100, 3}, {1, 4, 7}};
  for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
    struct zero_one_case what = case_of(&adam_tensors_tiny);
    what.options.variance_update_scaler = others[i][0];
    what.options.local_step_scaler = others[i][1];
    what.options.local_step_clipper = others[i][2];
    what.steps = 60;
    what.size = 2;
    check_case_of_zero_one(&what);
    what.options.common.profile = ONEBIT_PROFILE_DEEPSPEED;
    check_case_of_zero_one(&what);
  }
}

/* Several exchanges a step, of which none may be applied before all are known to be well. */
Test(zero_one, buckets) {
  const size_t sizes[] = {1, 100, 2000, 5000};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
    for (int parts = 0; parts < 2; parts++) {
      struct zero_one_case what = case_of(&adam_tensors_odd);
      what.options.common.bucket_size = sizes[i];
      what.parts = parts;
      what.poison = parts ? NAN : 0.0f;
      what.size = 3;
      check_case_of_zero_one(&what);
    }
}

Test(zero_one, hosts_with_several_ranks) {
  const int groups[][2] = {{4, 2}, {6, 3}, {6, 2}, {3, 1}};
  for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i++)
    for (int poisoned = 0; poisoned < 2; poisoned++) {
      struct zero_one_case what = case_of(&adam_tensors_odd);
      what.size = groups[i][0];
      what.hosts = groups[i][1];
      what.options.common.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
      what.options.common.bucket_size = poisoned ? 2000 : 0;
      what.poison = poisoned ? INFINITY : 0.0f;
      what.poisoned_rank = 1;
      check_case_of_zero_one(&what);
    }
}

/* In steps that exchange all ranks skip; in those that do not, this one alone stays where it is. */
Test(zero_one, gradients_that_are_not_finite) {
  const float values[] = {NAN, INFINITY, -INFINITY};
  for (size_t v = 0; v < sizeof values / sizeof values[0]; v++)
    for (int deepspeed = 0; deepspeed < 2; deepspeed++) {
      struct zero_one_case what = case_of(v ? &adam_tensors_odd : &adam_tensors_one);
      what.options.common.profile = deepspeed ? ONEBIT_PROFILE_DEEPSPEED : ONEBIT_PROFILE_DEFAULT;
      what.poison = values[v];
      what.steps = 60;
      for (what.size = 1; what.size <= 4; what.size += what.size) {
        what.poisoned_rank = what.size - 1;
        check_case_of_zero_one(&what);
      }
    }
}

Test(zero_one, tensors_that_stay_uncompressed) {
  for (int deepspeed = 0; deepspeed < 2; deepspeed++)
    for (int poisoned = 0; poisoned < 2; poisoned++) {
      struct zero_one_case what = case_of(&adam_tensors_odd);
      what.options.common.profile = deepspeed ? ONEBIT_PROFILE_DEEPSPEED : ONEBIT_PROFILE_DEFAULT;
      what.uncompressed = true; /* some of them and the small ones, or all */
      what.options.common.dense_below = poisoned && !deepspeed ? 100000 : 32;
      what.poison = poisoned ? NAN : 0.0f;
      what.size = 3;
      what.steps = 50;
      check_case_of_zero_one(&what);
    }
}

Test(zero_one, ranks_without_a_gradient) {
  struct zero_one_case what = case_of(&adam_tensors_odd);
  what.absent = true;
  check_on_groups(what);
}

/* Movements travel as float32, whatever gradients are. */
Test(zero_one, types_of_16_bits) {
  const onebit_dtype_t types[] = {ONEBIT_FLOAT32, ONEBIT_BFLOAT16, ONEBIT_FLOAT16};
  for (size_t g = 0; g < 3; g++)
    for (size_t p = 0; p < 3; p++) {
      struct zero_one_case what = case_of(&adam_tensors_odd);
      what.options.common.gradient_dtype = types[g];
      what.options.common.parameter_dtype = types[p];
      what.options.common.gradient_factor = 0.25;
      what.size = 4;
      what.hosts = g == p ? 1 : 2;
      if (what.hosts > 1)
        what.options.common.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
      check_case_of_zero_one(&what);
    }
}
