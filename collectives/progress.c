/*
 * A thread that moves the requests in flight, where ONEBIT_PROGRESS=thread asks for it: with a core
 * to spare, a computation then need not call the library for its communication to go on.
 */
#define _POSIX_C_SOURCE 200809L
#include "collectives/progress.h"

#include <errno.h>
#include <sched.h>
#include <string.h>
#include <time.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/knobs.h"
#include "base/memory.h"
#include "collectives/engine.h"

void ob_backoff(unsigned idle) {
  static const struct timespec nap = {.tv_nsec = 20000};
  if (idle < 100)
    sched_yield();
  else
    nanosleep(&nap, NULL);
}

onebit_status_t ob_progress_wanted(bool *wanted) {
  const char *text = ob_knob_text(OB_KNOB_PROGRESS);
  *wanted = text && strcmp(text, "thread") == 0;
  if (!text || *wanted || strcmp(text, "calls") == 0)
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_ARGUMENT, "%s=%s: neither calls nor thread",
                  ob_knob_label(OB_KNOB_PROGRESS), text);
}

static void *move_requests(void *argument) {
  OB_CALL_SCOPE;
  struct ob_engine *engine = argument;
  for (unsigned idle = 0; ob_engine_await(engine);) {
    idle = ob_engine_advance(engine) ? 0 : idle + 1;
    if (idle)
      ob_backoff(idle);
  }
  return NULL;
}

/* Keeps the begin and the end of threads apart: one that is told to stop has ended before another
 * begins. */
static pthread_mutex_t threads_lock = PTHREAD_MUTEX_INITIALIZER;

static void set_stop(struct ob_engine *engine, bool stop) {
  pthread_mutex_lock(&engine->lock);
  engine->stop = stop;
  pthread_cond_signal(&engine->work);
  pthread_mutex_unlock(&engine->lock);
}

onebit_status_t ob_progress_begin(struct ob_engine *engine) {
  int code = 0;
  pthread_mutex_lock(&threads_lock);
  if (engine->users == 0) {
    set_stop(engine, false);
    code = ob_memory_must_fail() ? EAGAIN
                                 : pthread_create(&engine->thread, NULL, move_requests, engine);
  }
  engine->users += code == 0;
  pthread_mutex_unlock(&threads_lock);
  return code ? ob_error(ONEBIT_ERROR_MEMORY, "no thread for ONEBIT_PROGRESS=thread") : ONEBIT_OK;
}

void ob_progress_end(struct ob_engine *engine) {
  pthread_mutex_lock(&threads_lock);
  if (--engine->users == 0) {
    set_stop(engine, true);
    pthread_join(engine->thread, NULL);
  }
  pthread_mutex_unlock(&threads_lock);
}
