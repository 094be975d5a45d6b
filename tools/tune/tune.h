/*
 * onebit-tune: measures a cluster, fits the cost model to it, writes the tuning file, and says what
 * plans will decide and why; or predicts what compression would bring to a training run.
 *
 * tune_links.c and tune_codec.c measure the parts, tune_collectives.c whole calls, tune_fit.c
 * brings the model near to all of them, tune_corrections.c measures by how much it is off,
 * tune_report.c prints; tune_training.c knows what a step of
 * training is, tune_predict.c prints that.
 */
#ifndef TOOLS_TUNE_H
#define TOOLS_TUNE_H

#include <stdbool.h>
#include <stddef.h>

#include "collectives/cost/tuning.h"

/* Exit statuses: all well; something failed; the command line is wrong. */
enum { TUNE_OK = 0, TUNE_FAILED = 1, TUNE_USAGE = 2 };

struct tune_options {
  bool predict, dry_run, quick, json;
  const char *output, *tuning; /* NULL: where the environment says */
  /* For predict; 0 where the command line does not say. */
  double parameters, compute, bandwidth, latency, cores, steps;
  int hosts, ranks_per_host;
};

/* False, with words in `error`, when the command line makes no sense; *help when help is asked
 * for. */
bool tune_options_parse(int argc, char **argv, struct tune_options *options, bool *help,
                        char error[256]);
void tune_print_help(void);

/* A number with a unit: 340M or 1.5G; 1gbit, 300mbit, in bytes a second; 50us, 250ms, in
 * seconds. */
enum tune_unit { TUNE_COUNT, TUNE_BITS_A_SECOND, TUNE_SECONDS };
bool tune_quantity(const char *text, enum tune_unit unit, double *value);

/* Prints "onebit-tune: " and the words to stderr. */
void tune_complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* "64 KiB", "1.5 MiB"; "36 us", "1.20 s". */
void tune_bytes_text(double bytes, char text[24]);
void tune_time_text(double seconds, char text[24]);

/* --- Prediction */

int tune_predict(const struct tune_options *options);

/* --- Measuring and fitting */

/* The running cluster, as this rank sees it. */
struct tune_cluster {
  int rank, size, hosts, ranks_per_host, most_ranks; /* ranks_per_host 0: not the same on all */
  int host_rank;                                     /* of this rank on its host */
  struct tune_mpi *mpi;                              /* communicators: tune_mpi.h */
};

/* A call that was measured, or would be: what, how long, and what the model says. */
struct tune_point {
  struct ob_cost_task task;
  bool mpi; /* MPI_Allreduce of float32; else schedule, wire and chunk of task */
  double measured, predicted;
};

#define TUNE_POINTS 64

struct tune_points {
  struct tune_point point[TUNE_POINTS];
  size_t count;
};

/* Brings what is fitted in `costs` near to the points, and fills in their predictions and
 * costs->residual. */
void tune_fit(struct ob_costs *costs, struct tune_points *points);

double tune_point_seconds(const struct ob_costs *costs, const struct tune_point *point);

void tune_report_links(const struct tune_cluster *cluster, const struct ob_costs *costs);
void tune_report_points(const struct tune_points *points, double residual);
/* What plans of 4 B to 256 MiB will choose, where that changes, and each candidate's time. */
void tune_report_decisions(const struct ob_costs *costs, const struct tune_cluster *cluster);

/* Writes the file, by way of one beside it, and makes its directory. False after complaining. */
bool tune_write(const char *path, const struct ob_costs *costs,
                const struct ob_tuning_origin *origin);

/* Everything of an mpirun; an exit status. */
int tune_run(const struct tune_options *options);

#endif
