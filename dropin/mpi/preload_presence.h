/*
 * Finds out whether all ranks have the library, without a message and without a collective: a rank
 * that has none would match it with a call of the program's.
 *
 * In MPI_Init each rank publishes in MPI's name service, which is the launcher's, that it has the
 * library. Rank 0 looks for all others, and publishes what it has found; the others wait for
 * that.
 */
#ifndef OB_DROPIN_MPI_PRELOAD_PRESENCE_H
#define OB_DROPIN_MPI_PRELOAD_PRESENCE_H

#include "dropin/mpi/preload.h"

enum ob_presence_found { OB_PRESENCE_UNKNOWN, OB_PRESENCE_SOME, OB_PRESENCE_ALL };

struct ob_presence {
  enum ob_presence_found found; /* UNKNOWN: there is no name service */
  int missing;                  /* with SOME: a rank that has no library */
  bool speaks;                  /* this is the first rank that has it: it says what is wrong */
};

/* Looks for the ranks of MPI_COMM_WORLD, once, from MPI_Init. Waits five seconds for a missing
 * rank. */
struct ob_presence ob_presence_find(int rank, int size);

/* Withdraws what this rank has published. Local. */
void ob_presence_end(void);

#endif
