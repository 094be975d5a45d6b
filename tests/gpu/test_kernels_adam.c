/* Adam's local passes against the codec and the arithmetic of one element, as
 * optimizers/adam_update.c uses them. */
#include "tests/gpu/harness.h"
#include "tests/gpu/kernel_test.h"

/* A block as the passes see it. */
struct block_view {
  size_t number, count, valid;
  float *momentum, *mean, *variance, *parameter, rate, decay;
};

static struct block_view block_of(const struct scene *scene, size_t number, size_t *piece) {
  const struct ob_kept *kept = &scene->host.worker;
  struct ob_block block = ob_layout_block(&scene->host.layout, number, piece);
  size_t first = block.word * OB_LANES;
  return (struct block_view){
      .number = number,
      .count = block.count,
      .valid = block.valid,
      .momentum = kept->values[kept->now] + first,
      .mean = kept->values[!kept->now] + first,
      .variance = scene->variance + first,
      .parameter = scene->parameters[block.piece] + block.offset,
      .rate = scene->sink.learning_rates[block.piece],
      .decay = scene->sink.weight_decays[block.piece],
  };
}

static void for_blocks(struct scene *scene,
                       void (*body)(struct scene *scene, const struct block_view *block)) {
  size_t piece = 0;
  for (size_t b = 0; b < scene->host.layout.blocks; b++) {
    struct block_view block = block_of(scene, b, &piece);
    body(scene, &block);
  }
}

/* --- A whole step */

static void step_block(struct scene *scene, const struct block_view *block) {
  struct ob_adam_run run = {.count = block->valid,
                            .gradient = block->mean,
                            .momentum = block->momentum,
                            .variance = block->variance,
                            .parameter = block->parameter,
                            .factors = scene->adam.adam,
                            .learning_rate = block->rate,
                            .weight_decay = block->decay};
  scene->block_sums[block->number] = block->valid ? (double)scene->host.work.codec->adam(&run) : 0;
}

static void step_on_host(struct scene *scene, size_t chunk) {
  (void)chunk;
  for_blocks(scene, step_block);
}

static cudaError_t step_on_device(struct scene *scene, size_t chunk) {
  (void)chunk;
  return ob_cuda_adam_step(scene->device, scene->adam, 0);
}

static void adam_step(void) {
  static const struct kernel_test test = {
      .cases = {.modes = MODE(SCENE_EXCHANGE) | MODE(SCENE_PADDED), .one_scale = true},
      .once = true,
      .host = step_on_host,
      .device = step_on_device,
  };
  kernel_walk(&test);
}

/* --- The freeze */

static void freeze_block(struct scene *scene, const struct block_view *block) {
  const struct ob_adam_factors *factors = &scene->adam.adam;
  for (size_t i = 0; i < block->count; i++) {
    bool still = scene->adam.keep_zero && block->variance[i] == 0;
    block->momentum[i] = factors->beta1 * block->momentum[i];
    block->variance[i] = still ? 0 : 1 / ob_adam_denominator(block->variance[i], factors);
  }
}

static void freeze_on_host(struct scene *scene, size_t chunk) {
  (void)chunk;
  for_blocks(scene, freeze_block);
}

static cudaError_t freeze_on_device(struct scene *scene, size_t chunk) {
  (void)chunk;
  return ob_cuda_adam_freeze(scene->device, scene->adam, 0);
}

static void adam_freeze(void) {
  static const struct kernel_test test = {
      .cases = {.modes = MODE(SCENE_EXCHANGE) | MODE(SCENE_PADDED), .one_scale = true},
      .once = true,
      .host = freeze_on_host,
      .device = freeze_on_device,
  };
  kernel_walk(&test);
}

/* --- A frozen step without compression */

static void frozen_block(struct scene *scene, const struct block_view *block) {
  const struct ob_adam_factors *factors = &scene->adam.adam;
  for (size_t i = 0; i < block->valid; i++) {
    float m = block->momentum[i] + factors->one_minus_beta1 * block->mean[i];
    block->parameter[i] =
        ob_adam_parameter(block->parameter[i], m * block->variance[i], block->rate, block->decay);
    block->momentum[i] = factors->beta1 * m;
  }
}

static void frozen_on_host(struct scene *scene, size_t chunk) {
  (void)chunk;
  for_blocks(scene, frozen_block);
}

static cudaError_t frozen_on_device(struct scene *scene, size_t chunk) {
  (void)chunk;
  return ob_cuda_adam_frozen(scene->device, scene->adam, 0);
}

static void adam_frozen(void) {
  static const struct kernel_test test = {
      .cases = {.modes = MODE(SCENE_EXCHANGE) | MODE(SCENE_PADDED), .one_scale = true},
      .once = true,
      .host = frozen_on_host,
      .device = frozen_on_device,
  };
  kernel_walk(&test);
}

/* --- The variance's norm */

static void norm_on_host(struct scene *scene, size_t chunk) {
  (void)chunk;
  double total = 0;
  for (size_t b = 0; b < scene->host.layout.blocks; b++)
    total += scene->block_sums[b];
  *scene->total = total;
}

static cudaError_t norm_on_device(struct scene *scene, size_t chunk) {
  (void)chunk;
  return ob_cuda_adam_norm(scene->device, scene->adam, ON_DEVICE(scene, scene->total), 0);
}

static void adam_norm(void) {
  static const struct kernel_test test = {
      .cases = {.modes = MODE(SCENE_EXCHANGE), .one_scale = true},
      .once = true,
      .host = norm_on_host,
      .device = norm_on_device,
  };
  kernel_walk(&test);
}

static const struct gpu_test tests[] = {
    {"adam step", adam_step, false},
    {"adam freeze", adam_freeze, false},
    {"adam frozen", adam_frozen, false},
    {"adam norm", adam_norm, false},
};
GPU_SUITE("kernels of adam", tests)
