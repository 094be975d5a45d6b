/* MPI's collectives as programs call them, and compressed exchanges in their place. */
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
 * An MPI collective as a program called it, in the library's terms. Only this module handles what
 * MPI has and onebit does not (other types, operations, layouts).
 */

/* Returns the code of an MPI call, or of one that gives such codes, unless it is MPI_SUCCESS. */
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
  size_t count; /* with the meaning that the operation gives it: onebit_operation_t */
  MPI_Datatype datatype;
  MPI_Op op; /* MPI_OP_NULL for an allgather */
};

/* Finds the type and operation in the library's terms, by which all ranks judge alike: buffers do
 * not matter. Doubles have sums only; OB_OTHER_TYPE where the type is none of the library's. */
enum ob_reason ob_mpi_call_resolve(const struct ob_mpi_call *call, onebit_dtype_t *dtype,
                                   bool *sum);

/* Makes the call with the MPI library: PMPI_Allreduce, PMPI_Allgather, PMPI_Reduce_scatter_block;
 * types that only onebit knows (ONEBIT_Type_bfloat16) have a dense sum of their own. Returns an MPI
 * error code. */
int ob_mpi_call_dense(const struct ob_mpi_call *call);

/* Makes the call in two parts: the request is MPI's; after it the result may have to be divided by
 * the communicator's size, which ob_mpi_call_end does. */
int ob_mpi_call_begin(const struct ob_mpi_call *call, MPI_Request *request);
int ob_mpi_call_end(const struct ob_mpi_call *call, int size);

/* The library's handles, made on first use and freed by MPI_Finalize; MPI_DATATYPE_NULL and
 * MPI_OP_NULL when MPI does not make them, and before MPI is initialised or after its end.
 * Thread-safe. */
MPI_Datatype ob_mpi_type(onebit_dtype_t dtype);
MPI_Op ob_mpi_average(void);

/* True if MPI is initialised and not yet finalised. */
bool ob_mpi_is_running(void);

/* Frees the handles: MPI_Finalize calls it. */
void ob_mpi_handles_free(void);

/*
 * ---- Exchanges ----
 *
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

/* Counts of an exchange's calls: calls that are not compressed were withdrawn. */
struct ob_tally {
  int bits;   /* bits an element sent in the latest call */
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
void ob_queues_advance(void);

/* Backs off in such a loop, longer the longer nothing has happened. */
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
unsigned ob_exchange_count_withdrawals(const struct ob_exchange *exchange);

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
bool ob_operation_is_done(struct ob_operation *operation, bool *compressed);
int ob_operation_test(struct ob_operation **operation, bool *done);
int ob_operation_wait(struct ob_operation **operation);

/*
 * ---- Inside the folder ----
 *
 * exchange.c knows plans and results, queue.c the operations in flight and the order in which they
 * move, waits.c how long to wait for MPI.
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
  struct ob_watch watch; /* of that */
  onebit_status_t start_status;
  int code;
  char message[160]; /* of an error, where code is one */
};

/* The most numbers in one agreement. */
#define OB_MAX_AGREED 128

struct ob_queue {
  struct ob_queue *next; /* of this process */
  onebit_comm_t comm;
  MPI_Comm of, dense; /* the program's communicator, and its copy */
  int rank, size;
  struct ob_operation *first, *last;
  bool moving;
  bool failed; /* a wait has timed out */
  int64_t agreed[OB_MAX_AGREED];
  atomic_int rolls, heard[]; /* of waits.c: roll calls, and the last one that each rank answered */
};

struct ob_exchange {
  struct ob_queue *queue;
  struct ob_tally tally;
  onebit_plan_t plan;
  onebit_operation_t operation;
  onebit_dtype_t dtype;
  bool sum;
  bool moves; /* its plan, between widths */
  size_t count;
  void *part;           /* of a reduce-scatter: holds a result that may not yet be
                                     * put where it belongs */
  float *narrow;        /* of doubles: what the plan works on */
  size_t undecided;     /* operations in flight that its plan has not ended */
  unsigned withdrawals; /* of its latest calls, how many in a row went dense after all */
};

/* ---- exchange.c ---- */

/* Reports an MPI error with its message, and returns the status. */
onebit_status_t ob_mpi_failed(const char *call, int code);

/* Begins the operation's compressed call. */
onebit_status_t ob_exchange_start(struct ob_operation *operation);

/* Copies the plan's result to MPI's buffer. */
void ob_exchange_store(const struct ob_exchange *exchange, const struct ob_mpi_call *call);

/* True if every rank gets a status of this kind, with nothing changed. Then all of them go on
 * dense. A damaged message and a failed transport may have met one alone. */
bool ob_is_withdrawn(onebit_status_t status);

/* Notes the decision on a call; below, counts a call that has ended well. The lock is held. */
void ob_exchange_note(struct ob_exchange *exchange, bool compressed);
void ob_exchange_count(struct ob_exchange *exchange, bool compressed);

/* ---- queue.c: the lock is held for moments only ---- */

extern pthread_mutex_t ob_queues_lock;
size_t ob_queues_in_flight(void);

/* Returns the queue of a program's communicator; NULL: it has none (yet). */
struct ob_queue *ob_queue_of(MPI_Comm comm);

/* True if an operation of the exchange is in flight. */
bool ob_queue_serves(const struct ob_exchange *exchange);

/* Gives an operation's memory back, or keeps it for the next one. */
void ob_operation_spare(struct ob_operation *operation);

/* ---- waits.c: bounded by ONEBIT_TIMEOUT, as collectives/watch.h has it ---- */

/* Waits for a request of MPI's, and moves the operations in flight meanwhile, since other ranks may
 * wait for these before they take part. A blocking call of MPI would not move them; as it does not
 * match a nonblocking one either, all ranks make nonblocking calls. Returns an MPI error code;
 * MPI_ERR_OTHER: a rank did not arrive, which onebit_last_error names if the communicator has a
 * queue. */
int ob_wait_moving(MPI_Comm comm, MPI_Request *request, const char *what);

/* Replaces each value by the largest of all ranks. Errors: as ob_wait_moving. */
int ob_largest(MPI_Comm comm, int64_t *values, int count);

/* Checks the timeout of a wait for `what` in which nothing has moved since the last check. Errors:
 * as ob_wait_moving. */
int ob_wait_look(struct ob_watch *watch, struct ob_queue *queue, const char *what);

/* Answers ranks that call the roll. */
void ob_roll_answer(struct ob_queue *queue);

#endif
