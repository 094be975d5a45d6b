/* What onebit-tune prints: what was measured, how well the model fits, what plans will decide. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tools/tune/tune.h"

static void print_link(const char *name, const struct ob_link *link) {
  char latency[24], message[24];
  tune_time_text(link->latency, latency);
  tune_time_text(link->message, message);
  printf("%-16s%14s%14.0f%14s%14.2f\n", name, latency, 1e-6 * link->bandwidth, message,
         1e9 * link->byte);
}

static void print_cores(const struct ob_costs *costs) {
  if (costs->cores_per_host > 0)
    printf("# The ranks of a host share %.2f cores.\n", costs->cores_per_host);
  else
    printf("# The ranks of a host have a core each.\n");
  if (costs->cores_shared > 0)
    printf("# The hosts share %.0f cores with each other: they are one machine.\n",
           costs->cores_shared);
}

void tune_report_links(const struct tune_cluster *cluster, const struct ob_costs *costs) {
  printf("# %d rank%s on %d host%s", cluster->size, cluster->size == 1 ? "" : "s", cluster->hosts,
         cluster->hosts == 1 ? "" : "s");
  if (cluster->ranks_per_host == 0)
    printf("; the hosts have different numbers of ranks, up to %d: no hierarchical schedule",
           cluster->most_ranks);
  printf("\n%-16s%14s%14s%14s%14s\n", "# link", "latency", "MB/s", "a message", "ns a byte");
  if (cluster->hosts > 1)
    print_link("between hosts", &costs->between);
  else
    printf("# one host: links between hosts are not measured, the defaults stand\n");
  if (cluster->most_ranks > 1)
    print_link("inside a host", &costs->inside);
  else
    printf("# one rank a host: links inside are not measured, the defaults stand\n");
  printf("# codec %s, ns an element on one core: compress %.3f, reduce %.3f + %.3f a stream, apply "
         "%.3f, copy %.3f\n",
         costs->codec, 1e9 * costs->compress, 1e9 * costs->reduce, 1e9 * costs->reduce_stream,
         1e9 * costs->apply, 1e9 * costs->load);
  print_cores(costs);
}

/* Root mean square of the logarithm, of calls of a mebibyte and more. */
static double large_residual(const struct tune_points *points) {
  double square = 0, count = 0;
  for (size_t i = 0; i < points->count; i++)
    if (points->point[i].task.elements >= (1 << 18)) {
      square += pow(log(points->point[i].predicted / points->point[i].measured), 2);
      count++;
    }
  return count > 0 ? sqrt(square / count) : 0;
}

void tune_report_points(const struct tune_points *points, double residual) {
  printf("\n%-12s%-16s%-10s%10s%14s%14s%8s\n", "# bytes", "schedule", "wire", "message", "measured",
         "model", "off");
  for (size_t i = 0; i < points->count; i++) {
    const struct tune_point *point = &points->point[i];
    char bytes[24], measured[24], predicted[24], chunk[24] = "-";
    if (!point->mpi)
      snprintf(chunk, sizeof chunk, "%zu", point->task.chunk);
    tune_bytes_text(4.0 * (double)point->task.elements, bytes);
    tune_time_text(point->measured, measured);
    tune_time_text(point->predicted, predicted);
    printf("%-12s%-16s%-10s%10s%14s%14s%7.0f%%\n", bytes,
           point->mpi ? "MPI_Allreduce" : ob_cost_schedule_name(point->task.schedule),
           ob_cost_wire_name(point->mpi ? ONEBIT_WIRE_DENSE : point->task.wire), chunk, measured,
           predicted, 100 * (point->predicted / point->measured - 1));
  }
  printf("# The model is off by a factor of %.2f, root mean square; from 1 MiB on, which training "
         "waits\n# for, by %.2f.\n",
         exp(residual), exp(large_residual(points)));
}

/* --- Decisions */

#define LARGEST ((size_t)256 << 20)

static struct ob_cost_task task_of(const struct tune_cluster *cluster, size_t bytes) {
  return (struct ob_cost_task){.elements = bytes / sizeof(float),
                               .hosts = cluster->hosts,
                               .ranks_per_host = cluster->ranks_per_host,
                               .ranks = cluster->size,
                               .most_ranks = cluster->most_ranks,
                               .dense_allowed = true};
}

static struct ob_cost_choice choice_of(const struct ob_costs *costs,
                                       const struct tune_cluster *cluster, size_t bytes) {
  struct ob_cost_task task = task_of(cluster, bytes);
  struct ob_cost_choice choice;
  ob_cost_choose(costs, &task, &choice);
  return choice;
}

static bool same(const struct ob_cost_choice *a, const struct ob_cost_choice *b) {
  return a->schedule == b->schedule && a->wire == b->wire;
}

/* The first size in (low, high] with high's choice, to a multiple of 4 bytes. */
static size_t threshold(const struct ob_costs *costs, const struct tune_cluster *cluster,
                        size_t low, size_t high) {
  struct ob_cost_choice end = choice_of(costs, cluster, high);
  while (high - low > 4) {
    size_t middle = low + (high - low) / 8 * 4;
    struct ob_cost_choice there = choice_of(costs, cluster, middle);
    *(same(&there, &end) ? &high : &low) = middle;
  }
  return high;
}

static void print_ranges(const struct ob_costs *costs, const struct tune_cluster *cluster) {
  size_t before = 4;
  struct ob_cost_choice last = choice_of(costs, cluster, before);
  printf("from 4 bytes on: %s, %s\n", ob_cost_schedule_name(last.schedule),
         ob_cost_wire_name(last.wire));
  for (size_t bytes = 8; bytes <= LARGEST; before = bytes, bytes *= 2) {
    struct ob_cost_choice now = choice_of(costs, cluster, bytes);
    if (!same(&now, &last))
      printf("from %zu bytes on: %s, %s\n", threshold(costs, cluster, before, bytes),
             ob_cost_schedule_name(now.schedule), ob_cost_wire_name(now.wire));
    last = now;
  }
}

/* A candidate alone; "-" where it is not possible. A star: this is the choice. */
static void print_candidate(const struct ob_costs *costs, const struct tune_cluster *cluster,
                            size_t bytes, size_t k) {
  const struct ob_cost_candidate *candidate = &ob_cost_candidates[k];
  struct ob_cost_choice choice = choice_of(costs, cluster, bytes), own;
  struct ob_cost_task task = task_of(cluster, bytes);
  char time[24] = "-", marked[32];
  bool chosen = choice.schedule == candidate->schedule && choice.wire == candidate->wire;
  if (ob_cost_possible(&task, candidate->schedule, candidate->wire)) {
    task.schedule = candidate->schedule;
    task.wire = candidate->wire;
    task.dense_allowed = false;
    ob_cost_choose(costs, &task, &own);
    tune_time_text(own.seconds, time);
  }
  snprintf(marked, sizeof marked, "%s%s", chosen ? "*" : "", time);
  printf("%14s", marked);
}

static void print_candidates(const struct ob_costs *costs, const struct tune_cluster *cluster,
                             size_t bytes) {
  struct ob_cost_task task = task_of(cluster, bytes);
  char size[24], mpi[24];
  tune_bytes_text((double)bytes, size);
  tune_time_text(ob_cost_mpi_seconds(costs, &task, sizeof(float)), mpi);
  printf("%-10s", size);
  for (size_t k = 0; k < OB_COST_CANDIDATES; k++)
    print_candidate(costs, cluster, bytes, k);
  printf("%15s\n", mpi);
}

void tune_report_decisions(const struct ob_costs *costs, const struct tune_cluster *cluster) {
  printf("\n# What plans choose where their options leave it open: float32 only where it is faster "
         "than\n# bits; sizes are of float32.\n");
  print_ranges(costs, cluster);
  printf("\n%-10s", "# bytes");
  for (size_t k = 0; k < OB_COST_CANDIDATES; k++)
    printf("%14s", ob_cost_schedule_name(ob_cost_candidates[k].schedule));
  printf("%15s\n%-10s", "MPI_Allreduce", "#");
  for (size_t k = 0; k < OB_COST_CANDIDATES; k++)
    printf("%14s", ob_cost_wire_name(ob_cost_candidates[k].wire));
  printf("%15s\n", "float32");
  for (size_t bytes = 4; bytes <= LARGEST; bytes *= 4)
    print_candidates(costs, cluster, bytes);
}
