/* The list of requests in flight, and the thread that moves them. A plan that a thread moves is
 * marked as claimed; only an unclaimed plan leaves the list, so a thread that holds a claim can go
 * on to the next one. */
#include "collectives/engine.h"

#include <errno.h>
#include <string.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/knobs.h"
#include "base/lock.h"
#include "base/memory.h"
#include "collectives/plan_private.h"

void ob_engine_add(struct ob_engine *engine, const struct onebit_plan *plan) {
  OB_LOCKED(&engine->lock);
  plan->state->next = engine->first;
  plan->state->claimed = false;
  engine->first = plan;
  pthread_cond_signal(&engine->work);
}

bool ob_engine_claim(struct ob_engine *engine, const struct onebit_plan *plan, bool *alone) {
  OB_LOCKED(&engine->lock);
  bool got = !plan->state->claimed;
  plan->state->claimed = true;
  *alone = engine->first == plan && !plan->state->next;
  return got;
}

void ob_engine_free(struct ob_engine *engine, const struct onebit_plan *plan) {
  OB_LOCKED(&engine->lock);
  plan->state->claimed = false;
}

void ob_engine_remove(struct ob_engine *engine, const struct onebit_plan *plan) {
  OB_LOCKED(&engine->lock);
  const struct onebit_plan **link = &engine->first;
  while (*link != plan)
    link = &(*link)->state->next;
  *link = plan->state->next;
  plan->state->claimed = false;
}

/* The first unclaimed plan from `plan` on, claimed; NULL if none. The lock is held. */
static const struct onebit_plan *claim_from(const struct onebit_plan *plan) {
  while (plan && plan->state->claimed)
    plan = plan->state->next;
  if (plan)
    plan->state->claimed = true;
  return plan;
}

static const struct onebit_plan *claim_next(struct ob_engine *engine,
                                            const struct onebit_plan *held) {
  OB_LOCKED(&engine->lock);
  const struct onebit_plan *next = claim_from(held ? held->state->next : engine->first);
  if (held)
    held->state->claimed = false;
  return next;
}

bool ob_engine_advance(struct ob_engine *engine) {
  bool moved = false;
  const struct onebit_plan *plan = NULL;
  while ((plan = claim_next(engine, plan)))
    moved |= ob_steps_walk(plan, false);
  return moved;
}

/* A plan that another thread is moving is not at its end. The lock is held. */
static bool has_unfinished(const struct ob_engine *engine) {
  for (const struct onebit_plan *plan = engine->first; plan; plan = plan->state->next)
    if (plan->state->claimed || plan->flight->step < plan->flight->stop)
      return true;
  return false;
}

bool ob_engine_busy(struct ob_engine *engine) {
  OB_LOCKED(&engine->lock);
  return has_unfinished(engine);
}

bool ob_engine_await(struct ob_engine *engine) {
  OB_LOCKED(&engine->lock);
  while (!engine->stop && !has_unfinished(engine))
    pthread_cond_wait(&engine->work, &engine->lock);
  return !engine->stop;
}

bool ob_engine_only(struct ob_engine *engine, const struct onebit_comm *comm) {
  OB_LOCKED(&engine->lock);
  const struct onebit_plan *plan = engine->first;
  while (plan && plan->comm == comm && !plan->host.shared.base)
    plan = plan->state->next;
  return !plan;
}

/* --- The thread --------------------------------------------------------------------------------*/

onebit_status_t ob_progress_wanted(bool *wanted) {
  const char *text = ob_knob_text(OB_KNOB_PROGRESS);
  *wanted = text && strcmp(text, "thread") == 0;
  if (!text || *wanted || strcmp(text, "calls") == 0)
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_ARGUMENT, "%s=%s: neither calls nor thread",
                  ob_knob_label(OB_KNOB_PROGRESS), text);
}

/* With ONEBIT_PROGRESS=thread and a core to spare a computation need not call the library for its
 * communication to go on. */
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
  OB_LOCKED(&engine->lock);
  engine->stop = stop;
  pthread_cond_signal(&engine->work);
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
  OB_LOCKED(&threads_lock);
  if (--engine->users == 0) {
    set_stop(engine, true);
    pthread_join(engine->thread, NULL);
  }
}
