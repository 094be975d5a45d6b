/*
 * Efficient-Adam with one bit: Adam whose second moments are updated in every step, compressed to
 * one bit after 40 steps in 8 bits. Nothing is frozen, and there are no options to tune besides
 * Adam's: take the learning rate of dense Adam.
 *
 * In the warm-up the ranks exchange gradients in common.warmup_bits, divided by the root of second
 * moments that all ranks share; C is that exchange, with the error fed back:
 *
 *   D   = sqrt(V' / (1 - b2^(t-1)) + 0.03 mean of the block's V' / (1 - b2^(t-1)) + eps^2)
 *   x_k = g_k / D, cut off at +-50 sqrt(P)
 *   G   = C(x_k) D
 *   V   = b2 V' + (1 - b2) G^2
 *   m   = b1 m' + (1 - b1) G / sqrt(V / (1 - b2^t) + eps^2)
 *   p   = p - lr (m / (1 - b1^t) + wd p)
 *
 * with g_k the gradient of this rank, P the number of ranks that exchange with each other (hosts,
 * with schedule hierarchical, which averages inside a host first), and V', m' those of the step
 * before. D is 1 in a block whose V' is zero, as in the first step, whose residual is dropped. A
 * step counts as number t from the first whose gradients are not all zero. Divided gradients have
 * one size, whatever those of the layers are, so that 8 bits do for all elements of a block; and V,
 * which all ranks have alike, is what dense Adam divides by, where a rank alone would take it for
 * too little: in the first steps gradients are much alike on all ranks.
 *
 * Then every rank k keeps the second moments of its own gradients, in bfloat16, which begin as P V;
 * what the ranks exchange is the step, one bit an element with the error fed back, and the step
 * that all agreed on last, kept as the bits that travelled, is the momentum. It begins as m.
 *
 *   v_k = b2 v_k' + (1 - b2) g_k^2                    v_k' being that of the step before
 *   V_k = a v_k / (1 - b2^t) + (1 / P - a) v_k' / (1 - b2^(t-1)),  a = max(1 / P^2, 1 / (4 P))
 *   x_k = b1 w + (1 - b1) gain g_k / sqrt(V_k + eps^2)
 *   w   = compressed allreduce of x_k
 *   p   = p - lr (w + wd p)
 *
 * V_k is the rank's estimate of what dense Adam divides by, the second moment of the mean gradient:
 * of independent gradients that is the sum of all ranks' moments over P^2, and for the others' a
 * rank takes what its own was before this step; of more than 4 ranks a quarter counts as new as its
 * own. In a block whose w is zero everywhere V_k is v_k / (1 - b2^t) / P. No step can run away,
 * whatever scales the elements have and however rarely they have gradients: what is divided so is
 * at most 1 / sqrt(a (1 - b2)).
 *
 * In a table (ONEBIT_TABLE) V_k has 1 / P / (1 - b2^t) times the mean of v_k' besides: over the
 * table, but only of 64 to 128 words of 32 elements, others for each block; of the part that this
 * rank compresses, with schedule hierarchical. Rows then have much the same V_k on all ranks, where
 * else the one that drew a rare word divides by a large V_k and the others, which push the word
 * away, by a small one.
 *
 * Where gradients stay the same on all ranks V_k is a P-th of dense Adam's, and steps are up to
 * sqrt(P) times as long; a gain of 1 / sqrt(P) makes them dense Adam's there.
 *
 * A bit is + or -: an element without gradients, too, is moved, by steps of the size of its block's
 * scale whose signs cancel. Set `uncompressed` for a tensor that must not: it takes dense Adam's
 * steps on the mean gradient, with bias corrections of both moments.
 *
 * Source: local second moments, normalised steps in few bits and error feedback on both ways are
 * Chen et al., "Efficient-Adam: Communication-Efficient Distributed Adam", arXiv 2205.14473. Not
 * there: the warm-up; one momentum for all, which is the step that was agreed on, in place of one a
 * rank (4 bytes a parameter less); the estimate V_k; the learning rate outside of what is
 * compressed, so that it may change from step to step; one bit. Momentum of divided gradients is
 * Ziyin et al., "LaProp: Separating Momentum and Adaptivity in Adam", arXiv 2002.04839.
 */
#ifndef ONEBIT_EFFICIENT_ADAM_H
#define ONEBIT_EFFICIENT_ADAM_H

#include "onebit/optimizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Start from ONEBIT_EFFICIENT_ADAM_OPTIONS_INIT; in every field zero means the default. All ranks
 * give the same, except common.threads and common.device. */
typedef struct onebit_efficient_adam_options {
  size_t size;    /* sizeof(onebit_efficient_adam_options_t) */
  double beta1;   /* in (0, 1); default 0.9 */
  double beta2;   /* in (0, 1); default 0.999 */
  double epsilon; /* positive; default 1e-8 */
  double gain;    /* positive; default 1 */
  /* Nonzero: LAMB's trust ratio. The learning rate of each tensor is multiplied by
   * |p| / |2/3 w + wd p|, within min_ratio .. max_ratio, and by 1 where one of the norms is 0. (The
   * bits of w are longer than the step that they stand for: 2/3 is about what of them is the step.)
   * Take the learning rate that dense LAMB takes. It costs a pass more over the parameters. Not
   * recommended: its loss ends more than 1 % above dense LAMB's on texts and images. */
  int trust_ratio;
  double min_ratio, max_ratio; /* positive; default 0.01 and 10 */
  /* Steps of the warm-up, in common.warmup_bits, 8 or 4 (default 8); default
   * ONEBIT_WARMUP_STEPS. ONEBIT_WARMUP_NONE: the first step is compressed, by own moments. */
  size_t warmup_steps;
  onebit_optimizer_options_t common;
} onebit_efficient_adam_options_t;

/* clang-format off */
#define ONEBIT_EFFICIENT_ADAM_OPTIONS_INIT \
  { sizeof(onebit_efficient_adam_options_t), 0, 0, 0, 0, 0, 0, 0, 0, ONEBIT_OPTIMIZER_OPTIONS_INIT }
/* clang-format on */

/* Makes an Efficient-Adam optimizer of a list of tensors. As onebit_adam_create, but for its
 * options; there is no profile deepspeed of it.
 * Memory, in bytes a parameter: 12 (residual, and second moments in bfloat16, each twice, so that a
 * skipped step leaves both as they were) + 8 / size + 1/2 for messages; with a warm-up 4 more for
 * its messages, and until it ends 12 + 8 / size more for variances and residuals. The system has
 * these back then, where they are in memory of the host (the info's memory_bytes counts the
 * residuals still).
 * Errors: those of onebit_adam_create; ONEBIT_ERROR_UNSUPPORTED for profile deepspeed. */
onebit_status_t onebit_efficient_adam_create(onebit_comm_t comm, const onebit_tensor_t *tensors,
                                             size_t ntensors,
                                             const onebit_efficient_adam_options_t *options,
                                             onebit_optimizer_t *optimizer);

#ifdef __cplusplus
}
#endif
#endif
