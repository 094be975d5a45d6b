/* Creates a bucket's arrays in the memory of a device, and reads the results of steps for the
 * host. */
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "cuda/bucket.h"

/* --- Creation and destruction */

static onebit_status_t device_optimizer_out_of_memory(const struct ob_bucket_device *device) {
  return ob_error(ONEBIT_ERROR_MEMORY, "out of memory on CUDA device %d for an optimizer",
                  device->number);
}

static void *device_optimizer_copy_array(struct onebit_optimizer *optimizer, const void *values,
                                         size_t count, size_t size) {
  optimizer->own_bytes += count * size;
  return ob_cuda_copy_array(values, count, size);
}

/* Copies the arrays that have one entry per piece into one block of device memory, since each copy
 * makes the host wait for the default stream. */
static onebit_status_t copy_pieces(struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  struct ob_bucket_device *device = bucket->device;
  const size_t pieces = bucket->bits->geometry.layout.pieces;
  const void *const pointers[] = {bucket->parameters, bucket->copies, bucket->gradients,
                                  bucket->means};
  const void *const numbers[] = {bucket->factors, bucket->weight_decays, bucket->scalings,
                                 bucket->floors};
  enum { ARRAYS = 4 };
  const size_t size = ARRAYS * (sizeof(void *) + sizeof(float));
  char *here = ob_allocate(pieces, size), *next = here;
  for (int k = 0; here && k < ARRAYS; k++, next += pieces * sizeof(void *))
    memcpy(next, pointers[k], pieces * sizeof(void *));
  for (int k = 0; here && k < ARRAYS; k++, next += pieces * sizeof(float))
    memcpy(next, numbers[k], pieces * sizeof(float));
  device->arrays = here ? device_optimizer_copy_array(optimizer, here, pieces, size) : NULL;
  ob_release(here);
  if (!device->arrays)
    return device_optimizer_out_of_memory(device);
  void **const there = device->arrays;
  float *const floats = (float *)(there + ARRAYS * pieces);
  device->parameters = (float **)there;
  device->copies = there + pieces;
  device->gradients = there + 2 * pieces;
  device->means = there + 3 * pieces;
  device->factors = floats;
  device->weight_decays = floats + pieces;
  device->scalings = floats + 2 * pieces;
  device->floors = floats + 3 * pieces;
  return ONEBIT_OK;
}

static onebit_status_t allocate_addresses(struct onebit_optimizer *optimizer,
                                          struct ob_bucket *bucket) {
  struct ob_bucket_device *device = bucket->device;
  const size_t pieces = bucket->bits->geometry.layout.pieces;
  device->device_scalings = ob_optimizer_allocate(optimizer, pieces, sizeof(float));
  if (!device->device_scalings)
    return device_optimizer_out_of_memory(device);
  memcpy(device->device_scalings, bucket->scalings, pieces * sizeof(float));
  for (int k = 0; k < 2; k++) {
    device->addresses[k].memory = ob_memory_pinned.allocate(pieces, sizeof *device->gradients);
    if (!device->addresses[k].memory)
      return device_optimizer_out_of_memory(device);
    OB_TRY_CUDA(cudaEventCreateWithFlags(&device->addresses[k].sent, cudaEventDisableTiming));
  }
  return ONEBIT_OK;
}

static onebit_status_t allocate_sums(struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  size_t blocks = bucket->bits->geometry.layout.blocks;
  bucket->device->which_sums = -1;
  bucket->device->sums = ob_memory_pinned.allocate(blocks, sizeof(double));
  optimizer->own_bytes += blocks * sizeof(double);
  return bucket->device->sums ? ONEBIT_OK : device_optimizer_out_of_memory(bucket->device);
}

/* Lists the bucket's tensors for kernels; returns their number. Pieces of a tensor follow each
 * other. */
static size_t device_optimizer_list_tensors(const struct onebit_optimizer *optimizer,
                                            const struct ob_bucket *bucket,
                                            struct ob_cuda_tensor *list) {
  size_t count = 0, pieces = bucket->bits->geometry.layout.pieces;
  for (size_t k = 0; k < pieces; k++) {
    size_t t = bucket->tensor_of[k];
    if (t == optimizer->tensor_count)
      continue;
    if (k == 0 || bucket->tensor_of[k - 1] != t)
      list[count++] = (struct ob_cuda_tensor){.number = t,
                                              .first_block = optimizer->tensors[t].first_block,
                                              .end_block = optimizer->tensors[t].end_block,
                                              .first_piece = k};
    list[count - 1].end_piece = k + 1;
  }
  return count;
}

static onebit_status_t copy_lamb(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                 const struct ob_cuda_tensor *list, size_t count) {
  const struct ob_lamb *own = optimizer->own;
  const struct ob_cuda_lamb *first = &optimizer->buckets[0].device->lamb;
  struct ob_cuda_lamb *lamb = &bucket->device->lamb;
  size_t pieces = bucket->bits->geometry.layout.pieces;
  bool makes = lamb == first;
  *lamb = (struct ob_cuda_lamb){.limits = own->limits,
                                .count = count,
                                .coefficients = first->coefficients,
                                .factors = first->factors,
                                .rate_factors = bucket->device->factors};
  lamb->tensors = device_optimizer_copy_array(optimizer, list, count, sizeof *list);
  lamb->learning_rates =
      device_optimizer_copy_array(optimizer, bucket->learning_rates, pieces, sizeof(float));
  if (makes) {
    lamb->coefficients =
        device_optimizer_copy_array(optimizer, own->coefficients, own->count, sizeof(double));
    lamb->factors =
        device_optimizer_copy_array(optimizer, own->factors, own->count, sizeof(double));
  }
  for (int k = 0; k < OB_SUMS; k++)
    lamb->sums[k] = bucket->sums[k];
  return lamb->tensors && lamb->learning_rates && lamb->coefficients && lamb->factors
             ? ONEBIT_OK
             : device_optimizer_out_of_memory(bucket->device);
}

static onebit_status_t create_lamb(struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  if (!optimizer->method->lamb)
    return ONEBIT_OK;
  struct ob_cuda_tensor *list = ob_allocate(bucket->bits->geometry.layout.pieces, sizeof *list);
  if (!list)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for an optimizer");
  onebit_status_t status =
      copy_lamb(optimizer, bucket, list, device_optimizer_list_tensors(optimizer, bucket, list));
  ob_release(list);
  return status;
}

/* Lists the addresses of all plans' states on the device, when the last bucket is created: then all
 * states exist. */
static onebit_status_t list_states(struct onebit_optimizer *optimizer,
                                   const struct ob_bucket *last) {
  struct ob_bucket_device *first = optimizer->buckets[0].device;
  size_t count = optimizer->bucket_count;
  if (!optimizer->deferred || last != &optimizer->buckets[count - 1])
    return ONEBIT_OK;
  struct ob_cuda_state **states = ob_allocate(3 * count, sizeof *states);
  for (size_t u = 0, plain = 0; states && u < count; u++) {
    const struct ob_bucket *bucket = &optimizer->buckets[u];
    states[u] = bucket->dense->device->kernel.state;
    states[count + u] = bucket->uncompressed ? states[u] : bucket->bits->device->kernel.state;
    if (bucket->uncompressed)
      states[2 * count + plain++] = states[u];
  }
  if (states)
    first->states = device_optimizer_copy_array(optimizer, states, 3 * count, sizeof *states);
  ob_release(states);
  return first->states ? ONEBIT_OK : device_optimizer_out_of_memory(first);
}

static onebit_status_t device_optimizer_create(struct onebit_optimizer *optimizer,
                                               struct ob_bucket *bucket) {
  bucket->device = ob_allocate(1, sizeof *bucket->device);
  if (!bucket->device)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for an optimizer");
  bucket->device->optimizer = optimizer;
  bucket->device->number = bucket->bits->device->number;
  OB_ON_DEVICE(bucket->device->number);
  OB_TRY(copy_pieces(optimizer, bucket));
  OB_TRY(allocate_addresses(optimizer, bucket));
  OB_TRY(allocate_sums(optimizer, bucket));
  OB_TRY(create_lamb(optimizer, bucket));
  OB_TRY(list_states(optimizer, bucket));
  OB_TRY_CUDA(cudaStreamCreateWithFlags(&bucket->device->own, cudaStreamNonBlocking));
  OB_TRY_CUDA(cudaEventCreateWithFlags(&bucket->device->last, cudaEventDisableTiming));
  if (bucket == optimizer->buckets)
    OB_TRY_CUDA(cudaStreamCreateWithFlags(&bucket->device->parts, cudaStreamNonBlocking));
  return bucket == &optimizer->buckets[optimizer->bucket_count - 1] ? ob_cuda_settle() : ONEBIT_OK;
}

static void destroy_lamb(struct ob_bucket_device *device) {
  struct ob_cuda_lamb *lamb = &device->lamb;
  ob_memory_cuda.release((void *)(uintptr_t)lamb->tensors);
  ob_memory_cuda.release(lamb->learning_rates);
  if (device != device->optimizer->buckets[0].device)
    return;
  ob_memory_cuda.release(lamb->coefficients);
  ob_memory_cuda.release(lamb->factors);
}

/* Steps on a stream may still use this memory: cudaFree waits for them. */
static void device_optimizer_destroy(struct ob_bucket *bucket) {
  struct ob_bucket_device *device = bucket->device;
  if (!device)
    return;
  OB_ON_DEVICE(device->number);
  if (bucket == device->optimizer->buckets) /* the first to be destroyed: all plans still exist */
    ob_cuda_step_await(device->optimizer);
  ob_cuda_destroy_event(device->last);
  ob_cuda_destroy_stream(device->own);
  ob_cuda_destroy_stream(device->parts);
  for (int k = 0; k < 2; k++) {
    ob_cuda_destroy_event(device->addresses[k].sent);
    ob_memory_pinned.release(device->addresses[k].memory);
  }
  ob_memory_cuda.release(device->arrays);
  ob_memory_cuda.release(device->states);
  ob_memory_pinned.release(device->sums);
  destroy_lamb(device);
  ob_release(device->device_scalings);
  ob_release(device);
  bucket->device = NULL;
}

/* Makes the next step send all addresses. */
static onebit_status_t mark_addresses_stale(struct onebit_optimizer *optimizer,
                                            struct ob_bucket *bucket, size_t piece) {
  (void)optimizer, (void)piece;
  bucket->device->moved = true;
  return ONEBIT_OK;
}

static onebit_status_t copy_factors(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                    size_t piece) {
  struct ob_bucket_device *device = bucket->device;
  OB_ON_DEVICE(device->number);
  onebit_status_t status =
      ob_memory_cuda.copy(&device->factors[piece], &bucket->factors[piece], sizeof(float));
  if (status == ONEBIT_OK)
    status = ob_memory_cuda.copy(&device->weight_decays[piece], &bucket->weight_decays[piece],
                                 sizeof(float));
  (void)optimizer;
  return status;
}

/* Does nothing, since each launch passes the current value to the kernels. */
static void update_serving(struct ob_bucket *bucket) {
  const struct onebit_plan *plan = bucket->bits;
  plan->device->kernel.server.serving = plan->state->server.serving;
  plan->device->host.host.server.serving = plan->state->server.serving;
}

/* --- Results that the host reads */

static onebit_status_t copy_lamb_numbers(struct onebit_optimizer *optimizer, bool to_host) {
  const struct ob_lamb *own = optimizer->own;
  if (!optimizer->method->lamb || !optimizer->bucket_count)
    return ONEBIT_OK;
  const struct ob_cuda_lamb *lamb = &optimizer->buckets[0].device->lamb;
  double *const here[] = {own->coefficients, own->factors};
  double *const there[] = {lamb->coefficients, lamb->factors};
  for (int k = 0; k < 2; k++)
    OB_TRY(ob_memory_cuda.copy(to_host ? here[k] : there[k], to_host ? there[k] : here[k],
                               own->count * sizeof(double)));
  return ONEBIT_OK;
}

static onebit_status_t wait_for_passes(struct onebit_optimizer *optimizer) {
  if (!optimizer->bucket_count)
    return ONEBIT_OK;
  OB_ON_DEVICE(optimizer->buckets[0].device->number);
  cudaError_t error = cudaEventSynchronize(optimizer->buckets[0].device->last);
  OB_TRY_CUDA(error);
  return copy_lamb_numbers(optimizer, true);
}

/* Counts the steps in which a bucket's exchanges ended well. A bucket that exchanges in every step
 * is preferred, since nothing can stop a step without exchanges. */
static void count_device_steps(const struct onebit_optimizer *optimizer, uint64_t *steps,
                               uint64_t *skipped) {
  const struct ob_bucket *bucket = &optimizer->buckets[0];
  for (size_t u = 1; u < optimizer->bucket_count && !bucket->uncompressed; u++)
    if (optimizer->buckets[u].uncompressed)
      bucket = &optimizer->buckets[u];
  const struct ob_cuda_outcome *dense = &bucket->dense->device->seen->outcome;
  const struct ob_cuda_outcome *bits = &bucket->bits->device->seen->outcome;
  *steps = (uint64_t)dense->calls + bits->calls;
  *skipped = (uint64_t)dense->skipped + bits->skipped;
  if (!bucket->uncompressed)
    *steps += optimizer->exchanges[OB_EXCHANGE_NONE];
}

static void count_steps(const struct onebit_optimizer *optimizer, uint64_t *steps,
                        uint64_t *skipped) {
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    const struct ob_bucket *bucket = &optimizer->buckets[u];
    bucket->device->calls[OB_DENSE] = bucket->dense->device->seen->outcome.calls;
    bucket->device->calls[OB_BITS] = bucket->bits->device->seen->outcome.calls;
  }
  count_device_steps(optimizer, steps, skipped);
  *steps += optimizer->buckets[0].device->steps_before;
  *skipped += optimizer->buckets[0].device->skipped_before;
}

/* --- After a checkpoint was loaded */

/* The kernels use one number to choose the current copy, of residuals and of results. If messages
 * are staged, the device has its own copy of the results. */
static onebit_status_t restore_results(const struct onebit_plan *plan) {
  struct ob_device *device = plan->device;
  size_t bytes = plan->geometry.members * plan->geometry.peer_stride;
  if (!plan->momentum || plan->executor->messages == &ob_memory_cuda)
    return ONEBIT_OK;
  if (plan->state->result_now != plan->state->worker.now)
    memcpy(plan->geometry.results[plan->state->worker.now],
           plan->geometry.results[plan->state->result_now], bytes);
  plan->state->result_now = plan->state->worker.now;
  return ob_memory_cuda.copy(device->kernel.geometry.results[plan->state->result_now],
                             plan->geometry.results[plan->state->result_now], bytes);
}

/* Restores a plan's state on the device. `calls`: the number of calls that ended well, or NULL to
 * keep the device's. */
static onebit_status_t restore_plan(const struct onebit_plan *plan, const uint64_t *calls) {
  struct ob_device *device = plan->device;
  struct ob_cuda_state state;
  OB_TRY(ob_memory_cuda.copy(&state, device->kernel.state, sizeof state));
  state.now = (uint32_t)plan->state->worker.now;
  state.residual_flags = plan->state->server_large ? OB_FLAG_LARGE : 0;
  if (calls)
    state.outcome.calls = (uint32_t)*calls;
  OB_TRY(ob_memory_cuda.copy(device->kernel.state, &state, sizeof state));
  if (device->seen)
    *device->seen = state;
  return restore_results(plan);
}

static onebit_status_t restore_device(struct onebit_optimizer *optimizer) {
  uint64_t steps, skipped;
  bool frozen = ob_optimizer_is_frozen(optimizer);
  const uint64_t sent = frozen ? optimizer->steps - optimizer->frozen_at : 0;
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    OB_TRY(restore_plan(optimizer->buckets[u].bits, &sent));
    OB_TRY(restore_plan(optimizer->buckets[u].dense, NULL));
  }
  OB_TRY(copy_lamb_numbers(optimizer, false));
  if (!optimizer->deferred)
    return ONEBIT_OK;
  struct ob_bucket_device *first = optimizer->buckets[0].device;
  first->steps_before = first->skipped_before = 0;
  count_steps(optimizer, &steps, &skipped);
  first->steps_before = optimizer->steps - steps;
  first->skipped_before = optimizer->skipped - optimizer->skipped_by_norm - skipped;
  return ONEBIT_OK;
}

const struct ob_optimizer_executor ob_optimizer_executor_cuda = {
    .check = ob_cuda_check_current,
    .create = device_optimizer_create,
    .destroy = device_optimizer_destroy,
    .follow = ob_cuda_step_follow,
    .prepare = ob_cuda_step_prepare,
    .join = ob_cuda_step_join,
    .pass = ob_cuda_step_pass,
    .sum = ob_cuda_step_sum,
    .lamb = ob_cuda_step_lamb,
    .repoint = mark_addresses_stale,
    .reweigh = copy_factors,
    .set_server_factors = update_serving,
    .counts = count_steps,
    .finish = ob_cuda_step_finish,
    .wait = wait_for_passes,
    .restored = restore_device};
