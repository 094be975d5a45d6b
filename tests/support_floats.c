/* Sets floating-point environments and a locale around calls. */
#define _POSIX_C_SOURCE 200809L
#include "tests/support_floats.h"

#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The environments. Some have exception flags set, as in a program that has not cleared them. */
const struct float_mode float_modes[] = {
#if defined(__x86_64__)
    {"default", {0x1f80}},
    {"flush to zero", {0x9fc0 | 0x02}},
    {"downward", {0x3f80}},
    {"upward", {0x5f80 | 0x3f}},
    {"toward zero", {0x7f80}},
    {"all traps", {0}},
    {"all traps, upward, flush to zero", {0xc040}},
#elif defined(__aarch64__)
    {"default", {0, 0}},
    {"flush to zero", {1 << 24, 1}},
    {"downward", {2 << 22, 0}},
    {"upward", {1 << 22, 0x1f}},
    {"toward zero", {3 << 22, 0}},
    {"all traps", {0x9f00, 0}}, /* few processors have traps */
    {"all traps, upward, flush to zero", {1 << 24 | 1 << 22 | 0x9f00, 0}},
#else
    {"default", {{0}}},
#endif
};
const unsigned float_modes_count = sizeof float_modes / sizeof float_modes[0];

struct ob_float_environment float_environment(void) {
  const struct ob_float_environment now = ob_float_enter();
  ob_float_leave(&now);
  return now;
}

bool float_environments_equal(const struct ob_float_environment *one,
                              const struct ob_float_environment *other) {
  return memcmp(one, other, sizeof *one) == 0;
}

static bool is_default(const struct ob_float_environment *environment) {
#if defined(__x86_64__)
  return (environment->mxcsr & ~0x3fU) == float_modes[0].environment.mxcsr;
#elif defined(__aarch64__)
  return environment->control == 0;
#else
  (void)environment;
  return false;
#endif
}

/* The locale, which tests/rules.mk compiles in the program's directory. */
static locale_t comma;
__attribute__((constructor)) static void open_locale(void) {
  char path[4096];
  ssize_t length = readlink("/proc/self/exe", path, sizeof path - sizeof "/locales");
  while (length > 0 && path[length - 1] != '/')
    length--;
  if (length <= 0)
    return;
  strcpy(path + length, "locales");
  setenv("LOCPATH", path, 1);
  comma = newlocale(LC_NUMERIC_MASK, "comma", (locale_t)0);
  unsetenv("LOCPATH");
}

bool has_comma_locale(void) { return comma != (locale_t)0; }

/* Sets the next environment of the list, and reads it back: some emulators set only the rounding
 * mode, and some processors have no traps. */
struct float_call float_call_begin(void) {
  static _Thread_local unsigned calls;
  struct float_call call = {.before = float_environment()};
  if (is_default(&call.before))
    ob_float_leave(&float_modes[calls++ % float_modes_count].environment);
  call.during = float_environment();
  call.locale = (void *)uselocale(comma);
  return call;
}

void float_call_end(const struct float_call *call, const char *name) {
  const struct ob_float_environment after = float_environment();
  const locale_t locale = uselocale((locale_t)call->locale);
  ob_float_leave(&call->before);
  if (float_environments_equal(&call->during, &after) && (!comma || locale == comma))
    return;
  fprintf(stderr, "%s left another floating-point environment or locale than it found\n", name);
  abort();
}
