/* Cases of Efficient-Adam, run and compared with the oracle as those of support_adam.h are. */
#ifndef ONEBIT_TESTS_SUPPORT_EFFICIENT_ADAM_H
#define ONEBIT_TESTS_SUPPORT_EFFICIENT_ADAM_H

#include "tests/support_adam.h"

/* adam_case.more: NULL, or an onebit_efficient_adam_options_t, of which the gain and what is said
 * of trust ratios count. Without and with these. */
extern const struct optimizer_kind efficient_adam, efficient_lamb;

#endif
