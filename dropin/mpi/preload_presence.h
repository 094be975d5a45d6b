/*
 * Whether all ranks have the library, found out without a message and without a collective: a rank
 * that has none would meet it with a call of the program's.
 *
 * In MPI_Init each rank publishes in MPI's name service, which is the launcher's, that it has the
 * library, and by which rules. It is there or absent for ever once MPI_Init is over, so ranks that
 * look find the same, and nobody waits for anybody. The first rank of a group looks for all of
 * them and publishes what it has found; others look for that, and for themselves only where it is
 * not there yet.
 */
#ifndef OB_DROPIN_MPI_PRELOAD_PRESENCE_H
#define OB_DROPIN_MPI_PRELOAD_PRESENCE_H

#include "dropin/mpi/preload.h"

/* Publishes: the hash of what ranks must have in common, or with a message why this rank compresses
 * nothing. False where the name service does not serve. Local. */
bool ob_presence_begin(int rank, const char *failure);

/* Withdraws what this rank has published. Local. */
void ob_presence_end(void);

struct ob_presence {
  bool agreed; /* all of the ranks have the library, with the same rules */
  bool speaks; /* this is the first of them that has it: it says what is wrong */
};

/* Of so many ranks of MPI_COMM_WORLD, in order. ONEBIT_REQUIRE=1 of any rank becomes everyone's,
 * and ends the job here where they do not agree. Asked again it knows. Local.
 *   wait   where the first of the ranks was not asked before the others: they give it a moment */
struct ob_presence ob_presence_of(const int *ranks, int count, bool wait);

/* Of all of MPI_COMM_WORLD, in MPI_Finalize. */
struct ob_presence ob_preload_world(int size);

#endif
