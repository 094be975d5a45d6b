/* What the report is made of where MPI carries the bytes. */
#include <stdlib.h>

#include "dropin/mpi/preload.h"
#include "dropin/report.h"

void ob_preload_report_start(int size) {
  ob_report_start(size, ob_mpi_version(), "MPI_Allreduce of float or double sums");
}

static void gather(struct ob_report *report) {
  onebit_counters_t *own = &report->own;
  double mine_max[2] = {own->seconds, ob_report_max_residual_ratio()}, all_max[2] = {0, 0},
         saved = 0;
  uint64_t mine[3] = {own->compressed, own->bytes_sent, own->bytes_dense}, sums[3] = {0, 0, 0};
  PMPI_Comm_size(MPI_COMM_WORLD, &report->ranks);
  PMPI_Allreduce(mine, sums, 3, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
  PMPI_Allreduce(&own->seconds_saved, &saved, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  PMPI_Allreduce(mine_max, all_max, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  report->compressed = sums[0];
  report->bytes_sent = sums[1];
  report->bytes_dense = sums[2];
  report->seconds_saved = saved / report->ranks;
  report->seconds = all_max[0];
  report->max_residual_ratio = all_max[1];
}

static void copy_own(struct ob_report *report) {
  const onebit_counters_t *own = &report->own;
  PMPI_Comm_size(MPI_COMM_WORLD, &report->ranks);
  report->compressed = own->compressed;
  report->bytes_sent = own->bytes_sent;
  report->bytes_dense = own->bytes_dense;
  report->seconds = own->seconds;
  report->seconds_saved = own->seconds_saved;
  report->max_residual_ratio = ob_report_max_residual_ratio();
}

/* By what the launcher says of the ranks on each host, where they are as many everywhere. */
static int count_hosts(void) {
  const char *text = getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
  int size = 1, local = atoi(text ? text : (text = getenv("MPI_LOCALNRANKS")) ? text : "0");
  PMPI_Comm_size(MPI_COMM_WORLD, &size);
  return local > 0 && size % local == 0 ? size / local : 0;
}

bool ob_preload_report_end(bool all, bool prints) {
  struct ob_report report = {.own_only = !all,
                             .calls = "in blocking calls",
                             .span = "from MPI_Init to MPI_Finalize",
                             .hosts = count_hosts(),
                             .own = {.size = sizeof report.own}};
  onebit_counters_get(&report.own);
  if (all)
    gather(&report);
  else
    copy_own(&report);
  if (prints)
    ob_report_print(&report);
  return report.compressed > 0;
}
