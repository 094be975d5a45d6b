/* Writes the report as one JSON object, with the same names as in the text. */
#include <math.h>

#include "base/json.h"
#include "dropin/preload.h"

double ob_report_speedup(const struct ob_report *report) {
  return report->seconds > 0 ? fmax(0, 1 + report->seconds_saved / report->seconds) : 1;
}

void ob_report_read_passed(const struct ob_record *record, uint64_t passed[OB_REASON_COUNT]) {
  for (size_t reason = 0; reason < OB_REASON_COUNT; reason++)
    passed[reason] = atomic_load(&record->dense[reason]);
}

static void put_passed(struct ob_json *json, const uint64_t passed[OB_REASON_COUNT]) {
  ob_json_begin(json, "passed", '{');
  for (size_t reason = 1; reason < OB_REASON_COUNT; reason++)
    if (passed[reason])
      ob_json_integer(json, onebit_counters_reason(reason), passed[reason]);
  ob_json_end(json, '}');
}

static void put_shadows(struct ob_json *json, struct ob_record_shadow *shadow) {
  ob_json_begin(json, "shadows", '[');
  for (; shadow; shadow = shadow->next) {
    ob_json_begin(json, NULL, '{');
    ob_json_integer(json, "tensor", (uint64_t)shadow->tensor);
    ob_json_integer(json, "calls", shadow->samples);
    ob_json_real(json, "difference", ob_record_difference(shadow));
    ob_json_real(json, "max_difference", shadow->largest);
    ob_json_integer(json, "exact_from_then_on", shadow->refused);
    ob_json_end(json, '}');
  }
  ob_json_end(json, ']');
}

static void put_record(struct ob_json *json, const struct ob_record *record) {
  uint64_t passed[OB_REASON_COUNT];
  ob_report_read_passed(record, passed);
  ob_json_begin(json, NULL, '{');
  ob_json_put_string(json, "operation", record->of.call);
  ob_json_put_string(json, "type", record->type);
  ob_json_put_string(json, "communicator", record->communicator);
  ob_json_integer(json, "ranks", (uint64_t)record->of.comm_size);
  ob_json_integer(json, "count", record->of.count);
  ob_json_integer(json, "bytes", record->bytes);
  ob_json_integer(json, "calls", atomic_load(&record->calls));
  ob_json_integer(json, "compressed", atomic_load(&record->compressed));
  ob_json_integer(json, "not_a_number", atomic_load(&record->skipped));
  ob_json_integer(json, "bits", (uint64_t)atomic_load(&record->bits));
  ob_json_integer(json, "moves", atomic_load(&record->moves));
  ob_json_integer(json, "bytes_sent", atomic_load(&record->bytes_sent));
  ob_json_integer(json, "bytes_dense", atomic_load(&record->bytes_dense));
  ob_json_integer(json, "timed_dense", atomic_load(&record->timed_dense));
  ob_json_integer(json, "timed_compressed", atomic_load(&record->timed_compressed));
  ob_json_real(json, "seconds_dense", atomic_load(&record->seconds_dense));
  ob_json_real(json, "seconds_compressed", atomic_load(&record->seconds_compressed));
  ob_json_real(json, "seconds_deciding", atomic_load(&record->seconds_deciding));
  ob_json_real(json, "seconds_dense_median", ob_record_dense_seconds(record));
  ob_json_real(json, "seconds_saved", ob_record_saved_seconds(record));
  ob_json_real(json, "residual_ratio", atomic_load(&record->residual_ratio));
  ob_json_real(json, "max_residual_ratio", atomic_load(&record->max_residual_ratio));
  put_passed(json, passed);
  put_shadows(json, atomic_load(&record->shadows));
  ob_json_end(json, '}');
}

void ob_report_write_json(FILE *file, const struct ob_report *report) {
  struct ob_json json = {.file = file, .spaced = true};
  ob_json_begin(&json, NULL, '{');
  ob_json_put_string(&json, "version", onebit_version());
  ob_json_integer(&json, "ranks", (uint64_t)report->ranks);
  if (ob_preload.refused)
    ob_json_put_string(&json, "refused", ob_preload.refused);
  ob_json_integer(&json, "calls", report->own.calls);
  ob_json_integer(&json, "compressed", report->own.compressed);
  if (!report->own_only)
    ob_json_integer(&json, "compressed_all_ranks", report->compressed);
  ob_json_integer(&json, "bytes_sent", report->bytes_sent);
  ob_json_integer(&json, "bytes_dense", report->bytes_dense);
  ob_json_real(&json, "seconds", report->seconds);
  ob_json_real(&json, "seconds_saved", report->seconds_saved);
  ob_json_real(&json, "factor", ob_report_speedup(report));
  ob_json_real(&json, "max_residual_ratio", report->max_residual_ratio);
  put_passed(&json, report->own.passed);
  ob_json_begin(&json, "tensors", '[');
  for (struct ob_record *record = ob_counters_first(); record; record = record->next)
    put_record(&json, record);
  ob_json_end(&json, ']');
  ob_json_end(&json, '}');
  fputc('\n', file);
}
