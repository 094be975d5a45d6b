/* Prints rows of the benchmarks of collectives: first the columns of OSU's benchmarks, then
 * onebit's own. Also computes lower bounds for the time of a call. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <time.h>

#include "bench/bench_collective.h"
#include "collectives/plan.h"

double bench_algbw(const struct bench_case *test, double seconds) {
  size_t larger = test->send_count > test->receive_count ? test->send_count : test->receive_count;
  return 1e-9 * (double)(larger * sizeof(float)) / seconds;
}

double bench_busbw(const struct bench_case *test, double seconds) {
  double ranks = test->team->size;
  double rounds = test->collective->operation == ONEBIT_ALLREDUCE ? 2 : 1;
  return bench_algbw(test, seconds) * rounds * (ranks - 1) / ranks;
}

/* --- Two lower bounds for the time of a call: the time of its bytes at the rate of the links, and
 * the time of its arithmetic on all cores of the ranks. */

/* The number of measured calls. Each rank takes the call in which its arithmetic took least
 * time. */
#define CALLS 5

/* Returns the processor time of this thread. */
static double processor_seconds(void) {
  struct timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Measures a call's processor seconds, summed over all ranks and divided by the number of cores. */
static int measure_plan_limit(struct bench_way *way) {
  const struct bench_case *test = way->test;
  double least = INFINITY, cores = test->options->cores ? test->options->cores : test->team->size;
  ob_plan_start_timing(way->plan, processor_seconds);
  for (int k = 0; k < CALLS; k++) {
    test->team->kind->barrier(test->team);
    onebit_status_t status = test->collective->call(test->send, test->receive, way->plan);
    const struct ob_spent spent = ob_plan_read_spent(way->plan);
    BENCH_TRY(bench_check_status(status, test->collective->name));
    least = fmin(least, spent.compress + spent.apply);
  }
  ob_plan_start_timing(way->plan, NULL);
  test->team->kind->combine(test->team, &least, 1, true);
  way->computing = least / cores;
  return BENCH_OK;
}

int bench_measure_limits(struct bench_case *test) {
  for (size_t k = 0; k < test->plan_count; k++)
    if (test->ways[k].plan) /* else the library refused the plan, on all ranks */
      BENCH_TRY(measure_plan_limit(&test->ways[k]));
  return BENCH_OK;
}

/* Returns the seconds that a link needs: a TCP packet of 1538 bytes carries 1448 bytes. */
double bench_wire_seconds(const struct bench_options *options, double bytes) {
  return bytes / (options->rate * 1448 / 1538);
}

/* --- Notes above the rows */

static const char *format_setting(size_t number, char text[32]) {
  if (number == ONEBIT_BLOCK_BUFFER)
    return "the buffer";
  snprintf(text, 32, "%zu elements", number);
  return number ? text : "";
}

void bench_collective_print_notes(struct bench_job *job, const struct bench_case *test) {
  char text[32];
  onebit_plan_info_t info = bench_plan_info(test->plan);
  struct bench_table *table = job->table;
  bench_print_note(table, "onebit-bench %s, version %s", job->benchmark->name, onebit_version());
  bench_print_note(table, "%d rank%s over %s, codec %s, %s, one %s scale for %s", test->team->size,
                   test->team->size == 1
                       ? ", which exchanges nothing (mpirun -n N and --ranks N start more),"
                       : "s",
                   info.transport, info.codec, bench_dtypes[test->options->dtype],
                   bench_scales[test->options->scale], format_setting(info.block_size, text));
  if (test->dense_receive)
    bench_print_note(table, "Dense: %s of float32 by %s, %s",
                     job->benchmark->kind & BENCH_NONBLOCKING
                         ? test->collective->nonblocking_dense_name
                         : test->collective->dense_name,
                     test->team->library,
                     test->team->algorithm_count > 1 ? "the best of its algorithms"
                                                     : "its own choice of algorithm");
  bench_print_note(
      table,
      "Size: bytes of a rank's %s as float32. Times: of the slowest rank in each iteration;\n"
      "# %salgbw and busbw: by medians. Wire: bytes sent by a rank, with %zu of each message's "
      "header;\n"
      "# small buffers may be sent as float32, which is faster",
      test->collective->gathers ? "part" : "send buffer",
      job->benchmark->kind & BENCH_NONBLOCKING ? "times, "
      : test->dense_receive                    ? "Speed-up, "
                                               : "",
      sizeof(struct ob_header));
}

/* --- Fields */

/* Returns the head of a column if the text table has this column, or else NULL. */
static const char *head_if(bool wanted, const char *text) { return wanted ? text : NULL; }

static bool row_compares(const struct bench_row *row) {
  return row->test->options->compare_count > 0;
}

/* Puts a row's requested settings, and those that the plan chose. */
static void put_setting(struct bench_table *table, const struct bench_row *row) {
  const struct bench_case *test = row->test;
  onebit_plan_info_t info = bench_plan_info(row->way->plan);
  bool known = row->own;
  bench_put_number(table, "bytes", "Size", -12, 0, (double)(test->send_count * sizeof(float)));
  bench_put_number(table, "ranks", NULL, 0, 0, test->team->size);
  bench_put_number(table, "hosts", NULL, 0, 0, known ? (double)info.hosts : NAN);
  bench_put_number(table, "ranks_per_host", NULL, 0, 0, known ? (double)info.ranks_per_host : NAN);
  if (test->device)
    bench_put_text(table, "row", "Row", -24, row->time->name);
  else
    bench_put_text(table, "requested", head_if(row_compares(row), "Schedule"), -22,
                   row->time->name);
  bench_put_text(table, "schedule", NULL, 0, known ? bench_schedules[info.schedule] : NULL);
  bench_put_text(table, "wire", NULL, 0, known ? bench_wires[info.wire] : NULL);
  bench_put_text(table, "dtype", NULL, 0, known ? bench_dtypes[test->options->dtype] : NULL);
  bench_put_text(table, "codec", NULL, 0, known ? info.codec : NULL);
  bench_put_number(table, "chunk_elements", NULL, 0, 0,
                   info.chunk_size ? (double)info.chunk_size : NAN);
  bench_put_number(table, "chunks", NULL, 0, 0, known ? (double)info.chunks : NAN);
  bench_put_text(table, "transport", NULL, 0, bench_plan_info(test->plan).transport);
}

static void put_overlap(struct bench_table *table, const struct bench_row *row) {
  const struct bench_entry *own = row->overlap;
  bool full = row->test->options->full;
  double pure = own[BENCH_PURE].time.median, compute = own[BENCH_COMPUTE].time.median,
         overall = own[BENCH_OVERALL].time.median;
  bench_put_time(table, "overall_us", "Overall(us)", 16, 2, overall);
  bench_put_time(table, "compute_us", "Compute(us)", 16, 2, compute);
  bench_put_time(table, "pure_us", "Pure Comm.(us)", 16, 2, pure);
  bench_put_number(table, "overlap_percent", "Overlap(%)", 12, 2,
                   bench_overlap_percent(overall, compute, pure));
  bench_put_time(table, NULL, head_if(full, "Min(us)"), 12, 2, own[BENCH_OVERALL].time.minimum);
  bench_put_time(table, NULL, head_if(full, "Max(us)"), 12, 2, own[BENCH_OVERALL].time.maximum);
  bench_put_number(table, "tests", head_if(full, "Tests"), 12, 0, (double)row->tests);
}

/* Puts the times of a row. For a nonblocking collective, these are the times of the communication
 * alone. */
static void put_times(struct bench_table *table, const struct bench_row *row) {
  const struct bench_case *test = row->test;
  const struct bench_statistics *time = &row->time->time;
  bool blocking = !row->overlap, device = test->device != NULL;
  bool full = blocking && test->options->full && !device;
  bench_put_time(table, "average_us", head_if(blocking && !device, "Avg Latency(us)"), 16, 2,
                 time->mean);
  bench_put_time(table, "median_us", head_if(blocking, "Median(us)"), 12, 2, time->median);
  bench_put_time(table, "minimum_us", head_if(full || device, "Min(us)"), 12, 2, time->minimum);
  bench_put_time(table, "p90_us", head_if(full, "P90(us)"), 12, 2, time->percentile90);
  bench_put_time(table, "p99_us", NULL, 0, 0, time->percentile99);
  bench_put_time(table, "maximum_us", head_if(full || device, "Max(us)"), 12, 2, time->maximum);
  bench_put_number(table, device ? "rounds" : "iterations",
                   head_if(test->options->full && !device, "Iterations"), 12, 0,
                   (double)test->rounds.rounds);
  if (device)
    bench_put_number(table, "launches", NULL, 0, 0, (double)test->rounds.repeats);
}

static void put_traffic(struct bench_table *table, const struct bench_row *row) {
  const struct bench_case *test = row->test;
  const struct bench_options *options = test->options;
  double seconds = row->time->time.median;
  double wire =
      test->device ? (double)bench_plan_info(row->way->plan).wire_bytes : row->time->wire_bytes;
  bench_put_number(table, "wire_bytes", "Wire(B/rank)", 14, 0, row->own ? wire : NAN);
  if (!test->device)
    bench_put_number(table, "link_bytes", head_if(options->link, "Link(B/host)"), 14, 0,
                     options->link ? row->time->link_bytes : NAN);
  bench_put_number(table, "algbw_gbs", "algbw(GB/s)", 13, 3, bench_algbw(test, seconds));
  bench_put_number(table, "busbw_gbs", "busbw(GB/s)", 13, 3, bench_busbw(test, seconds));
}

/* Puts the lower bounds for the time. The ranks of a host share the host's link. If there is only
 * one host, each rank counts as if it had its own link. */
static void put_limits(struct bench_table *table, const struct bench_row *row) {
  const struct bench_case *test = row->test;
  onebit_plan_info_t info = bench_plan_info(row->way->plan);
  double each = !row->own ? NAN : info.hosts > 1 ? (double)info.ranks_per_host : 1;
  double wire = bench_wire_seconds(test->options, each * row->time->wire_bytes);
  double computing = row->own ? row->way->computing : NAN;
  bench_put_time(table, "wire_limit_us", "Wire limit(us)", 16, 2, wire);
  bench_put_time(table, "codec_limit_us", "Codec limit(us)", 17, 2, computing);
  bench_put_number(table, "of_limit", "Of limit", 10, 2,
                   row->time->time.median / (wire > computing ? wire : computing));
}

/* Puts the time of the dense collective. With --compare, the text table has separate rows for MPI
 * instead. */
static void put_dense(struct bench_table *table, const struct bench_row *row) {
  const struct bench_case *test = row->test;
  const struct bench_statistics none = {.median = NAN, .minimum = NAN, .mean = NAN, .maximum = NAN};
  const struct bench_statistics *time = row->dense ? &row->dense->time : &none;
  bool shown = row->dense && !row->overlap && !row_compares(row),
       full = shown && test->options->full;
  bench_put_time(table, "dense_median_us", head_if(shown, "Dense median(us)"), 18, 2, time->median);
  bench_put_time(table, NULL, head_if(full, "Dense avg(us)"), 15, 2, time->mean);
  bench_put_time(table, "dense_minimum_us", head_if(full, "Dense min(us)"), 15, 2, time->minimum);
  bench_put_time(table, "dense_maximum_us", head_if(full, "Dense max(us)"), 15, 2, time->maximum);
  bench_put_text(table, "dense_algorithm",
                 head_if(shown && test->team->algorithm_count > 1, "MPI algorithm"), -20,
                 row->dense_name);
  bench_put_number(table, "speedup", head_if(row->dense && !row->overlap, "Speed-up"), 10, 2,
                   time->median / row->time->time.median);
}

static void put_dense_overlap(struct bench_table *table, const struct bench_row *row) {
  const struct bench_entry *dense = row->dense_overlap;
  double times[] = {NAN, NAN, NAN};
  for (int k = 0; dense && k <= BENCH_OVERALL; k++)
    times[k] = dense[k].time.median;
  bench_put_time(table, "dense_overall_us", head_if(dense, "Dense overall(us)"), 19, 2,
                 times[BENCH_OVERALL]);
  bench_put_time(table, "dense_compute_us", head_if(dense, "Dense compute(us)"), 19, 2,
                 times[BENCH_COMPUTE]);
  bench_put_time(table, NULL, head_if(dense, "Dense pure(us)"), 16, 2, times[BENCH_PURE]);
  bench_put_number(
      table, "dense_overlap_percent", head_if(dense, "Dense overlap(%)"), 18, 2,
      dense ? bench_overlap_percent(times[BENCH_OVERALL], times[BENCH_COMPUTE], times[BENCH_PURE])
            : NAN);
}

static void put_device(struct bench_table *table, const struct bench_row *row) {
  const struct bench_rounds *rounds = &row->test->rounds;
  double speedup = NAN;
  if (row->dense && row->dense->times) /* heads are printed before there are times */
    speedup =
        bench_ratio(row->dense->times, row->time->times, rounds->rounds, rounds->scratch).median;
  bench_put_number(table, "speedup", "Speed-up", 10, 2, speedup);
}

static void rows_fields(struct bench_table *table, const void *context) {
  const struct bench_row *row = context;
  const struct bench_options *options = row->test->options;
  const char *validation = !row->own ? NULL : row->way->right ? "Pass" : "Fail";
  put_setting(table, row);
  if (row->overlap)
    put_overlap(table, row);
  put_times(table, row);
  put_traffic(table, row);
  if (row->test->device)
    put_device(table, row);
  else
    put_dense(table, row);
  if (row->overlap)
    put_dense_overlap(table, row);
  if (options->rate > 0)
    put_limits(table, row);
  if (options->check) {
    bench_put_text(table, NULL, "Validation", 12, validation);
    bench_put_bool(table, "right", row->own ? &row->way->right : NULL);
  }
  if (row_compares(row))
    bench_put_number(table, "of_best", "Of best", 10, 3, row->of_best);
}

/* Puts a row without measurements for a plan that the library refused, with the reason. */
static void refused_fields(struct bench_table *table, const void *context) {
  const struct bench_row *row = context;
  bench_put_number(table, NULL, "", -12, 0, (double)(row->test->send_count * sizeof(float)));
  bench_put_text(table, NULL, "", -22, row->time->name);
  bench_put_text(table, NULL, "", 16, "-");
  bench_put_text(table, NULL, "", -1, row->way->refusal);
}

void bench_collective_print_heads(struct bench_table *table, const struct bench_row *row) {
  bench_print_heads(table, rows_fields, row);
}

void bench_collective_print_row(struct bench_table *table, const struct bench_row *row) {
  if (row->time->run)
    bench_print_row(table, rows_fields, row);
  else if (table->format == BENCH_TEXT)
    bench_print_row(table, refused_fields, row);
  else
    bench_print_error("%s: %s", row->time->name, row->way->refusal);
}
