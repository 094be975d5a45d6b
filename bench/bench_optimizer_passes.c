/* The passes of optimizers' steps: the library's own, through the functions that its steps call,
 * and dense ones. */
#include "base/memory.h"
#include "bench/bench_fused.h"
#include "bench/bench_optimizers.h"

/* --- Dense steps */

static struct bench_fused fused_of(const struct bench_passes *passes) {
  return (struct bench_fused){.factors = &bench_factors,
                              .lion = &bench_lion_factors,
                              .learning_rate = passes->learning_rate,
                              .weight_decay = passes->weight_decay,
                              .count = passes->count,
                              .gradient = passes->gradient,
                              .parameter = passes->parameters,
                              .momentum = passes->momentum,
                              .variance = passes->variance,
                              .update = passes->output};
}

static void run_fused_adam(struct bench_passes *passes, size_t streams) {
  struct bench_fused fused = fused_of(passes);
  (void)streams;
  bench_fused_adam(&fused);
}

static void run_fused_lamb(struct bench_passes *passes, size_t streams) {
  struct bench_fused fused = fused_of(passes);
  (void)streams;
  bench_fused_lamb(&fused);
  bench_fused_lamb_move(&fused);
}

static void run_fused_momentum(struct bench_passes *passes, size_t streams) {
  struct bench_fused fused = fused_of(passes);
  (void)streams;
  bench_fused_momentum(&fused);
}

static void run_fused_lion(struct bench_passes *passes, size_t streams) {
  struct bench_fused fused = fused_of(passes);
  (void)streams;
  bench_fused_lion(&fused);
}

/* The arrays that passes know by their slots. What is read as a variance is a reciprocal, or a
 * denominator, where the stage has those; any positive numbers will do. */
static struct ob_pass_sink sink_of(const struct bench_passes *passes, enum ob_pass_kind kind,
                                   bool frozen, float **parameters) {
  struct ob_pass_sink sink = bench_sink(passes, kind, parameters);
  sink.arrays[OB_MOMENTUM] = passes->momentum;
  sink.arrays[OB_VARIANCE] = frozen ? passes->reciprocals : passes->variance;
  sink.arrays[OB_SCRATCH] = passes->output;
  sink.arrays[OB_FRESH] = passes->optimizer_arrays->fresh;
  sink.arrays[OB_ANCHOR] = passes->optimizer_arrays->anchor;
  sink.factors.rate_sum = 1;
  for (int k = 0; k < OB_SUMS; k++)
    sink.sums[k] = ob_pass_sums(kind) & OB_MASK(k) ? passes->optimizer_arrays->sums[k] : NULL;
  return sink;
}

static void on_arrays(struct bench_passes *passes, enum ob_pass_kind kind, bool frozen) {
  float *parameters = passes->parameters;
  const void *gradient = passes->input;
  struct ob_pass_sink sink = sink_of(passes, kind, frozen, &parameters);
  sink.gradients = &gradient;
  bench_pass_on_arrays(passes, &sink);
}

static void on_messages(struct bench_passes *passes, enum ob_pass_kind kind) {
  float *parameters = passes->parameters;
  struct ob_pass_sink sink = sink_of(passes, kind, true, &parameters);
  sink.factors.scaling = 1;
  bench_pass_on_messages(passes, &sink);
}

/* In a dense step the mean gradient is what the exchange has left. */
static void run_lamb(struct bench_passes *passes, size_t streams) {
  float *parameters = passes->parameters;
  struct ob_pass_sink sink = sink_of(passes, OB_PASS_LAMB, false, &parameters);
  (void)streams;
  sink.arrays[OB_SCRATCH] = passes->output;
  bench_pass_on_arrays(passes, &sink);
  on_arrays(passes, OB_PASS_LAMB_MOVE, false);
}

static void run_on_mean(struct bench_passes *passes, enum ob_pass_kind kind) {
  float *parameters = passes->parameters;
  struct ob_pass_sink sink = sink_of(passes, kind, false, &parameters);
  sink.arrays[OB_SCRATCH] = passes->gradient;
  sink.factors.lion = bench_lion_factors;
  bench_pass_on_arrays(passes, &sink);
}

static void run_momentum(struct bench_passes *passes, size_t streams) {
  (void)streams;
  run_on_mean(passes, OB_PASS_SGD);
}

static void run_lion(struct bench_passes *passes, size_t streams) {
  (void)streams;
  run_on_mean(passes, OB_PASS_LION);
}

/* --- Parts of compressed steps */

static void run_compress_step(struct bench_passes *passes, size_t streams) {
  const void *input = passes->input;
  (void)streams;
  bench_pass_compress(passes, &(struct ob_source){.inputs = &input,
                                                  .factor = 1,
                                                  .momentum = true,
                                                  .decay = bench_factors.beta1,
                                                  .weight = bench_factors.one_minus_beta1,
                                                  .reciprocals = passes->reciprocals});
}

static void compress_normalized(struct bench_passes *passes, bool momentum) {
  const void *input = passes->input;
  struct ob_kept *kept = &passes->plan->worker;
  for (int copy = 0; copy < 2; copy++)
    kept->moments[copy] = passes->optimizer_arrays->moments[copy];
  bench_pass_compress(
      passes, &(struct ob_source){.inputs = &input,
                                  .factor = 1,
                                  .momentum = momentum,
                                  .decay = bench_factors.beta1,
                                  .weight = bench_factors.one_minus_beta1,
                                  .moment_rule = OB_MOMENTS_SECOND,
                                  .moment = {.beta2 = bench_factors.beta2,
                                             .one_minus_beta2 = bench_factors.one_minus_beta2,
                                             .epsilon = bench_factors.epsilon,
                                             .now = 0.0625f,
                                             .before = 0.1875f}});
  kept->moments[0] = kept->moments[1] = NULL;
}

static void run_compress_normalized(struct bench_passes *passes, size_t streams) {
  (void)streams;
  compress_normalized(passes, true);
}

static void run_compress_lion(struct bench_passes *passes, size_t streams) {
  (void)streams;
  compress_normalized(passes, false);
}

static void run_apply_step(struct bench_passes *passes, size_t streams) {
  (void)streams;
  on_messages(passes, OB_PASS_APPLY_STEP);
}

static void run_lamb_fresh(struct bench_passes *passes, size_t streams) {
  (void)streams;
  on_messages(passes, OB_PASS_LAMB_FRESH);
}

static void run_zero_one(struct bench_passes *passes, size_t streams) {
  (void)streams;
  on_messages(passes, OB_PASS_ZERO_ONE);
}

static void run_look(struct bench_passes *passes, size_t streams) {
  (void)streams;
  on_arrays(passes, OB_PASS_SQUARES, true);
}

static void run_local(struct bench_passes *passes, size_t streams) {
  (void)streams;
  on_arrays(passes, OB_PASS_ZERO_ONE_LOCAL, true);
}

static void run_meet(struct bench_passes *passes, size_t streams) {
  (void)streams;
  on_arrays(passes, OB_PASS_ZERO_ONE_MEET, true);
}

static void run_met(struct bench_passes *passes, size_t streams) {
  (void)streams;
  on_messages(passes, OB_PASS_ZERO_ONE_MET);
}

/* What must move, as in bench_passes.c. */
const struct bench_pass
    /* gradient, moments and parameter in; the last three out */
    bench_fused_adam_step = {"fused adam", run_fused_adam, .floats = 7},
    /* the four in, moments and update out; update and parameter in, parameter out */
    bench_fused_lamb_step = {"fused lamb", run_fused_lamb, .floats = 10},
    /* gradient, momentum and parameter in; the last two out */
    bench_fused_momentum_step = {"fused momentum", run_fused_momentum, .floats = 5},
    bench_lamb = {"dense lamb", run_lamb, .floats = 10},
    bench_momentum = {"dense momentum", run_momentum, .floats = 5},
    bench_fused_lion_step = {"fused lion", run_fused_lion, .floats = 5},
    bench_lion = {"dense lion", run_lion, .floats = 5},
    /* gradient, reciprocal, kept value and the last bit in; kept value and bit out */
    bench_compress_step = {"compress step", run_compress_step, .inputs = 1, .floats = 3, .bits = 2},
    /* gradient, second moment, compensated value, last bit in; all but the first out */
    bench_compress_normalized = {"compress normalized", run_compress_normalized, .inputs = 1,
                                 .floats = 3, .bits = 2},
    /* likewise without that bit */
    bench_compress_lion = {"compress lion", run_compress_lion, .inputs = 1, .floats = 3, .bits = 1},
    /* a bit and the parameter in; the parameter out */
    bench_apply_step = {"apply step", run_apply_step, .floats = 2, .bits = 1},
    /* two bits, reciprocal, fresh variance and parameter in; the fresh variance out */
    bench_lamb_fresh = {"lamb fresh", run_lamb_fresh, .floats = 4, .bits = 2},
    /* a bit, moments and parameter in; momentum and parameter out */
    bench_zero_one = {"zero-one apply", run_zero_one, .floats = 5, .bits = 1},
    /* the gradient in */
    bench_zero_one_look = {"zero-one look", run_look, .inputs = 1},
    /* gradient, momentum, denominator and parameter in; momentum and parameter out */
    bench_zero_one_local = {"zero-one local", run_local, .inputs = 1, .floats = 5},
    /* these four and the anchor in; the movement out */
    bench_zero_one_meet = {"zero-one meet", run_meet, .inputs = 1, .floats = 5},
    /* a bit, denominator and anchor in; momentum, parameter and anchor out */
    bench_zero_one_met = {"zero-one met", run_met, .floats = 5, .bits = 1};

bool bench_optimizer_arrays_create(struct bench_passes *passes,
                                   struct bench_optimizer_arrays *arrays) {
  size_t blocks = passes->plan->geometry.layout.blocks;
  *arrays = (struct bench_optimizer_arrays){.fresh = ob_allocate(passes->count, sizeof(float)),
                                            .anchor = ob_allocate(passes->count, sizeof(float))};
  bool made = arrays->fresh && arrays->anchor;
  for (int copy = 0; copy < 2; copy++) {
    arrays->moments[copy] = ob_allocate(passes->count, sizeof(uint16_t));
    made = made && arrays->moments[copy];
  }
  for (int k = 0; k < OB_SUMS; k++) {
    arrays->sums[k] = ob_allocate(blocks, sizeof(double));
    made = made && arrays->sums[k];
  }
  for (size_t i = 0; made && i < passes->count; i++) {
    arrays->fresh[i] = passes->variance[i];
    arrays->anchor[i] = passes->parameters[i];
    for (int copy = 0; copy < 2; copy++)
      arrays->moments[copy][i] = ob_to_bfloat16(passes->variance[i]);
  }
  passes->optimizer_arrays = arrays;
  return made;
}

void bench_optimizer_arrays_destroy(struct bench_optimizer_arrays *arrays) {
  ob_release(arrays->fresh);
  ob_release(arrays->anchor);
  ob_release(arrays->moments[0]);
  ob_release(arrays->moments[1]);
  for (int k = 0; k < OB_SUMS; k++)
    ob_release(arrays->sums[k]);
}
