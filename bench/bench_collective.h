/* The benchmarks of the three collectives. */
#ifndef BENCH_COLLECTIVE_H
#define BENCH_COLLECTIVE_H

#include <stdint.h>

#include "bench/bench.h"

/* What differs between them. */
struct bench_collective {
  const char *name, *dense_name;
  onebit_operation_t operation;
  onebit_status_t (*call)(const void *sendbuf, void *recvbuf, onebit_plan_t plan);
  bool gathers, scatters; /* the receive, or the send, buffer has count elements for every rank */
};

extern const struct bench_collective bench_collectives[]; /* by onebit_operation_t */

/* A collective on buffers of one size. */
struct bench_case {
  struct bench_team *team;
  const struct bench_options *options;
  const struct bench_collective *collective;
  size_t count, send_count, receive_count;
  onebit_plan_t plan;
  float *dense_send, *dense_receive; /* dense_receive NULL: no dense collective */
  void *send, *receive;              /* of the options' dtype; `send` may be dense_send */
};

/* Collective. An exit status, the same on all ranks; after a failure there is nothing to destroy.
 */
int bench_case_create(struct bench_team *team, const struct bench_options *options,
                      const struct bench_collective *collective, size_t bytes,
                      struct bench_case *test);
void bench_case_destroy(struct bench_case *test);

/* Makes one call and checks its result: element by element it is what the inputs and the change of
 * the kept errors say (onebit/plan.h), to rounding, and where all ranks get the same result, it is
 * the same to the bit. *right, and the exit status, are the same on all ranks. */
int bench_case_check(struct bench_case *test, bool *right);

/* Makes one call and prints what its steps took on every rank. An exit status. */
int bench_timeline(struct bench_case *test);

int bench_run_collective(const struct bench_benchmark *benchmark,
                         const struct bench_options *options, struct bench_team *team);

#endif
