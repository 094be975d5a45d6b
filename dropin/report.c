/* Prints the line at the start and the report, unless ONEBIT_REPORT turns them off. */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/knobs.h"
#include "collectives/cost/tuning.h"
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

/* Returns a number of bits as text: "one bit", "8 bits"; "float32" for 32. */
static const char *format_bits(int bits) {
  return bits == 1   ? "one bit"
         : bits == 2 ? "2 bits"
         : bits == 4 ? "4 bits"
         : bits == 8 ? "8 bits"
                     : "float32";
}

/* ---- The report as text ---- */

enum { ROWS = 24 }; /* only the JSON object lists more tensors */
enum { TIMED = 5 }; /* the dense time of fewer timed calls is rough */

static double to_megabytes(uint64_t bytes) { return (double)bytes / 1e6; }

static double get_mean_seconds(const _Atomic double *seconds, const _Atomic uint64_t *times) {
  uint64_t count = atomic_load(times);
  return count ? atomic_load(seconds) / (double)count : 0;
}

static void print_passed(FILE *file, const char *before, const uint64_t passed[OB_REASON_COUNT]) {
  bool any = false;
  for (size_t reason = 1; reason < OB_REASON_COUNT; reason++) {
    if (!passed[reason])
      continue;
    fprintf(file, "%s%llu %s", any ? "; " : before, (unsigned long long)passed[reason],
            onebit_counters_reason(reason));
    any = true;
  }
  if (any)
    fputc('\n', file);
}

/* Estimates how many of the measured seconds compression would have saved. Within a host
 * compression costs more than it saves, since ranks compress on the cores that copy the data. */
static double estimate_saved_seconds(const struct ob_record *record,
                                     const struct ob_report *report) {
  const struct ob_record_of *of = &record->of;
  int bits = ob_preload.rules.bits.max;
  if (!atomic_load(&record->dense[OB_REASON_WATCHED]) || of->dtype == OB_OTHER_TYPE ||
      report->hosts == 1)
    return 0;
  int hosts =
      report->hosts > 0 && of->comm_size % report->hosts == 0 ? report->hosts : of->comm_size;
  double part = ob_cost_part(hosts, of->comm_size, of->count, ob_elements_size(of->dtype), bits);
  return part < 1 ? (1 - part) * atomic_load(&record->seconds_dense) : 0;
}

static void print_seconds(FILE *file, const struct ob_record *record,
                          const struct ob_report *report) {
  double dense = atomic_load(&record->seconds_dense),
         saved = estimate_saved_seconds(record, report),
         deciding = atomic_load(&record->seconds_deciding),
         calls = ob_record_saved_seconds(record) + deciding;
  const uint64_t timed = atomic_load(&record->timed_dense);
  if (atomic_load(&record->timed_compressed)) {
    fprintf(file, "    time per call: %.6f s dense (median of %llu%s), %.6f s compressed (mean)",
            ob_record_dense_seconds(record), (unsigned long long)timed,
            timed < TIMED ? ", too few to compare" : "",
            get_mean_seconds(&record->seconds_compressed, &record->timed_compressed));
    if (timed >= TIMED)
      fprintf(file, "; all calls: %.3f s %s", fabs(calls), calls < 0 ? "lost" : "saved");
    fprintf(file, "; agreements and checks took %.3f s\n", deciding);
  } else if (dense > 0 && report->seconds > 0)
    fprintf(file, "    these calls took %.3f s, with waiting for other ranks, %.0f %% of the run%s",
            dense, 100 * dense / report->seconds, saved > 0 ? "" : "\n");
  if (saved > 0)
    fprintf(file, "; compression would save about %.3f s of that\n", saved);
}

static void print_shadows(FILE *file, struct ob_record_shadow *shadow) {
  for (; shadow; shadow = shadow->next)
    fprintf(
        file,
        "    tensor %d: compressed sums differ from exact sums by %.3g %% of their norm in the "
        "last %llu comparisons, and by at most %.3g %%%s\n",
        shadow->tensor, 100 * ob_record_difference(shadow),
        (unsigned long long)(shadow->samples < OB_SHADOW_SAMPLES ? shadow->samples
                                                                 : OB_SHADOW_SAMPLES),
        100 * shadow->largest,
        shadow->refused
            ? ": this is above the bound of error feedback, so the tensor is no longer compressed"
            : "");
}

static void print_bits(FILE *file, const struct ob_record *record) {
  unsigned long long moves = (unsigned long long)atomic_load(&record->moves);
  fprintf(file, " to %s", format_bits(atomic_load(&record->bits)));
  if (moves)
    fprintf(file, " at the end (changes: %llu)", moves);
  fprintf(file, "; %.2f MB instead of %.2f MB", to_megabytes(atomic_load(&record->bytes_sent)),
          to_megabytes(atomic_load(&record->bytes_dense)));
}

static void print_record(FILE *file, const struct ob_record *record,
                         const struct ob_report *report) {
  unsigned long long compressed = (unsigned long long)atomic_load(&record->compressed);
  fprintf(file, "  %s of %zu %s, %s of %d: %llu calls of %.2f MB, %llu compressed", record->of.call,
          record->of.count, record->type, record->communicator, record->of.comm_size,
          (unsigned long long)atomic_load(&record->calls), to_megabytes(record->bytes), compressed);
  if (compressed)
    print_bits(file, record);
  if (atomic_load(&record->max_residual_ratio) > 0)
    fprintf(file, "; the residual is %.2f of the signal, at most %.2f",
            atomic_load(&record->residual_ratio), atomic_load(&record->max_residual_ratio));
  if (atomic_load(&record->skipped))
    fprintf(file, "; at least %llu calls gave NaN, because a value was not finite",
            (unsigned long long)atomic_load(&record->skipped));
  fputc('\n', file);
  print_seconds(file, record, report);
  uint64_t passed[OB_REASON_COUNT];
  ob_report_read_passed(record, passed);
  print_passed(file, "    not compressed, by reason: ", passed);
  print_shadows(file, atomic_load(&record->shadows));
}

static void print_other_calls(FILE *file, const struct ob_report *report) {
  uint64_t left[OB_REASON_COUNT], passed[OB_REASON_COUNT];
  memcpy(left, report->own.passed, sizeof left);
  for (struct ob_record *record = ob_counters_first(); record; record = record->next) {
    ob_report_read_passed(record, passed);
    for (size_t reason = 1; reason < OB_REASON_COUNT; reason++)
      left[reason] -= passed[reason];
  }
  print_passed(file, "  other calls, not compressed, by reason: ", left);
}

/* Returns true if the dense time of some compressed calls is rough. */
static bool is_dense_time_rough(void) {
  for (struct ob_record *record = ob_counters_first(); record; record = record->next)
    if (atomic_load(&record->timed_compressed) && atomic_load(&record->timed_dense) < TIMED)
      return true;
  return false;
}

static void print_sum(FILE *file, const struct ob_report *report) {
  fprintf(file, "  in total: %llu calls compressed ", (unsigned long long)report->compressed);
  if (report->own_only)
    fprintf(file, "on this rank of %d", report->ranks);
  else
    fprintf(file, "on %d ranks", report->ranks);
  if (report->bytes_sent)
    fprintf(file, ", with %.3gx less traffic: %.2f MB instead of %.2f MB",
            (double)report->bytes_dense / (double)report->bytes_sent,
            to_megabytes(report->bytes_sent), to_megabytes(report->bytes_dense));
  const bool known = report->compressed && !is_dense_time_rough();
  if (known)
    fprintf(file, "; estimated speed-up %.2fx %s (%.3f s %s instead of %.3f s)",
            ob_report_speedup(report), report->calls, report->seconds, report->span,
            report->seconds + report->seconds_saved);
  fputc('\n', file);
  if (report->compressed && report->hosts == 1)
    fprintf(file, "  All ranks are on one host, where compression saves no time.\n");
  else if (report->compressed && !known)
    fprintf(file,
            "  Too few dense calls were timed to estimate a speed-up: compare with a run without "
            "onebit.\n");
  else if (known && report->seconds_saved < 0)
    fprintf(
        file,
        "  Compression took longer than it saved on the network: dense sums are faster here.\n");
}

/* Says that the program made no sum for this library. */
static void print_nothing_seen(FILE *file) {
  fprintf(file,
          "  No sum could be compressed: the program made no MPI_Allreduce of float or double of "
          "%zu KiB or more (MPI_SUM). Calls of onebit's own functions, such as "
          "ONEBIT_Allreduce, are not counted here.\n",
          ob_preload.rules.min_bytes >> 10);
}

static void print_advice(FILE *file, const struct ob_report *report) {
  const char *command = ob_knob_text(OB_KNOB_COMMAND);
  double seconds = 0;
  uint64_t watched = report->own.passed[OB_REASON_WATCHED];
  for (struct ob_record *record = ob_counters_first(); record; record = record->next)
    seconds += estimate_saved_seconds(record, report);
  if (!watched) {
    print_nothing_seen(file);
    return;
  }
  fprintf(file, "  %llu sums could be compressed.", (unsigned long long)watched);
  if (report->hosts == 1)
    fprintf(file, " All ranks are on one host, where this saves no time.");
  else
    fprintf(
        file,
        " By the cost model, compression would save about %.3f s of the run's %.3f s (%.0f %%).",
        seconds, report->seconds, report->seconds > 0 ? 100 * seconds / report->seconds : 0.0);
  fprintf(file,
          " If these sums are gradients that an optimizer averages over steps, run%s:\n    %s\n",
          report->hosts == 1 ? " on several hosts" : "",
          command ? command : "onebit run --gradients -- mpirun ... (ONEBIT_GRADIENTS=1)");
  if (seconds < 0.05 * report->seconds)
    fprintf(
        file,
        "  %sThis command predicts a step on 4 hosts with links of 1 Gbit/s, for a model of 10 "
        "million parameters and a step of 0.1 s without MPI calls; replace its numbers by "
        "yours:\n"
        "    onebit-tune --predict --parameters 10M --compute 0.1 --hosts 4 --bandwidth 1gbit\n",
        report->hosts == 1 ? "" : "On this network compression is hardly worth it. ");
}

/* Prints the smallest number of bits among the compressed calls, and the optimizers for which that
 * number is suitable. */
static void print_bits_advice(FILE *file) {
  int bits = 32;
  for (struct ob_record *record = ob_counters_first(); record; record = record->next) {
    int own = atomic_load(&record->bits);
    bits = own && own < bits ? own : bits;
  }
  fprintf(
      file,
      "  The sums were sent in %s per element with error feedback: one result is approximate, "
      "the running sum converges. %s\n",
      format_bits(bits),
      bits >= 8
          ? "8 bits suit every optimizer (measured losses are within 0.3 % of dense training's). "
            "onebit's own optimizers send one bit, an eighth of these bytes."
          : "Adam and similar optimizers train worse with so few bits of a gradient (one bit: 5 % "
            "more loss), and SGD may diverge. Compare the loss with a dense run's, or set "
            "ONEBIT_BITS=8, or use onebit's optimizers, which compress the momentum.");
}

static void report_text(FILE *file, const struct ob_report *report) {
  int rows = 0;
  if (ob_preload.refused)
    fprintf(file, "onebit: nothing was compressed: %s\n", ob_preload.refused);
  fprintf(file, "onebit: the sums in %s own calls\n",
          report->own_only ? "this rank's" : "rank 0's");
  for (struct ob_record *record = ob_counters_first(); record; record = record->next)
    if (++rows <= ROWS)
      print_record(file, record, report);
  if (rows > ROWS)
    fprintf(file, "  and %d more, listed by ONEBIT_REPORT=FILE.json\n", rows - ROWS);
  print_other_calls(file, report);
  print_sum(file, report);
  if (report->compressed)
    print_bits_advice(file);
  else if (!ob_preload.refused && !ob_rules_can_compress(&ob_preload.rules))
    print_advice(file, report);
  else if (!ob_preload.refused && !ob_counters_first())
    print_nothing_seen(file);
}

/* ---- Output by ONEBIT_REPORT ---- */

static bool is_report_off(void) {
  const char *text = ob_knob_text(OB_KNOB_REPORT);
  return text && !strcmp(text, "0");
}

/* Returns the file for JSON, or NULL. */
static const char *get_json_path(void) {
  const char *text = ob_knob_text(OB_KNOB_REPORT);
  return text && strcmp(text, "0") != 0 && strcmp(text, "1") != 0 ? text : NULL;
}

/* Returns the error number that writing to the file would give, or 0. It does not open the file: if
 * the file is a FIFO, its reader would see an end of file. */
static int find_path_error(const char *path) {
  const char *slash = strrchr(path, '/');
  struct stat about;
  if (stat(path, &about) == 0)
    return S_ISDIR(about.st_mode) ? EISDIR : access(path, W_OK) != 0 ? errno : 0;
  if (errno != ENOENT)
    return errno;
  char *directory = slash ? strndup(path, (size_t)(slash - path) + 1) : strdup(".");
  const int code = !directory ? ENOMEM : access(directory, W_OK) != 0 ? errno : 0;
  free(directory);
  return code;
}

static void print_path_error(const char *path, int code, const char *instead) {
  char text[OB_INPUT_REASON];
  fprintf(stderr, "onebit: ONEBIT_REPORT=%s: %s; the report %s printed here\n", path,
          ob_input_reason(code, text), instead);
}

static void print_plan(int size, const char *over, const char *sums) {
  const struct ob_rules *rules = &ob_preload.rules;
  fprintf(stderr, "onebit %s: preloaded, %d ranks over %s. ", onebit_version(), size, over);
  if (!ob_rules_can_compress(rules))
    fprintf(stderr, "Counts the sums, and changes nothing");
  else if (rules->gradients)
    fprintf(stderr, "Compresses every %s of %zu KiB or more, in %s%s (--gradients)", sums,
            rules->min_bytes >> 10, format_bits(rules->bits.max),
            rules->bits.min == rules->bits.max ? "" : " or fewer");
  if (rules->rules)
    fprintf(stderr, "%s %zu rule%s of ONEBIT_RULES",
            !ob_rules_can_compress(rules) ? ", by"
            : rules->gradients            ? ", but for"
                                          : "Compresses the calls selected by",
            rules->rules, rules->rules == 1 ? "" : "s");
  fprintf(stderr, ".\n");
}

void ob_report_print_unseen(const char *why) {
  if (!is_report_off() || ob_preload.required)
    fprintf(stderr, "onebit %s: nothing is compressed: %s\n", onebit_version(), why);
}

/* Prints the line at the start. The reason why nothing is compressed is printed even if the report
 * is turned off. */
void ob_report_start(int size, const char *over, const char *sums) {
  if (ob_preload.refused)
    fprintf(stderr, "onebit %s: nothing is compressed: %s\n", onebit_version(), ob_preload.refused);
  else if (!is_report_off() || ob_preload.required)
    print_plan(size, over, sums);
  const int code = get_json_path() ? find_path_error(get_json_path()) : 0;
  if (code != 0)
    print_path_error(get_json_path(), code, "will be");
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
  int code = ob_output_open(&file, path, false);
  if (code == 0) {
    ob_report_write_json(file, report);
    code = ferror(file) ? EIO : 0;
    code = fclose(file) == 0 ? code : errno;
  }
  if (code == 0)
    return;
  print_path_error(path, code, "is");
  report_text(stderr, report);
}

void ob_report_print(const struct ob_report *report) {
  if (get_json_path())
    write_json(get_json_path(), report);
  else if (!is_report_off())
    report_text(stderr, report);
  if (ob_preload.required && !report->compressed)
    fprintf(
        stderr,
        "onebit: nothing was compressed, which is required by ONEBIT_REQUIRE=1: the run fails\n");
}
