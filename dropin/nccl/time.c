/*
 * Times calls on their streams: an event before and one behind, looked at when it costs no wait.
 */
#include "dropin/nccl/preload.h"
#include "onebit/cuda.h"

/* Records the time. A call that others of the same plan have followed must not be asked how it
 * ended: that would wait for them. */
static void record_timer(const struct ob_nccl_timer *timer) {
  float milliseconds = 0;
  if (cudaEventElapsedTime(&milliseconds, timer->start, timer->end) == cudaSuccess)
    ob_record_time(timer->record, timer->compressed, (double)milliseconds / 1e3);
  if (!timer->tensor || timer->tensor->calls != timer->call)
    return;
  if (timer->tensor->captures) { /* calls of a graph may follow that are not seen */
    ob_nccl_count_replays(timer->tensor);
  } else if (onebit_plan_synchronize(timer->tensor->plan) == ONEBIT_SKIPPED) {
    ob_record_skipped(timer->record);
    timer->tensor->skipped++;
  } else {
    ob_nccl_sample_look(timer->tensor);
  }
}

static bool is_complete(const struct ob_nccl_timer *timer) {
  cudaError_t error = cudaEventQuery(timer->end);
  if (error == cudaErrorNotReady)
    cudaGetLastError();
  return error == cudaSuccess;
}

static void time_look(struct ob_nccl_comm *comm) {
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

static struct ob_nccl_timer *time_begin(struct ob_nccl_comm *comm, cudaStream_t stream) {
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
  if (!tensor && atomic_load(&record->calls) < 2) /* it connects the ranks */
    return NULL;
  OB_ON_DEVICE(comm->device);
  time_look(comm);
  struct ob_nccl_timer *timer = time_begin(comm, stream);
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
  time_look(comm);
  for (int i = 0; i < OB_TIMERS; i++) {
    if (comm->timers[i].start)
      cudaEventDestroy(comm->timers[i].start);
    if (comm->timers[i].end)
      cudaEventDestroy(comm->timers[i].end);
  }
  comm->timers_used = 0;
}
