/* Rows for people: OSU's columns first, then ours. */
#include <math.h>
#include <stdio.h>

#include "bench/bench_collective.h"

static size_t larger_buffer(const struct bench_case *test) {
  return test->send_count > test->receive_count ? test->send_count : test->receive_count;
}

double bench_algbw(const struct bench_case *test, double seconds) {
  return 1e-9 * (double)(larger_buffer(test) * sizeof(float)) / seconds;
}

double bench_busbw(const struct bench_case *test, double seconds) {
  double ranks = test->team->size;
  double passes = test->collective->operation == ONEBIT_ALLREDUCE ? 2 : 1;
  return bench_algbw(test, seconds) * passes * (ranks - 1) / ranks;
}

void bench_way_name(const struct bench_way *way, char name[48]) {
  if (way->algorithm)
    snprintf(name, 48, "MPI %s", way->algorithm->name);
  else
    snprintf(name, 48, "%s%s", bench_schedule_name(way->variant.schedule),
             way->variant.wire == ONEBIT_WIRE_DENSE ? ":dense" : "");
}

static const char *setting(size_t number, const char *fallback, char text[32]) {
  if (number == 0)
    return fallback;
  if (number == ONEBIT_BLOCK_BUFFER)
    return "the buffer";
  snprintf(text, 32, "%zu elements", number);
  return text;
}

static void print_about(const struct bench_case *test, const char *name, const char *dense_name) {
  char text[32];
  onebit_plan_info_t info = {.size = sizeof info};
  onebit_plan_get_info(test->plan, &info);
  printf("# onebit-bench %s, version %s\n", name, onebit_version());
  printf("# %d ranks over %s, codec %s, %s, one %s scale for %s\n", test->team->size,
         info.transport, info.codec, bench_dtype_name(test->options->dtype),
         bench_scale_name(test->options->scale), setting(info.block_size, "", text));
#ifdef ONEBIT_HAVE_MPI
  if (test->dense_receive)
    printf("# Dense: %s of float32 by %s, %s\n", dense_name, bench_mpi_library(),
           test->team->algorithm_count > 1 ? "the best of its algorithms"
                                           : "its own choice of algorithm");
#else
  (void)dense_name;
#endif
  printf("# Size: bytes of a rank's %s as float32. Latency: of the slowest rank%s\n",
         test->collective->gathers ? "part" : "send buffer",
         test->dense_receive ? ". Speed-up: of medians" : "");
}

/* A number, or a - where there is none. */
static void column(int width, int digits, double number) {
  if (isnan(number))
    printf("%*s", width, "-");
  else
    printf("%*.*f", width, digits, number);
}

/* For what lies between 1e-8 and 1. */
static void column_short(int width, double number) {
  if (isnan(number))
    printf("%*s", width, "-");
  else
    printf("%*.3g", width, number);
}

static bool has_error(const struct bench_options *options) {
  return options->full || options->check;
}

/* Behind the times. */
static void print_common_head(const struct bench_case *test) {
  if (test->options->tails)
    printf("%12s%12s%12s", "P50(us)", "P90(us)", "P99(us)");
  printf("%14s", "Wire(B/rank)");
  if (test->options->link)
    printf("%14s", "Link(B/host)");
  printf("%13s%13s", "algbw(GB/s)", "busbw(GB/s)");
  if (has_error(test->options))
    printf("%12s", "Rel. error");
}

static void print_common(const struct bench_row *row, const struct bench_statistics *time) {
  const struct bench_case *test = row->test;
  if (test->options->tails) {
    column(12, 2, 1e6 * time->median);
    column(12, 2, 1e6 * time->percentile90);
    column(12, 2, 1e6 * time->percentile99);
  }
  column(14, 0, row->way->algorithm ? NAN : row->way->wire_bytes);
  if (test->options->link)
    column(14, 0, row->way->link_bytes);
  column(13, 3, bench_algbw(test, row->way->time.median));
  column(13, 3, bench_busbw(test, row->way->time.median));
  if (has_error(test->options))
    column_short(12, row->way->error);
}

static void print_blocking_head(const struct bench_case *test) {
  const struct bench_options *options = test->options;
  bool compare = options->compare_count > 0;
  printf("%-12s", "# Size");
  if (compare)
    printf("  %-22s", "Schedule");
  printf("%16s%12s", "Avg Latency(us)", "Median(us)");
  if (options->full)
    printf("%12s%12s%12s%12s", "Min(us)", "P90(us)", "Max(us)", "Iterations");
  print_common_head(test);
  if (test->dense_receive && !compare)
    printf("%16s", "Dense median");
  if (test->dense_receive && options->full && !compare)
    printf("%12s%12s%12s", "Dense avg", "Dense min", "Dense max");
  if (test->team->algorithm_count > 1 && !compare)
    printf("  %-20s", "MPI algorithm");
  printf("%s%s%s\n", test->dense_receive ? "  Speed-up" : "", options->check ? "  Validation" : "",
         compare ? "   Of best" : "");
}

static void print_nonblocking_head(const struct bench_case *test) {
  const struct bench_options *options = test->options;
  printf("%-12s%16s%16s%16s%12s", "# Size", "Overall(us)", "Compute(us)", "Pure Comm.(us)",
         "Overlap(%)");
  if (options->full)
    printf("%12s%12s%12s%12s", "Min(us)", "Max(us)", "Tests", "Iterations");
  print_common_head(test);
  if (test->dense_receive)
    printf("%16s%16s%16s%14s", "Dense overall", "Dense compute", "Dense pure", "Dense overlap");
  printf("%s\n", options->check ? "  Validation" : "");
}

void bench_print_head(const struct bench_case *test, bool nonblocking) {
  const struct bench_collective *collective = test->collective;
  if (nonblocking) {
    print_about(test, collective->nonblocking_name, collective->nonblocking_dense_name);
    print_nonblocking_head(test);
  } else {
    print_about(test, collective->name, collective->dense_name);
    print_blocking_head(test);
  }
}

static void print_validation(const struct bench_row *row) {
  if (row->test->options->check)
    printf("%12s", row->way->algorithm ? "-" : row->way->right ? "Pass" : "Fail");
}

/* The dense columns; in a comparison MPI has a line of its own. */
static void print_dense(const struct bench_row *row) {
  bool compare = row->test->options->compare_count > 0;
  if (!row->dense)
    return;
  const struct bench_statistics *dense = &row->dense->time;
  if (!compare)
    column(16, 2, 1e6 * dense->median);
  if (!compare && row->test->options->full) {
    column(12, 2, 1e6 * dense->mean);
    column(12, 2, 1e6 * dense->minimum);
    column(12, 2, 1e6 * dense->maximum);
  }
  if (!compare && row->test->team->algorithm_count > 1)
    printf("  %-20s", row->dense->algorithm->name);
  column(10, 2, dense->median / row->way->time.median);
}

static void print_blocking(const struct bench_row *row) {
  const struct bench_options *options = row->test->options;
  const struct bench_statistics *time = &row->way->time;
  bool compare = options->compare_count > 0;
  char name[48];
  bench_way_name(row->way, name);
  printf("%-12zu", row->test->send_count * sizeof(float));
  if (compare)
    printf("  %-22s", name);
  if (!row->way->plan && !row->way->algorithm) {
    printf("%16s  %s\n", "-", row->way->refusal);
    return;
  }
  column(16, 2, 1e6 * time->mean);
  column(12, 2, 1e6 * time->median);
  if (options->full) {
    column(12, 2, 1e6 * time->minimum);
    column(12, 2, 1e6 * time->percentile90);
    column(12, 2, 1e6 * time->maximum);
    printf("%12zu", row->iterations);
  }
  print_common(row, time);
  print_dense(row);
  print_validation(row);
  if (compare)
    column(10, 3, row->of_best);
  printf("\n");
}

static void print_overlap(const struct bench_overlap *overlap, int last) {
  column(16, 2, 1e6 * overlap->overall.median);
  column(16, 2, 1e6 * overlap->compute.median);
  column(16, 2, 1e6 * overlap->pure.median);
  column(last, 2, overlap->percent);
}

static void print_nonblocking(const struct bench_row *row) {
  const struct bench_overlap *overlap = row->overlap;
  printf("%-12zu", row->test->send_count * sizeof(float));
  print_overlap(overlap, 12);
  if (row->test->options->full) {
    column(12, 2, 1e6 * overlap->overall.minimum);
    column(12, 2, 1e6 * overlap->overall.maximum);
    printf("%12zu%12zu", overlap->tests, row->iterations);
  }
  print_common(row, &overlap->overall);
  if (row->dense_overlap)
    print_overlap(row->dense_overlap, 14);
  print_validation(row);
  printf("\n");
}

void bench_print_row(const struct bench_row *row) {
  if (row->overlap)
    print_nonblocking(row);
  else
    print_blocking(row);
}

/* What the library refused is no measured row. */
void bench_report_row(const struct bench_row *row) {
  bool refused = !row->way->plan && !row->way->algorithm;
  char name[48];
  bench_way_name(row->way, name);
  if (!row->test->options->json)
    bench_print_row(row);
  else if (refused)
    bench_complain("%s: %s", name, row->way->refusal);
  else
    bench_json_row(stdout, row);
  fflush(stdout);
}
