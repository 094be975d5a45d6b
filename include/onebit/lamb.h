/*
 * 1-bit LAMB (Li et al., "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with
 * LAMB's Convergence Speed", arXiv 2104.06069). LAMB multiplies each tensor's learning rate by the
 * ratio of the norms of parameters and update. In the compressed stage the momentum is coarse, so
 * the ratio is frozen, and corrected by the factor by which the variance would have changed since
 * the freeze:
 *
 *   warm-up      g, m and v as in 1-bit Adam
 *                u = m^ / (sqrt(v^) + eps) + wd p
 *                r = clamp(|p| / |u|, min_coefficient, max_coefficient), 1 if either norm is 0
 *                c = coefficient_beta c + (1 - coefficient_beta) r, where r is not 1
 *                p = p - lr r u
 *
 *   compressed   m = compressed allreduce of (b1 m + (1 - b1) gradient of this rank)
 *                v and c as they were at the freeze
 *                h = (m - b1 m of the step before) / (1 - b1), the gradient that m implies
 *                w = b2 w + (1 - b2) h^2, the fresh variance: v at the freeze
 *                q = bounded(m^ / (sqrt(v^) + eps)) as in 1-bit Adam, u = q + wd p
 *                f = largest of (sqrt(v^) + eps) / (sqrt(w^) + eps) over the tensor
 *                f = f s + 1 - s with s = min(1, |q| / |u|), where wd is not 0
 *                f = clamp(f, min_factor, max_factor), then to within factor_change of the last
 *                p = p - lr c f u
 *
 * Norms are over a tensor; c begins as 0, the last f as 1; w^ is w / (1 - b2^t), where t is the
 * number of the step. Elements whose variance was zero at the freeze (adam.h) are left out of f. If
 * one scale serves a whole buffer (ONEBIT_BLOCK_BUFFER, profile deepspeed), each tensor's momentum
 * is multiplied by a factor k before it is sent, so that all momenta of the buffer have the same
 * root mean square at the freeze. k is the mean of all tensors' root mean squares, divided by the
 * root mean square of this tensor. A tensor whose momentum is zero has k = 1, and does not count in
 * the mean.
 *
 * An uncompressed tensor takes the step of the warm-up in all stages.
 *
 * Profile deepspeed is DeepSpeed's OnebitLamb: no bias correction, no bound, and one compressed
 * allreduce of all tensors with DeepSpeed's padding. Elements of the padding keep their values from
 * one call to the next.
 *
 * 1-bit LAMB is recommended only in profile deepspeed: with its default options the final loss is
 * more than 1 % above dense LAMB's. Use Efficient-Adam (onebit/efficient_adam.h).
 */
#ifndef ONEBIT_LAMB_H
#define ONEBIT_LAMB_H

#include "onebit/optimizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Start from ONEBIT_LAMB_OPTIONS_INIT; in every field zero means the default. All ranks give the
 * same options, except common.threads and common.device. */
typedef struct onebit_lamb_options {
  size_t size;  /* sizeof(onebit_lamb_options_t) */
  double beta1; /* as in onebit_adam_options_t, and so are the next five */
  double beta2;
  double epsilon;
  size_t freeze_step;
  double freeze_threshold;
  int no_bias_correction;
  double max_coefficient;  /* DeepSpeed's max_coeff; default 10 */
  double min_coefficient;  /* min_coeff; default 0.01 */
  double coefficient_beta; /* coeff_beta, in (0, 1); default 0.9 */
  double max_factor;       /* factor_max; default 1.5, in profile deepspeed 4 */
  double min_factor;       /* factor_min; default 0.5 */
  double factor_change;    /* factor_threshold, in (0, 1); default 0.1 */
  onebit_optimizer_options_t common;
} onebit_lamb_options_t;

/* clang-format off */
#define ONEBIT_LAMB_OPTIONS_INIT \
  { sizeof(onebit_lamb_options_t), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, \
    ONEBIT_OPTIMIZER_OPTIONS_INIT }
/* clang-format on */

/* Makes a 1-bit LAMB optimizer for a list of tensors. Arguments are as in onebit_adam_create,
 * except the options.
 * Memory: 4 bytes per parameter more than 1-bit Adam, for the fresh variance.
 * Errors: those of onebit_adam_create. */
onebit_status_t onebit_lamb_create(onebit_comm_t comm, const onebit_tensor_t *tensors,
                                   size_t ntensors, const onebit_lamb_options_t *options,
                                   onebit_optimizer_t *optimizer);

#ifdef __cplusplus
}
#endif
#endif
