/*
 * 1-bit Adam: its state, shared by the files that create it and step it.
 *
 * What is compressed together is a unit: a bucket of consecutive tensors, or one tensor in profile
 * deepspeed. A unit's arrays lie as its plan's kept values do (compression/layout.h), and change
 * their meaning at the freeze:
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
  size_t filled;  /* tensors that have elements */
  size_t waiting; /* those of them that are not ready in this step */
  bool started;   /* its exchange, in this step */
};

struct ob_adam_tensor {
  size_t unit, count;
  bool ready; /* in this step */
};

/* A step being made. */
struct ob_adam_step {
  bool open; /* between begin and step */
  float learning_rate;
  size_t started; /* units */
  /* This rank's mistakes, and once the exchanges are through what came of them. */
  onebit_status_t status;
  char words[256];
};

struct onebit_optimizer {
  onebit_comm_t comm;
  onebit_adam_options_t options; /* defaults filled in */
  struct ob_adam_unit *units;    /* in the order of their tensors */
  struct ob_adam_tensor *tensors;
  size_t unit_count, tensor_count;
  uint64_t steps, skipped, frozen_at;
  struct ob_adam_step step;
  /* Automatic freeze: norms of the variance after the last `window` steps, a ring. */
  double *norms, variance_ratio;
  size_t window;
  uint64_t own_bytes;
};

/* In profile deepspeed one rank alone does not compress; it freezes the variance all the same. */
bool ob_adam_compresses(const struct onebit_optimizer *optimizer);

/* Memory that counts as the optimizer's. NULL when there is none. */
void *ob_adam_take(struct onebit_optimizer *optimizer, size_t count, size_t size);

/* Units (adam_units.c): groups the tensors, which makes room for them; makes each unit and its
 * plans, which is collective; gives them back. */
onebit_status_t ob_adam_group(struct onebit_optimizer *optimizer, const onebit_tensor_t *tensors,
                              size_t count);
onebit_status_t ob_adam_create_units(struct onebit_optimizer *optimizer,
                                     const onebit_tensor_t *tensors, struct ob_plan_shape *shape,
                                     size_t *counts);
void ob_adam_destroy_units(struct onebit_optimizer *optimizer);

/* Factors of step number `step`, the first being 1. */
struct ob_adam_factors ob_adam_factors_of(const struct onebit_optimizer *optimizer, uint64_t step);

/* What follows the exchange of a step (adam_update.c), in the stage that it is in. */
void ob_adam_update(struct onebit_optimizer *optimizer);

/* Ends an open step as one that has failed, and tells the other ranks (adam_step.c). */
void ob_adam_abandon(struct onebit_optimizer *optimizer);

#endif
