/*
 * 1-bit Adam: its state, shared by the files that create it and step it.
 *
 * What is compressed together is a unit: all tensors at once, or one tensor in profile deepspeed. A
 * unit's arrays lie as its plan's kept values do (compression/layout.h), and change their meaning
 * at the freeze:
 *
 *                    warm-up              compressed
 *   kept values now  momentum m           compensated momentum c
 *   kept values next mean gradient        the other copy of c
 *   variance         v                    1 / (sqrt(v^) + epsilon)
 *   momentum         -                    the last message: signs and scales
 */
#ifndef OB_OPTIMIZERS_ADAM_H
#define OB_OPTIMIZERS_ADAM_H

#include "collectives/plan.h"
#include "onebit/optimizer.h"

struct ob_adam_unit {
  onebit_plan_t bits, dense;
  float *variance;
  double *block_sums; /* of variances, a step's */
  /* By piece of the plan: where its parameters, gradients and mean gradients lie, and its two
   * constants. */
  float **parameters;
  const void **gradients;
  void **means;
  float *factors, *weight_decays;
  float *learning_rates; /* factor * the step's learning rate */
  struct ob_adam_sink sink;
};

struct onebit_optimizer {
  onebit_comm_t comm;
  onebit_adam_options_t options; /* defaults filled in */
  struct ob_adam_unit *units;
  size_t unit_count;
  uint64_t steps, skipped, frozen_at;
  float learning_rate; /* of the step being made */
  /* Automatic freeze: norms of the variance after the last `window` steps, a ring. */
  double *norms, variance_ratio;
  size_t window;
  uint64_t own_bytes;
};

/* In profile deepspeed one rank alone does not compress; it freezes the variance all the same. */
bool ob_adam_compresses(const struct onebit_optimizer *optimizer);

#endif
