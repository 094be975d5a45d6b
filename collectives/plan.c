/* Plans: made, ended, and asked. */
#include "collectives/plan.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/handles.h"
#include "base/knobs.h"
#include "base/memory.h"
#include "collectives/agree.h"
#include "collectives/messages.h"

/* From this many bytes of buffer on, residuals and results are written past the caches: they
 * would only push out what is read. Measured with onebit-bench codec; no bit depends on it. */
#define STREAM_BYTES ((size_t)16 << 20)

static onebit_status_t out_of_memory(const struct onebit_plan *plan) {
  return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a plan of %zu elements", plan->count);
}

static void *allocate_from(struct onebit_plan *plan, const struct ob_memory *memory, size_t count,
                           size_t size) {
  plan->memory_bytes += count * size;
  return memory->allocate(count, size);
}

static void *allocate(struct onebit_plan *plan, size_t count, size_t size) {
  return allocate_from(plan, &ob_memory_host, count, size);
}

void ob_plan_segment(const struct onebit_plan *plan, size_t *first, size_t *end) {
  const struct ob_geometry *geometry = &plan->geometry;
  size_t segment = geometry->first_segment + geometry->member;
  *first = geometry->bounds[segment * geometry->chunks];
  *end = geometry->bounds[(segment + 1) * geometry->chunks];
}

void ob_plan_compressed(const struct onebit_plan *plan, size_t *first, size_t *end) {
  *first = plan->sizes.compressed_first;
  *end = plan->sizes.compressed_end;
}

static onebit_status_t allocate_residual(struct onebit_plan *plan,
                                         const struct ob_plan_shape *shape) {
  const struct ob_work *work = &plan->work;
  size_t first, end;
  ob_plan_compressed(plan, &first, &end);
  if (plan->momentum) { /* an optimizer keeps other things there before */
    first = 0;
    end = plan->geometry.layout.blocks;
  }
  const struct ob_memory *memory = plan->executor->residuals;
  const struct ob_layout *layout = &plan->geometry.layout;
  if (plan->options.residual_copies == 1)
    OB_TRY(ob_residual_create_alone(&plan->worker, layout, first, end, work->one_scale));
  else
    OB_TRY(ob_residual_create(&plan->worker, layout, first, end, work->one_scale, plan->moments,
                              memory));
  first = end = 0;
  if (plan->sizes.reduces)
    ob_plan_segment(plan, &first, &end);
  OB_TRY(ob_residual_create(&plan->server, layout, first, end, work->one_scale, false, memory));
  plan->server.serving = shape->serving;
  if (plan->options.profile == ONEBIT_PROFILE_DEFAULT && plan->options.bits == 1) {
    plan->server.result_dtype = work->output_dtype;
    if (plan->options.operation == ONEBIT_ALLGATHER)
      plan->worker.result_dtype = work->output_dtype;
  }
  plan->memory_bytes += ob_residual_bytes(&plan->worker) + ob_residual_bytes(&plan->server);
  if (!work->one_scale)
    return ONEBIT_OK;
  plan->worker_sums = allocate_from(plan, memory, plan->worker.blocks, sizeof(double));
  plan->server_sums = allocate_from(plan, memory, plan->server.blocks, sizeof(double));
  return plan->worker_sums && plan->server_sums ? ONEBIT_OK : out_of_memory(plan);
}

/* The messages of `count` ranks; NULL when there are none of them. */
static onebit_status_t allocate_members(struct onebit_plan *plan, size_t count,
                                        unsigned char **memory) {
  struct ob_window *window = plan->window;
  if (!count)
    return ONEBIT_OK;
  if (window) {
    *memory = window->memory + window->used;
    window->used += count * plan->geometry.peer_stride;
    return ONEBIT_OK;
  }
  *memory = allocate_from(plan, plan->executor->messages, count, plan->geometry.peer_stride);
  return *memory ? ONEBIT_OK : out_of_memory(plan);
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
  OB_TRY(allocate_members(plan, plan->sizes.outgoing, &geometry->outgoing));
  OB_TRY(allocate_members(plan, plan->sizes.incoming, &geometry->incoming));
  if (plan->host.shared.base)
    return ONEBIT_OK; /* results are there */
  OB_TRY(allocate_members(plan, results, &geometry->results[0]));
  OB_TRY(allocate_members(plan, plan->momentum ? results : 0, &geometry->results[1]));
  if (!plan->momentum)
    geometry->results[1] = geometry->results[0]; /* nobody looks back: one copy will do */
  return ONEBIT_OK;
}

static onebit_status_t allocate_batches(struct onebit_plan *plan) {
  size_t peers = plan->geometry.members - 1, slots = plan->geometry.slots;
  plan->exchange = allocate(plan, slots, sizeof(struct ob_batch *));
  plan->gather = allocate(plan, slots, sizeof(struct ob_batch *));
  if (!plan->exchange || !plan->gather)
    return out_of_memory(plan);
  for (size_t i = 0; i < slots; i++) {
    OB_TRY(plan->comm->transport->batch_create(plan->comm, peers, &plan->exchange[i]));
    OB_TRY(plan->comm->transport->batch_create(plan->comm, peers, &plan->gather[i]));
  }
  return ONEBIT_OK;
}

static onebit_status_t allocate_lists(struct onebit_plan *plan) {
  size_t ranks = (size_t)plan->comm->size, pieces = plan->geometry.layout.pieces;
  plan->views = allocate(plan, ranks, sizeof *plan->views);
  plan->inputs = allocate(plan, pieces, sizeof *plan->inputs);
  plan->outputs = allocate(plan, pieces > ranks ? pieces : ranks, sizeof *plan->outputs);
  return plan->views && plan->inputs && plan->outputs ? ONEBIT_OK : out_of_memory(plan);
}

static onebit_status_t set_up_work(struct onebit_plan *plan, const struct ob_plan_shape *shape) {
  struct ob_work *work = &plan->work;
  work->layout = &plan->geometry.layout;
  work->rule = shape->options.scale;
  work->dtype = shape->options.dtype;
  work->output_dtype = shape->output_dtype;
  work->one_scale = shape->one_scale;
  work->max_width = (unsigned)plan->options.max_bits;
  work->measured = plan->options.max_bits > plan->options.bits;
  work->threads = shape->options.threads;
  work->stream = plan->geometry.layout.elements * sizeof(float) >= STREAM_BYTES;
  work->half = plan->geometry.half || (plan->choice.schedule == ONEBIT_SCHEDULE_HIERARCHICAL &&
                                       work->dtype != ONEBIT_FLOAT32);
  work->bounded =
      shape->options.operation == ONEBIT_REDUCE_SCATTER && shape->options.wire == ONEBIT_WIRE_DENSE;
  OB_TRY(ob_codec_choose(&work->codec));
  size_t members = plan->geometry.members, host = (size_t)plan->comm->hosts.each;
  OB_TRY(ob_work_create(work, members, members > host ? members : host));
  plan->memory_bytes += ob_work_wide(work) * sizeof *work->wide;
  return ONEBIT_OK;
}

/* What only memory of the host has. */
static onebit_status_t check_executor(const struct onebit_plan *plan,
                                      const struct ob_plan_shape *shape) {
  bool dense = plan->options.wire == ONEBIT_WIRE_DENSE;
  if (plan->executor == &ob_executor_host || plan->options.operation == ONEBIT_ALLREDUCE ||
      !(dense || shape->of_segments))
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                  "device is ONEBIT_DEVICE_CUDA, operation is %d%s: that is for memory of the host",
                  (int)plan->options.operation, dense ? ", wire is ONEBIT_WIRE_DENSE" : "");
}

/* One copy takes the call's input to undo it: of a device's kernels, and where a host's ranks add
 * theirs up, that is not at hand. */
static onebit_status_t check_copies(const struct onebit_plan *plan) {
  const bool hosts = plan->choice.schedule == ONEBIT_SCHEDULE_HIERARCHICAL;
  if (plan->options.residual_copies != 1 || (plan->executor == &ob_executor_host && !hosts))
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                  "residual_copies is 1, %s: that is for memory of the host and schedules that are "
                  "not hierarchical",
                  hosts ? "and the schedule hierarchical" : "device is ONEBIT_DEVICE_CUDA");
}

static onebit_status_t set_up_group(struct onebit_plan *plan) {
  const struct ob_hosts *hosts = &plan->comm->hosts;
  struct ob_geometry *geometry = &plan->geometry;
  bool across = plan->choice.schedule == ONEBIT_SCHEDULE_HIERARCHICAL;
  geometry->members = (size_t)(across ? hosts->count : plan->comm->size);
  geometry->member = (size_t)(across ? hosts->host : plan->comm->rank);
  geometry->first_segment = across ? (size_t)hosts->local_rank * geometry->members : 0;
  plan->member_ranks = allocate(plan, geometry->members, sizeof *plan->member_ranks);
  if (!plan->member_ranks)
    return out_of_memory(plan);
  for (int k = 0; k < (int)geometry->members; k++)
    plan->member_ranks[k] = across ? hosts->ranks[k * hosts->each + hosts->local_rank] : k;
  return ONEBIT_OK;
}

/* What messages are about: everything, where everyone's go to everyone; and what is in them. Dense
 * ones have the 16-bit values of the buffers, but for those of an allreduce. */
static void set_up_messages(struct onebit_plan *plan, const struct ob_plan_shape *shape) {
  struct ob_geometry *geometry = &plan->geometry;
  bool gathers = plan->options.operation == ONEBIT_ALLGATHER;
  geometry->whole =
      gathers ? !shape->of_segments : plan->choice.schedule == ONEBIT_SCHEDULE_ALLGATHER;
  geometry->one_scale = shape->one_scale;
  geometry->dense = plan->options.wire == ONEBIT_WIRE_DENSE;
  geometry->width = (unsigned)plan->options.bits;
  geometry->half = geometry->dense && plan->options.dtype != ONEBIT_FLOAT32 &&
                   plan->options.operation != ONEBIT_ALLREDUCE;
}

/* This rank's part of making a plan. */
static onebit_status_t build(struct onebit_plan *plan, const struct ob_plan_shape *shape) {
  plan->options = shape->options;
  if (plan->options.max_bits < plan->options.bits) /* an optimizer's */
    plan->options.max_bits = plan->options.bits;
  plan->momentum = shape->momentum;
  plan->moments = shape->moments;
  OB_TRY(ob_executor_choose(plan));
  OB_TRY(check_executor(plan, shape));
  OB_TRY(ob_layout_create(&plan->geometry.layout, shape->block, shape->pieces, shape->counts,
                          shape->valid));
  OB_TRY(ob_schedule_choose(plan, shape));
  OB_TRY(check_copies(plan));
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

/* False: some of their messages are still under way. */
static bool destroy_batches(struct onebit_plan *plan, struct ob_batch **batches) {
  bool all = true;
  for (size_t i = 0; batches && i < plan->geometry.slots; i++)
    all = plan->comm->transport->batch_destroy(batches[i]) && all;
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
  executor->residuals->release(plan->worker_sums);
  executor->residuals->release(plan->server_sums);
}

/* Also of a plan that was only built in part. */
static void release(struct onebit_plan *plan) {
  if (!plan)
    return;
  if (plan->executor && plan->executor->destroy)
    plan->executor->destroy(plan);
  ob_ladder_destroy(plan);
  ob_residual_destroy(&plan->worker);
  ob_residual_destroy(&plan->server);
  ob_work_destroy(&plan->work);
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
  ob_comm_drop(plan->comm);
  ob_handle_retire(plan);
  if (exchanged && gathered)
    ob_handle_release(plan);
  else
    ob_memory_keep(plan); /* and through it the memory of its messages */
}

/* The last of the terms below: where a device decides otherwise than a processor. */
#define TERM_MESSAGES 14

/* What all ranks must give alike; each tells the others where its shared memory is. */
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
      {"the number of pieces", shape->pieces},
      {"schedule", (uint64_t)options->schedule},
      {"the schedule that was decided (from each rank's device and the library's costs: name "
       "ONEBIT_SCHEDULE_EXCHANGE in the options)",
       plan ? (uint64_t)plan->choice.schedule : 0},
      [TERM_MESSAGES] = {"the number of messages", plan ? plan->geometry.chunks : 0},
  };
  return ob_agree_noting(comm, status, terms, sizeof terms / sizeof terms[0],
                         plan ? plan->host.shared.name : 0);
}

/* The second half, where ranks share memory: all have made their memory, now they attach each
 * other's. */
static onebit_status_t attach_host(struct onebit_plan *plan) {
  onebit_status_t status = ob_host_attach(plan);
  if (status == ONEBIT_OK && plan->executor->attached)
    status = plan->executor->attached(plan);
  status = ob_agree(plan->comm, status, NULL, 0);
  ob_shared_hide(&plan->host.shared);
  return status;
}

/* Where the environment asks for it. */
static void explain(const struct onebit_plan *plan) {
  int asked = 0;
  if (ob_knob_number(OB_KNOB_EXPLAIN, 0, 1, 0, &asked) == ONEBIT_OK && asked)
    fprintf(stderr, "onebit: a plan of %zu elements on %d ranks\n%s", plan->count, plan->comm->size,
            plan->choice.text);
}

/* This rank's part, and what the others say to it. */
static onebit_status_t propose(onebit_comm_t comm, onebit_status_t status,
                               const struct ob_plan_shape *shape, size_t count,
                               struct onebit_plan **result) {
  struct onebit_plan *plan = NULL;
  if (status == ONEBIT_OK) {
    plan = ob_handle_create(OB_HANDLE_PLAN, sizeof *plan);
    if (plan) {
      plan->comm = ob_comm_keep(comm);
      plan->number = comm->plans;
      plan->count = count;
      plan->refused = shape->refused ? shape->refused : &plan->own_refused;
      plan->memory_bytes = sizeof *plan;
      status = build(plan, shape);
    } else {
      status = ob_error(ONEBIT_ERROR_MEMORY, "no memory for a plan");
    }
  }
  *result = plan;
  return agree_on_plan(comm, status, shape, count, plan);
}

/* Devices among processors: all cut their messages as processors do, which the ranks find when they
 * compare. */
static onebit_status_t propose_as_host(onebit_comm_t comm, const struct ob_plan_shape *shape,
                                       size_t count, struct onebit_plan **plan) {
  struct ob_plan_shape mixed = *shape;
  mixed.among_hosts = true;
  release(*plan);
  return propose(comm, ONEBIT_OK, &mixed, count, plan);
}

onebit_status_t ob_plan_create(onebit_comm_t comm, onebit_status_t status,
                               const struct ob_plan_shape *shape, size_t count,
                               onebit_plan_t *result) {
  struct onebit_plan *plan = NULL;
  comm->plans++;
  status = propose(comm, status, shape, count, &plan);
  if (status == ONEBIT_ERROR_MISMATCH && ob_agree_differed_only(comm, TERM_MESSAGES))
    status = propose_as_host(comm, shape, count, &plan);
  if (status == ONEBIT_OK && plan->host.shared.base)
    status = attach_host(plan);
  if (status == ONEBIT_OK && plan->window)
    status = ob_agree(comm, comm->transport->window_register(plan->window), NULL, 0);
  if (status != ONEBIT_OK) {
    release(plan);
    plan = NULL;
  } else {
    plan->tag = ob_comm_tag(comm);
  }
  if (plan && comm->rank == 0)
    explain(plan);
  if (result)
    *result = plan;
  return status;
}

static size_t common_multiple(size_t a, size_t b) {
  size_t x = a, y = b;
  while (y) {
    size_t remainder = x % y;
    x = y;
    y = remainder;
  }
  return a / x * b;
}

/* DeepSpeed pads to a multiple of ranks * lcm(ranks, 8) (runtime/fp16/onebit/adam.py,
 * corrected_tensor_size). */
size_t ob_plan_padded(size_t ranks, size_t count) {
  size_t quantum = ranks * common_multiple(ranks, 8);
  return (count + quantum - 1) / quantum * quantum;
}

void ob_plan_cut(struct ob_plan_shape *shape, size_t ranks, size_t count, size_t *counts,
                 size_t *valid) {
  bool deepspeed = shape->options.profile == ONEBIT_PROFILE_DEEPSPEED;
  shape->segment_a_piece = deepspeed || shape->options.operation == ONEBIT_REDUCE_SCATTER;
  shape->pieces = shape->segment_a_piece ? ranks : 1;
  shape->counts = counts;
  shape->valid = valid;
  size_t part = deepspeed ? ob_plan_padded(ranks, count) / ranks : count;
  for (size_t k = 0; k < shape->pieces; k++) {
    size_t before = deepspeed ? k * part : 0;
    size_t left = before < count ? count - before : 0;
    counts[k] = part;
    valid[k] = left < part ? left : part;
  }
}

static onebit_status_t check_count(const struct ob_plan_shape *shape, size_t ranks, size_t count) {
  size_t buffers = shape->options.operation == ONEBIT_ALLREDUCE ? 1 : ranks;
  /* 16 bytes an element leave room for residuals and messages in a size_t. */
  if (count > SIZE_MAX / 16 / buffers - ranks * 8 * ranks)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "count is %zu: buffers of %zu times that cannot be "
                    "addressed",
                    count, buffers);
  return ONEBIT_OK;
}

onebit_status_t onebit_plan_create(onebit_comm_t comm, size_t count,
                                   const onebit_plan_options_t *options, onebit_plan_t *plan) {
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
    status = ob_error(ONEBIT_ERROR_MEMORY, "no memory for a plan");
  status = ob_plan_create(comm, status, &shape, count, plan);
  ob_release(counts);
  return status;
}

onebit_status_t onebit_plan_destroy(onebit_plan_t plan) {
  if (!plan)
    return ONEBIT_OK;
  OB_TRY(ob_handle_check(plan, OB_HANDLE_PLAN, "plan"));
  if (plan->in_flight)
    return ob_error(ONEBIT_ERROR_BUSY, "the plan has a request in flight");
  release(plan);
  return ONEBIT_OK;
}

onebit_status_t onebit_plan_get_info(onebit_plan_t plan, onebit_plan_info_t *info) {
  OB_TRY(ob_handle_check(plan, OB_HANDLE_PLAN, "plan"));
  if (!info)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "info is NULL");
  if (info->size != sizeof *info)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "info->size is %zu, not %zu", info->size, sizeof *info);
  *info = (onebit_plan_info_t){
      .size = sizeof *info,
      .worker_residual_start = ob_layout_element(&plan->geometry.layout, plan->worker.first),
      .worker_residual_count = ob_residual_elements(&plan->worker, &plan->geometry.layout),
      .server_residual_count = ob_residual_elements(&plan->server, &plan->geometry.layout),
      .server_residual_start = ob_layout_element(&plan->geometry.layout, plan->server.first),
      .block_size = plan->options.block_size,
      .chunks = plan->geometry.chunks,
      .wire_bytes = plan->wire_bytes,
      .memory_bytes = plan->memory_bytes,
      .codec = plan->executor->codec ? plan->executor->codec : plan->work.codec->name,
      .transport = plan->comm->transport->name,
      .schedule = plan->choice.schedule,
      .wire = plan->options.wire,
      .chunk_size = ob_plan_longest_message(plan),
      .hosts = plan->comm->hosts.count,
      .ranks_per_host = plan->comm->hosts.each,
      .bits = (int)plan->geometry.width,
      .min_bits = (int)plan->ladder.min,
      .max_bits = (int)plan->ladder.max,
      .moves = plan->ladder.moves,
      .residual_ratio = plan->ladder.ratio,
  };
  return ONEBIT_OK;
}

const char *onebit_plan_explain(onebit_plan_t plan) {
  bool is_plan = ob_handle_check(plan, OB_HANDLE_PLAN, "plan") == ONEBIT_OK;
  return is_plan ? plan->choice.text : "";
}
