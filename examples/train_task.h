/*
 * A training's ranks, and its task: data and a model, behind a few calls. train_text, train_images
 * and train_words each have a kind of their own; optimizers (train_optimizer.h) and steps
 * (train_run.h) see only this.
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

/* The work of each rank; returns its exit status. */
typedef int rank_body_t(team_t *team, const void *context);

/* Runs the body on every rank: as many threads of this process as asked for; or for 0 the processes
 * that torchrun, or the like, or MPI started, and in a build without MPI one rank. Where WORLD_SIZE
 * and MASTER_ADDR are in the environment the processes talk over the library's sockets. Returns the
 * exit status. The program's name stands before all complaints. */
int team_run(const char *program, size_t threads, rank_body_t *body, const void *context);

/* Prints on rank 0, unless the team is quiet. */
#define print_once(team, ...) (prints(team) ? (void)printf(__VA_ARGS__) : (void)0)

static inline int prints(const team_t *team) { return team->rank == 0 && !team->quiet; }

void print_complaint(const team_t *team, const char *error);

/* Returns 0, or -1 after printing the library's message. */
int check_library_call(const team_t *team, onebit_status_t status, const char *what);

/* Prints the reason and ends the process, where ranks cannot agree on an error because other ranks
 * may be waiting for this one. */
void end_process(const char *what, const char *why);

/* Replaces each number by its mean over the ranks. 0, or -1 after printing why. */
int average_over_ranks(const team_t *team, float numbers[NUMBERS], const char *what);

/* Returns 0 if `well` is true on every rank; otherwise -1 on every rank, after rank 0 has printed
 * its message or, if rank 0 is well, after each failed rank has printed its own. */
int agree_on_success(const team_t *team, int well, const char *error);

/* Returns 1 when all ranks have the same bits, else 0. */
int is_same_on_all_ranks(const team_t *team, uint64_t bits);

/* --- A task ------------------------------------------------------------------------------------*/

typedef struct train_kind train_kind_t;

typedef struct train_task {
  const train_kind_t *kind;
  const team_t *team;
  const train_options_t *options;
  const void *data; /* as the kind loads it */
  model_t *model;
  uint32_t
      *order;   /* of train_images: its images to learn from, in this epoch; the model's memory */
  size_t epoch; /* counted from 1; 0: no order yet */
} train_task_t;

/* The quality of the model on the held-out data. */
typedef struct train_quality {
  double loss;
  double accuracy; /* from 0 to 1; negative: the task has no accuracy */
} train_quality_t;

struct train_kind {
  const char *name, *samples, *held_out_name; /* "text", "tokens", "bytes of held-out text" */
  const char *smaller,
      *different; /* messages: options that need less memory; ranks have other data */
  int classifies; /* accuracy has a meaning */
  const struct tool *tool;
  const float *learning_rates; /* of each method; 0: as Adam's */
  /* Checks that the kind's own options are compatible: 0, or -1 with an error message. */
  int (*check)(const train_options_t *options, char error[TRAIN_ERROR]);
  /* Loads the data; NULL with an error message. */
  void *(*load)(const train_options_t *options, char error[TRAIN_ERROR]);
  void (*unload)(void *data);
  uint64_t (*hash)(const void *data);
  void (*describe)(const team_t *team, const train_options_t *options, const void *data);
  /* Creates the task's model, with the seed's first values; NULL when memory is out. */
  model_t *(*create)(train_task_t *task);
  /* Fill in the model's input: draw with this rank's samples of a micro-batch, numbered over all
   * steps; the function below with a held-out sample, in the place of one sample. */
  void (*draw)(train_task_t *task, size_t micro_batch);
  void (*hold)(const train_task_t *task, size_t place, size_t sample);
  size_t (*held_out)(const train_task_t *task); /* the number of samples */
};

extern const train_kind_t train_kind; /* the program's */

/* Reads a program's command line; with TOOL_WRONG `error` names the option and its value. */
enum tool_asked train_options_parse(const train_kind_t *kind, train_options_t *options, int argc,
                                    char **argv, char error[TRAIN_ERROR]);

/* Creates the model of a task whose other members are set. Collective; returns 0, or -1 on all
 * ranks after printing the reason. */
int train_task_create(train_task_t *task);

/* Computes the gradient, which replaces the tensors', and returns the loss on this rank's own
 * samples of a micro-batch. */
double train_task_gradient(train_task_t *task, size_t micro_batch);

/* Computes the quality. Collective: each rank evaluates a part of the data. Returns 0, or -1 after
 * printing the reason. */
int train_task_validate(train_task_t *task, train_quality_t *quality);

uint64_t train_task_checksum(const train_task_t *task); /* of all parameters */

/* The rank whose samples this rank draws: with --hard same rank 0. */
static inline size_t train_sampling_rank(const train_task_t *task) {
  return task->options->hard == HARD_SAME ? 0 : task->team->rank;
}

uint64_t train_hash(uint64_t start, const void *data, size_t size); /* FNV-1a */

#endif
