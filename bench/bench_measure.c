/* Clock, statistics, data and words of the benchmarks. */
#define _DEFAULT_SOURCE
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "bench/bench.h"

double bench_now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int compare(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

struct bench_statistics bench_statistics(double *samples, size_t count) {
  double sum = 0;
  qsort(samples, count, sizeof *samples, compare);
  for (size_t i = 0; i < count; i++)
    sum += samples[i];
  return (struct bench_statistics){
      .minimum = samples[0],
      .median = (samples[(count - 1) / 2] + samples[count / 2]) / 2,
      .mean = sum / (double)count,
      .percentile90 = samples[(count - 1) * 9 / 10],
      .percentile99 = samples[(count - 1) * 99 / 100],
      .maximum = samples[count - 1],
  };
}

struct bench_statistics bench_ratio(const double *a, const double *b, size_t count,
                                    double *scratch) {
  for (size_t i = 0; i < count; i++)
    scratch[i] = a[i] / b[i];
  return bench_statistics(scratch, count);
}

/* SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). */
static uint64_t random_bits(uint64_t *state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/* The sum of four 16-bit numbers, which is close to normal: its variance is 4 * 2^32 / 12. */
static float random_normal(uint64_t *state) {
  uint64_t bits = random_bits(state);
  int32_t sum = 0;
  for (int k = 0; k < 4; k++)
    sum += (int32_t)(bits >> 16 * k & 0xffff) - 0x8000;
  return ((float)sum + 0.5f) * (float)(1 / 37837.0);
}

/* Elements of one magnitude: layers differ, and so do rows of a layer. A prime, so that regions do
 * not end where blocks do. */
#define REGION 3011

void bench_fill(float *values, size_t count, uint64_t seed) {
  uint64_t state = seed * 0x2545f4914f6cdd1du + 1;
  for (size_t first = 0; first < count; first += REGION) {
    float magnitude = exp2f(-6 - (float)(random_bits(&state) % 8));
    size_t end = count - first < REGION ? count : first + REGION;
    for (size_t i = first; i < end; i++)
      values[i] = magnitude * random_normal(&state);
  }
}

/* A row of 1024 elements, which stays in the first cache, multiplied and added to. */
void bench_compute(size_t units) {
  enum { ROW = 1024, PASSES = 8 };
  float row[ROW];
  for (int i = 0; i < ROW; i++)
    row[i] = (float)i;
  for (size_t k = 0; k < units * PASSES; k++)
    for (int i = 0; i < ROW; i++)
      row[i] = row[i] * 0.999f + 0.001f;
  __asm__ volatile("" : : "r"(row) : "memory"); /* as if someone read it: not left out */
}

void bench_complain(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fputs("onebit-bench: ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
}

int bench_status(onebit_status_t status, const char *what) {
  if (status == ONEBIT_OK)
    return BENCH_OK;
  bench_complain("%s: %s: %s", what, onebit_status_string(status), onebit_last_error());
  return status == ONEBIT_ERROR_ARGUMENT ? BENCH_USAGE : BENCH_FAILED;
}

const char *bench_dtype_name(onebit_dtype_t dtype) {
  static const char *const names[] = {"float32", "bfloat16", "float16"};
  return names[dtype];
}

const char *bench_scale_name(onebit_scale_t scale) {
  return scale == ONEBIT_SCALE_RMS ? "rms" : "mean-absolute";
}
