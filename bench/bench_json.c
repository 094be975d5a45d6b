/* Rows for programs: an object a line, the same fields in every row of a kind. */
#include <math.h>
#include <stdio.h>

#include "bench/bench_collective.h"

void bench_json_text(FILE *stream, const char *name, const char *text) {
  fprintf(stream, ",\"%s\":", name);
  if (!text) {
    fputs("null", stream);
    return;
  }
  fputc('"', stream);
  for (const char *c = text; *c; c++)
    if ((unsigned char)*c < ' ')
      fprintf(stream, "\\u%04x", (unsigned)*c);
    else
      fprintf(stream, *c == '"' || *c == '\\' ? "\\%c" : "%c", *c);
  fputc('"', stream);
}

/* JSON has no word for what is not a finite number. */
void bench_json_number(FILE *stream, const char *name, double number) {
  if (isfinite(number))
    fprintf(stream, ",\"%s\":%.9g", name, number);
  else
    fprintf(stream, ",\"%s\":null", name);
}

void bench_json_whole(FILE *stream, const char *name, size_t number) {
  fprintf(stream, ",\"%s\":%zu", name, number);
}

/* What was run: as asked for, and as the plan decided. */
static void put_setting(FILE *stream, const struct bench_row *row) {
  const struct bench_case *test = row->test;
  onebit_plan_info_t info = {.size = sizeof info};
  onebit_plan_get_info(row->way->plan, &info);
  char name[48];
  bench_way_name(row->way, name);
  bench_json_whole(stream, "bytes", test->send_count * sizeof(float));
  bench_json_whole(stream, "ranks", (size_t)test->team->size);
  bench_json_whole(stream, "hosts", (size_t)info.hosts);
  bench_json_whole(stream, "ranks_per_host", (size_t)info.ranks_per_host);
  bench_json_text(stream, "requested", name);
  bench_json_text(stream, "schedule", bench_schedule_name(info.schedule));
  bench_json_text(stream, "wire", bench_wire_name(info.wire));
  bench_json_text(stream, "dtype", bench_dtype_name(test->options->dtype));
  bench_json_text(stream, "codec", info.codec);
  bench_json_number(stream, "chunk", info.chunk_size ? (double)info.chunk_size : NAN);
  bench_json_whole(stream, "chunks", info.chunks);
  bench_json_text(stream, "transport", info.transport);
}

static void put_times(FILE *stream, const struct bench_row *row) {
  const struct bench_statistics *time = &row->way->time;
  bench_json_whole(stream, "iterations", row->iterations);
  bench_json_number(stream, "average_us", 1e6 * time->mean);
  bench_json_number(stream, "median_us", 1e6 * time->median);
  bench_json_number(stream, "minimum_us", 1e6 * time->minimum);
  bench_json_number(stream, "p90_us", 1e6 * time->percentile90);
  bench_json_number(stream, "p99_us", 1e6 * time->percentile99);
  bench_json_number(stream, "maximum_us", 1e6 * time->maximum);
  bench_json_number(stream, "wire_bytes", row->way->wire_bytes);
  bench_json_number(stream, "link_bytes", row->test->options->link ? row->way->link_bytes : NAN);
  bench_json_number(stream, "algbw", bench_algbw(row->test, time->median));
  bench_json_number(stream, "busbw", bench_busbw(row->test, time->median));
  bench_json_number(stream, "relative_error", row->way->error);
}

/* Null where there is nothing dense. */
static void put_dense(FILE *stream, const struct bench_row *row) {
  const struct bench_way *dense = row->dense;
  struct bench_statistics none = {.median = NAN, .minimum = NAN, .maximum = NAN};
  const struct bench_statistics *time = dense ? &dense->time : &none;
  bench_json_text(stream, "dense_algorithm", dense ? dense->algorithm->name : NULL);
  bench_json_number(stream, "dense_median_us", 1e6 * time->median);
  bench_json_number(stream, "dense_minimum_us", 1e6 * time->minimum);
  bench_json_number(stream, "dense_maximum_us", 1e6 * time->maximum);
  bench_json_number(stream, "speedup", time->median / row->way->time.median);
}

static void put_overlap(FILE *stream, const struct bench_row *row) {
  const struct bench_overlap *own = row->overlap, *dense = row->dense_overlap;
  bench_json_number(stream, "overall_us", 1e6 * own->overall.median);
  bench_json_number(stream, "compute_us", 1e6 * own->compute.median);
  bench_json_number(stream, "pure_us", 1e6 * own->pure.median);
  bench_json_number(stream, "overlap", own->percent);
  bench_json_whole(stream, "tests", own->tests);
  bench_json_number(stream, "dense_overall_us", dense ? 1e6 * dense->overall.median : NAN);
  bench_json_number(stream, "dense_compute_us", dense ? 1e6 * dense->compute.median : NAN);
  bench_json_number(stream, "dense_overlap", dense ? dense->percent : NAN);
}

void bench_json_row(FILE *stream, const struct bench_row *row) {
  const struct bench_collective *collective = row->test->collective;
  fprintf(stream, "{\"benchmark\":\"%s\"",
          row->overlap ? collective->nonblocking_name : collective->name);
  put_setting(stream, row);
  put_times(stream, row);
  put_dense(stream, row);
  if (row->overlap)
    put_overlap(stream, row);
  if (row->test->options->compare_count)
    bench_json_number(stream, "of_best", row->of_best);
  if (row->test->options->check)
    fprintf(stream, ",\"right\":%s", row->way->right ? "true" : "false");
  fputs("}\n", stream);
}
