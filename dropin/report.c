/* Prints the line at the start and the report, where ONEBIT_REPORT wants them. */
#define _POSIX_C_SOURCE 200809L
#include "dropin/report.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/file.h"
#include "base/knobs.h"
#include "dropin/elements.h"
#include "dropin/preload.h"

const char *ob_report_dtype(onebit_dtype_t dtype) {
  return dtype == ONEBIT_FLOAT32    ? "float"
         : dtype == OB_DOUBLE       ? "double"
         : dtype == ONEBIT_BFLOAT16 ? "bfloat16"
                                    : "half";
}

const char *ob_report_operation(onebit_operation_t operation) {
  return operation == ONEBIT_ALLREDUCE   ? "allreduce"
         : operation == ONEBIT_ALLGATHER ? "allgather"
                                         : "reduce-scatter";
}

const char *ob_report_bits(int bits) {
  return bits == 1   ? "one bit"
         : bits == 2 ? "2 bits"
         : bits == 4 ? "4 bits"
         : bits == 8 ? "8 bits"
                     : "float32";
}

double ob_report_factor(const struct ob_report *report) {
  return report->seconds > 0 ? fmax(0, 1 + report->seconds_saved / report->seconds) : 1;
}

void ob_report_passed(const struct ob_record *record, uint64_t passed[OB_REASON_COUNT]) {
  for (size_t reason = 0; reason < OB_REASON_COUNT; reason++)
    passed[reason] = atomic_load(&record->dense[reason]);
}

static bool is_off(void) {
  const char *text = ob_knob_text(OB_KNOB_REPORT);
  return text && !strcmp(text, "0");
}

/* The file for JSON, or NULL. */
static const char *json_path(void) {
  const char *text = ob_knob_text(OB_KNOB_REPORT);
  return text && strcmp(text, "0") != 0 && strcmp(text, "1") != 0 ? text : NULL;
}

static void print_plan(int size, const char *over, const char *sums) {
  const struct ob_rules *rules = &ob_preload.rules;
  fprintf(stderr, "onebit %s: preloaded, %d ranks over %s. ", onebit_version(), size, over);
  if (!ob_rules_ask(rules))
    fprintf(stderr, "Watches the sums, and changes nothing");
  else if (rules->gradients)
    fprintf(stderr, "Compresses every %s from %zu KiB on, in %s%s (--gradients)", sums,
            rules->min_bytes >> 10, ob_report_bits(rules->bits.max),
            rules->bits.min == rules->bits.max ? "" : " or fewer");
  if (rules->rules)
    fprintf(stderr, "%s %zu rules of ONEBIT_RULES",
            !ob_rules_ask(rules) ? ", by"
            : rules->gradients   ? ", but for"
                                 : "Compresses what is named by",
            rules->rules);
  fprintf(stderr, ".\n");
}

void ob_report_unseen(const char *why) {
  if (!is_off() || ob_preload.required)
    fprintf(stderr, "onebit %s: nothing is compressed: %s\n", onebit_version(), why);
}

/* A refusal is printed even where no report is wanted. */
void ob_report_start(int size, const char *over, const char *sums) {
  if (ob_preload.refused)
    fprintf(stderr, "onebit %s: nothing is compressed: %s\n", onebit_version(), ob_preload.refused);
  else if (!is_off() || ob_preload.required)
    print_plan(size, over, sums);
}

double ob_report_max_residual_ratio(void) {
  double max = 0;
  for (struct ob_record *record = ob_counters_first(); record; record = record->next)
    if (atomic_load(&record->max_residual_ratio) > max)
      max = atomic_load(&record->max_residual_ratio);
  return max;
}

static void write_json(const char *path, const struct ob_report *report) {
  FILE *file = NULL;
  char text[OB_INPUT_REASON];
  int code = ob_output_open(&file, path, false);
  if (code == 0) {
    ob_report_json(file, report);
    code = ferror(file) ? EIO : 0;
    code = fclose(file) == 0 ? code : errno;
  }
  if (code != 0)
    fprintf(stderr, "onebit: ONEBIT_REPORT=%s: %s\n", path, ob_input_reason(code, text));
}

void ob_report_print(const struct ob_report *report) {
  if (json_path())
    write_json(json_path(), report);
  else if (!is_off())
    ob_report_text(stderr, report);
  if (ob_preload.required && !report->compressed)
    fprintf(stderr, "onebit: nothing was compressed, which is required by ONEBIT_REQUIRE=1: "
                    "the run fails\n");
}
