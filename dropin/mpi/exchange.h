/* Defines MPI's collectives as programs call them, and the compressed exchanges that replace
 * them. */
#ifndef OB_DROPIN_MPI_EXCHANGE_H
#define OB_DROPIN_MPI_EXCHANGE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/bound_mpi.h"
#include "base/knobs.h"
#include "base/lock.h"
#include "collectives/watch.h"
#include "dropin/counters.h"
#include "onebit/onebit.h"

/*
 * ---- A call (call.c) ----
 *
 * A call is an MPI collective as a program called it. Only this module handles MPI's types,
 * operations and layouts that onebit does not have.
 */

/* Returns from the calling function with the MPI error code of `call`, unless it is MPI_SUCCESS. */
#define OB_TRY_MPI(call)                                                                           \
  do {                                                                                             \
    const int ob_try_code = (call);                                                                \
    if (ob_try_code != MPI_SUCCESS)                                                                \
      return ob_try_code;                                                                          \
  } while (0)

struct ob_mpi_call {
  onebit_operation_t operation;
  MPI_Comm comm;
  const void *sendbuf; /* as the program gave it: may be MPI_IN_PLACE */
  void *recvbuf;
  size_t count; /* number of elements; onebit_operation_t says of which buffer */
  MPI_Datatype datatype;
  MPI_Op op; /* MPI_OP_NULL for an allgather */
};

/* Finds the call's element type, and whether its result is a sum. Returns the reason why it can not
 * be compressed, or OB_REASON_NONE. The result does not depend on buffers, so it is the same on all
 * ranks. Doubles are compressed in allreduces only. *dtype is OB_OTHER_TYPE for a type that the
 * library does not know. */
enum ob_reason ob_mpi_call_resolve(const struct ob_mpi_call *call, onebit_dtype_t *dtype,
                                   bool *sum);

/* Makes the call by the MPI library: PMPI_Allreduce, PMPI_Allgather or PMPI_Reduce_scatter_block.
 * For types that only onebit defines (ONEBIT_Type_bfloat16) the library has its own dense sum.
 * Returns an MPI error code. */
int ob_mpi_call_run_dense(const struct ob_mpi_call *call);

/* Begins the call as a nonblocking call of MPI. Once MPI has completed the request, the caller
 * calls ob_mpi_call_end, which divides the sum by the communicator's size if the call is an
 * average. */
int ob_mpi_call_begin(const struct ob_mpi_call *call, MPI_Request *request);
int ob_mpi_call_end(const struct ob_mpi_call *call, int size);

/* Return the library's handles, which are created on first use and freed by MPI_Finalize. Return
 * MPI_DATATYPE_NULL or MPI_OP_NULL if MPI can not create the handle, before MPI is initialised, and
 * after MPI is finalised. Thread-safe. */
MPI_Datatype ob_mpi_type(onebit_dtype_t dtype);
MPI_Op ob_mpi_average(void);

/* Returns true if MPI is initialised and not yet finalised. */
bool ob_mpi_is_running(void);

/* Frees the handles: MPI_Finalize calls it. */
void ob_mpi_handles_free(void);

/*
 * ---- Exchanges ----
 *
 * An exchange replaces an MPI collective by a compressed one. The result is what MPI defines: a sum
 * if the program asks for a sum. A rank whose values can not be compressed withdraws: it gives its
 * plan no buffers. Every other rank learns of this in the same call (ONEBIT_ERROR_PEER), as it
 * learns of values that are not finite (ONEBIT_SKIPPED). In both cases no buffer and no residual
 * has changed, and all ranks make the same call dense. So no value is lost, no rank hangs, and a
 * compressed call needs no additional message.
 *
 * The operations of a communicator begin in the same order on all ranks, as MPI requires. Threads
 * that wait or test advance them, in that order. A withdrawn call that is made dense is a
 * collective too, but each rank begins it when it finds that its plan's call has ended. On the
 * program's communicator this could break MPI's order of collectives. So such calls use the queue's
 * own copy of the communicator, in the order of the operations.
 */

/* Counts of an exchange's calls. Calls that were not compressed were withdrawn. */
struct ob_tally {
  int bits;   /* bits per element sent in the latest call */
  bool moved; /* the latest call had other bits than the call before it */
  uint64_t calls, compressed;
  uint64_t bytes_sent, bytes_dense; /* bytes of one call, compressed and dense */
};

struct ob_queue;     /* the operations in flight on a communicator, oldest first */
struct ob_exchange;  /* the compressed calls of one tensor */
struct ob_operation; /* one call of an exchange, from its beginning to its end */

/* Creates the queue of comm, an intra-communicator. Collective. Fails on all ranks or on none. */
onebit_status_t ob_queue_create(MPI_Comm comm, struct ob_queue **queue);

/* ob_queue_drain waits until no operation is in flight; ob_queue_destroy, which is collective, then
 * destroys the queue. Between the two calls the caller destroys all exchanges. NULL is allowed. */
void ob_queue_drain(struct ob_queue *queue);
void ob_queue_destroy(struct ob_queue *queue);

/* Advances the operations in flight in this process, on every communicator, without waiting. For
 * use in loops that wait for something else. Thread-safe. */
void ob_queues_advance(void);

/* For use in such a loop after `idle` turns without progress. Advances the operations, then yields
 * the processor, or sleeps if `idle` is large. */
void ob_queues_backoff(unsigned idle);

/* Creates an exchange. Collective over the queue's communicator, with the same arguments on all
 * ranks. The queue must outlive the exchange.
 *   call         any call with the operation, type and count of the exchange
 *   bits         the range of bits per element; 0: the value of ONEBIT_BITS
 *   has_memory   false: the caller has no memory for its own part, and all ranks fail
 * Fails on all ranks or on none. */
onebit_status_t ob_exchange_create(struct ob_queue *queue, const struct ob_mpi_call *call,
                                   struct ob_bits bits, bool has_memory,
                                   struct ob_exchange **exchange);

/* Destroys an exchange after its operations in flight have ended. Operations that have ended but
 * have not been tested yet keep their results. */
void ob_exchange_destroy(struct ob_exchange *exchange);

/* Returns how many of the latest calls in a row were withdrawn. First waits until the calls in
 * flight are compressed or withdrawn, so that all ranks return the same number. */
unsigned ob_exchange_count_withdrawals(const struct ob_exchange *exchange);

/* Sets the number of withdrawals in a row to zero. */
void ob_exchange_reset_withdrawals(struct ob_exchange *exchange);

/* Counts a call that all ranks have agreed to make dense, so that no rank begins it compressed. */
void ob_exchange_count_dense(struct ob_exchange *exchange);

/* Makes a call with the exchange's operation, type and count. Blocking. withdraw: this rank must
 * not compress the call. Returns an MPI error code. */
int ob_exchange_run(struct ob_exchange *exchange, const struct ob_mpi_call *call, bool withdraw);

/* Begins a call, without waiting for other ranks. ob_operation_test or ob_operation_wait ends it:
 * the function that finds the operation done frees it, returns its MPI error code, and sets
 * *operation to NULL. An operation may outlive its exchange and its communicator. If there is no
 * memory for an operation, the call is completed at once, blocking, and *operation is NULL. */
int ob_exchange_begin(struct ob_exchange *exchange, const struct ob_mpi_call *call, bool withdraw,
                      struct ob_operation **operation);
/* Returns true if the operation has ended. Advances no operation. *compressed: false if the
 * operation was withdrawn. */
bool ob_operation_is_done(struct ob_operation *operation, bool *compressed);
int ob_operation_test(struct ob_operation **operation, bool *done);
int ob_operation_wait(struct ob_operation **operation);

/*
 * ---- Inside the folder ----
 *
 * exchange.c handles plans and results. queue.c handles the operations in flight and the order in
 * which they advance. waits.c handles the timeouts of waits for MPI.
 */

enum ob_stage {
  OB_STAGE_WAITS,
  OB_STAGE_COMPRESSED,
  OB_STAGE_UNSENT,
  OB_STAGE_DENSE,
  OB_STAGE_DONE
};

struct ob_operation {
  struct ob_operation *next;
  struct ob_queue *queue;
  struct ob_exchange *exchange;
  struct ob_mpi_call call; /* its communicator is the queue's copy for dense calls */
  enum ob_stage stage;
  bool withdraw, compressed;
  onebit_request_t request;
  MPI_Request dense;
  struct ob_watch watch; /* the wait for `dense` */
  onebit_status_t start_status;
  int code;
  char message[160]; /* the error message, if `code` is an error */
};

/* The largest number of values in one agreement of the ranks. */
#define OB_MAX_AGREED 128

struct ob_queue {
  struct ob_queue *next; /* the list of this process */
  onebit_comm_t comm;
  MPI_Comm of, dense; /* the program's communicator, and its copy */
  int rank, size;
  struct ob_operation *first, *last;
  bool moving;
  bool failed; /* a wait has timed out (waits.c) */
  int64_t agreed[OB_MAX_AGREED];
  atomic_int rolls, heard[]; /* in waits.c: roll calls; the last one each rank has answered */
};

struct ob_exchange {
  struct ob_queue *queue;
  struct ob_tally tally;
  onebit_plan_t plan;
  onebit_operation_t operation;
  onebit_dtype_t dtype;
  bool sum;
  bool moves; /* the plan may change its bits per element */
  size_t count;
  void *part;           /* holds the result of a reduce-scatter in place, while the receive buffer
                         * is still input */
  float *narrow;        /* doubles converted to floats, on which the plan works */
  size_t undecided;     /* operations that are neither compressed nor withdrawn yet */
  unsigned withdrawals; /* how many of the latest calls in a row were withdrawn */
};

/* ---- exchange.c ---- */

/* Reports an MPI error with its message, and returns the status. */
onebit_status_t ob_report_mpi_error(const char *call, int code);

/* Begins the compressed call of an operation. */
onebit_status_t ob_exchange_start(struct ob_operation *operation);

/* Copies the plan's result to MPI's buffer. */
void ob_exchange_store(const struct ob_exchange *exchange, const struct ob_mpi_call *call);

/* Returns true if all ranks get such a status and no buffer has changed, so that all ranks make the
 * call dense. Returns false for a damaged message or a failed transport, which one rank alone may
 * have noticed. */
bool ob_is_withdrawn(onebit_status_t status);

/* ob_exchange_note notes whether a call was compressed or withdrawn; ob_exchange_count counts a
 * call that has succeeded. The caller holds ob_queues_lock. */
void ob_exchange_note(struct ob_exchange *exchange, bool compressed);
void ob_exchange_count(struct ob_exchange *exchange, bool compressed);

/* ---- queue.c: functions hold the lock only briefly ---- */

extern pthread_mutex_t ob_queues_lock;
size_t ob_queues_in_flight(void);

/* Returns the queue of a program's communicator; NULL if it has none (yet). */
struct ob_queue *ob_queue_find(MPI_Comm comm);

/* Returns true if an operation of the exchange is in flight. */
bool ob_exchange_is_in_flight(const struct ob_exchange *exchange);

/* Stores an operation's memory for reuse by the next operation, or frees it if there is no
 * queue. */
void ob_operation_recycle(struct ob_operation *operation);

/* ---- waits.c: waits that ONEBIT_TIMEOUT bounds (collectives/watch.h) ---- */

/* Waits for a request of MPI, and meanwhile advances the operations in flight: other ranks may wait
 * for these before they make the call. A blocking call of MPI would not advance them, and would not
 * match the nonblocking call of another rank, so all ranks make nonblocking calls. Returns an MPI
 * error code. MPI_ERR_OTHER: a rank did not arrive; onebit_last_error names that rank if the
 * communicator has a queue. */
int ob_wait_for_request(MPI_Comm comm, MPI_Request *request, const char *what);

/* Replaces each value by the largest of all ranks. Errors: those of ob_wait_for_request. */
int ob_allreduce_max(MPI_Comm comm, int64_t *values, int count);

/* Checks the timeout of a wait for `what`, during which nothing has changed since the last check.
 * Errors: those of ob_wait_for_request. */
int ob_wait_check_timeout(struct ob_watch *watch, struct ob_queue *queue, const char *what);

/* Answers other ranks' messages that ask which ranks wait here (waits.c). */
void ob_answer_roll_call(struct ob_queue *queue);

#endif
