/*
 * The public calls of optimizers on streams.
 *
 * A step in parts runs on a stream of the optimizer, beside the caller's stream:
 *
 *   the caller's   gradients of bucket 1 . gradients of bucket 0 .               : next
 *   the step's                            \ exchange 1            \ exchange 0, update /
 *
 * The work that a call adds to the step waits for all earlier work on the caller's stream, and the
 * last call makes the caller's next work wait for the step. Events order both, so a capture
 * includes them.
 */
#include "base/call_scope.h"
#include "base/error.h"
#include "cuda/bucket.h"
#include "onebit/cuda.h"
#include "optimizers/optimizer.h"

/* --- The two streams */

onebit_status_t ob_cuda_step_order(struct onebit_optimizer *optimizer, cudaStream_t first,
                                   cudaStream_t next) {
  const struct onebit_plan *plan = optimizer->buckets[0].dense;
  OB_TRY(ob_device_check_stream(plan, first));
  OB_TRY_CUDA(cudaStreamWaitEvent(next, plan->device->started, 0));
  return ONEBIT_OK;
}

/* Checks that a step is captured from its first call to its last, or not at all. */
static onebit_status_t check_same_capture(struct onebit_optimizer *optimizer, cudaStream_t stream) {
  bool captured = optimizer->step.captured, capturing = ob_cuda_is_capturing(stream);
  if (captured == capturing)
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_ARGUMENT,
                  "stream is %scapturing a graph, but the open step was begun %s a capture: "
                  "capture a whole step, or none of it",
                  capturing ? "" : "not ", captured ? "in" : "outside of");
}

onebit_status_t ob_cuda_step_follow(struct onebit_optimizer *optimizer, void *stream) {
  if (!optimizer->bucket_count)
    return ONEBIT_OK;
  struct ob_bucket_device *first = optimizer->buckets[0].device;
  optimizer->step.on_stream = true;
  optimizer->step.stream = first->parts;
  OB_TRY(check_same_capture(optimizer, stream));
  OB_ON_DEVICE(first->number);
  onebit_status_t status = ob_cuda_step_order(optimizer, stream, first->parts);
  optimizer->step.caller = status == ONEBIT_OK ? stream : first->parts;
  return status;
}

/* --- The calls */

static onebit_status_t check_device(const struct onebit_optimizer *optimizer) {
  if (optimizer->options.device != ONEBIT_DEVICE_HOST)
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_ARGUMENT,
                  "optimizer is for host memory, since its device option is ONEBIT_DEVICE_HOST");
}

/* Refuses captures of steps that depend on results that the host does not know yet. */
static onebit_status_t check_capture(const struct onebit_optimizer *optimizer,
                                     cudaStream_t stream) {
  if (!ob_cuda_is_capturing(stream))
    return ONEBIT_OK;
  if (optimizer->method->exchange)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "stream is capturing a graph, but steps of %s send different messages, so they "
                    "cannot be captured",
                    optimizer->method->name);
  if (optimizer->options.clip_norm > 0)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "stream is capturing a graph, but clip_norm is %g, for which the host must "
                    "wait for the gradients' norm",
                    optimizer->options.clip_norm);
  if (!ob_optimizer_is_frozen(optimizer))
    return ob_error(
        ONEBIT_ERROR_UNSUPPORTED,
        "stream is capturing a graph, but the host does not know whether the warm-up is "
        "over: call onebit_optimizer_synchronize after its last step");
  return ONEBIT_OK;
}

onebit_status_t onebit_optimizer_step_stream(onebit_optimizer_t optimizer, float learning_rate,
                                             cudaStream_t stream) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  OB_TRY(check_device(optimizer));
  ob_step_check_form(optimizer, true);
  if (!optimizer->step.open)
    OB_TRY(check_capture(optimizer, stream));
  onebit_status_t status =
      ob_optimizer_note(optimizer, ob_optimizer_step_on(optimizer, learning_rate, true, stream));
  if (!ob_cuda_is_capturing(stream))
    ob_metrics_add_step(optimizer, learning_rate, status);
  return status;
}

onebit_status_t onebit_optimizer_begin_stream(onebit_optimizer_t optimizer, float learning_rate,
                                              cudaStream_t stream) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  OB_TRY(check_device(optimizer));
  if (!optimizer->step.open)
    OB_TRY(check_capture(optimizer, stream));
  OB_TRY(ob_optimizer_begin_on(optimizer, learning_rate, true));
  optimizer->step.captured = ob_cuda_is_capturing(stream);
  return ONEBIT_OK;
}

onebit_status_t onebit_optimizer_ready_stream(onebit_optimizer_t optimizer, size_t tensor,
                                              cudaStream_t stream) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  OB_TRY(check_device(optimizer));
  return ob_optimizer_ready_on(optimizer, tensor, true, stream);
}

/* Refuses a learning rate in device memory if the host takes part in a step and has to read the
 * rate. */
static onebit_status_t check_rate_pointer(const struct onebit_optimizer *optimizer,
                                          const float *rate) {
  if (optimizer->method->exchange)
    return ob_error(
        ONEBIT_ERROR_UNSUPPORTED,
        "rate is %p: %s needs the rate on the host, where it sums the rates of local steps",
        (const void *)rate, optimizer->method->name);
  if (!optimizer->deferred)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "rate is %p: over %s the host needs the rate, so it cannot be in device memory",
                    (const void *)rate, optimizer->comm->transport->name);
  if ((uintptr_t)rate % sizeof *rate)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "rate is %p, not aligned to float", (const void *)rate);
  return optimizer->bucket_count ? ob_cuda_check(optimizer->buckets[0].device->number, "rate", rate)
                                 : ONEBIT_OK;
}

onebit_status_t onebit_optimizer_set_learning_rate_pointer(onebit_optimizer_t optimizer,
                                                           const float *rate) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  OB_TRY(check_device(optimizer));
  if (optimizer->step.open)
    return ob_error(ONEBIT_ERROR_BUSY, "a step is open: onebit_optimizer_step ends it");
  OB_TRY(ob_optimizer_check_held(optimizer));
  if (rate)
    OB_TRY(check_rate_pointer(optimizer, rate));
  optimizer->rate = rate;
  return ONEBIT_OK;
}

onebit_status_t onebit_optimizer_synchronize(onebit_optimizer_t optimizer) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  OB_TRY(ob_optimizer_catch_up(optimizer));
  return ob_optimizer_end_outcome(optimizer);
}
