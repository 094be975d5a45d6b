/* Runs ranks without MPI. They are threads of this process or processes that it starts, which
 * combine numbers in shared memory. Or they are processes of a launcher such as torchrun, which
 * communicate over the library's own connections. */
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
#include "collectives/communicator.h"
#include "collectives/watch.h"

#define PART ((size_t)4096) /* number of values that are combined at a time */

/* Combines up to PART values of each rank to their sum or maximum. */
static void team_reduce(const struct bench_team *team, const double *all, size_t part, bool sum,
                        double *values) {
  for (size_t i = 0; i < part; i++) {
    double result = all[i];
    for (int rank = 1; rank < team->size; rank++) {
      double value = all[(size_t)rank * PART + i];
      result = sum ? result + value : value > result ? value : result;
    }
    values[i] = result;
  }
}

/* A rank's entry in the shared memory. The shared memory has an array of these entries, one per
 * rank, and then the numbers that the ranks combine. */
struct member {
  pthread_barrier_t barrier; /* only that of rank 0 is used */
  struct bench_team team;
  bench_body *body;
  const void *context;
  union {
    pthread_t thread;
    pid_t process;
  } id;
  int status;
};

static void team_barrier(struct bench_team *team) {
  pthread_barrier_wait(&((struct member *)team->state)->barrier);
}

static void team_combine(struct bench_team *team, double *values, size_t count, bool sum) {
  double *all = (double *)((struct member *)team->state + team->size);
  for (size_t first = 0; first < count; first += PART) {
    size_t part = count - first < PART ? count - first : PART;
    memcpy(all + (size_t)team->rank * PART, values + first, part * sizeof *all);
    team_barrier(team);
    team_reduce(team, all, part, sum, values + first);
    team_barrier(team);
  }
}

static const struct bench_team_kind kind = {.barrier = team_barrier, .combine = team_combine};

/* Allocates the shared memory of all ranks, and calls `run`, which starts the ranks as threads or
 * processes and waits for them. */
static int run_members(int ranks, bench_body *body, const void *context,
                       int (*run)(struct member *members, int ranks)) {
  pthread_barrierattr_t shared;
  size_t bytes = (size_t)ranks * (sizeof(struct member) + PART * sizeof(double));
  struct member *members =
      mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (members == MAP_FAILED)
    return bench_report_no_memory("ranks", (size_t)ranks);
  pthread_barrierattr_init(&shared);
  pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
  pthread_barrier_init(&members->barrier, &shared, (unsigned)ranks);
  for (int rank = 0; rank < ranks; rank++) {
    members[rank].team =
        (struct bench_team){.kind = &kind, .rank = rank, .size = ranks, .state = members};
    members[rank].body = body;
    members[rank].context = context;
  }
  int status = run(members, ranks);
  munmap(members, bytes);
  return status;
}

/* --- Threads */

static void *bench_run_thread(void *argument) {
  struct member *member = argument;
  member->status = member->body(&member->team, member->context);
  return NULL;
}

/* Runs the ranks as threads; rank 0 is the calling thread. If a thread cannot be started, ends the
 * program, since the other ranks would wait for the missing rank for ever. */
static int bench_run_threads(struct member *members, int ranks) {
  onebit_comm_t *comms = calloc((size_t)ranks, sizeof(onebit_comm_t));
  int worst = comms ? bench_check_status(onebit_comm_create_loopback(ranks, comms),
                                         "onebit_comm_create_loopback")
                    : bench_report_no_memory("ranks", (size_t)ranks);
  for (int rank = ranks - 1; worst == BENCH_OK && rank >= 0; rank--) {
    members[rank].team.comm = comms[rank];
    if (rank == 0)
      bench_run_thread(&members[0]);
    else if (pthread_create(&members[rank].id.thread, NULL, bench_run_thread, &members[rank]) !=
             0) {
      bench_print_error("--ranks %d: the thread for rank %d cannot be created", ranks, rank);
      exit(BENCH_FAILED);
    }
  }
  bool ran = worst == BENCH_OK;
  for (int rank = 0; ran && rank < ranks; rank++) {
    if (rank > 0)
      pthread_join(members[rank].id.thread, NULL);
    worst = members[rank].status > worst ? members[rank].status : worst;
  }
  for (int rank = 0; comms && rank < ranks; rank++)
    onebit_comm_destroy(comms[rank]);
  free(comms);
  return worst;
}

int bench_team_run_threads(int ranks, bench_body *body, const void *context) {
  return run_members(ranks, body, context, bench_run_threads);
}

/* --- Processes */

/* Runs the body in the process of a rank. The kernel kills the process when its parent ends. */
static int bench_run_process(struct member *member) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  int status =
      bench_check_status(onebit_comm_create_self(&member->team.comm), "onebit_comm_create_self");
  if (status == BENCH_OK)
    status = member->body(&member->team, member->context);
  onebit_comm_destroy(member->team.comm);
  fflush(NULL);
  return status;
}

/* After a rank has failed, the other ranks have this many milliseconds to report errors of their
 * own before they are killed. They may be waiting for the rank that failed. */
#define GRACE_MS 5000

static int wait_for_processes(struct member *members, int ranks) {
  int worst = BENCH_OK, status, left = GRACE_MS;
  for (pid_t ended; (ended = waitpid(-1, &status, WNOHANG)) >= 0;) {
    if (ended == 0) {
      nanosleep(&(struct timespec){0, 1000000}, NULL);
      left -= worst != BENCH_OK;
    }
    for (int rank = 0; rank < ranks; rank++) {
      if (members[rank].id.process == ended)
        members[rank].id.process = 0;
      if (left == 0 && members[rank].id.process > 0)
        kill(members[rank].id.process, SIGKILL);
    }
    if (ended == 0)
      continue;
    if (WIFSIGNALED(status) && left > 0)
      bench_print_error("a rank was killed by a signal: %s", strsignal(WTERMSIG(status)));
    int exited = WIFEXITED(status) ? WEXITSTATUS(status) : BENCH_FAILED;
    worst = exited > worst ? exited : worst;
  }
  return worst;
}

/* Forks the ranks. If a rank cannot be started, kills the other ranks, which would wait for it for
 * ever. */
static int run_processes(struct member *members, int ranks) {
  fflush(NULL);
  for (int rank = 0; rank < ranks; rank++) {
    pid_t process = fork();
    if (process == 0)
      _exit(bench_run_process(&members[rank]));
    members[rank].id.process = process;
    if (process < 0) {
      bench_print_error("--nccl-ranks %d: the process for rank %d cannot be created", ranks, rank);
      while (rank-- > 0)
        kill(members[rank].id.process, SIGKILL);
      wait_for_processes(members, 0);
      return BENCH_FAILED;
    }
  }
  return wait_for_processes(members, ranks);
}

int bench_team_run_processes(int ranks, bench_body *body, const void *context) {
  return run_members(ranks, body, context, run_processes);
}

/* --- Processes that a launcher has started */

/* Ends the process after an error. If it went on, the ranks could wait for each other for ever. */
static void exit_on_error(onebit_status_t status, const char *what) {
  if (bench_check_status(status, what) != BENCH_OK)
    exit(BENCH_FAILED);
}

static void bench_sockets_barrier(struct bench_team *team) {
  exit_on_error(ob_agree(team->comm, ONEBIT_OK, NULL, 0), "barrier");
}

/* Sends this rank's numbers to all other ranks, and receives theirs. team->state has space for PART
 * numbers of each rank. */
static void team_exchange(struct bench_team *team, size_t count) {
  struct ob_batch *batch = team->comm->control;
  double *all = team->state, *mine = all + (size_t)team->rank * PART;
  size_t bytes = count * sizeof *all;
  batch->sends = batch->receives = 0;
  for (int peer = 0; peer < team->size; peer++) {
    if (peer == team->rank)
      continue;
    batch->send[batch->sends++] = (struct ob_endpoint){mine, bytes, peer};
    batch->receive[batch->receives++] =
        (struct ob_endpoint){all + (size_t)peer * PART, bytes, peer};
  }
  if (batch->sends == 0)
    return;
  exit_on_error(team->comm->transport->begin(batch, 0), "exchange of numbers");
  exit_on_error(ob_watch_batch(batch, "exchange of numbers"), "exchange of numbers");
}

static void bench_sockets_combine(struct bench_team *team, double *values, size_t count, bool sum) {
  double *all = team->state;
  for (size_t first = 0; first < count; first += PART) {
    size_t part = count - first < PART ? count - first : PART;
    memcpy(all + (size_t)team->rank * PART, values + first, part * sizeof *all);
    team_exchange(team, part);
    team_reduce(team, all, part, sum, values + first);
  }
}

static const struct bench_team_kind sockets_kind = {.barrier = bench_sockets_barrier,
                                                    .combine = bench_sockets_combine};

int bench_sockets_run(int connections, bench_body *body, const void *context) {
  onebit_sockets_options_t options = ONEBIT_SOCKETS_OPTIONS_INIT;
  struct bench_team team = {.kind = &sockets_kind};
  options.streams = connections;
  BENCH_TRY(bench_check_status(onebit_comm_create_sockets(&options, &team.comm),
                               "onebit_comm_create_sockets"));
  team.rank = onebit_comm_rank(team.comm);
  team.size = onebit_comm_size(team.comm);
  team.state = malloc((size_t)team.size * PART * sizeof(double));
  int status = team.state ? body(&team, context)
                          : bench_report_no_memory("ranks' numbers", (size_t)team.size);
  onebit_comm_destroy(team.comm);
  free(team.state);
  return status;
}
