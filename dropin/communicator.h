/*
 * What is kept for an MPI communicator, as an attribute of it: made by the first call that wants
 * it, gone when the communicator is freed or MPI ends (MPI_Finalize frees MPI_COMM_SELF, whose
 * attributes are deleted first).
 */
#ifndef OB_DROPIN_COMMUNICATOR_H
#define OB_DROPIN_COMMUNICATOR_H

#include "dropin/exchange.h"
#include "dropin/sequence.h"

struct ob_attached;

/* Collective the first time. NULL where the ranks found that they can not: all of them find so. */
struct ob_attached *ob_attached_of(MPI_Comm comm);

/* The preload libraries' way: the exchange for this call, or NULL for a dense one, with why. Seen
 * calls are learned; once all ranks follow, a call of a known phase is compressed. Collective at
 * times, all ranks alike. *withdraw is for ob_exchange_run. */
struct ob_exchange *ob_attached_follow(struct ob_attached *attached, const struct ob_mpi_call *call,
                                       bool *withdraw, enum ob_reason *reason);

/* The way of ONEBIT_Allreduce and the like: compressed from the first call on. Before the ranks
 * follow, they agree by a message of 16 bytes on which tensor a call is of. NULL with an MPI error
 * code in *code when that fails. */
struct ob_exchange *ob_attached_agree(struct ob_attached *attached, const struct ob_mpi_call *call,
                                      bool *withdraw, int *code);

#endif
