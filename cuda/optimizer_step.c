/*
 * Makes a step of an optimizer on a device: describes the step for its kernels, and puts its passes
 * on the step's stream. A step without a stream uses a stream of each bucket, and the host waits
 * for these.
 */
#include <string.h>

#include "base/error.h"
#include "cuda/bucket.h"

static cudaStream_t device_step_stream_of(const struct onebit_optimizer *optimizer,
                                          const struct ob_bucket *bucket) {
  return optimizer->step.on_stream ? optimizer->step.stream : bucket->device->own;
}

/* Returns the plan that sends the bucket's gradients in this step; NULL: no plan does. */
static struct onebit_plan *sending_plan_of(const struct onebit_optimizer *optimizer,
                                           const struct ob_bucket *bucket) {
  enum ob_exchange exchange = ob_bucket_exchange(optimizer, bucket);
  return exchange == OB_EXCHANGE_NONE   ? NULL
         : exchange == OB_EXCHANGE_BITS ? bucket->bits
                                        : bucket->dense;
}

/* --- Before */

void ob_cuda_step_await(const struct onebit_optimizer *optimizer) {
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    struct onebit_plan *plans[OB_PLANS] = {optimizer->buckets[u].dense, optimizer->buckets[u].bits};
    for (int k = 0; k < OB_PLANS; k++)
      if (plans[k] && plans[k]->device && plans[k]->device->seen)
        plans[k]->executor->settled(plans[k], true);
  }
}

/* Makes a step wait for the passes of the last step, which may be on another stream. These passes
 * follow that step's exchange, so the event of the exchange's plan does not cover them; the
 * device's count of steps waits for the plan, too. Captured work does not run yet, so nothing waits
 * for it. */
static onebit_status_t wait_for_last_step(const struct onebit_optimizer *optimizer,
                                          const struct onebit_plan *plan) {
  cudaEvent_t last = optimizer->buckets[0].device->last;
  cudaStream_t stream = optimizer->step.stream;
  if (!optimizer->step.on_stream) {
    ob_cuda_step_await(optimizer);
    OB_TRY_CUDA(cudaEventSynchronize(last));
  } else if (!ob_cuda_is_capturing(stream)) {
    OB_TRY(ob_device_check_stream(plan, stream));
    OB_TRY_CUDA(cudaStreamWaitEvent(stream, last, 0));
    if (optimizer->deferred)
      OB_TRY_CUDA(cudaStreamWaitEvent(stream, plan->device->last, 0));
  }
  return ONEBIT_OK;
}

/* Copies a few numbers to the device, while no kernel reads them. */
static onebit_status_t copy_to_device(const struct ob_bucket_device *device, void *to,
                                      const void *from, size_t bytes) {
  cudaError_t error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, device->own);
  if (error == cudaSuccess)
    error = cudaStreamSynchronize(device->own);
  return error == cudaSuccess ? ONEBIT_OK
                              : ob_cuda_error(error, "copying a bucket's numbers to the device");
}

/* Copies changed addresses of gradients to the device, after the work of earlier steps. The host's
 * two copies are used in turns, so the one that is overwritten was sent in the step before the
 * last. A graph keeps the addresses of its capture. */
static onebit_status_t send_addresses(struct onebit_optimizer *optimizer,
                                      struct ob_bucket *bucket) {
  struct ob_bucket_device *device = bucket->device;
  size_t bytes = bucket->bits->geometry.layout.pieces * sizeof *device->gradients;
  cudaStream_t stream = device_step_stream_of(optimizer, bucket);
  bool capturing = ob_cuda_is_capturing(stream);
  if (!device->moved)
    return ONEBIT_OK;
  device->moved = false;
  struct ob_addresses *next = &device->addresses[device->turn = !device->turn];
  cudaError_t error = ob_cuda_reach(next->sent, false);
  if (capturing || error == cudaErrorNotReady) {
    cudaGetLastError();
    ob_cuda_step_await(optimizer);
    error = ob_cuda_reach(next->sent, true);
  }
  OB_TRY_CUDA(error);
  memcpy(next->memory, bucket->gradients, bytes);
  if (capturing)
    return copy_to_device(device, device->gradients, next->memory, bytes);
  OB_TRY_CUDA(
      cudaMemcpyAsync(device->gradients, next->memory, bytes, cudaMemcpyHostToDevice, stream));
  OB_TRY_CUDA(cudaEventRecord(next->sent, stream));
  return ONEBIT_OK;
}

/* Copies changed scalings to the device. They change only at the freeze and with a checkpoint, when
 * no copy is in flight. */
static onebit_status_t send_scalings(struct ob_bucket *bucket) {
  struct ob_bucket_device *device = bucket->device;
  size_t bytes = bucket->bits->geometry.layout.pieces * sizeof(float);
  if (memcmp(device->device_scalings, bucket->scalings, bytes) == 0)
    return ONEBIT_OK;
  memcpy(device->device_scalings, bucket->scalings, bytes);
  return copy_to_device(device, device->scalings, bucket->scalings, bytes);
}

/* Returns true if the device counts the steps for the bias corrections, since the host does not
 * know how many were made. The host knows the number if the next step's messages depend on it. */
static bool device_counts_steps(const struct onebit_optimizer *optimizer) {
  return optimizer->deferred && !optimizer->moments.no_bias_correction &&
         !optimizer->method->exchange && !ob_optimizer_divides_gradients(optimizer);
}

/* Sends the number of steps that the plan's own count of calls does not include, for the device to
 * add. It stays the same while steps use the same plan. */
static onebit_status_t send_before(const struct onebit_optimizer *optimizer,
                                   struct ob_bucket *bucket, const struct onebit_plan *plan) {
  struct ob_bucket_device *device = bucket->device;
  int which = plan == bucket->bits ? OB_BITS : OB_DENSE;
  uint64_t before =
      optimizer->steps - optimizer->zero_steps - optimizer->unknown - device->calls[which];
  if (!device_counts_steps(optimizer) || before == device->before[which])
    return ONEBIT_OK;
  device->before[which] = before;
  return copy_to_device(device, &plan->device->kernel.state->before, &before, sizeof before);
}

static onebit_status_t count_step(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                  const struct onebit_plan *plan) {
  const struct ob_moments *moments = &optimizer->moments;
  bucket->device->counted = device_counts_steps(optimizer);
  if (!bucket->device->counted)
    return ONEBIT_OK;
  OB_TRY(send_before(optimizer, bucket, plan));
  OB_TRY_CUDA(ob_cuda_adam_count(plan->device->kernel, moments->beta1, moments->beta2,
                                 device_step_stream_of(optimizer, bucket)));
  return ONEBIT_OK;
}

/* Prepares a bucket's exchange. A step without a stream waits here, since the plan then uses a
 * stream of its own. */
static onebit_status_t device_step_prepare(struct onebit_optimizer *optimizer,
                                           struct ob_bucket *bucket) {
  const struct onebit_plan *plan = sending_plan_of(optimizer, bucket);
  OB_TRY(wait_for_last_step(optimizer, plan));
  OB_TRY(send_addresses(optimizer, bucket));
  if (!optimizer->step.on_stream)
    OB_TRY_CUDA(cudaStreamSynchronize(bucket->device->own));
  OB_TRY(send_scalings(bucket));
  return count_step(optimizer, bucket, plan);
}

onebit_status_t ob_cuda_step_prepare(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                     struct ob_call *call) {
  struct ob_bucket_device *device = bucket->device;
  bool gradients = call->source.inputs == bucket->gradients;
  call->device_inputs = gradients ? device->gradients : device->means;
  call->device_outputs = call->outputs ? device->means : NULL;
  if (call->source.scalings)
    call->source.scalings = device->scalings;
  if (call->source.floors)
    call->source.floors = device->floors;
  OB_ON_DEVICE(device->number);
  onebit_status_t status = device_step_prepare(optimizer, bucket);
  call->counted = device->counted;
  call->only_at_first = optimizer->deferred;
  return status;
}

/* --- After */

static size_t count_uncompressed(const struct onebit_optimizer *optimizer) {
  size_t count = 0;
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    count += optimizer->buckets[u].uncompressed;
  return count;
}

/* Stops the step in all buckets if the exchange of one of them did not end well. On a stream the
 * host does not know the outcome, so the device stops the step. */
onebit_status_t ob_cuda_step_join(struct onebit_optimizer *optimizer) {
  struct ob_bucket *first = optimizer->buckets;
  size_t count = optimizer->bucket_count, from = 0;
  if (!optimizer->deferred)
    return ONEBIT_OK;
  if (optimizer->step.exchange == OB_EXCHANGE_BITS)
    from = count;
  if (optimizer->step.exchange == OB_EXCHANGE_NONE) {
    from = 2 * count;
    count = count_uncompressed(optimizer);
  }
  if (count > 1)
    OB_TRY_CUDA(
        ob_cuda_join(first->device->states + from, count, device_step_stream_of(optimizer, first)));
  return ONEBIT_OK;
}

/* Describes a sink for kernels, with the device's arrays in place of the host's arrays by piece. */
struct ob_cuda_pass ob_device_pass(const struct ob_pass_sink *sink) {
  const struct ob_bucket_device *device = sink->device;
  struct ob_cuda_pass pass = {
      .kind = sink->kind,
      .first_word = sink->first_word,
      .parameters = device->parameters,
      .copies = sink->copies ? device->copies : NULL,
      .gradients = device->gradients,
      .copy_dtype = sink->copy_dtype,
      .gradient_dtype = sink->gradient_dtype,
      .learning_rate = device->optimizer->step.learning_rate,
      .rate = device->optimizer->rate,
      .learning_rates = device->has_learning_rates ? device->lamb.learning_rates : NULL,
      .rate_factors = device->factors,
      .weight_decays = device->weight_decays,
      .sums_of_rates = sink->rate_factors != NULL,
      .scalings = sink->scalings ? device->scalings : NULL,
      .last_values = sink->last_values,
      .only_at_first = device->optimizer->deferred,
      .last_decay = sink->last_decay,
      .factors = sink->factors,
      .counted = device->counted,
      .variances = sink->variances,
  };
  for (int slot = 0; slot < OB_ARRAYS; slot++)
    pass.arrays[slot] = sink->arrays[slot];
  for (int k = 0; k < OB_SUMS; k++)
    pass.sums[k] = sink->sums[k];
  return pass;
}

/* Returns the state that stops passes after a failed exchange, or NULL once the host knows the
 * outcome. The exchanges of a step on a stream are stopped all together, so the state of any one
 * can be used. */
static struct ob_cuda_state *device_step_state_of(const struct onebit_optimizer *optimizer,
                                                  const struct ob_bucket *bucket) {
  const struct onebit_plan *plan = sending_plan_of(optimizer, bucket);
  if (!optimizer->deferred || !optimizer->step.on_stream)
    return NULL;
  for (size_t u = 0; !plan && u < optimizer->bucket_count; u++)
    plan = sending_plan_of(optimizer, &optimizer->buckets[u]);
  return plan ? plan->device->kernel.state : NULL;
}

/* Launches a pass. A pass before the exchange waits for the earlier steps by itself; it changes
 * only scratch memory, so it need not be stopped. */
onebit_status_t ob_cuda_step_pass(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                  const struct ob_pass_sink *sink) {
  OB_ON_DEVICE(bucket->device->number);
  struct ob_cuda_plan plan = bucket->bits->device->kernel;
  struct ob_cuda_pass pass = ob_device_pass(sink);
  bool changes = ob_pass_writes(sink->kind) & ~OB_MASK(OB_SCRATCH);
  if (optimizer->step.started == 0)
    OB_TRY(wait_for_last_step(optimizer, bucket->dense));
  OB_TRY(send_addresses(optimizer, bucket));
  if (sink->kind == OB_PASS_LAMB_FREEZE)
    OB_TRY(send_scalings(bucket));
  plan.state = changes ? device_step_state_of(optimizer, bucket) : NULL;
  pass.counted &= plan.state != NULL;
  bucket->device->which_sums = -1;
  OB_TRY_CUDA(ob_cuda_pass_over(plan, pass, device_step_stream_of(optimizer, bucket)));
  return ONEBIT_OK;
}

/* Copies the sums of all blocks at once: a caller that needs those of one tensor needs all. */
static onebit_status_t read_sums(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                 int which) {
  struct ob_bucket_device *device = bucket->device;
  cudaStream_t stream = device_step_stream_of(optimizer, bucket);
  if (device->which_sums == which)
    return ONEBIT_OK;
  OB_TRY_CUDA(cudaMemcpyAsync(device->sums, bucket->sums[which],
                              bucket->bits->geometry.layout.blocks * sizeof(double),
                              cudaMemcpyDeviceToHost, stream));
  ob_cuda_step_await(optimizer);
  OB_TRY_CUDA(cudaStreamSynchronize(stream));
  device->which_sums = which;
  return ONEBIT_OK;
}

onebit_status_t ob_cuda_step_sum(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                 int which, size_t first, size_t end, double *sum) {
  OB_ON_DEVICE(bucket->device->number);
  onebit_status_t status = read_sums(optimizer, bucket, which);
  *sum = status == ONEBIT_OK ? ob_sums_total(which, bucket->device->sums + first, end - first) : 0;
  return status;
}

/* Returns the stream of a bucket's latest pass. If messages are staged, this is a stream of the
 * plan. */
static cudaStream_t stream_of_latest_pass(const struct onebit_optimizer *optimizer,
                                          const struct ob_bucket *bucket) {
  bool staged = !optimizer->deferred && sending_plan_of(optimizer, bucket) == bucket->bits;
  return staged ? bucket->bits->device->staging.compute : device_step_stream_of(optimizer, bucket);
}

/* Computes per-tensor coefficients on the device. The host computes scalings, since this happens
 * only once. */
onebit_status_t ob_cuda_step_lamb(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                  enum ob_lamb_stage stage) {
  if (stage == OB_LAMB_SCALE)
    return ob_lamb_on_host(optimizer, bucket, stage);
  struct ob_bucket_device *device = bucket->device;
  device->lamb.rate = optimizer->rate;
  OB_ON_DEVICE(device->number);
  cudaError_t error =
      ob_cuda_lamb_rates(device_step_state_of(optimizer, bucket), device->lamb, stage,
                         optimizer->step.learning_rate, stream_of_latest_pass(optimizer, bucket));
  device->has_learning_rates = true;
  return error == cudaSuccess ? ONEBIT_OK : ob_cuda_error(error, "launching a kernel");
}

/* --- The end */

/* Ends a bucket's step that has no stream of the caller: waits for the device, and sends the
 * numbers that the next stage needs. */
static onebit_status_t end_bucket_step(const struct onebit_optimizer *optimizer,
                                       struct ob_bucket *bucket) {
  bool bits = ob_optimizer_is_frozen(optimizer) && !bucket->uncompressed;
  bucket->bits->executor->settled(bucket->bits, true); /* a held call was applied after it ended */
  OB_TRY_CUDA(cudaStreamSynchronize(bucket->device->own));
  return send_before(optimizer, bucket, bits ? bucket->bits : bucket->dense);
}

/* Records the end of a step. The caller's next work is made to wait for a step in parts, which is
 * on another stream. */
static onebit_status_t record_end(struct onebit_optimizer *optimizer) {
  const struct ob_bucket_device *first = optimizer->buckets[0].device;
  cudaStream_t stream = optimizer->step.stream;
  if (!ob_cuda_is_capturing(stream))
    OB_TRY_CUDA(cudaEventRecord(first->last, stream));
  return stream == first->parts ? ob_cuda_step_order(optimizer, stream, optimizer->step.caller)
                                : ONEBIT_OK;
}

onebit_status_t ob_cuda_step_finish(struct onebit_optimizer *optimizer) {
  onebit_status_t status = ONEBIT_OK;
  struct ob_bucket *first = optimizer->buckets;
  for (size_t u = 0; status == ONEBIT_OK && u < optimizer->bucket_count; u++) {
    OB_ON_DEVICE(first[u].device->number);
    if (!optimizer->step.on_stream)
      status = end_bucket_step(optimizer, &first[u]);
    else if (u == 0)
      status = record_end(optimizer);
  }
  return status;
}
