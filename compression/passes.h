/*
 * Passes are the part of an optimizer's step that needs no communication. A pass reads and writes
 * the arrays of a tensor once. This file lists the passes, and the arrays that each reads and
 * writes; the arithmetic of passes is in pass_element.h. The work of servers on messages is in
 * numerics.h, codec_compress.h and cuda/reduce.cu.
 */
#ifndef OB_COMPRESSION_PASSES_H
#define OB_COMPRESSION_PASSES_H

#include "compression/numerics.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The values of an element. Slots before OB_ARRAYS are arrays of the optimizer, whose elements are
 * in the order of the residuals. */
enum ob_slot {
  OB_MOMENTUM,
  /* After the freeze this slot contains a reciprocal or a denominator. */
  OB_VARIANCE,
  OB_FRESH,   /* 1-bit LAMB: the fresh variance */
  OB_ANCHOR,  /* 0/1 Adam: the parameters at the last synchronisation step */
  OB_MOVED,   /* 0/1 Adam, profile deepspeed: the parameters' changes since then */
  OB_SCRATCH, /* the mean gradient, or a result of one pass for the next */
  OB_ARRAYS,
  OB_PARAMETER = OB_ARRAYS, /* the master values, if parameters are not float32 */
  OB_GRADIENT,              /* this rank's gradient, in its own type; read only */
  OB_MESSAGE,               /* the decoded result of the exchange, not scaled */
  OB_LAST,                  /* the decoded result of the previous exchange */
  OB_SLOTS
};

#define OB_MASK(slot) (1u << (slot))

/* The kinds of passes. Code that has a function for each kind is generated from this list. */
/* clang-format off */
#define OB_PASS_KINDS(row) \
  row(SQUARES)         /* sum of the squares of this rank's gradients */ \
  row(POWER)           /* sum of the squares of the momentum */ \
  row(ADAM)            /* a whole step on mean gradients; sum of the variances */ \
  row(FREEZE)          /* momentum becomes a residual, variance a reciprocal */ \
  row(FREEZE_STEP)     /* the same, if w = m / (sqrt(v) + eps) is exchanged */ \
  row(FROZEN)          /* a step with frozen variance and no message */ \
  row(APPLY)           /* the message is the momentum */ \
  row(APPLY_STEP)      /* the message is the step */ \
  row(SGD)             /* a whole step of SGD with momentum on mean gradients */ \
  row(SGD_FREEZE)      /* momentum becomes a residual */ \
  row(LAMB)            /* moments, and the update to scratch; sums: v, |p|^2, |u|^2 */ \
  row(LAMB_MOVE)       /* moves the parameters by the update in scratch */ \
  row(LAMB_FREEZE)     /* the same as FREEZE, and the fresh variance begins */ \
  row(LAMB_FRESH)      /* the fresh variance; sums: |q|^2, |u|^2, largest ratio */ \
  row(LAMB_FROZEN)     /* as LAMB_FRESH, no message, and the update to scratch */ \
  row(ZERO_ONE)        /* the message is the gradient */ \
  row(ZERO_ONE_FREEZE) /* variance becomes a denominator, parameters the anchor */ \
  row(ZERO_ONE_LOCAL)  /* a local step */ \
  row(ZERO_ONE_STORE)  /* as ZERO_ONE_LOCAL; stores only the value to exchange */ \
  row(ZERO_ONE_MET)    /* the message is the mean of the stored values */ \
  row(SHARD)           /* sharded: momentum from the mean gradient, the step to scratch */ \
  row(SHARD_MOVE)      /* sharded: a whole step with frozen variance on mean gradients */ \
  row(VARIANCES)       /* sum of the variances */ \
  row(DIVISORS)        /* the factors of divided gradients, to scratch */ \
  row(DIVIDED)         /* moments of divided gradients; otherwise as LAMB */ \
  row(STEP)            /* the message is the step as it is */ \
  row(STEP_NORMS)      /* the norms of a STEP before it is applied: |p|^2, |u|^2 */ \
  row(LION)            /* a step of Lion on uncompressed tensors; others use STEP */
/* clang-format on */

#define OB_PASS_KIND(name) OB_PASS_##name,
enum ob_pass_kind { OB_PASS_KINDS(OB_PASS_KIND) OB_PASSES };
#undef OB_PASS_KIND

/* A pass may compute up to OB_SUMS sums of each block, in lanes as numerics.h defines. Number
 * OB_LARGEST is the largest value instead of a sum. In the steps of a warm-up sum 0 is the sum of
 * the variances, from which the optimizer decides when to freeze the variance.
 *
 * The largest value is the largest of the reciprocals 1 / divisor. The lanes begin with infinity
 * and record the smallest divisor; at the end 1 is divided by it once. If the divisor increases,
 * the rounded quotient never increases, so the result is exactly the largest of all quotients. */
enum { OB_SUMS = 4, OB_LARGEST = 3 };

/* Returns the initial value of the lanes of sum number `which`. */
OB_INLINE float ob_sum_initial_value(int which) {
  return ob_float_of(which == OB_LARGEST ? 0x7f800000u : 0);
}

/* Returns the total of the sums of `count` blocks, of one tensor or of all tensors; no sum is
 * negative. */
OB_INLINE double ob_sums_total(int which, const double *sums, size_t count) {
  double largest = 0;
  if (which != OB_LARGEST)
    return ob_add_sums(sums, count);
  for (size_t b = 0; b < count; b++)
    largest = sums[b] > largest ? sums[b] : largest;
  return largest;
}

/* An estimate of the norm of a step divided by the norm of the message that contains it. The
 * message's scale is the root mean square of the step plus the residuals of servers and workers,
 * which are as large as the step. The values 1/2, 5/8, 2/3, 3/4 and 1 were compared: with 2/3 the
 * loss of Efficient-Adam with trust ratios came nearest to dense LAMB's, on tinyshakespeare with 2,
 * 4 and 8 ranks. */
#define OB_STEP_SIGNAL (2.0f / 3)

/* Factors that all elements of a piece share. */
struct ob_pass_factors {
  struct ob_adam_factors adam;
  struct ob_lion_factors lion;
  /* The factor of this rank's gradients, for loss scale, clipping and accumulation. Exchanged
   * gradients are already multiplied by it. */
  float gradient_factor;
  float learning_rate, weight_decay;
  float scaling;      /* 1-bit LAMB: the factor of the tensor's momentum in messages */
  float rate_sum;     /* 0/1 Adam: rates times momentum factors, summed since the anchor */
  float anchor_decay; /* 0/1 Adam: weight decay times the sum of rates; 0 if moves include it */
  float bound;        /* largest step with compressed messages and frozen variance; or infinity */
  /* For passes that divide gradients. before: the bias correction of the variance before this step.
   * floor: OB_DIVISOR_FLOOR times the block's mean variance, corrected by `before`. */
  float before, floor;
  int keep_zero; /* an element whose variance is 0 does not change */
  int adds_up;   /* 0/1 Adam: OB_MOVED is used */
};

/* One element: its slots by number, and what it contributes to each sum. */
struct ob_element {
  float at[OB_SLOTS];
  float sum[OB_SUMS];
};

OB_INLINE unsigned ob_pass_reads(enum ob_pass_kind kind) {
  const unsigned m = OB_MASK(OB_MOMENTUM), v = OB_MASK(OB_VARIANCE), w = OB_MASK(OB_FRESH),
                 a = OB_MASK(OB_ANCHOR), d = OB_MASK(OB_MOVED), s = OB_MASK(OB_SCRATCH),
                 p = OB_MASK(OB_PARAMETER), g = OB_MASK(OB_GRADIENT), c = OB_MASK(OB_MESSAGE),
                 l = OB_MASK(OB_LAST);
  switch (kind) {
  case OB_PASS_SQUARES:
    return g;
  case OB_PASS_POWER:
    return m;
  case OB_PASS_VARIANCES:
  case OB_PASS_DIVISORS:
    return v;
  case OB_PASS_ADAM:
  case OB_PASS_FROZEN:
  case OB_PASS_LAMB:
  case OB_PASS_DIVIDED:
  case OB_PASS_SHARD_MOVE:
    return s | m | v | p;
  case OB_PASS_FREEZE:
  case OB_PASS_FREEZE_STEP:
  case OB_PASS_LAMB_FREEZE:
    return m | v;
  case OB_PASS_APPLY:
    return c | v | p;
  case OB_PASS_APPLY_STEP:
    return c | p;
  case OB_PASS_SGD:
  case OB_PASS_LION:
    return s | m | p;
  case OB_PASS_SGD_FREEZE:
    return m;
  case OB_PASS_LAMB_MOVE:
    return s | p;
  case OB_PASS_LAMB_FRESH:
    return c | l | v | w | p;
  case OB_PASS_LAMB_FROZEN:
    return s | m | v | w | p;
  case OB_PASS_ZERO_ONE:
    return c | m | v | p;
  case OB_PASS_ZERO_ONE_FREEZE:
    return v | p;
  case OB_PASS_ZERO_ONE_LOCAL:
    return g | m | v | p | d;
  case OB_PASS_ZERO_ONE_STORE:
    return g | m | v | p | d | a;
  case OB_PASS_ZERO_ONE_MET:
    return c | v | a;
  case OB_PASS_SHARD:
    return s | m | v;
  case OB_PASS_STEP:
  case OB_PASS_STEP_NORMS:
    return c | p;
  default:
    return 0;
  }
}

OB_INLINE unsigned ob_pass_writes(enum ob_pass_kind kind) {
  const unsigned m = OB_MASK(OB_MOMENTUM), v = OB_MASK(OB_VARIANCE), w = OB_MASK(OB_FRESH),
                 a = OB_MASK(OB_ANCHOR), d = OB_MASK(OB_MOVED), s = OB_MASK(OB_SCRATCH),
                 p = OB_MASK(OB_PARAMETER);
  switch (kind) {
  case OB_PASS_ADAM:
    return m | v | p;
  case OB_PASS_FROZEN:
  case OB_PASS_SGD:
  case OB_PASS_LION:
  case OB_PASS_ZERO_ONE:
  case OB_PASS_SHARD_MOVE:
    return m | p;
  case OB_PASS_FREEZE:
  case OB_PASS_FREEZE_STEP:
    return m | v;
  case OB_PASS_APPLY:
  case OB_PASS_APPLY_STEP:
  case OB_PASS_LAMB_MOVE:
  case OB_PASS_STEP:
    return p;
  case OB_PASS_SGD_FREEZE:
    return m;
  case OB_PASS_LAMB:
  case OB_PASS_DIVIDED:
    return m | v | s;
  case OB_PASS_LAMB_FREEZE:
    return m | v | w;
  case OB_PASS_LAMB_FRESH:
    return w;
  case OB_PASS_LAMB_FROZEN:
    return m | w | s;
  case OB_PASS_ZERO_ONE_FREEZE:
    return v | a | d;
  case OB_PASS_ZERO_ONE_LOCAL:
    return m | p | d;
  case OB_PASS_ZERO_ONE_STORE:
  case OB_PASS_DIVISORS:
    return s;
  case OB_PASS_ZERO_ONE_MET:
    return m | p | a | d;
  case OB_PASS_SHARD:
    return m | s;
  default:
    return 0;
  }
}

/* Returns the sums that a pass computes, as a mask: one bit for each sum. */
OB_INLINE unsigned ob_pass_sums(enum ob_pass_kind kind) {
  switch (kind) {
  case OB_PASS_SQUARES:
  case OB_PASS_POWER:
  case OB_PASS_VARIANCES:
  case OB_PASS_ADAM:
    return 1;
  case OB_PASS_LAMB:
  case OB_PASS_DIVIDED:
    return 1 | 2 | 4;
  case OB_PASS_STEP_NORMS:
    return 2 | 4;
  case OB_PASS_LAMB_FRESH:
  case OB_PASS_LAMB_FROZEN:
    return 2 | 4 | OB_MASK(OB_LARGEST);
  default:
    return 0;
  }
}

/* Converts the scale of a message's signs or levels for the pass. Converting it once for each block
 * is enough, since a sign does not change how a product or a quotient is rounded. */
OB_INLINE float ob_pass_scale(enum ob_pass_kind kind, float scale,
                              const struct ob_pass_factors *f) {
  if (kind == OB_PASS_LAMB_FRESH)
    return scale / f->scaling;
  if (kind == OB_PASS_APPLY || kind == OB_PASS_APPLY_STEP)
    return scale / f->scaling * f->adam.momentum_factor;
  return scale;
}

#ifdef __cplusplus
}
#endif
#endif
