/*
 * Efficient-Adam, beside what test_optimizers.c has of all: together with 16-bit types, hosts and
 * skipped steps, after a warm-up and with trust ratios; and it refuses what it does not understand.
 */
#include <criterion/criterion.h>
#include <math.h>

#include "tests/support_adam.h"

TestSuite(efficient_adam, .timeout = 120);

static struct adam_case case_of(const struct adam_tensors *tensors) {
  return (struct adam_case){.kind = &kind_efficient_adam,
                            .size = 3,
                            .steps = 16,
                            .options = ONEBIT_ADAM_OPTIONS_INIT,
                            .tensors = tensors,
                            .still = true};
}

/* Dense steps first; the freeze may wait where the variance lags. */
Test(efficient_adam, after_a_warm_up) {
  struct adam_case what = case_of(&adam_tensors_odd);
  what.options.freeze_step = 5;
  what.options.beta2 = 0.95;
  what.uncompressed = 1u << 3 | 1u << 5;
  what.options.common.bucket_size = 1000;
  what.options.common.gradient_dtype = what.options.common.parameter_dtype = ONEBIT_BFLOAT16;
  what.poison = NAN;
  adam_check(&what);
  what = case_of(&adam_tensors_tiny);
  what.options.freeze_step = 5;
  what.options.common.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
  what.size = 4;
  what.hosts = 2;
  adam_check(&what);
  what.tensors = &adam_tensors_none;
  adam_check(&what);
}

Test(efficient_adam, trust_ratios_on_hosts_in_sixteen_bits_with_skips) {
  struct adam_case what = case_of(&adam_tensors_odd);
  what.kind = &kind_efficient_lamb;
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
