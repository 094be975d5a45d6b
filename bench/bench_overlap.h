/* A communication beside a computation: nonblocking collectives, and steps of an optimizer. */
#ifndef BENCH_OVERLAP_H
#define BENCH_OVERLAP_H

#include "bench/bench.h"

/* What is timed: alone, a computation as long as it, one after the other, and the two together. */
enum { BENCH_PURE, BENCH_COMPUTE, BENCH_OVERALL, BENCH_APART };

/* Something that is started, looked at while a computation runs, and finished. */
struct bench_side {
  void *context;
  onebit_status_t (*start)(void *context);
  onebit_status_t (*look)(void *context, size_t which);
  onebit_status_t (*finish)(void *context);
  size_t slices, looks;   /* of the computation; looks are behind the first slices */
  size_t units;           /* of the computation, in all; 0: it is to be found */
  onebit_status_t status; /* the first that went wrong */
};

/* Adds entries PURE, COMPUTE, OVERALL and, if `apart`, APART. */
void bench_side_add(struct bench_rounds *rounds, struct bench_side *side, bool apart);

/* Makes the computation of each side, whose entries are `stride` apart, as long as the
 * communication is in rounds such as will be timed. An exit status. */
int bench_sides_calibrate(struct bench_rounds *rounds, struct bench_side *sides, size_t count,
                          size_t stride, size_t warmups);

/* In percent, of the three times: what the computation hides of the communication. */
double bench_overlap_percent(double overall, double compute, double pure);

#endif
