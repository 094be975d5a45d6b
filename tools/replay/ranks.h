/*
 * The ranks of a replay: threads of this process, or the processes that mpirun started; and an
 * exchange of their own, so that what the library gave is not compared by the library.
 */
#ifndef TOOLS_REPLAY_RANKS_H
#define TOOLS_REPLAY_RANKS_H

#include <stdbool.h>
#include <stddef.h>

#include "onebit/communicator.h"
#include "tools/replay/case.h"

struct replay_rank {
  int rank, size;
  onebit_comm_t comm;
  struct replay_meeting *meeting; /* of threads; NULL: MPI */
};

typedef void replay_body(const struct replay_rank *rank, void *context);

/* Runs the body on `size` ranks that are threads of this process. False, with words, when they
 * cannot be made; then the body has run nowhere. */
bool replay_on_threads(int size, replay_body *body, void *context, char words[REPLAY_WORDS]);

/* Runs the body on this process as a rank of MPI_COMM_WORLD, which must be initialised. False, with
 * words, on all ranks alike, when there is no communicator or no MPI in this build. */
bool replay_on_mpi(replay_body *body, void *context, char words[REPLAY_WORDS]);

/* Collective: shows every rank the part of each rank, in rank order; `bytes` at most
 * REPLAY_PART. Allocates nothing, so it cannot leave a rank waiting. */
#define REPLAY_PART 1024
typedef void replay_visit(void *context, int rank, const void *part);
void replay_share(const struct replay_rank *rank, const void *mine, size_t bytes,
                  replay_visit *visit, void *context);

#endif
