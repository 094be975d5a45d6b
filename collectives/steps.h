/*
 * Steps: a call walks a list of them, each a function that does one thing to one chunk. The
 * schedule writes the list when the plan is made; the executor has the functions.
 *
 * A rank that fails (a wrong argument, a damaged message) does not stop: it runs the same steps and
 * sends messages with an error flag, so that all ranks come to the end of the same call and none
 * waits for ever. A message has all flags that its sender has set or received before, so the last
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

/* The kinds of steps. Several kinds may have the same function. */
enum ob_step_kind {
  OB_STEP_HOST_PUT,       /* hierarchical: a chunk of the inputs to the host, once there is space */
  OB_STEP_HOST_BARRIER,   /* until all of them have done that */
  OB_STEP_HOST_COMPRESS,  /* the mean of a chunk of the host's inputs, for every server */
  OB_STEP_COMPRESS,       /* a chunk of the input, for every server */
  OB_STEP_COMPRESS_WHOLE, /* a chunk of it, in one message for all */
  OB_STEP_COMPRESS_SEGMENT, /* a chunk of this rank's segment, for all */
  OB_STEP_FINISH_WORKER,    /* one scale: now it is known */
  OB_STEP_EXCHANGE,         /* begin sending messages to the servers and receiving theirs */
  OB_STEP_RECEIVE,          /* until they are here */
  OB_STEP_HOST_WAIT_FREE,   /* hierarchical: until the host has used the result of a call before */
  OB_STEP_REDUCE,           /* the members' messages about this rank's segment */
  OB_STEP_FINISH_SERVER,    /* one scale: now it is known */
  OB_STEP_REDUCE_WHOLE,     /* dense: the mean of everyone's messages */
  OB_STEP_GATHER,           /* begin sending this rank's result to all and receiving theirs */
  OB_STEP_COLLECT,          /* until they are here */
  OB_STEP_BEGIN_ROUND,      /* doubling: begin round `chunk`: forward what has arrived */
  OB_STEP_END_ROUND,        /* until it is over */
  OB_STEP_HOST_PUBLISH,     /* hierarchical: a chunk of the results to the ranks of this host */
  OB_STEP_HOST_WAIT,        /* waits until all of them have published */
  OB_STEP_CHECK_EARLY,      /* whether it is already certain that the call will end well */
  OB_STEP_APPLY_EARLY,      /* if so: apply */
  OB_STEP_HOST_APPLY_EARLY, /* the same, and tell the host that the results are used */
  OB_STEP_DECIDE,           /* the call is skipped or fails, unless every rank is well */
  OB_STEP_APPLY,            /* writes a chunk of the results to the caller's buffer */
  OB_STEP_APPLY_LATE,       /* if it was not done early: apply */
  OB_STEP_HOST_APPLY_LATE,  /* the same, and tell the host that the results are used */
  OB_STEP_APPLY_WHOLE,      /* writes the mean of all messages to the caller's buffer */
  OB_STEP_APPLY_SEGMENT,    /* reduce-scatter: the mean of messages about this rank's segment */
  OB_STEP_COMMIT,           /* the new residuals become the current ones */
  OB_STEP_KINDS
};

/* Runs a step. False: it has to wait for something, and is to be run again; with `wait` it may
 * block for OB_WAIT_SLICE (watch.h) before it says so. */
typedef bool ob_step_run(const struct onebit_plan *plan, size_t chunk, bool wait);

struct ob_step {
  ob_step_run *run;
  uint32_t chunk;
  enum ob_step_kind kind;
};

/* Appends a step to the plan's list; before that has memory it only counts it. */
void ob_steps_add(struct onebit_plan *plan, enum ob_step_kind kind, size_t chunk);

/* Runs steps until the list ends or one has to wait, which it may do for a moment with `wait`. A
 * wait that is too long ends the call here. The caller holds the plan's claim (below). True if a
 * step was run to its end. */
bool ob_steps_walk(const struct onebit_plan *plan, bool wait);

/* True if after the last step the call is over and its status known (the executor's `settled`). */
bool ob_steps_are_settled(const struct onebit_plan *plan, bool wait);

/* Looks at how long the call has waited (watch.h). ONEBIT_ERROR_TRANSPORT: too long. */
onebit_status_t ob_steps_watch(const struct onebit_plan *plan);

/* Returns the seconds by which a wait at the current step may exceed the timeout. A rank can wait
 * at one step for a rank that waits at an earlier one, and so on back to the rank that does not
 * answer. The grace grows with the step, so that the rank that waits for the lost one reports it
 * first. */
double ob_steps_grace(const struct onebit_plan *plan);

/* Steps of a host that walks, for the tables of executors; and one that does nothing. */
ob_step_run ob_steps_check_early, ob_steps_apply_early, ob_steps_apply_late, ob_steps_decide,
    ob_steps_do_nothing;

/* --- Results of steps */

/* Marks this rank as failed: its messages say so from now on. The latest error message of this
 * thread becomes the plan's. */
void ob_steps_fail(const struct onebit_plan *plan, onebit_status_t status);

/* After a failed transport no message can be trusted to come: the call ends here, with the latest
 * error message, and the communicator for all ranks. */
void ob_steps_give_up(const struct onebit_plan *plan);

/* Returns this rank's knowledge of the call, as the flags of a message (enum ob_message_flag). */
unsigned ob_steps_flags(const struct onebit_plan *plan);

/* Adds the flags of another rank's message, and checks `agreed`, the number that is the same on all
 * ranks. */
void ob_steps_add_flags(const struct onebit_plan *plan, int rank, unsigned flags, uint32_t agreed);

/* Notes who met a value that is not finite. A rank's own input counts first, then other ranks'
 * flags, then the results that it computes, which are not its fault. Called before messages
 * leave. */
void ob_steps_note_own(const struct onebit_plan *plan);

/* --- Requests in flight ------------------------------------------------------------------------*/

/*
 * The requests in flight that depend on each other's progress: whoever waits for one moves all of
 * them, or two ranks that wait in different order would wait for ever. MPI communicators of a
 * process share one engine; every loopback rank has its own.
 */

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

/* True if all requests in flight wait for messages of this communicator, and for nothing else. */
bool ob_engine_waits_only_for(struct ob_engine *engine, const struct onebit_comm *comm);

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
