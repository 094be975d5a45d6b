/*
 * A call runs a list of steps; each step is a function that does one thing to one chunk. The
 * schedule writes the list when the plan is created; the functions are the executor's.
 *
 * A rank that fails (a wrong argument, a damaged message) does not stop. It runs the same steps and
 * sends messages with an error flag, so that all ranks reach the end of the same call and none
 * waits for ever. A message has all flags that its sender has set or received so far, so the last
 * message of a phase has the flags of the whole phase.
 */
#ifndef OB_COLLECTIVES_STEPS_H
#define OB_COLLECTIVES_STEPS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "onebit/plan.h"
#include "onebit/status.h"

struct onebit_plan;

/* The kinds of steps. One function may run several kinds. */
enum ob_step_kind {
  OB_STEP_HOST_PUT,         /* hierarchical: put a chunk of the inputs into shared memory */
  OB_STEP_HOST_BARRIER,     /* wait until all ranks of the host have put their chunk */
  OB_STEP_HOST_COMPRESS,    /* compress the mean of the host's inputs, for every server */
  OB_STEP_COMPRESS,         /* compress a chunk of the input, for every server */
  OB_STEP_COMPRESS_WHOLE,   /* compress a chunk of the input, in one message for all */
  OB_STEP_COMPRESS_SEGMENT, /* compress a chunk of this rank's segment, for all */
  OB_STEP_FINISH_WORKER,    /* one scale: compute it when all chunks are compressed */
  OB_STEP_EXCHANGE,         /* begin sending messages to the servers and receiving theirs */
  OB_STEP_RECEIVE,          /* wait until the messages of that chunk are here */
  OB_STEP_HOST_WAIT_FREE,   /* hierarchical: wait until the host has used an earlier result */
  OB_STEP_REDUCE,           /* reduce the members' messages about this rank's segment */
  OB_STEP_FINISH_SERVER,    /* one scale: compute it when all chunks are reduced */
  OB_STEP_REDUCE_WHOLE,     /* dense: compute the mean of all ranks' messages */
  OB_STEP_GATHER,           /* begin sending this rank's result to all and receiving theirs */
  OB_STEP_COLLECT,          /* wait until the results of that chunk are here */
  OB_STEP_BEGIN_ROUND,      /* doubling: begin round `chunk`: forward what has arrived */
  OB_STEP_END_ROUND,        /* wait until the round is over */
  OB_STEP_HOST_PUBLISH,     /* hierarchical: publish a chunk of results to the host's ranks */
  OB_STEP_HOST_WAIT,        /* wait until all ranks of the host have published */
  OB_STEP_CHECK_EARLY,      /* check whether the call is already certain to succeed */
  OB_STEP_APPLY_EARLY,      /* apply, if the call is certain to succeed */
  OB_STEP_HOST_APPLY_EARLY, /* the same, and tell the host that the results are used */
  OB_STEP_DECIDE,           /* end the call as skipped or failed unless all ranks succeed */
  OB_STEP_APPLY,            /* writes a chunk of the results to the caller's buffer */
  OB_STEP_APPLY_LATE,       /* apply, unless that was done early */
  OB_STEP_HOST_APPLY_LATE,  /* the same, and tell the host that the results are used */
  OB_STEP_APPLY_WHOLE,      /* writes the mean of all messages to the caller's buffer */
  OB_STEP_APPLY_SEGMENT,    /* reduce-scatter: the mean of messages about this rank's segment */
  OB_STEP_COMMIT,           /* the new residuals become the current ones */
  OB_STEP_KINDS
};

/* Runs a step. Returns false if the step has to wait for something and must be run again. With
 * `wait` it may block for OB_WAIT_SLICE (watch.h) before it returns false. */
typedef bool ob_step_run(const struct onebit_plan *plan, size_t chunk, bool wait);

struct ob_step {
  ob_step_run *run;
  uint32_t chunk;
  enum ob_step_kind kind;
};

/* Appends a step to the plan's list; only counts it while the list has no memory. */
void ob_steps_add(struct onebit_plan *plan, enum ob_step_kind kind, size_t chunk);

/* Runs steps until the list ends or a step has to wait; with `wait` that step may block for a
 * moment. A wait that is too long ends the call here. The caller holds the plan's claim (below).
 * Returns true if at least one step has finished. */
bool ob_steps_walk(const struct onebit_plan *plan, bool wait);

/* Called after the last step: true if the call has ended and its status is known (the executor's
 * `settled`). */
bool ob_steps_are_settled(const struct onebit_plan *plan, bool wait);

/* Checks how long the call has waited (watch.h). ONEBIT_ERROR_TRANSPORT: too long. */
onebit_status_t ob_steps_watch(const struct onebit_plan *plan);

/* Returns the seconds by which a wait at the current step may exceed the timeout. A rank can wait
 * for a rank that itself waits at an earlier step, and so on, back to the rank that does not
 * answer. These seconds increase with the step, so that the rank that waits for the lost rank
 * directly reports it first. */
double ob_steps_grace(const struct onebit_plan *plan);

/* Functions of steps for executors whose steps the host runs; the last one does nothing. */
ob_step_run ob_steps_check_early, ob_steps_apply_early, ob_steps_apply_late, ob_steps_decide,
    ob_steps_do_nothing;

/* --- Results of steps */

/* Marks this rank as failed: its messages have an error flag from now on. The latest error message
 * of this thread becomes the plan's. */
void ob_steps_fail(const struct onebit_plan *plan, onebit_status_t status);

/* Ends the call on this rank with the latest error message, and the communicator for all ranks.
 * Called after the transport has failed, since messages may then never arrive. */
void ob_steps_give_up(const struct onebit_plan *plan);

/* Returns what this rank knows about the call, as the flags of a message (enum ob_message_flag). */
unsigned ob_steps_flags(const struct onebit_plan *plan);

/* Adds the flags of another rank's message, and checks that the rank's `agreed` is the same as
 * here. */
void ob_steps_add_flags(const struct onebit_plan *plan, int rank, unsigned flags, uint32_t agreed);

/* Records that this rank has found a value that is not finite, unless another rank has been
 * recorded. So a rank's own input takes precedence over other ranks' flags, and these over this
 * rank's results, for which it is not to blame. Called before messages are sent. */
void ob_steps_note_own(const struct onebit_plan *plan);

/* --- Requests in flight ------------------------------------------------------------------------*/

/*
 * An engine has the requests in flight that may depend on each other's progress. A thread that
 * waits for one of them advances all of them; otherwise two ranks that wait in different orders
 * would wait for ever. The MPI communicators of a process share one engine; every loopback rank has
 * its own.
 */

struct onebit_comm;
struct onebit_plan;

struct ob_engine {
  pthread_mutex_t lock;
  const struct onebit_plan *first; /* plans in flight, linked by their `next` */
  /* The thread that advances the plans, while `users` communicators want one. */
  pthread_cond_t work;
  pthread_t thread;
  int users;
  bool stop;
};

#define OB_ENGINE_INIT                                                                             \
  { .lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER }

void ob_engine_add(struct ob_engine *engine, const struct onebit_plan *plan);

/* Removes a plan from the list; this thread must have claimed it. */
void ob_engine_remove(struct ob_engine *engine, const struct onebit_plan *plan);

/* Advances every plan in flight that no other thread is advancing. Returns true if a step of one of
 * them has finished. */
bool ob_engine_advance(struct ob_engine *engine);

/* True if a request in flight is not yet at its end. */
bool ob_engine_busy(struct ob_engine *engine);

/* True if all requests in flight wait for messages of this communicator only. */
bool ob_engine_waits_only_for(struct ob_engine *engine, const struct onebit_comm *comm);

/* ob_engine_claim claims the plan, so that this thread may advance it. It returns false if another
 * thread has the claim, and sets *alone to whether the plan is the only one in flight.
 * ob_engine_free releases the claim. Each takes the lock once; a small call takes 0.4 microseconds
 * in all. */
bool ob_engine_claim(struct ob_engine *engine, const struct onebit_plan *plan, bool *alone);
void ob_engine_free(struct ob_engine *engine, const struct onebit_plan *plan);

/* Reads whether ONEBIT_PROGRESS requests a thread. ONEBIT_ERROR_ARGUMENT: its value is unknown. */
onebit_status_t ob_progress_wanted(bool *wanted);

/* ob_progress_begin counts one more communicator that wants a thread to advance the engine's
 * requests, ob_progress_end one less. The first one starts the thread, the last one ends it.
 * ONEBIT_ERROR_MEMORY. */
onebit_status_t ob_progress_begin(struct ob_engine *engine);
void ob_progress_end(struct ob_engine *engine);

#endif
