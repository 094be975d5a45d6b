/*
 * Long runs with random faults that the library promises to survive as if there had been none. A
 * seeded generator draws them, the same on all ranks, so that each knows what the others are about
 * to do.
 */
#ifndef ONEBIT_TESTS_SUPPORT_LONG_H
#define ONEBIT_TESTS_SUPPORT_LONG_H

#include "tests/support.h"

enum long_fault {
  LONG_WRONG_ARGUMENT, /* one rank's: all ranks get an error */
  LONG_WRONG_HANDLE,   /* of one rank, which knows it alone */
  LONG_MISMATCH,       /* the ranks give different numbers */
  LONG_NOT_FINITE,     /* input of one rank: skipped on all */
  LONG_BUSY,           /* calls refused because of a request in flight or an open step */
  LONG_LATE,           /* one rank sleeps for some milliseconds */
  LONG_MADE_AGAIN,     /* objects are destroyed and made again from exported or saved state */
  LONG_NO_MEMORY,      /* making another object fails: one rank has no memory for it */
  LONG_FAULTS
};

enum { LONG_RANKS = 4, LONG_VALUES = 4096, LONG_ITEMS = 16 };

struct long_run {
  uint64_t calls, every; /* calls per rank; about one in `every` meets a fault, 0: none */
  pthread_barrier_t barrier;
  float values[LONG_RANKS][LONG_VALUES]; /* inputs are parts of these */
  /* `hash` covers all results of calls; `state` covers the state at the end. */
  uint64_t hash[LONG_RANKS][LONG_ITEMS], state[LONG_RANKS][LONG_ITEMS];
  uint64_t faults[LONG_FAULTS];   /* counted by rank 0: the same on all */
  size_t bytes_early, bytes_late; /* allocated, after a tenth of the calls and after all */
  unsigned char *alone;           /* by call: true if it sends nothing; a run without faults fills
                                   * it in */
  const void *parts[LONG_RANKS];
  size_t part_bytes[LONG_RANKS];
};

/* A rank's own state in a run. */
struct long_rank {
  struct long_run *run;
  onebit_comm_t comm;
  int rank;
  uint64_t drawn, next_fault;
};

struct long_run *long_create(uint64_t calls, uint64_t every);
void long_destroy(struct long_run *run);

struct long_rank long_begin(struct long_run *run, onebit_comm_t comm);

/* Draws a number below `limit`, the same on all ranks. */
uint64_t long_draw(struct long_rank *self, uint64_t limit);

/* True if a fault is due before this call; which, and whose. */
bool long_is_due(struct long_rank *self, uint64_t call, enum long_fault *fault, bool *mine);

/* The input of this rank: `count` values that differ by call. */
const float *long_input(const struct long_rank *self, uint64_t call, size_t count);

/* Notes the memory in use after a tenth of the calls and after all. */
void long_note_memory(struct long_rank *self, uint64_t call);

/* Calls `create` on all ranks while an allocation fails on the rank with `mine`; checks that it
 * succeeds on all ranks or fails on all. */
void long_without_memory(struct long_rank *self, bool mine, bool (*create)(onebit_comm_t comm));

void long_wait(struct long_rank *self);

/* Sleeps for up to five milliseconds if `mine`. */
void long_be_late(struct long_rank *self, bool mine);

/* Checks that both runs ended in the same state, and prints the counts of faults. */
void long_compare(const char *what, const struct long_run *plain, const struct long_run *faulty);

#endif
