/* The list of requests in flight. A plan that a thread moves is marked as claimed; only an
 * unclaimed plan leaves the list, so a thread that holds a claim can go on to the next one. */
#include "collectives/engine.h"

#include "collectives/plan_private.h"
#include "collectives/steps.h"

void ob_engine_add(struct ob_engine *engine, struct onebit_plan *plan) {
  pthread_mutex_lock(&engine->lock);
  plan->next = engine->first;
  plan->claimed = false;
  engine->first = plan;
  pthread_cond_signal(&engine->work);
  pthread_mutex_unlock(&engine->lock);
}

bool ob_engine_claim(struct ob_engine *engine, struct onebit_plan *plan, bool *alone) {
  pthread_mutex_lock(&engine->lock);
  bool got = !plan->claimed;
  plan->claimed = true;
  *alone = engine->first == plan && !plan->next;
  pthread_mutex_unlock(&engine->lock);
  return got;
}

void ob_engine_free(struct ob_engine *engine, struct onebit_plan *plan) {
  pthread_mutex_lock(&engine->lock);
  plan->claimed = false;
  pthread_mutex_unlock(&engine->lock);
}

void ob_engine_remove(struct ob_engine *engine, struct onebit_plan *plan) {
  pthread_mutex_lock(&engine->lock);
  struct onebit_plan **link = &engine->first;
  while (*link != plan)
    link = &(*link)->next;
  *link = plan->next;
  plan->claimed = false;
  pthread_mutex_unlock(&engine->lock);
}

/* The first unclaimed plan from `plan` on, claimed; NULL if none. The lock is held. */
static struct onebit_plan *claim_from(struct onebit_plan *plan) {
  while (plan && plan->claimed)
    plan = plan->next;
  if (plan)
    plan->claimed = true;
  return plan;
}

static struct onebit_plan *claim_next(struct ob_engine *engine, struct onebit_plan *held) {
  pthread_mutex_lock(&engine->lock);
  struct onebit_plan *next = claim_from(held ? held->next : engine->first);
  if (held)
    held->claimed = false;
  pthread_mutex_unlock(&engine->lock);
  return next;
}

bool ob_engine_advance(struct ob_engine *engine) {
  bool moved = false;
  struct onebit_plan *plan = NULL;
  while ((plan = claim_next(engine, plan)))
    moved |= ob_steps_walk(plan, false);
  return moved;
}

/* A plan that another thread is moving is not at its end. The lock is held. */
static bool busy(const struct ob_engine *engine) {
  for (const struct onebit_plan *plan = engine->first; plan; plan = plan->next)
    if (plan->claimed || plan->step < plan->stop)
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
    plan = plan->next;
  pthread_mutex_unlock(&engine->lock);
  return !plan;
}
