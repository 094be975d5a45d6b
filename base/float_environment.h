/*
 * The floating-point environment: rounding, traps, flush-to-zero, and the flags of exceptions. The
 * program's is as the program has set it; the library computes in its own, the default one, so that
 * its results have the same bits on every rank and its arithmetic raises nothing that the program
 * traps or tests for.
 *
 * x87's registers are left alone: the library computes in float and double, which are SSE's.
 */
#ifndef OB_BASE_FLOAT_ENVIRONMENT_H
#define OB_BASE_FLOAT_ENVIRONMENT_H

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <stdint.h>
#else
#include <fenv.h>
#endif

struct ob_float_environment {
#if defined(__x86_64__)
  unsigned mxcsr;
#elif defined(__aarch64__)
  uint64_t control, flags;
#else
  fenv_t all;
#endif
};

/* Sets the library's environment, and returns the one that it found. */
static inline struct ob_float_environment ob_float_enter(void) {
  struct ob_float_environment found;
#if defined(__x86_64__)
  found.mxcsr = _mm_getcsr();
  _mm_setcsr(0x1f80); /* all exceptions masked, no flag, to nearest, with subnormal numbers */
#elif defined(__aarch64__)
  __asm__ volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(found.control), "=r"(found.flags));
  __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0) : "memory");
#else
  fegetenv(&found.all);
  fesetenv(FE_DFL_ENV);
#endif
  return found;
}

static inline void ob_float_leave(const struct ob_float_environment *found) {
#if defined(__x86_64__)
  _mm_setcsr(found->mxcsr);
#elif defined(__aarch64__)
  __asm__ volatile("msr fpsr, %1\n\tmsr fpcr, %0"
                   :
                   : "r"(found->control), "r"(found->flags)
                   : "memory");
#else
  fesetenv(&found->all);
#endif
}

#endif
