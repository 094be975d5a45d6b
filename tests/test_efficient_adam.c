/*
 * Efficient-Adam, beside what test_optimizers.c has of all: together with 16-bit types, hosts and
 * skipped steps, after a warm-up and with trust ratios.
 */
#include "tests/support_adam.h"

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
