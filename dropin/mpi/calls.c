/* The blocking calls of onebit/mpi_calls.h. */
#include <stdarg.h>
#include <stdio.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "dropin/elements.h"
#include "dropin/mpi/attached.h"
#include "dropin/mpi/calls.h"
#include "dropin/mpi/queue.h"
#include "onebit/mpi_calls.h"

/* Repetitions of its calls that a program which asked for compression makes before the ranks follow
 * them. */
#define REPEATS 2

/* ---- Errors ---- */

int ob_call_failed(MPI_Comm comm, int code, const char *format, ...) {
  char message[200];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  ob_error(ONEBIT_ERROR_ARGUMENT, "%s", message);
  return ob_call_exchange_failed(comm, code);
}

int ob_call_exchange_failed(MPI_Comm comm, int code) {
  PMPI_Comm_call_errhandler(comm == MPI_COMM_NULL ? MPI_COMM_WORLD : comm, code);
  return code;
}

int ob_call_begin_mpi(void) {
  if (ob_mpi_is_running())
    return MPI_SUCCESS;
  if (ob_mpi_bind() == ONEBIT_OK)
    ob_error(ONEBIT_ERROR_ARGUMENT, "MPI is not initialised, or already finalised");
  return MPI_ERR_OTHER;
}

/* ---- Arguments ---- */

static int check_comm(MPI_Comm comm) {
  int inter = 0;
  OB_TRY_MPI(ob_call_begin_mpi());
  if (comm == MPI_COMM_NULL)
    return ob_call_failed(comm, MPI_ERR_COMM, "comm is MPI_COMM_NULL");
  OB_TRY_MPI(PMPI_Comm_test_inter(comm, &inter));
  return inter ? ob_call_failed(comm, MPI_ERR_COMM, "comm is an inter-communicator") : MPI_SUCCESS;
}

static int mpi_calls_check_buffers(const struct ob_mpi_call *call) {
  if (call->count == 0)
    return MPI_SUCCESS;
  if (!call->sendbuf)
    return ob_call_failed(call->comm, MPI_ERR_BUFFER, "sendbuf is NULL");
  if (!call->recvbuf)
    return ob_call_failed(call->comm, MPI_ERR_BUFFER, "recvbuf is NULL");
  if (call->recvbuf == MPI_IN_PLACE)
    return ob_call_failed(call->comm, MPI_ERR_BUFFER, "recvbuf is MPI_IN_PLACE");
  return MPI_SUCCESS;
}

static int mpi_calls_check_kind(const struct ob_mpi_call *call) {
  onebit_dtype_t dtype;
  bool sum;
  enum ob_reason reason = ob_mpi_call_resolve(call, &dtype, &sum);
  if (reason == OB_REASON_NONE && dtype == OB_DOUBLE)
    reason = OB_REASON_TYPE;
  switch (reason) {
  case OB_REASON_TYPE:
    return ob_call_failed(call->comm, MPI_ERR_TYPE,
                          "datatype: the type is not float, bfloat16 or half");
  case OB_REASON_OPERATION:
    return ob_call_failed(call->comm, MPI_ERR_OP, "op: %s", ob_reason_text(OB_REASON_OPERATION));
  default:
    return mpi_calls_check_buffers(call);
  }
}

int ob_call_check(struct ob_mpi_call *call, int count) {
  OB_TRY_MPI(check_comm(call->comm));
  if (count < 0)
    return ob_call_failed(call->comm, MPI_ERR_COUNT, "count is %d", count);
  call->count = (size_t)count;
  return mpi_calls_check_kind(call);
}

/* ---- Calls ---- */

/* Without memory for the library's objects calls are dense; other failures are reported to the
 * program, whose environment causes them. */
static int check_failure(MPI_Comm comm) {
  onebit_status_t status = ob_attached_failure(comm);
  if (status == ONEBIT_OK || status == ONEBIT_ERROR_MEMORY)
    return MPI_SUCCESS;
  return ob_call_exchange_failed(comm, MPI_ERR_OTHER);
}

/* MPI has reported its own errors, when it made the call. */
int ob_call_find(const struct ob_mpi_call *call, struct ob_exchange **exchange, bool *withdraw) {
  struct ob_attached *attached = ob_attached_of(call->comm, REPEATS);
  int code = MPI_SUCCESS;
  *exchange = NULL;
  if (!attached)
    return check_failure(call->comm);
  *exchange = ob_attached_agree(attached, call, withdraw, &code);
  bool own = code == MPI_ERR_COUNT || code == MPI_ERR_OTHER;
  return own ? ob_call_exchange_failed(call->comm, code) : code;
}

/* Makes a call dense without blocking the queue, as all ranks do, whatever else each has in
 * flight. */
static int mpi_calls_run_dense(const struct ob_mpi_call *call) {
  MPI_Request request;
  int size = 1;
  OB_TRY_MPI(ob_mpi_call_begin(call, &request));
  OB_TRY_MPI(ob_wait_moving(call->comm, &request, "a call without compression"));
  OB_TRY_MPI(PMPI_Comm_size(call->comm, &size));
  return ob_mpi_call_end(call, size);
}

int ob_call_run(const struct ob_mpi_call *call) {
  struct ob_exchange *exchange;
  bool withdraw;
  if (call->count == 0)
    return MPI_SUCCESS;
  OB_TRY_MPI(ob_call_find(call, &exchange, &withdraw));
  if (!exchange)
    return mpi_calls_run_dense(call);
  int code = ob_exchange_run(exchange, call, withdraw);
  return code == MPI_SUCCESS ? code : ob_call_exchange_failed(call->comm, code);
}

int ONEBIT_Allreduce(const void *sendbuf, void *recvbuf, int count, MPI_Datatype datatype,
                     MPI_Op op, MPI_Comm comm) {
  OB_CALL_SCOPE;
  struct ob_mpi_call call = {ONEBIT_ALLREDUCE, comm, sendbuf, recvbuf, 0, datatype, op};
  OB_TRY_MPI(ob_call_check(&call, count));
  return ob_call_run(&call);
}

int ONEBIT_Reduce_scatter_block(const void *sendbuf, void *recvbuf, int recvcount,
                                MPI_Datatype datatype, MPI_Op op, MPI_Comm comm) {
  OB_CALL_SCOPE;
  struct ob_mpi_call call = {ONEBIT_REDUCE_SCATTER, comm, sendbuf, recvbuf, 0, datatype, op};
  OB_TRY_MPI(ob_call_check(&call, recvcount));
  return ob_call_run(&call);
}

int ONEBIT_Allgather(const void *sendbuf, int sendcount, MPI_Datatype sendtype, void *recvbuf,
                     int recvcount, MPI_Datatype recvtype, MPI_Comm comm) {
  OB_CALL_SCOPE;
  struct ob_mpi_call call = {ONEBIT_ALLGATHER, comm, sendbuf, recvbuf, 0, recvtype, MPI_OP_NULL};
  OB_TRY_MPI(ob_call_check(&call, recvcount));
  if (sendbuf != MPI_IN_PLACE && sendcount != recvcount)
    return ob_call_failed(comm, MPI_ERR_COUNT, "sendcount is %d, recvcount %d", sendcount,
                          recvcount);
  if (sendbuf != MPI_IN_PLACE && sendtype != recvtype)
    return ob_call_failed(comm, MPI_ERR_TYPE, "sendtype is not recvtype");
  return ob_call_run(&call);
}

int ONEBIT_Forget(const void *buffer, MPI_Comm comm) {
  OB_CALL_SCOPE;
  OB_TRY_MPI(check_comm(comm));
  if (!buffer)
    return ob_call_failed(comm, MPI_ERR_BUFFER, "buffer is NULL");
  struct ob_attached *attached = ob_attached_known(comm);
  if (attached && ob_attached_forget(attached, buffer) != ONEBIT_OK)
    return ob_call_failed(comm, MPI_ERR_REQUEST, "a call on the buffer is in flight");
  return MPI_SUCCESS;
}

/* ---- Handles ---- */

static bool watch_finalize(void) {
  if (ob_call_begin_mpi() != MPI_SUCCESS)
    return false;
  ob_attached_watch_finalize();
  return true;
}

MPI_Datatype ONEBIT_Type_bfloat16(void) {
  return watch_finalize() ? ob_mpi_type(ONEBIT_BFLOAT16) : MPI_DATATYPE_NULL;
}

MPI_Datatype ONEBIT_Type_float16(void) {
  return watch_finalize() ? ob_mpi_type(ONEBIT_FLOAT16) : MPI_DATATYPE_NULL;
}

MPI_Op ONEBIT_Op_average(void) { return watch_finalize() ? ob_mpi_average() : MPI_OP_NULL; }
