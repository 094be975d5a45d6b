/*
 * The per-tensor coefficients of 1-bit LAMB, computed from sums over a tensor's elements. The code
 * is in a header because on a device a kernel computes them, so that the host need not wait. All
 * arithmetic is in double with one rounding per operation, in the order of the source; results that
 * a pass uses are rounded to float32 once.
 */
#ifndef OB_OPTIMIZERS_LAMB_TENSOR_H
#define OB_OPTIMIZERS_LAMB_TENSOR_H

#include "compression/numerics.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The pass whose sums are used. Each tensor's sum adds the sums of its blocks in the order of
 * ob_add_sums. */
enum ob_lamb_stage {
  OB_LAMB_WARM,    /* LAMB: ratio and coefficient; learning rates for LAMB_MOVE */
  OB_LAMB_SCALE,   /* POWER, at the freeze: scalings for LAMB_FREEZE */
  OB_LAMB_CORRECT, /* LAMB_FRESH or LAMB_FROZEN: factor; learning rates for what follows */
};

/* Options of onebit_lamb_options_t, with every default filled in. */
struct ob_lamb_limits {
  double min_coefficient, max_coefficient, coefficient_beta;
  double min_factor, max_factor, factor_change;
};

/* 1-bit LAMB's state of the tensors, by their number. A deferred executor has its own copy of the
 * arrays, and copies it here whenever the host waits for it. */
struct ob_lamb {
  struct ob_lamb_limits limits;
  size_t count;
  double *coefficients; /* c */
  double *factors;      /* f of the last step; 1 in the warm-up */
  double *scalings;     /* factors of momentum in messages, which are floats; from the freeze on */
};

/* Clamps a value; NaN becomes the lower limit. */
OB_INLINE double ob_lamb_clamp(double value, double min, double max) {
  return !(value > min) ? min : value > max ? max : value;
}

/* Returns the ratio r of a warm-up step, from |p|^2 and |u|^2, and moves the coefficient towards
 * it. */
OB_INLINE double ob_lamb_warmup_ratio(double *coefficient, double parameters, double updates,
                                      const struct ob_lamb_limits *limits) {
  const double beta = limits->coefficient_beta;
  double ratio = 1;
  if (parameters > 0 && updates > 0)
    ratio = ob_lamb_clamp(sqrt(parameters) / sqrt(updates), limits->min_coefficient,
                          limits->max_coefficient);
  if (ratio != 1)
    *coefficient = beta * *coefficient + (1 - beta) * ratio;
  return ratio;
}

/* Returns the factor f of a compressed step, from |q|^2, |u|^2, the largest quotient of
 * denominators and the factor of the last step. `segment` is |q| / |u|, which is 1 without weight
 * decay. */
OB_INLINE double ob_lamb_correct_factor(double last, double plain, double updates, double largest,
                                        const struct ob_lamb_limits *limits) {
  const double change = limits->factor_change;
  double segment = updates > 0 ? sqrt(plain) / sqrt(updates) : 1;
  segment = segment < 1 ? segment : 1;
  double factor =
      ob_lamb_clamp(largest * segment + (1 - segment), limits->min_factor, limits->max_factor);
  return ob_lamb_clamp(factor, last * (1 - change), last * (1 + change));
}

/* Returns the root mean square of a tensor's momentum, from the sum of its squares. */
OB_INLINE double ob_lamb_level(double squares, size_t count) {
  return count ? sqrt(squares / (double)count) : 0;
}

/* Returns the factor by which a momentum of this level is multiplied in messages; 1 if the level is
 * 0, or if the quotient is not finite as float32. */
OB_INLINE float ob_lamb_scaling(double mean_level, double level) {
  float scaling = level > 0 ? (float)(mean_level / level) : 1;
  return scaling > 0 && ob_is_finite(scaling) ? scaling : 1;
}

/* Returns the learning rate of a tensor's pieces: the step's rate times the tensor's factor, times
 * r in the warm-up or c f after it. */
OB_INLINE float ob_lamb_rate(float learning_rate, float factor, double ratio) {
  return (float)((double)learning_rate * (double)factor * ratio);
}

#ifdef __cplusplus
}
#endif
#endif
