/*
 * The invariant of error feedback, element by element, in every call:
 *
 *   result = mean over ranks (input) + mean over ranks (worker residual before - after) + server
 *   residual
 * before - after
 *
 * without the server's part for a reduce-scatter, and for an allgather input + error before - after
 * of the one rank. Held over 100 steps, for counts that nothing divides, through the public
 * interface alone.
 *
 * To rounding means this. With u = 2^-24, each float32 operation is off by at most u times its
 * result: c = e + x, e' = c - q       moves q by at most   u (|e + x| + |e'|)           <=  u (|e|
 * + |x| + |e'|) q / P, in two roundings     by                   2 u |q| / P P terms added, then d
 * by                   P u sum |q| / P, at most d' = t - y, y stored        by                   u
 * |d'| + r |y|, r the rounding of the result's type and |q| <= |e| + |x| + |e'| + (its own error).
 * So with M = mean over ranks (|e| + |x| + |e'|) and D = |d| + |d'| the difference is at most  u (1
 * + 2 + P) M + u D + r |y|;  1 % on top covers the products of roundings and the double arithmetic
 * of this test.
 */

#define TEST_SECONDS 600
#include "tests/support_collectives.h"

#define STEPS 100
static const size_t odd_counts[] = {1, 37, 1003, 4099};

/* The record of the ranks at each step; rank r writes at r, so no two threads share an element. */
struct history {
  onebit_plan_options_t options;
  int size;
  size_t count;
  struct record {
    float *input, *result;
    struct kept_errors before, after;
  } (*records)[STEPS]; /* [size] */
};

static float *floats_of(const void *array, size_t count, onebit_dtype_t dtype) {
  float *floats = allocate(count, sizeof *floats);
  for (size_t i = 0; i < count; i++)
    floats[i] = oracle_load(array, i, dtype);
  return floats;
}

/* One step of one rank, with everything it saw. */
static void record_step(const struct history *history, onebit_plan_t plan, int rank, int step) {
  onebit_operation_t operation = history->options.operation;
  onebit_dtype_t dtype = history->options.dtype;
  struct record *record = &history->records[rank][step];
  size_t sent = send_count(operation, history->count, history->size);
  size_t received = receive_count(operation, history->count, history->size);
  void *send = allocate(sent, sizeof(float)), *receive = allocate(received, sizeof(float));
  fill_input(send, dtype, sent, rank, step);
  record->before = export_errors(plan);
  CHECK_STATUS(call_collective(operation, send, receive, plan), ONEBIT_OK);
  record->after = export_errors(plan);
  record->input = floats_of(send, sent, dtype);
  record->result = floats_of(receive, received, dtype);
  free(send);
  free(receive);
}

static void record_steps(onebit_comm_t comm, void *context) {
  struct history *history = context;
  onebit_plan_t plan;
  check_case("%s of %zu %s on %d ranks, profile %d", operation_name(history->options.operation),
             history->count, dtype_name(history->options.dtype), history->size,
             (int)history->options.profile);
  if (!CHECK_STATUS(onebit_plan_create(comm, history->count, &history->options, &plan), ONEBIT_OK))
    return;
  for (int step = 0; step < STEPS; step++)
    record_step(history, plan, onebit_comm_rank(comm), step);
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
}

/* The error of rounding that is not kept: zero where a result is a message's scale, which is
 * rounded before it is sent. */
static double rounding_of(const onebit_plan_options_t *options) {
  onebit_dtype_t dtype = options->dtype;
  if (options->operation != ONEBIT_REDUCE_SCATTER && options->profile == ONEBIT_PROFILE_DEFAULT)
    return 0.0;
  return dtype == ONEBIT_FLOAT32 ? 0.0 : dtype == ONEBIT_BFLOAT16 ? 0x1p-8 : 0x1p-11;
}

/* The smallest step of float16, half of it: results below its normal range are rounded by that
 * much. */
static double smallest_of(const onebit_plan_options_t *options) {
  return options->dtype == ONEBIT_FLOAT16 && rounding_of(options) > 0.0 ? 0x1p-25 : 0.0;
}

/* Checks element i: its result against what `ranks` ranks from `first` on gave and kept. */
static bool element_holds(const struct history *history, int step, int first, int ranks, size_t i,
                          const float *result, double server, double server_magnitude) {
  double wanted = server, magnitude = 0.0;
  for (int r = first; r < first + ranks; r++) {
    const struct record *record = &history->records[r][step];
    double x = (double)record->input[i], e = (double)record->before.worker[i],
           kept = (double)record->after.worker[i];
    wanted += (x + e - kept) / ranks;
    magnitude += (fabs(x) + fabs(e) + fabs(kept)) / ranks;
  }
  double tolerance = 1.01 * 0x1p-24 * ((3.0 + ranks) * magnitude + server_magnitude) +
                     rounding_of(&history->options) * fabs((double)*result) +
                     smallest_of(&history->options);
  return CHECK(fabs((double)*result - wanted) <= tolerance,
               "step %d, element %zu: the result is %.9g, the invariant says %.9g +- %.3g", step, i,
               (double)*result, wanted, tolerance);
}

/* The rank that serves element i, and where its part of the server residual begins: shares follow
 * one another. */
static int find_server(const struct history *history, size_t i, size_t *begin) {
  *begin = 0;
  for (int r = 0; r < history->size; r++) {
    size_t count = history->records[r][0].after.server_count;
    if (i < *begin + count)
      return r;
    *begin += count;
  }
  return -1;
}

static void check_allreduce(const struct history *history, int step) {
  for (size_t i = 0; i < history->count; i++) {
    size_t begin;
    int server = find_server(history, i, &begin);
    if (!CHECK(server >= 0, "nobody serves element %zu", i))
      return;
    const struct record *record = &history->records[server][step];
    double before = (double)record->before.server[i - begin];
    double after = (double)record->after.server[i - begin];
    for (int r = 0; r < history->size; r++)
      if (!element_holds(history, step, 0, history->size, i, &history->records[r][step].result[i],
                         before - after, fabs(before) + fabs(after)))
        return;
  }
}

static void check_reduce_scatter(const struct history *history, int step) {
  for (int r = 0; r < history->size; r++)
    for (size_t i = 0; i < history->count; i++)
      if (!element_holds(history, step, 0, history->size, (size_t)r * history->count + i,
                         &history->records[r][step].result[i], 0.0, 0.0))
        return;
}

static void check_allgather(const struct history *history, int step) {
  for (int reader = 0; reader < history->size; reader++)
    for (int r = 0; r < history->size; r++)
      for (size_t i = 0; i < history->count; i++)
        if (!element_holds(history, step, r, 1, i,
                           &history->records[reader][step].result[(size_t)r * history->count + i],
                           0.0, 0.0))
          return;
}

static void free_history(struct history *history) {
  for (int r = 0; r < history->size; r++)
    for (int step = 0; step < STEPS; step++) {
      struct record *record = &history->records[r][step];
      free(record->input);
      free(record->result);
      free_errors(&record->before);
      free_errors(&record->after);
    }
  free(history->records);
}

static void check_invariant(int size, size_t count, const onebit_plan_options_t *options) {
  struct history history = {.options = *options, .size = size, .count = count};
  history.records = allocate((size_t)size, sizeof *history.records);
  on_ranks(size, record_steps, &history);
  for (int step = 0; step < STEPS; step++) {
    if (options->operation == ONEBIT_ALLREDUCE)
      check_allreduce(&history, step);
    else if (options->operation == ONEBIT_ALLGATHER)
      check_allgather(&history, step);
    else
      check_reduce_scatter(&history, step);
  }
  free_history(&history);
  checks_must_hold();
}

static void check_counts(const onebit_plan_options_t *options, size_t largest) {
  const size_t row = (size_t)options->operation + (size_t)options->dtype + options->block_size % 5;
  for (size_t p = 0; p < test_sizes_count; p++)
    for (size_t c = 0; c < sizeof odd_counts / sizeof odd_counts[0]; c++)
      if (test_wanted_of(row + c, p) && odd_counts[c] <= largest)
        check_invariant(test_sizes[p], odd_counts[c], options);
}

/* HELD(name, largest count, options). */
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

/* In profile deepspeed there is no other operation. */
Test(invariant, bfloat16_and_float16) {
  for (int dtype = ONEBIT_BFLOAT16; dtype <= ONEBIT_FLOAT16; dtype++)
    for (int k = 0; k < 4; k++) {
      onebit_plan_options_t options = {.size = sizeof options, .dtype = (onebit_dtype_t)dtype};
      options.operation = (onebit_operation_t)(k % 3);
      options.profile = k == 3 ? ONEBIT_PROFILE_DEEPSPEED : ONEBIT_PROFILE_DEFAULT;
      check_counts(&options, 1003);
    }
}
