/*
 * Plain optimizers: one tensor's moments and values after a gradient. A step of each is written
 * here as a program without this library has it.
 */
#ifndef EXAMPLES_TRAIN_UPDATE_H
#define EXAMPLES_TRAIN_UPDATE_H

#include <stddef.h>

/* Numbers of a step. gradient_factor makes the sum that is given a mean; momentum_factor and
 * variance_factor are the bias corrections of Adam and LAMB. */
typedef struct update {
  float beta1, beta2, epsilon; /* momentum SGD has only beta1 */
  float gradient_factor, momentum_factor, variance_factor;
  float learning_rate, weight_decay;
} update_t;

/* Adam (Kingma and Ba, arXiv 1412.6980; decay as in AdamW). */
void update_adam(const update_t *update, float *restrict value, float *restrict momentum,
                 float *restrict variance, const float *restrict gradient, size_t count);

/* LAMB (You et al., arXiv 1904.00962), its ratio of norms held between 0.01 and 10. Uses up the
 * gradient. */
void update_lamb(const update_t *update, float *restrict value, float *restrict momentum,
                 float *restrict variance, float *restrict gradient, size_t count);

/* SGD with heavy-ball momentum, as PyTorch has it. */
void update_momentum(const update_t *update, float *restrict value, float *restrict momentum,
                     const float *restrict gradient, size_t count);

/* Lion (Chen et al., arXiv 2302.06675). */
void update_lion(const update_t *update, float *restrict value, float *restrict momentum,
                 const float *restrict gradient, size_t count);

#endif
