/*
 * 0/1 Adam (Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam",
 * arXiv 2202.06009). It has no dense warm-up: the variance is brought up to date in steps that get
 * rarer, and once it is frozen most steps send nothing at all. With t the number of the step:
 *
 *   variance     every iv-th step: g = mean over ranks of gradient, m and v as in Adam. iv begins
 *   stage        with 1 and doubles after every variance_update_scaler such steps
 *                the other steps: g = compressed allreduce of the gradients, m as in Adam
 *                p = p - lr (bounded(m^ / (sqrt(v^) + eps)) + wd p)
 *
 *   local        after step variance_freeze_step the variance is frozen; every rank goes on alone:
 *   stage        m = b1 m + (1 - b1) gradient of this rank
 *                p = p - lr (bounded(m^ / (sqrt(v^) + eps)) + wd p)
 *                every il-th step the ranks synchronise, where a is what they had after the last
 *                time and L the sum of lr / (1 - b1^t) since:
 *                u = compressed allreduce of (p - a) (sqrt(v^) + eps)
 *                p = a + bounded(u / (sqrt(v^) + eps) / L) L,  m = -u / L
 *                il begins with 1 and doubles after every local_step_scaler steps, up to
 *                local_step_clipper
 *
 * with m^ = m / (1 - b1^t), and v^ = v / (1 - b2^k) where k is how many times v was brought up to
 * date, which is far less than t, and bounded(x) = x but at most ONEBIT_STEP_BOUND and at least
 * minus that (optimizer.h). il-th and iv-th are steps whose number il or iv divides.
 *
 * After a synchronisation p is the same on all ranks, to the bit; between two synchronisations
 * parameters differ (onebit_optimizer_info_t, synchronized). The weight decay of local steps is not
 * exchanged: at a synchronisation it is wd L' a, with L' the sum of lr. Where L is 0, m becomes 0.
 * Residuals begin anew at the freeze, because they are of another quantity then. An element without
 * variance, which never had a gradient in a dense step, has no momentum and stays where it is
 * (weight decay still applies); once the variance is frozen, for good.
 *
 * Local steps send nothing, so a rank alone learns of its faults, and the step counts for all:
 *   - if a rank's gradient is not finite, that rank keeps its parameters and momentum and gets
 *     ONEBIT_SKIPPED. With loss scaling only its own scale falls: ask for it on each rank
 *   - a wrong argument is an ONEBIT_ERROR_ARGUMENT on that rank
 *   - rates that differ between ranks are an ONEBIT_ERROR_MISMATCH on all at the synchronisation,
 *     and at every later one until a checkpoint is loaded
 *   - a rank clips by the norm of its own gradients
 * If some tensors are uncompressed, every step exchanges these: errors are then on all ranks, and
 * only the rule of gradients that are not finite holds for the other tensors.
 *
 * Profile deepspeed is DeepSpeed's ZeroOneAdam: no bias correction, its step count, one call for
 * each tensor with its padding and scales, weight decay as part of what is exchanged, u added up
 * step by step. p is computed from a here too, where DeepSpeed subtracts u, which rounds. One rank
 * alone exchanges with itself; in DeepSpeed its momentum changes only in the variance's steps.
 *
 * Not recommended but in profile deepspeed: with its default options its loss ends more
 * than 1 % above dense Adam's. Take Efficient-Adam (onebit/efficient_adam.h).
 */
#ifndef ONEBIT_ZERO_ONE_ADAM_H
#define ONEBIT_ZERO_ONE_ADAM_H

#include "onebit/optimizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Start from ONEBIT_ZERO_ONE_ADAM_OPTIONS_INIT; in every field zero means the default. All ranks
 * give the same, except common.threads and common.device. */
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

/* Makes a 0/1 Adam optimizer of a list of tensors. As onebit_adam_create, but for its options.
 * Memory, in bytes a parameter: 24 (momentum, variance, two copies of the residual, the
 * parameters of the last synchronisation, and the mean gradient or what is to be exchanged of a
 * movement) + 8 / size + 1/2 for messages; in profile deepspeed 4 more, for u.
 * Errors: those of onebit_adam_create. */
onebit_status_t onebit_zero_one_adam_create(onebit_comm_t comm, const onebit_tensor_t *tensors,
                                            size_t ntensors,
                                            const onebit_zero_one_adam_options_t *options,
                                            onebit_optimizer_t *optimizer);

#ifdef __cplusplus
}
#endif
#endif
