/* The passes of the optimizers against the codec: each kind, and the sums of what they sum. */
#include "collectives/step_parts.h"
#include "tests/gpu/harness.h"
#include "tests/gpu/kernel_test.h"

/* --- Passes */

static void pass_over_on_host(struct scene *scene, size_t chunk) {
  (void)chunk;
  if (!scene->what->stop)
    ob_pass_blocks(&scene->host.work, NULL, NULL, NULL, &scene->sink);
}

static cudaError_t pass_over_on_device(struct scene *scene, size_t chunk) {
  (void)chunk;
  return ob_cuda_pass_over(scene->device, scene->pass, 0);
}

static void apply_on_host(struct scene *scene, size_t chunk) {
  ob_place_host.apply(&scene->host, chunk);
}

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
PASS(ZERO_ONE_MEET)
PASS(ZERO_ONE_MET)
PASS(SHARE)
PASS(SHARE_MOVE)

/* --- Sums */

static void total_on_host(struct scene *scene, size_t chunk) {
  const int which = scene->what->adds_up ? OB_LARGEST : 1;
  const double *sums = scene->sink.sums[which];
  const size_t end = scene->host.layout.blocks, first = end / 3;
  (void)chunk;
  double total = 0;
  for (size_t b = first; b < end; b++)
    total = which == OB_LARGEST ? fmax(total, sums[b]) : total + sums[b];
  *scene->total = total;
}

static cudaError_t total_on_device(struct scene *scene, size_t chunk) {
  const int which = scene->what->adds_up ? OB_LARGEST : 1;
  const size_t end = scene->host.layout.blocks;
  (void)chunk;
  return ob_cuda_total(scene->pass.sums[which], which, end / 3, end, ON_DEVICE(scene, scene->total),
                       0);
}

static void total(void) {
  static const struct kernel_test test = {
      .cases = {.modes = MODE(SCENE_EXCHANGE),
                .one_scale = true,
                .passes = true,
                .kind = OB_PASS_LAMB_FRESH},
      .once = true,
      .host = total_on_host,
      .device = total_on_device,
  };
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
    {"pass zero-one meet", walk_ZERO_ONE_MEET, false},
    {"pass zero-one met", walk_ZERO_ONE_MET, false},
    {"pass share", walk_SHARE, false},
    {"pass share move", walk_SHARE_MOVE, false},
    {"total", total, false},
};
GPU_SUITE("kernels of passes", tests)
