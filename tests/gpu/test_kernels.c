/* The kernels against the codec: the same plan on both sides, and afterwards the same bytes. */
#include "collectives/messages.h"
#include "tests/gpu/harness.h"
#include "tests/gpu/kernel_test.h"

/* A test of a kernel: what it must equal, its launch, and the cases. */
#define KERNEL(kernel, on_host, launch, ...)                                                       \
  static cudaError_t launch_##kernel(struct scene *scene, size_t chunk) {                          \
    (void)chunk;                                                                                   \
    return launch;                                                                                 \
  }                                                                                                \
  static void kernel(void) {                                                                       \
    static const struct kernel_test test = {                                                       \
        .host = on_host, .device = launch_##kernel, __VA_ARGS__};                                  \
    kernel_walk(&test);                                                                            \
  }

/* --- Compress */

static void compress_values(struct scene *scene, size_t chunk) {
  struct onebit_plan *plan = &scene->host;
  for (size_t m = 0; m < plan->geometry.members; m++) {
    size_t share = ob_segment_of(&plan->geometry, m);
    struct ob_message_shape shape = ob_plan_message(plan, share, chunk);
    struct ob_view out =
        ob_message_view(ob_message_at(&plan->geometry, plan->geometry.outgoing, m, chunk), &shape);
    struct ob_source source = plan->flight->call.source;
    source.values = scene->input_values + m * scene->source.step;
    struct ob_view last = {0};
    if (source.momentum)
      last = ob_message_view(ob_plan_result(plan, false, share, chunk), &shape);
    ob_compress_blocks(&plan->state->work, &source, &plan->state->worker, &shape, &last, &out,
                       plan->state->worker_sums);
  }
}

static void compress_on_host(struct scene *scene, size_t chunk) {
  if (scene->input_values)
    compress_values(scene, chunk);
  else
    scene_compress(scene, chunk);
  kernel_expect_flags(scene, false);
}

/* Clears bits that are not defined. Where the new residual of an element is NaN, its bit is that
 * NaN's sign: infinity times 0 is negative on x86 and positive on a GPU. The message is not
 * applied. */
static void forget_bits(struct scene *scene, unsigned char *message, size_t share, size_t chunk) {
  const struct onebit_plan *plan = &scene->host;
  const struct ob_residual *residual = &plan->state->worker;
  struct ob_message_shape shape = ob_plan_message(plan, share, chunk);
  struct ob_view host = ob_message_view(message, &shape);
  struct ob_view device = ob_message_view(twin_in_back(scene->twin, message), &shape);
  size_t first =
      (ob_layout_word(&plan->geometry.layout, shape.first) - residual->first_word) * OB_LANES;
  for (size_t i = 0; i < shape.words * OB_LANES; i++)
    if (isnan(residual->values[!residual->now][first + i])) {
      host.words[i / OB_LANES] &= ~(1u << i % OB_LANES);
      device.words[i / OB_LANES] &= ~(1u << i % OB_LANES);
    }
}

static void even_out_compress(struct scene *scene) {
  const struct onebit_plan *plan = &scene->host;
  for (size_t chunk = scene->first_chunk; chunk < scene->end_chunk; chunk++) {
    if (plan->geometry.whole)
      forget_bits(scene, ob_result_of(plan, plan->geometry.member, chunk), 0, chunk);
    for (size_t m = 0; !plan->geometry.whole && m < plan->geometry.members; m++)
      forget_bits(scene, ob_message_at(&plan->geometry, plan->geometry.outgoing, m, chunk),
                  ob_segment_of(&plan->geometry, m), chunk);
  }
}

KERNEL(compress, compress_on_host, ob_cuda_compress(scene->device, scene->source, chunk, 0),
       .cases = {.modes = (1u << SCENE_MODES) - 1,
                 .one_scale = true,
                 .momentum = true,
                 .from_values = true,
                 .weighed = true},
       .even_out = even_out_compress)

/* --- Reduce, and the one scale */

static void reduce_on_host(struct scene *scene, size_t chunk) {
  scene_reduce(scene, chunk);
  kernel_expect_flags(scene, true);
}

KERNEL(reduce, reduce_on_host, ob_cuda_reduce(scene->device, chunk, 0),
       .cases = {.modes = MODE(SCENE_EXCHANGE) | MODE(SCENE_PADDED),
                 .one_scale = true,
                 .momentum = true,
                 .served = true})

static void finish_worker_on_host(struct scene *scene, size_t chunk) {
  (void)chunk;
  ob_executor_host.run[OB_STEP_FINISH_WORKER](&scene->host, 0, true);
  scene->state->worker_scale = scene->host.flight->worker_scale;
  kernel_expect_flags(scene, false);
}

static void finish_server_on_host(struct scene *scene, size_t chunk) {
  (void)chunk;
  ob_executor_host.run[OB_STEP_FINISH_SERVER](&scene->host, 0, true);
  scene->state->server_scale = scene->host.flight->server_scale;
  kernel_expect_flags(scene, true);
}

KERNEL(finish_worker, finish_worker_on_host, ob_cuda_finish(scene->device, false, 0),
       .cases = {.modes = MODE(SCENE_EXCHANGE) | MODE(SCENE_PADDED) | MODE(SCENE_WHOLE),
                 .only_one_scale = true},
       .once = true)

KERNEL(finish_server, finish_server_on_host, ob_cuda_finish(scene->device, true, 0),
       .cases = {.modes = MODE(SCENE_EXCHANGE) | MODE(SCENE_PADDED), .only_one_scale = true},
       .once = true)

/* --- Results to outputs */

static void apply_on_host(struct scene *scene, size_t chunk) { scene_apply(scene, chunk); }

KERNEL(store, apply_on_host, ob_cuda_store(scene->device, scene->outputs, chunk, 0),
       .cases = {.modes = MODE(SCENE_EXCHANGE) | MODE(SCENE_PADDED) | MODE(SCENE_GATHERED) |
                          MODE(SCENE_GATHERED_ROTATED),
                 .one_scale = true,
                 .momentum = true,
                 .stop = true})

KERNEL(sum, apply_on_host, ob_cuda_sum(scene->device, scene->outputs, chunk, 0),
       .cases = {.modes = MODE(SCENE_SCATTER) | MODE(SCENE_WHOLE) | MODE(SCENE_ROTATED),
                 .one_scale = true,
                 .stop = true})

/* --- Dense messages */

static void load_on_host(struct scene *scene, size_t chunk) {
  scene_compress(scene, chunk);
  kernel_expect_flags(scene, false);
}

KERNEL(load, load_on_host, ob_cuda_load(scene->device, scene->source, chunk, 0),
       .cases = {.modes = MODE(SCENE_EXCHANGE) | MODE(SCENE_SHIFTED) | MODE(SCENE_WHOLE) |
                          MODE(SCENE_ROTATED),
                 .dense = true})

static void mean_on_host(struct scene *scene, size_t chunk) {
  scene_reduce(scene, chunk);
  kernel_expect_flags(scene, false);
}

KERNEL(mean, mean_on_host, ob_cuda_mean(scene->device, chunk, 0),
       .cases = {.modes = MODE(SCENE_EXCHANGE) | MODE(SCENE_WHOLE) | MODE(SCENE_ROTATED),
                 .dense = true})

KERNEL(convert, apply_on_host, ob_cuda_convert(scene->device, scene->outputs, chunk, 0),
       .cases = {.modes = MODE(SCENE_EXCHANGE) | MODE(SCENE_WHOLE) | MODE(SCENE_ROTATED),
                 .dense = true,
                 .stop = true})

/* --- The state */

static void begin_on_host(struct scene *scene, size_t chunk) {
  struct ob_cuda_state *state = scene->state;
  (void)chunk;
  state->flags = state->residual_flags;
  state->server_flags = state->stop = 0;
  state->worker_scale = state->server_scale = 0;
  state->sequence++;
  state->status = ONEBIT_OK;
  state->failed = state->not_finite = -1;
}

KERNEL(begin, begin_on_host, ob_cuda_begin(scene->device, 0),
       .cases = {.modes = MODE(SCENE_EXCHANGE), .stop = true}, .once = true)

static void commit_on_host(struct scene *scene, size_t chunk) {
  (void)chunk;
  if (scene->what->stop)
    return;
  scene->state->now = !scene->what->now;
  scene->state->residual_flags = scene->state->server_flags;
}

KERNEL(commit, commit_on_host, ob_cuda_commit(scene->device, false, 0),
       .cases = {.modes = MODE(SCENE_EXCHANGE) | MODE(SCENE_WHOLE),
                 .one_scale = true,
                 .stop = true},
       .once = true)

/* Without error feedback what was kept is forgotten. */
static void forget_on_host(struct scene *scene, size_t chunk) {
  commit_on_host(scene, chunk);
  if (scene->what->stop)
    return;
  for (int side = 0; side < 2; side++) {
    struct ob_residual *residual = side ? &scene->host.state->server : &scene->host.state->worker;
    ob_residual_commit(residual);
    ob_residual_forget(residual);
  }
}

KERNEL(forget, forget_on_host, ob_cuda_commit(scene->device, true, 0),
       .cases = {.modes = MODE(SCENE_EXCHANGE) | MODE(SCENE_WHOLE),
                 .one_scale = true,
                 .stop = true},
       .once = true)

static const struct gpu_test tests[] = {
    {"compress", compress, false},
    {"reduce", reduce, false},
    {"finish worker", finish_worker, false},
    {"finish server", finish_server, false},
    {"store", store, false},
    {"sum", sum, false},
    {"load", load, false},
    {"mean", mean, false},
    {"convert", convert, false},
    {"begin", begin, false},
    {"commit", commit, false},
    {"commit and forget", forget, false},
};
GPU_SUITE("kernels", tests)
