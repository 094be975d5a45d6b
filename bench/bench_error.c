/*
 * The relative error of one call's result. Every rank's numbers can be made again anywhere
 * (bench_fill), so rank 0 knows the exact result without a collective.
 */
#include <math.h>
#include <string.h>

#include "base/memory.h"
#include "bench/bench_collective.h"
#include "compression/numerics.h"

/* The first numbers that a rank sends, as they are in the send buffer's dtype. */
static void fill_as_sent(const struct bench_case *test, int rank, float *values) {
  onebit_dtype_t dtype = test->options->dtype;
  bench_fill(values, test->count, (uint64_t)rank + 1);
  for (size_t i = 0; dtype != ONEBIT_FLOAT32 && i < test->count; i++) {
    uint32_t stored;
    ob_store(&stored, 0, dtype, values[i]);
    values[i] = ob_load(&stored, 0, dtype);
  }
}

/* The squares of a part of the result, and of its difference from what is exact. */
static void add_squares(const struct bench_case *test, size_t first, const double *exact,
                        double squares[2]) {
  for (size_t i = 0; i < test->count; i++) {
    double difference = (double)ob_load(test->receive, first + i, test->options->dtype) - exact[i];
    squares[0] += difference * difference;
    squares[1] += exact[i] * exact[i];
  }
}

/* Rank 0's share of a reduction begins with the first element, and so does all of an allreduce. */
static double relative_error(const struct bench_case *test, float *values, double *exact) {
  bool gathers = test->collective->gathers;
  double squares[2] = {0, 0};
  memset(exact, 0, test->count * sizeof *exact);
  for (int rank = 0; rank < test->team->size; rank++) {
    fill_as_sent(test, rank, values);
    for (size_t i = 0; i < test->count; i++)
      exact[i] = gathers ? (double)values[i] : exact[i] + (double)values[i] / test->team->size;
    if (gathers)
      add_squares(test, (size_t)rank * test->count, exact, squares);
  }
  if (!gathers)
    add_squares(test, 0, exact, squares);
  return sqrt(squares[0] / squares[1]);
}

int bench_case_error(struct bench_case *test, double *error) {
  *error = NAN;
  onebit_status_t status = onebit_plan_reset_residual(test->plan);
  if (status == ONEBIT_OK)
    status = test->collective->call(test->send, test->receive, test->plan);
  if (status != ONEBIT_OK || test->team->rank != 0)
    return bench_status(status, test->collective->name);
  float *values = ob_allocate(test->count, sizeof *values);
  double *exact = ob_allocate(test->count, sizeof *exact);
  if (values && exact)
    *error = relative_error(test, values, exact);
  ob_release(values);
  ob_release(exact);
  return BENCH_OK;
}
