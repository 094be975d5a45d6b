/* Creates, destroys and describes plans, and exports, imports and resets their residuals. */
#include "collectives/plan_private.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/knobs.h"
#include "base/log.h"
#include "base/memory.h"
#include "collectives/communicator.h"

/* The index of the last term below, the number of messages, which may differ between devices and
 * CPUs. */
#define TERM_MESSAGES 14

/* Compares the arguments that must be the same on all ranks. With the terms, each rank sends the
 * others the name of its shared memory. */
static onebit_status_t agree_on_plan(onebit_comm_t comm, onebit_status_t status,
                                     const struct ob_plan_shape *shape, size_t count,
                                     const struct onebit_plan *plan) {
  const onebit_plan_options_t *options = &shape->options;
  const struct ob_term terms[] = {
      {"count", count},
      {"operation", (uint64_t)options->operation},
      {"dtype", (uint64_t)options->dtype},
      {"wire", (uint64_t)options->wire},
      {"profile", (uint64_t)options->profile},
      {"scale", (uint64_t)options->scale},
      {"block_size", options->block_size},
      {"chunk_size", options->chunk_size},
      {"bits", (uint64_t)options->bits},
      {"max_bits", (uint64_t)options->max_bits},
      {"no_error_feedback", (uint64_t)options->no_error_feedback},
      {"the number of tensors in a bucket", shape->pieces},
      {"schedule", (uint64_t)options->schedule},
      {"the schedule that ranks chose by their devices and costs (set schedule to "
       "ONEBIT_SCHEDULE_EXCHANGE)",
       plan ? (uint64_t)plan->choice.schedule : 0},
      [TERM_MESSAGES] = {"the number of messages per call", plan ? plan->geometry.chunks : 0},
  };
  return ob_agree_noting(comm, status, terms, sizeof terms / sizeof terms[0],
                         plan ? plan->host.shared.name : 0);
}

/* The second half of creation, if ranks share memory: every rank has allocated its block, and now
 * attaches the blocks of the others. */
static onebit_status_t attach_host_memory(struct onebit_plan *plan) {
  onebit_status_t status = ob_host_attach(plan);
  if (status == ONEBIT_OK && plan->executor->attached)
    status = plan->executor->attached(plan);
  status = ob_agree(plan->comm, status, NULL, 0);
  ob_shared_unlink(&plan->host.shared);
  return status;
}

/* Prints the explanation of the plan's choices if the environment asks for it. */
static void print_explanation(const struct onebit_plan *plan) {
  int asked = 0;
  char wire[32] = "dense";
  if (plan->options.wire != ONEBIT_WIRE_DENSE)
    snprintf(wire, sizeof wire, "%u..%u bits", plan->state->ladder.min, plan->state->ladder.max);
  ob_log(OB_LOG_INFO, plan->comm->rank,
         "plan %" PRIu64 ": %zu elements, schedule %s, %s, %zu messages, %" PRIu64
         " bytes per call, codec %s",
         plan->number, plan->count, ob_cost_schedule_name(plan->choice.schedule), wire,
         plan->geometry.chunks, plan->wire_bytes, plan->state->work.codec->name);
  if (plan->comm->rank != 0)
    return;
  if (ob_knob_number(OB_KNOB_EXPLAIN, 0, 1, 0, &asked) == ONEBIT_OK && asked)
    fprintf(stderr, "onebit: a plan of %zu elements on %d ranks\n%s", plan->count, plan->comm->size,
            plan->choice.text);
}

/* A plan with its call and its state, allocated together. */
struct whole {
  struct onebit_plan plan;
  struct ob_flight flight;
  struct ob_plan_state state;
};

/* Builds this rank's part of the plan, and compares its terms with those of the other ranks. */
static onebit_status_t propose_terms(onebit_comm_t comm, onebit_status_t status,
                                     const struct ob_plan_shape *shape, size_t count,
                                     struct onebit_plan **result) {
  struct onebit_plan *plan = NULL;
  if (status == ONEBIT_OK) {
    struct whole *whole = ob_handle_create(OB_HANDLE_PLAN, sizeof *whole);
    if (whole) {
      plan = &whole->plan;
      plan->flight = &whole->flight;
      plan->state = &whole->state;
      plan->comm = ob_comm_add_user(comm);
      plan->number = comm->plans;
      plan->count = count;
      plan->refused = shape->refused ? shape->refused : &plan->state->refused;
      plan->memory_bytes = sizeof *whole;
      status = ob_plan_build(plan, shape);
    } else {
      status = ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a plan");
    }
  }
  *result = plan;
  return agree_on_plan(comm, status, shape, count, plan);
}

/* Builds the plan again with as many messages as plans on CPUs have. The first attempt found that
 * ranks differ only in the number of messages: some ranks use devices and others CPUs. */
static onebit_status_t propose_host_messages(onebit_comm_t comm, const struct ob_plan_shape *shape,
                                             size_t count, struct onebit_plan **plan) {
  struct ob_plan_shape mixed = *shape;
  mixed.among_hosts = true;
  ob_plan_release(*plan);
  return propose_terms(comm, ONEBIT_OK, &mixed, count, plan);
}

onebit_status_t ob_plan_create(onebit_comm_t comm, onebit_status_t status,
                               const struct ob_plan_shape *shape, size_t count,
                               onebit_plan_t *result) {
  struct onebit_plan *plan = NULL;
  comm->plans++;
  status = propose_terms(comm, status, shape, count, &plan);
  if (status == ONEBIT_ERROR_MISMATCH && ob_agree_differed_only(comm, TERM_MESSAGES))
    status = propose_host_messages(comm, shape, count, &plan);
  if (status == ONEBIT_OK && plan->host.shared.base)
    status = attach_host_memory(plan);
  if (status == ONEBIT_OK && plan->window)
    status = ob_agree(comm, comm->transport->window_register(plan->window), NULL, 0);
  if (status != ONEBIT_OK) {
    ob_plan_release(plan);
    plan = NULL;
  } else {
    plan->tag = ob_comm_tag(comm);
  }
  if (plan)
    print_explanation(plan);
  if (result)
    *result = plan;
  return status;
}

static size_t least_common_multiple(size_t a, size_t b) {
  size_t x = a, y = b;
  while (y) {
    size_t remainder = x % y;
    x = y;
    y = remainder;
  }
  return a / x * b;
}

/* Returns the number of elements with padding. DeepSpeed pads to a multiple of ranks * lcm(ranks,
 * 8) (runtime/fp16/onebit/adam.py, corrected_tensor_size). */
size_t ob_plan_pad_count(size_t ranks, size_t count) {
  size_t quantum = ranks * least_common_multiple(ranks, 8);
  return (count + quantum - 1) / quantum * quantum;
}

void ob_plan_cut(struct ob_plan_shape *shape, size_t ranks, size_t count, size_t *counts,
                 size_t *valid) {
  bool deepspeed = shape->options.profile == ONEBIT_PROFILE_DEEPSPEED;
  shape->segment_a_piece = deepspeed || shape->options.operation == ONEBIT_REDUCE_SCATTER;
  shape->pieces = shape->segment_a_piece ? ranks : 1;
  shape->counts = counts;
  shape->valid = valid;
  size_t part = deepspeed ? ob_plan_pad_count(ranks, count) / ranks : count;
  for (size_t k = 0; k < shape->pieces; k++) {
    size_t before = deepspeed ? k * part : 0;
    size_t left = before < count ? count - before : 0;
    counts[k] = part;
    valid[k] = left < part ? left : part;
  }
}

static onebit_status_t check_count(const struct ob_plan_shape *shape, size_t ranks, size_t count) {
  size_t buffers = shape->options.operation == ONEBIT_ALLREDUCE ? 1 : ranks;
  /* 16 bytes per element are enough for residuals and messages, whose sizes must fit a size_t. */
  if (count > SIZE_MAX / 16 / buffers - ranks * 8 * ranks)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "count is %zu, which is too large to address, since a buffer has %zu times as "
                    "many elements",
                    count, buffers);
  return ONEBIT_OK;
}

onebit_status_t ob_plan_create_numbers(onebit_comm_t comm, onebit_status_t status,
                                       onebit_operation_t operation, onebit_device_t device,
                                       size_t count, bool *refused, onebit_plan_t *plan) {
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  struct ob_plan_shape shape;
  size_t counts, valid;
  options.operation = operation;
  options.wire = ONEBIT_WIRE_DENSE;
  options.device = device;
  options.threads = 1;
  if (operation == ONEBIT_ALLREDUCE)
    options.schedule = ONEBIT_SCHEDULE_ALLGATHER; /* one latency, and every device supports it */
  const onebit_status_t resolved = ob_plan_resolve(&options, &shape);
  shape.refused = refused;
  ob_plan_cut(&shape, 1, count, &counts, &valid);
  return ob_plan_create(comm, status == ONEBIT_OK ? resolved : status, &shape, count, plan);
}

onebit_status_t onebit_plan_create(onebit_comm_t comm, size_t count,
                                   const onebit_plan_options_t *options, onebit_plan_t *plan) {
  OB_CALL_SCOPE;
  if (plan)
    *plan = NULL;
  OB_TRY(ob_handle_check(comm, OB_HANDLE_COMM, "comm"));
  size_t ranks = (size_t)comm->size;
  struct ob_plan_shape shape;
  onebit_status_t status = ob_plan_resolve(options, &shape);
  if (status == ONEBIT_OK && !plan)
    status = ob_error(ONEBIT_ERROR_ARGUMENT, "plan is NULL");
  if (status == ONEBIT_OK)
    status = check_count(&shape, ranks, count);
  size_t *counts = ob_allocate(2 * ranks, sizeof *counts);
  if (counts)
    ob_plan_cut(&shape, ranks, count, counts, counts + ranks);
  else if (status == ONEBIT_OK)
    status = ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a plan");
  status = ob_plan_create(comm, status, &shape, count, plan);
  ob_release(counts);
  return status;
}

onebit_status_t onebit_plan_destroy(onebit_plan_t plan) {
  OB_CALL_SCOPE;
  if (!plan)
    return ONEBIT_OK;
  OB_TRY(ob_handle_check(plan, OB_HANDLE_PLAN, "plan"));
  OB_TRY(ob_plan_check_idle(plan));
  ob_plan_release(plan);
  return ONEBIT_OK;
}

onebit_status_t onebit_plan_get_info(onebit_plan_t plan, onebit_plan_info_t *info) {
  OB_CALL_SCOPE_OF(plan, OB_HANDLE_PLAN);
  OB_TRY(ob_size_check("info", info, sizeof *info));
  *info = (onebit_plan_info_t){
      .size = sizeof *info,
      .worker_residual_start =
          ob_layout_elements_before(&plan->geometry.layout, plan->state->worker.first),
      .worker_residual_count = ob_residual_elements(&plan->state->worker, &plan->geometry.layout),
      .server_residual_count = ob_residual_elements(&plan->state->server, &plan->geometry.layout),
      .server_residual_start =
          ob_layout_elements_before(&plan->geometry.layout, plan->state->server.first),
      .block_size = plan->options.block_size,
      .chunks = plan->geometry.chunks,
      .wire_bytes = plan->wire_bytes,
      .memory_bytes = plan->memory_bytes,
      .codec = plan->executor->codec ? plan->executor->codec : plan->state->work.codec->name,
      .transport = plan->comm->transport->name,
      .schedule = plan->choice.schedule,
      .wire = plan->options.wire,
      .chunk_size = ob_plan_longest_message(plan),
      .hosts = plan->comm->hosts.count,
      .ranks_per_host = plan->comm->hosts.each,
      .bits = (int)plan->geometry.width,
      .min_bits = (int)plan->state->ladder.min,
      .max_bits = (int)plan->state->ladder.max,
      .moves = plan->state->ladder.state.moves,
      .residual_ratio = plan->state->ladder.state.ratio,
  };
  return ONEBIT_OK;
}

const char *onebit_plan_explain(onebit_plan_t plan) {
  bool is_plan = ob_handle_check(plan, OB_HANDLE_PLAN, "plan") == ONEBIT_OK;
  return is_plan ? plan->choice.text : "";
}

/* --- Export, import and reset of residuals -----------------------------------------------------*/

/* Fails if the plan has a call in flight, since its residual cannot be read then. Waits for work on
 * a stream. */
static onebit_status_t plan_residual_check_idle(onebit_plan_t plan) {
  OB_TRY(ob_handle_check(plan, OB_HANDLE_PLAN, "plan"));
  OB_TRY(ob_plan_check_idle(plan));
  ob_steps_are_settled(plan, true);
  return ONEBIT_OK;
}

onebit_status_t ob_plan_note_import(onebit_plan_t plan, bool large) {
  plan->state->server_large = large;
  return plan->executor->imported ? plan->executor->imported(plan) : ONEBIT_OK;
}

onebit_status_t onebit_plan_export_residual(onebit_plan_t plan, float *worker, float *server) {
  OB_CALL_SCOPE;
  OB_TRY(plan_residual_check_idle(plan));
  if (!ob_plan_is_compressed(plan)) /* a dense plan has no residuals */
    return ONEBIT_OK;
  if (worker)
    OB_TRY(ob_residual_export(&plan->state->worker, &plan->geometry.layout, worker));
  if (server)
    OB_TRY(ob_residual_export(&plan->state->server, &plan->geometry.layout, server));
  return ONEBIT_OK;
}

static onebit_status_t plan_residual_check_finite(const char *name, const float *values,
                                                  size_t count) {
  for (size_t i = 0; values && i < count; i++)
    if (!ob_is_finite(values[i]))
      return ob_error(ONEBIT_ERROR_ARGUMENT, "%s[%zu] is %g, not finite", name, i,
                      (double)values[i]);
  return ONEBIT_OK;
}

static bool has_large_value(const float *values, size_t count) {
  for (size_t i = 0; i < count; i++)
    if (fabsf(values[i]) >= OB_LARGE_SCALE)
      return true;
  return false;
}

onebit_status_t onebit_plan_import_residual(onebit_plan_t plan, const float *worker,
                                            const float *server) {
  OB_CALL_SCOPE;
  OB_TRY(plan_residual_check_idle(plan));
  if (!ob_plan_is_compressed(plan))
    return ONEBIT_OK;
  OB_TRY(plan_residual_check_finite(
      "worker", worker, ob_residual_elements(&plan->state->worker, &plan->geometry.layout)));
  OB_TRY(plan_residual_check_finite(
      "server", server, ob_residual_elements(&plan->state->server, &plan->geometry.layout)));
  if (worker)
    OB_TRY(ob_residual_import(&plan->state->worker, &plan->geometry.layout, worker));
  if (!server)
    return ob_plan_note_import(plan, plan->state->server_large);
  OB_TRY(ob_residual_import(&plan->state->server, &plan->geometry.layout, server));
  return ob_plan_note_import(
      plan,
      has_large_value(server, ob_residual_elements(&plan->state->server, &plan->geometry.layout)));
}

onebit_status_t ob_plan_accept(onebit_plan_t plan) {
  *plan->refused = false;
  ob_ladder_reset(plan);
  return plan->executor->accept ? plan->executor->accept(plan) : ONEBIT_OK;
}

static onebit_status_t plan_residual_reset(onebit_plan_t plan) {
  OB_TRY(ob_residual_reset(&plan->state->worker));
  OB_TRY(ob_residual_reset(&plan->state->server));
  return ob_plan_note_import(plan, false);
}

onebit_status_t onebit_plan_reset_residual(onebit_plan_t plan) {
  OB_CALL_SCOPE;
  OB_TRY(plan_residual_check_idle(plan));
  return ob_plan_is_compressed(plan) ? plan_residual_reset(plan) : ONEBIT_OK;
}

static onebit_status_t clear_results(const struct onebit_plan *plan) {
  size_t first, end;
  ob_plan_own_results(plan, &first, &end);
  for (size_t segment = first; segment < end; segment++)
    for (size_t chunk = 0; chunk < plan->geometry.chunks; chunk++) {
      struct ob_message_shape shape = ob_plan_last_message(plan, segment, chunk);
      OB_TRY(plan->executor->messages->clear(ob_plan_result(plan, false, segment, chunk),
                                             ob_message_bytes(&shape)));
    }
  return ONEBIT_OK;
}

/* Clears the state that calls have left. The first copy of the residuals becomes the current one:
 * until compressed messages are sent, it is an optimizer's momentum. */
onebit_status_t ob_plan_restart(onebit_plan_t plan, uint64_t last_width) {
  if (ob_ladder_is_used(&plan->state->ladder))
    plan->state->last_width = ob_ladder_width_in(plan, last_width);
  plan->state->worker.now = plan->state->server.now = 0;
  OB_TRY(plan_residual_reset(plan));
  return plan->momentum ? clear_results(plan) : ONEBIT_OK;
}

onebit_status_t ob_plan_return_residual(onebit_plan_t plan) {
  OB_TRY(onebit_plan_reset_residual(plan));
  ob_residual_return_memory(&plan->state->worker);
  ob_residual_return_memory(&plan->state->server);
  return ONEBIT_OK;
}

onebit_status_t onebit_plan_reset(onebit_plan_t plan) {
  OB_CALL_SCOPE;
  OB_TRY(onebit_plan_reset_residual(plan));
  return ob_plan_accept(plan);
}
