/* Prints rows as text, JSON and CSV. */
#include "bench/bench.h"

#include <math.h>
#include <stdarg.h>
#include <string.h>

static void print_line(struct bench_table *table, bench_fields *fields, const void *row) {
  table->fields = 0;
  table->json = (struct ob_json){.file = stdout};
  if (table->format == BENCH_JSON)
    ob_json_begin(&table->json, NULL, '{');
  bench_text(table, "benchmark", NULL, 0, table->benchmark);
  if (table->device) {
    bench_text(table, "device", NULL, 0, table->device);
    bench_bool(table, "emulated", &table->emulated);
  }
  fields(table, row);
  if (table->format == BENCH_JSON)
    ob_json_end(&table->json, '}');
  printf("\n");
}

void bench_print_heads(struct bench_table *table, bench_fields *fields, const void *row) {
  table->heads = !table->headed && table->format != BENCH_JSON;
  if (table->heads)
    print_line(table, fields, row);
  table->heads = false;
  table->headed = true;
  fflush(stdout);
}

void bench_print_row(struct bench_table *table, bench_fields *fields, const void *row) {
  bench_print_heads(table, fields, row);
  print_line(table, fields, row);
  fflush(stdout);
}

void bench_note(struct bench_table *table, const char *format, ...) {
  if (table->format != BENCH_TEXT)
    return;
  va_list arguments;
  va_start(arguments, format);
  printf("# ");
  vprintf(format, arguments);
  printf("\n");
  fflush(stdout);
  va_end(arguments);
  table->headed = false;
}

/* --- Fields */

/* Puts text. Columns to the left are two spaces apart from the one before them. The heads are a
 * comment. */
static void print_put_text(struct bench_table *table, int width, const char *text) {
  const char *before = table->fields == 0 && table->heads ? "# " : "";
  if (table->fields > 0 && width < 0)
    printf("  ");
  printf("%s%*s", before, width + (*before ? 2 : 0), text);
  table->fields++;
}

/* Puts a value of CSV, quoted where a comma or a quote is in it. */
static void put_csv(struct bench_table *table, const char *text) {
  bool quoted = strpbrk(text, ",\"") != NULL;
  printf(table->fields++ ? "," : "");
  if (quoted)
    printf("\"");
  for (const char *c = text; *c; c++)
    printf(*c == '"' ? "\"\"" : "%c", *c);
  if (quoted)
    printf("\"");
}

/* True if the value itself is to be printed; else it is not of this format, or its head is
 * printed. */
static bool wants_value(struct bench_table *table, const char *key, const char *head, int width) {
  if (!(table->format == BENCH_TEXT ? head : key))
    return false;
  if (table->heads && table->format == BENCH_TEXT)
    print_put_text(table, width, head);
  else if (table->heads)
    put_csv(table, key);
  return !table->heads;
}

void bench_text(struct bench_table *table, const char *key, const char *head, int width,
                const char *text) {
  if (!wants_value(table, key, head, width))
    return;
  if (table->format == BENCH_JSON)
    ob_json_string(&table->json, key, text);
  else if (table->format == BENCH_CSV)
    put_csv(table, text ? text : "");
  else
    print_put_text(table, width, text ? text : "-");
}

void bench_number(struct bench_table *table, const char *key, const char *head, int width,
                  int digits, double number) {
  char text[64];
  bool whole = number >= 0 && number < 0x1p53 && number == floor(number);
  if (!wants_value(table, key, head, width))
    return;
  if (table->format == BENCH_JSON && whole)
    ob_json_integer(&table->json, key, (uint64_t)number);
  else if (table->format == BENCH_JSON)
    ob_json_real(&table->json, key, number);
  else if (table->format == BENCH_CSV && whole)
    snprintf(text, sizeof text, "%.0f", number), put_csv(table, text);
  else if (table->format == BENCH_CSV)
    put_csv(table, isfinite(number) ? ob_json_number(text, number) : "");
  else {
    snprintf(text, sizeof text, digits < 0 ? "%.*g" : "%.*f", digits < 0 ? -digits : digits,
             number);
    print_put_text(table, width, isnan(number) ? "-" : text);
  }
}

void bench_time(struct bench_table *table, const char *key, const char *head, int width, int digits,
                double seconds) {
  bool milliseconds = table->format == BENCH_TEXT && head && strstr(head, "(ms)");
  bench_number(table, key, head, width, digits, (milliseconds ? 1e3 : 1e6) * seconds);
}

void bench_bool(struct bench_table *table, const char *key, const bool *value) {
  if (!wants_value(table, key, NULL, 0))
    return;
  if (table->format == BENCH_CSV)
    put_csv(table, !value ? "" : *value ? "true" : "false");
  else if (value)
    ob_json_bool(&table->json, key, *value);
  else
    ob_json_string(&table->json, key, NULL);
}

void bench_counts_fields(struct bench_table *table, const struct bench_counts *counts, bool text) {
  double none = counts->known ? 0 : NAN;
  bench_number(table, "kernels", text ? "Kernels" : NULL, 9, 0, none + (double)counts->kernels);
  bench_number(table, "copies", text ? "Copies" : NULL, 8, 0, none + (double)counts->copies);
  bench_number(table, "host_synchronisations", text ? "Host waits" : NULL, 12, 0,
               none + (double)counts->synchronisations);
}
