/*
 * The benchmarks of the three collectives, blocking and beside a computation.
 *
 * A case (bench_case.c) has buffers of one size and the ways to be compared: plans, and dense
 * algorithms. They are timed by turns (bench_collective.c; bench_overlap.c with a computation), and
 * each becomes a row, for people (bench_print.c) or for programs (bench_json.c). bench_check.c and
 * bench_error.c look at the results.
 */
#ifndef BENCH_COLLECTIVE_H
#define BENCH_COLLECTIVE_H

#include <stdint.h>
#include <stdio.h>

#include "bench/bench.h"

/* What differs between them. */
struct bench_collective {
  const char *name, *dense_name;
  onebit_operation_t operation;
  onebit_status_t (*call)(const void *sendbuf, void *recvbuf, onebit_plan_t plan);
  bool gathers, scatters; /* the receive, or the send, buffer has count elements for every rank */
  /* Nonblocking. */
  const char *nonblocking_name, *nonblocking_dense_name;
  onebit_status_t (*start)(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                           onebit_request_t *request);
};

extern const struct bench_collective bench_collectives[];               /* by onebit_operation_t */
const struct bench_collective *bench_find_collective(const char *name); /* of a subcommand */

/* One of the things that take turns: a plan, or a dense algorithm. */
struct bench_way {
  struct bench_variant variant;            /* what was asked of the plan */
  const struct bench_algorithm *algorithm; /* NULL: it is a plan */
  onebit_plan_t plan;                      /* NULL as well: the library refused */
  char refusal[256];                       /* its words */
  double *times;
  struct bench_statistics time;
  uint64_t sent;     /* bytes, in all calls */
  double wire_bytes; /* of one call: the most that a rank sent */
  double link_bytes; /* of one call, once summed up: the most that a host's interface sent */
  double error;      /* relative, of one call; not a number: nobody asked */
  bool right;
};

/* A collective on buffers of one size. */
struct bench_case {
  struct bench_team *team;
  const struct bench_options *options;
  const struct bench_collective *collective;
  size_t bytes, count, send_count, receive_count;
  onebit_plan_t plan;                /* one of the ways' */
  float *dense_send, *dense_receive; /* dense_receive NULL: no dense collective */
  void *send, *receive;              /* of the options' dtype; `send` may be dense_send */
  size_t plan_count, way_count;      /* the ways that are plans come first */
  struct bench_way ways[BENCH_VARIANTS + BENCH_ALGORITHMS + 1];
};

/* Collective. An exit status, the same on all ranks; after a failure there is nothing to destroy.
 */
int bench_case_create(struct bench_team *team, const struct bench_options *options,
                      const struct bench_collective *collective, size_t bytes,
                      struct bench_case *test);
void bench_case_destroy(struct bench_case *test);

/* How often: what the options say, or what the size says. */
size_t bench_case_iterations(const struct bench_case *test);
size_t bench_case_warmups(const struct bench_case *test);

/* Makes one call and checks its result: element by element it is what the inputs and the change of
 * the residuals say (onebit/plan.h), to rounding, and where all ranks get the same result, it is
 * the same to the bit. *right, and the exit status, are the same on all ranks. */
int bench_case_check(struct bench_case *test, bool *right);

/* Makes one call with no error kept from before: *error = |result - exact| / |exact| of rank 0's
 * result, on rank 0; elsewhere, and when memory is out, not a number. */
int bench_case_error(struct bench_case *test, double *error);

/* Both of them for every plan of the case, as the options ask. */
int bench_case_judge(struct bench_case *test, bool *right);

/* --- Beside a computation. Each an array of seconds, one a round, and what is said of it. */

struct bench_overlap {
  double *pure_times, *compute_times, *overall_times;
  struct bench_statistics pure, compute, overall;
  size_t units, tests; /* of the computation */
  double percent;
};

/* In percent, of the three times. */
double bench_overlap_percent(double overall, double compute, double pure);

/* --- Rows */

struct bench_row {
  const struct bench_case *test;
  const struct bench_way *way;
  const struct bench_way *dense; /* the best; NULL: there is none */
  size_t iterations;
  double of_best;                                      /* --compare; not a number: nothing to say */
  const struct bench_overlap *overlap, *dense_overlap; /* NULL: blocking; no dense */
};

/* GB/s of float32 as nccl-tests count it: of the larger buffer, and what a link would carry. */
double bench_algbw(const struct bench_case *test, double seconds);
double bench_busbw(const struct bench_case *test, double seconds);

/* What the row is called: "exchange:dense", "MPI ring". */
void bench_way_name(const struct bench_way *way, char name[48]);

void bench_print_head(const struct bench_case *test, bool nonblocking);
void bench_print_row(const struct bench_row *row);
/* One line. */
void bench_json_row(FILE *stream, const struct bench_row *row);
/* The row as the options ask, on standard output. */
void bench_report_row(const struct bench_row *row);

/* --- What a subcommand runs */

/* The shape of both: each size's case is made, given to `measure` and destroyed. */
typedef int bench_measure(struct bench_case *test, bool first);
int bench_run_sizes(const struct bench_benchmark *benchmark, const struct bench_options *options,
                    struct bench_team *team, bench_measure *measure);

/* Makes one call and prints what its steps took on every rank. An exit status. */
int bench_timeline(struct bench_case *test);

int bench_run_collective(const struct bench_benchmark *benchmark,
                         const struct bench_options *options, struct bench_team *team);
int bench_run_nonblocking(const struct bench_benchmark *benchmark,
                          const struct bench_options *options, struct bench_team *team);

#endif
