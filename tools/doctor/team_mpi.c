/* Who is where: the doctor's communicators, and what every rank and host says of itself. */
#define _POSIX_C_SOURCE 200809L
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tools/doctor/mpi.h"

void doctor_team_create(struct doctor_team *team) {
  MPI_Comm_dup(MPI_COMM_WORLD, &team->all);
  MPI_Comm_rank(team->all, &team->rank);
  MPI_Comm_size(team->all, &team->size);
  MPI_Comm_split_type(team->all, MPI_COMM_TYPE_SHARED, team->rank, MPI_INFO_NULL, &team->local);
  MPI_Comm_rank(team->local, &team->local_rank);
  MPI_Comm_size(team->local, &team->local_size);
  MPI_Comm_split(team->all, team->local_rank == 0 ? 0 : MPI_UNDEFINED, team->rank, &team->leaders);
  if (team->leaders != MPI_COMM_NULL)
    MPI_Comm_rank(team->leaders, &team->host);
  MPI_Bcast(&team->host, 1, MPI_INT, 0, team->local);
}

void doctor_team_destroy(struct doctor_team *team) {
  if (team->leaders != MPI_COMM_NULL)
    MPI_Comm_free(&team->leaders);
  MPI_Comm_free(&team->local);
  MPI_Comm_free(&team->all);
}

void doctor_wait_asleep(MPI_Comm comm) {
  const struct timespec nap = {.tv_nsec = 1000000};
  MPI_Request request;
  int done = 0;
  MPI_Ibarrier(comm, &request);
  for (MPI_Test(&request, &done, MPI_STATUS_IGNORE); !done;
       MPI_Test(&request, &done, MPI_STATUS_IGNORE))
    nanosleep(&nap, NULL);
}

/* Open MPI has a variable for it, a C _Bool; where there is none nothing is known: -1. */
static int library_yields(void) {
  int provided, index, count, result = -1;
  MPI_T_cvar_handle handle;
  _Bool value[16]; /* the variable is one; room against surprises */
  if (MPI_T_init_thread(MPI_THREAD_SINGLE, &provided) != MPI_SUCCESS)
    return -1;
  if (MPI_T_cvar_get_index("mpi_yield_when_idle", &index) == MPI_SUCCESS &&
      MPI_T_cvar_handle_alloc(index, NULL, &handle, &count) == MPI_SUCCESS) {
    if (count == 1 && MPI_T_cvar_read(handle, value) == MPI_SUCCESS)
      result = value[0];
    MPI_T_cvar_handle_free(&handle);
  }
  MPI_T_finalize();
  return result;
}

static void name_library(struct doctor_facts *facts) {
  char name[MPI_MAX_LIBRARY_VERSION_STRING];
  int length;
  MPI_Get_library_version(name, &length);
  facts->library = strstr(name, "Open MPI") ? DOCTOR_OPEN_MPI
                   : strstr(name, "MPICH")  ? DOCTOR_MPICH
                                            : DOCTOR_OTHER_MPI;
  name[strcspn(name, ",\n")] = '\0'; /* some tell all about how they were built */
  snprintf(facts->library_name, sizeof facts->library_name, "%.63s", name);
}

static bool allocate(struct doctor_facts *facts) {
  size_t hosts = (size_t)facts->host_count;
  facts->ranks = calloc((size_t)facts->rank_count, sizeof *facts->ranks);
  facts->hosts = calloc(hosts, sizeof *facts->hosts);
  facts->bandwidth = calloc(hosts * hosts, sizeof *facts->bandwidth);
  facts->round_trip = calloc(hosts * hosts, sizeof *facts->round_trip);
  return facts->ranks && facts->hosts && facts->bandwidth && facts->round_trip;
}

static void gather_ranks(const struct doctor_team *team, struct doctor_facts *facts) {
  struct doctor_rank mine = {.host = team->host, .yields = library_yields()};
  doctor_read_cpus(mine.cpus);
  MPI_Allgather(&mine, sizeof mine, MPI_BYTE, facts->ranks, sizeof mine, MPI_BYTE, team->all);
}

static void gather_hosts(const struct doctor_team *team, struct doctor_facts *facts) {
  struct doctor_host mine;
  doctor_read_host(&mine);
  mine.ranks = team->local_size;
  doctor_subtract(&mine, &mine); /* nothing is transferred yet */
  if (team->leaders != MPI_COMM_NULL)
    MPI_Allgather(&mine, sizeof mine, MPI_BYTE, facts->hosts, sizeof mine, MPI_BYTE, team->leaders);
  MPI_Bcast(facts->hosts, facts->host_count * (int)sizeof mine, MPI_BYTE, 0, team->local);
}

bool doctor_gather(const struct doctor_team *team, struct doctor_facts *facts) {
  memset(facts, 0, sizeof *facts);
  facts->rank_count = team->size;
  int hosts = team->host + 1;
  MPI_Allreduce(&hosts, &facts->host_count, 1, MPI_INT, MPI_MAX, team->all);
  int well = allocate(facts), all_well;
  MPI_Allreduce(&well, &all_well, 1, MPI_INT, MPI_MIN, team->all);
  if (!all_well)
    return false;
  name_library(facts);
  gather_ranks(team, facts);
  gather_hosts(team, facts);
  doctor_find_subnets(facts);
  return true;
}

void doctor_facts_destroy(struct doctor_facts *facts) {
  free(facts->ranks);
  free(facts->hosts);
  free(facts->bandwidth);
  free(facts->round_trip);
}
