/*
 * Scenarios with many requests in flight at once. They run on any communicator, over loopback and
 * over MPI.
 */
#ifndef ONEBIT_TESTS_SUPPORT_REQUESTS_H
#define ONEBIT_TESTS_SUPPORT_REQUESTS_H

#include <stdatomic.h>

#include "tests/support.h"
#include "tests/support_collectives.h"

/* Plans of different operations, counts and types that are used at the same time, with the oracle's
 * results for each plan. */
#define FLIGHT_PLANS 12
#define FLIGHT_STEPS 4
struct flight {
  int size;
  struct collective_run runs[FLIGHT_PLANS];
};
struct flight *flight_prepare(int size);

/* Prepares plans as above, but only allreduces, in all schedules, on hosts with equally many
 * ranks. */
struct flight *flight_prepare_hosts(int size, int hosts);
void flight_release(struct flight *flight);

/* Each function below is a rank_body whose context is the struct flight. Results and residuals must
 * equal the oracle's. */

/* Every rank starts all requests, and waits for them in an order of its own. */
void waited_in_any_order(onebit_comm_t comm, void *flight);

/* Every rank starts all requests in an order of its own, and tests them repeatedly until all are
 * complete. */
void started_in_any_order_and_tested(onebit_comm_t comm, void *flight);

/* Every rank starts all requests, and calls only onebit_progress until they are complete. The waits
 * that follow must return at once. */
void moved_by_progress(onebit_comm_t comm, void *flight);

/* A plan with a request in flight refuses every call except test and wait. Afterwards it works
 * again. */
void busy_plans_refuse(onebit_comm_t comm, void *flight);

/* One rank starts a request late. Until then the request stays in progress on the other ranks,
 * which may create and use other plans. */
void late_rank_is_waited_for(onebit_comm_t comm, void *flight);

/* Several threads of a rank use plans of one communicator at once. */
void threads_share_a_communicator(onebit_comm_t comm, void *flight);

/* Runs these scenarios over a transport, on 3 ranks, and on 4 ranks on two hosts. */
void flights_over(on_transport *on);

/*
 * Tests of a missing rank, over loopback and over MPI: each kind of absence in each schedule.
 */

/* The missing rank's action in place of its third call. */
enum wait_fault { WAIT_LEAVES, WAIT_IS_AWAY, WAIT_CALLS_ANOTHER, WAIT_ABORTS };

struct wait_case {
  const char *name;
  int size, hosts;
  onebit_schedule_t schedule;
  onebit_wire_t wire;
  size_t count;
};

extern const struct wait_case wait_cases[];
extern const size_t wait_cases_count;

struct wait_run {
  const struct wait_case *test;
  enum wait_fault fault;
  bool blocking;
  /* Waits until all ranks have ended their calls, without using the communicator. */
  void (*wait_for_all)(void);
  bool one_process; /* all ranks are threads of this process */
  atomic_int done;  /* the number of ranks in this process that have got their error */
  atomic_int named; /* the number of ranks whose error names the missing rank */
};

/* A rank_body whose context is a struct wait_run. The last rank is the missing one. */
void wait_on_rank(onebit_comm_t comm, void *run);

#endif
