/*
 * Every optimizer equals its oracle in every bit of every parameter after every step, whatever the
 * tensors, options, buckets, hosts, codecs, threads and types, and with steps that are skipped. 0/1
 * Adam, whose ranks differ between steps, is in test_zero_one.c; what is an optimizer's own is in
 * its file.
 */
#include "tests/support_adam.h"

#define OF(optimizer, ...)                                                                         \
  {                                                                                                \
    .kind = &kind_##optimizer, .size = 3, .steps = 12, .tensors = &adam_tensors_odd,               \
    .still = true, .options = {                                                                    \
      .size = sizeof(onebit_adam_options_t),                                                       \
      __VA_ARGS__                                                                                  \
    }                                                                                              \
  }
#define DEEPSPEED .common.profile = ONEBIT_PROFILE_DEEPSPEED

static const struct adam_case kinds[] = {
    OF(adam, .freeze_step = 5),
    OF(adam, .freeze_step = 5, DEEPSPEED),
    OF(adam, .freeze_step = 4, .exchange = ONEBIT_ADAM_EXCHANGE_STEP),
    OF(adam, .freeze_step = 5, .exchange = ONEBIT_ADAM_EXCHANGE_STEP, DEEPSPEED),
    OF(adam, .freeze_step = 4, .shards = ONEBIT_SHARDS_STEP),
    OF(adam, .freeze_step = 4, .shards = ONEBIT_SHARDS_PARAMETERS),
    OF(lamb, .freeze_step = 5),
    OF(lamb, .freeze_step = 5, DEEPSPEED),
    OF(efficient_adam, .freeze_step = 0),
    OF(efficient_adam, .freeze_step = 5, .beta2 = 0.95),
    OF(efficient_lamb, .freeze_step = 0),
    OF(momentum, .freeze_step = 0),
    OF(momentum, .freeze_step = 4),
    OF(lion, .freeze_step = 0),
};
enum { KINDS = sizeof kinds / sizeof kinds[0] };

static bool is_deepspeed(const struct adam_case *what) {
  return what->options.common.profile == ONEBIT_PROFILE_DEEPSPEED;
}

Test(optimizers, any_tensors) {
  static const struct adam_tensors *const lists[] = {&adam_tensors_odd, &adam_tensors_one,
                                                     &adam_tensors_many_words, &adam_tensors_tiny,
                                                     &adam_tensors_none};
  for (size_t k = 0; k < KINDS; k++)
    for (size_t t = 0; t < sizeof lists / sizeof lists[0]; t++) {
      struct adam_case what = kinds[k];
      what.tensors = lists[t];
      if (t == 0 || test_wanted_of(k, t))
        adam_check_on_groups(what);
    }
}

Test(optimizers, counts_on_the_edges) {
  for (size_t k = 0; k < KINDS; k++)
    for (size_t c = 0; c < test_counts_count; c++) {
      const struct adam_tensors tensors = {1, {{test_counts[c], 0.01f, 0}}};
      struct adam_case what = kinds[k];
      what.tensors = &tensors;
      if (test_counts[c] < 10000 && test_wanted_of(k, c))
        adam_check(&what);
    }
}

/* One step of warm-up, and nothing else; where the optimizer has one. */
Test(optimizers, other_warm_ups) {
  for (size_t k = 0; k < KINDS; k++) {
    struct adam_case what = kinds[k];
    if (what.options.freeze_step == 0)
      continue;
    what.options.freeze_step = 1;
    adam_check_on_groups(what);
    what.options.freeze_step = ONEBIT_FREEZE_NEVER;
    adam_check_on_groups(what);
  }
}

/* With beta2 = 7/8 the ninth step is the first that can freeze. */
Test(optimizers, automatic_freeze) {
  for (size_t k = 0; k < KINDS; k++) {
    struct adam_case what = kinds[k];
    if (what.kind != &kind_adam && what.kind != &kind_lamb)
      continue;
    what.options.freeze_step = ONEBIT_FREEZE_AUTOMATIC;
    what.options.beta2 = 0.875;
    what.steps = 24;
    adam_check_on_groups(what);
  }
}

Test(optimizers, options_are_heeded) {
  for (size_t k = 0; k < KINDS; k++) {
    struct adam_case what = kinds[k];
    what.options.beta1 = 0.8;
    what.options.beta2 = 0.95;
    what.options.epsilon = 1e-3;
    what.options.no_bias_correction = 1;
    what.options.common.gradient_factor = 0.3;
    if (!is_deepspeed(&what)) {
      what.options.common.scale = ONEBIT_SCALE_MEAN_ABSOLUTE;
      what.options.common.block_size = 64;
      what.options.common.chunk_size = 128;
    }
    adam_check_on_groups(what);
    what.options.common.no_error_feedback = 1;
    adam_check_on_groups(what);
  }
}

Test(optimizers, options_of_their_own) {
  static const onebit_efficient_adam_options_t gain = {.gain = 1.7};
  static const onebit_efficient_adam_options_t ratios = {.min_ratio = 0.5, .max_ratio = 0.6};
  static const onebit_lion_options_t betas = {.beta3 = 0.97};
  static const onebit_lamb_options_t limits = {.max_coefficient = 0.3,
                                               .min_coefficient = 0.2,
                                               .coefficient_beta = 0.7,
                                               .max_factor = 1.05,
                                               .min_factor = 0.93,
                                               .factor_change = 0.02};
  struct adam_case cases[] = {OF(efficient_adam, .freeze_step = 0),
                              OF(efficient_lamb, .freeze_step = 0), OF(lion, .freeze_step = 0),
                              OF(lamb, .freeze_step = 5)};
  const void *more[] = {&gain, &ratios, &betas, &limits};
  for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
    cases[k].more = more[k];
    adam_check_on_groups(cases[k]);
  }
}

/* Elements whose first gradient comes after others', and a tensor that has none at all before. */
Test(optimizers, first_gradients_that_come_late) {
  for (size_t k = 0; k < KINDS; k++) {
    struct adam_case what = kinds[k];
    what.late = 9;
    adam_check(&what);
    what.tensors = &adam_tensors_tiny;
    adam_check(&what);
  }
}

Test(optimizers, one_scale_a_buffer) {
  for (size_t k = 0; k < KINDS; k++)
    for (size_t bucket_size = 0; bucket_size <= 1000 && !is_deepspeed(&kinds[k]);
         bucket_size += 1000) {
      struct adam_case what = kinds[k];
      what.options.common.block_size = ONEBIT_BLOCK_BUFFER;
      what.options.common.bucket_size = bucket_size;
      adam_check_on_groups(what);
    }
}

Test(optimizers, buckets_in_any_form) {
  static const size_t sizes[] = {1, 1000, 5200};
  for (size_t k = 0; k < KINDS; k++)
    for (int form = 0; form < ADAM_FORMS; form++) {
      struct adam_case what = kinds[k];
      what.form = (enum adam_form)form;
      what.size = 2 + form % 3;
      what.options.common.bucket_size = is_deepspeed(&what) ? 0 : sizes[((size_t)form + k) % 3];
      adam_check(&what);
    }
}

Test(optimizers, on_hosts) {
  static const int splits[][2] = {{4, 2}, {6, 3}, {4, 4}, {4, 1}};
  for (size_t k = 0; k < KINDS; k++)
    for (size_t s = 0; s < 4 && !is_deepspeed(&kinds[k]) && !kinds[k].options.shards; s++) {
      struct adam_case what = kinds[k];
      what.options.common.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
      what.options.common.bucket_size = s % 2 ? 1000 : 0;
      what.options.common.chunk_size = s % 2 ? 0 : 2048;
      what.size = splits[s][0];
      what.hosts = splits[s][1];
      if (test_wanted_of(k, s))
        adam_check(&what);
    }
}

Test(optimizers, every_codec_and_any_number_of_threads) {
  for (size_t k = 0; k < KINDS; k++)
    adam_check_codecs(kinds[k]);
}

/* Some, and all of them: 0, 1, 3, 5; there are nine. */
Test(optimizers, tensors_that_stay_uncompressed) {
  static const unsigned masks[] = {0x2b, 0x2b, 0x1ff};
  for (size_t k = 0; k < KINDS; k++)
    for (size_t m = 0; m < 3; m++) {
      struct adam_case what = kinds[k];
      what.uncompressed = masks[m];
      what.options.common.bucket_size = m == 1 && !is_deepspeed(&what) ? 1000 : 0;
      adam_check_on_groups(what);
    }
}

/* Weighed, clipped, in another array each time and not always there. */
Test(optimizers, gradients_and_parameters_of_any_type) {
  for (size_t k = 0; k < KINDS; k++)
    for (int types = 0; types < 9; types++) {
      struct adam_case what = kinds[k];
      what.options.common.gradient_dtype = (onebit_dtype_t)(types / 3);
      what.options.common.parameter_dtype = (onebit_dtype_t)(types % 3);
      what.options.common.gradient_factor = 1.0 / 3;
      what.options.common.initial_loss_scale = 4;
      what.options.common.loss_scale_interval = 5;
      what.options.common.clip_norm = types % 2 ? 0.3 : 0;
      what.multiple = 3.0f;
      what.absent = 5;
      what.moving = true;
      what.uncompressed = types % 2 ? 0 : 0x12;
      what.size = 1 + types % 4;
      if (what.options.shards == ONEBIT_SHARDS_STEP && types % 3)
        continue; /* needs parameters of float32 */
      adam_check(&what);
    }
}

/* The poison is on each rank once, in all steps from the first on or only behind a warm-up. */
Test(optimizers, skipped_steps_change_nothing) {
  static const float poisons[] = {INFINITY, NAN, -3e38f};
  for (size_t k = 0; k < KINDS; k++)
    for (int rank = 0; rank < 3; rank++)
      for (int from = 0; from <= 6; from += 6) {
        struct adam_case what = kinds[k];
        what.size = 1 + rank + (int)k % 2;
        what.poison = poisons[rank];
        what.poisoned_rank = rank;
        what.poisoned_from = from;
        what.options.common.bucket_size = rank == 1 && !is_deepspeed(&what) ? 1000 : 0;
        what.uncompressed = rank == 2 ? 1u << 5 : 0;
        what.form = rank == 2 ? BACKWARD : IN_ONE_CALL;
        adam_check(&what);
      }
}
