/*
 * 1-bit Adam (Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's
 * Convergence Speed", arXiv 2102.02888). It starts as data-parallel Adam, with gradients averaged
 * in full precision, until the variance has settled; then the variance is frozen and the momentum
 * is what the ranks exchange, one bit an element with the error fed back:
 *
 *   warm-up      g = mean over ranks of gradient
 *                m = b1 m + (1 - b1) g
 *                v = b2 v + (1 - b2) g^2
 *                p = p - lr (m^ / (sqrt(v^) + eps) + wd p)
 *
 *   compressed   m = compressed allreduce of (b1 m + (1 - b1) gradient of this rank)
 *                v as it was at the freeze
 *                p = p - lr (m^ / (sqrt(v^) + eps) + wd p)
 *
 * with m^ = m / (1 - b1^t), v^ = v / (1 - b2^t) (in the compressed stage v^ keeps the t of the
 * freeze). An element whose variance is exactly zero at the freeze never had a gradient: its step
 * would be m / eps, so it gets none (weight decay still applies).
 *
 * The arithmetic is float32; b1, b2, 1 - b1, 1 - b2 and the bias corrections are computed in double
 * and rounded once. Gradients are local: do not average them over the ranks before the step, the
 * optimizer does. All ranks must start from the same parameters; the steps keep them equal, bit for
 * bit.
 */
#ifndef ONEBIT_ADAM_H
#define ONEBIT_ADAM_H

#include "onebit/optimizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* MOMENTUM is 1-bit Adam as it was published. STEP carries w = m / (sqrt(v^) + eps) instead, which
 * is linear in m as long as the variance is frozen: elements of very different scale come to one
 * size, and the update needs no variance (docs/optimizers.md has the measurement). For that an
 * element without variance is not left alone there: like all whose w is small beside their block's
 * it takes steps of the block's scale, whose signs cancel. */
typedef enum onebit_adam_exchange {
  ONEBIT_ADAM_EXCHANGE_DEFAULT = 0, /* MOMENTUM */
  ONEBIT_ADAM_EXCHANGE_MOMENTUM = 1,
  ONEBIT_ADAM_EXCHANGE_STEP = 2
} onebit_adam_exchange_t;

/* The fit for ZeRO stage 1. The gradients' bits go to the server of each share only, with error
 * feedback; it keeps momentum, variance and master values of its share and makes the step there.
 *   STEP         what all get is the step w, one bit an element, with an error of its own kept by
 *                the server; each applies it to float32 parameters
 *   PARAMETERS   all get the new parameters, in parameter_dtype */
typedef enum onebit_shards {
  ONEBIT_SHARDS_NONE = 0,
  ONEBIT_SHARDS_STEP = 1,
  ONEBIT_SHARDS_PARAMETERS = 2
} onebit_shards_t;

/* Start from ONEBIT_ADAM_OPTIONS_INIT; in every field zero means the default. All ranks give the
 * same, except common.threads and common.device. */
typedef struct onebit_adam_options {
  size_t size;    /* sizeof(onebit_adam_options_t) */
  double beta1;   /* in (0, 1); default 0.9 */
  double beta2;   /* in (0, 1); default 0.999 */
  double epsilon; /* positive; default 1e-8 */
  /* Number of warm-up steps, at least 1; default ONEBIT_FREEZE_AUTOMATIC. In profile deepspeed
   * DeepSpeed's own count, whose first call makes no step: freeze_step - 1 steps of warm-up, and at
   * least one. */
  size_t freeze_step;
  /* Automatic freeze: with D = 1 / (1 - beta2) rounded up, freeze after the first step t > D whose
   * variance satisfies
   *   threshold <= |v(t - D)| / |v(t)| <= 1 / threshold
   * in the sum of absolute values (bias-corrected unless no_bias_correction is set); in (0, 1);
   * default 0.96 (the criterion of arXiv 2102.02888). */
  double freeze_threshold;
  int no_bias_correction; /* nonzero: m^ = m and v^ = v. Profile deepspeed sets it */
  /* What the ranks exchange in the compressed stage. */
  onebit_adam_exchange_t exchange;
  /* Who keeps variance and master values: all ranks, or each for the share that it serves. */
  onebit_shards_t shards;
  onebit_optimizer_options_t common;
} onebit_adam_options_t;

/* clang-format off */
#define ONEBIT_ADAM_OPTIONS_INIT \
  { sizeof(onebit_adam_options_t), 0, 0, 0, 0, 0, 0, ONEBIT_ADAM_EXCHANGE_DEFAULT, \
    ONEBIT_SHARDS_NONE, ONEBIT_OPTIMIZER_OPTIONS_INIT }
/* clang-format on */

/* Makes a 1-bit Adam optimizer of a list of tensors. Collective: all ranks give the same counts, in
 * the same order, and the same options, and all get the same success or failure.
 *   comm        the ranks; must outlive the optimizer
 *   tensors     ntensors descriptions; copied, the arrays they point to are not
 *   ntensors    0 or more
 *   options     or NULL for the defaults; not kept
 *   optimizer   out: the optimizer; NULL when the call fails
 * Memory, in bytes a parameter: 12 (momentum then kept value, variance then reciprocal denominator,
 * averaged gradient then second kept value) + 8 / size + 1/2 for messages; plain data-parallel Adam
 * with a buffer for the mean takes 12.
 * Errors: those of onebit_plan_create; ONEBIT_ERROR_ARGUMENT also for a NULL or misaligned array,
 * arrays that overlap, a weight decay or factor that is negative or not finite. */
onebit_status_t onebit_adam_create(onebit_comm_t comm, const onebit_tensor_t *tensors,
                                   size_t ntensors, const onebit_adam_options_t *options,
                                   onebit_optimizer_t *optimizer);

#ifdef __cplusplus
}
#endif
#endif
