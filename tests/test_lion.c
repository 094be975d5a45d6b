/*
 * Lion in one bit equals the oracle's in every bit of every parameter after every step, for groups
 * of 1 to 7 ranks, on hosts, in buckets, with steps that are skipped and with tensors that stay
 * uncompressed.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support_lion.h"

TestSuite(lion, .timeout = 180);

static void check_one(const struct lion_case *what) {
  struct lion_run *run = lion_prepare(what);
  on_hosts(what->size, what->hosts, lion_on_rank, run);
  lion_release(run);
}

static void check_on_groups(struct lion_case what) {
  static const int sizes[] = {1, 2, 3, 4, 7};
  for (size_t p = 0; p < sizeof sizes / sizeof sizes[0]; p++) {
    what.size = sizes[p];
    if (test_wanted(p))
      check_one(&what);
  }
}

Test(lion, equals_the_oracle) { check_on_groups(lion_case_of(&adam_tensors_odd)); }
Test(lion, one_tensor) { check_on_groups(lion_case_of(&adam_tensors_one)); }
Test(lion, fewer_elements_than_ranks) { check_on_groups(lion_case_of(&adam_tensors_tiny)); }
Test(lion, no_tensors) { check_on_groups(lion_case_of(&adam_tensors_none)); }

Test(lion, counts_on_the_edges) {
  for (size_t k = 0; k < test_counts_count; k++) {
    if (!test_counts[k] || test_counts[k] > 10000 || k % test_stride())
      continue;
    const struct adam_tensors tensors = {1, {{test_counts[k], 0.01f, 0}}};
    struct lion_case what = lion_case_of(&tensors);
    what.still = true;
    check_one(&what);
  }
}

Test(lion, elements_without_gradients) {
  struct lion_case what = lion_case_of(&adam_tensors_odd);
  what.still = true;
  check_on_groups(what);
}

Test(lion, options_are_heeded) {
  struct lion_case what = lion_case_of(&adam_tensors_odd);
  what.options.beta1 = 0.8;
  what.options.beta2 = 0.95;
  what.options.beta3 = 0.97;
  what.options.epsilon = 1e-3;
  what.options.common.gradient_factor = 0.3;
  what.options.common.scale = ONEBIT_SCALE_MEAN_ABSOLUTE;
  what.options.common.block_size = 64;
  what.options.common.chunk_size = 128;
  check_on_groups(what);
  what.options.common.no_error_feedback = 1;
  what.size = 3;
  check_one(&what);
}

Test(lion, buckets) {
  static const size_t sizes[] = {1, 1000, 5200};
  for (size_t b = 0; b < 3; b++) {
    struct lion_case what = lion_case_of(&adam_tensors_odd);
    what.options.common.bucket_size = sizes[b];
    what.parts = b % 2 == 0;
    what.size = 3 + (int)b % 2;
    check_one(&what);
  }
}

Test(lion, on_hosts) {
  static const int splits[][2] = {{4, 2}, {6, 3}, {4, 4}, {4, 1}};
  for (size_t k = 0; k < 4; k++) {
    struct lion_case what = lion_case_of(&adam_tensors_odd);
    what.options.common.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
    what.options.common.bucket_size = k % 2 ? 1000 : 0;
    what.size = splits[k][0];
    what.hosts = splits[k][1];
    check_one(&what);
  }
}

Test(lion, every_codec_and_any_number_of_threads) {
  for (size_t c = 0; c < test_codecs_count; c++) {
    if (!use_codec(test_codecs[c]))
      continue;
    for (int threads = 1; threads <= 3; threads++) {
      struct lion_case what = lion_case_of(&adam_tensors_odd);
      what.still = true;
      what.options.common.threads = threads;
      check_one(&what);
    }
  }
}

/* They take dense Lion's steps: some of them, and all, which is the dense form. */
Test(lion, uncompressed_tensors) {
  static const unsigned which[] = {1u << 4 | 1u << 8, (1u << 9) - 1};
  for (size_t k = 0; k < 2; k++)
    for (int size = 1; size <= 3; size++) {
      struct lion_case what = lion_case_of(&adam_tensors_odd);
      what.uncompressed = which[k];
      what.still = true;
      what.size = size;
      check_one(&what);
    }
}

/* The poison is on each rank once, and in all steps from the first on. */
Test(lion, skipped_steps_change_nothing) {
  static const float poisons[] = {1.0f / 0.0f, NAN, -1.0f / 0.0f};
  for (int rank = 0; rank < 3; rank++) {
    struct lion_case what = lion_case_of(&adam_tensors_odd);
    what.poison = poisons[rank];
    what.poisoned_rank = rank;
    what.options.common.bucket_size = rank == 1 ? 1000 : 0;
    what.uncompressed = rank == 2 ? 1u << 5 : 0;
    what.parts = rank == 2;
    check_one(&what);
  }
}
