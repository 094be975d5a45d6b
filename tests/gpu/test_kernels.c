/* Compares the kernels with the host's codec. Both run the same plan, and afterwards device memory
 * and host memory must have the same bytes. Each kernel has a table of cases: all combinations of
 * layouts, block sizes and group sizes. The other options are spread over these cases. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "collectives/messages.h"
#include "tests/gpu/harness.h"
#include "tests/gpu/scene.h"
#include "tests/support_sample.h"

/* --- Cases */

/* The options that a kernel's cases may have. */
struct kernel_cases {
  unsigned modes; /* a bit for each scene_mode */
  bool dense, one_scale, only_one_scale, momentum, stop, from_values, weighed, served;
};

#define MODE(mode) (1u << (mode))

/* Element counts of single tensors at the edges of words, of the parts that a warp processes at a
 * time, and of blocks. Further layouts have tensors of odd sizes, some of them empty. */
static const size_t single_counts[] = {0,   1,   31,   32,   33,   63,   64,   65,   511,
                                       512, 513, 2047, 2048, 2049, 4095, 4096, 4097, 100003};
static const struct {
  size_t pieces, counts[SCENE_PIECES];
} layouts[] = {
    {3, {0, 0, 5}},
    {6, {1, 7, 33, 2049, 0, 5000}},
    {8, {64, 0, 31, 0, 0, 4096, 2047, 1}},
};
static const size_t blocks[] = {32, 64, 2048, 65536, 2048};
/* Group sizes. 33 is more than the lanes of a warp. */
static const size_t members[] = {1, 2, 3, 4, 7, 8, 33};
static const size_t chunks[] = {1, 1, 2, 3, 5};

#define COUNT(list)   (sizeof(list) / sizeof(list)[0])
#define LAYOUTS       (COUNT(single_counts) + COUNT(layouts))
#define ONE_SCALE     4 /* index in `blocks`: cases of this entry have one scale for all blocks */
#define ROUNDS        3 /* repetitions of all combinations, each with other options */
#define LONG_ELEMENTS 10000

/* Returns the cases to run. The caller frees the rows. */
static struct sample sample_kernel_cases(const struct kernel_cases *of) {
  const size_t sizes[] = {LAYOUTS, COUNT(blocks), COUNT(members), ROUNDS};
  char name[32];
  snprintf(name, sizeof name, "kernels-%x", of->modes);
  return sample_product(name, 1, sizes, COUNT(sizes));
}

/* Returns a number below `limit` that is the same in every run (Knuth's multiplicative hash). */
static size_t draw_number(size_t number, size_t what, size_t limit) {
  return scramble((uint32_t)(number * 32 + what) * 2654435761u) % limit;
}

static enum scene_mode draw_mode(const struct kernel_cases *of, size_t number) {
  enum scene_mode allowed[SCENE_MODES];
  size_t count = 0;
  for (int mode = 0; mode < SCENE_MODES; mode++)
    if (of->modes & MODE(mode))
      allowed[count++] = (enum scene_mode)mode;
  return allowed[draw_number(number, 0, count)];
}

static void draw_options(const struct kernel_cases *of, size_t number, struct scene_case *what) {
  what->place = draw_number(number, 1, what->members);
  what->chunks = chunks[draw_number(number, 2, COUNT(chunks))];
  what->slots = what->chunks > 2 && draw_number(number, 3, 2) ? 2 : what->chunks;
  what->skew = draw_number(number, 4, 4);
  what->values = (enum codec_values)draw_number(number, 5, VALUES_KINDS);
  what->dtype = (onebit_dtype_t)draw_number(number, 6, 3);
  what->rule = (onebit_scale_t)draw_number(number, 7, 2);
  what->momentum = of->momentum && draw_number(number, 8, 2);
  what->each = draw_number(number, 9, 2);
  what->from_values = of->from_values && draw_number(number, 10, 4) == 0;
  what->now = (uint32_t)draw_number(number, 11, 2);
  what->stop = of->stop && draw_number(number, 12, 6) == 0;
  what->dense = of->dense;
  what->weighed = of->weighed && draw_number(number, 13, 3) == 0;
  what->moments = of->weighed && what->values != VALUES_NAN && what->values != VALUES_OVERFLOW &&
                  draw_number(number, 26, 2);
  what->weighed &= !what->moments;
  what->counted = draw_number(number, 20, 2);
  what->output_dtype = (onebit_dtype_t)draw_number(number, 21, 3);
  what->float32 = draw_number(number, 22, 4) == 0;
  what->lion = of->served && draw_number(number, 27, 2);
}

/* Adapts the case to its mode: SCENE_PADDED and SCENE_SCATTER have a piece for each member. Modes
 * whose rounds forward messages send one message at a time. Only an allreduce by exchange, padded
 * or not, has a momentum. */
static void fit_mode(struct scene_case *what) {
  if (what->mode == SCENE_PADDED || what->mode == SCENE_SCATTER) {
    what->pieces = what->members;
    if (what->counts[0] > LONG_ELEMENTS)
      what->counts[0] /= what->members;
    for (size_t k = 1; k < what->pieces; k++)
      what->counts[k] = what->counts[0];
  }
  if (what->mode >= SCENE_GATHERED)
    what->pieces = 1;
  if (what->mode == SCENE_ROTATED || what->mode == SCENE_GATHERED_ROTATED)
    what->chunks = what->slots = 1;
  if (what->mode != SCENE_EXCHANGE && what->mode != SCENE_PADDED)
    what->momentum = what->moments = false;
  if (what->mode != SCENE_EXCHANGE && what->mode != SCENE_SHIFTED)
    what->from_values = false;
}

/* Makes case number `index`. Returns false if the kernel has no such case. */
static bool make_kernel_case(const struct kernel_cases *of, size_t index, struct scene_case *what) {
  size_t layout = index % LAYOUTS, rest = index / LAYOUTS;
  size_t block = rest % COUNT(blocks), group = rest / COUNT(blocks) % COUNT(members);
  *what = (struct scene_case){.mode = draw_mode(of, index),
                              .pieces = 1,
                              .counts = {single_counts[layout % COUNT(single_counts)]},
                              .block = blocks[block],
                              .one_scale = block == ONE_SCALE || of->only_one_scale,
                              .members = members[group]};
  if (layout >= COUNT(single_counts)) {
    what->pieces = layouts[layout - COUNT(single_counts)].pieces;
    memcpy(what->counts, layouts[layout - COUNT(single_counts)].counts, sizeof what->counts);
  }
  draw_options(of, index, what);
  fit_mode(what);
  return of->one_scale || of->only_one_scale || !what->one_scale;
}

/* --- Running the cases */

struct kernel_test {
  struct kernel_cases cases;
  bool once; /* the kernel is launched once for all chunks */
  /* `host` processes a chunk as the library does, in the scene's host memory. `device` launches the
   * kernel. */
  void (*host)(struct scene *scene, size_t chunk);
  cudaError_t (*device)(struct scene *scene, size_t chunk);
  /* Removes allowed differences before the comparison; NULL: none are allowed. */
  void (*even_out)(struct scene *scene);
};

/* The memory of a twin in bytes, enough for the longest dense messages of eight members. */
#define CAPACITY ((size_t)64 << 20)

/* Sets the flags that the device's state must have, from the host's work so far. */
static void kernel_expect_flags(struct scene *scene, bool server) {
  struct ob_work *work = &scene->host.state->work;
  scene->state->flags |= work->not_finite ? (uint32_t)OB_FLAG_NOT_FINITE : 0;
  scene->state->flags |= work->large ? (uint32_t)OB_FLAG_LARGE : 0;
  scene->state->server_flags |= server && work->large ? (uint32_t)OB_FLAG_LARGE : 0;
}

static void run_case(const struct kernel_test *test, struct twin *twin,
                     const struct scene_case *what) {
  struct scene scene;
  scene_create(&scene, twin, what);
  bool sent = twin_copy_to_device(twin);
  size_t end = test->once ? scene.first_chunk + 1 : scene.end_chunk;
  for (size_t chunk = scene.first_chunk; sent && chunk < end; chunk++) {
    test->host(&scene, chunk);
    CHECK_CUDA(test->device(&scene, chunk));
  }
  if (sent && twin_copy_back(twin)) {
    if (test->even_out)
      test->even_out(&scene);
    CHECK_TWIN(twin);
  }
  scene_destroy(&scene);
}

/* Runs the kernel's cases, and checks after each that host and device memory are the same. */
static void check_kernel(const struct kernel_test *test) {
  struct twin twin;
  size_t walked = 0;
  if (!twin_create(&twin, CAPACITY))
    return;
  const struct sample sample = sample_kernel_cases(&test->cases);
  for (size_t i = 0; i < sample.count; i++) {
    struct scene_case what;
    char words[240];
    if (!make_kernel_case(&test->cases, sample.rows[i], &what))
      continue;
    scene_describe(&what, words, sizeof words);
    check_case("case %zu: %s", sample.rows[i], words);
    run_case(test, &twin, &what);
    walked++;
  }
  check_case("%s", "");
  CHECK(walked > 0, "the share leaves no case");
  free(sample.rows);
  twin_destroy(&twin);
}

/* Defines a test of a kernel: the host's function that it must equal, its launch, and its cases. */
#define KERNEL(kernel, on_host, launch, ...)                                                       \
  static cudaError_t launch_##kernel(struct scene *scene, size_t chunk) {                          \
    (void)chunk;                                                                                   \
    return launch;                                                                                 \
  }                                                                                                \
  static void kernel(void) {                                                                       \
    static const struct kernel_test test = {                                                       \
        .host = on_host, .device = launch_##kernel, __VA_ARGS__};                                  \
    check_kernel(&test);                                                                           \
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

/* Clears bits that are not defined. If the new residual of an element is NaN, its bit is the sign
 * of that NaN. Infinity times 0 has a negative sign on x86 and a positive one on a GPU. Such a
 * message is not applied. */
static void clear_undefined_bits(struct scene *scene, unsigned char *message, size_t share,
                                 size_t chunk) {
  const struct onebit_plan *plan = &scene->host;
  const struct ob_residual *residual = &plan->state->worker;
  struct ob_message_shape shape = ob_plan_message(plan, share, chunk);
  struct ob_view host = ob_message_view(message, &shape);
  struct ob_view device = ob_message_view(twin_in_copy(scene->twin, message), &shape);
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
      clear_undefined_bits(scene, ob_result_of(plan, plan->geometry.member, chunk), 0, chunk);
    for (size_t m = 0; !plan->geometry.whole && m < plan->geometry.members; m++)
      clear_undefined_bits(scene, ob_message_at(&plan->geometry, plan->geometry.outgoing, m, chunk),
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

/* --- Reduce, with a scale for each block and with one scale */

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

/* --- Storing results in outputs */

KERNEL(store, scene_apply, ob_cuda_store(scene->device, scene->outputs, chunk, 0),
       .cases = {.modes = MODE(SCENE_EXCHANGE) | MODE(SCENE_PADDED) | MODE(SCENE_GATHERED) |
                          MODE(SCENE_GATHERED_ROTATED),
                 .one_scale = true,
                 .momentum = true,
                 .stop = true})

KERNEL(sum, scene_apply, ob_cuda_sum(scene->device, scene->outputs, chunk, 0),
       .cases = {.modes = MODE(SCENE_SCATTER) | MODE(SCENE_WHOLE) | MODE(SCENE_ROTATED),
                 .one_scale = true,
                 .stop = true})

/* --- Dense messages */

KERNEL(load, compress_on_host, ob_cuda_load(scene->device, scene->source, chunk, 0),
       .cases = {.modes = MODE(SCENE_EXCHANGE) | MODE(SCENE_SHIFTED) | MODE(SCENE_WHOLE) |
                          MODE(SCENE_ROTATED),
                 .dense = true})

KERNEL(mean, reduce_on_host, ob_cuda_mean(scene->device, chunk, 0),
       .cases = {.modes = MODE(SCENE_EXCHANGE) | MODE(SCENE_WHOLE) | MODE(SCENE_ROTATED),
                 .dense = true})

KERNEL(convert, scene_apply, ob_cuda_convert(scene->device, scene->outputs, chunk, 0),
       .cases = {.modes = MODE(SCENE_EXCHANGE) | MODE(SCENE_WHOLE) | MODE(SCENE_ROTATED),
                 .dense = true,
                 .stop = true})

/* --- The state */

static void commit_on_host(struct scene *scene, size_t chunk) {
  (void)chunk;
  if (scene->what->stop)
    return;
  scene->state->now = !scene->what->now;
  scene->state->residual_flags = scene->state->server_flags;
}

/* Without error feedback residuals are reset. */
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
    {"compress", compress, ANY_DEVICE},
    {"reduce", reduce, ANY_DEVICE},
    {"finish worker", finish_worker, ANY_DEVICE},
    {"finish server", finish_server, ANY_DEVICE},
    {"store", store, ANY_DEVICE},
    {"sum", sum, ANY_DEVICE},
    {"load", load, ANY_DEVICE},
    {"mean", mean, ANY_DEVICE},
    {"convert", convert, ANY_DEVICE},
    {"commit and forget", forget, ANY_DEVICE},
};
GPU_SUITE("kernels", tests)
