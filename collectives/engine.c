/* The list of requests in flight. A plan that a thread moves is marked as claimed; only an
 * unclaimed plan leaves the list, so a thread that holds a claim can go on to the next one. */
#include "collectives/engine.h"

#include "collectives/plan_private.h"
#include "collectives/steps.h"

void ob_engine_add(struct ob_engine *engine, const struct onebit_plan *plan) {
  pthread_mutex_lock(&engine->lock);
  plan->state->next = engine->first;
  plan->state->claimed = false;
  engine->first = plan;
  pthread_cond_signal(&engine->work);
  pthread_mutex_unlock(&engine->lock);
}

bool ob_engine_claim(struct ob_engine *engine, const struct onebit_plan *plan, bool *alone) {
  pthread_mutex_lock(&engine->lock);
  bool got = !plan->state->claimed;
  plan->state->claimed = true;
  *alone = engine->first == plan && !plan->state->next;
  pthread_mutex_unlock(&engine->lock);
  return got;
}

void ob_engine_free(struct ob_engine *engine, const struct onebit_plan *plan) {
  pthread_mutex_lock(&engine->lock);
  plan->state->claimed = false;
  pthread_mutex_unlock(&engine->lock);
}

void ob_engine_remove(struct ob_engine *engine, const struct onebit_plan *plan) {
  pthread_mutex_lock(&engine->lock);
  const struct onebit_plan **link = &engine->first;
  while (*link != plan)
    link = &(*link)->state->next;
  *link = plan->state->next;
  plan->state->claimed = false;
  pthread_mutex_unlock(&engine->lock);
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
  pthread_mutex_lock(&engine->lock);
  const struct onebit_plan *next = claim_from(held ? held->state->next : engine->first);
  if (held)
    held->state->claimed = false;
  pthread_mutex_unlock(&engine->lock);
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
static bool busy(const struct ob_engine *engine) {
  for (const struct onebit_plan *plan = engine->first; plan; plan = plan->state->next)
    if (plan->state->claimed || plan->flight->step < plan->flight->stop)
      return true;
  return false;
}

bool ob_engine_busy(struct ob_engine *engine) {
  pthread_mutex_lock(&engine->lock);
  bool any = busy(engine);
  pthread_mutex_unlock(&engine->lock);
  return any;
}

bool ob_engine_await(struct ob_engine *engine) {
  pthread_mutex_lock(&engine->lock);
  while (!engine->stop && !busy(engine))
    pthread_cond_wait(&engine->work, &engine->lock);
  bool go = !engine->stop;
  pthread_mutex_unlock(&engine->lock);
  return go;
}

bool ob_engine_only(struct ob_engine *engine, const struct onebit_comm *comm) {
  pthread_mutex_lock(&engine->lock);
  const struct onebit_plan *plan = engine->first;
  while (plan && plan->comm == comm && !plan->host.shared.base)
    plan = plan->state->next;
  pthread_mutex_unlock(&engine->lock);
  return !plan;
}
