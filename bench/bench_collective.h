/*
 * The benchmarks of the three collectives, blocking and beside a computation, on the host and on a
 * device.
 *
 * A case has buffers of one size and the ways to be compared: plans, calls of a plan, and dense
 * algorithms; an entry each, timed by turns, and a row (bench_collective.c; bench_overlap.c with a
 * computation, bench_collective_cuda.c on a device). bench_check.c looks at the results.
 */
#ifndef BENCH_COLLECTIVE_H
#define BENCH_COLLECTIVE_H

#include "bench/bench.h"

/* The times of a nonblocking collective: of the communication alone, of a computation that takes as
 * long, and of both together. */
enum { BENCH_PURE, BENCH_COMPUTE, BENCH_OVERALL };

/* The part of the communication that the computation hides, in percent, from the three times. */
double bench_overlap_percent(double overall, double compute, double pure);

/* The properties in which collectives differ. */
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

extern const struct bench_collective bench_collectives[]; /* by onebit_operation_t */

/* A way to run the collective: a plan or a dense algorithm. Entry k of the rounds belongs to way k
 * and has it as its context. */
struct bench_way {
  struct bench_case *test;
  struct bench_variant variant;            /* the requested schedule, wire and bits */
  const struct bench_algorithm *algorithm; /* NULL: it is a plan */
  onebit_plan_t plan;                      /* NULL with no algorithm: the library refused */
  char refusal[256];                       /* the library's message */
  double computing; /* seconds of all cores in a call's arithmetic, with --rate */
  bool right;
  bool half; /* NCCL's collective runs in bfloat16 */
};

/* The functions that differ between host, device and nonblocking benchmarks. */
struct bench_calls {
  int (*add)(struct bench_case *test); /* adds the ways */
  int (*measure)(struct bench_job *job, struct bench_case *test);
  /* Steps of bench_measure_ways: synchronize, or NULL, follows the rounds; judge checks results
   * with -c; note prints lines above the rows. */
  int (*synchronize)(struct bench_case *test);
  int (*judge)(struct bench_case *test, bool *right);
  void (*note)(struct bench_job *job, const struct bench_case *test);
};

/* The buffers of one size, and the ways of a collective on them. */
struct bench_case {
  struct bench_team *team;
  const struct bench_options *options;
  const struct bench_collective *collective;
  const struct bench_calls *calls;
  const struct bench_space *space;
  struct bench_device *device; /* NULL: the host */
  onebit_comm_t comm;
  struct ncclComm *nccl; /* NULL: another transport */
  size_t bytes, count, send_count, receive_count;
  onebit_plan_t plan;                /* the plan of one of the ways */
  float *dense_send, *dense_receive; /* dense_receive NULL: no dense collective */
  void *send, *receive;              /* of the options' dtype; `send` may be dense_send */
  void *half_send;                   /* bfloat16, of a device */
  size_t plan_count;                 /* the first ways are the library's */
  struct bench_way ways[BENCH_VARIANTS + BENCH_ALGORITHMS + 1];
  struct bench_rounds rounds;
};

/* Creates a case. Collective. Returns an exit status, the same on all ranks; after a failure there
 * is nothing to destroy. */
int bench_case_create(struct bench_team *team, const struct bench_options *options,
                      const struct bench_collective *collective, size_t bytes,
                      struct bench_case *test);
void bench_case_destroy(struct bench_case *test);

/* Adds a way, with an entry. */
struct bench_way *bench_case_add(struct bench_case *test, const char *name, bench_timed *run);
onebit_plan_options_t bench_case_options(const struct bench_case *test,
                                         struct bench_variant variant, onebit_device_t device);
onebit_plan_info_t bench_plan_info(onebit_plan_t plan);

/* Sets the numbers of calls from the options, or by default from the size, and updates the job's
 * progress. */
void bench_case_set_iterations(struct bench_job *job, const struct bench_case *test,
                               struct bench_rounds *rounds);

/* Makes one call and checks its result: element by element it must follow from the inputs and the
 * change of the residuals (onebit/plan.h), to rounding, and where all ranks get the same result, it
 * must be the same to the bit. *right, and the exit status, are the same on all ranks. */
int bench_case_check(struct bench_case *test, bool *right);

/* Checks every plan of the case, with -c. */
int bench_case_check_all(struct bench_case *test, bool *right);

/* Measures way->computing of every plan. bench_wire_seconds returns the seconds of `bytes` on a
 * link. */
int bench_measure_limits(struct bench_case *test);
double bench_wire_seconds(const struct bench_options *options, double bytes);

/* --- Rows */

struct bench_row {
  const struct bench_case *test;
  const struct bench_way *way;
  const struct bench_entry *time;
  const struct bench_entry *dense; /* the fastest dense entry; NULL: none */
  const char *dense_name;
  double of_best; /* the time relative to the fastest, with --compare; or NAN */
  bool own;       /* the row is the library's, not MPI's or NCCL's */
  /* NULL if the row is blocking, or has no dense entry. Valid once the pure time is known. */
  const struct bench_entry *overlap, *dense_overlap;
  size_t tests;
};

/* The bandwidths in GB/s of float32 as nccl-tests define them: algbw is of the larger buffer, busbw
 * of the bytes that a link would carry. */
double bench_algbw(const struct bench_case *test, double seconds);
double bench_busbw(const struct bench_case *test, double seconds);

void bench_collective_print_heads(struct bench_table *table, const struct bench_row *row);
void bench_collective_print_row(struct bench_table *table, const struct bench_row *row);
void bench_collective_print_notes(struct bench_job *job, const struct bench_case *test);

/* --- The subcommands' runs */

/* Returns a job's case without a size; bench_measure_collective_size measures it with one. */
struct bench_case bench_case_without_size(struct bench_job *job);
bench_size bench_measure_collective_size;
int bench_measure_ways(struct bench_job *job, struct bench_case *test);
int bench_measure_overlap(struct bench_job *job,
                          struct bench_case *test); /* beside a computation */

#endif
