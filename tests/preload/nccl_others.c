/* Cases: calls that do not repeat, or are no sums; streams, graphs and communicators. */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "tests/preload/nccl_program.h"

/* Frees the buffer and gets it again for the next tensor, with another count. */
void reuse(void) {
  for (int step = 0; step < STEPS; step++) {
    int count = step < STEPS / 2 ? COUNT : COUNT - step;
    float *mine = device_memory(COUNT * sizeof *mine);
    fill(mine, count, step, 1);
    sum(mine, mine, (size_t)count);
    check("reuse", mine, count, step, (float)size);
    CUDA(cudaFree(mine));
  }
}

/* Adds one rank's NaN: the sum is NaN on all ranks, and later steps are right. */
void not_a_number(void) {
  float *mine = device_memory(COUNT * sizeof *mine);
  for (int step = 0; step < STEPS; step++) {
    int spoilt = step % 9 == 8;
    for (int i = 0; i < COUNT; i++)
      host[i] = exact(step, i);
    if (spoilt && rank == step % size)
      host[step] = NAN;
    load(mine, COUNT * sizeof *mine);
    sum(mine, mine, COUNT);
    if (!spoilt) {
      check("not a number", mine, COUNT, step, (float)size);
      continue;
    }
    fetch(mine, COUNT * sizeof *mine);
    if (!isnan(host[step]))
      fail("not a number", step, step, host[step], NAN);
    for (int i = 0; i < COUNT; i++)
      if (!isnan(host[i]) && host[i] != exact(step, i) * (float)size)
        fail("not a number", step, i, host[i], exact(step, i) * (float)size);
  }
  CUDA(cudaFree(mine));
}

/* Makes calls that are never compressed: other types and operations, and of one rank. */
void foreign(void) {
  int *whole = device_memory(COUNT * sizeof *whole);
  float *mine = device_memory(COUNT * sizeof *mine);
  for (int step = 0; step < STEPS; step++) {
    fill(mine, COUNT, step, (float)(rank + 1));
    NCCL(ncclAllReduce(mine, mine, COUNT, ncclFloat, ncclMax, comm, stream));
    fetch(mine, COUNT * sizeof *mine);
    for (int i = 0; i < COUNT; i++)
      if (host[i] != (exact(step, i) > 0 ? exact(step, i) * (float)size : exact(step, i)))
        fail("largest", step, i, host[i], exact(step, i));
    for (int i = 0; i < COUNT; i++)
      ((int *)(void *)host)[i] = i + step;
    load(whole, COUNT * sizeof *whole);
    NCCL(ncclAllReduce(whole, whole, COUNT, ncclInt, ncclSum, comm, stream));
    fetch(whole, COUNT * sizeof *whole);
    for (int i = 0; i < COUNT; i++)
      if (((int *)(void *)host)[i] != (i + step) * size)
        fail("whole numbers", step, i, ((int *)(void *)host)[i], (i + step) * size);
  }
  CUDA(cudaFree(whole)), CUDA(cudaFree(mine));
}

/* Gathers and scatters each rank's part, in place and not. Gathered values differ in magnitude by
 * rank. */
void gather_and_scatter(void) {
  const size_t bytes = COUNT * sizeof(float);
  float *all = device_memory((size_t)size * bytes), *part = device_memory(bytes);
  for (int step = 0; step < STEPS; step++) {
    for (int r = 0; r < size; r++)
      fill(all + (size_t)r * COUNT, COUNT, step + r, 1);
    NCCL(ncclReduceScatter(all, part, COUNT, ncclFloat, ncclSum, comm, stream));
    check("reduce-scatter", part, COUNT, step + rank, (float)size);
    float *own = all + (size_t)rank * COUNT;
    NCCL(ncclReduceScatter(all, own, COUNT, ncclFloat, ncclAvg, comm, stream));
    check("reduce-scatter in place", own, COUNT, step + rank, 1);
    fill(part, COUNT, step, (float)(rank + 1));
    NCCL(ncclAllGather(part, all, COUNT, ncclFloat, comm, stream));
    for (int r = 0; r < size; r++)
      check("allgather", all + (size_t)r * COUNT, COUNT, step, (float)(r + 1));
    fill(own, COUNT, step + 1, (float)(rank + 1));
    NCCL(ncclAllGather(own, all, COUNT, ncclFloat, comm, stream));
    for (int r = 0; r < size; r++)
      check("allgather in place", all + (size_t)r * COUNT, COUNT, step + 1, (float)(r + 1));
  }
  CUDA(cudaFree(all)), CUDA(cudaFree(part));
}

/* Makes another call between from time to time, and changes the order in the middle. */
void order(void) {
  float *one = device_memory(COUNT * sizeof *one),
        *other = device_memory((COUNT + 1) * sizeof *other);
  for (int step = 0; step < 2 * STEPS; step++) {
    float *first = step < STEPS ? one : other, *second = step < STEPS ? other : one;
    int count = step < STEPS ? COUNT : COUNT + 1, count2 = step < STEPS ? COUNT + 1 : COUNT;
    fill(first, count, step, 1);
    fill(second, count2, step, 3);
    sum(first, first, (size_t)count);
    if (step % 17 == 16) {
      sum(first, first, (size_t)count);
      check("once more", first, count, step, (float)(size * size));
    } else {
      check("order", first, count, step, (float)size);
    }
    sum(second, second, (size_t)count2);
    check("order", second, count2, step, 3 * (float)size);
  }
  CUDA(cudaFree(one)), CUDA(cudaFree(other));
}

/* Alternates two streams, which wait for each other. */
void streams(void) {
  float *mine = device_memory(COUNT * sizeof *mine);
  cudaStream_t both[2], before = stream;
  cudaEvent_t done;
  CUDA(cudaStreamCreateWithFlags(&both[0], cudaStreamNonBlocking));
  CUDA(cudaStreamCreateWithFlags(&both[1], cudaStreamNonBlocking));
  CUDA(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
  for (int step = 0; step < STEPS; step++) {
    fill(mine, COUNT, step, 1);
    stream = both[step % 2];
    sum(mine, mine, COUNT);
    CUDA(cudaEventRecord(done, stream));
    stream = before;
    CUDA(cudaStreamWaitEvent(stream, done, 0));
    check("streams", mine, COUNT, step, (float)size);
  }
  CUDA(cudaStreamDestroy(both[0])), CUDA(cudaStreamDestroy(both[1]));
  CUDA(cudaEventDestroy(done)), CUDA(cudaFree(mine));
}

/* Captures sums in a graph after a number of calls, with or without other calls beside it. */
static void graph_after(int before, bool beside) {
  float *mine = device_memory(COUNT * sizeof *mine), *all = device_memory(COUNT * sizeof *all);
  for (int step = 0; step < before; step++) {
    fill(mine, COUNT, step, 1);
    sum(mine, all, COUNT);
    check("before a graph", all, COUNT, step, (float)size);
  }
  captured_begin();
  sum(mine, all, COUNT);
  cudaGraphExec_t ready = captured_end();
  for (int step = 0; step < STEPS; step++) {
    fill(mine, COUNT, step, 1);
    if (step % 2 || !beside)
      CUDA(cudaGraphLaunch(ready, stream));
    else
      sum(mine, all, COUNT);
    check("graph", all, COUNT, step, (float)size);
  }
  CUDA(cudaGraphExecDestroy(ready));
  CUDA(cudaFree(mine)), CUDA(cudaFree(all));
}

void graph(void) { graph_after(STEPS / 2, true); }

/* Captures a graph before the ranks have agreed on anything. */
void early_graph(void) { graph_after(0, false); }

/* Makes three sums a step, two of one length; then in a graph, where two of them have other
 * buffers, with steps outside of it now and then. */
void graph_of_several(void) {
  float *each[5];
  cudaGraphExec_t ready = NULL;
  for (int k = 0; k < 5; k++)
    each[k] = device_memory((COUNT + 1) * sizeof **each);
  for (int step = 0; step < 2 * STEPS; step++) {
    const bool replayed = step > STEPS && step % 8;
    float *const *at = replayed ? &each[2] : each;
    if (step == STEPS)
      captured_begin();
    for (int k = 0; k < 3; k++) {
      if (step != STEPS)
        fill(at[k], COUNT + k % 2, step + k, (float)(k + 1));
      if (!replayed)
        sum(step == STEPS ? each[2 + k] : at[k], step == STEPS ? each[2 + k] : at[k],
            (size_t)(COUNT + k % 2));
    }
    if (step == STEPS) {
      ready = captured_end();
      continue;
    }
    if (replayed)
      CUDA(cudaGraphLaunch(ready, stream));
    for (int k = 0; k < 3; k++)
      check("graph of several", at[k], COUNT + k % 2, step + k, (float)((k + 1) * size));
  }
  CUDA(cudaGraphExecDestroy(ready));
  for (int k = 0; k < 5; k++)
    CUDA(cudaFree(each[k]));
}

/* Makes communicators of some of the ranks and destroys them with compressed tensors on them. */
void communicators(void) {
  ncclComm_t whole = comm, part;
  float *mine = device_memory(COUNT * sizeof *mine);
  for (int turn = 0; turn < 2; turn++) {
    int members = rank % 2 ? size / 2 : (size + 1) / 2;
    NCCL(ncclCommSplit(whole, rank % 2, rank, &part, NULL));
    comm = part;
    for (int step = 0; step < STEPS; step++) {
      fill(mine, COUNT, step, 1);
      sum(mine, mine, COUNT);
      check("part", mine, COUNT, step, (float)members);
    }
    if (turn)
      NCCL(ncclCommFinalize(part));
    NCCL(ncclCommDestroy(part));
  }
  comm = whole;
  CUDA(cudaFree(mine));
}

/* Makes a communicator of all ranks but the last. */
void shrunk(void) {
  ncclComm_t whole = comm;
  int last = size - 1;
  if (rank == last)
    return;
  float *mine = device_memory(COUNT * sizeof *mine);
  NCCL(ncclCommShrink(whole, &last, 1, &comm, NULL, NCCL_SHRINK_DEFAULT));
  for (int step = 0; step < STEPS; step++) {
    fill(mine, COUNT, step, 1);
    sum(mine, mine, COUNT);
    check("shrunk", mine, COUNT, step, (float)last);
  }
  NCCL(ncclCommDestroy(comm));
  comm = whole;
  CUDA(cudaFree(mine));
}

/* Makes a nonblocking communicator of the same ranks, whose id they exchange as a sum to which only
 * rank 0 contributes. */
void nonblocking(void) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclResult_t state = ncclInProgress;
  ncclComm_t whole = comm;
  ncclUniqueId id;
  float *mine = device_memory(COUNT * sizeof *mine);
  memset(host, 0, sizeof id);
  if (rank == 0) {
    NCCL(ncclGetUniqueId(&id));
    memcpy(host, &id, sizeof id);
  }
  load(mine, sizeof id);
  NCCL(ncclAllReduce(mine, mine, sizeof id, ncclUint8, ncclSum, whole, stream));
  fetch(mine, sizeof id);
  memcpy(&id, host, sizeof id);
  config.blocking = 0;
  ncclResult_t result = ncclCommInitRankConfig(&comm, size, id, rank, &config);
  while (result == ncclInProgress || state == ncclInProgress) {
    NCCL(ncclCommGetAsyncError(comm, &state));
    result = ncclSuccess;
  }
  for (int step = 0; step < STEPS; step++) {
    fill(mine, COUNT, step, 1);
    if (ncclAllReduce(mine, mine, COUNT, ncclFloat, ncclSum, comm, stream) == ncclInProgress)
      do
        NCCL(ncclCommGetAsyncError(comm, &state));
      while (state == ncclInProgress);
    check("nonblocking", mine, COUNT, step, (float)size);
  }
  if (ncclCommFinalize(comm) == ncclInProgress)
    do
      NCCL(ncclCommGetAsyncError(comm, &state));
    while (state == ncclInProgress);
  NCCL(ncclCommDestroy(comm));
  comm = whole;
  CUDA(cudaFree(mine));
}
