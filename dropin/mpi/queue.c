/*
 * Advances the operations in flight.
 *
 * An operation waits while its plan is busy with an earlier one, is compressed, and ends. If a rank
 * has withdrawn, the operation becomes unsent instead, is sent dense, and ends. The operations that
 * are sent dense come first in a queue, before those whose compressed call has not ended. Of these
 * later operations only the first is tested, since every rank completes them in the order of the
 * queue.
 *
 * One lock guards all lists. No thread holds it while it exchanges data. A thread that advances a
 * queue marks it, so that other threads do not advance it at the same time.
 */
#define _POSIX_C_SOURCE 200809L
#include <sched.h>
#include <stdio.h>
#include <time.h>

#include "base/error.h"
#include "base/memory.h"
#include "dropin/mpi/exchange.h"
#include "onebit/mpi.h"

pthread_mutex_t ob_queues_lock = PTHREAD_MUTEX_INITIALIZER;
static struct ob_queue *queues;
static struct ob_operation *spares;
static size_t in_flight; /* operations in all queues */

size_t ob_queues_in_flight(void) {
  OB_LOCKED(&ob_queues_lock);
  return in_flight;
}

/* ---- Queues ---- */

/* Frees a queue. If a wait has timed out, MPI may still write to the queue's memory, so this memory
 * is never freed. */
static void free_queue(struct ob_queue *queue) {
  onebit_comm_destroy(queue->comm);
  if (queue->failed) {
    ob_memory_keep(queue);
    return;
  }
  if (queue->dense != MPI_COMM_NULL) {
    ob_answer_roll_call(queue);
    PMPI_Comm_free(&queue->dense);
  }
  ob_release(queue);
}

static void add_queue(struct ob_queue *queue) {
  OB_LOCKED(&ob_queues_lock);
  queue->next = queues;
  queues = queue;
}

/* Allocates a queue, and agrees with the other ranks whether all of them have memory for it. */
static onebit_status_t allocate_queue(MPI_Comm comm, struct ob_queue **queue) {
  int size = 1;
  PMPI_Comm_size(comm, &size);
  *queue = ob_allocate(1, sizeof **queue + (size_t)size * sizeof(*queue)->heard[0]);
  int64_t missing = *queue == NULL;
  int code = ob_allreduce_max(comm, &missing, 1);
  if (code == MPI_SUCCESS && !missing)
    return ONEBIT_OK;
  ob_release(*queue);
  *queue = NULL;
  return code == MPI_SUCCESS
             ? ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a queue of exchanges")
             : ONEBIT_ERROR_TRANSPORT;
}

onebit_status_t ob_queue_create(MPI_Comm comm, struct ob_queue **result) {
  struct ob_queue *queue = NULL;
  *result = NULL;
  OB_TRY(allocate_queue(comm, &queue));
  queue->dense = MPI_COMM_NULL;
  onebit_status_t status = onebit_comm_create_mpi(comm, &queue->comm);
  /* Copies the communicator. MPI_Comm_dup would call the program's attribute callbacks. */
  int code = MPI_SUCCESS;
  if (status == ONEBIT_OK)
    code = PMPI_Comm_split(comm, 0, onebit_comm_rank(queue->comm), &queue->dense);
  if (code != MPI_SUCCESS)
    status = ob_report_mpi_error("MPI_Comm_split", code);
  if (status != ONEBIT_OK) {
    free_queue(queue);
    return status;
  }
  PMPI_Comm_set_errhandler(queue->dense, MPI_ERRORS_RETURN);
  queue->of = comm;
  queue->rank = onebit_comm_rank(queue->comm);
  queue->size = onebit_comm_size(queue->comm);
  add_queue(queue);
  *result = queue;
  return ONEBIT_OK;
}

struct ob_queue *ob_queue_find(MPI_Comm comm) {
  OB_LOCKED(&ob_queues_lock);
  struct ob_queue *queue = queues;
  while (queue && queue->of != comm && queue->dense != comm)
    queue = queue->next;
  return queue;
}

static bool claim_queue(struct ob_queue *queue) {
  OB_LOCKED(&ob_queues_lock);
  bool mine = !queue->moving;
  queue->moving = true;
  return mine;
}

static void free_spares(void) {
  while (spares) {
    struct ob_operation *next = spares->next;
    ob_release(spares);
    spares = next;
  }
}

/* Removes a queue from the list, so that no thread advances it any more. */
static void remove_queue(struct ob_queue *queue) {
  while (!claim_queue(queue))
    sched_yield();
  OB_LOCKED(&ob_queues_lock);
  struct ob_queue **at = &queues;
  while (*at != queue)
    at = &(*at)->next;
  *at = queue->next;
  if (!queues)
    free_spares();
}

static bool is_empty(struct ob_queue *queue) {
  OB_LOCKED(&ob_queues_lock);
  return !queue->first;
}

void ob_queue_drain(struct ob_queue *queue) {
  for (unsigned idle = 0; queue && !is_empty(queue); idle++)
    ob_queues_backoff(idle);
}

void ob_queue_destroy(struct ob_queue *queue) {
  if (!queue)
    return;
  ob_queue_drain(queue);
  remove_queue(queue);
  free_queue(queue);
}

/* ---- Operations ---- */

void ob_operation_recycle(struct ob_operation *operation) {
  pthread_mutex_lock(&ob_queues_lock);
  if (queues) {
    operation->next = spares;
    spares = operation;
    operation = NULL;
  }
  pthread_mutex_unlock(&ob_queues_lock);
  ob_release(operation);
}

bool ob_exchange_is_in_flight(const struct ob_exchange *exchange) {
  bool found = false;
  OB_LOCKED(&ob_queues_lock);
  for (struct ob_operation *o = exchange->queue->first; o && !found; o = o->next)
    found = o->exchange == exchange;
  return found;
}

static void unlink_operation(struct ob_queue *queue, const struct ob_operation *operation) {
  struct ob_operation **at = &queue->first, *before = NULL;
  while (*at != operation) {
    before = *at;
    at = &before->next;
  }
  *at = operation->next;
  if (queue->last == operation)
    queue->last = before;
  in_flight--;
}

/* Finishes an operation. Afterwards only its owner may access it. */
static void queue_finish(struct ob_operation *operation, int code) {
  operation->code = code;
  if (code != MPI_SUCCESS)
    snprintf(operation->message, sizeof operation->message, "%s", onebit_last_error());
  OB_LOCKED(&ob_queues_lock);
  unlink_operation(operation->queue, operation);
  if (code == MPI_SUCCESS)
    ob_exchange_count(operation->exchange, operation->compressed);
  operation->stage = OB_STAGE_DONE;
}

static void queue_finish_dense(struct ob_operation *operation, const char *call, int code) {
  if (code != MPI_SUCCESS)
    ob_report_mpi_error(call, code);
  queue_finish(operation, code);
}

/* Returns the status of the operation's compressed call. If that call has waited for an earlier
 * one, begins it first. Beginning the call fails if the plan's transport has failed before. */
static onebit_status_t queue_poll_plan(struct ob_operation *operation, bool wait) {
  if (operation->stage == OB_STAGE_WAITS) {
    operation->stage = OB_STAGE_COMPRESSED;
    operation->start_status = ob_exchange_start(operation);
  }
  if (operation->start_status != ONEBIT_OK)
    return operation->start_status;
  return wait ? onebit_wait(&operation->request) : onebit_test(&operation->request);
}

/* Finds out whether an operation was compressed or withdrawn; returns false if its plan's call is
 * in progress. */
static bool queue_decide(struct ob_operation *operation, bool wait) {
  onebit_status_t status = queue_poll_plan(operation, wait);
  if (status == ONEBIT_IN_PROGRESS)
    return false;
  operation->compressed = status == ONEBIT_OK;
  if (operation->compressed)
    ob_exchange_store(operation->exchange, &operation->call);
  pthread_mutex_lock(&ob_queues_lock);
  operation->exchange->undecided--;
  ob_exchange_note(operation->exchange, operation->compressed);
  pthread_mutex_unlock(&ob_queues_lock);
  if (ob_is_withdrawn(status))
    operation->stage = OB_STAGE_UNSENT;
  else
    queue_finish(operation, operation->compressed ? MPI_SUCCESS : MPI_ERR_INTERN);
  return true;
}

#define DENSE_CALL "a call without compression"

/* Begins the dense call of an unsent operation, and tests it. Finishes the operation when the call
 * has ended or its wait has timed out. */
static void move_dense(struct ob_operation *operation) {
  int done = 0, code = MPI_SUCCESS;
  if (operation->stage == OB_STAGE_UNSENT) {
    operation->stage = OB_STAGE_DENSE;
    code = ob_mpi_call_begin(&operation->call, &operation->dense);
  }
  if (code == MPI_SUCCESS)
    code = PMPI_Test(&operation->dense, &done, MPI_STATUS_IGNORE);
  if (code == MPI_SUCCESS && done)
    code = ob_mpi_call_end(&operation->call, operation->queue->size);
  if (code != MPI_SUCCESS || done) {
    queue_finish_dense(operation, DENSE_CALL, code);
    return;
  }
  code = ob_wait_check_timeout(&operation->watch, operation->queue, DENSE_CALL);
  if (code != MPI_SUCCESS)
    queue_finish(operation, code);
}

static bool is_undecided(const struct ob_operation *operation) {
  return operation->stage == OB_STAGE_WAITS || operation->stage == OB_STAGE_COMPRESSED;
}

/* Returns the first operation of the queue, or the one after `operation`. */
static struct ob_operation *get_next_operation(struct ob_queue *queue,
                                               const struct ob_operation *operation) {
  OB_LOCKED(&ob_queues_lock);
  return operation ? operation->next : queue->first;
}

/* Advances the operations of a claimed queue. An operation that has ended must not be accessed any
 * more, so its successor is read first. An operation that was withdrawn sends dense messages when
 * the queue advances again. */
static void move_claimed_queue(struct ob_queue *queue, bool wait) {
  for (struct ob_operation *operation = get_next_operation(queue, NULL), *next; operation;
       operation = next) {
    next = get_next_operation(queue, operation);
    if (!is_undecided(operation))
      move_dense(operation);
    else if (!queue_decide(operation, wait))
      return;
  }
}

static void unclaim_queue(struct ob_queue *queue) {
  OB_LOCKED(&ob_queues_lock);
  queue->moving = false;
}

/* Advances a queue. Blocks in onebit_wait only if this process has no other operation in flight:
 * another rank might wait for such an operation. */
static void queue_move(struct ob_queue *queue, bool wait) {
  if (!claim_queue(queue))
    return;
  move_claimed_queue(queue, wait && ob_queues_in_flight() == 1);
  unclaim_queue(queue);
}

void ob_queues_advance(void) {
  pthread_mutex_lock(&ob_queues_lock);
  for (struct ob_queue *queue = queues; queue; queue = queue->next) {
    if (queue->moving || !queue->first)
      continue;
    queue->moving = true; /* keeps the queue in the list */
    pthread_mutex_unlock(&ob_queues_lock);
    move_claimed_queue(queue, false);
    pthread_mutex_lock(&ob_queues_lock);
    queue->moving = false;
  }
  pthread_mutex_unlock(&ob_queues_lock);
}

void ob_queues_backoff(unsigned idle) {
  static const struct timespec nap = {.tv_nsec = 20000};
  ob_queues_advance();
  if (idle < 100)
    sched_yield();
  else
    nanosleep(&nap, NULL);
}

static struct ob_operation *alloc_operation(void) {
  pthread_mutex_lock(&ob_queues_lock);
  struct ob_operation *operation = spares;
  if (operation)
    spares = operation->next;
  pthread_mutex_unlock(&ob_queues_lock);
  return operation ? operation : ob_allocate(1, sizeof *operation);
}

/* Adds an operation to its queue. A plan's calls begin in the order of the operations. This
 * operation begins at once if all earlier ones of its exchange are compressed or withdrawn. */
static void add_operation(struct ob_operation *operation) {
  struct ob_queue *queue = operation->queue;
  pthread_mutex_lock(&ob_queues_lock);
  bool first = operation->exchange->undecided++ == 0;
  pthread_mutex_unlock(&ob_queues_lock);
  if (first) {
    operation->stage = OB_STAGE_COMPRESSED;
    operation->start_status = ob_exchange_start(operation);
  }
  pthread_mutex_lock(&ob_queues_lock);
  if (queue->last)
    queue->last->next = operation;
  else
    queue->first = operation;
  queue->last = operation;
  in_flight++;
  pthread_mutex_unlock(&ob_queues_lock);
}

int ob_exchange_begin(struct ob_exchange *exchange, const struct ob_mpi_call *call, bool withdraw,
                      struct ob_operation **result) {
  *result = alloc_operation();
  if (!*result)
    return ob_exchange_run(exchange, call, withdraw);
  struct ob_operation *operation = *result;
  *operation = (struct ob_operation){.queue = exchange->queue,
                                     .exchange = exchange,
                                     .call = *call,
                                     .stage = OB_STAGE_WAITS,
                                     .withdraw = withdraw,
                                     .dense = MPI_REQUEST_NULL};
  operation->call.comm = exchange->queue->dense;
  add_operation(operation);
  return MPI_SUCCESS;
}

static bool is_done(const struct ob_operation *operation) {
  OB_LOCKED(&ob_queues_lock);
  return operation->stage == OB_STAGE_DONE;
}

bool ob_operation_is_done(struct ob_operation *operation, bool *compressed) {
  bool done = is_done(operation);
  *compressed = done && operation->compressed;
  return done;
}

static int collect_result(struct ob_operation **operation) {
  struct ob_operation *done = *operation;
  int code = done->code;
  if (code != MPI_SUCCESS)
    ob_error(ONEBIT_ERROR_TRANSPORT, "%s", done->message);
  *operation = NULL;
  ob_operation_recycle(done);
  return code;
}

int ob_operation_test(struct ob_operation **operation, bool *done) {
  *done = true;
  if (!*operation)
    return MPI_SUCCESS;
  *done = is_done(*operation);
  if (!*done) {
    ob_queues_advance();
    *done = is_done(*operation);
  }
  return *done ? collect_result(operation) : MPI_SUCCESS;
}

int ob_operation_wait(struct ob_operation **operation) {
  if (!*operation)
    return MPI_SUCCESS;
  for (unsigned idle = 0; !is_done(*operation); idle++) {
    queue_move((*operation)->queue, true);
    if (!is_done(*operation))
      ob_queues_backoff(idle);
  }
  return collect_result(operation);
}
