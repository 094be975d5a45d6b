/* Cases of 1-bit LAMB, which are run as those of support_adam.h. */
#ifndef ONEBIT_TESTS_SUPPORT_LAMB_H
#define ONEBIT_TESTS_SUPPORT_LAMB_H

#include "tests/oracle_lamb.h"
#include "tests/support_adam.h"

/* What a case of 1-bit Adam does not say: `more` of the case, or NULL. Of the options the factors
 * and coefficients count, the rest is the case's. */
struct lamb_more {
  onebit_lamb_options_t options;
  size_t uncompressed; /* the first so many tensors are */
};

extern const struct optimizer_kind lamb;

/* The options of a case. */
onebit_lamb_options_t lamb_options(const struct adam_case *what);

#endif
