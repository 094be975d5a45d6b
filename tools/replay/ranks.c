/* The ranks of a replay: threads of this process, or the processes that mpirun started. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "onebit/onebit.h"
#include "tools/replay/replay.h"

#ifdef ONEBIT_HAVE_MPI
#include "onebit/mpi.h"
#endif

/* A replay of a case in a directory, on the ranks of this process. */
struct replay_team {
  struct replay_case recorded;
  bool opened;
  char error[REPLAY_ERROR];
  onebit_device_t device;
  struct replay_result *result;
  pthread_barrier_t barrier;
  const struct replay_report **reports; /* one a rank: what it tells the others */
};

struct thread {
  pthread_t id;
  struct replay_rank rank;
};

static void *run_thread(void *argument) {
  const struct replay_rank *rank = &((const struct thread *)argument)->rank;
  struct replay_team *team = rank->team;
  struct replay_result result;
  replay_run(rank, &team->recorded, team->opened, team->error, team->device, &result);
  if (rank->rank == 0)
    *team->result = result;
  onebit_comm_destroy(rank->comm);
  return NULL;
}

/* Ranks that are started wait for those that are not: without all of them the process ends. */
static void run_threads(struct replay_team *team, struct thread *threads, int size,
                        const onebit_comm_t *comms) {
  pthread_barrier_init(&team->barrier, NULL, (unsigned)size);
  for (int r = 0; r < size; r++) {
    threads[r].rank = (struct replay_rank){r, size, comms[r], team};
    if (pthread_create(&threads[r].id, NULL, run_thread, &threads[r]) != 0) {
      fprintf(stderr, "onebit-replay: only %d of %d threads could be started\n", r, size);
      exit(1);
    }
  }
  for (int r = 0; r < size; r++)
    pthread_join(threads[r].id, NULL);
  pthread_barrier_destroy(&team->barrier);
}

void replay_with_threads(const char *directory, onebit_device_t device,
                         struct replay_result *result) {
  struct replay_team team = {.device = device, .result = result};
  team.opened = replay_case_open(&team.recorded, directory, team.error);
  size_t size = team.opened ? team.recorded.world : 1; /* one rank can say what is wrong */
  struct thread *threads = calloc(size, sizeof *threads);
  onebit_comm_t *comms = calloc(size, sizeof *comms);
  team.reports = calloc(size, sizeof *team.reports);
  *result = (struct replay_result){.verdict = REPLAY_FAILED};
  if (!threads || !comms || !team.reports)
    snprintf(result->error, REPLAY_ERROR, "no memory for %zu ranks", size);
  else if (onebit_comm_create_loopback((int)size, comms) != ONEBIT_OK)
    snprintf(result->error, REPLAY_ERROR, "%s", onebit_last_error());
  else
    run_threads(&team, threads, (int)size, comms);
  free((void *)team.reports);
  free(comms);
  free(threads);
  replay_case_close(&team.recorded);
}

#ifdef ONEBIT_HAVE_MPI
void replay_with_mpi(const char *directory, onebit_device_t device, struct replay_result *result) {
  struct replay_case recorded;
  struct replay_rank rank = {0};
  char error[REPLAY_ERROR];
  bool opened = replay_case_open(&recorded, directory, error);
  *result = (struct replay_result){.verdict = REPLAY_FAILED};
  if (onebit_comm_create_mpi(MPI_COMM_WORLD, &rank.comm) == ONEBIT_OK) {
    rank.rank = onebit_comm_rank(rank.comm);
    rank.size = onebit_comm_size(rank.comm);
    replay_run(&rank, &recorded, opened, error, device, result);
  } else
    snprintf(result->error, REPLAY_ERROR, "%s", onebit_last_error());
  onebit_comm_destroy(rank.comm);
  replay_case_close(&recorded);
}

/* The report of a rank, from there. */
static void spread(struct replay_report *report, int rank) {
  MPI_Bcast(report, (int)sizeof *report, MPI_BYTE, rank, MPI_COMM_WORLD);
}
#else
void replay_with_mpi(const char *directory, onebit_device_t device, struct replay_result *result) {
  (void)directory, (void)device;
  *result =
      (struct replay_result){.verdict = REPLAY_FAILED,
                             .error = "this build is without MPI: only --loopback can run a case"};
}

static void spread(struct replay_report *report, int rank) { (void)report, (void)rank; }
#endif

void replay_share(const struct replay_rank *rank, const struct replay_report *mine,
                  void (*visit)(void *context, int rank, const struct replay_report *report),
                  void *context) {
  struct replay_team *team = rank->team;
  if (team) {
    team->reports[rank->rank] = mine;
    pthread_barrier_wait(&team->barrier);
  }
  for (int r = 0; r < rank->size; r++) {
    struct replay_report report = *mine; /* overwritten by another rank's */
    if (!team)
      spread(&report, r);
    visit(context, r, team ? team->reports[r] : &report);
  }
  if (team)
    pthread_barrier_wait(&team->barrier); /* until then the others read `mine` */
}
