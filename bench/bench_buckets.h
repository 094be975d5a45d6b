/* The benchmark of steps that overlap with a backward pass. */
#ifndef BENCH_BUCKETS_H
#define BENCH_BUCKETS_H

#include "bench/bench.h"

int bench_run_buckets(const struct bench_benchmark *benchmark, const struct bench_options *options,
                      struct bench_team *team);

#endif
