/*
 * The triad loop a[i] = b[i] + s * a[i], which moves 12 bytes an element and computes next to
 * nothing: the speed of memory. Written with vectors of 16 floats, which a compiler cuts to what
 * the processor has: the baseline must not depend on its handling of a plain loop.
 */
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "bench/bench_passes.h"

typedef float vector __attribute__((vector_size(64), may_alias));
#define VECTOR (sizeof(vector) / sizeof(float))

/* Does two vectors a turn: the loop's own instructions should not count. Arrays are aligned to 64
 * bytes. */
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

/* Does the same into an array of its own, past the caches: the speed of memory for a pass that must
 * not overwrite its input. Arrays are aligned to 64 bytes. */
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

/* Scales an array: a[i] = s * a[i], one array less. */
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

/* Scales into an array of its own. */
void bench_scale_apart_loop(float *to, const float *a, float s, size_t count) {
  size_t i = 0;
#if defined(__x86_64__)
  for (; i + 4 <= count; i += 4)
    _mm_stream_ps(to + i, _mm_mul_ps(_mm_set1_ps(s), _mm_load_ps(a + i)));
#endif
  for (; i < count; i++)
    to[i] = s * a[i];
}

/* Writes past the caches: the speed of memory for a pass that only writes. */
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
