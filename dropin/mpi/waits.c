/*
 * Waits for MPI's own collectives. MPI does not say which rank a collective waits for. So a rank
 * whose wait times out calls the roll on the queue's communicator: it asks all other ranks, and
 * those that wait in the same collective answer. The messages are empty: the tag tells a question
 * from an answer.
 */
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/process.h"
#include "collectives/watch.h"
#include "dropin/mpi/exchange.h"

/* The seconds in which other ranks must answer. A rank that waits in this file answers between its
 * next tests of the request, which take longer on a busy processor. */
#define ROLL_SECONDS 0.5
/* The number of tests of the request between two checks for such messages. */
#define TESTS_BETWEEN 64
/* The number of roll calls with different tags. Every MPI allows tags up to 32767. */
#define ROLL_CALLS 16000

enum { ASK, HERE, KINDS };

struct waiter {
  struct ob_queue *queue; /* NULL: the communicator has none yet */
  const char *what;
};

static void send_roll_message(const struct ob_queue *queue, int rank, int kind, int number) {
  MPI_Request sent;
  if (PMPI_Isend(NULL, 0, MPI_BYTE, rank, number * KINDS + kind, queue->dense, &sent) ==
      MPI_SUCCESS)
    PMPI_Request_free(&sent);
}

void ob_answer_roll_call(struct ob_queue *queue) {
  MPI_Message message;
  MPI_Status status;
  int found = 0;
  while (PMPI_Improbe(MPI_ANY_SOURCE, MPI_ANY_TAG, queue->dense, &found, &message, &status) ==
             MPI_SUCCESS &&
         found && PMPI_Mrecv(NULL, 0, MPI_BYTE, &message, MPI_STATUS_IGNORE) == MPI_SUCCESS) {
    int number = status.MPI_TAG / KINDS;
    if (status.MPI_TAG % KINDS == ASK)
      send_roll_message(queue, status.MPI_SOURCE, HERE, number);
    else
      atomic_store(&queue->heard[status.MPI_SOURCE], number);
  }
}

/* Returns the first rank that has not answered, or -1 if all have answered. */
static int waits_find_missing(const struct ob_queue *queue, int number) {
  for (int rank = 0; rank < queue->size; rank++)
    if (rank != queue->rank && atomic_load(&queue->heard[rank]) != number)
      return rank;
  return -1;
}

static int call_roll(struct ob_queue *queue) {
  const double until = ob_seconds() + ROLL_SECONDS;
  int number = 1 + (int)(atomic_fetch_add(&queue->rolls, 1) % (ROLL_CALLS - 1)), missing;
  for (int rank = 0; rank < queue->size; rank++)
    if (rank != queue->rank)
      send_roll_message(queue, rank, ASK, number);
  for (unsigned idle = 0;
       (missing = waits_find_missing(queue, number)) >= 0 && ob_seconds() < until; idle++) {
    ob_answer_roll_call(queue);
    ob_queues_backoff(idle);
  }
  return missing;
}

static void waits_describe(const void *of, struct ob_wait *wait) {
  const struct waiter *waiter = of;
  snprintf(wait->what, sizeof wait->what, "%s", waiter->what);
  wait->peer = call_roll(waiter->queue);
}

static onebit_status_t check_waiter(struct ob_watch *watch, const struct waiter *waiter) {
  double timeout;
  if (waiter->queue)
    return ob_watch_look(watch, waiter->queue->comm, 0, waits_describe, waiter);
  OB_TRY(ob_watch_timeout(&timeout));
  return ob_watch_alone(watch, timeout, waiter->what);
}

int ob_wait_check_timeout(struct ob_watch *watch, struct ob_queue *queue, const char *what) {
  const struct waiter waiter = {queue, what};
  if (check_waiter(watch, &waiter) == ONEBIT_OK)
    return MPI_SUCCESS;
  if (queue)
    queue->failed = true;
  return MPI_ERR_OTHER;
}

int ob_wait_for_request(MPI_Comm comm, MPI_Request *request, const char *what) {
  struct ob_queue *queue = NULL;
  struct ob_watch watch = {0};
  int done = 0, code = PMPI_Test(request, &done, MPI_STATUS_IGNORE);
  for (unsigned idle = 0; code == MPI_SUCCESS && !done; idle++) {
    if (idle == 0)
      queue = ob_queue_find(comm);
    if (queue && idle % TESTS_BETWEEN == TESTS_BETWEEN - 1)
      ob_answer_roll_call(queue);
    OB_TRY_MPI(ob_wait_check_timeout(&watch, queue, what));
    if (ob_queues_in_flight() > 0)
      ob_queues_backoff(idle);
    else
      sched_yield(); /* MPI_Wait does the same */
    code = PMPI_Test(request, &done, MPI_STATUS_IGNORE);
  }
  if (code != MPI_SUCCESS)
    ob_report_mpi_error(what, code);
  return code;
}

/* Replaces each value by the largest of all ranks. MPI reduces a copy, in static memory or in the
 * queue, since MPI may still write to it after a wait that has timed out. */
int ob_allreduce_max(MPI_Comm comm, int64_t *values, int count) {
  static _Thread_local int64_t alone[OB_MAX_AGREED];
  struct ob_queue *queue = ob_queue_find(comm);
  struct ob_watch watch = {0};
  MPI_Request request;
  int64_t *all = queue ? queue->agreed : alone;
  const size_t bytes = (size_t)count * sizeof *all;
  static const char what[] = "agreement on what to compress";
  OB_TRY_MPI(queue ? ob_wait_check_timeout(&watch, queue, what) : MPI_SUCCESS);
  memcpy(all, values, bytes);
  int code = PMPI_Iallreduce(MPI_IN_PLACE, all, count, MPI_INT64_T, MPI_MAX, comm, &request);
  if (code != MPI_SUCCESS)
    ob_report_mpi_error(what, code);
  else
    code = ob_wait_for_request(comm, &request, what);
  if (code == MPI_SUCCESS)
    memcpy(values, all, bytes);
  return code;
}
