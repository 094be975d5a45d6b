/*
 * The arithmetic of one element of the outer step, written once: for the passes of the host
 * (step.c) and for the kernels (cuda/outer.cu). float32 throughout, one rounding per operation; so
 * with the same mean drift all ranks compute the same bits of the consensus, the parameters that
 * ranks share.
 */
#ifndef OB_OPTIMIZERS_OUTER_ELEMENT_H
#define OB_OPTIMIZERS_OUTER_ELEMENT_H

#include "compression/numerics.h"
#include "onebit/outer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Elements whose squares are summed together: element i of a run goes to lane i mod 32 in double,
 * the lanes are summed by halving, and the runs' sums are added in the order of ob_add_sums. */
#define OB_OUTER_RUN 2048

/* The largest drift that is sent: larger ones mean that training has diverged. The sum of squares
 * of a block still fits in a float32. */
#define OB_OUTER_LARGEST 1e16f

/* Returns the drift: the change of a parameter since it was set to the consensus minus the
 * residual. The parameter was rounded when it was set; the rounding error does not count as
 * drift. */
OB_INLINE float ob_outer_drift(float consensus, float left, float parameter, onebit_dtype_t dtype) {
  return ob_round(consensus - left, dtype) - parameter;
}

/* Returns true if the drift can be sent. Returns false for not-a-number, too. */
OB_INLINE int ob_outer_can_send(float drift) {
  return drift <= OB_OUTER_LARGEST && drift >= -OB_OUTER_LARGEST;
}

/* Returns the change of the consensus before the learning rate, and updates the momentum if the
 * rule has one. */
OB_INLINE float ob_outer_apply_rule(onebit_outer_rule_t rule, float *momentum, float drift,
                                    float decay) {
  if (rule == ONEBIT_OUTER_MEAN)
    return drift;
  *momentum = decay * *momentum + drift;
  return rule == ONEBIT_OUTER_MOMENTUM ? *momentum : drift + decay * *momentum;
}

/* Returns the new parameter. With a mixing below 1, the parameter moves only a part of the way to
 * the consensus. */
OB_INLINE float ob_outer_mix(float parameter, float consensus, float mixing) {
  return mixing < 1 ? (1 - mixing) * parameter + mixing * consensus : consensus;
}

#ifdef __cplusplus
}
#endif
#endif
