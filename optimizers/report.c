/* Writes the statistics of an optimizer: as one line of text or JSON, and during training as rows
 * of a CSV file. */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/knobs.h"
#include "base/lock.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/process.h"
#include "optimizers/optimizer.h"

struct line {
  char *buffer;
  size_t size, length;
};

static void append_format(struct line *line, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static void append_format(struct line *line, const char *format, ...) {
  bool fits = line->length < line->size;
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(fits ? line->buffer + line->length : NULL,
                         fits ? line->size - line->length : 0, format, arguments);
  va_end(arguments);
  line->length += length > 0 ? (size_t)length : 0;
}

/* --- JSON */

static void append_json_number(struct line *line, const char *name, double number) {
  char text[OB_JSON_NUMBER];
  append_format(line, ",\"%s\":%s", name, ob_json_number(text, number));
}

static void append_json_whole(struct line *line, const char *name, uint64_t number) {
  append_format(line, ",\"%s\":%llu", name, (unsigned long long)number);
}

static void append_json_state(struct line *line, const onebit_optimizer_info_t *info) {
  append_json_whole(line, "steps", info->steps);
  append_json_whole(line, "skipped", info->skipped);
  append_json_whole(line, "freeze_step", info->freeze_step);
  append_format(line, ",\"synchronized\":%s", info->synchronized ? "true" : "false");
  append_json_whole(line, "dense_exchanges", info->exchanges[0]);
  append_json_whole(line, "bits_exchanges", info->exchanges[1]);
  append_json_whole(line, "local_steps", info->exchanges[2]);
  append_json_number(line, "variance_ratio", info->variance_ratio);
  append_json_number(line, "momentum_norm", info->momentum_norm);
  append_json_number(line, "residual_norm", info->residual_norm);
  append_json_number(line, "loss_scale", info->loss_scale);
  append_json_number(line, "gradient_norm", info->gradient_norm);
  append_json_whole(line, "warmup_bytes", info->warmup_bytes);
  append_json_whole(line, "compressed_bytes", info->compressed_bytes);
  append_json_whole(line, "memory_bytes", info->memory_bytes);
  append_json_number(line, "bits", info->bits);
  append_json_whole(line, "moves", info->moves);
}

static void append_json(struct line *line, const onebit_optimizer_statistics_t *statistics) {
  append_format(line, "{\"name\":\"%s\",\"stage\":\"%s\"", statistics->info.name,
                statistics->info.stage == ONEBIT_STAGE_COMPRESSED ? "compressed" : "warmup");
  append_json_state(line, &statistics->info);
  append_json_number(line, "residual_ratio", statistics->residual_ratio);
  append_json_whole(line, "dense_bytes", statistics->dense_bytes);
  append_json_whole(line, "bits_bytes", statistics->bits_bytes);
  append_json_number(line, "seconds", statistics->seconds);
  append_json_number(line, "compress_seconds", statistics->compress_seconds);
  append_json_number(line, "network_seconds", statistics->network_seconds);
  append_json_number(line, "update_seconds", statistics->update_seconds);
  append_format(line, "}");
}

/* --- Text */

static void append_bytes(struct line *line, uint64_t bytes, const char *what) {
  static const char *const buckets[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  size_t bucket = 0;
  double number = (double)bytes;
  for (; number >= 1000 && bucket + 1 < sizeof buckets / sizeof buckets[0]; bucket++)
    number /= 1000;
  append_format(line, "%.*f %s %s", bucket ? 1 : 0, number, buckets[bucket], what);
}

static void append_stage(struct line *line, const onebit_optimizer_info_t *info) {
  append_format(line, "%s: %llu steps", info->name, (unsigned long long)info->steps);
  if (info->skipped)
    append_format(line, " (%llu skipped)", (unsigned long long)info->skipped);
  if (info->stage == ONEBIT_STAGE_WARMUP)
    append_format(line, ", in warm-up");
  else if (info->freeze_step)
    append_format(line, ", compressed since step %llu", (unsigned long long)info->freeze_step + 1);
  else
    append_format(line, ", compressed without a warm-up");
  if (info->stage == ONEBIT_STAGE_WARMUP && info->variance_ratio > 0)
    append_format(line, ", variance ratio %.3f", info->variance_ratio);
  append_format(line, "; exchanges: %llu in the warm-up, %llu compressed",
                (unsigned long long)info->exchanges[0], (unsigned long long)info->exchanges[1]);
  if (info->exchanges[2])
    append_format(line, ", %llu left out", (unsigned long long)info->exchanges[2]);
}

static double percent_of(double part, double whole) { return whole > 0 ? 100 * part / whole : 0; }

static void append_text(struct line *line, const onebit_optimizer_statistics_t *statistics) {
  const onebit_optimizer_info_t *info = &statistics->info;
  append_stage(line, info);
  append_format(line, "; momentum %.4g, residual %.2f of the signal; this process sent ",
                info->momentum_norm, statistics->residual_ratio);
  append_bytes(line, statistics->dense_bytes, "in the warm-up, ");
  append_bytes(line, statistics->bits_bytes, "compressed; ");
  append_format(line,
                "%.3f s of exchanges and updates: %.0f%% work on messages, %.0f%% network (with "
                "waiting for other ranks), %.0f%% update",
                statistics->seconds, percent_of(statistics->compress_seconds, statistics->seconds),
                percent_of(statistics->network_seconds, statistics->seconds),
                percent_of(statistics->update_seconds, statistics->seconds));
  if (info->loss_scale != 1)
    append_format(line, "; loss scale %.6g", info->loss_scale);
  if (info->gradient_norm > 0)
    append_format(line, "; gradient norm %.4g", info->gradient_norm);
  if (info->bits > 1 || info->moves)
    append_format(line, "; %.3g bits per element, changed %llu times", info->bits,
                  (unsigned long long)info->moves);
  append_format(line, "; ");
  append_bytes(line, info->memory_bytes, "of memory");
}

onebit_status_t onebit_optimizer_describe(onebit_optimizer_t optimizer, onebit_format_t format,
                                          char *buffer, size_t size, size_t *length) {
  OB_CALL_SCOPE;
  onebit_optimizer_statistics_t statistics = {.size = sizeof statistics};
  struct line line = {.buffer = buffer, .size = size};
  if (format != ONEBIT_FORMAT_TEXT && format != ONEBIT_FORMAT_JSON)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "format is %d, which is not a value of onebit_format_t",
                    (int)format);
  if (!buffer && size)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "buffer is NULL, but size is %zu", size);
  OB_TRY(onebit_optimizer_get_statistics(optimizer, &statistics));
  if (format == ONEBIT_FORMAT_JSON)
    append_json(&line, &statistics);
  else
    append_text(&line, &statistics);
  if (length)
    *length = line.length;
  return ONEBIT_OK;
}

/* --- Training metrics --------------------------------------------------------------------------*/

enum { DEFAULT_EVERY = 10, PATH = 1024 };

struct ob_metrics {
  FILE *file;
  uint64_t every, calls;
  double row_began; /* the time when the latest row was written */
  double elements;
  onebit_optimizer_statistics_t before; /* the statistics in the latest row */
};

/* --- Rows */

enum { COLUMNS = 16 };
static const char *const names[COLUMNS] = {
    "seconds",        "library_seconds", "compress_seconds", "network_seconds",
    "update_seconds", "bytes",           "compression",      "bits",
    "residual_ratio", "residual_norm",   "momentum_norm",    "gradient_norm",
    "learning_rate",  "loss_scale",      "skipped",          "compressed"};

/* Fills in a row. Seconds and bytes are means over the steps since the latest row. */
static void metrics_fill_row(const struct onebit_optimizer *optimizer,
                             const struct ob_metrics *metrics,
                             const onebit_optimizer_statistics_t *all, float rate,
                             double row[COLUMNS]) {
  const onebit_optimizer_statistics_t *before = &metrics->before;
  const double steps = (double)metrics->every, ranks = optimizer->comm->size;
  const double sent =
      (double)(all->dense_bytes + all->bits_bytes - before->dense_bytes - before->bits_bytes);
  /* The bytes that a ring allreduce in float32 sends. */
  const double dense = 2 * (ranks - 1) / ranks * 4 * metrics->elements;
  const double values[COLUMNS] = {(ob_seconds() - metrics->row_began) / steps,
                                  (all->seconds - before->seconds) / steps,
                                  (all->compress_seconds - before->compress_seconds) / steps,
                                  (all->network_seconds - before->network_seconds) / steps,
                                  (all->update_seconds - before->update_seconds) / steps,
                                  sent / steps,
                                  sent > 0 ? dense * steps / sent : (double)NAN,
                                  all->info.bits,
                                  all->residual_ratio,
                                  all->info.residual_norm,
                                  all->info.momentum_norm,
                                  all->info.gradient_norm,
                                  optimizer->rate ? (double)NAN : (double)rate,
                                  all->info.loss_scale,
                                  (double)all->info.skipped,
                                  all->info.stage == ONEBIT_STAGE_COMPRESSED};
  memcpy(row, values, sizeof values);
}

static bool write_csv(FILE *file, uint64_t step, const double row[COLUMNS]) {
  char text[OB_JSON_NUMBER];
  fprintf(file, "%" PRIu64, step);
  for (size_t k = 0; k < COLUMNS; k++)
    fprintf(file, ",%s", isfinite(row[k]) ? ob_json_number(text, row[k]) : "");
  fputc('\n', file);
  return fflush(file) == 0 && !ferror(file);
}

static bool write_heading(const struct ob_metrics *metrics) {
  fputs("step", metrics->file);
  for (size_t k = 0; k < COLUMNS; k++)
    fprintf(metrics->file, ",%s", names[k]);
  fputc('\n', metrics->file);
  return fflush(metrics->file) == 0;
}

void ob_metrics_add_step(onebit_optimizer_t optimizer, float learning_rate,
                         onebit_status_t status) {
  struct ob_metrics *metrics = optimizer->metrics;
  onebit_optimizer_statistics_t all = {.size = sizeof all};
  double row[COLUMNS];
  if (!metrics || (status < ONEBIT_OK && status != ONEBIT_SKIPPED))
    return;
  if (metrics->calls++ == 0) /* the time begins with the first step */
    metrics->row_began = ob_seconds() - optimizer->times.all;
  if (metrics->calls % metrics->every != 0)
    return;
  const char *why = NULL;
  if (onebit_optimizer_get_statistics(optimizer, &all) != ONEBIT_OK) {
    why = onebit_last_error();
  } else {
    metrics_fill_row(optimizer, metrics, &all, learning_rate, row);
    why = write_csv(metrics->file, all.info.steps, row) ? NULL : strerror(errno);
    metrics->before = all;
    metrics->row_began = ob_seconds();
  }
  if (!why)
    return;
  ob_log(OB_LOG_WARN, optimizer->comm->rank,
         "ONEBIT_METRICS: no more rows are written from step %" PRIu64 " on: %s", optimizer->steps,
         why);
  ob_metrics_close(optimizer);
}

/* --- The file */

/* Returns how many times this process has used the file's name, including this time. From the
 * second time on, this number is added to the name. */
static unsigned count_name_uses(const char *path) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static struct {
    uint64_t name;
    unsigned times;
  } known[256];
  const uint64_t name = ob_hash(OB_HASH_START, path, strlen(path));
  size_t k = 0;
  OB_LOCKED(&lock);
  while (k < sizeof known / sizeof known[0] - 1 && known[k].times && known[k].name != name)
    k++;
  known[k].name = name;
  return ++known[k].times;
}

/* Sets the path of the file: run.csv, then run-2.csv and so on. */
static bool choose_path(const char *pattern, int rank, char path[PATH]) {
  char first[PATH];
  if (!ob_expand_path(pattern, rank, first, sizeof first))
    return false;
  const unsigned times = count_name_uses(first);
  const char *slash = strrchr(first, '/'), *dot = strrchr(first, '.');
  const size_t stem = dot && dot > slash ? (size_t)(dot - first) : strlen(first);
  int length = times > 1 ? snprintf(path, PATH, "%.*s-%u%s", (int)stem, first, times, first + stem)
                         : snprintf(path, PATH, "%s", first);
  return length < PATH;
}

static onebit_status_t metrics_open_file(const char *pattern, int rank,
                                         struct ob_metrics *metrics) {
  char path[PATH] = "", reason[OB_INPUT_REASON];
  int code =
      choose_path(pattern, rank, path) ? ob_output_open(&metrics->file, path, false) : ENAMETOOLONG;
  if (code == 0 && !write_heading(metrics))
    code = errno;
  if (code == 0)
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_FILE, "%s=%.200s: %s", ob_knob_label(OB_KNOB_METRICS), pattern,
                  ob_input_reason(code, reason));
}

onebit_status_t ob_metrics_open(onebit_optimizer_t optimizer) {
  const char *pattern = ob_knob_text(OB_KNOB_METRICS);
  int every;
  OB_TRY(ob_knob_number(OB_KNOB_METRICS_EVERY, 1, INT_MAX, DEFAULT_EVERY, &every));
  if (!pattern || (optimizer->comm->rank != 0 && !strstr(pattern, "%r")))
    return ONEBIT_OK;
  struct ob_metrics *metrics = ob_allocate(1, sizeof *metrics);
  if (!metrics)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for ONEBIT_METRICS");
  metrics->every = (uint64_t)every;
  for (size_t t = 0; t < optimizer->list_count; t++)
    metrics->elements += (double)optimizer->list[t].count;
  optimizer->metrics = metrics;
  return metrics_open_file(pattern, optimizer->comm->rank, metrics);
}

void ob_metrics_close(onebit_optimizer_t optimizer) {
  if (optimizer->metrics && optimizer->metrics->file)
    fclose(optimizer->metrics->file);
  ob_release(optimizer->metrics);
  optimizer->metrics = NULL;
}
