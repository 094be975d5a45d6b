/*
 * The ranks of a training, and its task: data, a model, and a few functions. train_text,
 * train_images and train_words each define a kind of task. Optimizers (train_optimizer.h) and steps
 * (train_run.h) use only this interface.
 */
#ifndef EXAMPLES_TRAIN_TASK_H
#define EXAMPLES_TRAIN_TASK_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "examples/model.h"
#include "examples/train_options.h"
#include "onebit/onebit.h"

/* --- Ranks, and numbers that they exchange -----------------------------------------------------*/

enum { NUMBERS = 64 };

typedef struct team {
  onebit_comm_t comm;
  size_t rank, size;
  onebit_plan_t plan; /* dense allreduce of NUMBERS floats */
  int quiet;          /* print nothing */
} team_t;

/* The work of each rank. It returns the rank's exit status. */
typedef int rank_body_t(team_t *team, const void *context);

/* Runs the body on every rank. Ranks are `threads` threads of this process. If `threads` is 0, they
 * are the processes that MPI or a launcher such as torchrun has started, or one rank in a build
 * without MPI. If WORLD_SIZE and MASTER_ADDR are in the environment, the processes communicate over
 * the library's sockets. Returns the exit status. Error messages begin with the program's name. */
int team_run(const char *program, size_t threads, rank_body_t *body, const void *context);

/* Prints on rank 0 only, unless the team is quiet. */
#define print_once(team, ...) (prints(team) ? (void)printf(__VA_ARGS__) : (void)0)

static inline int prints(const team_t *team) { return team->rank == 0 && !team->quiet; }

void print_complaint(const team_t *team, const char *error);

/* Returns 0, or -1 after printing the library's error message. */
int check_library_call(const team_t *team, onebit_status_t status, const char *what);

/* Prints the reason and ends the process. It is used for errors on which the ranks cannot agree,
 * because other ranks may be waiting for this one. */
void end_process(const char *what, const char *why);

/* Replaces each number by its mean over the ranks. Returns 0, or -1 after printing the reason. */
int average_over_ranks(const team_t *team, float numbers[NUMBERS], const char *what);

/* Returns 0 if `well` is true on every rank, and otherwise -1 on every rank. If rank 0 has failed,
 * only rank 0 prints its error message; otherwise each failed rank prints its own. */
int agree_on_success(const team_t *team, int well, const char *error);

/* Returns 1 if all ranks have the same bits, and 0 otherwise. */
int is_same_on_all_ranks(const team_t *team, uint64_t bits);

/* --- A task ------------------------------------------------------------------------------------*/

typedef struct train_kind train_kind_t;

typedef struct train_task {
  const train_kind_t *kind;
  const team_t *team;
  const train_options_t *options;
  const void *data; /* the data that the kind has loaded */
  model_t *model;
  uint32_t *order; /* for train_images: the training images in this epoch's order; the model owns
                    * it */
  size_t epoch;    /* counted from 1; 0: there is no order yet */
} train_task_t;

/* The quality of the model on the held-out data. */
typedef struct train_quality {
  double loss;
  double accuracy; /* from 0 to 1; negative: the task has no accuracy */
} train_quality_t;

struct train_kind {
  const char *name, *samples, *held_out_name; /* "text", "tokens", "bytes of held-out text" */
  const char *smaller,
      *different; /* parts of error messages: options that need less memory; ranks have different
                   * data */
  int classifies; /* the task has an accuracy */
  const struct tool *tool;
  const float *learning_rates; /* for each method; 0: Adam's learning rate */
  /* Checks that the kind's own options are compatible. Returns 0, or -1 with an error message. */
  int (*check)(const train_options_t *options, char error[TRAIN_ERROR]);
  /* Loads the data. Returns NULL with an error message if that fails. */
  void *(*load)(const train_options_t *options, char error[TRAIN_ERROR]);
  void (*unload)(void *data);
  uint64_t (*hash)(const void *data);
  void (*describe)(const team_t *team, const train_options_t *options, const void *data);
  /* Creates the task's model, with initial values from the seed. Returns NULL when out of
   * memory. */
  model_t *(*create)(train_task_t *task);
  /* Fill in the model's input. draw: this rank's samples of a micro-batch; micro-batches are
   * numbered over all steps. hold: a held-out sample, at position `place` of the batch. */
  void (*draw)(train_task_t *task, size_t micro_batch);
  void (*hold)(const train_task_t *task, size_t place, size_t sample);
  size_t (*held_out)(const train_task_t *task); /* the number of held-out samples */
};

extern const train_kind_t train_kind; /* the program's */

/* Reads a program's command line. If it returns TOOL_WRONG, `error` names the option and its
 * value. */
enum tool_asked train_options_parse(const train_kind_t *kind, train_options_t *options, int argc,
                                    char **argv, char error[TRAIN_ERROR]);

/* Creates the model of a task whose other members are set. Collective. Returns 0, or -1 on all
 * ranks after printing the reason. */
int train_task_create(train_task_t *task);

/* Computes the gradient on this rank's samples of a micro-batch, which replaces the tensors'
 * previous gradients. Returns the loss on these samples. */
double train_task_gradient(train_task_t *task, size_t micro_batch);

/* Computes the quality on the held-out data. Collective: each rank evaluates a part of the data.
 * Returns 0, or -1 after printing the reason. */
int train_task_validate(train_task_t *task, train_quality_t *quality);

uint64_t train_task_checksum(const train_task_t *task); /* of all parameters */

/* Returns the rank whose samples this rank draws: with --hard same this is rank 0. */
static inline size_t train_sampling_rank(const train_task_t *task) {
  return task->options->hard == HARD_SAME ? 0 : task->team->rank;
}

uint64_t train_hash(uint64_t start, const void *data, size_t size); /* FNV-1a */

#endif
