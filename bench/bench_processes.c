/* Ranks that are processes of this machine. What they share is memory that was made before them. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "bench/bench.h"

#define PART ((size_t)4096) /* numbers that are combined at a time */

struct hall {
  pthread_barrier_t barrier;
  double values[]; /* a part for each rank */
};

static void barrier(struct bench_team *team) {
  pthread_barrier_wait(&((struct hall *)team->state)->barrier);
}

static double combined(const struct hall *hall, int ranks, size_t i, bool sum) {
  double result = hall->values[i];
  for (int rank = 1; rank < ranks; rank++) {
    double value = hall->values[(size_t)rank * PART + i];
    result = sum ? result + value : value > result ? value : result;
  }
  return result;
}

static void combine(struct bench_team *team, double *values, size_t count, bool sum) {
  struct hall *hall = team->state;
  for (size_t first = 0; first < count; first += PART) {
    size_t part = count - first < PART ? count - first : PART;
    memcpy(hall->values + (size_t)team->rank * PART, values + first, part * sizeof *values);
    barrier(team);
    for (size_t i = 0; i < part; i++)
      values[first + i] = combined(hall, team->size, i, sum);
    barrier(team);
  }
}

static const struct bench_team_kind processes_kind = {.barrier = barrier, .combine = combine};

/* In the process of a rank, which must not outlive the one that waits for it. */
static int run_rank(struct hall *hall, int rank, int ranks, bench_body *body, const void *context) {
  struct bench_team team = {&processes_kind, rank, ranks, NULL, hall, NULL, 0};
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  int status = bench_status(onebit_comm_create_self(&team.comm), "onebit_comm_create_self");
  if (status == BENCH_OK)
    status = body(&team, context);
  onebit_comm_destroy(team.comm);
  fflush(NULL);
  return status;
}

static void end_all(const pid_t *pids, int ranks) {
  for (int rank = 0; rank < ranks; rank++)
    if (pids[rank] > 0)
      kill(pids[rank], SIGKILL);
}

static void forget(pid_t *pids, int ranks, pid_t ended) {
  for (int rank = 0; rank < ranks; rank++)
    if (pids[rank] == ended)
      pids[rank] = 0;
}

/* When one has failed, the others get some seconds to notice and to say their words: it may have
 * been alone with it, and they wait for it. */
#define GRACE_MS 5000

static int await(pid_t *pids, int ranks) {
  int worst = BENCH_OK, status, left = GRACE_MS;
  for (pid_t ended; (ended = waitpid(-1, &status, WNOHANG)) >= 0;) {
    if (ended == 0) {
      nanosleep(&(struct timespec){0, 1000000}, NULL);
      left -= worst != BENCH_OK;
      if (left == 0)
        end_all(pids, ranks);
      continue;
    }
    int exited = WIFEXITED(status) ? WEXITSTATUS(status) : BENCH_FAILED;
    forget(pids, ranks, ended);
    if (WIFSIGNALED(status) && left > 0)
      bench_complain("a rank was ended: %s", strsignal(WTERMSIG(status)));
    worst = exited > worst ? exited : worst;
  }
  return worst;
}

static int start(struct hall *hall, pid_t *pids, int ranks, bench_body *body, const void *context) {
  fflush(NULL);
  for (int rank = 0; rank < ranks; rank++) {
    pids[rank] = fork();
    if (pids[rank] == 0) {
      free(pids); /* this process's copy */
      _exit(run_rank(hall, rank, ranks, body, context));
    }
    if (pids[rank] < 0) {
      bench_complain("--nccl-ranks %d: no process for rank %d", ranks, rank);
      end_all(pids, rank);
      await(pids, rank);
      return BENCH_FAILED;
    }
  }
  return await(pids, ranks);
}

static bool prepare(struct hall *hall, int ranks) {
  pthread_barrierattr_t shared;
  return pthread_barrierattr_init(&shared) == 0 &&
         pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED) == 0 &&
         pthread_barrier_init(&hall->barrier, &shared, (unsigned)ranks) == 0;
}

int bench_team_run_processes(int ranks, bench_body *body, const void *context) {
  size_t bytes = sizeof(struct hall) + (size_t)ranks * PART * sizeof(double);
  struct hall *hall = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  pid_t *pids = calloc((size_t)ranks, sizeof *pids);
  int status = BENCH_FAILED;
  if (hall != MAP_FAILED && pids && prepare(hall, ranks))
    status = start(hall, pids, ranks, body, context);
  else
    bench_complain("no memory for %d ranks", ranks);
  if (hall != MAP_FAILED)
    munmap(hall, bytes);
  free(pids);
  return status;
}
