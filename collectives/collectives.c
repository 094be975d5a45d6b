/* The public collectives: their checks, and the functions that run a plan's steps. */
#include <inttypes.h>
#include <sched.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/process.h"
#include "collectives/plan_private.h"
#include "collectives/steps.h"

static onebit_status_t call_check_refused(const struct onebit_plan *plan) {
  if (!__atomic_load_n(plan->refused, __ATOMIC_RELAXED))
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_MESSAGE,
                  "an earlier call received an invalid message, so residuals and results may "
                  "differ between ranks: call onebit_plan_reset on all ranks, or load a "
                  "checkpoint");
}

static void flight_init(const struct onebit_plan *plan, const struct ob_call *call) {
  struct ob_flight *flight = plan->flight;
  flight->call = *call;
  flight->step = 0;
  flight->stop = call->hold ? plan->decided : plan->step_count;
  flight->failed_rank = flight->not_finite_rank = -1;
  flight->apply_early_ok = flight->large_elsewhere = false;
  flight->worker_scale = flight->server_scale = 0;
  flight->outcome.status = ONEBIT_OK;
  flight->watch = (struct ob_watch){0};
  flight->began = ob_log_wants(OB_LOG_TRACE) ? ob_seconds() : 0;
  flight->call_bytes = plan->wire_bytes; /* the end of the call may change wire_bytes */
}

onebit_status_t ob_plan_start(onebit_plan_t plan, onebit_status_t status,
                              const struct ob_call *call) {
  struct ob_plan_state *state = plan->state;
  OB_TRY(ob_plan_check_idle(plan));
  if (state->broken)
    return ob_error(ONEBIT_ERROR_TRANSPORT, "the plan's transport failed in an earlier call: %s",
                    plan->flight->outcome.error);
  OB_TRY(ob_comm_check(plan->comm));
  flight_init(plan, call);
  state->sequence++;
  if (ob_ladder_is_used(&state->ladder))
    ob_ladder_begin(plan);
  atomic_store_explicit(&state->work.not_finite, false, memory_order_relaxed);
  atomic_store_explicit(&state->work.large, state->server_large, memory_order_relaxed);
  if (status == ONEBIT_OK)
    status = call_check_refused(plan);
  if (status != ONEBIT_OK)
    ob_steps_fail(plan, status);
  if (plan->host.shared.base)
    ob_host_begin(plan);
  if (plan->executor->begin)
    ob_steps_fail(plan, plan->executor->begin(plan));
  state->in_flight = true;
  ob_engine_add(plan->comm->engine, plan);
  return ONEBIT_OK;
}

/* Waits a moment when no request could advance. If several requests are in flight, any of them may
 * be the next to advance. */
static void back_off(onebit_plan_t plan, unsigned idle) {
  const struct ob_transport *transport = plan->comm->transport;
  if (transport->await && ob_engine_waits_only_for(plan->comm->engine, plan->comm))
    transport->await(plan->comm, 1e-3);
  else
    ob_backoff(idle);
}

/* Runs the plan's steps: to the end of the list, or if `wait` is false until a step has to wait.
 * Returns true at the end of the list; this thread then holds the claim on the plan. While a step
 * waits for a message, the other requests in flight advance too, because a peer may need one of
 * them before it answers. So a step may block only if its request is the only one. */
static bool walk_steps(onebit_plan_t plan, bool wait) {
  struct ob_engine *engine = plan->comm->engine;
  for (unsigned idle = 0;; idle++) {
    bool moved = false, alone;
    if (ob_engine_claim(engine, plan, &alone)) {
      moved = ob_steps_walk(plan, wait && alone);
      if (plan->flight->step >= plan->flight->stop)
        return true;
      ob_engine_free(engine, plan);
    }
    if (ob_engine_advance(engine) || moved)
      idle = 0;
    else if (wait)
      back_off(plan, idle);
    if (!wait)
      return false;
  }
}

/* True if the plan has a held call (ob_call.hold) that has succeeded and still has to be
 * applied. */
static bool is_awaiting_apply(const struct onebit_plan *plan) {
  return plan->flight->call.hold && plan->flight->outcome.status == ONEBIT_OK;
}

/* Undoes a call. If residuals have one copy, the first message of the call has already changed
 * them. If results may already have overwritten the input, the call cannot be undone: its residuals
 * are committed. Results are applied only if no rank's input was at fault and all messages were
 * sent, so the residuals are the rounding errors of the values that were sent. */
static void call_undo(onebit_plan_t plan) {
  if (plan->flight->apply_early_ok && ob_residual_has_changed(&plan->state->worker))
    ob_residual_commit(&plan->state->worker), ob_residual_commit(&plan->state->server);
  else if (plan->executor->undo)
    plan->executor->undo(plan);
}

void ob_plan_revoke(onebit_plan_t plan) {
  if (is_awaiting_apply(plan))
    call_undo(plan);
}

static void end_call(onebit_plan_t plan) {
  if (ob_ladder_is_used(&plan->state->ladder))
    ob_ladder_apply_width(plan);
  if (plan->flight->outcome.status != ONEBIT_OK)
    call_undo(plan);
  if (plan->host.shared.base)
    ob_host_end(plan);
  if (plan->executor->end)
    plan->executor->end(plan);
}

static void log_call(onebit_plan_t plan) {
  struct ob_wait call = {.peer = -1};
  ob_plan_describe_call(plan, &call);
  ob_log(OB_LOG_TRACE, plan->comm->rank, "%s: %" PRIu64 " bytes sent, %.3f ms, %s", call.what,
         plan->flight->call_bytes, 1e3 * (ob_seconds() - plan->flight->began),
         onebit_status_string(plan->flight->outcome.status));
}

/* Ends the call of a plan that this thread has claimed. */
static onebit_status_t call_leave(onebit_plan_t plan) {
  ob_engine_remove(plan->comm->engine, plan);
  plan->state->in_flight = false;
  if (plan->flight->began > 0)
    log_call(plan);
  if (!is_awaiting_apply(plan))
    end_call(plan);
  return ob_outcome_status(&plan->flight->outcome);
}

/* Ends a call as if the transport had failed: the plan can make no further call. */
void ob_plan_abandon(onebit_plan_t plan) {
  if (!plan || !plan->state->in_flight)
    return;
  for (bool alone; !ob_engine_claim(plan->comm->engine, plan, &alone);)
    sched_yield();
  ob_engine_remove(plan->comm->engine, plan);
  ob_steps_give_up(plan);
  plan->state->in_flight = false;
  end_call(plan);
}

onebit_status_t ob_plan_test(onebit_plan_t plan, bool wait) {
  if (!walk_steps(plan, wait))
    return ONEBIT_IN_PROGRESS;
  if (ob_steps_are_settled(plan, wait))
    return call_leave(plan);
  ob_engine_free(plan->comm->engine, plan);
  return ONEBIT_IN_PROGRESS;
}

onebit_status_t ob_plan_put(onebit_plan_t plan) {
  walk_steps(plan, true);
  return ob_outcome_add(&plan->state->outcome, call_leave(plan));
}

onebit_status_t ob_plan_settle(onebit_plan_t plan) {
  ob_steps_are_settled(plan, true);
  onebit_status_t status = ob_outcome_status(&plan->state->outcome);
  plan->state->outcome.status = ONEBIT_OK;
  return status;
}

void ob_plan_run_pass(onebit_plan_t plan, const struct ob_pass_sink *sink) {
  const struct ob_executor *executor = plan->executor;
  const struct ob_pass_sink *own = plan->flight->call.sink;
  int before = executor->enter ? executor->enter(plan) : 0;
  plan->flight->call.sink = sink;
  for (size_t chunk = 0; chunk < plan->geometry.chunks; chunk++)
    executor->run[OB_STEP_APPLY](plan, chunk, true);
  plan->flight->call.sink = own;
  if (executor->leave)
    executor->leave(before);
}

onebit_status_t ob_plan_apply(onebit_plan_t plan) {
  if (plan->flight->call.hold) {
    plan->flight->stop = plan->step_count;
    while (plan->flight->step < plan->flight->stop)
      ob_steps_walk(plan, true);
    end_call(plan);
    if (plan->flight->call.outputs && !plan->flight->call.on_stream)
      ob_steps_are_settled(plan, true);
  }
  return ob_outcome_status(&plan->flight->outcome);
}

/* Counts the elements of the send buffer and of the receive buffer. */
static void count_buffer_elements(const struct onebit_plan *plan, size_t *send, size_t *receive) {
  size_t ranks = (size_t)plan->comm->size;
  bool scatter = plan->options.operation == ONEBIT_REDUCE_SCATTER;
  bool gather = plan->options.operation == ONEBIT_ALLGATHER;
  *send = plan->count * (scatter ? ranks : 1);
  *receive = plan->count * (gather ? ranks : 1);
}

static onebit_status_t check_pointer(const char *name, const void *buffer, size_t alignment) {
  if (!buffer)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is NULL", name);
  if ((uintptr_t)buffer % alignment)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is %p, not aligned to %zu bytes", name, buffer,
                    alignment);
  return ONEBIT_OK;
}

/* Fails if the buffers overlap, except in an in-place call, where the shorter buffer is this rank's
 * part of the longer one. */
static onebit_status_t check_overlap(const struct onebit_plan *plan, const void *sendbuf,
                                     const void *recvbuf) {
  size_t send, receive, size = ob_dtype_size(plan->options.dtype);
  count_buffer_elements(plan, &send, &receive);
  uintptr_t s = (uintptr_t)sendbuf, r = (uintptr_t)recvbuf;
  if (s + send * size <= r || r + receive * size <= s)
    return ONEBIT_OK;
  size_t part = (size_t)plan->comm->rank * plan->count * size;
  bool scatter = plan->options.operation == ONEBIT_REDUCE_SCATTER;
  bool gather = plan->options.operation == ONEBIT_ALLGATHER;
  if (s + (scatter ? part : 0) == r + (gather ? part : 0))
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_ARGUMENT,
                  "sendbuf %p and recvbuf %p overlap, but the call is not in place", sendbuf,
                  recvbuf);
}

static onebit_status_t call_check_buffers(const struct onebit_plan *plan, const void *sendbuf,
                                          const void *recvbuf) {
  if (plan->count == 0)
    return ONEBIT_OK;
  size_t alignment = ob_dtype_size(plan->options.dtype);
  OB_TRY(check_pointer("sendbuf", sendbuf, alignment));
  OB_TRY(check_pointer("recvbuf", recvbuf, alignment));
  OB_TRY(plan->executor->check(plan, "sendbuf", sendbuf));
  OB_TRY(plan->executor->check(plan, "recvbuf", recvbuf));
  return check_overlap(plan, sendbuf, recvbuf);
}

/* Sets the addresses of the pieces, which lie one after the other in one buffer. In an allgather it
 * also sets the addresses of all ranks' results. */
static void set_buffers(const struct onebit_plan *plan, const void *sendbuf, void *recvbuf) {
  size_t size = ob_dtype_size(plan->options.dtype), ranks = (size_t)plan->comm->size;
  for (size_t k = 0; k < plan->geometry.layout.pieces; k++) {
    const struct ob_piece *piece = &plan->geometry.layout.piece[k];
    size_t offset = k * piece->count * size; /* all pieces of one buffer have the same size */
    plan->inputs[k] = piece->valid ? (const char *)sendbuf + offset : NULL;
    plan->outputs[k] = piece->valid ? (char *)recvbuf + offset : NULL;
  }
  if (plan->options.operation == ONEBIT_REDUCE_SCATTER)
    plan->outputs[plan->comm->rank] = recvbuf;
  for (size_t r = 0; plan->options.operation == ONEBIT_ALLGATHER && r < ranks; r++)
    plan->outputs[r] = plan->count ? (char *)recvbuf + r * plan->count * size : NULL;
}

static struct ob_call make_buffer_call(const struct onebit_plan *plan) {
  return (struct ob_call){.source = {.inputs = plan->inputs, .factor = 1, .weight = 1},
                          .outputs = plan->outputs};
}

struct ob_call ob_plan_call(onebit_plan_t plan, const void *sendbuf, void *recvbuf) {
  set_buffers(plan, sendbuf, recvbuf);
  return make_buffer_call(plan);
}

/* Checks the arguments of a call on this rank. If they are wrong, the plan tells the other
 * ranks. */
static onebit_status_t check_call(const struct onebit_plan *plan, const void *sendbuf,
                                  const void *recvbuf, onebit_operation_t operation,
                                  const onebit_request_t *request, bool on_stream) {
  if (!request)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "request is NULL");
  if (on_stream && plan->options.device == ONEBIT_DEVICE_HOST)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "plan is for host memory, since its device option is ONEBIT_DEVICE_HOST");
  if (plan->options.operation != operation)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "plan is for %s, not for %s",
                    ob_operation_name(plan->options.operation), ob_operation_name(operation));
  return call_check_buffers(plan, sendbuf, recvbuf);
}

/* Starts a call. `stream` is used only if on_stream is true. */
static onebit_status_t call_start(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                  onebit_operation_t operation, onebit_request_t *request,
                                  bool on_stream, void *stream) {
  OB_TRY(ob_handle_check(plan, OB_HANDLE_PLAN, "plan"));
  OB_TRY(ob_plan_check_idle(plan));
  onebit_status_t status = check_call(plan, sendbuf, recvbuf, operation, request, on_stream);
  if (status == ONEBIT_OK)
    set_buffers(plan, sendbuf, recvbuf);
  struct ob_call call = make_buffer_call(plan);
  call.on_stream = on_stream;
  call.stream = stream;
  return ob_plan_start(plan, status, &call);
}

/* Starts a call and waits for its end. */
static onebit_status_t call_blocking(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                     onebit_operation_t operation) {
  onebit_request_t request;
  OB_TRY(call_start(sendbuf, recvbuf, plan, operation, &request, false, NULL));
  return ob_plan_test(plan, true);
}

onebit_status_t ob_collective_put(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                  onebit_operation_t operation, void *stream) {
  onebit_request_t request;
  OB_TRY(call_start(sendbuf, recvbuf, plan, operation, &request, true, stream));
  return ob_plan_put(plan);
}

/* Returns a request: the plan's address, with the number of the call in the bits that alignment
 * leaves zero. So a copy of a finished request is not mistaken for the request of a later call. */
static onebit_request_t encode_request(onebit_plan_t plan) {
  return (onebit_request_t)((char *)plan + 1 + plan->state->sequence % (OB_ALIGNMENT - 1));
}

static onebit_status_t call_check_request(onebit_request_t request, onebit_plan_t *plan) {
  *plan = (onebit_plan_t)((char *)request - (uintptr_t)request % OB_ALIGNMENT);
  if (ob_handle_is(*plan, OB_HANDLE_PLAN) && (*plan)->state->in_flight &&
      encode_request(*plan) == request)
    return ONEBIT_OK;
  return ob_handle_check(request, OB_HANDLE_REQUEST, "*request");
}

static onebit_status_t call_begin(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                  onebit_operation_t operation, onebit_request_t *request) {
  if (request)
    *request = NULL;
  OB_TRY(call_start(sendbuf, recvbuf, plan, operation, request, false, NULL));
  if (!request) /* without a request the caller cannot wait: tell the other ranks, end the call */
    return ob_plan_test(plan, true);
  ob_engine_advance(plan->comm->engine);
  *request = encode_request(plan);
  return ONEBIT_OK;
}

onebit_status_t onebit_allreduce(const void *sendbuf, void *recvbuf, onebit_plan_t plan) {
  OB_CALL_SCOPE;
  return call_blocking(sendbuf, recvbuf, plan, ONEBIT_ALLREDUCE);
}

onebit_status_t onebit_allgather(const void *sendbuf, void *recvbuf, onebit_plan_t plan) {
  OB_CALL_SCOPE;
  return call_blocking(sendbuf, recvbuf, plan, ONEBIT_ALLGATHER);
}

onebit_status_t onebit_reduce_scatter(const void *sendbuf, void *recvbuf, onebit_plan_t plan) {
  OB_CALL_SCOPE;
  return call_blocking(sendbuf, recvbuf, plan, ONEBIT_REDUCE_SCATTER);
}

onebit_status_t onebit_iallreduce(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                  onebit_request_t *request) {
  OB_CALL_SCOPE;
  return call_begin(sendbuf, recvbuf, plan, ONEBIT_ALLREDUCE, request);
}

onebit_status_t onebit_iallgather(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                  onebit_request_t *request) {
  OB_CALL_SCOPE;
  return call_begin(sendbuf, recvbuf, plan, ONEBIT_ALLGATHER, request);
}

onebit_status_t onebit_ireduce_scatter(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                       onebit_request_t *request) {
  OB_CALL_SCOPE;
  return call_begin(sendbuf, recvbuf, plan, ONEBIT_REDUCE_SCATTER, request);
}

static onebit_status_t call_end(onebit_request_t *request, bool wait) {
  OB_CALL_SCOPE;
  if (!request)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "request is NULL");
  if (!*request)
    return ONEBIT_OK;
  onebit_plan_t plan;
  OB_TRY(call_check_request(*request, &plan));
  onebit_status_t status = ob_plan_test(plan, wait);
  if (status != ONEBIT_IN_PROGRESS)
    *request = NULL;
  return status;
}

onebit_status_t onebit_test(onebit_request_t *request) { return call_end(request, false); }

onebit_status_t onebit_wait(onebit_request_t *request) { return call_end(request, true); }

onebit_status_t onebit_progress(onebit_comm_t comm) {
  OB_CALL_SCOPE_OF(comm, OB_HANDLE_COMM);
  ob_engine_advance(comm->engine);
  return ONEBIT_OK;
}
