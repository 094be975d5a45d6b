/*
 * Lion in one bit as the public header writes it, one element after the other, in float32: of lists
 * of tensors, blocks and ranks, and of nothing else of the library.
 */
#ifndef ONEBIT_TESTS_ORACLE_LION_H
#define ONEBIT_TESTS_ORACLE_LION_H

#include <stdbool.h>
#include <stddef.h>

#include "onebit/lion.h"

struct oracle_lion;

/* `start`: parameters of all tensors, one after the other. Options must outlive it. */
struct oracle_lion *oracle_lion_create(int size, int hosts, const onebit_tensor_t *tensors,
                                       size_t count, const onebit_lion_options_t *options,
                                       const float *start);
void oracle_lion_destroy(struct oracle_lion *oracle);

/* gradients[rank]: of all tensors, one after the other; they are finite. */
void oracle_lion_step(struct oracle_lion *oracle, const float *const *gradients,
                      float learning_rate);

const float *oracle_lion_parameters(const struct oracle_lion *oracle);

/* Norms of the momentum of all elements, and of the errors of the worker that a rank belongs to. */
double oracle_lion_momentum_norm(const struct oracle_lion *oracle);
double oracle_lion_residual_norm(const struct oracle_lion *oracle, int worker);

#endif
