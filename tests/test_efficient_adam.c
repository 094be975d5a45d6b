/*
 * Efficient-Adam equals the oracle's in every bit of every parameter after every step, from the
 * first on, for groups of 1 to 7 ranks, on hosts, in buckets, with 16-bit gradients and parameters,
 * with steps that are skipped and with tensors that stay uncompressed; and refuses what it does not
 * understand.
 */
#include <criterion/criterion.h>
#include <math.h>

#include "tests/support_efficient_adam.h"

TestSuite(efficient_adam, .timeout = 120);

static struct adam_case case_of(const struct adam_tensors *tensors) {
  return (struct adam_case){.kind = &efficient_adam,
                            .steps = 16,
                            .options = ONEBIT_ADAM_OPTIONS_INIT,
                            .tensors = tensors,
                            .still = true};
}

Test(efficient_adam, several_tensors_of_odd_sizes) {
  adam_check_on_groups(case_of(&adam_tensors_odd));
}
Test(efficient_adam, whole_words_and_blocks) {
  adam_check_on_groups(case_of(&adam_tensors_many_words));
}
Test(efficient_adam, fewer_elements_than_ranks) {
  adam_check_on_groups(case_of(&adam_tensors_tiny));
}
Test(efficient_adam, no_tensors) { adam_check_on_groups(case_of(&adam_tensors_none)); }

Test(efficient_adam, options_are_heeded) {
  struct adam_case what = case_of(&adam_tensors_odd);
  onebit_efficient_adam_options_t more = ONEBIT_EFFICIENT_ADAM_OPTIONS_INIT;
  more.gain = 1.7;
  what.more = &more;
  what.options.beta1 = 0.8;
  what.options.beta2 = 0.95;
  what.options.epsilon = 1e-3;
  what.options.common.gradient_factor = 0.3;
  what.options.common.scale = ONEBIT_SCALE_MEAN_ABSOLUTE;
  what.options.common.block_size = 64;
  what.options.common.chunk_size = 128;
  adam_check_on_groups(what);
  what.options.common.block_size = ONEBIT_BLOCK_BUFFER;
  adam_check_on_groups(what);
  what.options.common.no_error_feedback = 1;
  adam_check_on_groups(what);
}

/* Elements whose first gradient comes after others', and a tensor that has none at all before. */
Test(efficient_adam, first_gradients_that_come_late) {
  struct adam_case what = case_of(&adam_tensors_tiny);
  what.late = 9;
  adam_check_on_groups(what);
  what.tensors = &adam_tensors_odd;
  what.size = 3;
  adam_check(&what);
}

Test(efficient_adam, buckets_and_forms) {
  for (int form = IN_ONE_CALL; form < ADAM_FORMS; form++) {
    struct adam_case what = case_of(&adam_tensors_odd);
    what.form = (enum adam_form)form;
    what.options.common.bucket_size = 1000;
    what.size = 3 + form % 2;
    adam_check(&what);
  }
}

Test(efficient_adam, on_hosts) {
  static const int splits[][2] = {{4, 2}, {6, 3}, {4, 4}, {4, 1}};
  for (size_t k = 0; k < 4; k++) {
    struct adam_case what = case_of(&adam_tensors_odd);
    what.options.common.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
    what.options.common.bucket_size = k % 2 ? 1000 : 0;
    what.size = splits[k][0];
    what.hosts = splits[k][1];
    adam_check(&what);
  }
}

Test(efficient_adam, every_codec_and_any_number_of_threads) {
  for (size_t c = 0; c < test_codecs_count; c++) {
    if (!use_codec(test_codecs[c]))
      continue;
    for (int threads = 1; threads <= 3; threads++) {
      struct adam_case what = case_of(&adam_tensors_odd);
      what.size = 3;
      what.options.common.threads = threads;
      adam_check(&what);
    }
  }
}

Test(efficient_adam, sixteen_bits_loss_scale_and_clipping) {
  static const onebit_dtype_t dtypes[] = {ONEBIT_BFLOAT16, ONEBIT_FLOAT16};
  for (size_t d = 0; d < 2; d++) {
    struct adam_case what = case_of(&adam_tensors_odd);
    what.size = 3;
    what.options.common.gradient_dtype = dtypes[d];
    what.options.common.parameter_dtype = dtypes[1 - d];
    what.options.common.initial_loss_scale = 4;
    what.options.common.loss_scale_interval = 6;
    what.options.common.clip_norm = 3;
    what.absent = 5;
    what.moving = true;
    adam_check(&what);
  }
}

Test(efficient_adam, skipped_steps_change_nothing) {
  static const float poisons[] = {1.0f / 0.0f, NAN, -1.0f / 0.0f, 3e38f};
  for (int rank = 0; rank < 4; rank++) {
    struct adam_case what = case_of(&adam_tensors_odd);
    what.size = 4;
    what.poison = poisons[rank];
    what.poisoned_rank = rank;
    what.options.common.bucket_size = rank == 1 ? 1000 : 0;
    adam_check(&what);
  }
}

Test(efficient_adam, tensors_that_stay_uncompressed) {
  struct adam_case what = case_of(&adam_tensors_odd);
  what.uncompressed = 1u << 3 | 1u << 5;
  adam_check_on_groups(what);
  what.uncompressed = 0x3ff;
  what.size = 3;
  adam_check(&what);
}

/* Dense steps first; the freeze may wait where the variance lags. */
Test(efficient_adam, after_a_warm_up) {
  struct adam_case what = case_of(&adam_tensors_odd);
  onebit_efficient_adam_options_t more = ONEBIT_EFFICIENT_ADAM_OPTIONS_INIT;
  more.warmup_steps = 5;
  what.more = &more;
  what.options.beta2 = 0.95;
  adam_check_on_groups(what);
  what.uncompressed = 1u << 3 | 1u << 5;
  what.options.common.bucket_size = 1000;
  what.size = 3;
  adam_check(&what);
  what.options.common.gradient_dtype = what.options.common.parameter_dtype = ONEBIT_BFLOAT16;
  what.poison = NAN;
  adam_check(&what);
  what = case_of(&adam_tensors_tiny);
  what.more = &more;
  what.options.common.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
  what.size = 4;
  what.hosts = 2;
  adam_check(&what);
  what.tensors = &adam_tensors_none;
  adam_check(&what);
}

static void check_trust_ratios(struct adam_case what, double min_ratio, double max_ratio) {
  onebit_efficient_adam_options_t more = ONEBIT_EFFICIENT_ADAM_OPTIONS_INIT;
  more.trust_ratio = 1;
  more.min_ratio = min_ratio;
  more.max_ratio = max_ratio;
  what.more = &more;
  what.kind = &efficient_lamb;
  adam_check_on_groups(what);
}

Test(efficient_adam, trust_ratios) {
  struct adam_case what = case_of(&adam_tensors_odd);
  check_trust_ratios(what, 0, 0);
  check_trust_ratios(what, 0.5, 0.6);
  what.uncompressed = 1u << 3 | 1u << 5;
  what.options.common.bucket_size = 1000;
  check_trust_ratios(what, 0, 0);
  what = case_of(&adam_tensors_many_words);
  what.options.common.block_size = ONEBIT_BLOCK_BUFFER;
  check_trust_ratios(what, 0, 0);
  what = case_of(&adam_tensors_tiny);
  what.late = 9;
  check_trust_ratios(what, 0, 0);
  check_trust_ratios(case_of(&adam_tensors_none), 0, 0);
}

Test(efficient_adam, trust_ratios_on_hosts_in_sixteen_bits_with_skips) {
  onebit_efficient_adam_options_t more = ONEBIT_EFFICIENT_ADAM_OPTIONS_INIT;
  struct adam_case what = case_of(&adam_tensors_odd);
  more.trust_ratio = 1;
  what.more = &more;
  what.kind = &efficient_lamb;
  what.size = 4;
  what.hosts = 2;
  what.options.common.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
  what.options.common.parameter_dtype = ONEBIT_BFLOAT16;
  what.poison = NAN;
  what.poisoned_rank = 2;
  adam_check(&what);
}

#define SIZE .size = sizeof(onebit_efficient_adam_options_t)

Test(efficient_adam, wrong_options_are_named) {
  float parameter = 0, gradient = 0;
  const onebit_tensor_t tensor = {.parameter = &parameter, .gradient = &gradient, .count = 1};
  onebit_comm_t comm;
  onebit_optimizer_t optimizer;
  cr_assert_eq(onebit_comm_create_self(&comm), ONEBIT_OK);
  const struct {
    onebit_efficient_adam_options_t options;
    const char *words;
    onebit_status_t status;
  } wrong[] = {
      {{.size = 8}, "options->size is 8", ONEBIT_ERROR_ARGUMENT},
      {{SIZE, .beta1 = 1}, "beta1 is 1", ONEBIT_ERROR_ARGUMENT},
      {{SIZE, .beta2 = -1}, "beta2 is -1", ONEBIT_ERROR_ARGUMENT},
      {{SIZE, .epsilon = NAN}, "epsilon is nan", ONEBIT_ERROR_ARGUMENT},
      {{SIZE, .gain = -2}, "gain is -2", ONEBIT_ERROR_ARGUMENT},
      {{SIZE, .trust_ratio = 1, .min_ratio = -1}, "min_ratio is -1", ONEBIT_ERROR_ARGUMENT},
      {{SIZE, .trust_ratio = 1, .max_ratio = NAN}, "max_ratio is nan", ONEBIT_ERROR_ARGUMENT},
      {{SIZE, .trust_ratio = 1, .min_ratio = 3, .max_ratio = 2},
       "min_ratio is 3, more than max_ratio, which is 2",
       ONEBIT_ERROR_ARGUMENT},
      {{SIZE, .trust_ratio = 1, .warmup_steps = 9},
       "warmup_steps is 9, with trust_ratio",
       ONEBIT_ERROR_UNSUPPORTED},
      {{SIZE, .common.profile = ONEBIT_PROFILE_DEEPSPEED},
       "ONEBIT_PROFILE_DEEPSPEED",
       ONEBIT_ERROR_UNSUPPORTED},
  };
  for (size_t k = 0; k < sizeof wrong / sizeof wrong[0]; k++) {
    onebit_status_t status =
        onebit_efficient_adam_create(comm, &tensor, 1, &wrong[k].options, &optimizer);
    cr_expect_eq(status, wrong[k].status, "case %zu: status %d", k, (int)status);
    cr_expect_null(optimizer);
    cr_expect(strstr(onebit_last_error(), wrong[k].words), "case %zu: %s", k, onebit_last_error());
  }
  cr_expect_eq(onebit_efficient_adam_create(NULL, &tensor, 1, NULL, &optimizer),
               ONEBIT_ERROR_ARGUMENT);
  cr_expect_eq(onebit_efficient_adam_create(comm, &tensor, 1, NULL, NULL), ONEBIT_ERROR_ARGUMENT);
  onebit_comm_destroy(comm);
}

/* One rank has another option than the others: all learn of it, with its name. */
static void disagree(onebit_comm_t comm, void *context) {
  static const char *const names[] = {"gain", "the kind of optimizer", "min_ratio", "max_ratio",
                                      "warmup_steps"};
  float parameter[10] = {0}, gradient[10] = {0};
  const onebit_tensor_t tensor = {parameter, gradient, 10, 0, 0, 0};
  (void)context;
  for (int k = 0; k < 5; k++) {
    const bool other = onebit_comm_rank(comm) == 1;
    onebit_efficient_adam_options_t options = ONEBIT_EFFICIENT_ADAM_OPTIONS_INIT;
    onebit_optimizer_t optimizer;
    options.gain = other && k == 0 ? 2 : 0;
    options.trust_ratio = k == 1 ? other : k < 4;
    options.min_ratio = other && k == 2 ? 0.5 : 0;
    options.max_ratio = other && k == 3 ? 5 : 0;
    options.warmup_steps = k < 4 ? 0 : other ? 5 : 4;
    CHECK_STATUS(onebit_efficient_adam_create(comm, &tensor, 1, &options, &optimizer),
                 ONEBIT_ERROR_MISMATCH);
    CHECK_WORDS(names[k]);
    CHECK(optimizer == NULL, "a failed creation left an optimizer");
  }
}

Test(efficient_adam, ranks_with_other_options) { on_ranks(3, disagree, NULL); }
