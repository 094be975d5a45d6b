/* Fits the cost model to the measurements, prints the model, the measurements and the decisions of
 * plans, and writes the tuning file. */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "collectives/schedules/schedule.h"
#include "tools/tune/tune.h"

/* --- The fit -----------------------------------------------------------------------------------*/

/* A parameter of the fit, which changes the parameter's logarithm within bounds. The start value is
 * a default, or was measured by itself. stiffness: a change of the logarithm by this much adds as
 * much to the fit's loss as a point whose prediction is wrong by a tenth. */
struct knob {
  size_t offset;
  double stiffness, smallest, largest;
};

#define AT(field) offsetof(struct ob_costs, field)

/* The parameters and their bounds. The codec's factor may be less than 1: messages stay in the
 * caches, so the codec may be a little faster in an exchange than alone. The efficiencies are at
 * most 1. */
static const struct knob knobs[] = {
    {AT(codec_factor), 0.5, 0.8, 10},
    {AT(between.message), 0.7, 1e-8, 1},
    {AT(between.byte), 1, 1e-12, 1e-7},
    {AT(inside.message), 0.7, 1e-8, 1},
    {AT(exchange_efficiency), 0.2, 0.1, 1},
    {AT(unhidden), 1, 0.01, 1},
    {AT(call), 2, 1e-7, 1},
    {AT(oversubscribed), 2, 1e-7, 1},
    {AT(mpi_call), 2, 1e-7, 1},
    {AT(mpi_round), 2, 1e-7, 1},
    {AT(mpi_efficiency), 2, 0.011, 1},
};
enum { KNOBS = sizeof knobs / sizeof knobs[0] };

static double *get_knob(struct ob_costs *costs, int k) {
  return (double *)(void *)((char *)costs + knobs[k].offset);
}

double tune_point_seconds(const struct ob_costs *costs, const struct tune_point *point) {
  const struct ob_cost_task *task = &point->task;
  return point->mpi ? ob_cost_mpi_seconds(costs, task, sizeof(float))
                    : ob_cost_seconds(costs, task, task->schedule, task->wire, task->chunk);
}

/* Returns the loss for an error (Huber's function). A large error adds less than its square, since
 * other programs disturb some measurements. */
static double fit_loss(double error) {
  double size = fabs(error), bend = 0.3;
  return size < bend ? error * error : bend * (2 * size - bend);
}

/* Returns the weight of a point in the fit. Large calls have more weight, since training waits for
 * them. Small calls are faster in a measurement than in training, since their data is in the
 * caches, and since a link lets a burst through at once. */
static double fit_weight(const struct tune_point *point) {
  size_t mebi = point->task.elements >> 18;
  return mebi >= 16 ? 16 : mebi >= 4 ? 8 : mebi >= 1 ? 2 : 1;
}

static double fit_objective(const struct ob_costs *costs, const struct ob_costs *start,
                            const struct tune_points *points) {
  double sum = 0;
  for (size_t i = 0; i < points->count; i++)
    sum += fit_weight(&points->point[i]) *
           fit_loss(log(tune_point_seconds(costs, &points->point[i]) / points->point[i].measured));
  for (int k = 0; k < KNOBS; k++) {
    double now = *get_knob((struct ob_costs *)costs, k);
    double then = *get_knob((struct ob_costs *)start, k);
    sum += 0.01 * fit_loss(log(now / then) / knobs[k].stiffness);
  }
  return sum;
}

/* Multiplies one parameter by a factor if this improves the fit, and returns whether it does. */
static bool try_factor(struct ob_costs *costs, const struct ob_costs *start,
                       const struct tune_points *points, int k, double factor, double *best) {
  double *value = get_knob(costs, k), before = *value;
  *value = fmax(knobs[k].smallest, fmin(before * factor, knobs[k].largest));
  double now = fit_objective(costs, start, points);
  if (now < *best) {
    *best = now;
    return true;
  }
  *value = before;
  return false;
}

void tune_fit(struct ob_costs *costs, struct tune_points *points) {
  double square = 0;
  /* MPI_Allreduce may lose bandwidth on the link (round trips, congestion) or in the cores
   * (copies). Measurements at one bandwidth cannot distinguish the two losses, so the fit assigns
   * all of the loss to the link, as a fraction of the bandwidth. After a fit at 1 Gbit/s, calls at
   * 200 and at 500 Mbit/s lost the same fraction. For links faster than the measured one, this
   * predicts MPI too fast, so that the gain of compression is never overestimated. */
  costs->mpi_byte = 0;
  costs->oversubscribed = 100e-6; /* the start value: about a time slice of the scheduler */
  struct ob_costs start = *costs;
  double best = fit_objective(costs, &start, points);
  for (double factor = 2; factor > 1.002; factor = sqrt(factor))
    for (int pass = 0, better = 1; better && pass < 100; pass++) {
      better = 0;
      for (int k = 0; k < KNOBS; k++)
        better |= try_factor(costs, &start, points, k, factor, &best) ||
                  try_factor(costs, &start, points, k, 1 / factor, &best);
    }
  for (size_t i = 0; i < points->count; i++) {
    struct tune_point *point = &points->point[i];
    point->predicted = tune_point_seconds(costs, point);
    square += pow(log(point->predicted / point->measured), 2);
  }
  costs->residual = points->count ? sqrt(square / (double)points->count) : 0;
}

/* --- The measured values -----------------------------------------------------------------------*/

static void print_link(const char *name, const struct ob_link *link) {
  printf("%-16s%14s%14.0f%14s%14.2f\n", name, TUNE_WORDS(TUNE_TIME, link->latency),
         1e-6 * link->bandwidth, TUNE_WORDS(TUNE_TIME, link->message), 1e9 * link->byte);
}

void tune_print_links(const struct ob_cost_task *cluster, const struct ob_costs *costs) {
  printf("# %d rank%s on %d host%s", cluster->ranks, cluster->ranks == 1 ? "" : "s", cluster->hosts,
         cluster->hosts == 1 ? "" : "s");
  if (cluster->ranks_per_host == 0)
    printf("; the hosts have different numbers of ranks, up to %d: no hierarchical schedule",
           cluster->max_ranks);
  printf("\n%-16s%14s%14s%14s%14s\n", "# link", "latency", "MB/s", "a message", "ns a byte");
  if (cluster->hosts > 1)
    print_link("between hosts", &costs->between);
  else
    printf(
        "# There is one host, so links between hosts are not measured and keep their defaults.\n");
  if (cluster->max_ranks > 1)
    print_link("inside a host", &costs->inside);
  else
    printf("# Each host has one rank, so links inside a host are not measured and keep their "
           "defaults.\n");
  printf("# codec %s, ns an element on one core: compress %.3f, reduce %.3f + %.3f a stream, apply "
         "%.3f, copy %.3f\n",
         costs->codec, 1e9 * costs->compress, 1e9 * costs->reduce, 1e9 * costs->reduce_stream,
         1e9 * costs->apply, 1e9 * costs->load);
  if (costs->cores_per_host > 0)
    printf("# The ranks of a host share %.2f cores.\n", costs->cores_per_host);
  else
    printf("# The ranks of a host have a core each.\n");
  if (costs->cores_shared > 0)
    printf("# All hosts share %.0f cores: they are one machine.\n", costs->cores_shared);
}

/* Prints a point, and returns the squared logarithm of its ratio of predicted to measured time. */
static double print_point(const struct tune_point *point) {
  char chunk[24] = "-";
  double ratio = point->predicted / point->measured;
  if (!point->mpi)
    snprintf(chunk, sizeof chunk, "%zu", point->task.chunk);
  printf("%-12s%-16s%-10s%10s%14s%14s%7.0f%%\n",
         TUNE_WORDS(TUNE_BYTES, 4.0 * (double)point->task.elements),
         point->mpi ? "MPI_Allreduce" : ob_cost_schedule_name(point->task.schedule),
         ob_wire_name(point->mpi ? ONEBIT_WIRE_DENSE : point->task.wire, point->task.bits), chunk,
         TUNE_WORDS(TUNE_TIME, point->measured), TUNE_WORDS(TUNE_TIME, point->predicted),
         100 * (ratio - 1));
  return pow(log(ratio), 2);
}

/* The largest factor between predicted and measured times with which the measurements are reliable.
 * On idle hosts, including emulated ones, the factor is 1.1 to 1.5. */
#define MAX_FACTOR 2.0

bool tune_is_doubtful(const struct ob_costs *costs) { return costs->residual > log(MAX_FACTOR); }

void tune_print_points(const struct tune_points *points, double residual) {
  double square = 0, count = 0; /* sum of squares and number of points from 1 MiB on */
  printf("\n%-12s%-16s%-10s%10s%14s%14s%8s\n", "# bytes", "schedule", "wire", "message", "measured",
         "model", "off");
  for (const struct tune_point *point = points->point; point < points->point + points->count;
       point++) {
    bool large = point->task.elements >= 1 << 18;
    square += large * print_point(point);
    count += large;
  }
  printf("# The model is off by a factor of %.2f (root mean square). From 1 MiB on, the sizes that "
         "training\n# waits for, the factor is %.2f.\n",
         exp(residual), exp(count > 0 ? sqrt(square / count) : 0));
}

/* --- Decisions ---------------------------------------------------------------------------------*/

#define LARGEST ((size_t)256 << 20)

static struct ob_cost_choice choose_for_size(const struct ob_costs *costs,
                                             const struct ob_cost_task *cluster, size_t bytes) {
  struct ob_cost_task task = *cluster;
  struct ob_cost_choice choice;
  task.elements = bytes / sizeof(float);
  task.dense_allowed = true;
  ob_cost_choose(costs, &task, &choice);
  return choice;
}

static bool is_same_choice(const struct ob_cost_choice *a, const struct ob_cost_choice *b) {
  return a->schedule == b->schedule && a->wire == b->wire;
}

/* Returns the size in (low, high], in steps of 4 bytes, from which on the choice is the same as at
 * `high`. */
static size_t find_threshold(const struct ob_costs *costs, const struct ob_cost_task *cluster,
                             size_t low, size_t high) {
  struct ob_cost_choice end = choose_for_size(costs, cluster, high);
  while (high - low > 4) {
    size_t middle = low + (high - low) / 8 * 4;
    struct ob_cost_choice there = choose_for_size(costs, cluster, middle);
    *(is_same_choice(&there, &end) ? &high : &low) = middle;
  }
  return high;
}

void tune_print_decisions(const struct ob_costs *costs, const struct ob_cost_task *cluster,
                          bool written) {
  printf("\n# What plans %schoose if their options leave the choice open. They choose float32 only "
         "if it is\n# faster than bits. Sizes are those of float32.\n",
         written ? "" : "would, by these times, ");
  struct ob_cost_choice last;
  for (size_t bytes = 4; bytes <= LARGEST; bytes *= 2) {
    struct ob_cost_choice now = choose_for_size(costs, cluster, bytes);
    if (bytes == 4 || !is_same_choice(&now, &last))
      printf("from %zu bytes on: %s, %s\n",
             bytes == 4 ? bytes : find_threshold(costs, cluster, bytes / 2, bytes),
             ob_cost_schedule_name(now.schedule), ob_wire_name(now.wire, cluster->bits));
    last = now;
  }
}

/* --- The tuning file ---------------------------------------------------------------------------*/

/* Creates the missing directories of a path, and returns their number. Errors are reported later,
 * when the file is opened. */
static int make_directories(char *path) {
  int made = 0;
  for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
    *slash = '\0';
    made += mkdir(path, 0777) == 0;
    *slash = '/';
  }
  return made;
}

/* Removes the file, and the last `count` directories of its path. */
static void remove_with_directories(char *path, int count) {
  remove(path);
  for (char *slash; count-- > 0 && (slash = strrchr(path, '/')); rmdir(path))
    *slash = '\0';
}

/* Opens a new file in the directory of `path`, which is later renamed to `path`. The file's name
 * contains the process number, so that no two processes write to the same file. An existing file or
 * link is not opened. Sets `made` to the number of directories that were created. */
static FILE *open_temporary(const char *path, char fresh[OB_TUNING_PATH_CAPACITY + 32], int *made) {
  snprintf(fresh, OB_TUNING_PATH_CAPACITY + 32, "%s.%ld", path, (long)getpid());
  *made = make_directories(fresh);
  return fopen(fresh, "wx");
}

static bool print_output_error(const char *path) {
  tune_print_error("%s cannot be written: %s", path, strerror(errno));
  return false;
}

bool tune_can_write(const char *path) {
  char fresh[OB_TUNING_PATH_CAPACITY + 32];
  struct stat there;
  int made;
  FILE *file = open_temporary(path, fresh, &made);
  if (!file)
    return print_output_error(path);
  fclose(file);
  remove_with_directories(fresh, made);
  errno = EISDIR;
  return stat(path, &there) != 0 || !S_ISDIR(there.st_mode) || print_output_error(path);
}

bool tune_write_file(const char *path, const struct ob_costs *costs,
                     const struct ob_tuning_origin *origin) {
  char fresh[OB_TUNING_PATH_CAPACITY + 32];
  int made;
  FILE *file = open_temporary(path, fresh, &made);
  bool well = file && ob_tuning_write(file, costs, origin);
  if (file)
    well &= fclose(file) == 0;
  if (well && rename(fresh, path) == 0)
    return true;
  print_output_error(path);
  if (file)
    remove_with_directories(fresh, made);
  return false;
}
