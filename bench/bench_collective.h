/*
 * The benchmarks of the three collectives: blocking calls on the host and on a device, and
 * nonblocking calls that overlap with a computation, on the host.
 *
 * A case has buffers of one size, and the ways to run the collective that are compared: plans,
 * different calls of a plan, and dense algorithms. Each way has an entry and a row; the entries are
 * timed by turns. bench_collective.c implements cases, bench_overlap.c implements those with a
 * computation, and bench_collective_cuda.c those on a device. bench_check.c checks the results. */
#ifndef BENCH_COLLECTIVE_H
#define BENCH_COLLECTIVE_H

#include "bench/bench.h"

/* The entries of a nonblocking collective: the communication alone, a computation that takes
 * equally long, and both together. */
enum { BENCH_PURE, BENCH_COMPUTE, BENCH_OVERALL };

/* Returns how many percent of the communication's time the computation hides. */
double bench_overlap_percent(double overall, double compute, double pure);

/* The properties of a collective. */
struct bench_collective {
  const char *name, *dense_name;
  onebit_operation_t operation;
  onebit_status_t (*call)(const void *sendbuf, void *recvbuf, onebit_plan_t plan);
  bool gathers, scatters; /* the receive (send) buffer has `count` elements for each rank */
  /* The nonblocking function. */
  const char *nonblocking_name, *nonblocking_dense_name;
  onebit_status_t (*start)(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                           onebit_request_t *request);
};

extern const struct bench_collective bench_collectives[]; /* indexed by onebit_operation_t */

/* A way to run the collective: a plan or a dense algorithm. Entry k of the rounds runs way k, and
 * has it as `context`. */
struct bench_way {
  struct bench_case *test;
  struct bench_variant variant;            /* the requested schedule and wire */
  const struct bench_algorithm *algorithm; /* NULL: the way is a plan */
  onebit_plan_t plan;                      /* NULL, and no algorithm: the plan was refused */
  char refusal[256];                       /* the library's error message */
  double computing; /* with --rate: seconds of a call's arithmetic on all cores */
  bool right;
  bool half; /* NCCL's collective in bfloat16, not float32 */
};

/* The functions of a benchmark. There are three benchmarks: of blocking calls on the host, of
 * nonblocking calls on the host, and of calls on a device. */
struct bench_calls {
  int (*add)(struct bench_case *test); /* adds the ways to run the collective */
  int (*measure)(struct bench_job *job, struct bench_case *test);
  /* bench_measure_ways calls these functions. synchronize, which may be NULL, waits for the device
   * after the rounds. judge checks the results, with -c. note prints the notes above the rows. */
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
  struct ncclComm *nccl; /* NULL: the transport is not NCCL */
  size_t bytes, count, send_count, receive_count;
  onebit_plan_t plan;                /* the first plan, or the plan that is checked */
  float *dense_send, *dense_receive; /* dense_receive NULL: no dense collective */
  void *send, *receive;              /* buffers in the requested dtype; `send` may be dense_send */
  void *half_send;                   /* bfloat16 values on a device */
  size_t plan_count;                 /* the first plan_count ways are plans */
  struct bench_way ways[BENCH_VARIANTS + BENCH_ALGORITHMS + 1];
  struct bench_rounds rounds;
};

/* Creates a case. Collective. Returns an exit status. After a failure the caller must not destroy
 * the case. */
int bench_case_create(struct bench_team *team, const struct bench_options *options,
                      const struct bench_collective *collective, size_t bytes,
                      struct bench_case *test);
void bench_case_destroy(struct bench_case *test);

/* Adds a way to run the collective, and its entry. */
struct bench_way *bench_case_add(struct bench_case *test, const char *name, bench_timed *run);
onebit_plan_options_t bench_case_options(const struct bench_case *test,
                                         struct bench_variant variant, onebit_device_t device);
onebit_plan_info_t bench_plan_info(onebit_plan_t plan);

/* Sets the numbers of iterations and warm-ups to those of the options; their defaults depend on the
 * size. Also names the case in the job's progress lines. */
void bench_case_set_iterations(struct bench_job *job, const struct bench_case *test,
                               struct bench_rounds *rounds);

/* Calls the collective once and checks the result. Apart from rounding, each element must follow
 * from the inputs and the change of the residuals (onebit/plan.h). In an allreduce and an
 * allgather, the results of all ranks must also have the same bits. *right and the exit status are
 * the same on all ranks. */
int bench_case_check(struct bench_case *test, bool *right);

/* With -c, checks every plan of the case. */
int bench_case_check_all(struct bench_case *test, bool *right);

/* bench_measure_limits measures way->computing for every plan. bench_wire_seconds returns the
 * seconds that a link needs for `bytes` bytes. */
int bench_measure_limits(struct bench_case *test);
double bench_wire_seconds(const struct bench_options *options, double bytes);

/* --- Rows */

struct bench_row {
  const struct bench_case *test;
  const struct bench_way *way;
  const struct bench_entry *time;
  const struct bench_entry *dense; /* the fastest dense entry; NULL: none */
  const char *dense_name;
  double of_best; /* with --compare: time divided by that of the fastest plan; else NAN */
  bool own;       /* the row is one of onebit, not of MPI or NCCL */
  /* The three entries (BENCH_PURE ...) of the library's and of MPI's nonblocking collective. NULL
   * in a row of a blocking collective, and dense_overlap also if there is no dense collective. */
  const struct bench_entry *overlap, *dense_overlap;
  size_t tests;
};

/* Return bandwidths in GB/s as nccl-tests defines them, for float32: algbw counts the bytes of the
 * larger buffer, and busbw counts the bytes that a link would carry. */
double bench_algbw(const struct bench_case *test, double seconds);
double bench_busbw(const struct bench_case *test, double seconds);

void bench_collective_print_heads(struct bench_table *table, const struct bench_row *row);
void bench_collective_print_row(struct bench_table *table, const struct bench_row *row);
void bench_collective_print_notes(struct bench_job *job, const struct bench_case *test);

/* --- The functions that run the subcommands */

/* Returns the case of a job, still without a size and buffers. bench_measure_collective_size copies
 * this case for each size. */
struct bench_case bench_case_without_size(struct bench_job *job);
bench_size bench_measure_collective_size;
int bench_measure_ways(struct bench_job *job, struct bench_case *test);
int bench_measure_overlap(struct bench_job *job,
                          struct bench_case *test); /* beside a computation */

#endif
