/*
 * A training task: data and a model, behind a few calls. train_text, train_images and train_words
 * each have a kind of their own; optimizers (train_optimizer.h) and steps (train_run.h) see only
 * this.
 */
#ifndef EXAMPLES_TRAIN_TASK_H
#define EXAMPLES_TRAIN_TASK_H

#include "examples/train_options.h"
#include "examples/train_team.h"

typedef struct train_task train_task_t;

/* The quality of the model on the held-out data. */
typedef struct train_quality {
  double loss;
  double accuracy; /* from 0 to 1; negative: it is not a matter of right and wrong */
} train_quality_t;

typedef struct train_kind {
  const char *name;    /* "text" */
  const char *samples; /* "tokens" */
  /* A task of this rank, at the seed's first values. The options are those of the program, data
   * what it loaded. Collective; NULL on all ranks after saying why. */
  train_task_t *(*create)(const team_t *team, const train_options_t *options, const void *data);
  void (*destroy)(train_task_t *task);
  /* The loss on this rank's own samples of a micro-batch; they count up over all steps. Replaces
   * the gradients. */
  double (*gradient)(train_task_t *task, size_t micro_batch);
  /* Collective: each rank looks at a part of the data. 0, or -1 after saying why. */
  int (*validate)(train_task_t *task, train_quality_t *quality);
  uint64_t (*checksum)(train_task_t *task); /* of all parameters */
  void (*show)(train_task_t *task);         /* on rank 0, when trained; may be NULL */
} train_kind_t;

typedef struct train_tensor {
  float *value, *gradient;
  size_t count;
  int decays;
  int table; /* of outputs: ONEBIT_TABLE, where the optimizer has that */
} train_tensor_t;

/* A kind's own task begins with it. */
struct train_task {
  const train_kind_t *kind;
  const team_t *team;
  train_tensor_t *tensors;
  size_t ntensors;
  size_t parameters; /* numbers in all tensors together */
  size_t samples;    /* of this rank in a micro-batch */
  /* When not NULL, called as each tensor's gradient is final. */
  void (*ready)(void *context, size_t tensor);
  void *ready_context;
};

/* The rank whose samples this rank draws: with --hard same rank 0. */
static inline size_t train_sampling_rank(const train_task_t *task, const train_options_t *options) {
  return options->hard == HARD_SAME ? 0 : task->team->rank;
}

uint64_t train_hash(uint64_t start, const void *data, size_t size); /* FNV-1a */

#endif
