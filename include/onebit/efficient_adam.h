/*
 * Efficient-Adam with one bit: Adam whose second moments are updated in every step, never frozen.
 * It has no options to tune besides Adam's: take the learning rate of dense Adam. Each rank divides
 * its gradients by the root of second moments before the exchange; docs/optimizers.md says why, and
 * has measurements.
 *
 * In the warm-up (40 steps, common.warmup_bits) the ranks exchange divided gradients, and all ranks
 * have the same second moments. C is the compressed mean over the ranks with error feedback:
 *
 *   D   = sqrt(V' / (1 - b2^(t-1)) + 0.03 mean of the block's V' / (1 - b2^(t-1)) + eps^2)
 *   x_k = g_k / D, cut off at +-50 sqrt(P)
 *   G   = C(x_k) D
 *   V   = b2 V' + (1 - b2) G^2
 *   m   = b1 m' + (1 - b1) G / sqrt(V / (1 - b2^t) + eps^2)
 *   p   = p - lr (m / (1 - b1^t) + wd p)
 *
 * g_k is the gradient of this rank, P the number of ranks that exchange with each other (with
 * schedule hierarchical, which averages inside a host first, the number of hosts), and V', m' are V
 * and m of the step before. t counts steps from the first whose gradients are not all zero. D is 1
 * in a block whose V' is zero, as it is in the first step; the residual of the first step is
 * dropped.
 *
 * After the warm-up rank k stores the second moments v_k of its own gradients, in bfloat16; v_k
 * begins as P V. The ranks exchange the step w, which begins as m. The result of the exchange is
 * also the momentum:
 *
 *   v_k = b2 v_k' + (1 - b2) g_k^2                    v_k' being that of the step before
 *   V_k = a v_k / (1 - b2^t) + (1 / P - a) v_k' / (1 - b2^(t-1)),  a = max(1 / P^2, 1 / (4 P))
 *   x_k = b1 w + (1 - b1) gain g_k / sqrt(V_k + eps^2)
 *   w   = C(x_k)
 *   p   = p - lr (w + wd p)
 *
 * In a block whose w is zero everywhere V_k is v_k / (1 - b2^t) / P. In a table (ONEBIT_TABLE) the
 * mean of v_k' over the table, times 1 / P / (1 - b2^t), is added to V_k. Each block estimates that
 * mean from 64 to 128 groups of 32 elements, which differ between blocks; with schedule
 * hierarchical these groups are in the part that this rank compresses. |x_k| is at most
 * 1 / sqrt(a (1 - b2)).
 *
 * One bit cannot represent zero: an element without gradients moves by its block's scale, in
 * directions that cancel over time. Set `uncompressed` for a tensor in which that matters. The
 * tensor then takes dense Adam's steps on the mean gradient, with bias corrections of both moments.
 *
 * Sources: Chen et al., "Efficient-Adam: Communication-Efficient Distributed Adam", arXiv
 * 2205.14473 (docs/optimizers.md has the differences); momentum of divided gradients: Ziyin et al.,
 * "LaProp: Separating Momentum and Adaptivity in Adam", arXiv 2002.04839.
 */
#ifndef ONEBIT_EFFICIENT_ADAM_H
#define ONEBIT_EFFICIENT_ADAM_H

#include "onebit/optimizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Start from ONEBIT_EFFICIENT_ADAM_OPTIONS_INIT; in every field zero means the default. All ranks
 * give the same options, except common.threads and common.device. */
typedef struct onebit_efficient_adam_options {
  size_t size;    /* sizeof(onebit_efficient_adam_options_t) */
  double beta1;   /* in (0, 1); default 0.9 */
  double beta2;   /* in (0, 1); default 0.999 */
  double epsilon; /* positive; default 1e-8 */
  double gain;    /* positive; default 1 */
  /* Nonzero: LAMB's trust ratio. The learning rate of each tensor is multiplied by
   * |p| / |2/3 w + wd p|, within min_ratio .. max_ratio, and by 1 where one of the norms is 0. Take
   * the learning rate of dense LAMB. The ratio costs one more pass over the parameters. It is not
   * recommended: the final loss is more than 1 % above dense LAMB's on texts and images. */
  int trust_ratio;
  double min_ratio, max_ratio; /* positive; default 0.01 and 10 */
  /* Number of warm-up steps, whose gradients are sent in common.warmup_bits, 8 or 4 (default 8).
   * Default ONEBIT_WARMUP_STEPS; with ONEBIT_WARMUP_NONE there is no warm-up. */
  size_t warmup_steps;
  onebit_optimizer_options_t common;
} onebit_efficient_adam_options_t;

/* clang-format off */
#define ONEBIT_EFFICIENT_ADAM_OPTIONS_INIT \
  { sizeof(onebit_efficient_adam_options_t), 0, 0, 0, 0, 0, 0, 0, 0, ONEBIT_OPTIMIZER_OPTIONS_INIT }
/* clang-format on */

/* Makes an Efficient-Adam optimizer for a list of tensors. Arguments are as in onebit_adam_create,
 * except the options. It has no profile deepspeed.
 * Memory, in bytes per parameter: 12 (residual, and second moments in bfloat16, each in two copies,
 * so that a skipped step leaves both unchanged) + 8 / size + 1/2 for messages; with a warm-up 4
 * more for its messages, and until the warm-up ends 12 + 8 / size more for variances and residuals.
 * When the warm-up ends, that host memory goes back to the system
 * (onebit_optimizer_info_t.memory_bytes still counts the residuals).
 * Errors: those of onebit_adam_create; ONEBIT_ERROR_UNSUPPORTED for profile deepspeed. */
onebit_status_t onebit_efficient_adam_create(onebit_comm_t comm, const onebit_tensor_t *tensors,
                                             size_t ntensors,
                                             const onebit_efficient_adam_options_t *options,
                                             onebit_optimizer_t *optimizer);

#ifdef __cplusplus
}
#endif
#endif
