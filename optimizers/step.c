/*
 * Makes a step: starts its exchanges, all at once or in parts, and applies the results.
 *
 * Every bucket is exchanged exactly once a step, so the messages of ranks match in any order. An
 * error of this rank must reach the other ranks with the messages of some bucket: therefore the
 * last bucket is never started before onebit_optimizer_step, which knows all errors.
 */
#include <math.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/log.h"
#include "base/process.h"
#include "optimizers/optimizer.h"

/* Returns the call of a dense exchange. It is held if a residual could change before all buckets'
 * exchanges have ended. */
static struct ob_call make_dense_call(const struct onebit_optimizer *optimizer,
                                      struct ob_bucket *bucket) {
  struct ob_call call = {.source = {.inputs = bucket->gradients,
                                    .factor = optimizer->step.gradient_factor,
                                    .weight = 1},
                         .outputs = bucket->means,
                         .shard = optimizer->method->sharded ? bucket->arrays[OB_SCRATCH] : NULL,
                         .rate = optimizer->rate,
                         .on_stream = optimizer->step.on_stream,
                         .stream = optimizer->step.stream,
                         .hold = optimizer->bucket_count > 1 &&
                                 (optimizer->deferred || ob_plan_is_compressed(bucket->dense))};
  ob_constants_agree(optimizer, optimizer->step.learning_rate, "learning_rate", &call);
  return call;
}

static struct ob_call make_bits_call(struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  struct ob_call call = make_dense_call(optimizer, bucket);
  call.outputs = NULL;
  optimizer->method->call(optimizer, bucket, &call);
  return call;
}

/* Returns the call of a warm-up step, which the method may change. */
static struct ob_call make_warmup_call(struct onebit_optimizer *optimizer,
                                       struct ob_bucket *bucket) {
  struct ob_call call = make_dense_call(optimizer, bucket);
  if (!bucket->uncompressed && optimizer->method->call_dense)
    optimizer->method->call_dense(optimizer, bucket, &call);
  return call;
}

static onebit_status_t step_prepare_bucket(struct onebit_optimizer *optimizer,
                                           struct ob_bucket *bucket) {
  double began = ob_seconds();
  onebit_status_t status = optimizer->method->prepare(optimizer, bucket);
  optimizer->step.prepare += ob_seconds() - began;
  return status;
}

/* Begins a bucket's exchange. */
static void step_start_bucket(struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  struct ob_step_state *step = &optimizer->step;
  bool bits = ob_bucket_exchange(optimizer, bucket) == OB_EXCHANGE_BITS;
  if (!bucket->uncompressed && optimizer->method->prepare)
    ob_step_note(optimizer, step_prepare_bucket(optimizer, bucket));
  struct ob_call call =
      bits ? make_bits_call(optimizer, bucket) : make_warmup_call(optimizer, bucket);
  if (optimizer->executor->prepare)
    ob_step_note(optimizer, optimizer->executor->prepare(optimizer, bucket, &call));
  /* The error message of the plan contains the message of this status. */
  onebit_status_t so_far = ob_outcome_status(&step->outcome);
  onebit_plan_t plan = bits ? bucket->bits : bucket->dense;
  uint64_t bytes = ob_plan_wire_bytes(plan); /* a call that ends at once may change the width */
  onebit_status_t status = ob_plan_start(plan, so_far, &call);
  optimizer->sent[bits ? OB_EXCHANGE_BITS : OB_EXCHANGE_DENSE] += bytes;
  bucket->started = status == ONEBIT_OK;
  ob_step_note(optimizer, status);
  step->started++;
}

/* Counts the time of an exchange that took `seconds` besides the time in onebit_optimizer_ready.
 * The time that plans did not spend on their own work counts as network time. This would be
 * negative if plans also worked elsewhere, in onebit_progress or in the progress thread; then 0 is
 * counted. */
static void step_count_times(struct onebit_optimizer *optimizer, double seconds) {
  struct ob_spent spent = {0};
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    const struct ob_spent bits = ob_plan_read_spent(optimizer->buckets[u].bits);
    const struct ob_spent dense = ob_plan_read_spent(optimizer->buckets[u].dense);
    spent.compress += bits.compress + dense.compress;
    spent.apply += bits.apply + dense.apply;
  }
  spent.compress += optimizer->step.prepare;
  double network = optimizer->step.ready + seconds - spent.compress - spent.apply;
  optimizer->times.compress += spent.compress;
  optimizer->times.update += spent.apply;
  optimizer->times.network += network > 0 ? network : 0;
}

/* Waits for a bucket's exchange, or puts it on its stream. */
static void step_end_exchange(struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  bool bits = ob_bucket_exchange(optimizer, bucket) == OB_EXCHANGE_BITS;
  onebit_plan_t plan = bits ? bucket->bits : bucket->dense;
  bucket->ended = true;
  ob_step_note(optimizer, optimizer->step.on_stream ? ob_plan_put(plan) : ob_plan_test(plan, true));
}

/* Starts the buckets that have not been started, the last one first, and waits for all buckets. */
static onebit_status_t step_exchange(struct onebit_optimizer *optimizer) {
  struct ob_step_state *step = &optimizer->step;
  double began = ob_seconds();
  for (size_t u = optimizer->bucket_count; u-- > 0;) {
    struct ob_bucket *bucket = &optimizer->buckets[u];
    if (!bucket->started && ob_bucket_exchange(optimizer, bucket) != OB_EXCHANGE_NONE)
      step_start_bucket(optimizer, bucket);
  }
  for (size_t u = optimizer->bucket_count; u-- > 0;)
    if (optimizer->buckets[u].started && !optimizer->buckets[u].ended)
      step_end_exchange(optimizer, &optimizer->buckets[u]);
  step->open = false;
  step_count_times(optimizer, ob_seconds() - began);
  return ob_outcome_status(&step->outcome);
}

static void set_learning_rates(struct onebit_optimizer *optimizer, float learning_rate) {
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    struct ob_bucket *bucket = &optimizer->buckets[u];
    for (size_t k = 0; k < ob_plan_layout(bucket->bits)->pieces; k++)
      bucket->learning_rates[k] = learning_rate * bucket->factors[k];
  }
}

/* Fails if a message was refused: a step that sends nothing would not notice it otherwise. */
static onebit_status_t step_check_refused(const struct onebit_optimizer *optimizer) {
  if (!__atomic_load_n(&optimizer->refused, __ATOMIC_RELAXED))
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_MESSAGE,
                  "an earlier step received an invalid message, so parameters may differ between "
                  "ranks: load a checkpoint");
}

onebit_status_t ob_optimizer_accept(struct onebit_optimizer *optimizer) {
  optimizer->refused = false;
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    OB_TRY(ob_plan_accept(optimizer->buckets[u].bits));
    OB_TRY(ob_plan_accept(optimizer->buckets[u].dense));
  }
  return optimizer->squares ? ob_plan_accept(optimizer->squares) : ONEBIT_OK;
}

/* Begins a new step, in which no tensor is ready. */
static void step_begin(struct onebit_optimizer *optimizer, float learning_rate) {
  optimizer->step = (struct ob_step_state){.learning_rate = optimizer->rate ? 0 : learning_rate,
                                           .exchange = ob_optimizer_exchange(optimizer)};
  ob_step_note(optimizer, ob_constants_apply(optimizer));
  set_learning_rates(optimizer, optimizer->step.learning_rate);
  for (size_t t = 0; t < optimizer->tensor_count; t++)
    optimizer->tensors[t].ready = false;
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    struct ob_bucket *bucket = &optimizer->buckets[u];
    bucket->waiting = bucket->filled;
    optimizer->step.senders += ob_bucket_exchange(optimizer, bucket) != OB_EXCHANGE_NONE;
    bucket->started = bucket->ended = false;
    (void)ob_plan_read_spent(bucket->bits), (void)ob_plan_read_spent(bucket->dense);
  }
  ob_step_note(optimizer, step_check_refused(optimizer));
}

/* Computes the factor of gradients, once per step; with clipping, once all gradients are ready. */
static onebit_status_t step_set_gradient_factor(onebit_optimizer_t optimizer) {
  optimizer->step.weighed = true;
  return ob_optimizer_set_gradient_factor(optimizer, ob_outcome_status(&optimizer->step.outcome));
}

static onebit_status_t step_check_rate(const struct onebit_optimizer *optimizer,
                                       float learning_rate) {
  if (!optimizer->rate && (!(learning_rate >= 0) || isinf(learning_rate)))
    return ob_error(ONEBIT_ERROR_ARGUMENT, "learning_rate is %g: it must be finite and at least 0",
                    (double)learning_rate);
  return ONEBIT_OK;
}

onebit_status_t ob_step_check_form(struct onebit_optimizer *optimizer, bool streamed) {
  if (!optimizer->step.open || optimizer->step.streamed == streamed)
    return ONEBIT_OK;
  return ob_step_note(optimizer,
                      ob_error(ONEBIT_ERROR_ARGUMENT, "the open step was begun with%s a stream",
                               optimizer->step.streamed ? "" : "out"));
}

/* Orders further work of the open step after the caller's stream, if the step is on a stream. */
static onebit_status_t step_follow_stream(struct onebit_optimizer *optimizer, void *stream) {
  if (!optimizer->step.on_stream || !optimizer->executor->follow)
    return ONEBIT_OK;
  return optimizer->executor->follow(optimizer, stream);
}

/* Fails if the rate differs from that of the open step, which its messages already contain. */
static onebit_status_t check_same_rate(const struct onebit_optimizer *optimizer, float rate) {
  float started = optimizer->step.learning_rate;
  if (optimizer->rate || ob_bits_of(rate) == ob_bits_of(started))
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_ARGUMENT,
                  "learning_rate is %.9g, but this step's onebit_optimizer_begin got %.9g",
                  (double)rate, (double)started);
}

void ob_step_revoke(struct onebit_optimizer *optimizer) {
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    ob_plan_revoke(optimizer->buckets[u].bits);
}

/* Ends a step whose results are not used; its exchanges may still be on a stream. */
static onebit_status_t step_give_up(onebit_optimizer_t optimizer, onebit_status_t status) {
  ob_step_revoke(optimizer);
  if (optimizer->step.on_stream && optimizer->executor->finish)
    ob_step_note(optimizer, optimizer->executor->finish(optimizer));
  if (status == ONEBIT_SKIPPED) {
    ob_log(OB_LOG_INFO, optimizer->comm->rank, "%s: a step after step %llu is skipped: %s",
           optimizer->method->name, (unsigned long long)optimizer->steps, onebit_last_error());
    optimizer->skipped++;
    optimizer->skipped_by_norm++;
    ob_optimizer_adjust_loss_scale(optimizer, 0, 1);
  }
  return status;
}

static onebit_status_t update_uncompressed(onebit_optimizer_t optimizer) {
  const struct ob_method *method = optimizer->method;
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    if (optimizer->buckets[u].uncompressed && method->dense)
      OB_TRY(method->dense(optimizer, &optimizer->buckets[u]));
    else if (optimizer->buckets[u].uncompressed && method->dense_pass)
      OB_TRY(ob_bucket_run_pass(optimizer, &optimizer->buckets[u], method->dense_pass,
                                optimizer->steps + 1));
  return ONEBIT_OK;
}

/* Updates the state after the exchange. A step that is made may still return an error on this rank
 * alone; then only this rank changes its loss scale. */
static onebit_status_t step_update(onebit_optimizer_t optimizer) {
  if (optimizer->executor->join)
    OB_TRY(optimizer->executor->join(optimizer));
  OB_TRY(optimizer->method->update(optimizer));
  OB_TRY(update_uncompressed(optimizer));
  optimizer->exchanges[optimizer->step.exchange]++;
  optimizer->steps++;
  if (optimizer->deferred) {
    optimizer->unknown++;
  } else {
    onebit_status_t alone = optimizer->step.outcome.status;
    ob_optimizer_adjust_loss_scale(optimizer, alone == ONEBIT_OK, alone == ONEBIT_SKIPPED);
    OB_TRY(ob_optimizer_advance(optimizer));
  }
  if (optimizer->executor->finish)
    OB_TRY(optimizer->executor->finish(optimizer));
  return ob_outcome_status(&optimizer->step.outcome);
}

/* Compares the ranks' parameters if that is due, before other collective work of the step. */
static void step_compare_parameters(onebit_optimizer_t optimizer) {
  if (ob_optimizer_must_compare(optimizer))
    ob_step_note(optimizer,
                 ob_optimizer_compare(optimizer, ob_outcome_status(&optimizer->step.outcome)));
}

/* Opens the step on the caller's stream, or without one. If it is open already, checks the rate and
 * follows the stream. */
static void step_open(onebit_optimizer_t optimizer, float learning_rate, bool on_stream,
                      void *stream) {
  if (optimizer->step.open) {
    ob_step_note(optimizer, check_same_rate(optimizer, learning_rate));
    ob_step_note(optimizer, step_follow_stream(optimizer, stream));
    return;
  }
  step_begin(optimizer, learning_rate);
  ob_step_note(optimizer, step_check_rate(optimizer, learning_rate));
  optimizer->step.on_stream = on_stream;
  optimizer->step.stream = stream;
}

static onebit_status_t make_step(onebit_optimizer_t optimizer, float learning_rate, bool on_stream,
                                 void *stream) {
  if (ob_optimizer_must_catch_up(optimizer))
    OB_TRY(ob_optimizer_catch_up(optimizer));
  step_open(optimizer, learning_rate, on_stream, stream);
  step_compare_parameters(optimizer);
  if (!optimizer->step.weighed)
    ob_step_note(optimizer, step_set_gradient_factor(optimizer));
  onebit_status_t status = step_exchange(optimizer);
  /* A step that sends nothing counts as made on the other ranks, even if it failed here. */
  if (status != ONEBIT_OK && !ob_optimizer_sends_nothing(optimizer))
    return step_give_up(optimizer, status);
  double began = ob_seconds();
  status = step_update(optimizer);
  optimizer->times.update += ob_seconds() - began;
  return status;
}

onebit_status_t ob_optimizer_step_on(onebit_optimizer_t optimizer, float learning_rate,
                                     bool on_stream, void *stream) {
  double began = ob_seconds();
  OB_TRY(ob_optimizer_check_held(optimizer));
  onebit_status_t status = make_step(optimizer, learning_rate, on_stream, stream);
  optimizer->times.all += ob_seconds() - began;
  return status;
}

/* Makes a step and waits for it. Returns the status of this step only: the outcome of earlier steps
 * on streams is kept for onebit_optimizer_synchronize. */
static onebit_status_t make_step_and_wait(onebit_optimizer_t optimizer, float learning_rate) {
  OB_TRY(ob_optimizer_catch_up(optimizer));
  struct ob_outcome before = optimizer->outcome;
  optimizer->outcome.status = ONEBIT_OK;
  ob_optimizer_note(optimizer, ob_optimizer_step_on(optimizer, learning_rate, true, NULL));
  double began = ob_seconds();
  onebit_status_t status = ob_optimizer_catch_up(optimizer);
  optimizer->times.all += ob_seconds() - began;
  if (status == ONEBIT_OK)
    status = ob_optimizer_end_outcome(optimizer);
  optimizer->outcome = before;
  return status;
}

onebit_status_t onebit_optimizer_step(onebit_optimizer_t optimizer, float learning_rate) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  ob_step_check_form(optimizer, false);
  onebit_status_t status = optimizer->deferred
                               ? make_step_and_wait(optimizer, learning_rate)
                               : ob_optimizer_step_on(optimizer, learning_rate, false, NULL);
  if (optimizer->metrics)
    ob_metrics_add_step(optimizer, learning_rate, status);
  return status;
}

void ob_optimizer_abandon(onebit_optimizer_t optimizer) {
  if (!optimizer->step.open)
    return;
  ob_step_note(optimizer, ob_error(ONEBIT_ERROR_ARGUMENT,
                                   "the optimizer was destroyed while a step was open"));
  step_compare_parameters(optimizer);
  if (!optimizer->step.weighed)
    ob_step_note(optimizer, step_set_gradient_factor(optimizer));
  step_exchange(optimizer);
}

/* --- Steps in parts: the caller opens a step and says which gradients are ready, so that buckets
 * are exchanged while the backward pass continues.
 *
 * A transport that puts messages on streams matches them only by their order. With such a transport
 * all ranks send buckets in the order of a step that is not in parts: a bucket is sent when all of
 * its tensors are ready and the buckets before it have been sent. */

static onebit_status_t open_step_in_parts(struct onebit_optimizer *optimizer, float learning_rate,
                                          bool streamed) {
  step_begin(optimizer, learning_rate);
  optimizer->step.on_stream = streamed || optimizer->deferred;
  if (optimizer->options.clip_norm == 0)
    OB_TRY(step_set_gradient_factor(optimizer));
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
  OB_TRY(step_check_rate(optimizer, learning_rate));
  double began = ob_seconds();
  if (ob_optimizer_must_catch_up(optimizer))
    OB_TRY(ob_optimizer_catch_up(optimizer));
  onebit_status_t status = open_step_in_parts(optimizer, learning_rate, streamed);
  optimizer->times.all += ob_seconds() - began;
  return status;
}

onebit_status_t onebit_optimizer_begin(onebit_optimizer_t optimizer, float learning_rate) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  return ob_optimizer_begin_on(optimizer, learning_rate, false);
}

static onebit_status_t ready_check_tensor(const struct onebit_optimizer *optimizer, size_t tensor) {
  OB_TRY(ob_check_tensor(tensor, optimizer->tensor_count));
  if (optimizer->tensors[tensor].ready)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "tensor %zu is ready a second time in one step", tensor);
  return ONEBIT_OK;
}

/* Returns true if the bucket can be started now. Clipping needs all gradients before the first
 * bucket can be sent; the last bucket waits for onebit_optimizer_step. */
static bool can_start(const struct onebit_optimizer *optimizer, const struct ob_bucket *bucket) {
  return optimizer->options.clip_norm == 0 && bucket->waiting == 0 && !bucket->started &&
         optimizer->step.started + 1 < optimizer->step.senders;
}

static bool bucket_sends(const struct onebit_optimizer *optimizer, const struct ob_bucket *bucket) {
  return ob_bucket_exchange(optimizer, bucket) != OB_EXCHANGE_NONE;
}

/* Starts the buckets whose tensors are all ready, from the last one on, up to one that is not. If
 * the host does not drive the transport, the whole exchange is put on the stream at once. */
static void start_buckets_in_order(struct onebit_optimizer *optimizer) {
  for (size_t u = optimizer->bucket_count; u-- > 0;) {
    struct ob_bucket *bucket = &optimizer->buckets[u];
    if (bucket->started || !bucket_sends(optimizer, bucket))
      continue;
    if (!can_start(optimizer, bucket))
      return;
    step_start_bucket(optimizer, bucket);
    if (bucket->started && optimizer->comm->transport->put)
      step_end_exchange(optimizer, bucket);
  }
}

static void mark_ready(struct onebit_optimizer *optimizer, size_t tensor) {
  struct ob_bucket *bucket = &optimizer->buckets[optimizer->tensors[tensor].bucket];
  optimizer->tensors[tensor].ready = true;
  if (!optimizer->tensors[tensor].count || --bucket->waiting > 0)
    return;
  if (optimizer->deferred)
    start_buckets_in_order(optimizer);
  else if (bucket_sends(optimizer, bucket) && can_start(optimizer, bucket))
    step_start_bucket(optimizer, bucket);
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
  onebit_status_t status = ob_step_note(optimizer, step_follow_stream(optimizer, stream));
  mark_ready(optimizer, tensor);
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
