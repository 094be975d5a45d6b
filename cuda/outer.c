/*
 * Runs the outer step on a device. Its passes are on the default stream, so that they are in order
 * with the kernels that a program puts there, and the host waits for the passes. Only these are
 * copied to the host: checksums, sums of squares and whether a drift is finite. A step that
 * exchanges nothing waits for nothing.
 */
#include "optimizers/outer/outer.h"

#include "base/error.h"
#include "base/memory.h"
#include "cuda/device.h"

struct ob_outer_device {
  int number;
  double *sums;    /* in device memory */
  uint32_t *found; /* in device memory too: whether a drift cannot be sent; the checksum */
};

enum { UNSOUND, CHECKSUM, FOUND };

static int device_outer_enter(const struct onebit_outer *outer) {
  return ob_cuda_enter(outer->device->number);
}

/* --- Creation and destruction */

static onebit_status_t device_outer_create(struct onebit_outer *outer) {
  struct ob_outer_device *device = ob_allocate(1, sizeof *device);
  const size_t sums = outer->longest / OB_OUTER_RUN + 1;
  if (!device)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for an outer step");
  outer->device = device;
  OB_TRY(ob_cuda_current_device(&device->number));
  device->sums = ob_memory_cuda.allocate(sums, sizeof *device->sums);
  device->found = ob_memory_cuda.allocate(FOUND, sizeof *device->found);
  outer->own_bytes += sizeof *device + sums * sizeof *device->sums + FOUND * sizeof *device->found;
  return device->sums && device->found
             ? ob_cuda_settle()
             : ob_error(ONEBIT_ERROR_MEMORY, "out of memory on CUDA device %d for an outer step",
                        device->number);
}

static void device_outer_destroy(struct onebit_outer *outer) {
  ob_memory_cuda.release(outer->device->sums);
  ob_memory_cuda.release(outer->device->found);
  ob_release(outer->device);
}

static onebit_status_t device_outer_check(const struct onebit_outer *outer, const char *name,
                                          const void *array) {
  (void)outer;
  return ob_cuda_check_current(name, array);
}

/* --- Passes */

static struct ob_cuda_outer describe_fragment(const struct ob_fragment *fragment) {
  return (struct ob_cuda_outer){.consensus = fragment->consensus,
                                .momentum = fragment->momentum,
                                .drift = fragment->drift,
                                .count = fragment->count};
}

static struct ob_cuda_outer describe_piece(const struct ob_fragment *fragment,
                                           const struct ob_outer_piece *piece) {
  const struct onebit_outer *outer = fragment->outer;
  char *parameters = outer->tensors[piece->tensor].parameter;
  return (struct ob_cuda_outer){
      .consensus = fragment->consensus + piece->at,
      .drift = fragment->drift + piece->at,
      .parameters = parameters + piece->first * ob_dtype_size(outer->options.parameter_dtype),
      .count = piece->count};
}

/* --- The executor's functions */

static onebit_status_t device_outer_checksum(const struct ob_fragment *fragment, uint32_t *sum) {
  OB_ON_DEVICE(fragment->outer->device->number);
  uint32_t *found = fragment->outer->device->found + CHECKSUM;
  OB_TRY_CUDA(cudaMemsetAsync(found, 0, sizeof *found, NULL));
  OB_TRY_CUDA(ob_cuda_outer_checksum(describe_fragment(fragment), found, NULL));
  return ob_memory_cuda.copy(sum, found, sizeof *found);
}

static onebit_status_t device_outer_drift(struct ob_fragment *fragment) {
  OB_ON_DEVICE(fragment->outer->device->number);
  const struct onebit_outer *outer = fragment->outer;
  uint32_t *found = outer->device->found + UNSOUND, unsound;
  OB_TRY_CUDA(cudaMemsetAsync(found, 0, sizeof *found, NULL));
  for (size_t k = 0; k < fragment->pieces; k++)
    OB_TRY_CUDA(ob_cuda_outer_drift(describe_piece(fragment, &fragment->piece[k]),
                                    outer->options.parameter_dtype, fragment->keeps, found, NULL));
  OB_TRY(device_outer_checksum(fragment, &fragment->checksum));
  OB_TRY(ob_memory_cuda.copy(&unsound, found, sizeof unsound));
  fragment->finite = !unsound;
  return ONEBIT_OK;
}

static onebit_status_t device_outer_update(struct ob_fragment *fragment) {
  OB_ON_DEVICE(fragment->outer->device->number);
  const struct onebit_outer *outer = fragment->outer;
  const onebit_outer_options_t *options = &outer->options;
  const size_t runs = (fragment->count + OB_OUTER_RUN - 1) / OB_OUTER_RUN;
  OB_TRY_CUDA(ob_cuda_outer_update(describe_fragment(fragment), options->rule,
                                   (float)options->learning_rate, (float)options->momentum,
                                   outer->device->sums, NULL));
  OB_TRY(ob_memory_cuda.copy(outer->sums, outer->device->sums, runs * sizeof *outer->sums));
  fragment->drift_squares = ob_add_sums(outer->sums, runs);
  return ONEBIT_OK;
}

static onebit_status_t device_outer_set(const struct ob_fragment *fragment, double mixing) {
  OB_ON_DEVICE(fragment->outer->device->number);
  for (size_t k = 0; k < fragment->pieces; k++)
    OB_TRY_CUDA(ob_cuda_outer_set(describe_piece(fragment, &fragment->piece[k]),
                                  fragment->outer->options.parameter_dtype, fragment->keeps,
                                  (float)mixing, NULL));
  OB_TRY_CUDA(cudaStreamSynchronize(NULL));
  return ONEBIT_OK;
}

static onebit_status_t device_outer_export_worker(const struct onebit_plan *plan,
                                                  void *const *pieces) {
  OB_ON_DEVICE(plan->device->number);
  const cudaError_t error =
      ob_cuda_outer_export(plan->device->kernel, plan->state->worker.now, pieces, NULL);
  return error == cudaSuccess ? ONEBIT_OK : ob_cuda_error(error, "launching a kernel");
}

static onebit_status_t device_outer_couple(const struct onebit_plan *const plans[2], void *couple) {
  struct ob_cuda_state *const states[] = {plans[0]->device->kernel.state,
                                          plans[1]->device->kernel.state};
  OB_ON_DEVICE(plans[0]->device->number);
  return ob_memory_cuda.copy(couple, states, sizeof states);
}

static onebit_status_t device_outer_join(const struct onebit_plan *plan, void *couple) {
  OB_ON_DEVICE(plan->device->number);
  const cudaError_t error = ob_cuda_join(couple, 2, plan->device->own);
  return error == cudaSuccess ? ONEBIT_OK : ob_cuda_error(error, "launching a kernel");
}

static void *device_outer_stream_of(const struct onebit_plan *plan) { return plan->device->own; }

const struct ob_outer_executor ob_outer_executor_cuda = {.memory = &ob_memory_cuda,
                                                         .create = device_outer_create,
                                                         .destroy = device_outer_destroy,
                                                         .enter = device_outer_enter,
                                                         .leave = ob_cuda_leave,
                                                         .check = device_outer_check,
                                                         .drift = device_outer_drift,
                                                         .checksum = device_outer_checksum,
                                                         .update = device_outer_update,
                                                         .set = device_outer_set,
                                                         .export_worker =
                                                             device_outer_export_worker,
                                                         .couple = device_outer_couple,
                                                         .join = device_outer_join,
                                                         .stream_of = device_outer_stream_of};
