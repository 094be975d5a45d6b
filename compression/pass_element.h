/*
 * The arithmetic of an element in each pass (passes.h). The codecs (codec_passes.h) and device code
 * (cuda/passes.cu) are loops around ob_pass_element, so that only this file has the arithmetic of
 * the optimizers. All arithmetic is IEEE float32; every operation is rounded separately, in the
 * order of the source.
 */
#ifndef OB_COMPRESSION_PASS_ELEMENT_H
#define OB_COMPRESSION_PASS_ELEMENT_H

#include "compression/passes.h"

#ifdef __cplusplus
extern "C" {
#endif

/* --- Divided gradients: the warm-up of Efficient-Adam */

/* The floor of a divisor is this factor times the block's mean variance. It prevents a division by
 * zero for elements whose gradients have been zero so far. */
#define OB_DIVISOR_FLOOR 0.03f

/* Returns true for a pass that divides gradients; such a pass needs the mean variance of each
 * block. */
OB_INLINE int ob_pass_divides_gradients(enum ob_pass_kind kind) {
  return kind == OB_PASS_DIVISORS || kind == OB_PASS_DIVIDED;
}

/* Returns the floor of a block's divisors, from the sum of its variances. */
OB_INLINE float ob_divisor_floor(double variances, size_t count, const struct ob_pass_factors *f) {
  return OB_DIVISOR_FLOOR * f->before * (float)(variances / (double)count);
}

/* Returns the divisor of a gradient before its exchange: the root of its second moment. In a block
 * that has had no gradients the divisor is 1, so that large gradients are cut off. */
OB_INLINE float ob_divisor(float variance, const struct ob_pass_factors *f) {
  const float moment = variance * f->before + f->floor;
  return moment > 0 ? sqrtf(moment + f->adam.epsilon * f->adam.epsilon) : 1;
}

/* Returns the gradient divided by the root of the variance. The pass adds the result to the
 * momentum. The variance already includes this gradient. */
OB_INLINE float ob_divide_gradient(float gradient, float variance,
                                   const struct ob_pass_factors *f) {
  const float factor = f->adam.variance_factor;
  const float moment = variance * factor * factor + f->adam.epsilon * f->adam.epsilon;
  return moment > 0 ? gradient / sqrtf(moment) : 0;
}

/* --- 0/1 Adam */

/* Updates the momentum in a local step. Returns the change of the parameter. */
OB_INLINE float ob_zero_one_move(struct ob_element *e, const struct ob_pass_factors *f) {
  const float gradient = f->gradient_factor * e->at[OB_GRADIENT];
  e->at[OB_MOMENTUM] = ob_adam_momentum(e->at[OB_MOMENTUM], gradient, &f->adam);
  const float step =
      ob_bound_step(e->at[OB_MOMENTUM] * f->adam.momentum_factor / e->at[OB_VARIANCE], f->bound);
  return -f->learning_rate * (step + f->weight_decay * e->at[OB_PARAMETER]);
}

/* Returns the denominator; infinity for an element whose variance is 0, so that the element does
 * not change. */
OB_INLINE float ob_zero_one_denominator(float variance, const struct ob_pass_factors *f) {
  const float denominator = ob_adam_denominator(variance, &f->adam);
  return f->keep_zero && variance == 0 ? ob_float_of(0x7f800000u) : denominator;
}

/* Returns the value to exchange for a change `moved` of a parameter. The value is 0 if the element
 * must not change. It is NaN if the change or the gradient's square is not finite, even though the
 * step is bounded. */
OB_INLINE float ob_zero_one_exchanged_value(float moved, float denominator, float gradient) {
  const float square = gradient * gradient;
  const float sent = ob_is_finite(denominator) ? moved * denominator : moved - moved;
  return ob_select(ob_is_finite(square), sent, square - square);
}

/* --- 1-bit LAMB */

/* Updates the fresh variance and the sums. `now` is the momentum; `gradient` is computed from the
 * change of the momentum. Returns the update. */
OB_INLINE float ob_lamb_update_fresh(struct ob_element *e, float now, float gradient,
                                     const struct ob_pass_factors *f) {
  const struct ob_adam_factors *adam = &f->adam;
  const float v = e->at[OB_VARIANCE];
  float *const w = &e->at[OB_FRESH];
  *w = ob_adam_variance(*w, gradient, adam);
  const float q = ob_bound_step(now * adam->momentum_factor * v, f->bound),
              u = q + f->weight_decay * e->at[OB_PARAMETER];
  e->sum[1] = q * q;
  e->sum[2] = u * u;
  const float divisor = v * ob_adam_denominator(*w, adam);
  e->sum[OB_LARGEST] = ob_select(v > 0, divisor, ob_sum_initial_value(OB_LARGEST));
  return u;
}

/* --- A pass */

/* Returns true if a pass divides a number that depends only on its messages. If messages are signs,
 * the quotient has only a few values in a block, so the loop over elements need not divide. */
OB_INLINE int ob_pass_has_quotient(enum ob_pass_kind kind) {
  return kind == OB_PASS_LAMB_FRESH || kind == OB_PASS_ZERO_ONE_MET;
}

/* Returns the quotient of a pass that has one (ob_pass_has_quotient), and 0 for other passes.
 * `last` is the previous message times beta1. */
OB_INLINE float ob_pass_quotient(enum ob_pass_kind kind, float message, float last,
                                 const struct ob_pass_factors *f) {
  if (kind == OB_PASS_LAMB_FRESH)
    return (message - last) / f->adam.one_minus_beta1;
  return kind == OB_PASS_ZERO_ONE_MET && f->rate_sum > 0 ? -(message / f->rate_sum) : 0;
}

/* Computes one element of a pass from the quotient and the inputs. Inputs that the pass does not
 * read must be zero. */
OB_INLINE struct ob_element ob_pass_element_by_quotient(enum ob_pass_kind kind, struct ob_element e,
                                                        float quotient,
                                                        const struct ob_pass_factors *f) {
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
        *p, ob_bound_step(*m * adam->momentum_factor / ob_adam_denominator(*v, adam), f->bound),
        rate, decay);
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
    *p = ob_adam_parameter(*p, ob_bound_step(e.at[OB_MESSAGE] * *v, f->bound), rate, decay);
    break;
  case OB_PASS_APPLY_STEP:
    *p = ob_adam_parameter(*p, ob_bound_step(e.at[OB_MESSAGE], f->bound), rate, decay);
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
    *m = ob_adam_momentum(*m, ob_divide_gradient(gradient, *v, f), adam);
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
    ob_lamb_update_fresh(&e, e.at[OB_MESSAGE], quotient, f);
    break;
  case OB_PASS_LAMB_FROZEN: {
    const float before = *m;
    *m = ob_adam_frozen_momentum(*m, g, adam);
    *s = ob_lamb_update_fresh(&e, *m, (*m - before) / adam->one_minus_beta1, f);
    *m = adam->beta1 * *m;
    break;
  }
  case OB_PASS_ZERO_ONE: {
    /* One bit cannot represent zero, so an element that has never had a gradient has still received
     * values. They must not stay in its momentum until its first gradient. */
    const float momentum = ob_adam_momentum(*m, e.at[OB_MESSAGE], adam);
    *m = f->keep_zero && *v == 0 ? 0 : momentum;
    *p = ob_adam_parameter(
        *p, ob_bound_step(*m * adam->momentum_factor / ob_zero_one_denominator(*v, f), f->bound),
        rate, decay);
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
    *s = ob_zero_one_exchanged_value(moved, *v, own);
    break;
  }
  case OB_PASS_ZERO_ONE_MET:
    *m = quotient;
    *p = *a + ob_bound_step(e.at[OB_MESSAGE] / *v, f->bound * f->rate_sum) - f->anchor_decay * *a;
    *a = *p;
    *d = 0;
    break;
  case OB_PASS_SHARD:
    *m = ob_adam_momentum(*m, g, adam);
    *s = ob_bound_step(*m * adam->momentum_factor * *v, 1);
    break;
  case OB_PASS_SHARD_MOVE:
    *m = ob_adam_momentum(*m, g, adam);
    *p = ob_adam_parameter(*p, ob_bound_step(*m * adam->momentum_factor * *v, 1), rate, decay);
    break;
  default:
    break;
  }
  return e;
}

OB_INLINE struct ob_element ob_pass_element(enum ob_pass_kind kind, struct ob_element e,
                                            const struct ob_pass_factors *f) {
  return ob_pass_element_by_quotient(kind, e,
                                     ob_pass_quotient(kind, e.at[OB_MESSAGE], e.at[OB_LAST], f), f);
}

#ifdef __cplusplus
}
#endif
#endif
