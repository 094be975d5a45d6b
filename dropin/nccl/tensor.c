/* Creates plans for the calls of a loop, and makes the compressed calls. */
#include <stdio.h>

#include "base/memory.h"
#include "base/process.h"
#include "dropin/elements.h"
#include "dropin/nccl/preload.h"
#include "onebit/cuda.h"
#include "onebit/nccl.h"

#define FAILED_TENSOR (-1) /* a tensor's number in the loops, if it could not be created */

static void tensor_destroy(struct ob_nccl_tensor *tensor) {
  if (tensor) {
    ob_nccl_count_replays(tensor);
    onebit_plan_destroy(tensor->plan);
    ob_nccl_sample_destroy(tensor->sample);
  }
  ob_release(tensor);
}

void ob_nccl_tensors_destroy(struct ob_nccl_comm *comm) {
  for (int i = 0; i < comm->tensors; i++)
    tensor_destroy(comm->tensor[i]);
  comm->tensors = 0;
  onebit_comm_destroy(comm->onebit);
  comm->onebit = NULL;
}

/* Returns true for memory that a plan can use. NCCL also accepts host memory that the device can
 * access. */
static bool is_usable_memory(const struct ob_nccl_comm *comm, const void *buffer,
                             onebit_dtype_t dtype) {
  struct cudaPointerAttributes found;
  if (cudaPointerGetAttributes(&found, buffer) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return found.type == cudaMemoryTypeDevice && found.device == comm->device &&
         (uintptr_t)buffer % ob_elements_size(dtype) == 0;
}

static onebit_status_t tensor_create_plan(struct ob_nccl_comm *comm,
                                          const struct ob_nccl_call *call,
                                          struct ob_nccl_tensor *tensor) {
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  onebit_plan_info_t info = {.size = sizeof info};
  onebit_status_t status = ONEBIT_OK;
  if (!comm->onebit)
    status = onebit_comm_create_nccl(comm->comm, &comm->onebit);
  options.operation = call->operation;
  options.dtype = tensor->kind.dtype;
  options.device = ONEBIT_DEVICE_CUDA;
  options.bits =
      ob_rules_bits(&ob_preload.rules, call->operation, options.dtype, call->count, comm->size).min;
  if (status == ONEBIT_OK)
    status = onebit_plan_create(comm->onebit, call->count, &options, &tensor->plan);
  if (status == ONEBIT_OK)
    status = onebit_plan_get_info(tensor->plan, &info);
  if (status == ONEBIT_OK)
    tensor->sample = ob_nccl_sample_create(tensor, comm->size);
  tensor->bytes_sent = info.wire_bytes;
  tensor->bits = info.wire == ONEBIT_WIRE_DENSE ? 32 : info.bits;
  return status;
}

/* Allocates this rank's memory of a tensor. Returns NULL when out of memory, or if a plan can not
 * use the buffers. */
static struct ob_nccl_tensor *tensor_allocate(const struct ob_nccl_comm *comm,
                                              const struct ob_nccl_call *call,
                                              struct ob_record *record) {
  struct ob_nccl_kind kind;
  struct ob_nccl_tensor *tensor = NULL;
  ob_nccl_resolve(call, &kind);
  if (is_usable_memory(comm, call->sendbuf, kind.dtype) &&
      is_usable_memory(comm, call->recvbuf, kind.dtype))
    tensor = ob_allocate(1, sizeof *tensor);
  if (tensor)
    *tensor = (struct ob_nccl_tensor){
        .kind = kind,
        .operation = call->operation,
        .bytes_dense = ob_dense_bytes(call->operation, kind.dtype, call->count, comm->size),
        .record = record};
  return tensor;
}

/* Returns the next free number. It is the same on all ranks, since they create and drop the same
 * tensors. */
static int find_free_number(struct ob_nccl_comm *comm) {
  for (int i = 0; i < comm->tensors; i++)
    if (!comm->tensor[i])
      return i;
  return comm->tensors < OB_MAX_POSITIONS ? comm->tensors++ : FAILED_TENSOR;
}

/* Creates a tensor. Collective. Returns its number, or FAILED_TENSOR on all ranks. */
static int create_tensor(struct ob_nccl_comm *comm, const struct ob_nccl_call *call,
                         struct ob_record *record) {
  int number = find_free_number(comm);
  if (number == FAILED_TENSOR)
    return number;
  struct ob_nccl_tensor *tensor = tensor_allocate(comm, call, record);
  int64_t missing = tensor == NULL;
  if (!ob_nccl_allreduce_max(comm, &missing, 1) || missing ||
      tensor_create_plan(comm, call, tensor) != ONEBIT_OK) {
    tensor_destroy(tensor);
    return FAILED_TENSOR;
  }
  comm->tensor[number] = tensor;
  return number;
}

/* Drops all tensors except those in graphs: the program may launch a graph as long as the
 * communicator exists. */
static void drop_tensors(struct ob_nccl_comm *comm) {
  for (int i = 0; i < comm->tensors; i++)
    if (comm->tensor[i] && !comm->tensor[i]->captures) {
      ob_nccl_timers_drop(comm, comm->tensor[i]);
      tensor_destroy(comm->tensor[i]);
      comm->tensor[i] = NULL;
      ob_loops_remove_tensor(comm->loops, i + 1);
    }
}

void ob_nccl_find_loop(struct ob_nccl_comm *comm) {
  OB_ON_DEVICE(comm->device);
  comm->look = false;
  if (ob_loops_find_loop(comm->loops))
    drop_tensors(comm);
}

/* ---- A call ---- */

static ncclResult_t status_to_nccl_result(onebit_status_t status) {
  switch (status) {
  case ONEBIT_OK:
    return ncclSuccess;
  case ONEBIT_ERROR_ARGUMENT:
    return ncclInvalidArgument;
  case ONEBIT_ERROR_DEVICE:
    return ncclUnhandledCudaError;
  case ONEBIT_ERROR_TRANSPORT:
    return ncclRemoteError;
  default:
    return ncclInternalError;
  }
}

static onebit_status_t enqueue_call(const struct ob_nccl_tensor *tensor,
                                    const struct ob_nccl_call *call) {
  switch (call->operation) {
  case ONEBIT_ALLREDUCE:
    return onebit_allreduce_stream(call->sendbuf, call->recvbuf, tensor->plan, call->stream);
  case ONEBIT_ALLGATHER:
    return onebit_allgather_stream(call->sendbuf, call->recvbuf, tensor->plan, call->stream);
  default:
    return onebit_reduce_scatter_stream(call->sendbuf, call->recvbuf, tensor->plan, call->stream);
  }
}

static ncclResult_t report_status(const struct ob_nccl_comm *comm, onebit_status_t status) {
  if (status != ONEBIT_OK)
    fprintf(stderr, "onebit: a compressed call on rank %d: %s\n", comm->rank, onebit_last_error());
  return status_to_nccl_result(status);
}

static onebit_status_t reset_residual(const struct ob_nccl_tensor *tensor, cudaStream_t stream) {
  return onebit_plan_reset_residual_stream(tensor->plan, stream);
}

void ob_nccl_reset_residuals_of_left_loop(struct ob_nccl_comm *comm, cudaStream_t stream) {
  int first, count;
  ob_loops_read_left_positions(comm->loops, &first, &count);
  for (int position = first; position < first + count; position++) {
    int number = *ob_loops_tensor(comm->loops, position);
    if (number > 0 && !comm->tensor[number - 1]->captures)
      reset_residual(comm->tensor[number - 1], stream);
  }
}

static bool tensor_has_buffers(const struct ob_nccl_tensor *tensor,
                               const struct ob_nccl_call *call) {
  return tensor->buffers.sendbuf == call->sendbuf && tensor->buffers.recvbuf == call->recvbuf;
}

/* Makes a compressed call. If a part of it fails, the later parts still run: other ranks wait for
 * its messages, and the contents of recvbuf must not look like a result. A tensor that is in a
 * graph keeps its buffers; a call with other buffers neither uses nor changes its residual. */
static ncclResult_t tensor_compress(const struct ob_nccl_comm *comm, struct ob_nccl_tensor *tensor,
                                    const struct ob_nccl_call *call) {
  const bool foreign = tensor->captures && !tensor_has_buffers(tensor, call);
  const bool moved =
      !tensor->captures && ob_buffers_note(&tensor->buffers, call->sendbuf, call->recvbuf);
  ncclResult_t forgot = ncclSuccess;
  if (foreign || moved)
    forgot = report_status(comm, reset_residual(tensor, call->stream));
  tensor->calls++;
  ncclResult_t called = report_status(comm, enqueue_call(tensor, call));
  ncclResult_t scaled = report_status(
      comm, onebit_scale_result_stream(call->recvbuf, tensor->kind.sum ? (float)comm->size : 1,
                                       tensor->plan, call->stream));
  if (foreign)
    forgot = report_status(comm, reset_residual(tensor, call->stream));
  return called != ncclSuccess ? called : scaled != ncclSuccess ? scaled : forgot;
}

/* ---- In a graph ---- */

/* Resets the residual for calls with other buffers. This happens once, before the first launch of
 * the graph, not in each launch. This function waits for the end of the reset, since a launch does
 * not wait for other streams. */
static onebit_status_t reset_residual_and_wait(struct ob_nccl_comm *comm,
                                               const struct ob_nccl_tensor *tensor) {
  int64_t nothing;
  OB_ON_DEVICE(comm->device);
  onebit_status_t status = reset_residual(tensor, comm->agreement.stream);
  if (cudaEventRecord(comm->agreement.done, comm->agreement.stream) != cudaSuccess ||
      !ob_nccl_wait_for_answer(comm, &nothing, 0))
    cudaGetLastError(); /* the call returns the error */
  return status;
}

/* Runs a call in a graph. From the tensor's first graph on its buffers do not change. */
static ncclResult_t run_captured(struct ob_nccl_comm *comm, const struct ob_nccl_call *call,
                                 int position) {
  struct ob_nccl_tensor *tensor = comm->tensor[*ob_loops_tensor(comm->loops, position) - 1];
  ncclResult_t forgot = ncclSuccess;
  if (!tensor->captures && !tensor_has_buffers(tensor, call)) {
    forgot = report_status(comm, reset_residual_and_wait(comm, tensor));
    tensor->buffers = (struct ob_buffers){call->sendbuf, call->recvbuf, {0, 0}};
  }
  ncclResult_t result = tensor_compress(comm, tensor, call);
  tensor->captures++;
  return result != ncclSuccess ? result : forgot;
}

/* Counts replays of graphs: the plan's state on the device counts all calls, and calls outside of
 * graphs are counted here. */
void ob_nccl_count_replays(struct ob_nccl_tensor *tensor) {
  uint64_t made, skipped, direct = tensor->calls - tensor->captures;
  if (!tensor->captures || onebit_plan_get_calls(tensor->plan, &made, &skipped) != ONEBIT_OK)
    return;
  for (; made + skipped > direct + tensor->replays; tensor->replays++) {
    ob_record_count_compressed(tensor->record, OB_NOT_TIMED);
    ob_record_count_sent(tensor->record, tensor->bits, tensor->bytes_sent, tensor->bytes_dense);
  }
  for (; skipped > tensor->skipped; tensor->skipped++)
    ob_record_count_skip(tensor->record);
}

/* ---- Calls outside of graphs ---- */

static ncclResult_t tensor_run_compressed(struct ob_nccl_comm *comm, struct ob_nccl_tensor *tensor,
                                          const struct ob_nccl_call *call) {
  struct ob_nccl_timer *timer = ob_nccl_timer_begin(comm, tensor, tensor->record, call->stream);
  ncclResult_t result = tensor_compress(comm, tensor, call);
  ob_nccl_sample_start(tensor, call->stream);
  ob_nccl_timer_end(timer, call->stream);
  if (result != ncclSuccess)
    return result;
  ob_record_count_compressed(tensor->record, OB_NOT_TIMED);
  ob_record_count_sent(tensor->record, tensor->bits, tensor->bytes_sent, tensor->bytes_dense);
  return ncclSuccess;
}

static struct ob_nccl_tensor *get_tensor(const struct ob_nccl_call *call,
                                         const struct ob_nccl_decision *decision) {
  struct ob_nccl_comm *comm = decision->comm;
  int *number = ob_loops_tensor(comm->loops, decision->position);
  if (*number == 0) {
    double start = ob_seconds();
    OB_ON_DEVICE(comm->device);
    int made = create_tensor(comm, call, decision->record);
    *number = made == FAILED_TENSOR ? FAILED_TENSOR : made + 1;
    ob_record_count_decision(decision->record, ob_seconds() - start);
  }
  return *number > 0 ? comm->tensor[*number - 1] : NULL;
}

ncclResult_t ob_nccl_run(const struct ob_nccl_call *call, const struct ob_nccl_decision *decision) {
  if (decision->captured)
    return run_captured(decision->comm, call, decision->position);
  struct ob_nccl_tensor *tensor = get_tensor(call, decision);
  ncclResult_t result;
  if (tensor) {
    result = tensor_run_compressed(decision->comm, tensor, call);
  } else {
    result = ob_nccl_run_dense(call);
    ob_record_count_dense(decision->record, OB_REASON_MEMORY, OB_NOT_TIMED);
  }
  return result;
}
