/*
 * Measures compressed calls. The first elements of the result are copied on the call's stream. When
 * the call has ended, and before the tensor's next call, they are compared with the residual. The
 * time of a call is the time between two events, before and after it, which are queried without a
 * wait.
 */
#include "base/memory.h"
#include "dropin/elements.h"
#include "dropin/nccl/preload.h"
#include "onebit/cuda.h"

/* The largest number of elements of a sample. With this many elements the ratio is accurate to a
 * per cent, and the copy takes some microseconds. */
#define MAX_ELEMENTS ((size_t)1 << 16)

struct ob_nccl_sample {
  size_t first, count, floats; /* elements of the result; number of floats of the worker residual */
  int divisor;                 /* the mean is the result divided by this */
  float *result;               /* in pinned memory */
  uint64_t call;               /* the number of the call with this result; 0: none */
};

/* Creates a sample. Only an allreduce has one: its result on a rank is the mean of the values that
 * the rank has sent. */
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

/* Copies the residual to the host and compares the sample with it, if the sample is from the latest
 * call. */
static void compare_sample(struct ob_nccl_tensor *tensor) {
  struct ob_nccl_sample *sample = tensor->sample;
  if (!sample || sample->call != tensor->calls)
    return;
  float *residual = ob_allocate(sample->floats, sizeof *residual);
  if (residual && onebit_plan_export_residual(tensor->plan, residual, NULL) == ONEBIT_OK)
    ob_record_note_residual(tensor->record, ob_elements_norm(residual, sample->count),
                            ob_elements_norm(sample->result, sample->count) / sample->divisor);
  ob_release(residual);
  sample->call = 0;
}

/* ---- Times ---- */

/* Records the time of a call. The status of the call is read only if it is the plan's latest call:
 * otherwise reading it would wait for later calls. */
static void record_timer(const struct ob_nccl_timer *timer) {
  float milliseconds = 0;
  if (cudaEventElapsedTime(&milliseconds, timer->start, timer->end) == cudaSuccess)
    ob_record_add_time(timer->record, timer->compressed, (double)milliseconds / 1e3);
  if (!timer->tensor || timer->tensor->calls != timer->call)
    return;
  if (timer->tensor->captures) { /* the library does not see the replays of a graph */
    ob_nccl_count_replays(timer->tensor);
  } else if (onebit_plan_synchronize(timer->tensor->plan) == ONEBIT_SKIPPED) {
    ob_record_count_skip(timer->record);
    timer->tensor->skipped++;
  } else {
    compare_sample(timer->tensor);
  }
}

static bool is_complete(const struct ob_nccl_timer *timer) {
  cudaError_t error = cudaEventQuery(timer->end);
  if (error == cudaErrorNotReady)
    cudaGetLastError();
  return error == cudaSuccess;
}

static void record_ended_timers(struct ob_nccl_comm *comm) {
  while (comm->timers_used && is_complete(&comm->timers[comm->timers_first])) {
    record_timer(&comm->timers[comm->timers_first]);
    comm->timers_first = (comm->timers_first + 1) % OB_TIMERS;
    comm->timers_used--;
  }
}

static bool make_events(struct ob_nccl_timer *timer) {
  return (timer->start || cudaEventCreate(&timer->start) == cudaSuccess) &&
         (timer->end || cudaEventCreate(&timer->end) == cudaSuccess);
}

static struct ob_nccl_timer *start_timer(struct ob_nccl_comm *comm, cudaStream_t stream) {
  if (comm->timers_used == OB_TIMERS)
    return NULL;
  struct ob_nccl_timer *timer = &comm->timers[(comm->timers_first + comm->timers_used) % OB_TIMERS];
  if (!make_events(timer) || cudaEventRecord(timer->start, stream) != cudaSuccess)
    return NULL;
  comm->timers_used++;
  return timer;
}

struct ob_nccl_timer *ob_nccl_timer_begin(struct ob_nccl_comm *comm, struct ob_nccl_tensor *tensor,
                                          struct ob_record *record, cudaStream_t stream) {
  if (!tensor && atomic_load(&record->calls) < 2) /* the first call connects the ranks */
    return NULL;
  OB_ON_DEVICE(comm->device);
  record_ended_timers(comm);
  struct ob_nccl_timer *timer = start_timer(comm, stream);
  if (timer) {
    timer->tensor = tensor;
    timer->call = tensor ? tensor->calls + 1 : 0;
    timer->compressed = tensor != NULL;
    timer->record = record;
  }
  return timer;
}

void ob_nccl_timer_end(struct ob_nccl_timer *timer, cudaStream_t stream) {
  if (timer)
    cudaEventRecord(timer->end, stream);
}

void ob_nccl_timers_drop(struct ob_nccl_comm *comm, const struct ob_nccl_tensor *tensor) {
  for (int i = 0; i < OB_TIMERS; i++)
    if (comm->timers[i].tensor == tensor)
      comm->timers[i].tensor = NULL;
}

void ob_nccl_timers_destroy(struct ob_nccl_comm *comm) {
  record_ended_timers(comm);
  for (int i = 0; i < OB_TIMERS; i++) {
    if (comm->timers[i].start)
      cudaEventDestroy(comm->timers[i].start);
    if (comm->timers[i].end)
      cudaEventDestroy(comm->timers[i].end);
  }
  comm->timers_used = 0;
}
