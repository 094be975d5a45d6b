/*
 * The dense optimizers that onebit-bench compares with are what they are said to be: what the
 * library's warm-up makes of the same numbers, in every bit; LAMB's norms are added up in another
 * order.
 */
#include "bench/bench_passes.h"
#include "compression/codec.h"
#include "tests/support.h"

enum { COUNT = 5003, STEPS = 3 };
struct fused_arrays {
  float parameter[COUNT], momentum[COUNT], variance[COUNT], update[COUNT];
};

static void begin(struct fused_arrays *arrays) {
  memset(arrays, 0, sizeof *arrays);
  fill_input(arrays->parameter, ONEBIT_FLOAT32, COUNT, 3, 0);
}

static const struct ob_adam_factors factors = {0.9f, 0.99f, 0.1f, 0.01f, 1.5f, 2.5f, 1e-6f};
static const struct ob_lion_factors lion = {0.9f, 0.1f, 0.98f, 0.02f};

static void one_pass(struct fused_arrays *arrays, float *gradient, enum ob_pass_kind kind) {
  struct ob_pass_run run = {.kind = kind,
                            .width = 1,
                            .count = COUNT,
                            .arrays = {[OB_MOMENTUM] = arrays->momentum,
                                       [OB_VARIANCE] = arrays->variance,
                                       [OB_SCRATCH] = gradient},
                            .parameter = arrays->parameter,
                            .factors = {.adam = factors,
                                        .lion = lion,
                                        .gradient_factor = 1,
                                        .learning_rate = 0.01f,
                                        .weight_decay = 0.1f,
                                        .bound = INFINITY}};
  ob_codec_scalar.pass(&run);
}

static void check_fused(void (*fused_step)(struct bench_fused *), enum ob_pass_kind kind) {
  static struct fused_arrays plain, wanted;
  static float gradient[COUNT], given[COUNT];
  begin(&plain);
  begin(&wanted);
  for (int step = 0; step < STEPS; step++) {
    fill_input(gradient, ONEBIT_FLOAT32, COUNT, 0, step);
    memcpy(given, gradient, sizeof given);
    struct bench_fused fused = {.factors = &factors,
                                .lion = &lion,
                                .learning_rate = 0.01f,
                                .weight_decay = 0.1f,
                                .count = COUNT,
                                .gradient = gradient,
                                .parameter = plain.parameter,
                                .momentum = plain.momentum,
                                .variance = plain.variance,
                                .update = plain.update};
    fused_step(&fused);
    one_pass(&wanted, given, kind);
  }
  CHECK_BITS("momentum", plain.momentum, wanted.momentum, COUNT, ONEBIT_FLOAT32);
  CHECK_BITS("variance", plain.variance, wanted.variance, COUNT, ONEBIT_FLOAT32);
  CHECK_BITS("parameters", plain.parameter, wanted.parameter, COUNT, ONEBIT_FLOAT32);
  if (kind == OB_PASS_LAMB) /* the library leaves the update where the gradient was */
    CHECK_BITS("update", plain.update, given, COUNT, ONEBIT_FLOAT32);
}

Test(bench_fused, plain_loops_are_the_dense_optimizers) {
  check_fused(bench_fused_adam, OB_PASS_ADAM);
  check_fused(bench_fused_momentum, OB_PASS_SGD);
  check_fused(bench_fused_lion, OB_PASS_LION);
  check_fused(bench_fused_lamb, OB_PASS_LAMB);
  float p[3] = {3, 4, 0}, u[3] = {0, 1, 0};
  struct bench_fused lamb = {.learning_rate = 0.5f,
                             .count = 3,
                             .parameter = p,
                             .update = u,
                             .norms = {25, 1}}; /* the ratio is 5 */
  bench_fused_lamb_move(&lamb);
  CHECK(p[0] == 3 && p[1] == 4 - 0.5f * 5, "moved to %g and %g", (double)p[0], (double)p[1]);
}
