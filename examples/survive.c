/*
 * A training that continues after the loss of a rank. If MPI supports user-level failure mitigation
 * (ULFM), the other ranks continue without a file. Otherwise the job is started again and loads a
 * checkpoint:
 *
 *   mpirun --with-ft ulfm -n 8 build/examples/survive
 *   until mpirun -n 8 build/examples/survive --checkpoint run; do sleep 1; done
 *
 * --kill RANK STEP kills that rank at that step, to simulate a host that loses power.
 */
#define _POSIX_C_SOURCE 200809L
#include <onebit/checkpoint.h>
#include <onebit/mpi.h>
#include <onebit/onebit.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FEATURES = 20000, POINTS = 64, STEPS = 400, SAVE_EVERY = 50, NOBODY = -1 };
static float weights[FEATURES], gradient[FEATURES];

typedef struct job {
  onebit_comm_t comm;
  onebit_optimizer_t optimizer;
  const char *checkpoint; /* a directory, or NULL */
  int kill_rank, kill_step;
} job_t;

static float feature(int point, int i) { /* returns a pseudorandom value from -1 to 1 */
  unsigned n = ((unsigned)point * 7919u + (unsigned)i * 104729u) * 2654435761u;
  return (float)((n ^ n >> 15) >> 8 & 0xffff) / 32768 - 1;
}

/* Computes the gradient of the mean squared error on this rank's points. With fewer ranks each rank
 * has more points. */
static double compute_gradient(int rank, int size) {
  double loss = 0;
  int first = POINTS * rank / size, end = POINTS * (rank + 1) / size;
  memset(gradient, 0, sizeof gradient);
  for (int point = first; point < end; point++) {
    float missed = 0;
    for (int i = 0; i < FEATURES; i++)
      missed += feature(point, i) * (weights[i] - (float)(i % 11 - 5) / 100);
    for (int i = 0; i < FEATURES; i++)
      gradient[i] += missed * feature(point, i) * (float)size / POINTS;
    loss += (double)(missed * missed) / (end - first);
  }
  return loss;
}

static uint64_t steps_of(const job_t *job) {
  onebit_optimizer_info_t info = {.size = sizeof info};
  onebit_optimizer_get_info(job->optimizer, &info);
  return info.steps;
}

/* Continues with the remaining ranks. All of them call this function after a step that failed
 * because a rank was lost. */
static onebit_status_t continue_without(job_t *job) {
  onebit_comm_t survivors = NULL, old = job->comm;
  double began = MPI_Wtime();
  fprintf(stderr, "rank %d: %s\n", onebit_comm_rank(old), onebit_last_error());
  onebit_status_t status = onebit_optimizer_shrink(job->optimizer, &survivors);
  if (survivors)
    job->comm = survivors;
  if (status != ONEBIT_OK)
    return status;
  onebit_comm_destroy(old);
  if (onebit_comm_rank(job->comm) == 0)
    printf("%d ranks go on after step %d, within %.3f s\n", onebit_comm_size(job->comm),
           (int)steps_of(job), MPI_Wtime() - began);
  return ONEBIT_OK;
}

static onebit_status_t make_step(job_t *job, int step) {
  int rank = onebit_comm_rank(job->comm);
  if (job->kill_rank == rank && job->kill_step == step)
    raise(SIGKILL);
  double loss = compute_gradient(rank, onebit_comm_size(job->comm)); /* the loss on this rank's
                                                                      * points */
  onebit_status_t status =
      onebit_optimizer_step(job->optimizer, 1e-3f * (float)(STEPS - step) / STEPS);
  if (rank == 0 && (step + 1) % SAVE_EVERY == 0)
    printf("step %d, loss %.6f\n", step + 1, loss);
  if (status == ONEBIT_OK && job->checkpoint && (step + 1) % SAVE_EVERY == 0)
    status = onebit_optimizer_save_files(job->optimizer, job->checkpoint);
  return status;
}

static onebit_status_t train(job_t *job) {
  onebit_status_t status = ONEBIT_OK;
  for (int step; (step = (int)steps_of(job)) < STEPS;) {
    status = make_step(job, step);
    if (status == ONEBIT_ERROR_TRANSPORT || status == ONEBIT_ERROR_PEER) {
      job->kill_rank = NOBODY;
      status = continue_without(job);
    }
    if (status != ONEBIT_OK && status != ONEBIT_SKIPPED)
      return status;
  }
  return ONEBIT_OK;
}

/* Loads the checkpoint. All ranks have just been started and see the same files. */
static onebit_status_t load_checkpoint(const job_t *job) {
  char manifest[4096];
  snprintf(manifest, sizeof manifest, "%s/manifest", job->checkpoint);
  int there = onebit_comm_rank(job->comm) == 0 && access(manifest, F_OK) == 0;
  MPI_Bcast(&there, 1, MPI_INT, 0, MPI_COMM_WORLD);
  return there ? onebit_optimizer_load_files(job->optimizer, job->checkpoint) : ONEBIT_OK;
}

static void read_arguments(job_t *job, int argc, char **argv) {
  for (int i = 1; i < argc; i++)
    if (!strcmp(argv[i], "--checkpoint") && i + 1 < argc) {
      job->checkpoint = argv[++i];
    } else if (!strcmp(argv[i], "--kill") && i + 2 < argc) {
      job->kill_rank = atoi(argv[++i]);
      job->kill_step = atoi(argv[++i]);
    } else {
      fprintf(stderr, "usage: survive [--checkpoint DIRECTORY] [--kill RANK STEP]\n");
      exit(2);
    }
}

int main(int argc, char **argv) {
  job_t job = {.kill_rank = NOBODY};
  read_arguments(&job, argc, argv);
  MPI_Init(&argc, &argv);
  setvbuf(stdout, NULL, _IOLBF, 0);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN); /* the default handler would end the
                                                               * job when a rank is lost */
  onebit_tensor_t tensor = {.parameter = weights, .gradient = gradient, .count = FEATURES};
  onebit_status_t status = onebit_comm_create_mpi(MPI_COMM_WORLD, &job.comm);
  if (status == ONEBIT_OK)
    status = onebit_efficient_adam_create(job.comm, &tensor, 1, NULL, &job.optimizer);
  if (status == ONEBIT_OK && job.checkpoint)
    status = load_checkpoint(&job);
  if (status == ONEBIT_OK)
    status = train(&job);
  if (status != ONEBIT_OK) { /* the shell's loop starts the job again, from the checkpoint */
    fprintf(stderr, "%s: %s\n", onebit_status_string(status), onebit_last_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  if (onebit_comm_rank(job.comm) == 0)
    printf("done: %d ranks, %d steps, loss %.6f\n", onebit_comm_size(job.comm), (int)steps_of(&job),
           compute_gradient(0, 1));
  onebit_optimizer_destroy(job.optimizer);
  onebit_comm_destroy(job.comm);
  MPI_Finalize();
  return 0;
}
