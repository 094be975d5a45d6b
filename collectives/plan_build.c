/* Builds a plan: its layout, steps, messages and residuals, and the memory of all of them. */
#include "collectives/plan_private.h"

#include <stdatomic.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/log.h"
#include "base/memory.h"
#include "collectives/messages.h"

/* The size in bytes of a buffer from which on residuals and results are written with non-temporal
 * stores. If they were cached, they would only evict data that is read again. Measured with
 * onebit-bench codec; the results of calls do not depend on it. */
#define STREAM_BYTES ((size_t)16 << 20)

static onebit_status_t report_plan_out_of_memory(const struct onebit_plan *plan) {
  return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a plan of %zu elements", plan->count);
}

static void *plan_build_allocate_from(struct onebit_plan *plan, const struct ob_memory *memory,
                                      size_t count, size_t size) {
  plan->memory_bytes += count * size;
  return memory->allocate(count, size);
}

static void *plan_build_allocate(struct onebit_plan *plan, size_t count, size_t size) {
  return plan_build_allocate_from(plan, &ob_memory_host, count, size);
}

static onebit_status_t allocate_residual(struct onebit_plan *plan,
                                         const struct ob_plan_shape *shape) {
  const struct ob_work *work = &plan->state->work;
  size_t first, end;
  ob_plan_find_compressed(plan, &first, &end);
  if (plan->momentum) { /* before compressed calls the residual is an optimizer's momentum */
    first = 0;
    end = plan->geometry.layout.blocks;
  }
  const struct ob_memory *memory = plan->executor->residuals;
  const struct ob_layout *layout = &plan->geometry.layout;
  const int copies = plan->options.residual_copies;
  OB_TRY(ob_residual_create(&plan->state->worker, layout, first, end, work->one_scale,
                            plan->moments, copies, memory));
  OB_TRY(ob_residual_create(&plan->state->server, layout, plan->sizes.reduced_first,
                            plan->sizes.reduced_end, work->one_scale, false,
                            shape->serving.rule == OB_SERVE_MEAN ? copies : 2, memory));
  plan->state->server.serving = shape->serving;
  if (plan->options.profile == ONEBIT_PROFILE_DEFAULT && plan->options.bits == 1) {
    plan->state->server.result_dtype = work->output_dtype;
    if (plan->options.operation == ONEBIT_ALLGATHER)
      plan->state->worker.result_dtype = work->output_dtype;
  }
  plan->memory_bytes +=
      ob_residual_bytes(&plan->state->worker) + ob_residual_bytes(&plan->state->server);
  if (!work->one_scale)
    return ONEBIT_OK;
  plan->state->worker_sums =
      plan_build_allocate_from(plan, memory, plan->state->worker.blocks, sizeof(double));
  plan->state->server_sums =
      plan_build_allocate_from(plan, memory, plan->state->server.blocks, sizeof(double));
  return plan->state->worker_sums && plan->state->server_sums ? ONEBIT_OK
                                                              : report_plan_out_of_memory(plan);
}

/* Allocates the messages of `count` ranks; the result is NULL if count is 0. */
static onebit_status_t allocate_member_messages(struct onebit_plan *plan, size_t count,
                                                unsigned char **memory) {
  struct ob_window *window = plan->window;
  if (!count)
    return ONEBIT_OK;
  if (window) {
    *memory = window->memory + window->used;
    window->used += count * plan->geometry.peer_stride;
    return ONEBIT_OK;
  }
  *memory =
      plan_build_allocate_from(plan, plan->executor->messages, count, plan->geometry.peer_stride);
  return *memory ? ONEBIT_OK : report_plan_out_of_memory(plan);
}

static onebit_status_t allocate_window(struct onebit_plan *plan) {
  const struct ob_transport *transport = plan->comm->transport;
  size_t results = plan->sizes.results * (plan->momentum ? 2 : 1);
  size_t bytes =
      (plan->sizes.outgoing + plan->sizes.incoming + results) * plan->geometry.peer_stride;
  if (!transport->window_create || !plan->executor->deferred)
    return ONEBIT_OK;
  OB_TRY(transport->window_create(plan->comm, bytes, &plan->window));
  plan->memory_bytes += plan->window ? bytes : 0;
  return ONEBIT_OK;
}

static onebit_status_t allocate_messages(struct onebit_plan *plan) {
  struct ob_geometry *geometry = &plan->geometry;
  size_t results = plan->sizes.results;
  OB_TRY(allocate_window(plan));
  OB_TRY(allocate_member_messages(plan, plan->sizes.outgoing, &geometry->outgoing));
  OB_TRY(allocate_member_messages(plan, plan->sizes.incoming, &geometry->incoming));
  if (plan->host.shared.base)
    return ONEBIT_OK; /* results are in the shared memory */
  OB_TRY(allocate_member_messages(plan, results, &geometry->results[0]));
  OB_TRY(allocate_member_messages(plan, plan->momentum ? results : 0, &geometry->results[1]));
  if (!plan->momentum)
    geometry->results[1] = geometry->results[0]; /* no call reads the last result */
  return ONEBIT_OK;
}

static onebit_status_t allocate_batches(struct onebit_plan *plan) {
  size_t peers = plan->geometry.members - 1, slots = plan->geometry.slots;
  plan->exchange = plan_build_allocate(plan, slots, sizeof(struct ob_batch *));
  plan->gather = plan_build_allocate(plan, slots, sizeof(struct ob_batch *));
  if (!plan->exchange || !plan->gather)
    return report_plan_out_of_memory(plan);
  for (size_t i = 0; i < slots; i++) {
    OB_TRY(
        ob_batch_create(plan->comm, peers * ob_messages_each(&plan->geometry), &plan->exchange[i]));
    OB_TRY(ob_batch_create(plan->comm, peers, &plan->gather[i]));
  }
  return ONEBIT_OK;
}

static onebit_status_t allocate_lists(struct onebit_plan *plan) {
  size_t ranks = (size_t)plan->comm->size, pieces = plan->geometry.layout.pieces;
  plan->views = plan_build_allocate(plan, ranks, sizeof *plan->views);
  plan->inputs = plan_build_allocate(plan, pieces, sizeof *plan->inputs);
  plan->outputs = plan_build_allocate(plan, pieces > ranks ? pieces : ranks, sizeof *plan->outputs);
  return plan->views && plan->inputs && plan->outputs ? ONEBIT_OK : report_plan_out_of_memory(plan);
}

/* Warns if threads share a processor. Launchers bind a rank to one core unless told otherwise; two
 * threads on one core took 1.5 times as long as one (64 MiB, one rank). A device has no such
 * threads. */
static void warn_of_shared_processors(const struct onebit_plan *plan, int threads) {
  static atomic_flag warned = ATOMIC_FLAG_INIT;
  const int processors = ob_processor_count();
  if (plan->options.device == ONEBIT_DEVICE_HOST && processors > 0 && threads > processors &&
      !atomic_flag_test_and_set(&warned))
    ob_log(
        OB_LOG_WARN, plan->comm->rank,
        "threads is %d, but this rank may use only %d processor%s, on which the threads take "
        "turns. If the host has more processors: mpirun --bind-to none, or srun --cpus-per-task %d",
        threads, processors, processors == 1 ? "" : "s", threads);
}

static onebit_status_t set_up_work(struct onebit_plan *plan, const struct ob_plan_shape *shape) {
  struct ob_work *work = &plan->state->work;
  work->layout = &plan->geometry.layout;
  work->rule = shape->options.scale;
  work->dtype = shape->options.dtype;
  work->output_dtype = shape->output_dtype;
  work->one_scale = shape->one_scale;
  work->max_width = (unsigned)plan->options.max_bits;
  work->measured = plan->options.max_bits > plan->options.bits;
  work->threads = shape->options.threads;
  warn_of_shared_processors(plan, work->threads);
  work->undoes = plan->options.residual_copies == 1;
  work->stream = plan->geometry.layout.elements * sizeof(float) >= STREAM_BYTES;
  work->half = plan->geometry.half || (plan->choice.schedule == ONEBIT_SCHEDULE_HIERARCHICAL &&
                                       work->dtype != ONEBIT_FLOAT32);
  work->bounded =
      shape->options.operation == ONEBIT_REDUCE_SCATTER && shape->options.wire == ONEBIT_WIRE_DENSE;
  OB_TRY(ob_codec_choose(&work->codec));
  size_t members = plan->geometry.members, host = (size_t)plan->comm->hosts.each;
  OB_TRY(ob_work_create(work, members, members > host ? members : host));
  plan->memory_bytes += ob_work_scratch(work) * sizeof *work->wide;
  return ONEBIT_OK;
}

/* Fails if the options need host memory and the plan is on a device. */
static onebit_status_t check_executor(const struct onebit_plan *plan,
                                      const struct ob_plan_shape *shape) {
  bool dense = plan->options.wire == ONEBIT_WIRE_DENSE;
  if (plan->executor == &ob_executor_host || plan->options.operation == ONEBIT_ALLREDUCE ||
      !(dense || shape->of_segments))
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                  "device is ONEBIT_DEVICE_CUDA, operation is %d%s: these options need host memory",
                  (int)plan->options.operation, dense ? ", wire is ONEBIT_WIRE_DENSE" : "");
}

/* Fails if residuals have one copy and a call cannot be undone. Undoing needs the inputs. These are
 * not available on a device, nor if the ranks of a host add up their inputs. */
static onebit_status_t plan_build_check_copies(const struct onebit_plan *plan) {
  const bool hosts = plan->choice.schedule == ONEBIT_SCHEDULE_HIERARCHICAL;
  if (plan->options.residual_copies != 1 || (plan->executor == &ob_executor_host && !hosts))
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                  "residual_copies is 1, %s: one copy needs host memory and a schedule that is not "
                  "hierarchical",
                  hosts ? "and the schedule is hierarchical" : "device is ONEBIT_DEVICE_CUDA");
}

static onebit_status_t set_up_group(struct onebit_plan *plan) {
  const struct ob_hosts *hosts = &plan->comm->hosts;
  struct ob_geometry *geometry = &plan->geometry;
  bool across = plan->choice.schedule == ONEBIT_SCHEDULE_HIERARCHICAL;
  geometry->members = (size_t)(across ? hosts->count : plan->comm->size);
  geometry->member = (size_t)(across ? hosts->host : plan->comm->rank);
  geometry->first_segment = across ? (size_t)hosts->local_rank * geometry->members : 0;
  plan->member_ranks = plan_build_allocate(plan, geometry->members, sizeof *plan->member_ranks);
  if (!plan->member_ranks)
    return report_plan_out_of_memory(plan);
  for (int k = 0; k < (int)geometry->members; k++)
    plan->member_ranks[k] = across ? hosts->ranks[k * hosts->each + hosts->local_rank] : k;
  return ONEBIT_OK;
}

/* Sets the type of messages, and whether each has all elements or those of one segment. Dense
 * messages have the 16-bit values of the buffers, except in an allreduce. */
static void set_up_messages(struct onebit_plan *plan, const struct ob_plan_shape *shape) {
  struct ob_geometry *geometry = &plan->geometry;
  bool gathers = plan->options.operation == ONEBIT_ALLGATHER;
  geometry->whole = gathers ? !shape->of_segments : plan->schedule->whole;
  geometry->replicated = plan->schedule == &ob_schedule_replicas;
  geometry->one_scale = shape->one_scale;
  geometry->dense = plan->options.wire == ONEBIT_WIRE_DENSE;
  geometry->width = (unsigned)plan->options.bits;
  geometry->result_width = ob_serve_width(shape->serving.rule, geometry->width);
  plan->state->last_width = geometry->result_width;
  geometry->half = geometry->dense && plan->options.dtype != ONEBIT_FLOAT32 &&
                   plan->options.operation != ONEBIT_ALLREDUCE;
}

onebit_status_t ob_plan_build(struct onebit_plan *plan, const struct ob_plan_shape *shape) {
  plan->options = shape->options;
  if (plan->options.max_bits < plan->options.bits) /* an optimizer sets only `bits` */
    plan->options.max_bits = plan->options.bits;
  plan->momentum = shape->momentum;
  plan->moments = shape->moments;
  OB_TRY(ob_executor_choose(plan));
  OB_TRY(check_executor(plan, shape));
  OB_TRY(ob_layout_create(&plan->geometry.layout, shape->block, shape->pieces, shape->counts,
                          shape->valid));
  OB_TRY(ob_schedule_choose(plan, shape));
  OB_TRY(plan_build_check_copies(plan));
  OB_TRY(set_up_group(plan));
  set_up_messages(plan, shape);
  OB_TRY(set_up_work(plan, shape));
  OB_TRY(ob_schedule_cut(plan, shape));
  if (plan->choice.schedule == ONEBIT_SCHEDULE_HIERARCHICAL)
    OB_TRY(ob_host_create(plan));
  OB_TRY(ob_schedule_steps(plan));
  if (plan->options.wire == ONEBIT_WIRE_BITS)
    OB_TRY(allocate_residual(plan, shape));
  OB_TRY(allocate_messages(plan));
  OB_TRY(ob_ladder_create(plan));
  OB_TRY(allocate_batches(plan));
  OB_TRY(allocate_lists(plan));
  return plan->executor->create ? plan->executor->create(plan) : ONEBIT_OK;
}

/* Destroys batches. Returns false if some of their messages are still in flight. */
static bool destroy_batches(struct onebit_plan *plan, struct ob_batch **batches) {
  bool all = true;
  for (size_t i = 0; batches && i < plan->geometry.slots; i++)
    all = ob_batch_destroy(batches[i]) && all;
  ob_release(batches);
  return all;
}

static void release_messages(struct onebit_plan *plan) {
  const struct ob_executor *executor = plan->executor;
  unsigned char **results = plan->geometry.results;
  if (!executor)
    return;
  if (!plan->host.shared.base && !plan->window) {
    if (results[1] != results[0])
      executor->messages->release(results[1]);
    executor->messages->release(results[0]);
  }
  if (plan->window) {
    plan->comm->transport->window_destroy(plan->window);
  } else {
    executor->messages->release(plan->geometry.outgoing);
    executor->messages->release(plan->geometry.incoming);
  }
  executor->residuals->release(plan->state->worker_sums);
  executor->residuals->release(plan->state->server_sums);
}

void ob_plan_release(struct onebit_plan *plan) {
  if (!plan)
    return;
  if (plan->executor && plan->executor->destroy)
    plan->executor->destroy(plan);
  ob_ladder_destroy(plan);
  ob_residual_destroy(&plan->state->worker);
  ob_residual_destroy(&plan->state->server);
  ob_work_destroy(&plan->state->work);
  ob_layout_destroy(&plan->geometry.layout);
  bool exchanged = destroy_batches(plan, plan->exchange);
  bool gathered = destroy_batches(plan, plan->gather);
  if (exchanged && gathered) {
    release_messages(plan);
    ob_host_destroy(&plan->host);
  }
  ob_release(plan->member_ranks);
  ob_release(plan->geometry.bounds);
  ob_release(plan->steps);
  ob_release(plan->views);
  ob_release((void *)plan->inputs);
  ob_release(plan->outputs);
  ob_comm_remove_user(plan->comm);
  ob_handle_retire(plan);
  if (exchanged && gathered)
    ob_handle_release(plan);
  else
    ob_memory_keep(plan); /* messages that stay allocated may still use the plan's addresses */
}
