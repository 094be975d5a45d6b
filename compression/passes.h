/*
 * The local work of the optimizers, element by element. A pass goes over the arrays of a tensor
 * once; what it computes of an element is one row of ob_pass_element, and which of the arrays it
 * reads and writes are two more. The codecs (codec_template.h) and device code (cuda/passes.cu) are
 * loops around these, so that what an optimizer does to an element is written here once. What
 * servers do to messages is in numerics.h, codec_reduce.h and cuda/reduce.cu.
 *
 * Everything is IEEE float32 with one rounding an operation, in the order in which it stands.
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
  OB_ANCHOR,  /* 0/1 Adam: the parameters that the ranks met at last */
  OB_MOVED,   /* 0/1 Adam, profile deepspeed: what was added to them since */
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
 * The values of which there is the largest are reciprocals. What an element has for it is what is
 * to be divided by, the lanes keep the least of these, from infinity on, and 1 is divided once, by
 * the least: a quotient that is rounded falls, or stays, where its divisor rises, so it is the same
 * to the bit as the largest of all quotients. */
enum { OB_SUMS = 4, OB_LARGEST = 3 };

/* The value that the lanes of a sum begin with. */
OB_INLINE float ob_sum_start(int which) {
  return ob_float_of(which == OB_LARGEST ? 0x7f800000u : 0);
}

/* The total of the sums of `count` blocks, of tensors or of all: none is negative. */
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
  float rate_sum;     /* 0/1 Adam: sum of rates times momentum factors since the last meeting */
  float anchor_decay; /* likewise: weight decay times the sum of rates; 0 where moves include it */
  float bound;        /* of steps on bits with a frozen variance; infinity: there is none */
  /* For passes that divide gradients: the bias correction of the variance before this step, and
   * OB_DIVISOR_FLOOR of the block's mean variance, so corrected. */
  float before, floor;
  int keep_zero; /* an element without variance does not move */
  int adds_up;   /* 0/1 Adam: OB_MOVED is kept */
};

/* An element: slots by number, and what it adds to each sum. */
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

/* --- Divided gradients: the warm-up of Efficient-Adam */

/* The block's mean variance counts for so much in a divisor, so that elements whose gradients have
 * been zero so far are divided by something. */
#define OB_DIVISOR_FLOOR 0.03f

/* A pass that divides gradients wants the mean variance of each block. */
OB_INLINE int ob_pass_divides(enum ob_pass_kind kind) {
  return kind == OB_PASS_DIVISORS || kind == OB_PASS_DIVIDED;
}

/* The floor of a block's divisors follows from the sum of its variances. */
OB_INLINE float ob_divisor_floor(double variances, size_t count, const struct ob_pass_factors *f) {
  return OB_DIVISOR_FLOOR * f->before * (float)(variances / (double)count);
}

/* A gradient is divided by the root of its second moment before it is exchanged. In a block that
 * has had no gradients it is divided by 1, and cut off where it is large. */
OB_INLINE float ob_divisor(float variance, const struct ob_pass_factors *f) {
  const float moment = variance * f->before + f->floor;
  return moment > 0 ? sqrtf(moment + f->adam.epsilon * f->adam.epsilon) : 1;
}

/* The momentum takes the gradient divided by the variance that has this gradient in it. */
OB_INLINE float ob_divided(float gradient, float variance, const struct ob_pass_factors *f) {
  const float factor = f->adam.variance_factor;
  const float moment = variance * factor * factor + f->adam.epsilon * f->adam.epsilon;
  return moment > 0 ? gradient / sqrtf(moment) : 0;
}

/* --- 0/1 Adam: a step of one rank alone, as what it adds to the parameter; moves the momentum */

OB_INLINE float ob_zero_one_move(struct ob_element *e, const struct ob_pass_factors *f) {
  const float gradient = f->gradient_factor * e->at[OB_GRADIENT];
  e->at[OB_MOMENTUM] = ob_adam_momentum(e->at[OB_MOMENTUM], gradient, &f->adam);
  const float step =
      ob_bounded(e->at[OB_MOMENTUM] * f->adam.momentum_factor / e->at[OB_VARIANCE], f->bound);
  return -f->learning_rate * (step + f->weight_decay * e->at[OB_PARAMETER]);
}

/* Without variance the denominator is infinity: such an element does not move. */
OB_INLINE float ob_zero_one_denominator(float variance, const struct ob_pass_factors *f) {
  const float denominator = ob_adam_denominator(variance, &f->adam);
  return f->keep_zero && variance == 0 ? ob_float_of(0x7f800000u) : denominator;
}

/* The value to exchange for a movement; 0 for an element that does not move, or NaN if its movement
 * is not finite. NaN, too, where the gradient's square is not finite, whose step is bounded all the
 * same. */
OB_INLINE float ob_zero_one_sent(float moved, float denominator, float gradient) {
  const float square = gradient * gradient;
  const float sent = ob_is_finite(denominator) ? moved * denominator : moved - moved;
  return ob_choose(ob_is_finite(square), sent, square - square);
}

/* --- 1-bit LAMB: from the momentum, and what it says that the gradient was, to the fresh variance
 * and the sums; returns the update */

OB_INLINE float ob_lamb_freshen(struct ob_element *e, float now, float gradient,
                                const struct ob_pass_factors *f) {
  const struct ob_adam_factors *adam = &f->adam;
  const float v = e->at[OB_VARIANCE];
  float *const w = &e->at[OB_FRESH];
  *w = ob_adam_variance(*w, gradient, adam);
  const float q = ob_bounded(now * adam->momentum_factor * v, f->bound),
              u = q + f->weight_decay * e->at[OB_PARAMETER];
  e->sum[1] = q * q;
  e->sum[2] = u * u;
  const float divisor = v * ob_adam_denominator(*w, adam);
  e->sum[OB_LARGEST] = ob_choose(v > 0, divisor, ob_sum_start(OB_LARGEST));
  return u;
}

/* --- A pass */

/* True if a pass divides something that its messages alone determine (`last` is the one before,
 * times beta1): with signs the quotient is one of few values a block, and a loop over elements need
 * not divide. */
OB_INLINE int ob_pass_has_quotient(enum ob_pass_kind kind) {
  return kind == OB_PASS_LAMB_FRESH || kind == OB_PASS_ZERO_ONE_MET;
}

OB_INLINE float ob_pass_quotient(enum ob_pass_kind kind, float message, float last,
                                 const struct ob_pass_factors *f) {
  if (kind == OB_PASS_LAMB_FRESH)
    return (message - last) / f->adam.one_minus_beta1;
  return kind == OB_PASS_ZERO_ONE_MET && f->rate_sum > 0 ? -(message / f->rate_sum) : 0;
}

/* One element of a pass, with that; what it does not read is zero. */
OB_INLINE struct ob_element ob_pass_divided(enum ob_pass_kind kind, struct ob_element e,
                                            float quotient, const struct ob_pass_factors *f) {
  const struct ob_adam_factors *adam = &f->adam;
  float *const m = &e.at[OB_MOMENTUM], *const v = &e.at[OB_VARIANCE], *const w = &e.at[OB_FRESH],
               *const a = &e.at[OB_ANCHOR], *const d = &e.at[OB_MOVED],
               *const s = &e.at[OB_SCRATCH], *const p = &e.at[OB_PARAMETER];
  const float g = *s, own = f->gradient_factor * e.at[OB_GRADIENT];
  const float rate = f->learning_rate, decay = f->weight_decay;
  switch (kind) {
  case OB_PASS_SQUARES:
    e.sum[0] = own * own;
    break;
  case OB_PASS_POWER:
    e.sum[0] = *m * *m;
    break;
  case OB_PASS_ADAM:
    *m = ob_adam_momentum(*m, g, adam);
    *v = ob_adam_variance(*v, g, adam);
    e.sum[0] = *v;
    *p = ob_adam_parameter(
        *p, ob_bounded(*m * adam->momentum_factor / ob_adam_denominator(*v, adam), f->bound), rate,
        decay);
    break;
  case OB_PASS_FREEZE:
    *m = adam->beta1 * *m;
    *v = ob_adam_reciprocal(*v, f->keep_zero, adam);
    break;
  case OB_PASS_FREEZE_STEP:
    *v = ob_adam_reciprocal(*v, f->keep_zero, adam);
    *m = adam->beta1 * (*m * *v);
    break;
  case OB_PASS_FROZEN:
    *m = ob_adam_frozen_momentum(*m, g, adam);
    *p = ob_adam_parameter(*p, *m * *v, rate, decay);
    *m = adam->beta1 * *m;
    break;
  case OB_PASS_APPLY:
    *p = ob_adam_parameter(*p, ob_bounded(e.at[OB_MESSAGE] * *v, f->bound), rate, decay);
    break;
  case OB_PASS_APPLY_STEP:
    *p = ob_adam_parameter(*p, ob_bounded(e.at[OB_MESSAGE], f->bound), rate, decay);
    break;
  case OB_PASS_VARIANCES:
    e.sum[0] = *v;
    break;
  case OB_PASS_DIVISORS:
    *s = 1 / ob_divisor(*v, f);
    break;
  case OB_PASS_DIVIDED: {
    const float gradient = g * ob_divisor(*v, f);
    *v = ob_adam_variance(*v, gradient, adam);
    *m = ob_adam_momentum(*m, ob_divided(gradient, *v, f), adam);
    *s = *m * adam->momentum_factor + decay * *p;
    e.sum[0] = *v;
    e.sum[1] = *p * *p;
    e.sum[2] = *s * *s;
    break;
  }
  case OB_PASS_STEP:
    *p = ob_adam_parameter(*p, e.at[OB_MESSAGE], rate, decay);
    break;
  case OB_PASS_STEP_NORMS: {
    const float u = OB_STEP_SIGNAL * e.at[OB_MESSAGE] + decay * *p;
    e.sum[1] = *p * *p;
    e.sum[2] = u * u;
    break;
  }
  case OB_PASS_SGD:
    *m = adam->beta1 * *m + g;
    *p = ob_adam_parameter(*p, *m, rate, decay);
    break;
  case OB_PASS_SGD_FREEZE:
    *m = adam->beta1 * *m;
    break;
  case OB_PASS_LION: {
    const float direction = ob_lion_direction(*m, g, &f->lion);
    *p = ob_adam_parameter(*p, (float)(direction > 0) - (float)(direction < 0), rate, decay);
    *m = ob_lion_momentum(*m, g, &f->lion);
    break;
  }
  case OB_PASS_LAMB:
    *m = ob_adam_momentum(*m, g, adam);
    *v = ob_adam_variance(*v, g, adam);
    *s = *m * adam->momentum_factor / ob_adam_denominator(*v, adam) + decay * *p;
    e.sum[0] = *v;
    e.sum[1] = *p * *p;
    e.sum[2] = *s * *s;
    break;
  case OB_PASS_LAMB_MOVE:
    *p = *p - rate * *s;
    break;
  case OB_PASS_LAMB_FREEZE:
    *w = *v;
    *m = adam->beta1 * *m;
    *v = ob_adam_reciprocal(*v, f->keep_zero, adam);
    break;
  case OB_PASS_LAMB_FRESH:
    ob_lamb_freshen(&e, e.at[OB_MESSAGE], quotient, f);
    break;
  case OB_PASS_LAMB_FROZEN: {
    const float before = *m;
    *m = ob_adam_frozen_momentum(*m, g, adam);
    *s = ob_lamb_freshen(&e, *m, (*m - before) / adam->one_minus_beta1, f);
    *m = adam->beta1 * *m;
    break;
  }
  case OB_PASS_ZERO_ONE: {
    /* One bit has no zero. What came to an element that never had a gradient must not wait in its
     * momentum for the variance to begin. */
    const float momentum = ob_adam_momentum(*m, e.at[OB_MESSAGE], adam);
    *m = f->keep_zero && *v == 0 ? 0 : momentum;
    *p = ob_adam_parameter(
        *p, ob_bounded(*m * adam->momentum_factor / ob_zero_one_denominator(*v, f), f->bound), rate,
        decay);
    break;
  }
  case OB_PASS_ZERO_ONE_FREEZE:
    *v = ob_zero_one_denominator(*v, f);
    *a = *p;
    *d = 0;
    break;
  case OB_PASS_ZERO_ONE_LOCAL: {
    const float move = ob_zero_one_move(&e, f);
    *p = *p + move;
    *d = *d + move;
    break;
  }
  case OB_PASS_ZERO_ONE_STORE: {
    const float move = ob_zero_one_move(&e, f);
    const float moved = f->adds_up ? *d + move : *p + move - *a + f->anchor_decay * *a;
    *s = ob_zero_one_sent(moved, *v, own);
    break;
  }
  case OB_PASS_ZERO_ONE_MET:
    *m = quotient;
    *p = *a + ob_bounded(e.at[OB_MESSAGE] / *v, f->bound * f->rate_sum) - f->anchor_decay * *a;
    *a = *p;
    *d = 0;
    break;
  case OB_PASS_SHARD:
    *m = ob_adam_momentum(*m, g, adam);
    *s = ob_bounded(*m * adam->momentum_factor * *v, 1);
    break;
  case OB_PASS_SHARD_MOVE:
    *m = ob_adam_momentum(*m, g, adam);
    *p = ob_adam_parameter(*p, ob_bounded(*m * adam->momentum_factor * *v, 1), rate, decay);
    break;
  default:
    break;
  }
  return e;
}

OB_INLINE struct ob_element ob_pass_element(enum ob_pass_kind kind, struct ob_element e,
                                            const struct ob_pass_factors *f) {
  return ob_pass_divided(kind, e, ob_pass_quotient(kind, e.at[OB_MESSAGE], e.at[OB_LAST], f), f);
}

#ifdef __cplusplus
}
#endif
#endif
