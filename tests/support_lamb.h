/* Cases of 1-bit LAMB, which are run as those of support_adam.h. */
#ifndef ONEBIT_TESTS_SUPPORT_LAMB_H
#define ONEBIT_TESTS_SUPPORT_LAMB_H

#include "tests/oracle_lamb.h"
#include "tests/support_adam.h"

/* Of an onebit_lamb_options_t as `more` of a case the factors and coefficients count; the rest is
 * the case's own. */
extern const struct optimizer_kind lamb;

#endif
