/*
 * Lion in one bit. Lion's step is the sign of a momentum, so a server loses nothing when it sends
 * one bit per element. The ranks send one bit too, with error feedback: each rank divides its
 * gradient by the square root of its own second moment. There is no warm-up. With g_k the gradient
 * of rank k, and P the number of ranks that exchange with each other:
 *
 *   v_k = b3 v_k + (1 - b3) g_k^2                          on rank k
 *   u_k = g_k / sqrt(v_k / (1 - b3^t) / P + eps^2)
 *   G   = mean over ranks of one bit of (u_k + residual of rank k)
 *   y   = b1 m + (1 - b1) G                                on the server of the element
 *   m   = b2 m + (1 - b2) G
 *   p   = p - lr (sign(y) + wd p)                          everywhere
 *
 * Take the learning rate and the weight decay of dense Lion (docs/optimizers.md). Each element has
 * one server, and only the server stores its momentum. Lion in one bit is not recommended for
 * models most of whose parameters are tables of words: there its final loss is 2 to 4 % above dense
 * Lion's, as a warning says once.
 *
 * One bit cannot represent zero. A block in which all y are zero stays as it is. In any other block
 * an element without gradients moves by lr in every step, in directions that cancel over some
 * steps; if its y is exactly zero, elements with even and odd numbers move in opposite directions.
 * Set `uncompressed` for a tensor in which that matters. The tensor then takes dense Lion's steps
 * on the mean gradient, in which the sign of zero is zero:
 *
 *   p = p - lr (sign(b1 m + (1 - b1) g) + wd p);  m = b2 m + (1 - b2) g
 *
 * Sources: Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675; the
 * exchange of signs: Liu et al., "Communication Efficient Distributed Training with Distributed
 * Lion", arXiv 2404.00438 (docs/optimizers.md has the differences).
 */
#ifndef ONEBIT_LION_H
#define ONEBIT_LION_H

#include "onebit/optimizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Start from ONEBIT_LION_OPTIONS_INIT; in every field zero means the default. All ranks give the
 * same options, except common.threads and common.device. */
typedef struct onebit_lion_options {
  size_t size;    /* sizeof(onebit_lion_options_t) */
  double beta1;   /* b1, the weight of m in y, in (0, 1); default 0.9 */
  double beta2;   /* b2, of the momentum, in (0, 1); default 0.99 */
  double beta3;   /* b3, of the ranks' second moments, in (0, 1); default 0.999 */
  double epsilon; /* positive; default 1e-8 */
  onebit_optimizer_options_t common;
} onebit_lion_options_t;

/* clang-format off */
#define ONEBIT_LION_OPTIONS_INIT \
  { sizeof(onebit_lion_options_t), 0, 0, 0, 0, ONEBIT_OPTIMIZER_OPTIONS_INIT }
/* clang-format on */

/* Makes a Lion optimizer for a list of tensors. Arguments are as in onebit_adam_create, except the
 * options. It has no profile deepspeed. common.no_error_feedback does not affect the momentum.
 * Memory, in bytes per parameter: 12 (residual and second moments, each in two copies, so that a
 * skipped step leaves both unchanged) + 8 / size for the momentum + 1/2 for messages.
 * Errors: those of onebit_adam_create; ONEBIT_ERROR_UNSUPPORTED for profile deepspeed. */
onebit_status_t onebit_lion_create(onebit_comm_t comm, const onebit_tensor_t *tensors,
                                   size_t ntensors, const onebit_lion_options_t *options,
                                   onebit_optimizer_t *optimizer);

#ifdef __cplusplus
}
#endif
#endif
