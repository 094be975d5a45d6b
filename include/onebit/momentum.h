/*
 * 1-bit momentum SGD: stochastic gradient descent with heavy-ball momentum. After a warm-up, in
 * which gradients travel in 8 bits (docs/optimizers.md says why), the ranks exchange the momentum:
 *
 *   warm-up      m = b m + mean over ranks of gradient
 *   compressed   m = compressed allreduce of (b m + gradient of this rank)
 *   both         p = p - lr (m + wd p)
 *
 * One bit cannot represent zero: in the compressed stage an element without gradients moves by its
 * block's scale, in directions that cancel over time. Set `uncompressed` for a tensor in which that
 * matters.
 *
 * Source: Zheng et al., "Communication-Efficient Distributed Blockwise Momentum SGD with
 * Error-Feedback", arXiv 1905.10936; the momentum's convention is PyTorch's (no dampening, no
 * Nesterov).
 */
#ifndef ONEBIT_MOMENTUM_H
#define ONEBIT_MOMENTUM_H

#include "onebit/optimizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Start from ONEBIT_MOMENTUM_OPTIONS_INIT; in every field zero means the default. All ranks give
 * the same options, except common.threads and common.device. */
typedef struct onebit_momentum_options {
  size_t size;     /* sizeof(onebit_momentum_options_t) */
  double momentum; /* b, in (0, 1); default 0.9 */
  /* Number of warm-up steps, whose gradients are sent in common.warmup_bits; default
   * ONEBIT_WARMUP_STEPS in 8 bits. ONEBIT_WARMUP_NONE: the first step is compressed. */
  size_t warmup_steps;
  onebit_optimizer_options_t common;
} onebit_momentum_options_t;

/* clang-format off */
#define ONEBIT_MOMENTUM_OPTIONS_INIT \
  { sizeof(onebit_momentum_options_t), 0, 0, ONEBIT_OPTIMIZER_OPTIONS_INIT }
/* clang-format on */

/* Makes a 1-bit momentum SGD optimizer for a list of tensors. Arguments are as in
 * onebit_adam_create, except the options. It has no profile deepspeed.
 * Memory: 4 bytes per parameter less than 1-bit Adam. The default warm-up takes 4 more for its
 * messages, and until it ends 8 + 8 / size more for its residuals.
 * Errors: those of onebit_adam_create; ONEBIT_ERROR_UNSUPPORTED for profile deepspeed. */
onebit_status_t onebit_momentum_create(onebit_comm_t comm, const onebit_tensor_t *tensors,
                                       size_t ntensors, const onebit_momentum_options_t *options,
                                       onebit_optimizer_t *optimizer);

#ifdef __cplusplus
}
#endif
#endif
