/*
 * Shadows: now and then a part of a compressed sum is also computed exactly, and both are compared.
 * With error feedback a sum differs from the exact one by the rounding error of the call before.
 * Where that is much of the sum itself, since the call before was much larger, the sum is no
 * gradient that is averaged over steps, and the tensor is exact from then on, on all ranks.
 */
#ifndef OB_DROPIN_MPI_SHADOW_H
#define OB_DROPIN_MPI_SHADOW_H

#include "dropin/counters.h"
#include "dropin/mpi/call.h"

/* The shadow of a tensor. All zero at first; the same on all ranks but for the input. */
struct ob_shadow {
  uint64_t calls;           /* compressed blocking ones */
  unsigned offences, since; /* shadows beyond the bound, and since the last of them */
  bool refused;             /* it is exact from now on */
  size_t first;             /* element of the part that is compared, where the call has a shadow */
  double *input;            /* of that part; ob_shadow_bytes */
  double norm;              /* square, of a part of the latest nonblocking call's input */
};

/* Bytes for the input of a tensor's shadow. */
size_t ob_shadow_bytes(const struct ob_mpi_call *call);

/* Called before a compressed blocking call. True if it has a shadow, which all ranks find alike;
 * its input is then kept. */
bool ob_shadow_begin(struct ob_shadow *shadow, const struct ob_mpi_call *call);

/* Called after that call. Collective. tensor: its number for messages; bits: of an element in the
 * call, 0 where the tensor may have more, and so is not judged. */
void ob_shadow_end(struct ob_shadow *shadow, const struct ob_mpi_call *call, int tensor, int bits,
                   struct ob_record *record);

/* Called before a nonblocking call, which has no shadow. True if this rank's input is so much
 * smaller than the one before that the error of that one would be much of the sum. Then the rank
 * withdraws. */
bool ob_shadow_is_quiet(struct ob_shadow *shadow, const struct ob_mpi_call *call);

#endif
