/*
 * Counters of a program's compressed MPI or NCCL collectives. A program, or a tool within it, reads
 * here while it runs what libonebit-mpi.so or libonebit-nccl.so reports at the end:
 * docs/preload.md.
 */
#ifndef ONEBIT_COUNTERS_H
#define ONEBIT_COUNTERS_H

#include <stddef.h>
#include <stdint.h>

#include "onebit/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Places of onebit_counters_t.passed; some are not used yet. */
#define ONEBIT_COUNTERS_REASONS 16

/* The counts of this process, since MPI_Init or since the first NCCL communicator; all are zero if
 * neither library is preloaded. Set `size` to sizeof(onebit_counters_t), the call fills in the
 * rest. */
typedef struct onebit_counters {
  size_t size;
  uint64_t calls;      /* allreduces, and the other collectives that rules name */
  uint64_t compressed; /* those that were compressed; all others were passed on */
  uint64_t passed[ONEBIT_COUNTERS_REASONS]; /* by reason: onebit_counters_reason */
  uint64_t bytes_sent;                      /* by the compressed calls of this rank */
  uint64_t bytes_dense;                     /* bytes of the same calls in full precision */
  /* Seconds in dense and in compressed calls of tensors that have been compressed: of blocking
   * calls and, over NCCL, of calls that were timed on their stream. */
  double seconds_dense, seconds_compressed;
  /* The same compressed calls, each with the median of its warm-up's dense seconds less its own and
   * less what deciding took. Below zero where compression costs more than it saves. */
  double seconds_saved;
  double seconds; /* since the counting began */
} onebit_counters_t;

/* Reports the counts so far. Local.
 *   counters   out: all of it; `size` is set by the caller
 * Thread-safe; of calls that other threads are in some numbers may already count and others not.
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL, or a size the library does not know). */
onebit_status_t onebit_counters_get(onebit_counters_t *counters);

/* The reason why calls were passed on, as text: "no rule asks for it" for example. Local.
 *   reason   a place of onebit_counters_t.passed
 * NULL where the place is not used, and where it stands for no reason. Owned by the library.
 * Thread-safe. */
const char *onebit_counters_reason(size_t reason);

#ifdef __cplusplus
}
#endif
#endif
