/*
 * A step in parts: opened, and told which gradients are final, so that a bucket is exchanged while
 * the backward pass goes on.
 *
 * A transport that puts messages on streams matches them by their order alone. There buckets leave
 * in one order on all ranks, that of a step in one go, however their tensors become ready: a bucket
 * leaves when it is full and those that come before it have left.
 */
#include "base/call_scope.h"
#include "base/error.h"
#include "base/process.h"
#include "optimizers/optimizer.h"

static onebit_status_t ready_open_step(struct onebit_optimizer *optimizer, float learning_rate,
                                       bool streamed) {
  ob_step_begin(optimizer, learning_rate);
  optimizer->step.on_stream = streamed || optimizer->deferred;
  if (optimizer->options.clip_norm == 0)
    OB_TRY(ob_step_weigh(optimizer));
  optimizer->step.open = true;
  optimizer->step.streamed = streamed;
  return ONEBIT_OK;
}

onebit_status_t ob_optimizer_begin_on(onebit_optimizer_t optimizer, float learning_rate,
                                      bool streamed) {
  if (optimizer->step.open)
    return ob_step_note(optimizer,
                        ob_error(ONEBIT_ERROR_ARGUMENT,
                                 "a step is open, with learning_rate %g: onebit_optimizer_step "
                                 "ends it",
                                 (double)optimizer->step.learning_rate));
  OB_TRY(ob_optimizer_check_held(optimizer));
  OB_TRY(ob_optimizer_check_rate(optimizer, learning_rate));
  double began = ob_seconds();
  if (ob_optimizer_must_catch_up(optimizer))
    OB_TRY(ob_optimizer_catch_up(optimizer));
  onebit_status_t status = ready_open_step(optimizer, learning_rate, streamed);
  optimizer->times.all += ob_seconds() - began;
  return status;
}

onebit_status_t onebit_optimizer_begin(onebit_optimizer_t optimizer, float learning_rate) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  return ob_optimizer_begin_on(optimizer, learning_rate, false);
}

static onebit_status_t ready_check_tensor(const struct onebit_optimizer *optimizer, size_t tensor) {
  if (tensor >= optimizer->tensor_count)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "tensor is %zu, and there are %zu", tensor,
                    optimizer->tensor_count);
  if (optimizer->tensors[tensor].ready)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "tensor %zu is ready a second time in one step", tensor);
  return ONEBIT_OK;
}

/* Clipping wants all gradients before the first can leave; and the last bucket waits for step. */
static bool may_start(const struct onebit_optimizer *optimizer, const struct ob_bucket *bucket) {
  return optimizer->options.clip_norm == 0 && bucket->waiting == 0 && !bucket->started &&
         optimizer->step.started + 1 < optimizer->step.senders;
}

static bool bucket_sends(const struct onebit_optimizer *optimizer, const struct ob_bucket *bucket) {
  return ob_bucket_exchange(optimizer, bucket) != OB_EXCHANGE_NONE;
}

/* Starts the buckets that are full, from the last on, up to one that is not. If no host drives the
 * transport, all of the exchange is put on the stream at once. */
static void start_in_order(struct onebit_optimizer *optimizer) {
  for (size_t u = optimizer->bucket_count; u-- > 0;) {
    struct ob_bucket *bucket = &optimizer->buckets[u];
    if (bucket->started || !bucket_sends(optimizer, bucket))
      continue;
    if (!may_start(optimizer, bucket))
      return;
    ob_step_start(optimizer, bucket);
    if (bucket->started && optimizer->comm->transport->put)
      ob_step_end_exchange(optimizer, bucket);
  }
}

static void note_ready(struct onebit_optimizer *optimizer, size_t tensor) {
  struct ob_bucket *bucket = &optimizer->buckets[optimizer->tensors[tensor].bucket];
  optimizer->tensors[tensor].ready = true;
  if (!optimizer->tensors[tensor].count || --bucket->waiting > 0)
    return;
  if (optimizer->deferred)
    start_in_order(optimizer);
  else if (bucket_sends(optimizer, bucket) && may_start(optimizer, bucket))
    ob_step_start(optimizer, bucket);
}

onebit_status_t ob_optimizer_ready_on(onebit_optimizer_t optimizer, size_t tensor, bool streamed,
                                      void *stream) {
  if (!optimizer->step.open)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "tensor %zu is ready, but no step is open: onebit_optimizer_begin opens one",
                    tensor);
  OB_TRY(ob_step_check_form(optimizer, streamed));
  OB_TRY(ob_step_note(optimizer, ready_check_tensor(optimizer, tensor)));
  double began = ob_seconds();
  onebit_status_t status = ob_step_note(optimizer, ob_step_follow(optimizer, stream));
  note_ready(optimizer, tensor);
  ob_engine_advance(optimizer->comm->engine);
  double seconds = ob_seconds() - began;
  optimizer->step.ready += seconds;
  optimizer->times.all += seconds;
  return status;
}

onebit_status_t onebit_optimizer_ready(onebit_optimizer_t optimizer, size_t tensor) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  return ob_optimizer_ready_on(optimizer, tensor, false, NULL);
}
