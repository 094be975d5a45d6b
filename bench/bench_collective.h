/*
 * The benchmarks of the three collectives: blocking calls, and nonblocking ones beside a
 * computation, on the host and on a device.
 *
 * A case has buffers of one size, and several ways to run the collective, which are compared:
 * plans, calls of a plan, and dense algorithms. Each way has an entry, which is timed by turns, and
 * a row. bench_collective.c implements cases, bench_overlap.c those with a computation,
 * bench_collective_cuda.c those on a device. bench_check.c checks the results. */
#ifndef BENCH_COLLECTIVE_H
#define BENCH_COLLECTIVE_H

#include "bench/bench.h"

/* The times of a nonblocking collective: of the communication alone, of a computation that takes
 * equally long, and of both together. */
enum { BENCH_PURE, BENCH_COMPUTE, BENCH_OVERALL };

/* Returns the part of the communication that the computation hides, in percent. */
double bench_overlap_percent(double overall, double compute, double pure);

/* The properties in which collectives differ. */
struct bench_collective {
  const char *name, *dense_name;
  onebit_operation_t operation;
  onebit_status_t (*call)(const void *sendbuf, void *recvbuf, onebit_plan_t plan);
  bool gathers, scatters; /* the receive, the send buffer has `count` elements for each rank */
  /* Nonblocking. */
  const char *nonblocking_name, *nonblocking_dense_name;
  onebit_status_t (*start)(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                           onebit_request_t *request);
};

extern const struct bench_collective bench_collectives[]; /* indexed by onebit_operation_t */

/* A way to run the collective: a plan or a dense algorithm. Entry k of the rounds is for way k,
 * which is its context. */
struct bench_way {
  struct bench_case *test;
  struct bench_variant variant;            /* the requested schedule, wire and bits */
  const struct bench_algorithm *algorithm; /* NULL: the way is a plan */
  onebit_plan_t plan;                      /* NULL and no algorithm: the plan was refused */
  char refusal[256];                       /* the library's error message */
  double computing; /* with --rate: seconds of arithmetic in a call, of all cores */
  bool right;
  bool half; /* NCCL's collective runs in bfloat16 */
};

/* The functions that differ between host, device and nonblocking benchmarks. */
struct bench_calls {
  int (*add)(struct bench_case *test); /* adds the ways to run the collective */
  int (*measure)(struct bench_job *job, struct bench_case *test);
  /* Steps of bench_measure_ways. synchronize, which may be NULL, follows the rounds. judge checks
   * the results with -c. note prints lines above the rows. */
  int (*synchronize)(struct bench_case *test);
  int (*judge)(struct bench_case *test, bool *right);
  void (*note)(struct bench_job *job, const struct bench_case *test);
};

/* The buffers of one size, and the ways to run a collective on them. */
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
  void *send, *receive;              /* buffers of the options' dtype; `send` may be dense_send */
  void *half_send;                   /* bfloat16 values on a device */
  size_t plan_count;                 /* the number of plans, which are the first ways */
  struct bench_way ways[BENCH_VARIANTS + BENCH_ALGORITHMS + 1];
  struct bench_rounds rounds;
};

/* Creates a case. Collective. Returns an exit status, which is the same on all ranks. After a
 * failure the caller has nothing to destroy. */
int bench_case_create(struct bench_team *team, const struct bench_options *options,
                      const struct bench_collective *collective, size_t bytes,
                      struct bench_case *test);
void bench_case_destroy(struct bench_case *test);

/* Adds a way to run the collective, with its entry. */
struct bench_way *bench_case_add(struct bench_case *test, const char *name, bench_timed *run);
onebit_plan_options_t bench_case_options(const struct bench_case *test,
                                         struct bench_variant variant, onebit_device_t device);
onebit_plan_info_t bench_plan_info(onebit_plan_t plan);

/* Sets the numbers of calls by the options, or by default from the size. Also updates the job's
 * progress. */
void bench_case_set_iterations(struct bench_job *job, const struct bench_case *test,
                               struct bench_rounds *rounds);

/* Makes one call and checks its result. Each element must follow from the inputs and the change of
 * the residuals (onebit/plan.h), apart from rounding. If all ranks get the same result, it must be
 * equal to the bit. *right and the exit status are the same on all ranks. */
int bench_case_check(struct bench_case *test, bool *right);

/* Checks every plan of the case. Called with -c. */
int bench_case_check_all(struct bench_case *test, bool *right);

/* bench_measure_limits measures way->computing of every plan. bench_wire_seconds returns the
 * seconds in which a link carries `bytes` bytes. */
int bench_measure_limits(struct bench_case *test);
double bench_wire_seconds(const struct bench_options *options, double bytes);

/* --- Rows */

struct bench_row {
  const struct bench_case *test;
  const struct bench_way *way;
  const struct bench_entry *time;
  const struct bench_entry *dense; /* the fastest dense entry; NULL: none */
  const char *dense_name;
  double of_best; /* with --compare: the time relative to the fastest entry; or NAN */
  bool own;       /* the row is the library's, not MPI's or NCCL's */
  /* NULL if the row is blocking or has no dense entry. Valid once the time of the communication
   * alone is known. */
  const struct bench_entry *overlap, *dense_overlap;
  size_t tests;
};

/* Return the bandwidths in GB/s of float32, in the definition of nccl-tests: algbw counts the bytes
 * of the larger buffer, busbw those that a link would carry. */
double bench_algbw(const struct bench_case *test, double seconds);
double bench_busbw(const struct bench_case *test, double seconds);

void bench_collective_print_heads(struct bench_table *table, const struct bench_row *row);
void bench_collective_print_row(struct bench_table *table, const struct bench_row *row);
void bench_collective_print_notes(struct bench_job *job, const struct bench_case *test);

/* --- The functions that run the subcommands */

/* Returns a job's case without a size. bench_measure_collective_size measures this case with a
 * size. */
struct bench_case bench_case_without_size(struct bench_job *job);
bench_size bench_measure_collective_size;
int bench_measure_ways(struct bench_job *job, struct bench_case *test);
int bench_measure_overlap(struct bench_job *job,
                          struct bench_case *test); /* beside a computation */

#endif
