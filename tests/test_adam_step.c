/*
 * 1-bit Adam whose ranks exchange the step m / (sqrt(v^) + eps) instead of the momentum: equal to
 * the oracle's in every bit, for groups of 1 to 7 ranks; and keeps less error where tensors are of
 * very different size, which is what it is for. That it converges is in test_convergence.c.
 */
#include <criterion/criterion.h>
#include <math.h>

#include "tests/support_adam.h"

TestSuite(adam_step, .timeout = 120);

static struct adam_case case_of(const struct adam_tensors *tensors, size_t freeze_step) {
  struct adam_case what = {
      .steps = 16, .options = ONEBIT_ADAM_OPTIONS_INIT, .tensors = tensors, .still = true};
  what.options.freeze_step = freeze_step;
  what.options.exchange = ONEBIT_ADAM_EXCHANGE_STEP;
  return what;
}

Test(adam_step, several_tensors_of_odd_sizes) {
  adam_check_on_groups(case_of(&adam_tensors_odd, 5));
}
Test(adam_step, freeze_after_the_first_step) {
  adam_check_on_groups(case_of(&adam_tensors_one, 1));
}
Test(adam_step, fewer_elements_than_ranks) { adam_check_on_groups(case_of(&adam_tensors_tiny, 3)); }
Test(adam_step, never_freezes) {
  adam_check_on_groups(case_of(&adam_tensors_odd, ONEBIT_FREEZE_NEVER));
}

Test(adam_step, options_are_heeded) {
  struct adam_case what = case_of(&adam_tensors_odd, 4);
  what.options.no_bias_correction = 1;
  what.options.beta1 = 0.8;
  what.options.epsilon = 1e-3;
  what.options.common.scale = ONEBIT_SCALE_MEAN_ABSOLUTE;
  what.options.common.block_size = 64;
  what.options.common.chunk_size = 128;
  adam_check_on_groups(what);
  what.options.common.block_size = ONEBIT_BLOCK_BUFFER;
  adam_check_on_groups(what);
  what.options.common.no_error_feedback = 1;
  adam_check_on_groups(what);
}

Test(adam_step, profile_deepspeed) {
  struct adam_case what = case_of(&adam_tensors_odd, 5);
  what.options.common.profile = ONEBIT_PROFILE_DEEPSPEED;
  adam_check_on_groups(what);
}

Test(adam_step, automatic_freeze) {
  struct adam_case what = case_of(&adam_tensors_odd, ONEBIT_FREEZE_AUTOMATIC);
  what.options.beta2 = 0.875;
  what.steps = 24;
  adam_check_on_groups(what);
}

Test(adam_step, buckets_in_any_form) {
  static const size_t sizes[] = {1, 1000, 5200};
  for (int form = 0; form < ADAM_FORMS; form++) {
    struct adam_case what = case_of(&adam_tensors_odd, 4);
    what.options.common.bucket_size = sizes[form % 3];
    what.form = (enum adam_form)form;
    what.size = 2 + form % 3;
    adam_check(&what);
  }
}

Test(adam_step, on_hosts) {
  static const int splits[][2] = {{4, 2}, {6, 3}, {4, 4}, {4, 1}};
  for (size_t k = 0; k < 4; k++) {
    struct adam_case what = case_of(&adam_tensors_odd, 4);
    what.options.common.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
    what.options.common.bucket_size = k % 2 ? 1000 : 0;
    what.size = splits[k][0];
    what.hosts = splits[k][1];
    adam_check(&what);
  }
}

Test(adam_step, every_codec_and_any_number_of_threads) {
  for (size_t c = 0; c < test_codecs_count; c++) {
    if (!use_codec(test_codecs[c]))
      continue;
    for (int threads = 1; threads <= 3; threads++) {
      struct adam_case what = case_of(&adam_tensors_odd, 4);
      what.size = 3;
      what.options.common.threads = threads;
      adam_check(&what);
    }
  }
}

Test(adam_step, skipped_steps_change_nothing) {
  static const float poisons[] = {1.0f / 0.0f, NAN, -1.0f / 0.0f};
  for (int rank = 0; rank < 3; rank++)
    for (int from = 0; from <= 5; from += 5) { /* in the warm-up too, or only behind it */
      struct adam_case what = case_of(&adam_tensors_odd, 4);
      what.size = 3;
      what.poison = poisons[rank];
      what.poisoned_rank = rank;
      what.poisoned_from = from;
      what.options.common.bucket_size = rank == 1 ? 1000 : 0;
      adam_check(&what);
    }
}

/* --- Tensors of very different size that share one scale: of the momentum the small ones are lost
 * beside the large ones, of the step they are not. */

enum { RANKS = 4, EACH = 512, TENSORS = 4, ALL = EACH * TENSORS };

struct contrast {
  onebit_adam_exchange_t exchange;
  double residual; /* error, relative to what is exchanged */
};

static void keep_contrast(onebit_comm_t comm, void *context) {
  struct contrast *contrast = context;
  float parameters[ALL] = {0}, gradients[ALL];
  onebit_tensor_t tensors[TENSORS];
  onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
  onebit_optimizer_info_t info = {.size = sizeof info};
  onebit_optimizer_t optimizer;
  size_t rank = (size_t)onebit_comm_rank(comm);
  options.freeze_step = 30;
  options.exchange = contrast->exchange;
  options.common.block_size = ONEBIT_BLOCK_BUFFER;
  for (size_t t = 0; t < TENSORS; t++)
    tensors[t] = (onebit_tensor_t){parameters + t * EACH, gradients + t * EACH, EACH, 0, 0, 0};
  if (!CHECK_STATUS(onebit_adam_create(comm, tensors, TENSORS, &options, &optimizer), ONEBIT_OK))
    return;
  for (size_t step = 0; step < 150; step++) {
    for (size_t i = 0; i < ALL; i++)
      gradients[i] = exp2f((float)(i / EACH * 4)) *
                     (uniform_value((rank * 1000 + step) * 5000 + i) + 0.5f * uniform_value(i));
    CHECK_STATUS(onebit_optimizer_step(optimizer, 1e-3f), ONEBIT_OK);
  }
  CHECK_STATUS(onebit_optimizer_get_info(optimizer, &info), ONEBIT_OK);
  if (rank == 0)
    contrast->residual = info.residual_norm / info.momentum_norm;
  onebit_optimizer_destroy(optimizer);
}

Test(adam_step, keeps_less_error_where_sizes_differ) {
  struct contrast step = {ONEBIT_ADAM_EXCHANGE_STEP, 0};
  struct contrast momentum = {ONEBIT_ADAM_EXCHANGE_MOMENTUM, 0};
  on_ranks(RANKS, keep_contrast, &step);
  on_ranks(RANKS, keep_contrast, &momentum);
  cr_log_info("residual: step %.3f, momentum %.3f", step.residual, momentum.residual);
  cr_expect_lt(step.residual, 0.8 * momentum.residual, "the step keeps %g, the momentum %g",
               step.residual, momentum.residual);
}
