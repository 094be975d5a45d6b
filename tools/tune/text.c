/* Writes values with their units, and rows of tables and of JSON. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/tune/tune.h"

static int compare_doubles(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

double tune_median(double *values, int count) {
  if (count < 1)
    return 0;
  qsort(values, (size_t)count, sizeof *values, compare_doubles);
  return (values[(count - 1) / 2] + values[count / 2]) / 2;
}

/* --- Values with units -------------------------------------------------------------------------*/

/* Each row is a range of values that begins at `from`. Values of this range are divided by `size`
 * and written by `format`. */
static const struct {
  enum tune_unit unit;
  double from, size;
  const char *format;
} formats[] = {
    {TUNE_BYTES, -INFINITY, 1, "%.0f B"},
    {TUNE_BYTES, 0x1p10, 0x1p10, "%.1f KiB"},
    {TUNE_BYTES, 0x1p20, 0x1p20, "%.1f MiB"},
    {TUNE_BYTES, 0x1p30, 0x1p30, "%.1f GiB"},
    {TUNE_BYTES, 0x1p40, 0x1p40, "%.1f TiB"},
    {TUNE_TIME, -INFINITY, 1e-6, "%.1f us"},
    {TUNE_TIME, 9.95e-6, 1e-6, "%.0f us"},
    {TUNE_TIME, 0.9995e-3, 1e-3, "%.3g ms"},
    {TUNE_TIME, 0.9995, 1, "%.2f s"},
    {TUNE_DURATION, -INFINITY, 1, "%.3g s"},
    {TUNE_DURATION, 120, 60, "%.3g min"},
    {TUNE_DURATION, 7200, 3600, "%.3g h"},
    {TUNE_DURATION, 172800, 86400, "%.3g days"},
    {TUNE_RATE, -INFINITY, 1e6 / 8, "%.3g Mbit/s"},
    {TUNE_RATE, 1e9 / 8, 1e9 / 8, "%.3g Gbit/s"},
    {TUNE_RATE, 1e12 / 8, 1e12 / 8, "%.3g Tbit/s"},
    {TUNE_COUNT, -INFINITY, 1, "%.0f"},
    {TUNE_RATIO, -INFINITY, 1, "%.2f"},
    {TUNE_TIMES, -INFINITY, 1, "%.2fx"},
};

const char *tune_format_text(enum tune_unit unit, double value, char text[TUNE_TEXT]) {
  size_t row = 0;
  if (isnan(value))
    return "-";
  if (unit == TUNE_RATE && (isinf(value) || value == 0))
    return value == 0 ? "none: never" : "none: always";
  for (size_t k = 0; k < sizeof formats / sizeof formats[0]; k++)
    if (formats[k].unit == unit && value >= formats[k].from)
      row = k;
  const double count = value / formats[row].size;
  const char *format = formats[row].format;
  if (unit == TUNE_BYTES && count == floor(count)) /* writes "64 KiB" instead of "64.0 KiB" */
    snprintf(text, TUNE_TEXT, "%.0f%s", count, strchr(format, ' '));
  else
    snprintf(text, TUNE_TEXT, format, count);
  return text;
}

/* --- Rows --------------------------------------------------------------------------------------*/

void tune_print_headings(const struct tune_column *columns, const char *end) {
  for (; columns->width || columns->key; columns++)
    if (columns->width)
      printf("%*s", columns->width, columns->heading);
  printf("%s", end);
}

void tune_print_row(const struct tune_column *columns, const char *const *texts,
                    const double *values, const char *end) {
  for (; columns->width || columns->key; columns++) {
    const char *text = columns->unit == TUNE_NAME ? *texts++ : TUNE_WORDS(columns->unit, *values++);
    if (columns->width)
      printf("%*s", columns->width, text);
  }
  printf("%s", end);
}

void tune_write_row(struct ob_json *json, const struct tune_column *columns,
                    const char *const *texts, const double *values) {
  ob_json_begin(json, NULL, '{');
  for (; columns->width || columns->key; columns++)
    if (columns->unit == TUNE_NAME)
      ob_json_put_string(json, columns->key, *texts++);
    else if (columns->key)
      ob_json_real(json, columns->key, *values++ * (columns->unit == TUNE_RATE ? 8 : 1));
    else
      values++;
  ob_json_end(json, '}');
}
