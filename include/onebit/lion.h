/*
 * Lion in one bit. Lion's step is the sign of a momentum, so nothing is lost where a server sends
 * it in one bit; what the ranks send is one bit too, of gradients that each has divided by the root
 * of its own second moment, with the error fed back. There is no warm-up. With g_k the gradient of
 * rank k, and P the number of ranks that exchange with each other:
 *
 *   v_k = b3 v_k + (1 - b3) g_k^2                          on rank k
 *   u_k = g_k / sqrt(v_k / (1 - b3^t) / P + eps^2)
 *   G   = mean over ranks of one bit of (u_k + what was left of it before)
 *   y   = b1 m + (1 - b1) G                                on the server of the element
 *   m   = b2 m + (1 - b2) G
 *   p   = p - lr (sign(y) + wd p)                          everywhere
 *
 * Take the learning rate and the weight decay that dense Lion takes: most often a third to a tenth
 * of Adam's rate, and as many times its weight decay. Each element has one server, which is the
 * only one to keep its momentum. Not recommended where most parameters are tables of words: its
 * loss ends 2 to 4 % above dense Lion's there (docs/measured/trainings.md), as a warning says once.
 *
 * A bit is + or -, and dense Lion leaves an element alone whose momentum and gradient are zero. A
 * block (block_size elements) in which all y are zero, such as one of a layer without gradients, is
 * left alone here too. But an element without gradients in a block where others have some moves by
 * lr in every step: its signs follow the error that is fed back, which goes up and down, so that
 * they cancel over some steps, and where its y is exactly zero elements of even number move one way
 * and the others the other way. Set `uncompressed` for a tensor that must not: it takes dense
 * Lion's steps on the mean gradient, in which the sign of zero is zero:
 *
 *   p = p - lr (sign(b1 m + (1 - b1) g) + wd p);  m = b2 m + (1 - b2) g
 *
 * Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675. Signs
 * that are exchanged: Liu et al., "Communication Efficient Distributed Training with Distributed
 * Lion", arXiv 2404.00438, where every rank has a momentum of its own and sends its sign, without
 * feedback of errors. Not there: normalised gradients in place of signs of momenta, error feedback,
 * and one momentum for all, on servers.
 */
#ifndef ONEBIT_LION_H
#define ONEBIT_LION_H

#include "onebit/optimizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Start from ONEBIT_LION_OPTIONS_INIT; in every field zero means the default. All ranks give the
 * same, except common.threads and common.device. */
typedef struct onebit_lion_options {
  size_t size;    /* sizeof(onebit_lion_options_t) */
  double beta1;   /* of the momentum in a step, in (0, 1); default 0.9 */
  double beta2;   /* of the momentum, in (0, 1); default 0.99 */
  double beta3;   /* of the ranks' second moments, in (0, 1); default 0.999 */
  double epsilon; /* positive; default 1e-8 */
  onebit_optimizer_options_t common;
} onebit_lion_options_t;

/* clang-format off */
#define ONEBIT_LION_OPTIONS_INIT \
  { sizeof(onebit_lion_options_t), 0, 0, 0, 0, ONEBIT_OPTIMIZER_OPTIONS_INIT }
/* clang-format on */

/* Makes a Lion optimizer of a list of tensors. As onebit_adam_create, but for its options; there is
 * no profile deepspeed of it. With common.no_error_feedback the momentum is still kept.
 * Memory, in bytes a parameter: 12 (residual and second moments, each twice, so that a skipped step
 * leaves both as they were) + 8 / size for the momentum + 1/2 for messages.
 * Errors: those of onebit_adam_create; ONEBIT_ERROR_UNSUPPORTED for profile deepspeed. */
onebit_status_t onebit_lion_create(onebit_comm_t comm, const onebit_tensor_t *tensors,
                                   size_t ntensors, const onebit_lion_options_t *options,
                                   onebit_optimizer_t *optimizer);

#ifdef __cplusplus
}
#endif
#endif
