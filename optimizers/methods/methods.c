/* The list of methods, for tools and tests. An optimizer knows its own row alone. */
#include "optimizers/method.h"

#define LISTED(name) &ob_method_##name,
const struct ob_method *const ob_methods[] = {OB_METHODS(LISTED) NULL};
