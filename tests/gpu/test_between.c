/*
 * Tests operations that a program enqueues on a stream between two calls:
 * onebit_scale_result_stream multiplies results, or makes them NaN if the call did not succeed.
 * onebit_plan_reset_residual_stream resets residuals.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "compression/numerics.h"
#include "cuda/kernels.h"
#include "dropin/elements.h"
#include "tests/gpu/plans.h"

enum { RANKS = 3 };

static const size_t counts[] = {1, 31, 513, 1000, 4099};
enum { COUNTS = sizeof counts / sizeof counts[0], DTYPES = 3, OPERATIONS = 3 };

static size_t count_elements(const struct part *part) {
  return part->received_bytes / ob_dtype_size(part->what.options.dtype);
}

/* Makes a call and scales its result by `factor`. The bits must equal those of the product that the
 * processor computes. */
static void scale_once(struct part *part, unsigned step, float factor) {
  void *wanted = gpu_allocate(part->received_bytes + 1, 1);
  part_load_input(part, step, false);
  CHECK_STATUS(part_enqueue(part, NULL), ONEBIT_OK);
  part_fetch(part);
  ob_elements_multiply(part->what.options.dtype, wanted, part->received, count_elements(part),
                       factor);
  CHECK_STATUS(onebit_scale_result_stream(part->out, factor, part->plan, NULL), ONEBIT_OK);
  part_fetch(part);
  CHECK(!memcmp(wanted, part->received, part->received_bytes), "times %g: other bits",
        (double)factor);
  CHECK_STATUS(onebit_plan_synchronize(part->plan), ONEBIT_OK);
  free(wanted);
}

/* Makes a call with an input of rank 0 that is not finite. Ranks do not wait for the call before
 * they read the result. */
static void skip_once(struct part *part, unsigned step) {
  size_t numbers = 0;
  part_load_input(part, step, part->rank == 0);
  CHECK_STATUS(part_enqueue(part, NULL), ONEBIT_OK);
  CHECK_STATUS(onebit_scale_result_stream(part->out, 1, part->plan, NULL), ONEBIT_OK);
  part_fetch(part);
  for (size_t i = 0; i < count_elements(part); i++)
    numbers += isnan(ob_load(part->received, i, part->what.options.dtype)) ? 0 : 1;
  CHECK(numbers == 0, "%zu of %zu are numbers", numbers, count_elements(part));
  CHECK_STATUS(onebit_plan_synchronize(part->plan), ONEBIT_SKIPPED);
}

static void scale_results(const struct gpu_rank *self, void *context) {
  (void)context;
  for (size_t i = 0; i < COUNTS * DTYPES * OPERATIONS; i++) {
    struct plan_case what =
        default_plan_case((onebit_operation_t)(i / COUNTS / DTYPES), counts[i % COUNTS]);
    struct part part;
    char words[160];
    what.options.dtype = (onebit_dtype_t)(i / COUNTS % DTYPES);
    what.offset = i % 2;
    check_case("rank %d, %s", self->rank, describe_plan_case(&what, words, sizeof words));
    if (!part_create(&part, self->comm, &what, true))
      return;
    scale_once(&part, 0, (float)self->size);
    skip_once(&part, 1);
    scale_once(&part, 2, 1);
    part_destroy(&part);
  }
}

/* Checks that a plan whose residuals were reset continues like a new plan. */
static void reset_residuals(const struct gpu_rank *self, void *context) {
  struct part used, fresh;
  const struct plan_case *what = context;
  if (!part_create(&used, self->comm, what, true) || !part_create(&fresh, self->comm, what, true))
    return;
  for (unsigned step = 0; step < 3; step++) {
    part_load_input(&used, step,
                    step == 2 && self->rank == 0); /* includes a call that was skipped */
    CHECK_STATUS(part_enqueue(&used, NULL), ONEBIT_OK);
  }
  CHECK_STATUS(onebit_plan_reset_residual_stream(used.plan, NULL), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_synchronize(used.plan), ONEBIT_SKIPPED);
  struct part *both[] = {&used, &fresh};
  struct traces traces[2];
  for (int i = 0; i < 2; i++) {
    part_load_input(both[i], 3, false);
    CHECK_STATUS(part_enqueue_and_wait(both[i], NULL), ONEBIT_OK);
    traces[i] = part_hash_traces(both[i]);
  }
  CHECK(traces_equal(&traces[0], &traces[1]), "something is left of the errors");
  part_destroy(&used);
  part_destroy(&fresh);
}

static void reset_residuals_of_each(const struct gpu_rank *self, void *context) {
  struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, 5000);
  (void)context;
  reset_residuals(self, &what);
  what.options.block_size = ONEBIT_BLOCK_BUFFER;
  reset_residuals(self, &what);
}

/* --- Wrong arguments */

static void check_wrong_arguments(const struct gpu_rank *self, void *context) {
  const struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, 100);
  struct part part;
  float number;
  (void)context;
  if (!part_create(&part, self->comm, &what, true))
    return;
  CHECK_STATUS(onebit_scale_result_stream(NULL, 1, part.plan, NULL), ONEBIT_ERROR_ARGUMENT);
  CHECK_STATUS(onebit_scale_result_stream(&number, 1, part.plan, NULL), ONEBIT_ERROR_ARGUMENT);
  CHECK_MESSAGE("recvbuf");
  part_destroy(&part);
}

/* Checks that a call without elements ignores recvbuf. Checks that the operation is refused while a
 * request is in flight. */
static void check_nothing_is_scaled(const struct gpu_rank *self, void *context) {
  struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, 0);
  struct part part;
  onebit_request_t request;
  (void)context;
  if (!part_create(&part, self->comm, &what, true))
    return;
  CHECK_STATUS(part_enqueue_and_wait(&part, NULL), ONEBIT_OK);
  CHECK_STATUS(onebit_scale_result_stream(NULL, 2, part.plan, NULL), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_reset_residual_stream(part.plan, NULL), ONEBIT_OK);
  part_destroy(&part);
  what.count = 100;
  if (!part_create(&part, self->comm, &what, true))
    return;
  part_load_input(&part, 0, false);
  CHECK_STATUS(part_start(&part, &request), ONEBIT_OK);
  CHECK_STATUS(onebit_scale_result_stream(part.out, 2, part.plan, NULL), ONEBIT_ERROR_BUSY);
  CHECK_STATUS(onebit_plan_reset_residual_stream(part.plan, NULL), ONEBIT_ERROR_BUSY);
  CHECK_STATUS(onebit_wait(&request), ONEBIT_OK);
  part_destroy(&part);
}

/* Checks that the operations are refused on plans whose steps the host controls. test_wrong_calls.c
 * tests plans without a device. */
static void check_host_plans(const struct gpu_rank *self, void *context) {
  const struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, 100);
  struct part part;
  (void)context;
  if (!part_create(&part, self->comm, &what, true))
    return;
  CHECK_STATUS(onebit_scale_result_stream(part.out, 1, part.plan, NULL), ONEBIT_ERROR_UNSUPPORTED);
  CHECK_STATUS(onebit_plan_reset_residual_stream(part.plan, NULL), ONEBIT_ERROR_UNSUPPORTED);
  part_destroy(&part);
}

static void check_one_rank(void) {
  run_ranks_self(1, scale_results, NULL);
  run_ranks_self(1, reset_residuals_of_each, NULL);
  run_ranks_self(1, check_wrong_arguments, NULL);
  run_ranks_self(1, check_nothing_is_scaled, NULL);
  gpu_run_loopback(2, check_host_plans, NULL);
}

static void results_are_scaled(void) { run_ranks_nccl(RANKS, scale_results, NULL); }

static void residuals_are_reset(void) { run_ranks_nccl(RANKS, reset_residuals_of_each, NULL); }

/* --- The device's 16-bit conversions, compared with those of numerics.h on all numbers times some
 * factors */

#define NUMBERS ((size_t)1 << 16)

/* The products with these factors are exact, or halfway between two numbers (also subnormal ones),
 * or elsewhere between two numbers, or on either side of the largest number, or too small to
 * represent. A factor of 1 would skip the product. */
static const float factors[] = {-1,      1.5f,  0.5f,  0x1.8p-3f, 0x1p-13f, 0.7f,
                                1.0003f, 16384, 2.31f, 0x1p-30f,  1e-38f,   3e38f};

static float float_of_bits(onebit_dtype_t dtype, uint16_t bits) {
  return dtype == ONEBIT_BFLOAT16 ? ob_from_bfloat16(bits) : ob_from_float16(bits);
}

/* True if the device's result is right. If the product is NaN, any NaN is right. */
static bool is_right(onebit_dtype_t dtype, uint16_t from, float factor, uint16_t got) {
  const float product = float_of_bits(dtype, from) * factor;
  uint16_t wanted;
  ob_store(&wanted, 0, dtype, product);
  return isnan(product) ? isnan(float_of_bits(dtype, got)) : got == wanted;
}

/* Converts all numbers from `first` on. If `first` is 1, the memory is not aligned. */
static void convert_numbers(onebit_dtype_t dtype, float factor, size_t first,
                            const struct ob_cuda_state *state, uint16_t *device) {
  static uint16_t numbers[NUMBERS];
  size_t wrong = 0, last = 0;
  for (size_t i = 0; i < NUMBERS; i++)
    numbers[i] = (uint16_t)i;
  CHECK_CUDA(cudaMemcpy(device, numbers, sizeof numbers, cudaMemcpyHostToDevice));
  CHECK_CUDA(ob_cuda_scale(state, device + first, dtype, NUMBERS - first, factor, 0));
  CHECK_CUDA(cudaMemcpy(numbers, device, sizeof numbers, cudaMemcpyDeviceToHost));
  for (size_t i = first; i < NUMBERS; i++)
    if (!is_right(dtype, (uint16_t)i, factor, numbers[i])) {
      wrong++;
      last = i;
    }
  CHECK(wrong == 0, "dtype %d times %g, from %zu on: %zu are wrong, the last is %04zx, got %04x",
        (int)dtype, (double)factor, first, wrong, last, numbers[last]);
}

static void all_numbers_are_converted(void) {
  struct ob_cuda_state *state;
  uint16_t *device;
  if (!CHECK_CUDA(cudaMalloc((void **)&state, sizeof *state)) ||
      !CHECK_CUDA(cudaMalloc((void **)&device, NUMBERS * sizeof *device)))
    return;
  CHECK_CUDA(cudaMemset(state, 0, sizeof *state));
  for (size_t f = 0; f < sizeof factors / sizeof factors[0]; f++)
    for (size_t first = 0; first < 2; first++) {
      convert_numbers(ONEBIT_BFLOAT16, factors[f], first, state, device);
      convert_numbers(ONEBIT_FLOAT16, factors[f], first, state, device);
    }
  CHECK_CUDA(cudaFree(device));
  CHECK_CUDA(cudaFree(state));
}

static const struct gpu_test tests[] = {
    {"results are multiplied, or not-a-number where the call did not end well", results_are_scaled,
     ANY_DEVICE},
    {"residuals are given up on a stream", residuals_are_reset, ANY_DEVICE},
    {"with one rank, and where there is no stream to put it on", check_one_rank, ANY_DEVICE},
    {"all numbers of 16 bits are converted as on the host", all_numbers_are_converted, ANY_DEVICE},
};
GPU_SUITE("between calls", tests)
