/*
 * Plain loops with which passes and steps are compared. They use the widest vectors of this
 * processor. The triad loop a[i] = b[i] + s * a[i] moves 12 bytes per element and computes very
 * little, so only memory limits its speed. The step of a dense optimizer is one loop over memory.
 * LAMB's step has two loops, since it needs norms before it can change parameters. Gradients are
 * not exchanged, and all values are float32.
 */
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "bench/bench_passes.h"

/* Defines bench_NAME. The function INSIDE is inlined into one function for each width of vectors,
 * and bench_NAME calls the function for the widest vectors that the processor has. */
#define BENCH_INSIDE __attribute__((always_inline)) static inline
#if defined(__x86_64__)
#define BENCH_WIDTHS(name, inside, parameters, arguments)                                          \
  __attribute__((target("avx512f"))) static void name##_avx512 parameters { inside arguments; }    \
  __attribute__((target("avx2"))) static void name##_avx2 parameters { inside arguments; }         \
  void bench_##name parameters {                                                                   \
    if (__builtin_cpu_supports("avx512f"))                                                         \
      name##_avx512 arguments;                                                                     \
    else if (__builtin_cpu_supports("avx2"))                                                       \
      name##_avx2 arguments;                                                                       \
    else                                                                                           \
      inside arguments;                                                                            \
  }
#else
#define BENCH_WIDTHS(name, inside, parameters, arguments)                                          \
  void bench_##name parameters { inside arguments; }
#endif

/* --- Loops with the memory traffic of passes. They use vectors of 16 floats, which the compiler
 * splits for the processor. Otherwise their speed would depend on how well a compiler vectorizes a
 * scalar loop. */

typedef float vector __attribute__((vector_size(64), may_alias));
#define VECTOR (sizeof(vector) / sizeof(float))

/* Computes the triad, with two vectors in each iteration, so that counting and branching take no
 * additional time. Arrays are aligned to 64 bytes. */
BENCH_INSIDE void triad(float *a, const float *b, float s, size_t count) {
  size_t i = 0;
  for (; i + 2 * VECTOR <= count; i += 2 * VECTOR) {
    vector *to = (vector *)(a + i);
    const vector *from = (const vector *)(b + i);
    to[0] = from[0] + s * to[0];
    to[1] = from[1] + s * to[1];
  }
  for (; i < count; i++)
    a[i] = b[i] + s * a[i];
}

BENCH_WIDTHS(triad_loop, triad, (float *a, const float *b, float s, size_t count), (a, b, s, count))

/* Writes the triad's result into a third array, with stores that bypass the caches. This is the
 * fastest speed that memory allows for a pass that must not overwrite its input. Arrays are aligned
 * to 64 bytes. */
void bench_triad_apart_loop(float *to, const float *a, const float *b, float s, size_t count) {
  size_t i = 0;
#if defined(__x86_64__)
  const __m128 factor = _mm_set1_ps(s);
  for (; i + 4 <= count; i += 4)
    _mm_stream_ps(to + i, _mm_add_ps(_mm_load_ps(b + i), _mm_mul_ps(factor, _mm_load_ps(a + i))));
#endif
  for (; i < count; i++)
    to[i] = b[i] + s * a[i];
}

/* Scales an array: a[i] = s * a[i]. The triad's other array is not read. */
BENCH_INSIDE void scale(float *a, float s, size_t count) {
  size_t i = 0;
  for (; i + 2 * VECTOR <= count; i += 2 * VECTOR) {
    vector *to = (vector *)(a + i);
    to[0] = s * to[0];
    to[1] = s * to[1];
  }
  for (; i < count; i++)
    a[i] = s * a[i];
}

BENCH_WIDTHS(scale_loop, scale, (float *a, float s, size_t count), (a, s, count))

/* Writes the scaled array into another array, with stores that bypass the caches. */
void bench_scale_apart_loop(float *to, const float *a, float s, size_t count) {
  size_t i = 0;
#if defined(__x86_64__)
  for (; i + 4 <= count; i += 4)
    _mm_stream_ps(to + i, _mm_mul_ps(_mm_set1_ps(s), _mm_load_ps(a + i)));
#endif
  for (; i < count; i++)
    to[i] = s * a[i];
}

/* Fills an array, with stores that bypass the caches. This is the fastest speed that memory allows
 * for a pass that only writes. */
void bench_write_loop(float *to, float s, size_t count) {
  size_t i = 0;
#if defined(__x86_64__)
  for (; i + 4 <= count; i += 4)
    _mm_stream_ps(to + i, _mm_set1_ps(s));
#endif
  for (; i < count; i++)
    to[i] = s;
}

const char *bench_triad_width(void) {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") ? "512 bits"
         : __builtin_cpu_supports("avx2")  ? "256 bits"
                                           : "128 bits";
#else
  return "the vectors that the compiler was told of";
#endif
}

/* --- Dense optimizers */

/* Tells the compiler that the iterations of the next loop do not depend on each other, so that it
 * can vectorize the loop. */
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

/* The number of partial sums. With partial sums the compiler can also use vectors for summing. */
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
