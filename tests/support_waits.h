/*
 * A missing rank, over loopback and over MPI: each kind of absence in each schedule.
 */
#ifndef ONEBIT_TESTS_SUPPORT_WAITS_H
#define ONEBIT_TESTS_SUPPORT_WAITS_H

#include <stdatomic.h>

#include "tests/support.h"

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
  void (*meet)(void); /* waits for all ranks without the communicator, until all have ended their
                       * calls */
  atomic_int done;    /* ranks that have got their error, in this process */
};

/* A rank_body whose context is a struct wait_run. The last rank is the missing one. */
void wait_on_rank(onebit_comm_t comm, void *run);

#endif
