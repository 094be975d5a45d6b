/*
 * The invariant of error feedback, element by element, in every call:
 *
 *   result = mean over ranks (input) + mean over ranks (worker residual before - after)
 *            + server residual before - after
 *
 * A reduce-scatter has no server residual. The result of an allgather is input + residual before -
 * after of the single rank. This test checks the oracle over 100 steps, for counts that are no
 * multiple of a block. test_collectives.c checks that the library has the oracle's results and
 * residuals in every bit.
 *
 * The equation holds up to rounding. With u = 2^-24, each float32 operation is off by at most u
 * times its result:
 *
 *   c = e + x, e' = c - q           moves q by at most u (|e + x| + |e'|) <= u (|e| + |x| + |e'|)
 *   q / P, in two roundings         by 2 u |q| / P
 *   P terms added, then d           by P u sum |q| / P
 *   d' = t - y, y stored            by u |d'| + r |y|, where r is the rounding of the result's type
 *
 * Here |q| <= |e| + |x| + |e'| + (its own error). With M = mean over ranks (|e| + |x| + |e'|) and D
 * = |d| + |d'| the difference is therefore at most u (1 + 2 + P) M + u D + r |y|. Another 1 %
 * covers the products of roundings and the double arithmetic of this test.
 */

#define TEST_SECONDS 600
#include "tests/support_collectives.h"

#define STEPS 100
static const size_t odd_counts[] = {1, 37, 1003, 4099};

/* Returns the largest relative rounding error of a result that is in no residual. It is zero if a
 * result is plus or minus a message's scale, because the scale is rounded before it is sent. */
static double result_rounding(const onebit_plan_options_t *options) {
  onebit_dtype_t dtype = options->dtype;
  if (options->operation != ONEBIT_REDUCE_SCATTER && options->profile == ONEBIT_PROFILE_DEFAULT)
    return 0.0;
  return dtype == ONEBIT_FLOAT32 ? 0.0 : dtype == ONEBIT_BFLOAT16 ? 0x1p-8 : 0x1p-11;
}

/* Returns half of float16's smallest step. Results below the normal range of float16 are rounded by
 * at most that. */
static double smallest_rounding(const onebit_plan_options_t *options) {
  return options->dtype == ONEBIT_FLOAT16 && result_rounding(options) > 0.0 ? 0x1p-25 : 0.0;
}

/* An oracle and the buffers of a call. */
struct exchange {
  const onebit_plan_options_t *options;
  struct oracle *oracle;
  const void **inputs; /* [size] */
  void *result;
  float *worker, *server; /* the residuals before the call */
};

static struct exchange exchange_create(int size, size_t count,
                                       const onebit_plan_options_t *options) {
  struct exchange exchange = {.options = options, .oracle = oracle_create(size, count, options)};
  struct oracle *oracle = exchange.oracle;
  exchange.inputs = all_inputs(size, oracle->valid, options->dtype, 0);
  exchange.result = allocate(oracle->result_count, sizeof(float));
  exchange.worker = allocate((size_t)size * oracle->elements, sizeof(float));
  exchange.server = allocate(oracle->elements, sizeof(float));
  return exchange;
}

static void exchange_destroy(struct exchange *exchange) {
  free_inputs(exchange->inputs, exchange->oracle->size);
  free(exchange->result);
  free(exchange->worker);
  free(exchange->server);
  oracle_destroy(exchange->oracle);
}

static void exchange_call(struct exchange *exchange, int step) {
  struct oracle *oracle = exchange->oracle;
  free_inputs(exchange->inputs, oracle->size);
  exchange->inputs = all_inputs(oracle->size, oracle->valid, exchange->options->dtype, step);
  memcpy(exchange->worker, oracle->worker_error,
         (size_t)oracle->size * oracle->elements * sizeof(float));
  memcpy(exchange->server, oracle->server_error, oracle->elements * sizeof(float));
  CHECK(oracle_call(oracle, exchange->inputs, exchange->result), "step %d was skipped", step);
}

/* Checks that inputs, residuals and result of element i add up, over `ranks` ranks from rank
 * `first` on. The result is in element `at`. */
static bool element_holds(const struct exchange *exchange, int step, int first, int ranks, size_t i,
                          size_t at) {
  const struct oracle *oracle = exchange->oracle;
  const onebit_dtype_t dtype = exchange->options->dtype;
  const bool served = exchange->options->operation == ONEBIT_ALLREDUCE;
  const double result = (double)oracle_load(exchange->result, at, dtype);
  const double before = served ? (double)exchange->server[i] : 0,
               after = served ? (double)oracle->server_error[i] : 0;
  double wanted = before - after, magnitude = 0.0;
  for (int r = first; r < first + ranks; r++) {
    const size_t place = (size_t)r * oracle->elements + i;
    double x = (double)oracle_load(exchange->inputs[r], i, dtype),
           e = (double)exchange->worker[place], kept = (double)oracle->worker_error[place];
    wanted += (x + e - kept) / ranks;
    magnitude += (fabs(x) + fabs(e) + fabs(kept)) / ranks;
  }
  double tolerance = 1.01 * 0x1p-24 * ((3.0 + ranks) * magnitude + fabs(before) + fabs(after)) +
                     result_rounding(exchange->options) * fabs(result) +
                     smallest_rounding(exchange->options);
  return CHECK(fabs(result - wanted) <= tolerance,
               "step %d, element %zu: the result is %.9g, the invariant says %.9g +- %.3g", step, i,
               result, wanted, tolerance);
}

static void check_invariant(int size, size_t count, const onebit_plan_options_t *options) {
  const bool gathered = options->operation == ONEBIT_ALLGATHER;
  struct exchange exchange = exchange_create(size, count, options);
  check_case("%s of %zu %s on %d ranks, profile %d", operation_name(options->operation), count,
             dtype_name(options->dtype), size, (int)options->profile);
  bool holds = true;
  for (int step = 0; step < STEPS; step++) {
    exchange_call(&exchange, step);
    for (size_t at = 0; holds && at < exchange.oracle->result_count; at++)
      holds = element_holds(&exchange, step, gathered ? (int)(at / count) : 0, gathered ? 1 : size,
                            gathered ? at % count : at, at);
  }
  exchange_destroy(&exchange);
  checks_must_hold();
}

static void check_counts(const onebit_plan_options_t *options, size_t largest) {
  const size_t row = (size_t)options->operation + (size_t)options->dtype + options->block_size % 5;
  for (size_t p = 0; p < test_sizes_count; p++)
    for (size_t c = 0; c < sizeof odd_counts / sizeof odd_counts[0]; c++)
      if (test_wanted_of(row + c, p) && odd_counts[c] <= largest)
        check_invariant(test_sizes[p], odd_counts[c], options);
}

/* HELD(name, largest count, options) defines a test. */
#define HELD(name, largest, ...)                                                                   \
  Test(invariant, name) {                                                                          \
    const onebit_plan_options_t options = {.size = sizeof options, __VA_ARGS__};                   \
    check_counts(&options, largest);                                                               \
  }
HELD(allreduce_rms, SIZE_MAX, .scale = ONEBIT_SCALE_RMS)
HELD(allreduce_mean_absolute_of_small_blocks, SIZE_MAX, .scale = ONEBIT_SCALE_MEAN_ABSOLUTE,
     .block_size = 32)
HELD(allreduce_one_scale_a_buffer, SIZE_MAX, .block_size = ONEBIT_BLOCK_BUFFER)
HELD(allreduce_deepspeed, SIZE_MAX, .profile = ONEBIT_PROFILE_DEEPSPEED)
HELD(allgather, 1003, .operation = ONEBIT_ALLGATHER)
HELD(reduce_scatter, 1003, .operation = ONEBIT_REDUCE_SCATTER)

/* Profile deepspeed has no other operation than the allreduce. */
Test(invariant, bfloat16_and_float16) {
  for (int dtype = ONEBIT_BFLOAT16; dtype <= ONEBIT_FLOAT16; dtype++)
    for (int k = 0; k < 4; k++) {
      onebit_plan_options_t options = {.size = sizeof options, .dtype = (onebit_dtype_t)dtype};
      options.operation = (onebit_operation_t)(k % 3);
      options.profile = k == 3 ? ONEBIT_PROFILE_DEEPSPEED : ONEBIT_PROFILE_DEFAULT;
      check_counts(&options, 1003);
    }
}
