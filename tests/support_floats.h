/*
 * Floating-point environments that a program may have set, and a locale whose decimal point is a
 * comma. Tests make every call of a public function in that locale and in one of these
 * environments, in turn. To do so, tests/wrap_calls.awk generates a wrapper for each public
 * function, and tests/rules.mk links the wrappers. All suites therefore check that results do not
 * depend on the environment, that nothing traps, and that calls leave the environment unchanged.
 */
#ifndef SUPPORT_FLOATS_H
#define SUPPORT_FLOATS_H

#include <stdbool.h>

#include "base/call_scope.h"

struct float_mode {
  const char *name;
  struct ob_float_environment environment;
};

extern const struct float_mode float_modes[];
extern const unsigned float_modes_count; /* the first is the default one */

struct ob_float_environment float_environment(void);
bool float_environments_equal(const struct ob_float_environment *one,
                              const struct ob_float_environment *other);

/* The floating-point state around a call. If the test itself has set an environment, it stays in
 * effect. */
struct float_call {
  struct ob_float_environment before, during;
  void *locale;
};
/* True if the locale exists. Systems without localedef do not have it. */
bool has_comma_locale(void);
struct float_call float_call_begin(void);
void float_call_end(const struct float_call *call, const char *name);

#endif
