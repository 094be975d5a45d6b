/*
 * A compressed exchange in the place of an MPI collective, with the result that MPI's would have:
 * a sum where the program asks for one, and all values where they can not be compressed. A rank
 * withdraws by giving its plan no buffers: every other rank learns of it in the same call
 * (ONEBIT_ERROR_PEER), as of values that are not finite (ONEBIT_SKIPPED), no buffer and no kept
 * error has changed, and all of them make the same call dense. So nothing is lost and nobody hangs,
 * and the usual case costs no message more.
 */
#ifndef OB_DROPIN_EXCHANGE_H
#define OB_DROPIN_EXCHANGE_H

#include "dropin/call.h"

/* What one tensor has gone through: a line of the report. */
struct ob_tally {
  uint64_t calls, compressed;
  uint64_t dense[OB_REASON_COUNT]; /* calls passed through, by why */
  uint64_t bytes_sent,
      bytes_dense; /* sent by compressed calls; what the same calls had sent dense */
  double seconds_compressed, seconds_dense; /* spent in either */
};

struct ob_exchange;

/* Collective over the communicator. Both comm and tally must outlive it.
 *   call    whose signature it serves; its buffers do not matter
 * Fails on all ranks or on none. */
onebit_status_t ob_exchange_create(onebit_comm_t comm, const struct ob_mpi_call *call,
                                   struct ob_tally *tally, struct ob_exchange **exchange);
void ob_exchange_destroy(struct ob_exchange *exchange);
onebit_plan_t ob_exchange_plan(const struct ob_exchange *exchange);

/* Does a call of its signature. Blocking. withdraw: this rank must not compress it.
 * Gives an MPI error code. */
int ob_exchange_run(struct ob_exchange *exchange, const struct ob_mpi_call *call, bool withdraw);

/* The same in parts. Exchanges of a communicator end in the order in which they began, on every
 * rank, since what is made dense after all is a collective too: testing or waiting for a later one
 * moves and ends earlier ones first. */
int ob_exchange_begin(struct ob_exchange *exchange, const struct ob_mpi_call *call, bool withdraw);
int ob_exchange_test(struct ob_exchange *exchange, bool *done);
int ob_exchange_wait(struct ob_exchange *exchange);

#endif
