/*
 * A plan of 1 to 8 bits whose bucket is ordinary, then hard, then ordinary again, for ranks that
 * are threads and ranks of MPI.
 */
#ifndef ONEBIT_TESTS_SUPPORT_LADDER_H
#define ONEBIT_TESTS_SUPPORT_LADDER_H

#include "tests/support.h"

enum { LADDER_COUNT = 4160, LADDER_WINDOW = 16 };

/* The call at which each phase ends: the plan climbs within 33 calls and a move every 48, and
 * descends a move every 96. */
enum {
  LADDER_ORDINARY = 40,
  LADDER_HARD = LADDER_ORDINARY + 140,
  LADDER_CALLS = LADDER_HARD + 360
};

struct climb {
  onebit_operation_t operation;
  onebit_schedule_t schedule;
};

/* Fills the bucket: while it is hard, one element of a block is a thousand times as large as the
 * others, on rank 0. */
void ladder_fill(float *values, size_t count, int rank, int call);

/* Returns NULL, and notes it, if the plan cannot be made. */
onebit_plan_t ladder_plan(onebit_comm_t comm, const struct climb *climb, int bits);

/* Makes all calls; checks that the plan climbs to 8 bits and returns to one, that all ranks have
 * the same bits and results after every call, and that calls send as many bytes as announced. This
 * is a rank_body whose context is a struct climb. */
void climb_on_rank(onebit_comm_t comm, void *climb);

#endif
