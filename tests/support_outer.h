/*
 * Outer steps that are saved, loaded and moved: a rank's parameters, which are trained the same way
 * every time; and others that descend to an optimum.
 */
#ifndef ONEBIT_TESTS_SUPPORT_OUTER_H
#define ONEBIT_TESTS_SUPPORT_OUTER_H

#include "tests/support_parts.h"

enum { OUTER_ELEMENTS = 320 + 77 + 1 + 200 };

/* One rank's. */
struct outer_trained {
  float p[OUTER_ELEMENTS];
  uint16_t half[OUTER_ELEMENTS];
  onebit_outer_options_t options;
  onebit_outer_t outer;
  int rank;
};

/* Rounds of 4 steps, small blocks. */
onebit_outer_options_t outer_options(int bits, onebit_outer_rule_t rule);

/* Collective; of four tensors, one of them uncompressed. */
void outer_create(struct outer_trained *it, onebit_comm_t comm,
                  const onebit_outer_options_t *options);
/* The same, and each rank is a site, which saves and loads a part of its own. */
void outer_create_site(struct outer_trained *it, onebit_comm_t between,
                       const onebit_outer_options_t *options);
const void *outer_values(const struct outer_trained *it);

/* One step; on rank 1 step 7 goes wrong, if `wrong`. */
onebit_status_t outer_train(struct outer_trained *it, int number, bool wrong);

/* Saves this rank's part there, and waits until all ranks have. */
void outer_save(struct outer_trained *it, onebit_comm_t comm, struct saved_parts *parts);
onebit_status_t outer_load(struct outer_trained *it, const struct saved_parts *parts);

/* The mean over the ranks of what is held back of an element: of worker and server residuals. */
double *outer_held_back(const struct saved_parts *parts);

/* --- Outer steps that descend to an optimum, of three tensors of float32 -----------------------*/

enum { PLAIN_TENSORS = 3, PLAIN_EACH = 320, PLAIN_ALL = PLAIN_TENSORS * PLAIN_EACH };

/* The target of a rank's training: its own optimum, and in part everyone's; and a step towards it,
 * of rate 0.05. */
float plain_target(int rank, size_t i);
void plain_train_by(float rate, float *parameters, size_t count, int rank);
void plain_train(float *parameters, size_t count, int rank);

void plain_list(onebit_tensor_t tensors[PLAIN_TENSORS], float *parameters);
onebit_outer_t plain_make(onebit_comm_t comm, float parameters[PLAIN_ALL],
                          const onebit_outer_options_t *options);
void plain_consensus(onebit_outer_t outer, float values[PLAIN_ALL]);

#endif
