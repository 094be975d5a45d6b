/*
 * A plan of 1 to 8 bits whose bucket is ordinary, then hard, then ordinary again: on ranks that are
 * threads, and on ranks of MPI.
 */
#ifndef ONEBIT_TESTS_SUPPORT_LADDER_H
#define ONEBIT_TESTS_SUPPORT_LADDER_H

#include "tests/support.h"

enum { LADDER_COUNT = 4160, LADDER_WINDOW = 16 };

/* Until which call it is ordinary, hard, ordinary again: up in 33 calls and a move every 48, down
 * in a move every 96. */
enum {
  LADDER_ORDINARY = 40,
  LADDER_HARD = LADDER_ORDINARY + 140,
  LADDER_CALLS = LADDER_HARD + 360
};

struct climb {
  onebit_operation_t operation;
  onebit_schedule_t schedule;
};

/* The bucket: while it is hard one element of a block is a thousand times as large as the others,
 * on rank 0. */
void ladder_fill(float *values, size_t count, int rank, int call);

/* NULL: it failed, which is noted. */
onebit_plan_t ladder_plan(onebit_comm_t comm, const struct climb *climb, int bits);
onebit_plan_info_t ladder_info(onebit_plan_t plan);

/* All calls; checks that it climbs to 8 bits and comes back to one, that all ranks have the same
 * bits and results after every call, and that calls send what was announced. A rank_body whose
 * context is a struct climb. */
void climb_on_rank(onebit_comm_t comm, void *climb);

#endif
