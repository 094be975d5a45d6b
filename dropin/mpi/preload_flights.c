/*
 * Advances the nonblocking calls of a preloaded program. MPI promises that they advance whenever
 * the program is in any call of MPI, and a program may rely on this (one rank receives what another
 * sends only after its MPI_Wait). So it is not enough to advance them in MPI_Wait and MPI_Test:
 *
 * - Open MPI has a list of progress functions (opal_progress_register), which its own nonblocking
 * collectives use. Every call of MPI that waits calls these functions, and so advances the
 * library's calls.
 * - With another MPI a thread advances them, which needs MPI_THREAD_MULTIPLE.
 * - If neither is available, nonblocking calls are passed on to MPI.
 *
 * The program gets a generalized request of MPI, so that waits and tests need no wrapper.
 */
#define _GNU_SOURCE /* usleep */
#include "dropin/mpi/preload.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/call_scope.h"
#include "base/lock.h"
#include "base/memory.h"
#include "dropin/mpi/communicator.h"

/* An exchange in flight, and the data that its record needs. */
struct ob_flight {
  struct ob_flight *next;
  MPI_Request request; /* the program's request */
  struct ob_operation *operation;
  struct ob_record *record;
  struct ob_tally tally;
  int code;
};

/* Advances a flight without blocking. Returns true when the flight is done; `code` is then its MPI
 * error code. A flight has no operation if there was no memory for one: its call was completed when
 * it began. */
static bool move_flight(struct ob_flight *flight) {
  bool compressed = true;
  if (flight->operation) {
    ob_queues_advance();
    if (!ob_operation_is_done(flight->operation, &compressed))
      return false;
    flight->code = ob_operation_wait(&flight->operation);
  }
  if (compressed) {
    ob_record_count_compressed(flight->record, OB_NOT_TIMED);
    ob_preload_count_sent(flight->record, &flight->tally);
  } else {
    ob_record_count_dense(flight->record, OB_REASON_WITHDRAWN, OB_NOT_TIMED);
  }
  return true;
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ob_flight *flights; /* the list, in the order of beginning */
static atomic_int alive;
static _Thread_local int held;

void ob_flights_pause(void) { held++; }
void ob_flights_resume(void) { held--; }

/* Advances all flights once, and returns those that are done. */
static struct ob_flight *move_all_flights(void) {
  struct ob_flight *done = NULL, **last = &done;
  for (struct ob_flight **at = &flights; *at;) {
    struct ob_flight *flight = *at;
    if (!move_flight(flight)) {
      at = &flight->next;
      continue;
    }
    *at = flight->next;
    flight->next = NULL;
    *last = flight;
    last = &flight->next;
  }
  return done;
}

/* Advances all flights, without blocking, also while a call of MPI waits. If MPI calls this
 * function again in the same thread, it returns at once. */
static int progress_flights(void) {
  int ended = 0;
  if (!atomic_load_explicit(&alive, memory_order_relaxed) || held ||
      pthread_mutex_trylock(&lock) != 0)
    return 0;
  OB_CALL_SCOPE;
  ob_flights_pause();
  struct ob_flight *done = move_all_flights();
  pthread_mutex_unlock(&lock);
  for (struct ob_flight *next; done; done = next, ended++) {
    next = done->next;
    PMPI_Grequest_complete(done->request); /* this may free the flight */
    atomic_fetch_sub(&alive, 1);
  }
  ob_flights_resume();
  return ended;
}

/* ---- Progress by a thread ---- */

static struct {
  pthread_mutex_t lock;
  pthread_cond_t work;
  pthread_t thread;
  bool running, stop;
} mover = {.lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER};

enum { PAUSE = 50 }; /* microseconds: little compared with the time of a compressed call */

static void *run_mover_thread(void *nothing) {
  (void)nothing;
  pthread_mutex_lock(&mover.lock);
  while (!mover.stop) {
    if (!atomic_load(&alive)) {
      pthread_cond_wait(&mover.work, &mover.lock);
      continue;
    }
    pthread_mutex_unlock(&mover.lock);
    if (!progress_flights())
      usleep(PAUSE);
    pthread_mutex_lock(&mover.lock);
  }
  pthread_mutex_unlock(&mover.lock);
  return NULL;
}

static bool begin_thread(void) {
  int provided = MPI_THREAD_SINGLE;
  if (PMPI_Query_thread(&provided) != MPI_SUCCESS || provided != MPI_THREAD_MULTIPLE)
    return false;
  mover.running = pthread_create(&mover.thread, NULL, run_mover_thread, NULL) == 0;
  return mover.running;
}

static void wake_thread(void) {
  if (!mover.running)
    return;
  OB_LOCKED(&mover.lock);
  pthread_cond_signal(&mover.work);
}

static void end_thread(void) {
  if (!mover.running)
    return;
  pthread_mutex_lock(&mover.lock);
  mover.stop = true;
  pthread_cond_signal(&mover.work);
  pthread_mutex_unlock(&mover.lock);
  pthread_join(mover.thread, NULL);
  mover.running = false;
}

/* ---- Progress by Open MPI's progress functions ---- */

typedef int progress_callback(void);
typedef int progress_register(progress_callback *);

static progress_register *find_progress_call(const char *name) {
  progress_register *call = NULL;
#ifdef OPEN_MPI
  void *address = ob_mpi_symbol(name);
  memcpy(&call, &address, sizeof call); /* C has no cast from void * to a function's address */
#else
  (void)name;
#endif
  return call;
}

static bool joined;
static bool register_progress(void) {
  progress_register *join = find_progress_call("opal_progress_register");
  joined = join && find_progress_call("opal_progress_unregister") && join(progress_flights) == 0;
  return joined;
}

static void unregister_progress(void) {
  if (joined)
    find_progress_call("opal_progress_unregister")(progress_flights);
  joined = false;
}

/* ---- Progress by either ---- */

static bool moves;
static void begin_moving(void) { moves = register_progress() || begin_thread(); }

/* Returns true if flights can be advanced. Local; the same on all ranks of a job. The first call
 * registers the progress function or starts the thread. */
static bool can_move_flights(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, begin_moving);
  return moves;
}

/* Adds a flight, which is advanced from now on until it has ended. */
static void add_flight(struct ob_flight *flight) {
  ob_flights_pause(); /* this thread advances no flight while it holds the lock */
  pthread_mutex_lock(&lock);
  struct ob_flight **at = &flights;
  while (*at)
    at = &(*at)->next;
  flight->next = NULL;
  *at = flight;
  atomic_fetch_add(&alive, 1);
  pthread_mutex_unlock(&lock);
  ob_flights_resume();
  wake_thread();
}

/* Warns of nonblocking calls without a wait, which MPI forbids. If the program has freed their
 * buffers, the completion of these calls overwrites memory that is used for something else. */
static void warn_of_unfinished(void) {
  int rank = 0, unfinished = atomic_load(&alive);
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (unfinished)
    fprintf(stderr,
            "onebit: rank %d: the program calls MPI_Finalize before it has waited for %d of its "
            "nonblocking sums, which MPI forbids; if it has freed their buffers, it crashes with "
            "and without onebit\n",
            rank, unfinished);
}

void ob_flights_finish(void) {
  warn_of_unfinished();
  while (atomic_load(&alive))
    progress_flights();
  end_thread();
  unregister_progress();
}

/* ---- MPI_Iallreduce ---- */

/* Fills in the status of a generalized request for MPI. */
static int request_query(void *state, MPI_Status *status) {
  const struct ob_flight *flight = state;
  PMPI_Status_set_elements(status, MPI_BYTE, 0);
  PMPI_Status_set_cancelled(status, 0);
  status->MPI_SOURCE = MPI_UNDEFINED;
  status->MPI_TAG = MPI_UNDEFINED;
  return flight->code;
}

static int free_flight(void *state) {
  ob_release(state);
  return MPI_SUCCESS;
}

static int request_cancel(void *state, int complete) { /* no collective can be cancelled */
  (void)state, (void)complete;
  return MPI_SUCCESS;
}

static int begin_compressed(const struct ob_mpi_call *what,
                            const struct ob_preload_decision *decision, MPI_Request *request) {
  struct ob_flight *flight = ob_allocate(1, sizeof *flight);
  if (!flight || PMPI_Grequest_start(request_query, free_flight, request_cancel, flight, request) !=
                     MPI_SUCCESS) {
    ob_release(flight);
    *request = MPI_REQUEST_NULL; /* the call ends before this function returns */
    return ob_exchange_run(decision->exchange, what, false);
  }
  flight->request = *request;
  flight->record = decision->record;
  ob_flights_pause();
  int code = ob_exchange_begin(decision->exchange, what, ob_shadow_is_quiet(decision->shadow, what),
                               &flight->operation);
  flight->tally = decision->exchange->tally;
  ob_flights_resume();
  if (code == MPI_SUCCESS)
    add_flight(flight);
  return code;
}

int ob_preload_begin_call(const struct ob_mpi_call *call, MPI_Request *request) {
  struct ob_preload_decision decision = {.reason = OB_REASON_REFUSED};
  bool decides = !ob_preload_has_invalid_argument(call) && can_move_flights();
  OB_TRY_MPI(decides ? ob_preload_decide(call, &decision) : MPI_SUCCESS);
  if (decision.exchange)
    return begin_compressed(call, &decision, request);
  ob_record_count_dense(decision.record, decision.reason, OB_NOT_TIMED);
  if (call->count > INT_MAX)
    return PMPI_Iallreduce_c(call->sendbuf, call->recvbuf, (MPI_Count)call->count, call->datatype,
                             call->op, call->comm, request);
  return PMPI_Iallreduce(call->sendbuf, call->recvbuf, (int)call->count, call->datatype, call->op,
                         call->comm, request);
}

OB_PRELOAD_VISIBLE int MPI_Iallreduce(const void *sendbuf, void *recvbuf, int count,
                                      MPI_Datatype datatype, MPI_Op op, MPI_Comm comm,
                                      MPI_Request *request) {
  bool small = ob_preload_is_small(ONEBIT_ALLREDUCE, (size_t)count);
  if (small)
    ob_preload_note(ONEBIT_ALLREDUCE, (size_t)count, comm);
  if (small || count < 0 || !request)
    return PMPI_Iallreduce(sendbuf, recvbuf, count, datatype, op, comm, request);
  const struct ob_mpi_call call = {ONEBIT_ALLREDUCE, comm,     sendbuf, recvbuf,
                                   (size_t)count,    datatype, op};
  return ob_preload_begin_call(&call, request);
}
