/*
 * Long runs with random faults after which the promise is that everything goes on as if there had
 * been none. Faults come from a generator with a seed, the same on all ranks, so that each knows
 * what the others are about to do.
 */
#ifndef ONEBIT_TESTS_SUPPORT_LONG_H
#define ONEBIT_TESTS_SUPPORT_LONG_H

#include "tests/support.h"

enum long_fault {
  LONG_WRONG_ARGUMENT, /* of one rank: refused on all */
  LONG_WRONG_HANDLE,   /* of one rank, which knows it alone */
  LONG_MISMATCH,       /* the ranks give different numbers */
  LONG_NOT_FINITE,     /* input of one rank: skipped on all */
  LONG_BUSY,           /* calls that have to wait for one in flight, or for an open step */
  LONG_LATE,           /* one rank sleeps for some milliseconds */
  LONG_MADE_AGAIN,     /* destroyed, and made again from what was exported or saved */
  LONG_NO_MEMORY,      /* something else could not be made: an allocation of one rank fails */
  LONG_FAULTS
};

enum { LONG_RANKS = 4, LONG_VALUES = 4096, LONG_ITEMS = 16 };

struct long_run {
  uint64_t calls, every; /* calls of a rank; of them about one in `every` meets a fault, 0: none */
  pthread_barrier_t barrier;
  float values[LONG_RANKS][LONG_VALUES]; /* inputs are parts of them */
  /* The results. `hash` is of all results of calls; `state` of what is left at the end. */
  uint64_t hash[LONG_RANKS][LONG_ITEMS], state[LONG_RANKS][LONG_ITEMS];
  uint64_t faults[LONG_FAULTS];   /* of rank 0's counting: the same on all */
  size_t bytes_early, bytes_late; /* allocated, after a tenth of the calls and after all */
  unsigned char *alone;           /* by call: it sends nothing; a run without faults fills it in */
  const void *parts[LONG_RANKS];
  size_t part_bytes[LONG_RANKS];
};

/* A rank's place in a run. */
struct long_rank {
  struct long_run *run;
  onebit_comm_t comm;
  int rank;
  uint64_t drawn, next_fault;
};

struct long_run *long_create(uint64_t calls, uint64_t every);
void long_destroy(struct long_run *run);

struct long_rank long_begin(struct long_run *run, onebit_comm_t comm);

/* A number below `limit`, the same on all ranks. */
uint64_t long_draw(struct long_rank *self, uint64_t limit);

/* True if a fault is due before this call; which, and whose. */
bool long_is_due(struct long_rank *self, uint64_t call, enum long_fault *fault, bool *mine);

/* Input of this rank: `count` values, others for each call. */
const float *long_input(const struct long_rank *self, uint64_t call, size_t count);

/* Notes the memory in use, where the call is one that is asked about. */
void long_note_memory(struct long_rank *self, uint64_t call);

/* Makes the creation of something fail on all ranks by an allocation of one of them, or succeed:
 * on all alike. */
void long_without_memory(struct long_rank *self, bool mine, bool (*create)(onebit_comm_t comm));

void long_wait(struct long_rank *self);

/* Sleeps for up to five milliseconds, where it is this rank's turn. */
void long_be_late(struct long_rank *self, bool mine);

/* Checks that the two ended alike, and tells what happened. */
void long_compare(const char *what, const struct long_run *plain, const struct long_run *faulty);

#endif
