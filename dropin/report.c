/* Who is told what, and where. */
#include "dropin/report.h"

#include <errno.h>
#include <string.h>

#include "base/knobs.h"
#include "dropin/preload_mpi.h"

const char *ob_report_dtype(onebit_dtype_t dtype) {
  return dtype == ONEBIT_FLOAT32 ? "float" : dtype == ONEBIT_BFLOAT16 ? "bfloat16" : "half";
}

const char *ob_report_operation(onebit_operation_t operation) {
  return operation == ONEBIT_ALLREDUCE   ? "allreduce"
         : operation == ONEBIT_ALLGATHER ? "allgather"
                                         : "reduce-scatter";
}

double ob_report_factor(const struct ob_report *report) {
  return report->seconds > 0 ? (report->seconds + report->seconds_saved) / report->seconds : 1;
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

static void print_plan(int size) {
  char transport[MPI_MAX_LIBRARY_VERSION_STRING];
  const char *rules = ob_knob_text(OB_KNOB_RULES);
  int length = 0;
  if (PMPI_Get_library_version(transport, &length) != MPI_SUCCESS)
    strcpy(transport, "MPI");
  transport[strcspn(transport, ",\n")] = '\0';
  for (char *tab = transport; (tab = strchr(tab, '\t'));)
    *tab = ' ';
  fprintf(stderr,
          "onebit %s: preloaded, %d ranks over %s; compresses sums of floats by MPI_Allreduce ",
          onebit_version(), size, transport);
  if (rules)
    fprintf(stderr, "as %s says (%zu rules, else from %zu bytes on)", rules, ob_preload.rules.rules,
            ob_preload.rules.least);
  else
    fprintf(stderr, "from %zu bytes on", ob_preload.rules.least);
  fprintf(stderr, ", once a step's calls have repeated %u times\n", ob_preload.rules.warmup);
}

/* What is refused is said even where no report is wanted. */
void ob_report_start(int rank, int size) {
  if (rank != 0)
    return;
  if (ob_preload.refused)
    fprintf(stderr, "onebit %s: nothing is compressed: %s\n", onebit_version(), ob_preload.refused);
  else if (!is_off())
    print_plan(size);
}

static void gather(struct ob_report *report) {
  onebit_counters_t *own = &report->own;
  double most[2] = {own->seconds, 0}, most_of_all[2] = {0, 0}, saved = 0;
  for (struct ob_record *record = ob_counters_first(); record; record = record->next)
    if (atomic_load(&record->error_ratio_most) > most[1])
      most[1] = atomic_load(&record->error_ratio_most);
  uint64_t mine[3] = {own->compressed, own->bytes_sent, own->bytes_dense}, sums[3] = {0, 0, 0};
  PMPI_Comm_size(MPI_COMM_WORLD, &report->ranks);
  PMPI_Allreduce(mine, sums, 3, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
  PMPI_Allreduce(&own->seconds_saved, &saved, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  PMPI_Allreduce(most, most_of_all, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  report->compressed = sums[0];
  report->bytes_sent = sums[1];
  report->bytes_dense = sums[2];
  report->seconds_saved = saved / report->ranks;
  report->seconds = most_of_all[0];
  report->error_ratio_most = most_of_all[1];
}

static void write_json(const char *path, const struct ob_report *report) {
  FILE *file = fopen(path, "w");
  if (file)
    ob_report_json(file, report);
  if (!file || fclose(file) != 0)
    fprintf(stderr, "onebit: ONEBIT_REPORT=%s: %s\n", path, strerror(errno));
}

static void print_end(const struct ob_report *report) {
  if (json_path())
    write_json(json_path(), report);
  else if (!is_off())
    ob_report_text(stderr, report);
  if (ob_preload.required && !report->compressed)
    fprintf(stderr, "onebit: nothing was compressed, and ONEBIT_REQUIRE=1 wants some: "
                    "the run fails\n");
}

bool ob_report_end(void) {
  struct ob_report report = {.own = {.size = sizeof report.own}};
  int rank = 0;
  onebit_counters_get(&report.own);
  gather(&report);
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank == 0)
    print_end(&report);
  return report.compressed > 0;
}
