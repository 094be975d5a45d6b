/* The passes of optimizers' steps, each timed alone on the arrays of struct bench_passes. */
#ifndef BENCH_OPTIMIZERS_H
#define BENCH_OPTIMIZERS_H

#include "bench/bench_passes.h"

/* What only they need. */
struct bench_optimizer_arrays {
  float *fresh, *anchor;
  uint16_t *moments[2];
  double *sums[OB_SUMS]; /* one a block */
};

/* Sets passes->optimizer_arrays. False without memory; to be destroyed all the same. */
bool bench_optimizer_arrays_create(struct bench_passes *passes,
                                   struct bench_optimizer_arrays *arrays);
void bench_optimizer_arrays_destroy(struct bench_optimizer_arrays *arrays);

/* Dense steps: plain loops (bench_fused.h), and the library's. */
extern const struct bench_pass bench_fused_adam_step, bench_fused_lamb_step,
    bench_fused_momentum_step, bench_fused_lion_step, bench_lamb, bench_momentum, bench_lion;

/* Parts of compressed steps, besides those of bench_passes.h. */
extern const struct bench_pass bench_compress_step, bench_compress_normalized, bench_compress_lion,
    bench_apply_step, bench_lamb_fresh, bench_zero_one, bench_zero_one_look, bench_zero_one_local,
    bench_zero_one_meet, bench_zero_one_met;

int bench_run_optimizers(const struct bench_benchmark *benchmark,
                         const struct bench_options *options, struct bench_team *team);

#endif
