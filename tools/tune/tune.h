/*
 * onebit-tune: measures a cluster, fits the cost model to the measurements, writes the tuning file,
 * and prints which schedules plans will choose. With --predict it predicts how much time
 * compression would save in training.
 *
 * run_mpi.c finds the hosts of the ranks, and measures links and the codec. calls_mpi.c measures
 * whole calls. results.c fits the model to the measurements, and prints and writes the results.
 * model.c and card.c predict the time of training on hosts and on GPUs. predict.c and card.c print
 * the predictions, with the functions of text.c.
 */
#ifndef TOOLS_TUNE_H
#define TOOLS_TUNE_H

#include <stdbool.h>
#include <stddef.h>

#include "base/json.h"
#include "collectives/cost/tuning.h"
#include "tools/options.h"
#include "tools/tune/model.h"

/* Exit statuses: done; something failed; the command line is wrong. */
enum { TUNE_OK = 0, TUNE_FAILED = 1, TUNE_USAGE = 2 };

struct tune_options {
  bool doctor, predict, whole, dry_run, json;
  const char *output, *tuning; /* NULL: the path that the environment gives */
  /* Options of --predict that the command line does not give are 0, except `compute`, which is NAN,
   * and `delay` and `bits`, which are -1. `bits` is an index of tune_width_names. */
  struct tune_training training;
  double bandwidth, latency, cores, shared_cores;
  int device; /* where the ranks compute: TUNE_HOST or TUNE_CUDA */
  struct tune_card card;
  struct tune_wanted wanted;
};

/* The values of --bits: "1", "2", "4", "8", "float32", "sparse". */
extern const char *const tune_width_names[];

enum { TUNE_HOST, TUNE_CUDA };

/* Expands to two arguments for a format such as "%d rank%s": the number, and "s" unless it is 1. */
#define TUNE_COUNTED(number) (number), (number) == 1 ? "" : "s"

#define tune_print_error(...) tool_print_error("onebit-tune", __VA_ARGS__)

/* Sorts the values and returns the median. The median of no values is 0. */
double tune_median(double *values, int count);

/* Writes a value with its unit: "64 KiB", "1.5 MiB"; "36 us", "1.20 s"; "3.4 h"; bytes per second
 * as "941 Mbit/s"; "-" for NAN, which means that there is no value. The text of TUNE_WORDS is valid
 * until the enclosing block ends. */
enum tune_unit {
  TUNE_NAME, /* not a value: a text */
  TUNE_BYTES,
  TUNE_TIME,
  TUNE_DURATION,
  TUNE_RATE,
  TUNE_COUNT,
  TUNE_RATIO,
  TUNE_TIMES
};
enum { TUNE_TEXT = 24 };
const char *tune_format_text(enum tune_unit unit, double value, char text[TUNE_TEXT]);
#define TUNE_WORDS(unit, value) tune_format_text(unit, value, (char[TUNE_TEXT]){0})

/* Rows are printed as text or written as JSON. An array of columns ends with a column of zeros. A
 * column whose width is 0 is not printed, and a column whose key is NULL is not written. `texts`
 * has the entries of the columns of unit TUNE_NAME, and `values` has the entries of all other
 * columns, both in the order of the columns. `end` is printed after the row. */
struct tune_column {
  int width; /* negative: the text is aligned to the left */
  const char *heading, *key;
  enum tune_unit unit;
};
void tune_print_headings(const struct tune_column *columns, const char *end);
void tune_print_row(const struct tune_column *columns, const char *const *texts,
                    const double *values, const char *end);
void tune_write_row(struct ob_json *json, const struct tune_column *columns,
                    const char *const *texts, const double *values);

/* A call: its size and kind, its measured time if there is one, and the time that the model
 * predicts. */
struct tune_point {
  struct ob_cost_task task;
  bool mpi;         /* true: MPI_Allreduce of float32; false: onebit_allreduce as in `task` */
  size_t candidate; /* index in ob_cost_candidates, if the call is a candidate */
  double measured, predicted;
};

struct tune_points {
  struct tune_point point[64];
  size_t count;
};

/* Fits `costs` to the points, and fills in their predictions and costs->residual. */
void tune_fit(struct ob_costs *costs, struct tune_points *points);
double tune_point_seconds(const struct ob_costs *costs, const struct tune_point *point);

/* Prints the measured links. `cluster` gives the numbers of hosts and ranks; `cluster->elements` is
 * not used. */
void tune_print_links(const struct ob_cost_task *cluster, const struct ob_costs *costs);
/* True if the measurements contradict each other, as on hosts that other programs use. Plans would
 * then choose by chance. */
bool tune_is_doubtful(const struct ob_costs *costs);
void tune_print_points(const struct tune_points *points, double residual);
/* Prints what plans of 4 B to 256 MiB choose, at each size where the choice changes. written: a
 * tuning file has these costs, so that plans use them */
void tune_print_decisions(const struct ob_costs *costs, const struct ob_cost_task *cluster,
                          bool written);

/* Checks that the file can be written, and creates its directory. After an error, prints a message
 * and returns false. */
bool tune_can_write(const char *path);
/* Writes the file: first a temporary file in the same directory, which is then renamed. */
bool tune_write_file(const char *path, const struct ob_costs *costs,
                     const struct ob_tuning_origin *origin);

/* Run a mode of the program, and return the exit status. tune_run measures, under mpirun. */
int tune_predict(const struct tune_options *options);
int tune_predict_card(const struct tune_options *options);
int tune_run(const struct tune_options *options);

#endif
