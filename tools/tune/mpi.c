/* onebit-tune under mpirun: finds out who is where, and has everything measured. */
#ifdef ONEBIT_HAVE_MPI
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/memory.h"
#include "compression/codec.h"
#include "tools/tune/mpi.h"

void tune_wait(MPI_Comm comm) {
  MPI_Request request;
  const struct timespec moment = {.tv_nsec = 500000};
  int done = 0;
  MPI_Ibarrier(comm, &request);
  for (MPI_Test(&request, &done, MPI_STATUS_IGNORE); !done;
       MPI_Test(&request, &done, MPI_STATUS_IGNORE))
    nanosleep(&moment, NULL);
}

double tune_largest(double value) {
  MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return value;
}

/* --- Who is where */

static int combined(int value, MPI_Op op) {
  MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_INT, op, MPI_COMM_WORLD);
  return value;
}

static void find_cluster(struct tune_cluster *cluster, struct tune_mpi *mpi) {
  int on_host;
  cluster->mpi = mpi;
  MPI_Comm_rank(MPI_COMM_WORLD, &cluster->rank);
  MPI_Comm_size(MPI_COMM_WORLD, &cluster->size);
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &mpi->host);
  MPI_Comm_rank(mpi->host, &cluster->host_rank);
  MPI_Comm_size(mpi->host, &on_host);
  bool leads = cluster->host_rank == 0;
  MPI_Comm_split(MPI_COMM_WORLD, leads ? 0 : MPI_UNDEFINED, cluster->rank, &mpi->leaders);
  cluster->hosts = combined(leads, MPI_SUM);
  cluster->most_ranks = combined(on_host, MPI_MAX);
  cluster->ranks_per_host = combined(on_host, MPI_MIN) == cluster->most_ranks ? on_host : 0;
}

static void leave_cluster(struct tune_mpi *mpi) {
  MPI_Comm_free(&mpi->host);
  if (mpi->leaders != MPI_COMM_NULL)
    MPI_Comm_free(&mpi->leaders);
}

/* --- Where the numbers come from */

/* The hosts' names on rank 0, which frees them; NULL elsewhere, and when memory is out. */
static char *gather_names(const struct tune_cluster *cluster) {
  char name[OB_TUNING_NAME_ROOM] = "";
  gethostname(name, sizeof name - 1);
  if (cluster->mpi->leaders == MPI_COMM_NULL)
    return NULL;
  char *names = cluster->rank == 0 ? ob_allocate((size_t)cluster->hosts, sizeof name) : NULL;
  int room = cluster->rank != 0 || names ? (int)sizeof name : 0;
  MPI_Bcast(&room, 1, MPI_INT, 0, cluster->mpi->leaders);
  if (room)
    MPI_Gather(name, room, MPI_CHAR, names, room, MPI_CHAR, 0, cluster->mpi->leaders);
  return names;
}

static void say_when_and_what(struct ob_tuning_origin *origin) {
  char library[MPI_MAX_LIBRARY_VERSION_STRING];
  int length;
  time_t now = time(NULL);
  struct tm date;
  MPI_Get_library_version(library, &length);
  library[strcspn(library, ",\r\n")] = '\0';
  snprintf(origin->mpi, sizeof origin->mpi, "%.*s", OB_TUNING_WORDS_ROOM - 1, library);
  strftime(origin->date, sizeof origin->date, "%Y-%m-%d", gmtime_r(&now, &date));
}

/* On rank 0. */
static bool write_file(const char *path, const struct tune_cluster *cluster, const char *names,
                       const struct ob_costs *costs) {
  struct ob_tuning_origin origin = {.host_count = (size_t)cluster->hosts};
  const char **list = ob_allocate(origin.host_count, sizeof *list);
  bool well = names && list;
  if (well) {
    for (size_t k = 0; k < origin.host_count; k++)
      list[k] = names + k * OB_TUNING_NAME_ROOM;
    origin.hosts = list;
    say_when_and_what(&origin);
    well = tune_write(path, costs, &origin);
  } else {
    tune_complain("no memory for the names of %d hosts", cluster->hosts);
  }
  ob_release(list);
  if (well)
    printf("\n# Written: %s\n", path);
  return well;
}

/* --- All of it */

/* The model is fitted on one rank, since all must have the same, and then corrected. */
static bool measure_calls(const struct tune_cluster *cluster, const struct tune_options *options,
                          struct ob_costs *costs, struct tune_points *points) {
  if (!tune_collectives(cluster, points, options->quick))
    return false;
  if (cluster->rank == 0)
    tune_fit(costs, points);
  MPI_Bcast(costs, (int)sizeof *costs, MPI_BYTE, 0, MPI_COMM_WORLD);
  return tune_corrections(cluster, costs, options->quick);
}

static bool measure(const struct tune_cluster *cluster, const struct tune_options *options,
                    struct ob_costs *costs, struct tune_points *points) {
  const struct ob_codec *codec;
  bool chosen = ob_codec_choose(&codec) == ONEBIT_OK;
  if (tune_largest(chosen ? 0 : 1) > 0) {
    tune_complain("no codec: %s", onebit_last_error());
    return false;
  }
  ob_costs_default(codec->name, costs);
  costs->hosts = cluster->hosts;
  costs->ranks_per_host = cluster->ranks_per_host;
  if (!tune_codec(cluster, costs, options->quick))
    return false;
  tune_links(cluster, costs, options->quick);
  return cluster->size == 1 || measure_calls(cluster, options, costs, points);
}

/* On rank 0, which alone has a file to write and a screen. */
static bool conclude(const struct tune_cluster *cluster, const struct tune_options *options,
                     const char *path, const char *names, struct ob_costs *costs,
                     const struct tune_points *points) {
  tune_report_links(cluster, costs);
  if (cluster->size == 1) {
    printf("# One rank: there is nothing to exchange, so nothing to decide; no file is written.\n");
    return true;
  }
  snprintf(costs->source, sizeof costs->source, "measured just now");
  tune_report_points(points, costs->residual);
  tune_report_decisions(costs, cluster);
  return options->dry_run || write_file(path, cluster, names, costs);
}

/* Found out before anything is measured: it would be for nothing. */
static bool find_path(const struct tune_options *options, char path[OB_TUNING_PATH_ROOM]) {
  if (options->dry_run)
    return true;
  if (options->output) {
    if (*options->output && strlen(options->output) < OB_TUNING_PATH_ROOM) {
      strcpy(path, options->output);
      return true;
    }
    tune_complain("--output: not a path");
    return false;
  }
  if (ob_tuning_path(path))
    return true;
  tune_complain("the environment names no file to write: give --output, or --dry-run");
  return false;
}

int tune_run(const struct tune_options *options) {
  struct tune_cluster cluster = {0};
  struct tune_mpi mpi;
  struct ob_costs costs;
  struct tune_points points = {.count = 0};
  char path[OB_TUNING_PATH_ROOM] = "";
  MPI_Init(NULL, NULL);
  find_cluster(&cluster, &mpi);
  bool well = cluster.rank != 0 || find_path(options, path);
  if (tune_largest(well ? 0 : 1) == 0) {
    char *names = gather_names(&cluster);
    well = measure(&cluster, options, &costs, &points);
    if (well && cluster.rank == 0)
      well = conclude(&cluster, options, path, names, &costs, &points);
    ob_release(names);
  }
  well = tune_largest(well ? 0 : 1) == 0;
  leave_cluster(&mpi);
  MPI_Finalize();
  return well ? TUNE_OK : TUNE_FAILED;
}

#else
typedef int tune_no_mpi_here; /* ISO C wants a declaration in every file */
#endif
