/*
 * The dense optimizers that one-bit ones are measured against: one loop over memory each (LAMB two,
 * since it wants norms before it can move), written plainly and compiled for the widest vectors of
 * this processor. Gradients are of this rank and float32, and so is everything else.
 */
#ifndef BENCH_FUSED_H
#define BENCH_FUSED_H

#include <stddef.h>

#include "compression/numerics.h"

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

/* 28 bytes a parameter. */
void bench_fused_adam(struct bench_fused *fused);
/* 28, and 12. */
void bench_fused_lamb(struct bench_fused *fused);
void bench_fused_lamb_move(struct bench_fused *fused);
/* 20. */
void bench_fused_momentum(struct bench_fused *fused);
void bench_fused_lion(struct bench_fused *fused);

#endif
