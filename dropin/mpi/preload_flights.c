/* Moves nonblocking calls while the program is elsewhere. */
#define _GNU_SOURCE /* usleep */
#include "dropin/mpi/preload_flights.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/call_scope.h"
#include "base/lock.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ob_flight *flights; /* in the order of their beginning */
static atomic_int alive;
static _Thread_local int held;

void ob_flights_hold(void) { held++; }
void ob_flights_release(void) { held--; }

/* Moves all of them once; returns those that are done. */
static struct ob_flight *preload_flights_move_all(void) {
  struct ob_flight *done = NULL, **last = &done;
  for (struct ob_flight **at = &flights; *at;) {
    struct ob_flight *flight = *at;
    if (!ob_flight_test(flight)) {
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

/* Moves all flights, also during a call of MPI that waits. Nothing blocks here, and no thread
 * enters twice. */
static int move_flights(void) {
  int ended = 0;
  if (!atomic_load_explicit(&alive, memory_order_relaxed) || held ||
      pthread_mutex_trylock(&lock) != 0)
    return 0;
  OB_CALL_SCOPE;
  ob_flights_hold();
  struct ob_flight *done = preload_flights_move_all();
  pthread_mutex_unlock(&lock);
  for (struct ob_flight *next; done; done = next, ended++) {
    next = done->next;
    PMPI_Grequest_complete(done->request); /* which may give the memory back */
    atomic_fetch_sub(&alive, 1);
  }
  ob_flights_release();
  return ended;
}

/* ---- A thread ---- */

static struct {
  pthread_mutex_t lock;
  pthread_cond_t work;
  pthread_t thread;
  bool running, stop;
} mover = {.lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER};

enum { PAUSE = 50 }; /* microseconds: little beside what a compressed call takes */

static void *preload_flights_run(void *nothing) {
  (void)nothing;
  pthread_mutex_lock(&mover.lock);
  while (!mover.stop) {
    if (!atomic_load(&alive)) {
      pthread_cond_wait(&mover.work, &mover.lock);
      continue;
    }
    pthread_mutex_unlock(&mover.lock);
    if (!move_flights())
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
  mover.running = pthread_create(&mover.thread, NULL, preload_flights_run, NULL) == 0;
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

/* ---- Open MPI's progress ---- */

typedef int progress_callback(void);
typedef int progress_register(progress_callback *);

static progress_register *find_progress_call(const char *name) {
  progress_register *call = NULL;
#ifdef OPEN_MPI
  void *address = ob_mpi_symbol(name);
  memcpy(&call, &address, sizeof call); /* C knows no cast from void * to a function's address */
#else
  (void)name;
#endif
  return call;
}

static bool joined;
static bool join_progress(void) {
  progress_register *join = find_progress_call("opal_progress_register");
  joined = join && find_progress_call("opal_progress_unregister") && join(move_flights) == 0;
  return joined;
}

static void leave_progress(void) {
  if (joined)
    find_progress_call("opal_progress_unregister")(move_flights);
  joined = false;
}

/* ---- Both ---- */

static bool moves;
static void preload_flights_begin(void) { moves = join_progress() || begin_thread(); }

bool ob_flights_move(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, preload_flights_begin);
  return moves;
}

void ob_flights_add(struct ob_flight *flight) {
  ob_flights_hold(); /* nobody moves in this thread while it has the lock */
  pthread_mutex_lock(&lock);
  struct ob_flight **at = &flights;
  while (*at)
    at = &(*at)->next;
  flight->next = NULL;
  *at = flight;
  atomic_fetch_add(&alive, 1);
  pthread_mutex_unlock(&lock);
  ob_flights_release();
  wake_thread();
}

/* Warns of calls without a wait, which MPI forbids: if their buffers are freed, ending the calls
 * writes to others' memory. */
static void warn_of_unfinished(void) {
  int rank = 0, unfinished = atomic_load(&alive);
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (unfinished)
    fprintf(stderr,
            "onebit: rank %d: the program calls MPI_Finalize without a wait for %d of its "
            "nonblocking sums, which MPI forbids; if their buffers are freed, it crashes with and "
            "without onebit\n",
            rank, unfinished);
}

void ob_flights_finish(void) {
  warn_of_unfinished();
  while (atomic_load(&alive))
    move_flights();
  end_thread();
  leave_progress();
}
