/* The passes of the optimizers against the codec: each kind, and the sums of what they sum. */
#include "collectives/messages.h"
#include "tests/gpu/harness.h"
#include "tests/gpu/kernel_test.h"

/* --- Passes */

static void pass_over_on_host(struct scene *scene, size_t chunk) {
  (void)chunk;
  if (!scene->what->stop)
    ob_pass_blocks(&scene->host.state->work, NULL, NULL, NULL, &scene->sink);
}

static cudaError_t pass_over_on_device(struct scene *scene, size_t chunk) {
  (void)chunk;
  return ob_cuda_pass_over(scene->device, scene->pass, 0);
}

static void apply_on_host(struct scene *scene, size_t chunk) { scene_apply(scene, chunk); }

static cudaError_t apply_on_device(struct scene *scene, size_t chunk) {
  return ob_cuda_apply(scene->device, scene->pass, chunk, 0);
}

/* The product of cases is for all kinds together. */
#define SPARSE 4

static void walk(enum ob_pass_kind kind) {
  const bool takes_message = ob_pass_reads(kind) & OB_MASK(OB_MESSAGE);
  const struct kernel_test test = {
      .cases = {.modes = MODE(SCENE_EXCHANGE) | MODE(SCENE_PADDED),
                .one_scale = true,
                .momentum = true,
                .stop = true,
                .passes = true,
                .kind = kind},
      .once = !takes_message,
      .sparse = SPARSE,
      .host = takes_message ? apply_on_host : pass_over_on_host,
      .device = takes_message ? apply_on_device : pass_over_on_device,
  };
  kernel_walk(&test);
}

#define PASS(kind)                                                                                 \
  static void walk_##kind(void) { walk(OB_PASS_##kind); }
PASS(SQUARES)
PASS(POWER)
PASS(ADAM)
PASS(FREEZE)
PASS(FREEZE_STEP)
PASS(FROZEN)
PASS(APPLY)
PASS(APPLY_STEP)
PASS(SGD)
PASS(SGD_FREEZE)
PASS(LAMB)
PASS(LAMB_MOVE)
PASS(LAMB_FREEZE)
PASS(LAMB_FRESH)
PASS(LAMB_FROZEN)
PASS(ZERO_ONE)
PASS(ZERO_ONE_FREEZE)
PASS(ZERO_ONE_LOCAL)
PASS(ZERO_ONE_STORE)
PASS(ZERO_ONE_MET)
PASS(SHARD)
PASS(SHARD_MOVE)
PASS(STEP)
PASS(STEP_NORMS)
PASS(LION)

/* --- The numbers of 1-bit LAMB's tensors */

static double sum_of(const struct scene *scene, int which, size_t tensor) {
  const struct ob_piece *piece = &scene->host.geometry.layout.piece[tensor];
  return ob_total_of(which, scene->sink.sums[which] + piece[0].first_block,
                     piece[1].first_block - piece[0].first_block);
}

static void rates_on_host(struct scene *scene, bool warm) {
  const struct ob_lamb_limits *limits = &scene->lamb.limits;
  const size_t count = scene->what->pieces;
  float *rates = (float *)(uintptr_t)scene->sink.learning_rates;
  for (size_t k = 0; !scene->what->stop && k < count; k++) {
    double first = sum_of(scene, 1, k), second = sum_of(scene, 2, k), ratio;
    double *factor = &scene->factors[count - 1 - k];
    double *coefficient = &scene->coefficients[count - 1 - k];
    if (warm) {
      ratio = ob_lamb_warm(coefficient, first, second, limits);
    } else {
      *factor = ob_lamb_correct(*factor, first, second, sum_of(scene, OB_LARGEST, k), limits);
      ratio = *coefficient * *factor;
    }
    rates[k] = ob_lamb_rate(scene->pass.learning_rate, 0.5f + 0.3f * (float)k, ratio);
  }
}

static void warm_on_host(struct scene *scene, size_t chunk) {
  (void)chunk;
  rates_on_host(scene, true);
}

static void correct_on_host(struct scene *scene, size_t chunk) {
  (void)chunk;
  rates_on_host(scene, false);
}

static cudaError_t warm_on_device(struct scene *scene, size_t chunk) {
  (void)chunk;
  return ob_cuda_lamb_rates(scene->device.state, scene->lamb, OB_LAMB_WARM,
                            scene->pass.learning_rate, 0);
}

static cudaError_t correct_on_device(struct scene *scene, size_t chunk) {
  (void)chunk;
  return ob_cuda_lamb_rates(scene->device.state, scene->lamb, OB_LAMB_CORRECT,
                            scene->pass.learning_rate, 0);
}

#define LAMB_CASES                                                                                 \
  {                                                                                                \
    .modes = MODE(SCENE_EXCHANGE), .one_scale = true, .stop = true, .passes = true,                \
    .kind = OB_PASS_LAMB_FRESH                                                                     \
  }

static void lamb_warm(void) {
  static const struct kernel_test test = {
      .cases = LAMB_CASES, .once = true, .host = warm_on_host, .device = warm_on_device};
  kernel_walk(&test);
}

static void lamb_correct(void) {
  static const struct kernel_test test = {
      .cases = LAMB_CASES, .once = true, .host = correct_on_host, .device = correct_on_device};
  kernel_walk(&test);
}

static const struct gpu_test tests[] = {
    {"pass squares", walk_SQUARES, false},
    {"pass power", walk_POWER, false},
    {"pass adam", walk_ADAM, false},
    {"pass freeze", walk_FREEZE, false},
    {"pass freeze step", walk_FREEZE_STEP, false},
    {"pass frozen", walk_FROZEN, false},
    {"pass apply", walk_APPLY, false},
    {"pass apply step", walk_APPLY_STEP, false},
    {"pass sgd", walk_SGD, false},
    {"pass sgd freeze", walk_SGD_FREEZE, false},
    {"pass lamb", walk_LAMB, false},
    {"pass lamb move", walk_LAMB_MOVE, false},
    {"pass lamb freeze", walk_LAMB_FREEZE, false},
    {"pass lamb fresh", walk_LAMB_FRESH, false},
    {"pass lamb frozen", walk_LAMB_FROZEN, false},
    {"pass zero-one", walk_ZERO_ONE, false},
    {"pass zero-one freeze", walk_ZERO_ONE_FREEZE, false},
    {"pass zero-one local", walk_ZERO_ONE_LOCAL, false},
    {"pass zero-one meet", walk_ZERO_ONE_STORE, false},
    {"pass zero-one met", walk_ZERO_ONE_MET, false},
    {"pass share", walk_SHARD, false},
    {"pass share move", walk_SHARD_MOVE, false},
    {"pass step", walk_STEP, false},
    {"pass step norms", walk_STEP_NORMS, false},
    {"pass lion", walk_LION, false},
    {"lamb's ratios", lamb_warm, false},
    {"lamb's factors", lamb_correct, false},
};
GPU_SUITE("kernels of passes", tests)
