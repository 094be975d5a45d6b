/* Gathers the contents of the report where MPI carries the bytes. */
#include <stdlib.h>

#include "dropin/mpi/preload.h"
#include "dropin/report.h"

void ob_preload_report_start(int size) {
  ob_report_start(size, ob_mpi_version(), "MPI_Allreduce of float or double sums");
}

/* Gathers the counters of this rank, or of all ranks together. */
static void preload_report_gather(struct ob_report *report, bool all) {
  const onebit_counters_t *own = &report->own;
  uint64_t sums[3] = {own->compressed, own->bytes_sent, own->bytes_dense};
  double saved = own->seconds_saved, largest[2] = {own->seconds, ob_report_max_residual_ratio()};
  PMPI_Comm_size(MPI_COMM_WORLD, &report->ranks);
  if (all) {
    PMPI_Allreduce(MPI_IN_PLACE, sums, 3, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    PMPI_Allreduce(MPI_IN_PLACE, &saved, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    PMPI_Allreduce(MPI_IN_PLACE, largest, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  }
  report->compressed = sums[0];
  report->bytes_sent = sums[1];
  report->bytes_dense = sums[2];
  report->seconds_saved = all ? saved / report->ranks : saved;
  report->seconds = largest[0];
  report->max_residual_ratio = largest[1];
}

/* Counts hosts by the launcher's number of ranks on each host, where they are as many
 * everywhere. */
static int count_hosts(int ranks) {
  const char *text = getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
  int local = atoi(text ? text : (text = getenv("MPI_LOCALNRANKS")) ? text : "0");
  return local > 0 && ranks % local == 0 ? ranks / local : 0;
}

bool ob_preload_report_end(bool all, bool prints) {
  struct ob_report report = {.own_only = !all,
                             .calls = "in blocking calls",
                             .span = "from MPI_Init to MPI_Finalize",
                             .own = {.size = sizeof report.own}};
  onebit_counters_get(&report.own);
  preload_report_gather(&report, all);
  report.hosts = count_hosts(report.ranks);
  if (prints)
    ob_report_print(&report);
  return report.compressed > 0;
}
