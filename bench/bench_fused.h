/*
 * The dense optimizers that one-bit ones are measured against: one loop over memory each (LAMB two,
 * since it wants norms before it can move), written plainly and compiled for the widest vectors of
 * this processor. Gradients are of this rank and float32, and so is everything else.
 */
#ifndef BENCH_FUSED_H
#define BENCH_FUSED_H

#include <stddef.h>

#include "compression/numerics.h"

/* Defines bench_NAME: the function INSIDE, which is always inlined, once for each width of vectors,
 * and the choice of one. */
#define BENCH_INSIDE __attribute__((always_inline)) static inline
#if defined(__x86_64__)
#define BENCH_WIDTHS(name, inside, parameters, arguments)                                          \
  __attribute__((target("avx512f"))) static void name##_avx512 parameters { inside arguments; }    \
  __attribute__((target("avx2"))) static void name##_avx2 parameters { inside arguments; }         \
  void bench_##name parameters {                                                                   \
    if (__builtin_cpu_supports("avx512f"))                                                         \
      name##_avx512 arguments;                                                                     \
    else if (__builtin_cpu_supports("avx2"))                                                       \
      name##_avx2 arguments;                                                                       \
    else                                                                                           \
      inside arguments;                                                                            \
  }
#else
#define BENCH_WIDTHS(name, inside, parameters, arguments)                                          \
  void bench_##name parameters { inside arguments; }
#endif

struct bench_fused {
  const struct ob_adam_factors *factors;
  const struct ob_lion_factors *lion;
  float learning_rate, weight_decay;
  size_t count;
  const float *gradient;
  float *parameter, *momentum, *variance;
  float *update;   /* LAMB's */
  double norms[2]; /* LAMB's, squared: parameters, updates */
};

/* Moves 28 bytes a parameter. */
void bench_fused_adam(struct bench_fused *fused);
/* Move 28, and 12. */
void bench_fused_lamb(struct bench_fused *fused);
void bench_fused_lamb_move(struct bench_fused *fused);
/* 20. */
void bench_fused_momentum(struct bench_fused *fused);
void bench_fused_lion(struct bench_fused *fused);

#endif
