/*
 * Many requests in flight at once: scenarios that run on any communicator, over loopback and over
 * MPI.
 */
#ifndef ONEBIT_TESTS_SUPPORT_REQUESTS_H
#define ONEBIT_TESTS_SUPPORT_REQUESTS_H

#include <stdatomic.h>

#include "tests/support.h"
#include "tests/support_collectives.h"

/* Plans of different operations, counts and types that are used at the same time, and the oracle's
 * results for each. */
#define FLIGHT_PLANS 12
#define FLIGHT_STEPS 4
struct flight {
  int size;
  struct collective_run runs[FLIGHT_PLANS];
};
struct flight *flight_prepare(int size);

/* Prepares allreduces only, in all schedules, on hosts with equally many ranks. */
struct flight *flight_prepare_hosts(int size, int hosts);
void flight_release(struct flight *flight);

/* Each is a rank_body whose context is the struct flight. Results and residuals must equal the
 * oracle's. */

/* Every rank starts all requests and waits for them in its own order. */
void waited_in_any_order(onebit_comm_t comm, void *flight);

/* Every rank also starts them in its own order, and tests them in turn until all are done. */
void started_in_any_order_and_tested(onebit_comm_t comm, void *flight);

/* onebit_progress alone finishes the requests that all ranks have started; waiting only collects
 * them. */
void moved_by_progress(onebit_comm_t comm, void *flight);

/* A plan with a request in flight refuses everything but test and wait, and works afterwards. */
void busy_plans_refuse(onebit_comm_t comm, void *flight);

/* A request that one rank has not started yet stays in progress on the others, which may make and
 * use other plans meanwhile. */
void late_rank_is_waited_for(onebit_comm_t comm, void *flight);

/* Several threads of a rank use plans of one communicator at once. */
void threads_share_a_communicator(onebit_comm_t comm, void *flight);

/* Runs these scenarios over a transport, on 3 ranks, and on 4 on two hosts. */
void flights_over(on_transport *on);

/*
 * A missing rank, over loopback and over MPI: each kind of absence in each schedule.
 */

/* The act of the missing rank in place of its third call. */
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
  /* Waits, without the communicator, until all ranks have ended their calls. */
  void (*wait_for_all)(void);
  bool one_process; /* all ranks are threads of it */
  atomic_int done;  /* ranks that have got their error, in this process */
  atomic_int named; /* ranks whose error names the missing rank */
};

/* A rank_body whose context is a struct wait_run. The last rank is the missing one. */
void wait_on_rank(onebit_comm_t comm, void *run);

#endif
