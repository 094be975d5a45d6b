/*
 * The local work of the optimizers. A pass goes over the arrays of a tensor once; which of them it
 * reads and writes are rows here, and what it computes of an element is one of pass_element.h. What
 * servers do to messages is in numerics.h, codec_compress.h and cuda/reduce.cu.
 */
#ifndef OB_COMPRESSION_PASSES_H
#define OB_COMPRESSION_PASSES_H

#include "compression/numerics.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The values of an element. The first ones are arrays of the optimizer, which lie as residuals
 * do. */
enum ob_slot {
  OB_MOMENTUM,
  /* Once frozen its slot has a reciprocal or a denominator. */
  OB_VARIANCE,
  OB_FRESH,   /* 1-bit LAMB: the fresh variance */
  OB_ANCHOR,  /* 0/1 Adam: the parameters of the last synchronisation */
  OB_MOVED,   /* 0/1 Adam, profile deepspeed: what was added to the parameters since */
  OB_SCRATCH, /* the mean gradient, and what a pass leaves for the next one */
  OB_ARRAYS,
  OB_PARAMETER = OB_ARRAYS, /* the master values, where parameters are not float32 */
  OB_GRADIENT,              /* of this rank, in its own type; read only */
  OB_MESSAGE,               /* what came back from the exchange, +-scale, without scaling */
  OB_LAST,                  /* what came back from the one before, likewise */
  OB_SLOTS
};

#define OB_MASK(slot) (1u << (slot))

/* The kinds of passes; whoever has a function of each makes it from this list. */
/* clang-format off */
#define OB_PASS_KINDS(row) \
  row(SQUARES)         /* sum of the squares of this rank's gradients */ \
  row(POWER)           /* sum of the squares of the momentum */ \
  row(ADAM)            /* a whole step on mean gradients; sum of the variances */ \
  row(FREEZE)          /* momentum becomes a residual, variance a reciprocal */ \
  row(FREEZE_STEP)     /* likewise, where w = m / (sqrt(v) + eps) is exchanged */ \
  row(FROZEN)          /* a step with frozen variance and no message */ \
  row(APPLY)           /* the message is the momentum */ \
  row(APPLY_STEP)      /* the message is the step */ \
  row(SGD)             /* a whole step of SGD with momentum on mean gradients */ \
  row(SGD_FREEZE)      /* momentum becomes a residual */ \
  row(LAMB)            /* the moments, and the update to scratch; v, |p|^2, |u|^2 */ \
  row(LAMB_MOVE)       /* parameters by the update in scratch */ \
  row(LAMB_FREEZE)     /* as FREEZE, and the fresh variance begins */ \
  row(LAMB_FRESH)      /* the fresh variance; |q|^2, |u|^2, largest ratio */ \
  row(LAMB_FROZEN)     /* likewise without a message, and the update to scratch */ \
  row(ZERO_ONE)        /* the message is the gradient */ \
  row(ZERO_ONE_FREEZE) /* variance becomes a denominator, parameters the anchor */ \
  row(ZERO_ONE_LOCAL)  /* a step of this rank alone */ \
  row(ZERO_ONE_STORE)   /* likewise; only what is to be exchanged is stored, in scratch */ \
  row(ZERO_ONE_MET)    /* the message is the mean of that */ \
  row(SHARD)           /* sharded: momentum from the mean gradient, the step to scratch */ \
  row(SHARD_MOVE)      /* sharded: a whole step with frozen variance on mean gradients */ \
  row(VARIANCES)       /* sum of the variances */ \
  row(DIVISORS)        /* what divided gradients are multiplied with, to scratch */ \
  row(DIVIDED)         /* moments of divided gradients, the update to scratch; v, |p|^2, |u|^2 */ \
  row(STEP)            /* the message is the step as it is */ \
  row(STEP_NORMS)      /* likewise, and it is not made yet: |p|^2, |u|^2 */ \
  row(LION)            /* a step of Lion of uncompressed tensors; of others see STEP */
/* clang-format on */

#define OB_PASS_KIND(name) OB_PASS_##name,
enum ob_pass_kind { OB_PASS_KINDS(OB_PASS_KIND) OB_PASSES };
#undef OB_PASS_KIND

/* Sums that a pass may have, a block at a time: lanes as numerics.h defines, but the last one is
 * the largest value. Of the steps of a warm-up the first one is that of the variances, which the
 * freeze is found from.
 *
 * The largest values are those of reciprocals. An element contributes its divisor; the lanes
 * keep the least divisor, from infinity on, and 1 is divided by it once: since a rounded
 * quotient never rises with its divisor, that is the largest of all quotients to the bit. */
enum { OB_SUMS = 4, OB_LARGEST = 3 };

/* The value that the lanes of a sum begin with. */
OB_INLINE float ob_sum_start(int which) {
  return ob_float_of(which == OB_LARGEST ? 0x7f800000u : 0);
}

/* Returns the total of `count` block sums, of one tensor or of all; no sum is negative. */
OB_INLINE double ob_total_of(int which, const double *sums, size_t count) {
  double largest = 0;
  if (which != OB_LARGEST)
    return ob_add_sums(sums, count);
  for (size_t b = 0; b < count; b++)
    largest = sums[b] > largest ? sums[b] : largest;
  return largest;
}

/* The norm of a step relative to that of the bits that carried it. These have the root mean square
 * of the step with the residuals of servers and workers, which are as long as the step. Of 1/2,
 * 5/8, 2/3, 3/4 and 1 this brought Efficient-Adam with trust ratios nearest to dense LAMB, on
 * tinyshakespeare with 2, 4 and 8 ranks. */
#define OB_STEP_SIGNAL (2.0f / 3)

/* Factors that all elements of a piece share. */
struct ob_pass_factors {
  struct ob_adam_factors adam;
  struct ob_lion_factors lion;
  /* The factor of this rank's gradients: loss scale, clipping, accumulation. What is exchanged has
   * it. */
  float gradient_factor;
  float learning_rate, weight_decay;
  float scaling;      /* 1-bit LAMB: what the tensor's momentum travels with */
  float rate_sum;     /* 0/1 Adam: rates times momentum factors, summed since the anchor */
  float anchor_decay; /* likewise: weight decay times the sum of rates; 0 where moves include it */
  float bound;        /* the largest step on bits with a frozen variance; infinity: no bound */
  /* For passes that divide gradients: the bias correction of the variance before this step, and
   * OB_DIVISOR_FLOOR of the block's mean variance, so corrected. */
  float before, floor;
  int keep_zero; /* an element without variance does not move */
  int adds_up;   /* 0/1 Adam: OB_MOVED is kept */
};

/* One element: its slots by number, and what it adds to each sum. */
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

/* The sums that a pass makes, one bit each. */
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

/* The scale of a message's signs or levels as the pass wants it: once a block, since a sign makes
 * no difference to how a product or a quotient is rounded. */
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
