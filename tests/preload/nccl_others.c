/* Cases of nccl_program: calls that do not repeat, calls that are not sums, streams, graphs and
 * communicators. */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "tests/preload/nccl_program.h"

/* In each step sums a tensor in a new buffer and frees it. The next step's tensor has another
 * count, and its buffer has the same address. */
void sum_in_reused_buffer(void) {
  for (int step = 0; step < STEPS; step++) {
    int count = step < STEPS / 2 ? COUNT : COUNT - step;
    float *mine = device_memory(COUNT * sizeof *mine);
    fill_exact(mine, count, step, 1);
    sum_on_stream(mine, mine, (size_t)count);
    check_values("reuse", mine, count, step, (float)size);
    CUDA(cudaFree(mine));
  }
}

/* Makes one rank's input NaN. The sum must be NaN on all ranks, and later steps must be correct. */
void sum_not_a_number(void) {
  float *mine = device_memory(COUNT * sizeof *mine);
  for (int step = 0; step < STEPS; step++) {
    int spoilt = step % 9 == 8;
    for (int i = 0; i < COUNT; i++)
      host[i] = exact_value(step, i);
    if (spoilt && rank == step % size)
      host[step] = NAN;
    copy_to_device(mine, COUNT * sizeof *mine);
    sum_on_stream(mine, mine, COUNT);
    if (!spoilt) {
      check_values("not a number", mine, COUNT, step, (float)size);
      continue;
    }
    copy_from_device(mine, COUNT * sizeof *mine);
    if (!isnan(host[step]))
      fail("not a number", step, step, host[step], NAN);
    for (int i = 0; i < COUNT; i++)
      if (!isnan(host[i]) && host[i] != exact_value(step, i) * (float)size)
        fail("not a number", step, i, host[i], exact_value(step, i) * (float)size);
  }
  CUDA(cudaFree(mine));
}

/* Makes calls that are never compressed: other types, other operations, and calls on a communicator
 * of one rank. */
void make_other_calls(void) {
  int *whole = device_memory(COUNT * sizeof *whole);
  float *mine = device_memory(COUNT * sizeof *mine);
  for (int step = 0; step < STEPS; step++) {
    fill_exact(mine, COUNT, step, (float)(rank + 1));
    NCCL(ncclAllReduce(mine, mine, COUNT, ncclFloat, ncclMax, comm, stream));
    copy_from_device(mine, COUNT * sizeof *mine);
    for (int i = 0; i < COUNT; i++)
      if (host[i] !=
          (exact_value(step, i) > 0 ? exact_value(step, i) * (float)size : exact_value(step, i)))
        fail("largest", step, i, host[i], exact_value(step, i));
    for (int i = 0; i < COUNT; i++)
      ((int *)(void *)host)[i] = i + step;
    copy_to_device(whole, COUNT * sizeof *whole);
    NCCL(ncclAllReduce(whole, whole, COUNT, ncclInt, ncclSum, comm, stream));
    copy_from_device(whole, COUNT * sizeof *whole);
    for (int i = 0; i < COUNT; i++)
      if (((int *)(void *)host)[i] != (i + step) * size)
        fail("whole numbers", step, i, ((int *)(void *)host)[i], (i + step) * size);
  }
  CUDA(cudaFree(whole)), CUDA(cudaFree(mine));
}

/* Makes allgathers and reduce-scatters, in place and with separate buffers. In an allgather the
 * ranks' values differ in magnitude. */
void gather_and_scatter(void) {
  const size_t bytes = COUNT * sizeof(float);
  float *all = device_memory((size_t)size * bytes), *part = device_memory(bytes);
  for (int step = 0; step < STEPS; step++) {
    for (int r = 0; r < size; r++)
      fill_exact(all + (size_t)r * COUNT, COUNT, step + r, 1);
    NCCL(ncclReduceScatter(all, part, COUNT, ncclFloat, ncclSum, comm, stream));
    check_values("reduce-scatter", part, COUNT, step + rank, (float)size);
    float *own = all + (size_t)rank * COUNT;
    NCCL(ncclReduceScatter(all, own, COUNT, ncclFloat, ncclAvg, comm, stream));
    check_values("reduce-scatter in place", own, COUNT, step + rank, 1);
    fill_exact(part, COUNT, step, (float)(rank + 1));
    NCCL(ncclAllGather(part, all, COUNT, ncclFloat, comm, stream));
    for (int r = 0; r < size; r++)
      check_values("allgather", all + (size_t)r * COUNT, COUNT, step, (float)(r + 1));
    fill_exact(own, COUNT, step + 1, (float)(rank + 1));
    NCCL(ncclAllGather(own, all, COUNT, ncclFloat, comm, stream));
    for (int r = 0; r < size; r++)
      check_values("allgather in place", all + (size_t)r * COUNT, COUNT, step + 1, (float)(r + 1));
  }
  CUDA(cudaFree(all)), CUDA(cudaFree(part));
}

/* Makes an additional call in some steps, and reverses the order of the calls after half of the
 * steps. */
void change_order(void) {
  float *one = device_memory(COUNT * sizeof *one),
        *other = device_memory((COUNT + 1) * sizeof *other);
  for (int step = 0; step < 2 * STEPS; step++) {
    float *first = step < STEPS ? one : other, *second = step < STEPS ? other : one;
    int count = step < STEPS ? COUNT : COUNT + 1, count2 = step < STEPS ? COUNT + 1 : COUNT;
    fill_exact(first, count, step, 1);
    fill_exact(second, count2, step, 3);
    sum_on_stream(first, first, (size_t)count);
    if (step % 17 == 16) {
      sum_on_stream(first, first, (size_t)count);
      check_values("once more", first, count, step, (float)(size * size));
    } else {
      check_values("order", first, count, step, (float)size);
    }
    sum_on_stream(second, second, (size_t)count2);
    check_values("order", second, count2, step, 3 * (float)size);
  }
  CUDA(cudaFree(one)), CUDA(cudaFree(other));
}

/* Makes sums on two streams alternately. Each stream waits for the other one. */
void alternate_streams(void) {
  float *mine = device_memory(COUNT * sizeof *mine);
  cudaStream_t both[2], before = stream;
  cudaEvent_t done;
  CUDA(cudaStreamCreateWithFlags(&both[0], cudaStreamNonBlocking));
  CUDA(cudaStreamCreateWithFlags(&both[1], cudaStreamNonBlocking));
  CUDA(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
  for (int step = 0; step < STEPS; step++) {
    fill_exact(mine, COUNT, step, 1);
    stream = both[step % 2];
    sum_on_stream(mine, mine, COUNT);
    CUDA(cudaEventRecord(done, stream));
    stream = before;
    CUDA(cudaStreamWaitEvent(stream, done, 0));
    check_values("streams", mine, COUNT, step, (float)size);
  }
  CUDA(cudaStreamDestroy(both[0])), CUDA(cudaStreamDestroy(both[1]));
  CUDA(cudaEventDestroy(done)), CUDA(cudaFree(mine));
}

/* Captures a sum in a graph after `before` calls, and launches the graph in each step. If `beside`
 * is true, makes every second sum outside of the graph instead. */
static void capture_after(int before, bool beside) {
  float *mine = device_memory(COUNT * sizeof *mine), *all = device_memory(COUNT * sizeof *all);
  for (int step = 0; step < before; step++) {
    fill_exact(mine, COUNT, step, 1);
    sum_on_stream(mine, all, COUNT);
    check_values("before a graph", all, COUNT, step, (float)size);
  }
  begin_capture();
  sum_on_stream(mine, all, COUNT);
  cudaGraphExec_t ready = end_capture();
  for (int step = 0; step < STEPS; step++) {
    fill_exact(mine, COUNT, step, 1);
    if (step % 2 || !beside)
      CUDA(cudaGraphLaunch(ready, stream));
    else
      sum_on_stream(mine, all, COUNT);
    check_values("graph", all, COUNT, step, (float)size);
  }
  CUDA(cudaGraphExecDestroy(ready));
  CUDA(cudaFree(mine)), CUDA(cudaFree(all));
}

void capture_sums(void) { capture_after(STEPS / 2, true); }

/* Captures a graph before the ranks have agreed on anything. */
void capture_early(void) { capture_after(0, false); }

/* Makes three sums per step, two of which have the same length. Later steps launch a graph of these
 * sums, in which two sums have other buffers. Some later steps still make the sums outside of the
 * graph. */
void capture_several_sums(void) {
  float *each[5];
  cudaGraphExec_t ready = NULL;
  for (int k = 0; k < 5; k++)
    each[k] = device_memory((COUNT + 1) * sizeof **each);
  for (int step = 0; step < 2 * STEPS; step++) {
    const bool replayed = step > STEPS && step % 8;
    float *const *at = replayed ? &each[2] : each;
    if (step == STEPS)
      begin_capture();
    for (int k = 0; k < 3; k++) {
      if (step != STEPS)
        fill_exact(at[k], COUNT + k % 2, step + k, (float)(k + 1));
      if (!replayed)
        sum_on_stream(step == STEPS ? each[2 + k] : at[k], step == STEPS ? each[2 + k] : at[k],
                      (size_t)(COUNT + k % 2));
    }
    if (step == STEPS) {
      ready = end_capture();
      continue;
    }
    if (replayed)
      CUDA(cudaGraphLaunch(ready, stream));
    for (int k = 0; k < 3; k++)
      check_values("graph of several", at[k], COUNT + k % 2, step + k, (float)((k + 1) * size));
  }
  CUDA(cudaGraphExecDestroy(ready));
  for (int k = 0; k < 5; k++)
    CUDA(cudaFree(each[k]));
}

/* Creates communicators of some of the ranks, and destroys them while compressed tensors exist on
 * them. */
void sum_on_communicators(void) {
  ncclComm_t whole = comm, part;
  float *mine = device_memory(COUNT * sizeof *mine);
  for (int turn = 0; turn < 2; turn++) {
    int members = rank % 2 ? size / 2 : (size + 1) / 2;
    NCCL(ncclCommSplit(whole, rank % 2, rank, &part, NULL));
    comm = part;
    for (int step = 0; step < STEPS; step++) {
      fill_exact(mine, COUNT, step, 1);
      sum_on_stream(mine, mine, COUNT);
      check_values("part", mine, COUNT, step, (float)members);
    }
    if (turn)
      NCCL(ncclCommFinalize(part));
    NCCL(ncclCommDestroy(part));
  }
  comm = whole;
  CUDA(cudaFree(mine));
}

/* Creates a communicator of all ranks except the last one. */
void sum_on_shrunk_communicator(void) {
  ncclComm_t whole = comm;
  int last = size - 1;
  if (rank == last)
    return;
  float *mine = device_memory(COUNT * sizeof *mine);
  NCCL(ncclCommShrink(whole, &last, 1, &comm, NULL, NCCL_SHRINK_DEFAULT));
  for (int step = 0; step < STEPS; step++) {
    fill_exact(mine, COUNT, step, 1);
    sum_on_stream(mine, mine, COUNT);
    check_values("shrunk", mine, COUNT, step, (float)last);
  }
  NCCL(ncclCommDestroy(comm));
  comm = whole;
  CUDA(cudaFree(mine));
}

/* Creates a nonblocking communicator of the same ranks. The ranks exchange its id as a sum to which
 * only rank 0 contributes. */
void sum_on_nonblocking_communicator(void) {
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
  copy_to_device(mine, sizeof id);
  NCCL(ncclAllReduce(mine, mine, sizeof id, ncclUint8, ncclSum, whole, stream));
  copy_from_device(mine, sizeof id);
  memcpy(&id, host, sizeof id);
  config.blocking = 0;
  ncclResult_t result = ncclCommInitRankConfig(&comm, size, id, rank, &config);
  while (result == ncclInProgress || state == ncclInProgress) {
    NCCL(ncclCommGetAsyncError(comm, &state));
    result = ncclSuccess;
  }
  for (int step = 0; step < STEPS; step++) {
    fill_exact(mine, COUNT, step, 1);
    if (ncclAllReduce(mine, mine, COUNT, ncclFloat, ncclSum, comm, stream) == ncclInProgress)
      do
        NCCL(ncclCommGetAsyncError(comm, &state));
      while (state == ncclInProgress);
    check_values("nonblocking", mine, COUNT, step, (float)size);
  }
  if (ncclCommFinalize(comm) == ncclInProgress)
    do
      NCCL(ncclCommGetAsyncError(comm, &state));
    while (state == ncclInProgress);
  NCCL(ncclCommDestroy(comm));
  comm = whole;
  CUDA(cudaFree(mine));
}
