/*
 * What train_text trains with: the library's optimizer, frozen at some time or never, or the dense
 * Adam of train_dense.h, behind the same few calls.
 */
#ifndef EXAMPLES_TRAIN_OPTIMIZER_H
#define EXAMPLES_TRAIN_OPTIMIZER_H

#include "examples/train_dense.h"
#include "examples/train_device.h"

typedef struct train_optimizer {
  int kind; /* ADAM, ONEBIT_ADAM or DENSE_MPI */
  const team_t *team;
  train_model_t *model;
  onebit_optimizer_t onebit; /* NULL for DENSE_MPI, which has the other one */
  train_dense_t *dense;
  int in_parts;           /* gradients are told of as they become final */
  onebit_status_t status; /* of telling */
} train_optimizer_t;

/* 0, or -1 after saying why. The optimizer stays where it is: the model calls it back. */
int train_optimizer_create(train_optimizer_t *optimizer, int kind, const team_t *team,
                           const train_options_t *options, train_model_t *model);
void train_optimizer_destroy(train_optimizer_t *optimizer);

/* Before the backward pass, and after it: the same learning rate. */
onebit_status_t train_optimizer_begin(train_optimizer_t *optimizer, float learning_rate);
onebit_status_t train_optimizer_step(train_optimizer_t *optimizer, float learning_rate);

onebit_optimizer_info_t train_optimizer_info(const train_optimizer_t *optimizer);

/* Bytes that this rank has sent for it so far. */
uint64_t train_optimizer_sent(const train_optimizer_t *optimizer);

#endif
