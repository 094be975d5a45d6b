/* Cases of nccl_program: sums that every step repeats, alone and in groups. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "tests/preload/nccl_program.h"

/* Sums the same buffers in each step: two tensors, one of them in place, and one small tensor. */
void sum_steadily(void) {
  float *mine = device_memory((COUNT + 1) * sizeof *mine),
        *all = device_memory(COUNT * sizeof *all);
  float *other = device_memory((COUNT + 1) * sizeof *other), *one = device_memory(sizeof *one);
  for (int step = 0; step < STEPS; step++) {
    fill_exact(mine, COUNT, step, 1);
    fill_exact(other, COUNT + 1, step + 1, 2);
    fill_exact(one, 1, step, 1);
    sum_on_stream(mine, all, COUNT);
    sum_on_stream(other, other, COUNT + 1);
    sum_on_stream(one, one, 1);
    check_values("steady", all, COUNT, step, (float)size);
    check_values("in place", other, COUNT + 1, step + 1, 2 * (float)size);
    check_values("small", one, 1, step, (float)size);
  }
  CUDA(cudaFree(mine)), CUDA(cudaFree(all)), CUDA(cudaFree(other)), CUDA(cudaFree(one));
}

/* Makes all steps without waiting between them, and checks the results at the end. */
void sum_without_waiting(void) {
  float *mine = device_memory(COUNT * sizeof *mine), *all = device_memory(COUNT * sizeof *all);
  fill_exact(mine, COUNT, 7, 1);
  for (int step = 0; step < STEPS; step++)
    sum_on_stream(mine, all, COUNT);
  check_values("queued", all, COUNT, 7, (float)size);
  CUDA(cudaFree(mine)), CUDA(cudaFree(all));
}

/* Sums values that one bit does not represent exactly. Error feedback must add the error of each
 * sum to later sums. From step `captured_from` on, a graph makes the sum, with other buffers. */
static void check_feedback(int captured_from) {
  float *mine = device_memory(COUNT * sizeof *mine), *all = device_memory(COUNT * sizeof *all);
  float *there = device_memory(COUNT * sizeof *there);
  cudaGraphExec_t ready = NULL;
  float *drift = calloc(COUNT, sizeof *drift);
  double left = 0, signal = 0;
  for (int step = 0; step < STEPS; step++) {
    for (int i = 0; i < COUNT; i++)
      host[i] = (float)((i * 37 + 11) % 101 - 50) * (float)(rank + 1) +
                (float)((i + step * 13 + rank) % 17 - 8);
    if (step == captured_from) {
      begin_capture();
      sum_on_stream(there, all, COUNT);
      ready = end_capture();
    }
    copy_to_device(ready ? there : mine, COUNT * sizeof *mine);
    if (ready)
      CUDA(cudaGraphLaunch(ready, stream));
    else
      sum_on_stream(mine, all, COUNT);
    copy_from_device(all, COUNT * sizeof *all);
    for (int i = 0; i < COUNT; i++) {
      float whole = (float)((i * 37 + 11) % 101 - 50) * (float)(size * (size + 1) / 2);
      for (int r = 0; r < size; r++)
        whole += (float)((i + step * 13 + r) % 17 - 8);
      drift[i] += host[i] - whole;
      signal += (double)whole * whole;
    }
  }
  for (int i = 0; i < COUNT; i++)
    left += (double)drift[i] * drift[i];
  left = sqrt(left / COUNT), signal = sqrt(signal / COUNT / STEPS);
  if (left > 4 * signal) /* without feedback, the error would grow with every step */
    fail("feedback", STEPS, 0, left, signal);
  free(drift);
  if (ready)
    CUDA(cudaGraphExecDestroy(ready));
  CUDA(cudaFree(mine)), CUDA(cudaFree(all)), CUDA(cudaFree(there));
}

void sum_with_feedback(void) { check_feedback(STEPS); }
void sum_with_feedback_in_graph(void) { check_feedback(STEPS / 2); }

/* Averages values of a 16-bit type, in which `half` is 0.5. */
static void average_values(const char *what, ncclDataType_t type, uint16_t *mine, int step,
                           uint16_t half) {
  uint16_t *words = (uint16_t *)(void *)host;
  for (int i = 0; i < COUNT; i++)
    words[i] = exact_value(step, i) > 0 ? half : half | 0x8000;
  copy_to_device(mine, COUNT * sizeof *mine);
  NCCL(ncclAllReduce(mine, mine, COUNT, type, ncclAvg, comm, stream));
  copy_from_device(mine, COUNT * sizeof *mine);
  for (int i = 0; i < COUNT; i++)
    if (words[i] != (exact_value(step, i) > 0 ? half : half | 0x8000))
      fail(what, step, i, words[i], exact_value(step, i));
}

void average_types(void) {
  uint16_t *half = device_memory(COUNT * sizeof *half),
           *brain = device_memory(COUNT * sizeof *brain);
  for (int step = 0; step < STEPS; step++) {
    average_values("half", ncclHalf, half, step, 0x3800);
    average_values("bfloat16", ncclBfloat16, brain, step, 0x3f00);
  }
  CUDA(cudaFree(half)), CUDA(cudaFree(brain));
}

/* Makes several calls in a group and further calls in a nested group. The group also sends
 * messages. */
void sum_in_groups(void) {
  float *each[3], *to = device_memory(sizeof *to), *from = device_memory(sizeof *from);
  for (int k = 0; k < 3; k++)
    each[k] = device_memory((COUNT + 1) * sizeof **each);
  for (int step = 0; step < STEPS; step++) {
    for (int k = 0; k < 3; k++)
      fill_exact(each[k], COUNT + k % 2, step + k, (float)(k + 1));
    host[0] = (float)rank;
    copy_to_device(to, sizeof *to);
    NCCL(ncclGroupStart());
    sum_on_stream(each[0], each[0], COUNT);
    NCCL(ncclGroupStart());
    sum_on_stream(each[1], each[1], COUNT + 1);
    NCCL(ncclGroupEnd());
    NCCL(ncclSend(to, 1, ncclFloat, (rank + 1) % size, comm, stream));
    NCCL(ncclRecv(from, 1, ncclFloat, (rank + size - 1) % size, comm, stream));
    sum_on_stream(each[2], each[2], COUNT);
    NCCL(ncclGroupEnd());
    for (int k = 0; k < 3; k++)
      check_values("group", each[k], COUNT + k % 2, step + k, (float)(k + 1) * (float)size);
    copy_from_device(from, sizeof *from);
    if (host[0] != (float)((rank + size - 1) % size))
      fail("message", step, 0, host[0], (rank + size - 1) % size);
  }
  for (int k = 0; k < 3; k++)
    CUDA(cudaFree(each[k]));
  CUDA(cudaFree(to)), CUDA(cudaFree(from));
}

/* Makes 40 calls in a group, more than programs usually do. */
void sum_in_large_group(void) {
  enum { CALLS = 40 };
  float *each[CALLS];
  for (int k = 0; k < CALLS; k++)
    each[k] = device_memory(COUNT * sizeof **each);
  for (int step = 0; step < STEPS / 2; step++) {
    for (int k = 0; k < CALLS; k++)
      fill_exact(each[k], COUNT, step + k, 1);
    NCCL(ncclGroupStart());
    for (int k = 0; k < CALLS; k++)
      sum_on_stream(each[k], each[k], COUNT);
    NCCL(ncclGroupEnd());
    for (int k = 0; k < CALLS; k++)
      check_values("crowd", each[k], COUNT, step + k, (float)size);
  }
  for (int k = 0; k < CALLS; k++)
    CUDA(cudaFree(each[k]));
}

/* Changes the buffers from step to step, first on one rank, then on all ranks. Late steps also
 * change the contents of the buffers. */
void sum_in_moved_buffers(void) {
  float *several[3];
  for (int k = 0; k < 3; k++)
    several[k] = device_memory(COUNT * sizeof **several);
  for (int step = 0; step < 3 * STEPS; step++) {
    int late = step > 3 * STEPS / 2, turn = step > STEPS / 2 && (rank == 0 || late) ? step % 3 : 0;
    float *mine = several[turn];
    for (int i = 0; late && i < COUNT; i++) /* these values leave a residual, which the next step
                                             * must not add */
      host[i] = (float)((i * 37 + rank) % 101 - 50);
    if (late) {
      copy_to_device(mine, COUNT * sizeof *mine);
      sum_on_stream(mine, mine, COUNT);
      mine = several[(turn + 1) % 3];
    }
    fill_exact(mine, COUNT, step, 1);
    sum_on_stream(mine, mine, COUNT);
    if (!late)
      check_values("moves", mine, COUNT, step, (float)size);
    copy_from_device(mine, COUNT * sizeof *mine);
    for (int i = 0; i < COUNT; i++)
      if (!isfinite(host[i]) || fabsf(host[i]) > 200.0F * (float)size)
        fail("moves", step, i, host[i], 0);
  }
  for (int k = 0; k < 3; k++)
    CUDA(cudaFree(several[k]));
}

/* Checks that a tensor's residual is not added to a new tensor in another buffer. Exact values in
 * the new tensor must therefore give exact sums. */
void sum_another_tensor(void) {
  float *usual = device_memory(COUNT * sizeof *usual), *mine = device_memory(COUNT * sizeof *mine);
  for (int step = 0; step < STEPS; step++) {
    for (int i = 0; i < COUNT; i++)
      host[i] = (float)((i * 37 + step + rank) % 101 - 50);
    copy_to_device(usual, COUNT * sizeof *usual);
    sum_on_stream(usual, usual, COUNT);
    if (step > STEPS / 2 && step % 10 == 0) {
      fill_exact(mine, COUNT, step, 1);
      sum_on_stream(mine, mine, COUNT);
      check_values("another", mine, COUNT, step, (float)size);
    }
  }
  CUDA(cudaFree(usual)), CUDA(cudaFree(mine));
}
