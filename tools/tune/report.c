/* Prints the results of onebit-tune: measurements, the fit of the model, and decisions of plans;
 * and writes the tuning file. */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "collectives/schedules/schedule.h"
#include "tools/tune/tune.h"

void tune_complain(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fputs("onebit-tune: ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
}

void tune_bytes_text(double bytes, char text[24]) {
  static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t k = 0;
  for (; bytes >= 1024 && k < 4; k++)
    bytes /= 1024;
  snprintf(text, 24, bytes == floor(bytes) || k == 0 ? "%.0f %s" : "%.1f %s", bytes, units[k]);
}

void tune_time_text(double seconds, char text[24]) {
  if (seconds < 0.9995e-3)
    snprintf(text, 24, seconds < 9.95e-6 ? "%.1f us" : "%.0f us", 1e6 * seconds);
  else if (seconds < 0.9995)
    snprintf(text, 24, "%.3g ms", 1e3 * seconds);
  else
    snprintf(text, 24, "%.2f s", seconds);
}

/* --- What was measured -------------------------------------------------------------------------*/

static void report_print_link(const char *name, const struct ob_link *link) {
  char latency[24], message[24];
  tune_time_text(link->latency, latency);
  tune_time_text(link->message, message);
  printf("%-16s%14s%14.0f%14s%14.2f\n", name, latency, 1e-6 * link->bandwidth, message,
         1e9 * link->byte);
}

void tune_report_links(const struct ob_cost_task *cluster, const struct ob_costs *costs) {
  printf("# %d rank%s on %d host%s", cluster->ranks, cluster->ranks == 1 ? "" : "s", cluster->hosts,
         cluster->hosts == 1 ? "" : "s");
  if (cluster->ranks_per_host == 0)
    printf("; the hosts have different numbers of ranks, up to %d: no hierarchical schedule",
           cluster->max_ranks);
  printf("\n%-16s%14s%14s%14s%14s\n", "# link", "latency", "MB/s", "a message", "ns a byte");
  if (cluster->hosts > 1)
    report_print_link("between hosts", &costs->between);
  else
    printf("# one host: links between hosts are not measured, the defaults stand\n");
  if (cluster->max_ranks > 1)
    report_print_link("inside a host", &costs->inside);
  else
    printf("# one rank a host: links inside are not measured, the defaults stand\n");
  printf("# codec %s, ns an element on one core: compress %.3f, reduce %.3f + %.3f a stream, apply "
         "%.3f, copy %.3f\n",
         costs->codec, 1e9 * costs->compress, 1e9 * costs->reduce, 1e9 * costs->reduce_stream,
         1e9 * costs->apply, 1e9 * costs->load);
  if (costs->cores_per_host > 0)
    printf("# The ranks of a host share %.2f cores.\n", costs->cores_per_host);
  else
    printf("# The ranks of a host have a core each.\n");
  if (costs->cores_shared > 0)
    printf("# The hosts share %.0f cores with each other: they are one machine.\n",
           costs->cores_shared);
}

/* Prints a point, and returns the square of the logarithm of the model's error. */
static double print_point(const struct tune_point *point) {
  char bytes[24], measured[24], predicted[24], chunk[24] = "-";
  double ratio = point->predicted / point->measured;
  if (!point->mpi)
    snprintf(chunk, sizeof chunk, "%zu", point->task.chunk);
  tune_bytes_text(4.0 * (double)point->task.elements, bytes);
  tune_time_text(point->measured, measured);
  tune_time_text(point->predicted, predicted);
  printf("%-12s%-16s%-10s%10s%14s%14s%7.0f%%\n", bytes,
         point->mpi ? "MPI_Allreduce" : ob_cost_schedule_name(point->task.schedule),
         ob_wire_name(point->mpi ? ONEBIT_WIRE_DENSE : point->task.wire, point->task.bits), chunk,
         measured, predicted, 100 * (ratio - 1));
  return pow(log(ratio), 2);
}

void tune_report_points(const struct tune_points *points, double residual) {
  double square = 0, count = 0; /* of a mebibyte and more */
  printf("\n%-12s%-16s%-10s%10s%14s%14s%8s\n", "# bytes", "schedule", "wire", "message", "measured",
         "model", "off");
  for (const struct tune_point *point = points->point; point < points->point + points->count;
       point++) {
    bool large = point->task.elements >= 1 << 18;
    square += large * print_point(point);
    count += large;
  }
  printf("# The model is off by a factor of %.2f, root mean square; from 1 MiB on, which training "
         "waits\n# for, by %.2f.\n",
         exp(residual), exp(count > 0 ? sqrt(square / count) : 0));
}

/* --- Decisions ---------------------------------------------------------------------------------*/

#define LARGEST ((size_t)256 << 20)

static struct ob_cost_task report_task_of(const struct ob_cost_task *cluster, size_t bytes) {
  struct ob_cost_task task = *cluster;
  task.elements = bytes / sizeof(float);
  task.dense_allowed = true;
  return task;
}

static struct ob_cost_choice choice_of(const struct ob_costs *costs,
                                       const struct ob_cost_task *cluster, size_t bytes) {
  struct ob_cost_task task = report_task_of(cluster, bytes);
  struct ob_cost_choice choice;
  ob_cost_choose(costs, &task, &choice);
  return choice;
}

static bool report_same(const struct ob_cost_choice *a, const struct ob_cost_choice *b) {
  return a->schedule == b->schedule && a->wire == b->wire;
}

/* The first size in (low, high] with high's choice, to a multiple of 4 bytes. */
static size_t threshold(const struct ob_costs *costs, const struct ob_cost_task *cluster,
                        size_t low, size_t high) {
  struct ob_cost_choice end = choice_of(costs, cluster, high);
  while (high - low > 4) {
    size_t middle = low + (high - low) / 8 * 4;
    struct ob_cost_choice there = choice_of(costs, cluster, middle);
    *(report_same(&there, &end) ? &high : &low) = middle;
  }
  return high;
}

static void print_ranges(const struct ob_costs *costs, const struct ob_cost_task *cluster) {
  struct ob_cost_choice last;
  for (size_t bytes = 4; bytes <= LARGEST; bytes *= 2) {
    struct ob_cost_choice now = choice_of(costs, cluster, bytes);
    if (bytes == 4 || !report_same(&now, &last))
      printf("from %zu bytes on: %s, %s\n",
             bytes == 4 ? bytes : threshold(costs, cluster, bytes / 2, bytes),
             ob_cost_schedule_name(now.schedule), ob_wire_name(now.wire, cluster->bits));
    last = now;
  }
}

/* Prints each candidate's time; "-" where it is not possible. A star marks the choice. */
static void print_candidates(const struct ob_costs *costs, const struct ob_cost_task *cluster,
                             size_t bytes) {
  struct ob_cost_choice choice = choice_of(costs, cluster, bytes), own;
  struct ob_cost_task task = report_task_of(cluster, bytes);
  char text[24], marked[32];
  tune_bytes_text((double)bytes, text);
  printf("%-10s", text);
  for (size_t k = 0; k < OB_COST_CANDIDATES; k++) {
    const struct ob_cost_candidate *candidate = &ob_cost_candidates[k];
    struct ob_cost_task alone = task;
    bool chosen = choice.schedule == candidate->schedule && choice.wire == candidate->wire;
    strcpy(text, "-");
    if (ob_cost_possible(&task, candidate->schedule, candidate->wire)) {
      alone.schedule = candidate->schedule;
      alone.wire = candidate->wire;
      alone.dense_allowed = false;
      ob_cost_choose(costs, &alone, &own);
      tune_time_text(own.seconds, text);
    }
    snprintf(marked, sizeof marked, "%s%s", chosen ? "*" : "", text);
    printf("%14s", marked);
  }
  tune_time_text(ob_cost_mpi_seconds(costs, &task, sizeof(float)), text);
  printf("%15s\n", text);
}

void tune_report_decisions(const struct ob_costs *costs, const struct ob_cost_task *cluster) {
  printf("\n# What plans choose where their options leave it open: float32 only where it is faster "
         "than\n# bits; sizes are of float32.\n");
  print_ranges(costs, cluster);
  printf("\n%-10s", "# bytes");
  for (size_t k = 0; k < OB_COST_CANDIDATES; k++)
    printf("%14s", ob_cost_schedule_name(ob_cost_candidates[k].schedule));
  printf("%15s\n%-10s", "MPI_Allreduce", "#");
  for (size_t k = 0; k < OB_COST_CANDIDATES; k++)
    printf("%14s", ob_wire_name(ob_cost_candidates[k].wire, 1));
  printf("%15s\n", "float32");
  for (size_t bytes = 4; bytes <= LARGEST; bytes *= 4)
    print_candidates(costs, cluster, bytes);
}

/* --- The tuning file ---------------------------------------------------------------------------*/

/* Makes the directories above a path, as far as they are missing. The writer of the file finds
 * failures. */
static void make_directories(char *path) {
  for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
    *slash = '\0';
    mkdir(path, 0777);
    *slash = '/';
  }
}

/* Writes beside the file, so that renaming replaces it at once; with the process in its name, so
 * that two do not write the same. */
bool tune_write(const char *path, const struct ob_costs *costs,
                const struct ob_tuning_origin *origin) {
  char fresh[OB_TUNING_PATH_CAPACITY + 32];
  snprintf(fresh, sizeof fresh, "%s.%ld", path, (long)getpid());
  make_directories(fresh);
  FILE *file = fopen(fresh, "wx"); /* and what somebody else made there is not followed */
  bool well = file && ob_tuning_write(file, costs, origin);
  if (file)
    well &= fclose(file) == 0;
  if (well && rename(fresh, path) == 0)
    return true;
  tune_complain("%s cannot be written: %s", path, strerror(errno));
  if (file)
    remove(fresh);
  return false;
}
