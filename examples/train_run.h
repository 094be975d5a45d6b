/*
 * One training of train_text: steps, reports, validation, and what came of it.
 */
#ifndef EXAMPLES_TRAIN_RUN_H
#define EXAMPLES_TRAIN_RUN_H

#include "examples/text.h"
#include "examples/train_optimizer.h"

/* Sums over some steps. */
typedef struct tally {
  size_t steps;
  uint64_t bytes; /* that this rank's optimizer handed to the transport */
  double loss;    /* of this rank's own sequences */
  double seconds, optimizer_seconds;
} tally_t;

typedef struct training {
  const train_options_t *options;
  const text_t *text;
  const team_t *team;
  int optimizer_kind;
  const train_device_t *device;
  train_model_t model;
  train_optimizer_t optimizer;
  unsigned char *tokens; /* [batch][context + 1] */
  tally_t tally[2];      /* of each onebit_stage_t */
  double validation_loss;
  FILE *log; /* on rank 0, when one is asked for */
} training_t;

/* Trains and reports; the results stay in the tallies and the validation loss. 0, or -1 after
 * saying why. */
int train(training_t *training);

double per_step(const tally_t *tally, double sum);

extern const char *const optimizer_names[];

uint64_t hash(uint64_t start, const void *data, size_t size); /* FNV-1a */

#endif
