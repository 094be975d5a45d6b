/* Runs a plan's list of steps: keeps the requests in flight, and begins, waits for and ends their
 * steps. */
#define _POSIX_C_SOURCE 200809L
#include "collectives/steps.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/knobs.h"
#include "base/lock.h"
#include "base/memory.h"
#include "base/process.h"
#include "collectives/messages.h"
#include "collectives/plan_private.h"

/* --- The time of steps -------------------------------------------------------------------------*/

/* The total of struct ob_spent to which a step's time is added. */
enum time { NONE, COMPRESS, APPLY };

struct step_row {
  const char *name;
  enum time time;
};

static const struct step_row step_rows[OB_STEP_KINDS] = {
    [OB_STEP_HOST_PUT] = {"host put", COMPRESS},
    [OB_STEP_HOST_BARRIER] = {"host barrier", NONE},
    [OB_STEP_HOST_COMPRESS] = {"host compress", COMPRESS},
    [OB_STEP_COMPRESS] = {"compress", COMPRESS},
    [OB_STEP_COMPRESS_WHOLE] = {"compress whole", COMPRESS},
    [OB_STEP_COMPRESS_SEGMENT] = {"compress segment", COMPRESS},
    [OB_STEP_FINISH_WORKER] = {"finish worker", COMPRESS},
    [OB_STEP_EXCHANGE] = {"exchange", NONE},
    [OB_STEP_RECEIVE] = {"receive", NONE},
    [OB_STEP_HOST_WAIT_FREE] = {"host wait free", NONE},
    [OB_STEP_REDUCE] = {"reduce", COMPRESS},
    [OB_STEP_FINISH_SERVER] = {"finish server", COMPRESS},
    [OB_STEP_REDUCE_WHOLE] = {"reduce whole", COMPRESS},
    [OB_STEP_GATHER] = {"gather", NONE},
    [OB_STEP_COLLECT] = {"collect", NONE},
    [OB_STEP_BEGIN_ROUND] = {"begin round", NONE},
    [OB_STEP_END_ROUND] = {"end round", NONE},
    [OB_STEP_HOST_PUBLISH] = {"host publish", NONE},
    [OB_STEP_HOST_WAIT] = {"host wait", NONE},
    [OB_STEP_CHECK_EARLY] = {"check early", NONE},
    [OB_STEP_APPLY_EARLY] = {"apply early", APPLY},
    [OB_STEP_HOST_APPLY_EARLY] = {"host apply early", APPLY},
    [OB_STEP_DECIDE] = {"decide", NONE},
    [OB_STEP_APPLY] = {"apply", APPLY},
    [OB_STEP_APPLY_LATE] = {"apply late", APPLY},
    [OB_STEP_HOST_APPLY_LATE] = {"host apply late", APPLY},
    [OB_STEP_APPLY_WHOLE] = {"apply whole", APPLY},
    [OB_STEP_APPLY_SEGMENT] = {"apply segment", APPLY},
    [OB_STEP_COMMIT] = {"commit", APPLY},
};

void ob_plan_start_timing(onebit_plan_t plan, double (*now)(void)) { plan->state->now = now; }

struct ob_spent ob_plan_read_spent(onebit_plan_t plan) {
  const struct ob_spent spent = plan->state->spent;
  plan->state->spent = (struct ob_spent){0};
  return spent;
}

/* Runs a step and adds its time to the plan's totals. */
static bool run_timed_step(const struct onebit_plan *plan, const struct ob_step *step, bool wait) {
  const enum time time = step_rows[step->kind].time;
  const double before = plan->state->now();
  const bool done = step->run(plan, step->chunk, wait);
  const double seconds = plan->state->now() - before;
  if (time == COMPRESS)
    plan->state->spent.compress += seconds;
  else if (time == APPLY)
    plan->state->spent.apply += seconds;
  return done;
}

/* --- Walking -----------------------------------------------------------------------------------*/

void ob_steps_add(struct onebit_plan *plan, enum ob_step_kind kind, size_t chunk) {
  if (plan->steps)
    plan->steps[plan->step_count] =
        (struct ob_step){plan->executor->run[kind], (uint32_t)chunk, kind};
  plan->step_count++;
}

const char *ob_operation_name(onebit_operation_t operation) {
  static const char *const names[] = {"allreduce", "allgather", "reduce-scatter"};
  return names[operation];
}

void ob_plan_describe_call(const struct onebit_plan *plan, struct ob_wait *wait) {
  static const char *const suffixes[] = {"bytes", "KiB", "MiB", "GiB"};
  double size = (double)(plan->count * ob_dtype_size(plan->options.dtype));
  unsigned suffix = 0;
  for (; size >= 1024 && suffix < 3; suffix++)
    size /= 1024;
  snprintf(wait->what, sizeof wait->what, "%s call %u of plan %" PRIu64 " (%.4g %s)",
           ob_operation_name(plan->options.operation), plan->state->sequence, plan->number, size,
           suffixes[suffix]);
  wait->others = plan->device ? "the device, or other ranks" : "other ranks";
}

/* --- Waiting -----------------------------------------------------------------------------------*/

/* Returns the rank that the next step waits for, as far as the host can know; -1: not known. */
static int awaited_rank(const struct onebit_plan *plan) {
  const struct ob_step *step = &plan->steps[plan->flight->step];
  const struct ob_transport *transport = plan->comm->transport;
  size_t slot = step->chunk % plan->geometry.slots;
  if (plan->host.shared.base && plan->flight->host.awaited >= 0)
    return plan->flight->host.awaited;
  if (!transport->peer_awaited)
    return -1;
  switch (step->kind) {
  case OB_STEP_RECEIVE:
    return transport->peer_awaited(plan->exchange[slot]);
  case OB_STEP_COLLECT:
    return transport->peer_awaited(plan->gather[slot]);
  case OB_STEP_END_ROUND:
    return transport->peer_awaited(plan->gather[0]);
  default:
    return -1;
  }
}

static void describe_step_wait(const void *waiter, struct ob_wait *wait) {
  const struct onebit_plan *plan = waiter;
  ob_plan_describe_call(plan, wait);
  if (plan->flight->step == plan->flight->stop)
    return; /* the remaining steps are on a stream */
  const struct ob_step *step = &plan->steps[plan->flight->step];
  wait->peer = awaited_rank(plan);
  snprintf(wait->detail, sizeof wait->detail, "%s, %s %u", step_rows[step->kind].name,
           step->kind == OB_STEP_END_ROUND ? "round" : "chunk", step->chunk);
}

double ob_steps_grace(const struct onebit_plan *plan) {
  double longest = plan->comm->timeout / 2 < 1 ? plan->comm->timeout / 2 : 1;
  return longest * (double)plan->flight->step / (double)(plan->step_count + 1);
}

onebit_status_t ob_steps_watch(const struct onebit_plan *plan) {
  return ob_watch_look(&plan->flight->watch, plan->comm, ob_steps_grace(plan), describe_step_wait,
                       plan);
}

bool ob_steps_walk(const struct onebit_plan *plan, bool wait) {
  const struct ob_executor *executor = plan->executor;
  struct ob_flight *flight = plan->flight;
  int before = executor->enter ? executor->enter(plan) : 0;
  bool moved = false;
  while (flight->step < flight->stop) {
    const struct ob_step *step = &plan->steps[flight->step++];
    if (!(plan->state->now ? run_timed_step(plan, step, wait)
                           : step->run(plan, step->chunk, wait))) {
      flight->step--;
      break;
    }
    moved = true;
  }
  if (moved)
    flight->watch = (struct ob_watch){0};
  else if (flight->step < flight->stop && ob_steps_watch(plan) != ONEBIT_OK)
    ob_steps_give_up(plan);
  if (executor->leave)
    executor->leave(before);
  return moved;
}

bool ob_steps_are_settled(const struct onebit_plan *plan, bool wait) {
  return !plan->executor->settled || plan->executor->settled(plan, wait);
}

/* --- Requests in flight ------------------------------------------------------------------------*/

/* A thread claims a plan before it advances it. Only unclaimed plans are removed from the list, so
 * a thread that holds a claim can go on to the next plan in the list. */

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

/* Finds the first unclaimed plan, beginning with `plan`, and claims it; NULL: none. The caller
 * holds the lock. */
static const struct onebit_plan *claim_plan_from(const struct onebit_plan *plan) {
  while (plan && plan->state->claimed)
    plan = plan->state->next;
  if (plan)
    plan->state->claimed = true;
  return plan;
}

static const struct onebit_plan *claim_next_plan(struct ob_engine *engine,
                                                 const struct onebit_plan *held) {
  OB_LOCKED(&engine->lock);
  const struct onebit_plan *next = claim_plan_from(held ? held->state->next : engine->first);
  if (held)
    held->state->claimed = false;
  return next;
}

bool ob_engine_advance(struct ob_engine *engine) {
  bool moved = false;
  const struct onebit_plan *plan = NULL;
  while ((plan = claim_next_plan(engine, plan)))
    moved |= ob_steps_walk(plan, false);
  return moved;
}

/* True if a plan is not at its end. A plan that another thread is advancing counts as not at its
 * end. The caller holds the lock. */
static bool has_unfinished_plan(const struct ob_engine *engine) {
  for (const struct onebit_plan *plan = engine->first; plan; plan = plan->state->next)
    if (plan->state->claimed || plan->flight->step < plan->flight->stop)
      return true;
  return false;
}

bool ob_engine_busy(struct ob_engine *engine) {
  OB_LOCKED(&engine->lock);
  return has_unfinished_plan(engine);
}

/* Waits until a plan in flight is not at its end. Returns false if the engine's thread has to
 * stop. */
static bool await_unfinished(struct ob_engine *engine) {
  OB_LOCKED(&engine->lock);
  while (!engine->stop && !has_unfinished_plan(engine))
    pthread_cond_wait(&engine->work, &engine->lock);
  return !engine->stop;
}

bool ob_engine_waits_only_for(struct ob_engine *engine, const struct onebit_comm *comm) {
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

/* The progress thread, for ONEBIT_PROGRESS=thread and a free core: communication goes on while the
 * program computes and does not call the library. */
static void *run_progress_thread(void *argument) {
  OB_CALL_SCOPE;
  struct ob_engine *engine = argument;
  for (unsigned idle = 0; await_unfinished(engine);) {
    idle = ob_engine_advance(engine) ? 0 : idle + 1;
    if (idle)
      ob_backoff(idle);
  }
  return NULL;
}

/* Ensures that a thread that was told to stop has ended before the next thread begins. */
static pthread_mutex_t threads_lock = PTHREAD_MUTEX_INITIALIZER;

static void set_engine_stop(struct ob_engine *engine, bool stop) {
  OB_LOCKED(&engine->lock);
  engine->stop = stop;
  pthread_cond_signal(&engine->work);
}

onebit_status_t ob_progress_begin(struct ob_engine *engine) {
  int code = 0;
  pthread_mutex_lock(&threads_lock);
  if (engine->users == 0) {
    set_engine_stop(engine, false);
    code = ob_memory_must_fail()
               ? EAGAIN
               : pthread_create(&engine->thread, NULL, run_progress_thread, engine);
  }
  engine->users += code == 0;
  pthread_mutex_unlock(&threads_lock);
  return code ? ob_error(ONEBIT_ERROR_MEMORY,
                         "ONEBIT_PROGRESS=thread: the progress thread cannot be created")
              : ONEBIT_OK;
}

void ob_progress_end(struct ob_engine *engine) {
  OB_LOCKED(&threads_lock);
  if (--engine->users == 0) {
    set_engine_stop(engine, true);
    pthread_join(engine->thread, NULL);
  }
}
