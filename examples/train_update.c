/* The optimizers of train_update.h. */
#include "examples/train_update.h"

#include <math.h>

#include "examples/vectorised.h"

/* Updates both moments by the gradient g, and returns Adam's direction. */
static inline __attribute__((always_inline)) float adam_direction(const update_t *u,
                                                                  float *momentum, float *variance,
                                                                  float g) {
  const float m = u->beta1 * *momentum + (1.0f - u->beta1) * g;
  const float v = u->beta2 * *variance + (1.0f - u->beta2) * g * g;
  *momentum = m;
  *variance = v;
  return m * u->momentum_factor / (sqrtf(v * u->variance_factor) + u->epsilon);
}

VECTORISED void update_adam(const update_t *update, float *restrict value, float *restrict momentum,
                            float *restrict variance, const float *restrict gradient,
                            size_t count) {
  const update_t u = *update;
  for (size_t i = 0; i < count; i++) {
    const float g = gradient[i] * u.gradient_factor;
    const float direction = adam_direction(&u, &momentum[i], &variance[i], g);
    value[i] -= u.learning_rate * (direction + u.weight_decay * value[i]);
  }
}

/* Replaces the gradient by the direction with its decay. */
VECTORISED static void lamb_direction(const update_t *update, const float *restrict value,
                                      float *restrict momentum, float *restrict variance,
                                      float *restrict gradient, size_t count) {
  const update_t u = *update;
  for (size_t i = 0; i < count; i++) {
    const float g = gradient[i] * u.gradient_factor;
    gradient[i] = adam_direction(&u, &momentum[i], &variance[i], g) + u.weight_decay * value[i];
  }
}

static double norm(const float *x, size_t count) {
  double sum = 0.0;
  for (size_t i = 0; i < count; i++)
    sum += (double)x[i] * (double)x[i];
  return sqrt(sum);
}

void update_lamb(const update_t *update, float *restrict value, float *restrict momentum,
                 float *restrict variance, float *restrict gradient, size_t count) {
  lamb_direction(update, value, momentum, variance, gradient, count);
  const double of_value = norm(value, count), of_direction = norm(gradient, count);
  const double ratio = of_value > 0.0 && of_direction > 0.0 ? of_value / of_direction : 1.0;
  const float rate = update->learning_rate * (float)fmin(fmax(ratio, 0.01), 10.0);
  for (size_t i = 0; i < count; i++)
    value[i] -= rate * gradient[i];
}

VECTORISED void update_momentum(const update_t *update, float *restrict value,
                                float *restrict momentum, const float *restrict gradient,
                                size_t count) {
  const update_t u = *update;
  for (size_t i = 0; i < count; i++) {
    const float m = u.beta1 * momentum[i] + gradient[i] * u.gradient_factor;
    momentum[i] = m;
    value[i] -= u.learning_rate * (m + u.weight_decay * value[i]);
  }
}

VECTORISED void update_lion(const update_t *update, float *restrict value, float *restrict momentum,
                            const float *restrict gradient, size_t count) {
  const update_t u = *update;
  for (size_t i = 0; i < count; i++) {
    const float g = gradient[i] * u.gradient_factor;
    const float c = u.beta1 * momentum[i] + (1.0f - u.beta1) * g;
    const float direction = (float)(c > 0.0f) - (float)(c < 0.0f);
    value[i] -= u.learning_rate * (direction + u.weight_decay * value[i]);
    momentum[i] = u.beta2 * momentum[i] + (1.0f - u.beta2) * g;
  }
}
