/*
 * 0/1 Adam (Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam",
 * arXiv 2202.06009). It has no dense warm-up: the variance is updated in steps that become rarer,
 * and once it is frozen most steps send nothing at all. t is the number of the step:
 *
 *   variance     every iv-th step: g = mean over ranks of gradient, m and v as in Adam. iv begins
 *   stage        with 1 and doubles after every variance_update_scaler such steps
 *                the other steps: g = compressed allreduce of the gradients, m as in Adam
 *                p = p - lr (bounded(m^ / (sqrt(v^) + eps)) + wd p)
 *
 *   local        after step variance_freeze_step the variance is frozen; every rank then trains
 *                alone:
 *   stage        m = b1 m + (1 - b1) gradient of this rank
 *                p = p - lr (bounded(m^ / (sqrt(v^) + eps)) + wd p)
 *                every il-th step the ranks synchronise, where a is the parameters after the last
 *                synchronisation and L the sum of lr / (1 - b1^t) since then:
 *                u = compressed allreduce of (p - a) (sqrt(v^) + eps)
 *                p = a + bounded(u / (sqrt(v^) + eps) / L) L,  m = -u / L
 *                il begins with 1 and doubles after every local_step_scaler steps, up to
 *                local_step_clipper
 *
 * Here m^ = m / (1 - b1^t), and v^ = v / (1 - b2^k), where k is the number of updates of v, which
 * is much smaller than t. bounded(x) limits x to +-ONEBIT_STEP_BOUND (optimizer.h). An il-th or
 * iv-th step is one whose number is a multiple of il or iv.
 *
 * After a synchronisation p is the same on all ranks, to the bit; between two synchronisations
 * parameters differ (onebit_optimizer_info_t, synchronized). The weight decay of local steps is not
 * exchanged: at a synchronisation wd L' a is subtracted instead, where L' is the sum of lr. Where L
 * is 0, m becomes 0. Residuals are set to zero at the freeze, because another quantity is exchanged
 * after it. An element whose variance is zero never had a gradient in a dense step: its momentum
 * stays zero and only weight decay changes it. Once the variance is frozen, that holds for the rest
 * of the training.
 *
 * Local steps send nothing, so only the rank itself learns of an error in them, and the step counts
 * on all ranks:
 *   - if a rank's gradient is not finite, that rank keeps its parameters and momentum and gets
 *     ONEBIT_SKIPPED. With loss scaling only that rank lowers its loss scale: call
 *     onebit_optimizer_get_loss_scale on each rank
 *   - a wrong argument is an ONEBIT_ERROR_ARGUMENT on that rank
 *   - learning rates that differ between ranks are an ONEBIT_ERROR_MISMATCH on all ranks at the
 *     next synchronisation, and at every later one until a checkpoint is loaded
 *   - each rank clips by the norm of its own gradients
 * If some tensors are uncompressed, every step exchanges their gradients. Errors are then reported
 * on all ranks; for the other tensors only the first of these rules still holds.
 *
 * Profile deepspeed is DeepSpeed's ZeroOneAdam: no bias correction, DeepSpeed's step count, one
 * allreduce for each tensor with DeepSpeed's padding and scales, weight decay as part of the
 * exchanged values, u added up step by step. p is computed from a here too; DeepSpeed subtracts u
 * instead, which adds rounding errors. A single rank exchanges with itself; in DeepSpeed a single
 * rank's momentum changes only in steps that update the variance.
 *
 * 0/1 Adam is recommended only in profile deepspeed: with its default options the final loss is
 * more than 1 % above dense Adam's. Use Efficient-Adam (onebit/efficient_adam.h).
 */
#ifndef ONEBIT_ZERO_ONE_ADAM_H
#define ONEBIT_ZERO_ONE_ADAM_H

#include "onebit/optimizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Start from ONEBIT_ZERO_ONE_ADAM_OPTIONS_INIT; in every field zero means the default. All ranks
 * give the same options, except common.threads and common.device. */
typedef struct onebit_zero_one_adam_options {
  size_t size;                   /* sizeof(onebit_zero_one_adam_options_t) */
  double beta1;                  /* in (0, 1); default 0.9 */
  double beta2;                  /* in (0, 1); default 0.999 */
  double epsilon;                /* positive; default 1e-8 */
  int no_bias_correction;        /* nonzero: m^ = m and v^ = v. Profile deepspeed sets it */
  size_t variance_freeze_step;   /* DeepSpeed's var_freeze_step; default 100000 */
  size_t variance_update_scaler; /* var_update_scaler; default 16 */
  size_t local_step_scaler;      /* default 32678, as in DeepSpeed */
  size_t local_step_clipper;     /* default 16 */
  onebit_optimizer_options_t common;
} onebit_zero_one_adam_options_t;

/* clang-format off */
#define ONEBIT_ZERO_ONE_ADAM_OPTIONS_INIT \
  { sizeof(onebit_zero_one_adam_options_t), 0, 0, 0, 0, 0, 0, 0, 0, ONEBIT_OPTIMIZER_OPTIONS_INIT }
/* clang-format on */

/* Makes a 0/1 Adam optimizer for a list of tensors. Arguments are as in onebit_adam_create, except
 * the options.
 * Memory, in bytes per parameter: 24 (momentum, variance, two copies of the residual, the
 * parameters of the last synchronisation, and the mean gradient or the movement to exchange) + 8 /
 * size + 1/2 for messages; in profile deepspeed 4 more, for u.
 * Errors: those of onebit_adam_create. */
onebit_status_t onebit_zero_one_adam_create(onebit_comm_t comm, const onebit_tensor_t *tensors,
                                            size_t ntensors,
                                            const onebit_zero_one_adam_options_t *options,
                                            onebit_optimizer_t *optimizer);

#ifdef __cplusplus
}
#endif
#endif
