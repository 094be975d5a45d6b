/* The clock that measures durations. */
#define _POSIX_C_SOURCE 200809L
#include "base/clock.h"

#include <time.h>

double ob_seconds(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}
