/*
 * Cases of the collectives: the table, and the code that runs a case, are the same for ranks that
 * are threads and for ranks of MPI.
 */
#ifndef ONEBIT_TESTS_SUPPORT_COLLECTIVES_H
#define ONEBIT_TESTS_SUPPORT_COLLECTIVES_H

#include "tests/oracle.h"
#include "tests/support.h"

/* The placement of the buffers. APART_ODD: one element (three for the result) after an aligned
 * address. */
enum placement { APART_ABOVE, APART_BELOW, APART_ODD, IN_PLACE, PLACEMENTS };

struct collective_case {
  int size, hosts, steps;
  size_t count;
  onebit_plan_options_t options;
  enum placement placement;
  bool nonblocking; /* every second call */
};

/* The extent of the table: EVERY_OPTION is the full product of dtype, scale and block size for
 * counts up to 4097; COVERING has every pair of scale and block size for each operation and count;
 * FEW is for launches under mpirun. */
enum extent { EVERY_OPTION, COVERING, FEW };

/* The cases for groups of `size`; the caller frees the array. */
struct collective_case *collective_cases(int size, enum extent extent, size_t *count);

/* The cases to run: each pair of values of two options; and for 1-bit cases each operation and
 * block size with no element, a part of a block, whole blocks and more. The caller frees the
 * rows. */
struct sample collective_sample(const char *name, size_t thinner,
                                const struct collective_case *cases, size_t count);

/* The schedules of an allreduce other than the default one, for `size` ranks on `hosts` hosts; the
 * caller frees the array. */
struct collective_case *schedule_cases(int size, int hosts, enum extent extent, size_t *count);

/* A case and the oracle's results for it. */
struct collective_run {
  struct collective_case what;
  struct oracle *oracle;
  void **results; /* one array of result_count elements a step */
};

/* Lets the oracle run the case. */
struct collective_run collective_prepare(const struct collective_case *what);
void collective_release(struct collective_run *run);

/* Runs the case on one rank and checks the results, sendbuf, the residuals and the plan's info.
 * This is a rank_body whose context is the struct collective_run. */
void collective_on_rank(onebit_comm_t comm, void *run);

/* Calls the operation that the plan was made for. */
onebit_status_t call_collective(onebit_operation_t operation, const void *sendbuf, void *recvbuf,
                                onebit_plan_t plan);
onebit_status_t start_collective(onebit_operation_t operation, const void *sendbuf, void *recvbuf,
                                 onebit_plan_t plan, onebit_request_t *request);

/* The number of elements of one rank's send and receive buffer. */
size_t send_count(onebit_operation_t operation, size_t count, int size);
size_t receive_count(onebit_operation_t operation, size_t count, int size);

/* The exported residuals of a plan. */
struct kept_errors {
  float *worker, *server;
  size_t worker_count, server_count, server_first;
};
struct kept_errors export_errors(onebit_plan_t plan);
void free_errors(struct kept_errors *errors);

/* Checks that a plan's residuals equal the oracle's of that rank, to the bit. */
void check_errors(onebit_plan_t plan, const struct oracle *oracle, int rank);

/* The inputs of all ranks at a step, as oracle_call takes them; free_inputs frees them. */
const void **all_inputs(int size, size_t count, onebit_dtype_t dtype, int step);
void free_inputs(const void **inputs, int size);

const char *operation_name(onebit_operation_t operation);

#endif
