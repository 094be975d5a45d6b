/* Who is told what, and where. */
#include "dropin/report.h"

#include <errno.h>
#include <string.h>

#include "base/knobs.h"
#include "dropin/preload.h"

const char *ob_report_dtype(onebit_dtype_t dtype) {
  return dtype == ONEBIT_FLOAT32 ? "float" : dtype == ONEBIT_BFLOAT16 ? "bfloat16" : "half";
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
  return report->seconds > 0 ? (report->seconds + report->seconds_saved) / report->seconds : 1;
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

static void print_plan(int size, const char *over, const char *call, bool recognises) {
  const struct ob_bits bits = ob_preload.rules.bits;
  const char *rules = ob_knob_text(OB_KNOB_RULES);
  fprintf(stderr,
          "onebit %s: preloaded, %d ranks over %s; results of compressed sums are approximate. "
          "Compresses sums of floats to %s%s an element by %s %s",
          onebit_version(), size, over, ob_report_bits(bits.max),
          bits.min == bits.max ? "" : " or fewer", call,
          recognises ? "that are like a gradient for some tens of steps, " : "");
  if (rules)
    fprintf(stderr, "as %s says (%zu rules, else from %zu bytes on)", rules, ob_preload.rules.rules,
            ob_preload.rules.min_bytes);
  else
    fprintf(stderr, "from %zu bytes on", ob_preload.rules.min_bytes);
  fprintf(stderr, ", once a step's calls have repeated %u times\n", ob_preload.rules.warmup);
}

/* What is refused is said even where no report is wanted. */
void ob_report_start(int size, const char *over, const char *call, bool recognises) {
  if (ob_preload.refused)
    fprintf(stderr, "onebit %s: nothing is compressed: %s\n", onebit_version(), ob_preload.refused);
  else if (!is_off())
    print_plan(size, over, call, recognises);
}

double ob_report_max_residual_ratio(void) {
  double max = 0;
  for (struct ob_record *record = ob_counters_first(); record; record = record->next)
    if (atomic_load(&record->max_residual_ratio) > max)
      max = atomic_load(&record->max_residual_ratio);
  return max;
}

static void write_json(const char *path, const struct ob_report *report) {
  FILE *file = fopen(path, "w");
  if (file)
    ob_report_json(file, report);
  if (!file || fclose(file) != 0)
    fprintf(stderr, "onebit: ONEBIT_REPORT=%s: %s\n", path, strerror(errno));
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
