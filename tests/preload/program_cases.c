/*
 * Cases of `program`: nonblocking and persistent sums, calls that a preloaded library must not
 * change, and calls that it must handle.
 */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/preload/program.h"

#if defined(OPEN_MPI) && OMPI_MAJOR_VERSION < 5
#include <mpi-ext.h>
#define PERSISTENT(arguments) MPIX_Allreduce_init arguments
#elif defined(OPEN_MPI) || MPI_VERSION >= 4
#define PERSISTENT(arguments) MPI_Allreduce_init arguments
#endif

enum { TENSORS = 4 };

static void wait_for_requests(int how, MPI_Request request[TENSORS]) {
  int done = 0, which, some[TENSORS], flag = 0;
  MPI_Status status, statuses[TENSORS];
  switch (how) {
  case 0:
    for (int t = TENSORS - 1; t >= 0; t--)
      MPI_Wait(&request[t], MPI_STATUS_IGNORE);
    break;
  case 1:
    MPI_Waitall(TENSORS, request, statuses);
    break;
  case 2:
    for (int t = 0; t < TENSORS; t++)
      MPI_Waitany(TENSORS, request, &which, &status);
    break;
  case 3:
    for (int count; done < TENSORS; done += count)
      MPI_Waitsome(TENSORS, request, &count, some, statuses);
    break;
  case 4:
    while (!flag)
      MPI_Testall(TENSORS, request, &flag, statuses);
    break;
  default:
    for (int t = TENSORS - 1; t >= 0; t--)
      for (flag = 0; !flag;)
        MPI_Test(&request[t], &flag, &status);
  }
}

void sum_nonblocking(void) {
  static float mine[TENSORS][COUNT], sum[TENSORS][COUNT];
  MPI_Request request[TENSORS];
  for (int step = 0; step < STEPS; step++) {
    for (int t = 0; t < TENSORS; t++) {
      fill_exact(mine[t], COUNT, step + t);
      MPI_Iallreduce(mine[t], sum[t], COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request[t]);
    }
    wait_for_requests((step + rank) % 6, request);
    for (int t = 0; t < TENSORS; t++)
      check_sum("nonblocking", sum[t], COUNT, step + t, size);
  }
}

/* Makes nonblocking sums and never waits for the last one. MPI forbids this, but some programs do
 * it. */
void leave_request_unfinished(void) {
  static float values[COUNT];
  MPI_Request request = MPI_REQUEST_NULL;
  for (int step = 0; step < STEPS; step++) {
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    fill_exact(values, COUNT, step);
    MPI_Iallreduce(MPI_IN_PLACE, values, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request);
  }
}

/* Checks that a nonblocking call makes progress while its rank waits in another call. */
void check_progress(void) {
  static float mine[COUNT], sum[COUNT];
  for (int step = 0; step < STEPS; step++) {
    MPI_Request request;
    int token = step;
    fill_exact(mine, COUNT, step);
    MPI_Iallreduce(mine, sum, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request);
    if (rank == 0 && size > 1)
      MPI_Recv(&token, 1, MPI_INT, 1, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    if (rank == 1)
      MPI_Send(&token, 1, MPI_INT, 0, 5, MPI_COMM_WORLD);
    check_sum("progress", sum, COUNT, step, size);
  }
}

/* Makes a blocking call with a NaN, which is therefore dense, while other calls are in flight. */
void mix_dense_and_compressed(void) {
  static float mine[COUNT], sum[COUNT], more[COUNT], most[COUNT];
  for (int step = 0; step < STEPS; step++) {
    MPI_Request request;
    fill_exact(mine, COUNT, step);
    fill_exact(more, COUNT, step);
    if (step == 25 && rank == 0)
      more[3] = INFINITY;
    MPI_Iallreduce(mine, sum, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request);
    MPI_Allreduce(more, most, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    if (step == 25 && isfinite(most[3]))
      fail("infinity", step, 3, most[3], INFINITY);
    most[3] = step == 25 ? exact_value(step, 3) * (float)size : most[3];
    check_sum("in flight", sum, COUNT, step, size);
    check_sum("beside", most, COUNT, step, size);
  }
}

void sum_persistent(void) {
#ifdef PERSISTENT
  static float mine[2][COUNT], sum[2][COUNT];
  MPI_Request request[2];
  MPI_Status statuses[2];
  for (int t = 0; t < 2; t++)
    PERSISTENT(
        (mine[t], sum[t], COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, MPI_INFO_NULL, &request[t]));
  for (int step = 0; step < STEPS; step++) {
    for (int t = 0; t < 2; t++)
      fill_exact(mine[t], COUNT, step + t);
    if (step % 2)
      MPI_Startall(2, request);
    else
      MPI_Start(&request[0]), MPI_Start(&request[1]);
    MPI_Waitall(2, request, statuses);
    for (int t = 0; t < 2; t++)
      check_sum("persistent", sum[t], COUNT, step + t, size);
  }
  for (int t = 0; t < 2; t++)
    MPI_Request_free(&request[t]);
#endif
}

/* Makes every tenth sum much smaller than the one before. The small sum must not contain the
 * residual of the large one. */
void sum_small_after_large(void) {
  static float mine[COUNT], sum[COUNT];
  for (int step = 0; step < STEPS; step++) {
    MPI_Request request;
    float scale = step % 10 == 9 ? 0.001F : 1;
    double error = 0, norm = 0;
    for (int i = 0; i < COUNT; i++)
      mine[i] = scale * (float)((i * 37 + step * 11 + rank) % 101 - 50);
    MPI_Iallreduce(mine, sum, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    for (int i = 0; i < COUNT; i++) {
      float whole = 0;
      for (int r = 0; r < size; r++)
        whole += scale * (float)((i * 37 + step * 11 + r) % 101 - 50);
      error += (double)((sum[i] - whole) * (sum[i] - whole));
      norm += (double)(whole * whole);
    }
    if (!(error < (step % 10 == 9 ? 1e-10 : 0.01) * norm))
      fail("quiet", step, 0, sqrt(error / norm), 0);
  }
}

/* ---- Calls that a preloaded library must not change, or that it must notice */

static int copied, deleted;

static int copy_attribute(MPI_Comm from, int key, void *extra, void *in, void *out, int *flag) {
  (void)from, (void)key, (void)extra;
  copied++;
  *(void **)out = in;
  *flag = 1;
  return MPI_SUCCESS;
}

static int delete_attribute(MPI_Comm from, int key, void *value, void *extra) {
  (void)from, (void)key, (void)value, (void)extra;
  deleted++;
  return MPI_SUCCESS;
}

static void sum_repeatedly(MPI_Comm comm, float *mine, float *sum) {
  for (int step = 0; step < STEPS; step++)
    sum_exact("often", mine, sum, COUNT, step, comm);
}

/* MPI must call the program's attribute callbacks for communicators that the program creates, and
 * for no other communicators. */
void check_attributes(void) {
  static float mine[COUNT], sum[COUNT];
  MPI_Comm comm;
  int key;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  MPI_Comm_create_keyval(copy_attribute, delete_attribute, &key, NULL);
  MPI_Comm_set_attr(comm, key, &key);
  sum_repeatedly(comm, mine, sum);
  MPI_Comm_free(&comm);
  MPI_Comm_free_keyval(&key);
  if (copied != 0 || deleted != 1)
    fail("attributes", copied, deleted, 0, 1);
}

/* MPI must report wrong arguments even for calls that would be compressed. */
void check_wrong_arguments(void) {
  static float mine[COUNT], sum[COUNT];
  MPI_Request request = MPI_REQUEST_NULL;
  sum_repeatedly(MPI_COMM_WORLD, mine, sum);
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
  sum_repeatedly(MPI_COMM_WORLD, mine, sum);
}

/* A forked child that exits normally must have its own exit status and report nothing. */
void check_forked_child(void) {
  static float mine[COUNT], sum[COUNT];
  int status = 0;
  sum_repeatedly(MPI_COMM_WORLD, mine, sum);
  pid_t child = fork();
  if (child == 0)
    exit(0);
  waitpid(child, &status, 0);
  if (status != 0)
    fail("a child's exit status", 0, 0, status, 0);
}

/* Calls that are never compressed, although they may exchange gradients. */
void reduce_and_broadcast(void) {
  static float mine[COUNT], sum[COUNT];
  for (int step = 0; step < STEPS; step++) {
    fill_exact(mine, COUNT, step);
    MPI_Reduce(mine, sum, COUNT, MPI_FLOAT, MPI_SUM, 0, MPI_COMM_WORLD);
    MPI_Bcast(sum, COUNT, MPI_FLOAT, 0, MPI_COMM_WORLD);
    check_sum("reduce and broadcast", sum, COUNT, step, size);
  }
}
