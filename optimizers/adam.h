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

/* The local passes of a step. */
enum ob_adam_pass {
  OB_ADAM_STEP,   /* a whole Adam step on the mean gradients; also sums the variances */
  OB_ADAM_FREEZE, /* the arrays take on their meanings of the compressed stage */
  OB_ADAM_FROZEN  /* the step of a rank that does not compress */
};

struct ob_adam_unit {
  onebit_plan_t bits, dense;
  struct ob_adam_device *device; /* the place's own, where it is a device */
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

/* The status that counts among several, and its words. */
struct ob_adam_outcome {
  onebit_status_t status;
  char words[256];
};

/* A step being made. */
struct ob_adam_step {
  bool open; /* between begin and step */
  float learning_rate;
  size_t started; /* units */
  bool on_stream;
  void *stream;
  /* This rank's mistakes, and once the exchanges are through what came of them. */
  struct ob_adam_outcome outcome;
};

/* The table of places: where the arrays are, and who makes the local passes. */
struct ob_adam_place {
  onebit_status_t (*check)(const char *name, const void *array);
  /* Of one unit, once all else of it is made. */
  onebit_status_t (*create)(struct onebit_optimizer *optimizer, struct ob_adam_unit *unit);
  void (*destroy)(struct ob_adam_unit *unit);
  /* The call is about to start: what the place has to add to it. */
  onebit_status_t (*prepare)(struct onebit_optimizer *optimizer, struct ob_adam_unit *unit,
                             struct ob_call *call);
  /* All units' exchanges are through, or on the stream: before anything is applied. */
  onebit_status_t (*join)(struct onebit_optimizer *optimizer, bool bits);
  onebit_status_t (*pass)(struct onebit_optimizer *optimizer, struct ob_adam_unit *unit,
                          enum ob_adam_pass pass, uint64_t step);
  /* The sum of the variances of the latest step, in the order of the blocks. */
  onebit_status_t (*norm)(struct onebit_optimizer *optimizer, struct ob_adam_unit *unit,
                          double *norm);
  /* Deferred, after all plans have settled: how many steps were made, how many skipped. */
  void (*counts)(const struct onebit_optimizer *optimizer, uint64_t *steps, uint64_t *skipped);
  /* All of a step is on its stream; a step without one is over when this returns. */
  onebit_status_t (*finish)(struct onebit_optimizer *optimizer);
  /* For the passes of steps on streams. */
  onebit_status_t (*wait)(struct onebit_optimizer *optimizer);
};

extern const struct ob_adam_place ob_adam_place_host;
#ifdef ONEBIT_HAVE_CUDA
extern const struct ob_adam_place ob_adam_place_cuda;
#endif

struct onebit_optimizer {
  onebit_comm_t comm;
  const struct ob_adam_place *place;
  /* The host learns how a step ended only when it asks (ob_adam_catch_up). */
  bool deferred;
  uint64_t unknown;               /* steps since it asked */
  struct ob_adam_outcome outcome; /* of steps on streams */
  onebit_adam_options_t options;  /* defaults filled in */
  struct ob_adam_unit *units;     /* in the order of their tensors */
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
onebit_status_t ob_adam_update(struct onebit_optimizer *optimizer);

/* The number of the warm-up's last step, unless that is found from the variance. */
size_t ob_adam_last_of_warmup(const struct onebit_optimizer *optimizer);

/* Ends the warm-up, if the latest step was its last. */
onebit_status_t ob_adam_freeze(struct onebit_optimizer *optimizer);

/* A step on a stream of the device, or without (adam_step.c). */
onebit_status_t ob_adam_step_on(onebit_optimizer_t optimizer, float learning_rate, bool on_stream,
                                void *stream);

/* Waits for steps on streams; then steps, skipped and the stage are known. How the steps ended is
 * kept, as is what ob_adam_note is given, until ob_adam_take_outcome. */
onebit_status_t ob_adam_catch_up(onebit_optimizer_t optimizer);
onebit_status_t ob_adam_note(onebit_optimizer_t optimizer, onebit_status_t status);
onebit_status_t ob_adam_take_outcome(onebit_optimizer_t optimizer);

/* Ends an open step as one that has failed, and tells the other ranks (adam_step.c). */
void ob_adam_abandon(struct onebit_optimizer *optimizer);

#endif
