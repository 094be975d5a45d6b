/*
 * Counters of a program's compressed MPI or NCCL collectives. A program, or a tool within it, reads
 * them while it runs; they are the numbers that libonebit-mpi.so or libonebit-nccl.so reports at
 * the end (docs/preload.md).
 */
#ifndef ONEBIT_COUNTERS_H
#define ONEBIT_COUNTERS_H

#include <stddef.h>
#include <stdint.h>

#include "onebit/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The number of entries of onebit_counters_t.passed; some are not used yet. */
#define ONEBIT_COUNTERS_REASONS 16

/* The counts of this process, since MPI_Init or since the first NCCL communicator; all are zero if
 * neither libonebit-mpi.so nor libonebit-nccl.so is preloaded. Set `size` to
 * sizeof(onebit_counters_t), the call fills in the rest. */
typedef struct onebit_counters {
  size_t size;
  uint64_t calls;      /* allreduces, and other collectives that the rules name */
  uint64_t compressed; /* calls that were compressed; all others were passed on */
  uint64_t passed[ONEBIT_COUNTERS_REASONS]; /* by reason: onebit_counters_reason */
  uint64_t bytes_sent;                      /* by this rank's compressed calls and shadows */
  uint64_t bytes_dense;                     /* bytes of the same calls in full precision */
  /* Seconds in dense and in compressed calls, for tensors that have been compressed. They include
   * blocking calls and, over NCCL, calls that were timed on their stream. */
  double seconds_dense, seconds_compressed;
  /* Seconds saved by the same compressed calls. A call saves the median time of its tensor's dense
   * calls in the warm-up, less its own time and less the time to decide about it. The sum is
   * negative if compression costs more than it saves. */
  double seconds_saved;
  double seconds; /* since the counting began */
} onebit_counters_t;

/* Reports the counts so far. Local.
 *   counters   out: all of it; `size` is set by the caller
 * Thread-safe. A call that another thread is in may be counted in some of the numbers and not in
 * others.
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL, or a size the library does not know). */
onebit_status_t onebit_counters_get(onebit_counters_t *counters);

/* The reason why calls were passed on, as text: "no rule asks for it" for example. Local.
 *   reason   an index of onebit_counters_t.passed
 * Returns NULL if the index is not used or stands for no reason. Owned by the library.
 * Thread-safe. */
const char *onebit_counters_reason(size_t reason);

#ifdef __cplusplus
}
#endif
#endif
