/*
 * Which of a program's tensors are compressed without a rule that names them: those that are like a
 * gradient for as long as they are watched (dropin/watch.h), go on to be like one, and gain time.
 * Ranks agree on each verdict, at counts of calls that they have alike.
 */
#ifndef OB_DROPIN_MPI_RECOGNISE_H
#define OB_DROPIN_MPI_RECOGNISE_H

#include "dropin/counters.h"
#include "dropin/mpi/call.h"
#include "dropin/watch.h"

#define OB_CLOCK_SAMPLES 16

enum ob_candidate_state { OB_CANDIDATE_WATCHED, OB_CANDIDATE_COMPRESSED, OB_CANDIDATE_DENSE };

/* A tensor that may be compressed. All zero at first; the same on all ranks but for the samples. */
struct ob_candidate {
  enum ob_candidate_state state;
  enum ob_reason reason; /* why it is dense */
  unsigned calls;        /* since the state began */
  unsigned wait;         /* dense calls before it is looked at again; 0: never */
  unsigned refusals;
  bool is_related; /* to the one before it */
  bool was_slower;
  bool is_restarted; /* its residual is old */
  int tensor;        /* its number, and 1; 0: none yet */
  struct ob_watch *watch;
  double seconds[2][OB_CLOCK_SAMPLES]; /* of the latest dense and compressed blocking calls */
  unsigned timed[2];
};

/* Notes a call, whose input is still there. NONE: it is to be compressed. Collective at times.
 *   next   the tensor behind it with the same signature, or NULL
 *   hash   equal on ranks that judge the same tensor
 *   record where findings are noted, or NULL */
enum ob_reason ob_candidate_judge(struct ob_candidate *candidate, struct ob_candidate *next,
                                  const struct ob_mpi_call *call, onebit_dtype_t dtype,
                                  int64_t hash, struct ob_record *record);

/* Its calls had to be made again dense: it is, for a while. */
void ob_candidate_lose(struct ob_candidate *candidate);

/* Seconds of a blocking call, with those of deciding on it. */
void ob_candidate_time(struct ob_candidate *candidate, bool compressed, double seconds);

void ob_candidate_reset(struct ob_candidate *candidate);

#endif
