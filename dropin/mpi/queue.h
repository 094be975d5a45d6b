/* The interface between the two halves of exchange.h: exchange.c knows plans and results, queue.c
 * the operations in flight and the order in which they move. */
#ifndef OB_DROPIN_MPI_QUEUE_H
#define OB_DROPIN_MPI_QUEUE_H

#include <stdatomic.h>

#include "base/lock.h"
#include "collectives/watch.h"
#include "dropin/mpi/exchange.h"
#include "onebit/onebit.h"

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
  bool failed; /* a wait was given up */
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
  void *part;           /* of a reduce-scatter: room for a result that may not yet be
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

/* The queue of a program's communicator; NULL: there is none, or not yet. */
struct ob_queue *ob_queue_of(MPI_Comm comm);

/* True if an operation of the exchange is in flight. */
bool ob_queue_serves(const struct ob_exchange *exchange);

/* Gives an operation's memory back, or keeps it for the next one. */
void ob_operation_spare(struct ob_operation *operation);

/* ---- waits.c: bounded by ONEBIT_TIMEOUT, as collectives/watch.h has it ---- */

/* Waits for a request of MPI's, and moves the operations in flight meanwhile: other ranks may wait
 * for them before they take part. So no blocking call of MPI will do, and since those do not match
 * nonblocking ones, all ranks make nonblocking ones. Returns an MPI error code; MPI_ERR_OTHER: a
 * rank has not come, which the message of onebit_last_error names where the communicator has a
 * queue. */
int ob_wait_moving(MPI_Comm comm, MPI_Request *request, const char *what);

/* Each value becomes the largest of all ranks. Errors: as ob_wait_moving. */
int ob_largest(MPI_Comm comm, int64_t *values, int count);

/* Checks the timeout of a wait for `what` in which nothing has moved since the last check. Errors:
 * as ob_wait_moving. */
int ob_wait_look(struct ob_watch *watch, struct ob_queue *queue, const char *what);

/* Answers ranks that call the roll. */
void ob_roll_answer(struct ob_queue *queue);

#endif
