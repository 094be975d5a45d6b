/* Creates the plan of a scene, both for the host and for the device. */
#include "tests/gpu/scene.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "collectives/messages.h"
#include "tests/gpu/harness.h"

static const char *const mode_names[SCENE_MODES] = {
    "exchange", "shifted", "padded", "scatter", "whole", "rotated", "gathered", "gathered rotated"};

void scene_describe(const struct scene_case *what, char *text, size_t capacity) {
  size_t at = (size_t)snprintf(
      text, capacity,
      "%s of %zu, place %zu, block %zu%s, chunks %zu/%zu, dtype %d to %d rule %d values %d%s%s%s%s",
      mode_names[what->mode], what->members, what->place, what->block,
      what->one_scale ? " one scale" : "", what->chunks, what->slots, (int)what->dtype,
      (int)what->output_dtype, (int)what->rule, (int)what->values,
      what->momentum ? " momentum" : "", what->moments ? " moments" : "", what->lion ? " lion" : "",
      what->from_values ? " from values" : "");
  at += (size_t)snprintf(text + at, capacity - at, ", skew %zu%s%s%s, now %u%s, elements",
                         what->skew, what->each ? " each" : "", what->float32 ? " float32" : "",
                         what->weighed ? " weighed" : "", what->now, what->stop ? " stop" : "");
  for (size_t k = 0; k < what->pieces && at < capacity; k++)
    at += (size_t)snprintf(text + at, capacity - at, " %zu", what->counts[k]);
}

static bool is_whole(const struct scene_case *what) { return what->mode >= SCENE_WHOLE; }

static bool is_rotated(const struct scene_case *what) {
  return what->mode == SCENE_ROTATED || what->mode == SCENE_GATHERED_ROTATED;
}

static bool is_gathered(const struct scene_case *what) { return what->mode >= SCENE_GATHERED; }

/* Returns the number of elements of a piece that are not padding. In SCENE_PADDED, the last third
 * of the buffer is padding. */
static size_t count_valid(const struct scene_case *what, size_t piece) {
  if (what->mode != SCENE_PADDED)
    return what->counts[piece];
  size_t total = what->pieces * what->counts[0], real = total - total / 3;
  size_t before = piece * what->counts[0];
  size_t left = real > before ? real - before : 0;
  return left < what->counts[piece] ? left : what->counts[piece];
}

static void set_up_layout(struct scene *scene) {
  const struct scene_case *what = scene->what;
  size_t valid[SCENE_PIECES];
  for (size_t k = 0; k < what->pieces; k++)
    valid[k] = count_valid(what, k);
  if (ob_layout_create(&scene->host.geometry.layout, what->block, what->pieces, what->counts,
                       valid))
    abort();
}

/* Sets the plan members that ob_plan_create would choose from the options. */
static void set_up_decisions(struct scene *scene) {
  const struct scene_case *what = scene->what;
  struct onebit_plan *plan = &scene->host;
  plan->options.operation = is_gathered(what)             ? ONEBIT_ALLGATHER
                            : what->mode == SCENE_SCATTER ? ONEBIT_REDUCE_SCATTER
                                                          : ONEBIT_ALLREDUCE;
  plan->executor = &ob_executor_host;
  plan->options.wire = what->dense ? ONEBIT_WIRE_DENSE : ONEBIT_WIRE_BITS;
  plan->options.dtype = what->dtype;
  plan->geometry.whole = is_whole(what);
  plan->geometry.rotated = is_rotated(what);
  plan->geometry.one_scale = what->one_scale;
  plan->geometry.dense = what->dense;
  plan->geometry.width = plan->geometry.result_width = plan->state->last_width = 1;
  plan->geometry.members = what->members;
  plan->geometry.member = what->place;
  plan->momentum = what->momentum;
  plan->geometry.first_segment = what->mode == SCENE_SHIFTED ? what->members : 0;
  plan->geometry.segments = is_whole(what)                ? 1
                            : what->mode == SCENE_SHIFTED ? 3 * what->members
                                                          : what->members;
  plan->geometry.chunks = what->chunks;
  plan->geometry.slots = what->slots;
  plan->state->result_now = (int)what->now;
}

static void set_up_work(struct scene *scene) {
  struct onebit_plan *plan = &scene->host;
  plan->state->work.layout = &plan->geometry.layout;
  plan->state->work.rule = scene->what->rule;
  plan->state->work.dtype = scene->what->dtype;
  plan->state->work.output_dtype = scene->what->output_dtype;
  plan->state->work.one_scale = scene->what->one_scale;
  plan->state->work.threads = 1;
  if (ob_codec_choose(&plan->state->work.codec) ||
      ob_work_create(&plan->state->work, scene->what->members, scene->what->members))
    abort();
  plan->views = gpu_allocate(scene->what->members, sizeof *plan->views);
}

static size_t find_first_word(const struct scene *scene, size_t share) {
  const struct onebit_plan *plan = &scene->host;
  if (scene->what->mode == SCENE_PADDED || scene->what->mode == SCENE_SCATTER)
    return plan->geometry.layout.piece[share].first_word;
  return plan->geometry.layout.words * share / plan->geometry.segments;
}

static void cut_into_chunks(struct scene *scene) {
  struct onebit_plan *plan = &scene->host;
  plan->geometry.bounds = twin_allocate(scene->twin, "bounds",
                                        (plan->geometry.segments * plan->geometry.chunks + 1) *
                                            sizeof *plan->geometry.bounds,
                                        TWIN_BYTES, 0);
  for (size_t share = 0; share < plan->geometry.segments; share++) {
    size_t first = find_first_word(scene, share), end = find_first_word(scene, share + 1);
    for (size_t i = 0; i < plan->geometry.chunks; i++)
      plan->geometry.bounds[share * plan->geometry.chunks + i] = ob_layout_first_block_from(
          &plan->geometry.layout, first + (end - first) * i / plan->geometry.chunks);
  }
  plan->geometry.bounds[plan->geometry.segments * plan->geometry.chunks] =
      plan->geometry.layout.blocks;
}

static void set_strides(struct scene *scene) {
  struct onebit_plan *plan = &scene->host;
  for (size_t share = 0; share < plan->geometry.segments; share++)
    for (size_t i = 0; i < plan->geometry.chunks; i++) {
      struct ob_message_shape shape = ob_plan_message(plan, share, i);
      size_t bytes = (ob_message_bytes(&shape) + OB_ALIGNMENT - 1) / OB_ALIGNMENT * OB_ALIGNMENT;
      plan->geometry.stride = bytes > plan->geometry.stride ? bytes : plan->geometry.stride;
      if (shape.blocks > scene->device.max_blocks)
        scene->device.max_blocks = shape.blocks;
    }
  plan->geometry.peer_stride = is_rotated(scene->what)
                                   ? plan->geometry.stride
                                   : plan->geometry.slots * plan->geometry.stride + OB_ALIGNMENT;
}

static void *allocate_array(struct scene *scene, const char *name, size_t count, size_t size,
                            enum twin_content content) {
  return twin_allocate(scene->twin, name, count * size, content, 0);
}

static void allocate_messages(struct scene *scene) {
  struct onebit_plan *plan = &scene->host;
  bool whole = plan->geometry.whole, dense = scene->what->dense;
  enum twin_content content = dense ? TWIN_FLOAT32 : TWIN_BYTES;
  size_t members = plan->geometry.members, each = plan->geometry.peer_stride;
  plan->geometry.outgoing =
      allocate_array(scene, "outgoing", whole ? dense : members, each, content);
  plan->geometry.incoming = allocate_array(scene, "incoming", whole ? 0 : members, each, content);
  plan->geometry.results[0] = plan->geometry.results[1] =
      allocate_array(scene, "results", members, each, content);
  if (plan->momentum)
    plan->geometry.results[1] = allocate_array(scene, "results[1]", members, each, content);
}

static void allocate_residual(struct scene *scene, struct ob_residual *residual, size_t first,
                              size_t end) {
  const struct ob_layout *layout = &scene->host.geometry.layout;
  size_t word = ob_layout_word(layout, first);
  *residual = (struct ob_residual){.first = first,
                                   .first_word = word,
                                   .blocks = end - first,
                                   .words = ob_layout_word(layout, end) - word,
                                   .one_scale = scene->what->one_scale,
                                   .memory = &ob_memory_host,
                                   .now = (int)scene->what->now};
  for (int copy = 0; copy < 2; copy++) {
    residual->values[copy] =
        allocate_array(scene, copy ? "residual[1]" : "residual[0]", residual->words,
                       OB_LANES * sizeof(float), TWIN_FLOAT32);
    residual->scales[copy] =
        allocate_array(scene, copy ? "kept scales[1]" : "kept scales[0]",
                       residual->one_scale ? 1 : residual->blocks, sizeof(float), TWIN_FLOAT32);
    if (scene->what->moments)
      residual->moments[copy] =
          allocate_array(scene, copy ? "moments[1]" : "moments[0]", residual->words,
                         OB_LANES * sizeof(uint16_t), TWIN_BFLOAT16);
  }
}

static void allocate_residuals(struct scene *scene) {
  struct onebit_plan *plan = &scene->host;
  const size_t *own = plan->geometry.bounds + plan->geometry.first_segment * plan->geometry.chunks;
  bool shifted = scene->what->mode == SCENE_SHIFTED;
  allocate_residual(scene, &plan->state->worker, shifted ? own[0] : 0,
                    shifted ? own[plan->geometry.members * plan->geometry.chunks]
                            : plan->geometry.layout.blocks);
  own += plan->geometry.member * plan->geometry.chunks;
  bool serves = !plan->geometry.whole;
  allocate_residual(scene, &plan->state->server, serves ? own[0] : 0,
                    serves ? own[plan->geometry.chunks] : 0);
  plan->state->worker.result_dtype =
      is_gathered(scene->what) ? scene->what->output_dtype : ONEBIT_FLOAT32;
  plan->state->server.result_dtype = scene->what->output_dtype;
  if (scene->what->lion)
    plan->state->server.serving = (struct ob_serving){OB_SERVE_LION, {0.9f, 0.1f, 0.97f, 0.03f}};
  plan->state->worker_sums = allocate_array(scene, "worker sums", plan->state->worker.blocks,
                                            sizeof(double), TWIN_FLOAT64);
  plan->state->server_sums = allocate_array(scene, "server sums", plan->state->server.blocks,
                                            sizeof(double), TWIN_FLOAT64);
}

static struct ob_cuda_residual residual_on_device(const struct scene *scene,
                                                  const struct ob_residual *residual,
                                                  const double *sums) {
  struct ob_cuda_residual device = {
      .first = residual->first,
      .first_word = residual->first_word,
      .blocks = residual->blocks,
      .elements = ob_residual_elements(residual, &scene->host.geometry.layout),
      .serving = residual->serving,
      .result_dtype = residual->result_dtype,
      .sums = ON_DEVICE(scene, sums)};
  for (int copy = 0; copy < 2; copy++) {
    device.values[copy] = ON_DEVICE(scene, residual->values[copy]);
    device.scales[copy] = ON_DEVICE(scene, residual->scales[copy]);
    if (residual->moments[copy])
      device.moments[copy] = ON_DEVICE(scene, residual->moments[copy]);
  }
  return device;
}

static struct ob_layout layout_on_device(struct scene *scene) {
  struct ob_layout layout = scene->host.geometry.layout;
  size_t bytes = (layout.pieces + 1) * sizeof *layout.piece;
  void *pieces = twin_allocate(scene->twin, "pieces", bytes, TWIN_BYTES, 0);
  memcpy(pieces, layout.piece, bytes);
  layout.piece = ON_DEVICE(scene, pieces);
  return layout;
}

/* Fills in the struct that describes the plan to the kernels. */
static void describe_to_device(struct scene *scene) {
  const struct onebit_plan *plan = &scene->host;
  size_t max_blocks = scene->device.max_blocks;
  struct ob_geometry geometry = plan->geometry;
  geometry.layout = layout_on_device(scene);
  geometry.bounds = ON_DEVICE(scene, geometry.bounds);
  geometry.outgoing = ON_DEVICE(scene, geometry.outgoing);
  geometry.incoming = ON_DEVICE(scene, geometry.incoming);
  for (int copy = 0; copy < 2; copy++)
    geometry.results[copy] = ON_DEVICE(scene, geometry.results[copy]);
  scene->device = (struct ob_cuda_plan){
      .geometry = geometry,
      .max_blocks = max_blocks,
      .origin = geometry.first_segment,
      .origin_step = 1,
      .gathered = is_gathered(scene->what),
      .rule = scene->what->rule,
      .dtype = scene->what->dtype,
      .output_dtype = scene->what->output_dtype,
      .worker = residual_on_device(scene, &plan->state->worker, plan->state->worker_sums),
      .server = residual_on_device(scene, &plan->state->server, plan->state->server_sums),
      .state = ON_DEVICE(scene, scene->state),
  };
}

static void run_step(struct scene *scene, enum ob_step_kind kind, size_t chunk) {
  ob_executor_host.run[kind](&scene->host, chunk, true);
}

void scene_compress(struct scene *scene, size_t chunk) {
  run_step(scene, is_whole(scene->what) ? OB_STEP_COMPRESS_WHOLE : OB_STEP_COMPRESS, chunk);
}

void scene_reduce(struct scene *scene, size_t chunk) {
  run_step(scene, is_whole(scene->what) ? OB_STEP_REDUCE_WHOLE : OB_STEP_REDUCE, chunk);
}

void scene_apply(struct scene *scene, size_t chunk) {
  bool scatter = scene->what->mode == SCENE_SCATTER;
  bool mean = is_whole(scene->what) && !is_gathered(scene->what);
  run_step(scene,
           scatter ? OB_STEP_APPLY_SEGMENT
           : mean  ? OB_STEP_APPLY_WHOLE
                   : OB_STEP_APPLY,
           chunk);
}

void scene_create(struct scene *scene, struct twin *twin, const struct scene_case *what) {
  *scene = (struct scene){.what = what, .twin = twin};
  scene->host.flight = &scene->flight;
  scene->host.state = &scene->kept;
  twin_clear(twin);
  set_up_layout(scene);
  set_up_decisions(scene);
  set_up_work(scene);
  cut_into_chunks(scene);
  set_strides(scene);
  allocate_messages(scene);
  allocate_residuals(scene);
  scene->state = allocate_array(scene, "state", 1, sizeof *scene->state, TWIN_BYTES);
  describe_to_device(scene);
  bool all = what->slots == what->chunks;
  scene->first_chunk = all ? 0 : what->chunks / 2;
  scene->end_chunk = all ? what->chunks : scene->first_chunk + 1;
  scene_fill_plan(scene);
  scene_fill_buffers(scene);
}

void scene_destroy(struct scene *scene) {
  struct onebit_plan *plan = &scene->host;
  ob_work_destroy(&plan->state->work);
  ob_layout_destroy(&plan->geometry.layout);
  free(plan->views);
  free((void *)plan->inputs);
  free(plan->outputs);
}
