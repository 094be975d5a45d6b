/* An exchange runs a plan, and stores the plan's result as the result of MPI's call. */
#include <string.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/knobs.h"
#include "base/memory.h"
#include "dropin/counters.h"
#include "dropin/elements.h"
#include "dropin/mpi/exchange.h"

onebit_status_t ob_report_mpi_error(const char *call, int code) {
  char message[MPI_MAX_ERROR_STRING] = "";
  int length;
  PMPI_Error_string(code, message, &length);
  return ob_error(ONEBIT_ERROR_TRANSPORT, "%s: %s", call, message);
}

/* ---- Exchanges ---- */

/* Creates the plan. If a variable is wrong on this rank alone, the creation fails on all ranks. */
static onebit_status_t mpi_exchange_create_plan(struct ob_exchange *exchange, struct ob_bits bits) {
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  onebit_plan_info_t info = {.size = sizeof info};
  onebit_status_t known = bits.min ? ONEBIT_OK : ob_knob_bits(OB_SAFE_BITS, &bits);
  options.bits = bits.min;
  options.max_bits = bits.max;
  options.operation = exchange->operation;
  options.dtype = exchange->dtype == OB_DOUBLE ? ONEBIT_FLOAT32 : exchange->dtype;
  onebit_status_t status =
      onebit_plan_create(exchange->queue->comm, exchange->count, &options, &exchange->plan);
  if (status != ONEBIT_OK) /* reads the variable again, to set its error message */
    return known == ONEBIT_OK ? status : ob_knob_bits(OB_SAFE_BITS, &bits);
  OB_TRY(onebit_plan_get_info(exchange->plan, &info));
  exchange->tally.bytes_sent = info.wire_bytes;
  exchange->tally.bits = info.wire == ONEBIT_WIRE_DENSE ? 32 : info.bits;
  exchange->moves = info.max_bits > info.min_bits;
  return ONEBIT_OK;
}

/* Stores the bits per element of the call that begins, if the plan may change them. */
static void note_bits(struct ob_exchange *exchange) {
  onebit_plan_info_t info = {.size = sizeof info};
  if (!exchange->moves || onebit_plan_get_info(exchange->plan, &info) != ONEBIT_OK)
    return;
  exchange->tally.moved = info.bits != exchange->tally.bits;
  exchange->tally.bits = info.bits;
  exchange->tally.bytes_sent = info.wire_bytes;
}

static void mpi_exchange_release(struct ob_exchange *exchange) {
  if (!exchange)
    return;
  onebit_plan_destroy(exchange->plan);
  ob_release(exchange->part);
  ob_release(exchange->narrow);
  ob_release(exchange);
}

/* Allocates this rank's memory for an exchange. Returns NULL if there is not enough. */
static struct ob_exchange *mpi_exchange_allocate(struct ob_queue *queue,
                                                 const struct ob_mpi_call *call) {
  struct ob_exchange *exchange = ob_allocate(1, sizeof *exchange);
  struct ob_operation *operation = ob_allocate(1, sizeof *operation);
  bool all = exchange && operation;
  if (operation)
    ob_operation_recycle(operation);
  if (exchange) {
    *exchange =
        (struct ob_exchange){.queue = queue, .operation = call->operation, .count = call->count};
    ob_mpi_call_resolve(call, &exchange->dtype, &exchange->sum);
    if (call->operation == ONEBIT_REDUCE_SCATTER) {
      exchange->part = ob_allocate(call->count, ob_elements_size(exchange->dtype));
      all = all && exchange->part;
    }
    if (exchange->dtype == OB_DOUBLE) {
      exchange->narrow = ob_allocate(call->count, sizeof *exchange->narrow);
      all = all && exchange->narrow;
    }
    exchange->tally.bytes_dense =
        ob_dense_bytes(call->operation, exchange->dtype, call->count, queue->size);
  }
  if (all)
    return exchange;
  mpi_exchange_release(exchange);
  return NULL;
}

/* Creates an exchange. First waits for all ranks, while it advances the operations in flight. The
 * creation of the plan does not advance them, but no rank waits for one of them any more. */
onebit_status_t ob_exchange_create(struct ob_queue *queue, const struct ob_mpi_call *call,
                                   struct ob_bits bits, bool has_memory,
                                   struct ob_exchange **result) {
  struct ob_exchange *exchange = has_memory ? mpi_exchange_allocate(queue, call) : NULL;
  int64_t missing = exchange == NULL;
  int code = ob_allreduce_max(call->comm, &missing, 1);
  onebit_status_t status = ONEBIT_OK;
  if (code != MPI_SUCCESS)
    status = ONEBIT_ERROR_TRANSPORT;
  else if (missing)
    status = ob_error(ONEBIT_ERROR_MEMORY, "some rank is out of memory for an exchange");
  else
    status = mpi_exchange_create_plan(exchange, bits);
  *result = status == ONEBIT_OK ? exchange : NULL;
  if (status != ONEBIT_OK)
    mpi_exchange_release(exchange);
  return status;
}

void ob_exchange_destroy(struct ob_exchange *exchange) {
  if (!exchange)
    return;
  for (unsigned idle = 0; ob_exchange_is_in_flight(exchange); idle++)
    ob_queues_backoff(idle);
  mpi_exchange_release(exchange);
}

/* ---- The result of a call */

struct buffers {
  const void *send;
  void *receive;
};

/* Returns the plan's buffers. MPI_IN_PLACE stands for this rank's part of the receive buffer, and
 * in a reduce-scatter for the whole buffer, of which MPI overwrites only the first part. */
static struct buffers select_buffers(const struct ob_exchange *exchange,
                                     const struct ob_mpi_call *call) {
  struct buffers buffers = {call->sendbuf, call->recvbuf};
  size_t part = exchange->count * ob_elements_size(exchange->dtype);
  if (call->sendbuf != MPI_IN_PLACE)
    return buffers;
  buffers.send = call->recvbuf;
  if (exchange->operation == ONEBIT_ALLGATHER)
    buffers.send = (const char *)call->recvbuf + (size_t)exchange->queue->rank * part;
  if (exchange->operation == ONEBIT_REDUCE_SCATTER)
    buffers.receive = exchange->part;
  return buffers;
}

/* Stores the sum, which is the mean times the number of ranks. */
void ob_exchange_store(const struct ob_exchange *exchange, const struct ob_mpi_call *call) {
  const void *result = select_buffers(exchange, call).receive;
  if (exchange->dtype == OB_DOUBLE)
    ob_elements_widen(call->recvbuf, exchange->narrow, exchange->count,
                      exchange->sum ? (double)exchange->queue->size : 1);
  else if (exchange->sum)
    ob_elements_multiply(exchange->dtype, call->recvbuf, result, exchange->count,
                         (float)exchange->queue->size);
  else if (result != call->recvbuf)
    memcpy(call->recvbuf, result, exchange->count * ob_elements_size(exchange->dtype));
}

bool ob_is_withdrawn(onebit_status_t status) {
  return status != ONEBIT_OK && status != ONEBIT_ERROR_MESSAGE && status != ONEBIT_ERROR_TRANSPORT;
}

onebit_status_t ob_exchange_start(struct ob_operation *operation) {
  struct ob_exchange *exchange = operation->exchange;
  struct buffers buffers = select_buffers(exchange, &operation->call);
  onebit_request_t *request = &operation->request;
  if (exchange->dtype == OB_DOUBLE) {
    operation->withdraw |= !ob_elements_narrow(exchange->narrow, buffers.send, exchange->count);
    buffers = (struct buffers){exchange->narrow, exchange->narrow};
  }
  if (operation->withdraw)
    buffers = (struct buffers){NULL, NULL};
  note_bits(exchange);
  switch (exchange->operation) {
  case ONEBIT_ALLREDUCE:
    return onebit_iallreduce(buffers.send, buffers.receive, exchange->plan, request);
  case ONEBIT_ALLGATHER:
    return onebit_iallgather(buffers.send, buffers.receive, exchange->plan, request);
  case ONEBIT_REDUCE_SCATTER:
    return onebit_ireduce_scatter(buffers.send, buffers.receive, exchange->plan, request);
  }
  return ob_error(ONEBIT_ERROR_ARGUMENT, "operation is %d", (int)exchange->operation);
}

void ob_exchange_note(struct ob_exchange *exchange, bool compressed) {
  exchange->withdrawals = compressed ? 0 : exchange->withdrawals + 1;
}

unsigned ob_exchange_count_withdrawals(const struct ob_exchange *exchange) {
  for (unsigned idle = 0;; idle++) {
    pthread_mutex_lock(&ob_queues_lock);
    size_t undecided = exchange->undecided;
    unsigned withdrawals = exchange->withdrawals;
    pthread_mutex_unlock(&ob_queues_lock);
    if (!undecided)
      return withdrawals;
    ob_queues_backoff(idle);
  }
}

void ob_exchange_reset_withdrawals(struct ob_exchange *exchange) {
  OB_LOCKED(&ob_queues_lock);
  exchange->withdrawals = 0;
}

void ob_exchange_count_dense(struct ob_exchange *exchange) {
  OB_LOCKED(&ob_queues_lock);
  ob_exchange_count(exchange, false);
}

void ob_exchange_count(struct ob_exchange *exchange, bool compressed) {
  exchange->tally.calls++;
  exchange->tally.compressed += compressed;
}

/* ---- Blocking calls while no other operation is in flight ---- */

/* Makes a call dense, with a nonblocking call of MPI: a rank with operations in flight makes a
 * nonblocking call, too, and both ranks' calls must match. */
static int mpi_exchange_run_dense(const struct ob_exchange *exchange,
                                  const struct ob_mpi_call *call) {
  struct ob_mpi_call dense = *call;
  MPI_Request request;
  dense.comm = exchange->queue->dense;
  int code = ob_mpi_call_begin(&dense, &request);
  if (code != MPI_SUCCESS)
    ob_report_mpi_error("a call without compression", code);
  else
    code = ob_wait_for_request(dense.comm, &request, "a call without compression");
  return code == MPI_SUCCESS ? ob_mpi_call_end(&dense, exchange->queue->size) : code;
}

static int run_blocking(struct ob_exchange *exchange, const struct ob_mpi_call *call,
                        bool withdraw) {
  struct ob_operation operation = {.exchange = exchange, .call = *call, .withdraw = withdraw};
  onebit_status_t status = ob_exchange_start(&operation);
  int code = MPI_SUCCESS;
  if (status == ONEBIT_OK)
    status = onebit_wait(&operation.request);
  if (status == ONEBIT_OK)
    ob_exchange_store(exchange, call);
  else
    code = ob_is_withdrawn(status) ? mpi_exchange_run_dense(exchange, call) : MPI_ERR_INTERN;
  if (code != MPI_SUCCESS)
    return code;
  OB_LOCKED(&ob_queues_lock);
  ob_exchange_note(exchange, status == ONEBIT_OK);
  ob_exchange_count(exchange, status == ONEBIT_OK);
  return MPI_SUCCESS;
}

int ob_exchange_run(struct ob_exchange *exchange, const struct ob_mpi_call *call, bool withdraw) {
  OB_CALL_SCOPE;
  if (ob_queues_in_flight() == 0)
    return run_blocking(exchange, call, withdraw);
  struct ob_operation *operation = NULL;
  int code = ob_exchange_begin(exchange, call, withdraw, &operation);
  return code == MPI_SUCCESS ? ob_operation_wait(&operation) : code;
}
