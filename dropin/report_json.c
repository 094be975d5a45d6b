/* The report for a program: one JSON object. Names are those of the text's terms. */
#include "base/json.h"
#include "dropin/report.h"

static void print_string(FILE *file, const char *text) {
  fputc('"', file);
  for (const unsigned char *c = (const unsigned char *)text; *c; c++)
    if (*c < ' ' || *c == '"' || *c == '\\')
      fprintf(file, "\\u%04x", *c);
    else
      fputc(*c, file);
  fputc('"', file);
}

static void print_whole(FILE *file, const char *name, uint64_t value) {
  fprintf(file, "\"%s\": %llu, ", name, (unsigned long long)value);
}

static void print_number(FILE *file, const char *name, double value) {
  char text[OB_JSON_NUMBER];
  fprintf(file, "\"%s\": %s, ", name, ob_json_number(text, value));
}

static void print_passed(FILE *file, const uint64_t passed[OB_REASON_COUNT]) {
  const char *before = "";
  fprintf(file, "\"passed\": {");
  for (size_t reason = 1; reason < OB_REASON_COUNT; reason++) {
    if (!passed[reason])
      continue;
    fprintf(file, "%s", before);
    print_string(file, onebit_counters_reason(reason));
    fprintf(file, ": %llu", (unsigned long long)passed[reason]);
    before = ", ";
  }
  fprintf(file, "}");
}

static void print_record(FILE *file, const struct ob_record *record) {
  uint64_t passed[OB_REASON_COUNT];
  ob_report_passed(record, passed);
  fprintf(file, "{\"operation\": \"%s\", \"type\": \"%s\", \"communicator\": ",
          ob_report_operation(record->of.operation), ob_report_dtype(record->of.dtype));
  print_string(file, record->communicator);
  fprintf(file, ", \"ranks\": %d, ", record->of.comm_size);
  print_whole(file, "count", record->of.count);
  print_whole(file, "calls", atomic_load(&record->calls));
  print_whole(file, "compressed", atomic_load(&record->compressed));
  print_whole(file, "not_a_number", atomic_load(&record->skipped));
  print_whole(file, "bytes_sent", atomic_load(&record->bytes_sent));
  print_whole(file, "bytes_dense", atomic_load(&record->bytes_dense));
  print_whole(file, "timed_dense", atomic_load(&record->timed_dense));
  print_whole(file, "timed_compressed", atomic_load(&record->timed_compressed));
  print_number(file, "seconds_dense", atomic_load(&record->seconds_dense));
  print_number(file, "seconds_compressed", atomic_load(&record->seconds_compressed));
  print_number(file, "seconds_deciding", atomic_load(&record->seconds_deciding));
  print_number(file, "seconds_dense_median", ob_record_dense_seconds(record));
  print_number(file, "seconds_saved", ob_record_saved(record));
  print_number(file, "residual_ratio", atomic_load(&record->residual_ratio));
  print_number(file, "max_residual_ratio", atomic_load(&record->max_residual_ratio));
  print_passed(file, passed);
  fprintf(file, "}");
}

void ob_report_json(FILE *file, const struct ob_report *report) {
  fprintf(file, "{\"version\": \"%s\", \"ranks\": %d, ", onebit_version(), report->ranks);
  print_whole(file, "calls", report->own.calls);
  print_whole(file, "compressed", report->own.compressed);
  if (!report->own_only)
    print_whole(file, "compressed_all_ranks", report->compressed);
  print_whole(file, "bytes_sent", report->bytes_sent);
  print_whole(file, "bytes_dense", report->bytes_dense);
  print_number(file, "seconds", report->seconds);
  print_number(file, "seconds_saved", report->seconds_saved);
  print_number(file, "factor", ob_report_factor(report));
  print_number(file, "max_residual_ratio", report->max_residual_ratio);
  print_passed(file, report->own.passed);
  fprintf(file, ", \"tensors\": [");
  const char *before = "";
  for (struct ob_record *record = ob_counters_first(); record; record = record->next) {
    fprintf(file, "%s\n  ", before);
    print_record(file, record);
    before = ",";
  }
  fprintf(file, "]}\n");
}
