/*
 * Prints the progress of trainings, a line for some steps, and their results.
 */
#ifndef EXAMPLES_TRAIN_REPORT_H
#define EXAMPLES_TRAIN_REPORT_H

#include "examples/train_run.h"

/* Opens the log of --log, a line of JSON for each report. A training that goes on from a checkpoint
 * goes on in its log. 0, or -1 after saying why. */
int report_open(training_t *training);
void report_close(training_t *training);

/* Prints the heads of the lines that follow. */
void report_head(const training_t *training);

/* Reports after `step` steps, the latest of them in `since`. Collective; validates where that is
 * due. 0, or -1 after saying why. */
int report_steps(training_t *training, size_t step, onebit_stage_t stage, const tally_t *since);

/* Reports a finished training; with its line of JSON. */
void report_end(const training_t *training);

/* Reports both trainings side by side. */
void report_comparison(const training_t *dense, const training_t *bits);

#endif
