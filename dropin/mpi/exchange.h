/*
 * A compressed exchange in the place of an MPI collective, with the result that MPI's would have:
 * a sum where the program asks for one, and all values where they can not be compressed. A rank
 * withdraws by giving its plan no buffers: every other rank learns of it in the same call
 * (ONEBIT_ERROR_PEER), as of values that are not finite (ONEBIT_SKIPPED), no buffer and no kept
 * error has changed, and all of them make the same call dense. So nothing is lost and nobody hangs,
 * and the usual case costs no message more.
 *
 * Operations of a communicator begin in the same order on all ranks, as MPI demands; they are moved
 * on in that order, by whoever waits or tests. What is made dense after all is a collective too, so
 * those go over a communicator of the queue's own, in that order as well: when a rank finds that
 * one is needed depends on when it looks, so MPI's own order on the program's communicator could
 * not be kept.
 */
#ifndef OB_DROPIN_MPI_EXCHANGE_H
#define OB_DROPIN_MPI_EXCHANGE_H

#include "base/knobs.h"
#include "dropin/mpi/call.h"

/* Counts of an exchange's calls: calls that are not compressed were withdrawn. */
struct ob_tally {
  int bits;   /* an element, of what is sent in the latest call */
  bool moved; /* which had others than the call before */
  uint64_t calls, compressed;
  uint64_t bytes_sent, bytes_dense; /* bytes of one compressed call; bytes of the same call dense */
};

struct ob_queue;     /* of a communicator: what is in flight on it, in the order of beginning */
struct ob_exchange;  /* of a tensor */
struct ob_operation; /* a call of an exchange that has begun */

/* Makes the queue. Collective over comm, an intra-communicator. Fails on all ranks or on none. */
onebit_status_t ob_queue_create(MPI_Comm comm, struct ob_queue **queue);

/* Destroys the queue after its operations in flight. Collective. All exchanges must have been
 * destroyed after ob_queue_drain. NULL is fine. */
void ob_queue_drain(struct ob_queue *queue);
void ob_queue_destroy(struct ob_queue *queue);

/* Moves the operations in flight in this process, on every communicator, without waiting. For loops
 * that wait for something else. Thread-safe. */
void ob_queues_move(void);

/* Does the same in such a loop, and waits the longer the longer nothing has happened. */
void ob_queues_backoff(unsigned idle);

/* Creates an exchange. Collective over the queue's communicator, all ranks alike. The queue
 * outlives it.
 *   call         whose signature it serves; its buffers do not matter
 *   bits         an element, from and to; 0: as ONEBIT_BITS says
 *   has_memory   false: this rank has no memory for what belongs to it
 * Fails on all ranks or on none. */
onebit_status_t ob_exchange_create(struct ob_queue *queue, const struct ob_mpi_call *call,
                                   struct ob_bits bits, bool has_memory,
                                   struct ob_exchange **exchange);

/* Destroys it after its operations in flight; those still to be tested keep their results. */
void ob_exchange_destroy(struct ob_exchange *exchange);
onebit_plan_t ob_exchange_plan(const struct ob_exchange *exchange);
const struct ob_tally *ob_exchange_tally(const struct ob_exchange *exchange);

/* The number of its latest calls in a row that went dense after all. All ranks find the same,
 * because this waits until those in flight are decided. */
unsigned ob_exchange_withdrawals(const struct ob_exchange *exchange);

/* Sets that number to zero. */
void ob_exchange_forgive(struct ob_exchange *exchange);

/* Notes a call that the ranks knew beforehand to be dense. */
void ob_exchange_count_dense(struct ob_exchange *exchange);

/* Makes a call of its signature. Blocking. withdraw: this rank must not compress it. Returns an MPI
 * error code. */
int ob_exchange_run(struct ob_exchange *exchange, const struct ob_mpi_call *call, bool withdraw);

/* The same in parts. The operation is given back by the test or the wait that finds it done; both
 * give its MPI error code then, and set *operation to NULL. It may outlive exchange and
 * communicator. Beginning waits for nobody. Where no memory is left for an operation, the call is
 * made at once, blocking, and *operation is NULL. */
int ob_exchange_begin(struct ob_exchange *exchange, const struct ob_mpi_call *call, bool withdraw,
                      struct ob_operation **operation);
/* True if the operation has ended; moves nothing. *compressed: false where it was withdrawn. */
bool ob_operation_ended(struct ob_operation *operation, bool *compressed);
int ob_operation_test(struct ob_operation **operation, bool *done);
int ob_operation_wait(struct ob_operation **operation);

#endif
