/*
 * 1-bit Adam (Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's
 * Convergence Speed", arXiv 2102.02888). It starts as data-parallel Adam, with gradients averaged
 * in full precision, until the variance is stable. Then the variance is frozen, and the ranks
 * exchange the momentum, one bit per element with error feedback:
 *
 *   warm-up      g = mean over ranks of gradient
 *                m = b1 m + (1 - b1) g
 *                v = b2 v + (1 - b2) g^2
 *                p = p - lr (m^ / (sqrt(v^) + eps) + wd p)
 *
 *   compressed   m = compressed allreduce of (b1 m + (1 - b1) gradient of this rank)
 *                v as it was at the freeze
 *                p = p - lr (bounded(m^ / (sqrt(v^) + eps)) + wd p)
 *
 * Here m^ = m / (1 - b1^t) and v^ = v / (1 - b2^t); in the compressed stage the t of v^ stays at
 * the step of the freeze. bounded(x) limits x to +-ONEBIT_STEP_BOUND (optimizer.h). An element
 * whose variance is exactly zero at the freeze never had a gradient. Its step would be m / eps,
 * which is huge, so the element makes no step; weight decay still applies.
 *
 * 1-bit Adam is recommended only in profile deepspeed, or with shards: with its default options the
 * final loss is more than 1 % above dense Adam's. Use Efficient-Adam (onebit/efficient_adam.h).
 */
#ifndef ONEBIT_ADAM_H
#define ONEBIT_ADAM_H

#include "onebit/optimizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The values that the compressed stage exchanges. MOMENTUM exchanges m, as in the paper. STEP
 * exchanges w = m / (sqrt(v^) + eps) instead: elements whose m differ widely have w of about the
 * same size (docs/optimizers.md has the measurement). With STEP the scale of a received message is
 * limited, and an element whose variance is 0 also moves: by its block's scale, in directions that
 * cancel over time. */
typedef enum onebit_adam_exchange {
  ONEBIT_ADAM_EXCHANGE_DEFAULT = 0, /* MOMENTUM */
  ONEBIT_ADAM_EXCHANGE_MOMENTUM = 1,
  ONEBIT_ADAM_EXCHANGE_STEP = 2
} onebit_adam_exchange_t;

/* The distribution of state over the ranks, as in ZeRO stage 1. Every rank is the server of a shard
 * of the parameters, which is a run of consecutive blocks, and stores momentum, variance and master
 * values of this shard only. The ranks send gradients to the servers, and the servers send to all
 * ranks
 *   STEP         the step, one bit per element, which each rank adds to its float32 parameters.
 *                Parameters of another type are an ONEBIT_ERROR_ARGUMENT
 *   PARAMETERS   the new parameters, in parameter_dtype
 * In the warm-up, with STEP and with PARAMETERS, the servers send parameters, and the ranks send
 * gradients in full precision, in the gradients' own type; results equal those without shards bit
 * for bit. In the compressed stage the server of an element computes
 *
 *   g = mean over ranks of +-scale, by the bits of (gradient + residual) of each rank
 *   m = b1 m + (1 - b1) g
 *   w = m^ / (sqrt(v^) + eps), but at most 1 and at least -1
 *   STEP         w goes to all as the bits of (w + residual of the server), w' = +-scale;
 *                p = p - lr (w' + wd p) on every rank
 *   PARAMETERS   p = p - lr (w + wd p) at the server
 *
 * Without the bound of 1 on |w|, STEP and PARAMETERS diverge at learning rates at which NONE is
 * stable (docs/optimizers.md). With STEP an element whose variance is zero also moves: by its
 * block's scale, in directions that cancel over time.
 *
 *                bytes per parameter of a rank               sent by a step, bytes per parameter
 *                                                            compressed      warm-up
 *   NONE         12 + 8 / size + 1/2                         1/4             8
 *   STEP         8 + 20 / size + 3/8                         1/4             gradient's + 4
 *   PARAMETERS   8 + 12 / size + 1/4                         1/8 + its own   gradient's + its own
 *
 * Master values add 4 (NONE) or 4 / size (PARAMETERS) bytes of memory per parameter. Multiply the
 * bytes sent by (size - 1) / size. "gradient's" and "its own" are the bytes of gradient_dtype and
 * of parameter_dtype.
 *
 * Shards are an ONEBIT_ERROR_UNSUPPORTED with profile deepspeed, ONEBIT_SCHEDULE_HIERARCHICAL or
 * ONEBIT_DEVICE_CUDA, and an ONEBIT_ERROR_ARGUMENT with ONEBIT_ADAM_EXCHANGE_STEP. With shards
 * ONEBIT_SCHEDULE_AUTOMATIC is ONEBIT_SCHEDULE_EXCHANGE. onebit_optimizer_get_info and the
 * statistics describe this rank's shard; the residual ratio is relative to the gradients that the
 * rank has sent. */
typedef enum onebit_shards {
  ONEBIT_SHARDS_NONE = 0,
  ONEBIT_SHARDS_STEP = 1,
  ONEBIT_SHARDS_PARAMETERS = 2
} onebit_shards_t;

/* Start from ONEBIT_ADAM_OPTIONS_INIT; in every field zero means the default. All ranks give the
 * same options, except common.threads and common.device. */
typedef struct onebit_adam_options {
  size_t size;    /* sizeof(onebit_adam_options_t) */
  double beta1;   /* in (0, 1); default 0.9 */
  double beta2;   /* in (0, 1); default 0.999 */
  double epsilon; /* positive; default 1e-8 */
  /* Number of warm-up steps, at least 1; default ONEBIT_FREEZE_AUTOMATIC. Every freeze waits while
   * the variance lags behind the gradients: while all variances are zero, or |m^|^2 > 4 |v^|, where
   * |v^| is the sum of the variances. With shards and in profile deepspeed the freeze does not
   * wait. In profile deepspeed freeze_step counts calls as DeepSpeed does, whose first call makes
   * no step: the warm-up has freeze_step - 1 steps, and at least one. */
  size_t freeze_step;
  /* Automatic freeze: with D = 1 / (1 - beta2) rounded up, freeze after the first step t > D whose
   * variance satisfies
   *   threshold <= |v(t - D)| / |v(t)| <= 1 / threshold
   * in the sum of absolute values (bias-corrected unless no_bias_correction is set), or after
   * ONEBIT_FREEZE_LATEST D steps; in (0, 1); default 0.96, as in arXiv 2102.02888. */
  double freeze_threshold;
  int no_bias_correction;          /* nonzero: m^ = m and v^ = v. Profile deepspeed sets it */
  onebit_adam_exchange_t exchange; /* of the compressed stage */
  onebit_shards_t shards;          /* default ONEBIT_SHARDS_NONE */
  onebit_optimizer_options_t common;
} onebit_adam_options_t;

/* clang-format off */
#define ONEBIT_ADAM_OPTIONS_INIT \
  { sizeof(onebit_adam_options_t), 0, 0, 0, 0, 0, 0, ONEBIT_ADAM_EXCHANGE_DEFAULT, \
    ONEBIT_SHARDS_NONE, ONEBIT_OPTIMIZER_OPTIONS_INIT }
/* clang-format on */

/* Makes a 1-bit Adam optimizer for a list of tensors. Collective: all ranks give the same element
 * counts, in the same order, and the same options. It succeeds on all ranks or on none.
 *   comm        the ranks
 *   tensors     ntensors descriptions, which are copied; the arrays that they point to are not
 *               copied
 *   ntensors    0 or more
 *   options     or NULL for the defaults; not kept
 *   optimizer   out: the optimizer; NULL when the call fails
 * Memory, in bytes per parameter: 12 + 8 / size + 1/2 for messages, of which 8 + 8 / size are
 * residuals; plain data-parallel Adam takes 12. With shards: see onebit_shards_t.
 * Errors: those of onebit_plan_create; ONEBIT_ERROR_ARGUMENT also for a NULL or misaligned array,
 * arrays that overlap, a weight decay or factor that is negative or not finite. */
onebit_status_t onebit_adam_create(onebit_comm_t comm, const onebit_tensor_t *tensors,
                                   size_t ntensors, const onebit_adam_options_t *options,
                                   onebit_optimizer_t *optimizer);

#ifdef __cplusplus
}
#endif
#endif
