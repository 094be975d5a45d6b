/* How large the residual of a tensor is, sampled while a program runs. */
#include "dropin/mpi/preload.h"

#include "base/memory.h"
#include "dropin/elements.h"

/* Only of an allreduce does a rank hold the mean of what it has sent. */
static bool wanted(const struct ob_record *record, const struct ob_mpi_call *call) {
  uint64_t calls = record ? atomic_load_explicit(&record->compressed, memory_order_relaxed) : 0;
  return calls && !(calls & (calls - 1)) && call->operation == ONEBIT_ALLREDUCE &&
         record->of.dtype == ONEBIT_FLOAT32 && record->of.count == call->count;
}

void ob_residual_sample(struct ob_record *record, const struct ob_mpi_call *call,
                        onebit_plan_t plan) {
  onebit_plan_info_t info = {.size = sizeof info};
  if (!wanted(record, call) || onebit_plan_get_info(plan, &info) != ONEBIT_OK)
    return;
  size_t count = info.worker_residual_count, first = info.worker_residual_start;
  if (!count || first + count > call->count) /* no residual: the plan sends float32 */
    return;
  float *residual = ob_allocate(count, sizeof *residual);
  if (residual && onebit_plan_export_residual(plan, residual, NULL) == ONEBIT_OK)
    ob_record_residual(record, ob_elements_norm(residual, count),
                       ob_elements_norm((const float *)call->recvbuf + first, count) /
                           record->of.comm_size);
  ob_release(residual);
}
