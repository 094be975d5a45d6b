/*
 * Trainings: steps, validations, and results.
 */
#ifndef EXAMPLES_TRAIN_RUN_H
#define EXAMPLES_TRAIN_RUN_H

#include "examples/train_optimizer.h"

/* Totals over some steps. */
typedef struct tally {
  size_t steps;
  uint64_t bytes; /* bytes that this rank's optimizer passed to the transport */
  double loss;    /* loss of this rank's own samples */
  double seconds, optimizer_seconds;
} tally_t;

typedef struct training {
  const train_options_t *options;
  train_options_t chosen; /* the options after --method auto was replaced by the method it chose */
  const team_t *team;
  form_t form;
  train_task_t task;
  train_optimizer_t optimizer;
  FILE *log; /* the file of --log on rank 0; its totals before resuming follow */
  double logged_seconds;
  uint64_t logged_bytes;
  size_t skipped; /* the number of latest steps that were skipped, in a row */

  /* The results. */
  size_t first;     /* the number of steps before the training was resumed */
  tally_t tally[2]; /* one entry for each onebit_stage_t; dense forms use only the first */
  double loss;      /* mean over all ranks' samples since the latest report */
  train_quality_t quality;
  onebit_optimizer_info_t info;
  onebit_outer_info_t outer; /* info of --outer; zeros without --outer */
  double residual_ratio;
  uint64_t checksum; /* hash of rank 0's parameters */
  size_t parameters, ntensors;
} training_t;

/* Trains and reports. `data` is what kind->load has returned. Returns 0, or -1 after printing the
 * reason. */
int train(training_t *training, const train_kind_t *kind, const void *data);

enum { DONE = 0, FAILED = 1, WRONG_USE = 2 }; /* exit statuses */

/* Runs a training program: trains as its options say, and with --compare trains twice. Returns the
 * exit status. */
int train_main(const train_kind_t *kind, int argc, char **argv);

/* --- Reports (train_report.c): a line for some steps, and the results
 * -------------------------- */

/* Opens the file of --log, which gets a line of JSON for each report. A training that is resumed
 * from a checkpoint continues its file. Returns 0, or -1 after printing the reason. */
int report_open(training_t *training);
void report_close(training_t *training);

/* Prints the column heads of the report. */
void report_head(const training_t *training);

/* Reports after `step` steps, and validates if that is due. `since` has the totals since the
 * previous report. Collective. Returns 0, or -1 after printing the reason. */
int report_steps(training_t *training, size_t step, onebit_stage_t stage, const tally_t *since);

/* Prints the results of a finished training, with its line of JSON. */
void report_end(const training_t *training);

/* Prints the results of both trainings side by side. */
void report_comparison(const training_t *dense, const training_t *bits);

#endif
