/*
 * The requests in flight that depend on each other's progress: whoever waits for one moves all of
 * them, or two ranks that wait in different order would wait for ever. MPI communicators of a
 * process share one engine; every loopback rank has its own.
 */
#ifndef OB_COLLECTIVES_ENGINE_H
#define OB_COLLECTIVES_ENGINE_H

#include <pthread.h>
#include <stdbool.h>

#include "onebit/status.h"

struct onebit_comm;
struct onebit_plan;

struct ob_engine {
  pthread_mutex_t lock;
  const struct onebit_plan *first; /* plans in flight, linked by their `next` */
  /* A thread that moves them, while `users` communicators want it. */
  pthread_cond_t work;
  pthread_t thread;
  int users;
  bool stop;
};

#define OB_ENGINE_INIT                                                                             \
  { .lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER }

void ob_engine_add(struct ob_engine *engine, const struct onebit_plan *plan);

/* Removes a plan that this thread has claimed. */
void ob_engine_remove(struct ob_engine *engine, const struct onebit_plan *plan);

/* Moves every plan in flight that no other thread is moving. True if any of them took a step. */
bool ob_engine_advance(struct ob_engine *engine);

/* True if any request is in flight and not yet at its end. */
bool ob_engine_busy(struct ob_engine *engine);

/* Waits until one is, or until the engine's thread is to stop: then false. */
bool ob_engine_await(struct ob_engine *engine);

/* True if all requests in flight wait for messages of this communicator, and for nothing else. */
bool ob_engine_only(struct ob_engine *engine, const struct onebit_comm *comm);

/* Claims the plan for this thread, to move it, and tells whether it is the only one in flight; the
 * second releases the claim. Each takes the lock once: a small call is 0.4 microseconds in all. */
bool ob_engine_claim(struct ob_engine *engine, const struct onebit_plan *plan, bool *alone);
void ob_engine_free(struct ob_engine *engine, const struct onebit_plan *plan);

/* Reads whether the environment asks for a thread. ONEBIT_ERROR_ARGUMENT for an unknown value. */
onebit_status_t ob_progress_wanted(bool *wanted);

/* Counts one more communicator that wants a thread to move the engine's requests; below, one less.
 * The first starts the thread, the last ends it. ONEBIT_ERROR_MEMORY. */
onebit_status_t ob_progress_begin(struct ob_engine *engine);
void ob_progress_end(struct ob_engine *engine);

#endif
