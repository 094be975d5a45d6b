/* Cases of `program`: the things that a preloaded library must not change, or must notice. */
#define _POSIX_C_SOURCE 200809L
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/preload/program.h"

static int copied, deleted;

static int copy(MPI_Comm from, int key, void *extra, void *in, void *out, int *flag) {
  (void)from, (void)key, (void)extra;
  copied++;
  *(void **)out = in;
  *flag = 1;
  return MPI_SUCCESS;
}

static int drop(MPI_Comm from, int key, void *value, void *extra) {
  (void)from, (void)key, (void)value, (void)extra;
  deleted++;
  return MPI_SUCCESS;
}

static void sum_often(MPI_Comm comm, float *mine, float *sum) {
  for (int step = 0; step < STEPS; step++) {
    fill(mine, COUNT, step);
    MPI_Allreduce(mine, sum, COUNT, MPI_FLOAT, MPI_SUM, comm);
    check("often", sum, COUNT, step, size);
  }
}

/* MPI calls the program's callbacks for communicators that the program makes, and for no others. */
void attributes(void) {
  float *mine = floats(COUNT), *sum = floats(COUNT);
  MPI_Comm comm;
  int key;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  MPI_Comm_create_keyval(copy, drop, &key, NULL);
  MPI_Comm_set_attr(comm, key, &key);
  sum_often(comm, mine, sum);
  MPI_Comm_free(&comm);
  MPI_Comm_free_keyval(&key);
  if (copied != 0 || deleted != 1)
    fail("attributes", copied, deleted, 0, 1);
  free(mine), free(sum);
}

/* MPI reports wrong arguments, also of calls that would be compressed. */
void arguments(void) {
  float *mine = floats(COUNT), *sum = floats(COUNT);
  MPI_Request request = MPI_REQUEST_NULL;
  sum_often(MPI_COMM_WORLD, mine, sum);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  const int codes[] = {
      MPI_Allreduce(mine, mine, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD),
      MPI_Allreduce(mine, MPI_IN_PLACE, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD),
      MPI_Allreduce(mine, sum, -1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD),
      MPI_Allreduce(mine, sum, COUNT, MPI_FLOAT, MPI_OP_NULL, MPI_COMM_WORLD),
      MPI_Iallreduce(mine, mine, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request),
      MPI_Iallreduce(mine, MPI_IN_PLACE, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request)};
  for (int i = 0; i < (int)(sizeof codes / sizeof codes[0]); i++)
    if (codes[i] == MPI_SUCCESS)
      fail("wrong arguments", i, 0, 0, 1);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_ARE_FATAL);
  sum_often(MPI_COMM_WORLD, mine, sum);
  free(mine), free(sum);
}

/* A child that exits normally has its own exit status and reports nothing. */
void forked(void) {
  float *mine = floats(COUNT), *sum = floats(COUNT);
  int status = 0;
  sum_often(MPI_COMM_WORLD, mine, sum);
  pid_t child = fork();
  if (child == 0)
    exit(0);
  waitpid(child, &status, 0);
  if (status != 0)
    fail("a child's exit status", 0, 0, status, 0);
  free(mine), free(sum);
}

/* Calls that are never compressed, though they may be of gradients. */
void reduce_and_broadcast(void) {
  float *mine = floats(COUNT), *sum = floats(COUNT);
  for (int step = 0; step < STEPS; step++) {
    fill(mine, COUNT, step);
    MPI_Reduce(mine, sum, COUNT, MPI_FLOAT, MPI_SUM, 0, MPI_COMM_WORLD);
    MPI_Bcast(sum, COUNT, MPI_FLOAT, 0, MPI_COMM_WORLD);
    check("reduce and broadcast", sum, COUNT, step, size);
  }
  free(mine), free(sum);
}
