/*
 * Measures the residual of a tensor. The result is looked at on its stream, by a copy of its first
 * elements; the residual when the call is through, before the next one.
 */
#include "base/memory.h"
#include "dropin/elements.h"
#include "dropin/nccl/preload.h"

/* Elements of a sample: enough for a ratio to a per cent, in a copy of some microseconds. */
#define MAX_ELEMENTS ((size_t)1 << 16)

struct ob_nccl_sample {
  size_t first, count, floats; /* elements of the result; how many floats the worker residual has */
  int divisor;                 /* what makes a mean of the result */
  float *result;               /* pinned */
  uint64_t call;               /* whose result it is; 0: nobody's */
};

/* Creates a sample, of an allreduce: only there does a rank hold the mean of what it has sent. */
struct ob_nccl_sample *ob_nccl_sample_create(const struct ob_nccl_tensor *tensor, int ranks) {
  onebit_plan_info_t info = {.size = sizeof info};
  void *result;
  if (tensor->operation != ONEBIT_ALLREDUCE || tensor->kind.dtype != ONEBIT_FLOAT32 ||
      onebit_plan_get_info(tensor->plan, &info) != ONEBIT_OK || !info.worker_residual_count)
    return NULL;
  struct ob_nccl_sample *sample = ob_allocate(1, sizeof *sample);
  if (!sample)
    return NULL;
  sample->first = info.worker_residual_start;
  sample->floats = info.worker_residual_count;
  sample->count = sample->floats < MAX_ELEMENTS ? sample->floats : MAX_ELEMENTS;
  sample->divisor = tensor->kind.sum ? ranks : 1;
  if (cudaMallocHost(&result, sample->count * sizeof *sample->result) == cudaSuccess) {
    sample->result = result;
    return sample;
  }
  cudaGetLastError();
  ob_release(sample);
  return NULL;
}

void ob_nccl_sample_destroy(struct ob_nccl_sample *sample) {
  if (sample)
    cudaFreeHost(sample->result);
  ob_release(sample);
}

void ob_nccl_sample_start(struct ob_nccl_tensor *tensor, cudaStream_t stream) {
  struct ob_nccl_sample *sample = tensor->sample;
  if (!sample || (tensor->calls & (tensor->calls - 1)))
    return;
  const float *from = (const float *)tensor->buffers.recvbuf + sample->first;
  if (cudaMemcpyAsync(sample->result, from, sample->count * sizeof *from, cudaMemcpyDeviceToHost,
                      stream) == cudaSuccess)
    sample->call = tensor->calls;
}

void ob_nccl_sample_look(struct ob_nccl_tensor *tensor) {
  struct ob_nccl_sample *sample = tensor->sample;
  if (!sample || sample->call != tensor->calls)
    return;
  float *residual = ob_allocate(sample->floats, sizeof *residual);
  if (residual && onebit_plan_export_residual(tensor->plan, residual, NULL) == ONEBIT_OK)
    ob_record_residual(tensor->record, ob_elements_norm(residual, sample->count),
                       ob_elements_norm(sample->result, sample->count) / sample->divisor);
  ob_release(residual);
  sample->call = 0;
}
