/* A call sets the floating-point environment and the locale of its thread, and gives them back. */
#define _POSIX_C_SOURCE 200809L /* uselocale */
#include "base/call_scope.h"

#include <locale.h>
#include <pthread.h>
#ifdef __APPLE__
#include <xlocale.h>
#endif

/* The library's locale, or 0 where it cannot be made: uselocale then changes nothing. */
static locale_t own_locale;
static void make_locale(void) { own_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0); }

struct ob_call_scope ob_call_enter(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, make_locale);
  return (struct ob_call_scope){ob_float_enter(), (void *)uselocale(own_locale)};
}

void ob_call_leave(const struct ob_call_scope *found) {
  uselocale((locale_t)found->locale);
  ob_float_leave(&found->floats);
}
