/*
 * Test cases of the collectives. The table, and the code that runs a case, work for ranks that are
 * threads and for MPI ranks.
 */
#ifndef ONEBIT_TESTS_SUPPORT_COLLECTIVES_H
#define ONEBIT_TESTS_SUPPORT_COLLECTIVES_H

#include "tests/oracle.h"
#include "tests/support.h"

/* The placement of the buffers. APART_ODD: the send buffer begins one element after an aligned
 * address, and the receive buffer begins three elements after one. */
enum placement { APART_ABOVE, APART_BELOW, APART_ODD, IN_PLACE, PLACEMENTS };

struct collective_case {
  int size, hosts, steps;
  size_t count;
  onebit_plan_options_t options;
  enum placement placement;
  bool nonblocking; /* every second call is nonblocking */
  /* Fills a send buffer; NULL: fill_input is used. */
  void (*fill)(void *values, onebit_dtype_t dtype, size_t count, int rank, int step);
};

/* The extent of the table. EVERY_OPTION has all combinations of dtype, scale and block size for
 * counts up to 4097. COVERING has every pair of scale and block size for each operation and count.
 * FEW has few cases, for launches under mpirun. */
enum extent { EVERY_OPTION, COVERING, FEW };

/* Returns the cases for groups of `size` ranks. The caller frees the array. */
struct collective_case *collective_cases(int size, enum extent extent, size_t *count);

/* Returns the cases to run. They include each pair of values of two options. With one bit per
 * element, they include each operation and block size with no element, a part of a block, whole
 * blocks, and whole blocks plus a part. The caller frees the rows. */
struct sample collective_sample(const char *name, size_t thinner,
                                const struct collective_case *cases, size_t count);

/* Returns cases of the schedules of an allreduce, for `size` ranks on `hosts` hosts. The caller
 * frees the array. */
struct collective_case *schedule_cases(int size, int hosts, enum extent extent, size_t *count);

/* A case and the oracle's results for it. */
struct collective_run {
  struct collective_case what;
  struct oracle *oracle;
  void **results; /* one array of result_count elements per step */
};

/* Runs the case on the oracle. */
struct collective_run collective_prepare(const struct collective_case *what);
void collective_release(struct collective_run *run);

/* Runs the case on one rank and checks the results, sendbuf, the residuals and the plan's info.
 * This is a rank_body whose context is the struct collective_run. */
void collective_on_rank(onebit_comm_t comm, void *run);

/* Prepares a case and runs the body on its ranks; the context is the struct collective_run. */
void collective_check(const struct collective_case *what, rank_body *body);

/* Calls `check` with each case of a sample and the oracle's results for it. Frees the cases. */
typedef void collective_body(struct collective_run *run, size_t number);
void collective_check_sample(const char *name, size_t thinner, struct collective_case *cases,
                             size_t count, collective_body *check);

/* Checks cases with at most most_elements elements over a transport: cases of 1 to 4 ranks, and the
 * schedules of 4 ranks on 2 hosts. `on` runs a body on `size` ranks on `hosts` hosts, and then
 * calls checks_must_hold(). */
typedef void on_transport(int size, int hosts, rank_body *body, void *context);
void collectives_over(const char *name, on_transport *on, size_t most_elements);

/* A rank's plan of a case, and its buffers. */
struct rank_plan {
  const struct collective_run *run;
  onebit_plan_t plan;
  onebit_request_t request;
  struct guarded send_memory, receive_memory;
  char *send, *receive;
  size_t sent, received; /* elements */
  int rank;
};

/* Creates the plan, collectively, and buffers next to inaccessible pages. */
bool rank_plan_create(struct rank_plan *rank_plan, onebit_comm_t comm,
                      const struct collective_run *run);
/* rank_plan_fill fills the send buffer with the input of a step; rank_plan_check checks that the
 * receive buffer has the oracle's result; rank_plan_call does both, and makes a blocking call in
 * between. */
void rank_plan_fill(const struct rank_plan *rank_plan, int step);
void rank_plan_check(const struct rank_plan *rank_plan, int step);
void rank_plan_call(const struct rank_plan *rank_plan, int step);
/* Free everything. rank_plan_finish first checks that the residuals are the oracle's. */
void rank_plan_free(struct rank_plan *rank_plan);
void rank_plan_finish(struct rank_plan *rank_plan);

/* Make a blocking or a nonblocking call of the operation for which the plan was created. */
onebit_status_t call_collective(onebit_operation_t operation, const void *sendbuf, void *recvbuf,
                                onebit_plan_t plan);
onebit_status_t start_collective(onebit_operation_t operation, const void *sendbuf, void *recvbuf,
                                 onebit_plan_t plan, onebit_request_t *request);

/* Return the number of elements in a rank's send buffer and in its receive buffer. */
size_t send_count(onebit_operation_t operation, size_t count, int size);
size_t receive_count(onebit_operation_t operation, size_t count, int size);

/* The exported residuals of a plan. */
struct kept_errors {
  float *worker, *server;
  size_t worker_count, server_count, server_first;
};
struct kept_errors export_errors(onebit_plan_t plan);
void free_errors(struct kept_errors *errors);

/* Checks that a plan's residuals equal those in `before`, to the bit. */
void check_unchanged_errors(onebit_plan_t plan, const struct kept_errors *before);

/* Checks that a plan's residuals equal the oracle's of that rank, to the bit. */
void check_errors(onebit_plan_t plan, const struct oracle *oracle, int rank);

/* Returns the inputs of all ranks at a step, in the form that oracle_call needs. free_inputs frees
 * them. */
const void **all_inputs(int size, size_t count, onebit_dtype_t dtype, int step);
void free_inputs(const void **inputs, int size);

const char *operation_name(onebit_operation_t operation);

/*
 * A plan that adapts its number of bits, from 1 to 8. Its input is ordinary, then hard to compress,
 * then ordinary again. It runs on ranks that are threads and on MPI ranks.
 */

enum { LADDER_COUNT = 4160, LADDER_WINDOW = 16 };

/* The call at which each phase ends. In the hard phase the plan raises its number of bits within 33
 * calls, and again every 48 calls. Later it lowers the number every 96 calls. */
enum {
  LADDER_ORDINARY = 40,
  LADDER_HARD = LADDER_ORDINARY + 140,
  LADDER_CALLS = LADDER_HARD + 360
};

struct climb {
  onebit_operation_t operation;
  onebit_schedule_t schedule;
};

/* Fills the send buffer. In the hard phase, one element of each block is a thousand times as large
 * as the others on rank 0. */
void ladder_fill(float *values, size_t count, int rank, int call);

/* Creates the plan. If it cannot be created, records a failure and returns NULL. */
onebit_plan_t ladder_plan(onebit_comm_t comm, const struct climb *climb, int bits);

/* Makes all calls. Checks that the plan goes to 8 bits and returns to one, that all ranks have the
 * same number of bits and the same results after every call, and that calls send as many bytes as
 * the plan's info says. This is a rank_body whose context is a struct climb. */
void climb_on_rank(onebit_comm_t comm, void *climb);

#endif
