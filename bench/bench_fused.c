/* Dense optimizers as plain loops. */
#include "bench/bench_fused.h"

/* The loop that follows may become vectors: its iterations do not depend on each other. */
#ifdef __clang__
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

BENCH_INSIDE void adam(struct bench_fused *fused) {
  const struct ob_adam_factors f = *fused->factors;
  const float rate = fused->learning_rate, decay = fused->weight_decay;
  const float *g = fused->gradient;
  float *p = fused->parameter, *m = fused->momentum, *v = fused->variance;
  INDEPENDENT
  for (size_t i = 0; i < fused->count; i++) {
    m[i] = f.beta1 * m[i] + f.one_minus_beta1 * g[i];
    v[i] = f.beta2 * v[i] + f.one_minus_beta2 * g[i] * g[i];
    float step = m[i] * f.momentum_factor / (sqrtf(v[i]) * f.variance_factor + f.epsilon);
    p[i] -= rate * (step + decay * p[i]);
  }
}

BENCH_INSIDE void momentum(struct bench_fused *fused) {
  const float beta = fused->factors->beta1;
  const float rate = fused->learning_rate, decay = fused->weight_decay;
  const float *g = fused->gradient;
  float *p = fused->parameter, *m = fused->momentum;
  INDEPENDENT
  for (size_t i = 0; i < fused->count; i++) {
    m[i] = beta * m[i] + g[i];
    p[i] -= rate * (m[i] + decay * p[i]);
  }
}

BENCH_INSIDE void lion(struct bench_fused *fused) {
  const struct ob_lion_factors f = *fused->lion;
  const float rate = fused->learning_rate, decay = fused->weight_decay;
  const float *g = fused->gradient;
  float *p = fused->parameter, *m = fused->momentum;
  INDEPENDENT
  for (size_t i = 0; i < fused->count; i++) {
    float direction = f.beta1 * m[i] + f.one_minus_beta1 * g[i];
    float step = (float)(direction > 0) - (float)(direction < 0);
    m[i] = f.beta2 * m[i] + f.one_minus_beta2 * g[i];
    p[i] -= rate * (step + decay * p[i]);
  }
}

/* The lanes of sums, so that they can be vectors too. */
#define LANES 64

BENCH_INSIDE void lamb_lanes(struct bench_fused *fused, size_t first, size_t lanes,
                             float *of_parameters, float *of_updates) {
  const struct ob_adam_factors f = *fused->factors;
  const float decay = fused->weight_decay;
  const float *g = fused->gradient + first;
  float *p = fused->parameter + first, *m = fused->momentum + first;
  float *v = fused->variance + first, *u = fused->update + first;
  INDEPENDENT
  for (size_t i = 0; i < lanes; i++) {
    m[i] = f.beta1 * m[i] + f.one_minus_beta1 * g[i];
    v[i] = f.beta2 * v[i] + f.one_minus_beta2 * g[i] * g[i];
    u[i] = m[i] * f.momentum_factor / (sqrtf(v[i]) * f.variance_factor + f.epsilon) + decay * p[i];
    of_parameters[i] += p[i] * p[i];
    of_updates[i] += u[i] * u[i];
  }
}

BENCH_INSIDE void lamb(struct bench_fused *fused) {
  float of_parameters[LANES] = {0}, of_updates[LANES] = {0};
  size_t i = 0;
  for (; i + LANES <= fused->count; i += LANES)
    lamb_lanes(fused, i, LANES, of_parameters, of_updates);
  lamb_lanes(fused, i, fused->count - i, of_parameters, of_updates);
  fused->norms[0] = fused->norms[1] = 0;
  for (size_t k = 0; k < LANES; k++) {
    fused->norms[0] += (double)of_parameters[k];
    fused->norms[1] += (double)of_updates[k];
  }
}

BENCH_INSIDE void lamb_move(struct bench_fused *fused) {
  double ratio = fused->norms[1] > 0 ? sqrt(fused->norms[0] / fused->norms[1]) : 1;
  const float rate = (float)((double)fused->learning_rate * (ratio < 10 ? ratio : 10));
  const float *u = fused->update;
  float *p = fused->parameter;
  INDEPENDENT
  for (size_t i = 0; i < fused->count; i++)
    p[i] -= rate * u[i];
}

#define FUSED(name) BENCH_WIDTHS(fused_##name, name, (struct bench_fused * fused), (fused))
FUSED(adam)
FUSED(momentum)
FUSED(lion)
FUSED(lamb)
FUSED(lamb_move)
