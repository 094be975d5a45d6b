/*
 * Many requests in flight at once: scenarios that run on any communicator, over loopback and over
 * MPI.
 */
#ifndef ONEBIT_TESTS_SUPPORT_REQUESTS_H
#define ONEBIT_TESTS_SUPPORT_REQUESTS_H

#include "tests/support_collectives.h"

/* Plans of different operations, counts and types that are used at the same time, with the oracle's
 * word on each. */
#define FLIGHT_PLANS 12
#define FLIGHT_STEPS 4
struct flight {
  int size;
  struct collective_run runs[FLIGHT_PLANS];
};
struct flight *flight_prepare(int size);

/* The same of nothing but allreduces, in all schedules, on hosts with as many ranks each. */
struct flight *flight_prepare_hosts(int size, int hosts);
void flight_release(struct flight *flight);

/* Each is a rank_body whose context is the struct flight. In all of them results and residuals
 * equal the oracle's. */

/* Every rank starts all requests, and waits for them in an order of its own. */
void waited_in_any_order(onebit_comm_t comm, void *flight);

/* Every rank starts them in an order of its own too, and tests them in turn until all are done. */
void started_in_any_order_and_tested(onebit_comm_t comm, void *flight);

/* Progress alone finishes what all ranks have started; waiting then only collects it. */
void moved_by_progress(onebit_comm_t comm, void *flight);

/* A plan with a request in flight refuses everything but test and wait, and is unharmed. */
void busy_plans_refuse(onebit_comm_t comm, void *flight);

/* A request that one rank has not started yet is in progress on the others, who may make and use
 * other plans meanwhile. */
void late_rank_is_waited_for(onebit_comm_t comm, void *flight);

/* Several threads of a rank use plans of one communicator at once. */
void threads_share_a_communicator(onebit_comm_t comm, void *flight);

#endif
