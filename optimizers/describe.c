/* The statistics of an optimizer in one line. */
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/json.h"
#include "onebit/statistics.h"

struct line {
  char *buffer;
  size_t size, length;
};

static void describe_put(struct line *line, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static void describe_put(struct line *line, const char *format, ...) {
  bool fits = line->length < line->size;
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(fits ? line->buffer + line->length : NULL,
                         fits ? line->size - line->length : 0, format, arguments);
  va_end(arguments);
  line->length += length > 0 ? (size_t)length : 0;
}

/* --- JSON */

static void put_number(struct line *line, const char *name, double number) {
  char text[OB_JSON_NUMBER];
  describe_put(line, ",\"%s\":%s", name, ob_json_number(text, number));
}

static void put_whole(struct line *line, const char *name, uint64_t number) {
  describe_put(line, ",\"%s\":%llu", name, (unsigned long long)number);
}

static void put_state(struct line *line, const onebit_optimizer_info_t *info) {
  put_whole(line, "steps", info->steps);
  put_whole(line, "skipped", info->skipped);
  put_whole(line, "freeze_step", info->freeze_step);
  describe_put(line, ",\"synchronized\":%s", info->synchronized ? "true" : "false");
  put_whole(line, "dense_exchanges", info->exchanges[0]);
  put_whole(line, "bits_exchanges", info->exchanges[1]);
  put_whole(line, "local_steps", info->exchanges[2]);
  put_number(line, "variance_ratio", info->variance_ratio);
  put_number(line, "momentum_norm", info->momentum_norm);
  put_number(line, "residual_norm", info->residual_norm);
  put_number(line, "loss_scale", info->loss_scale);
  put_number(line, "gradient_norm", info->gradient_norm);
  put_whole(line, "warmup_bytes", info->warmup_bytes);
  put_whole(line, "compressed_bytes", info->compressed_bytes);
  put_whole(line, "memory_bytes", info->memory_bytes);
  put_number(line, "bits", info->bits);
  put_whole(line, "moves", info->moves);
}

static void put_json(struct line *line, const onebit_optimizer_statistics_t *statistics) {
  describe_put(line, "{\"name\":\"%s\",\"stage\":\"%s\"", statistics->info.name,
               statistics->info.stage == ONEBIT_STAGE_COMPRESSED ? "compressed" : "warmup");
  put_state(line, &statistics->info);
  put_number(line, "residual_ratio", statistics->residual_ratio);
  put_whole(line, "dense_bytes", statistics->dense_bytes);
  put_whole(line, "bits_bytes", statistics->bits_bytes);
  put_number(line, "seconds", statistics->seconds);
  put_number(line, "compress_seconds", statistics->compress_seconds);
  put_number(line, "network_seconds", statistics->network_seconds);
  put_number(line, "update_seconds", statistics->update_seconds);
  describe_put(line, "}");
}

/* --- Text */

static void put_bytes(struct line *line, uint64_t bytes, const char *what) {
  static const char *const buckets[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  size_t bucket = 0;
  double number = (double)bytes;
  for (; number >= 1000 && bucket + 1 < sizeof buckets / sizeof buckets[0]; bucket++)
    number /= 1000;
  describe_put(line, "%.*f %s %s", bucket ? 1 : 0, number, buckets[bucket], what);
}

static void put_stage(struct line *line, const onebit_optimizer_info_t *info) {
  describe_put(line, "%s: %llu steps", info->name, (unsigned long long)info->steps);
  if (info->skipped)
    describe_put(line, " (%llu skipped)", (unsigned long long)info->skipped);
  if (info->stage == ONEBIT_STAGE_WARMUP)
    describe_put(line, ", in warm-up");
  else
    describe_put(line, ", compressed since step %llu", (unsigned long long)info->freeze_step + 1);
  if (info->stage == ONEBIT_STAGE_WARMUP && info->variance_ratio > 0)
    describe_put(line, ", variance ratio %.3f", info->variance_ratio);
  describe_put(line, "; exchanges: %llu in the warm-up, %llu in bits",
               (unsigned long long)info->exchanges[0], (unsigned long long)info->exchanges[1]);
  if (info->exchanges[2])
    describe_put(line, ", %llu left out", (unsigned long long)info->exchanges[2]);
}

static double percent(double part, double whole) { return whole > 0 ? 100 * part / whole : 0; }

static void describe_put_text(struct line *line, const onebit_optimizer_statistics_t *statistics) {
  const onebit_optimizer_info_t *info = &statistics->info;
  put_stage(line, info);
  describe_put(line, "; momentum %.4g, residual %.2f of the signal; sent ", info->momentum_norm,
               statistics->residual_ratio);
  put_bytes(line, statistics->dense_bytes, "in the warm-up, ");
  put_bytes(line, statistics->bits_bytes, "in bits; ");
  describe_put(line, "%.3f s: %.0f%% work on messages, %.0f%% network, %.0f%% update",
               statistics->seconds, percent(statistics->compress_seconds, statistics->seconds),
               percent(statistics->network_seconds, statistics->seconds),
               percent(statistics->update_seconds, statistics->seconds));
  if (info->loss_scale != 1)
    describe_put(line, "; loss scale %.6g", info->loss_scale);
  if (info->gradient_norm > 0)
    describe_put(line, "; gradient norm %.4g", info->gradient_norm);
  if (info->bits > 1 || info->moves)
    describe_put(line, "; %.3g bits an element, changed %llu times", info->bits,
                 (unsigned long long)info->moves);
  describe_put(line, "; ");
  put_bytes(line, info->memory_bytes, "of memory");
}

onebit_status_t onebit_optimizer_describe(onebit_optimizer_t optimizer, onebit_format_t format,
                                          char *buffer, size_t size, size_t *length) {
  OB_CALL_SCOPE;
  onebit_optimizer_statistics_t statistics = {.size = sizeof statistics};
  struct line line = {.buffer = buffer, .size = size};
  if (format != ONEBIT_FORMAT_TEXT && format != ONEBIT_FORMAT_JSON)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "format is %d, which is no onebit_format_t",
                    (int)format);
  if (!buffer && size)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "buffer is NULL, and size %zu", size);
  OB_TRY(onebit_optimizer_get_statistics(optimizer, &statistics));
  if (format == ONEBIT_FORMAT_JSON)
    put_json(&line, &statistics);
  else
    describe_put_text(&line, &statistics);
  if (length)
    *length = line.length;
  return ONEBIT_OK;
}
