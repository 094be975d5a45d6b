/*
 * Defines the calls and requests of onebit/mpi_calls.h. A request holds an operation of an
 * exchange, or MPI's own request if the call is dense from its beginning.
 */

#include <stdarg.h>
#include <stdio.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/lock.h"
#include "dropin/elements.h"
#include "dropin/mpi/communicator.h"
#include "dropin/mpi/exchange.h"
#include "onebit/counters.h"
#include "onebit/mpi_calls.h"

/* REPEATS is the number of times that a program must repeat a loop of calls before the ranks follow
 * the loop. */
#define REPEATS 2

/* ---- Errors ---- */

/* Reports a code, and the library's error message, to the communicator's error handler;
 * MPI_COMM_NULL stands for MPI_COMM_WORLD. Returns the code. */
static int report_code(MPI_Comm comm, int code) {
  PMPI_Comm_call_errhandler(comm == MPI_COMM_NULL ? MPI_COMM_WORLD : comm, code);
  return code;
}

/* Reports an error of the call through the communicator's error handler. Returns the code. */
static int __attribute__((format(printf, 3, 4)))
report_error(MPI_Comm comm, int code, const char *format, ...) {
  char message[200];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  ob_error(ONEBIT_ERROR_ARGUMENT, "%s", message);
  return report_code(comm, code);
}

/* Returns MPI_ERR_OTHER, without calling an error handler, if MPI is not initialised or is
 * finalised. */
static int check_mpi_is_running(void) {
  if (ob_mpi_is_running())
    return MPI_SUCCESS;
  if (ob_mpi_bind() == ONEBIT_OK)
    ob_error(ONEBIT_ERROR_ARGUMENT, "MPI is not initialised, or already finalised");
  return MPI_ERR_OTHER;
}

/* ---- Arguments ---- */

static int check_comm(MPI_Comm comm) {
  int inter = 0;
  OB_TRY_MPI(check_mpi_is_running());
  if (comm == MPI_COMM_NULL)
    return report_error(comm, MPI_ERR_COMM, "comm is MPI_COMM_NULL");
  OB_TRY_MPI(PMPI_Comm_test_inter(comm, &inter));
  return inter ? report_error(comm, MPI_ERR_COMM, "comm is an inter-communicator") : MPI_SUCCESS;
}

static int mpi_calls_check_buffers(const struct ob_mpi_call *call) {
  if (call->count == 0)
    return MPI_SUCCESS;
  if (!call->sendbuf)
    return report_error(call->comm, MPI_ERR_BUFFER, "sendbuf is NULL");
  if (!call->recvbuf)
    return report_error(call->comm, MPI_ERR_BUFFER, "recvbuf is NULL");
  if (call->recvbuf == MPI_IN_PLACE)
    return report_error(call->comm, MPI_ERR_BUFFER, "recvbuf is MPI_IN_PLACE");
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
    return report_error(call->comm, MPI_ERR_TYPE, "datatype is not float, bfloat16 or half");
  case OB_REASON_OPERATION:
    return report_error(call->comm, MPI_ERR_OP, "op: %s",
                        onebit_counters_reason(OB_REASON_OPERATION));
  default:
    return mpi_calls_check_buffers(call);
  }
}

/* Checks that the call can be compressed and that its arguments are right, and sets its count to
 * the program's. Reports errors. */
static int check_call(struct ob_mpi_call *call, int count) {
  OB_TRY_MPI(check_comm(call->comm));
  if (count < 0)
    return report_error(call->comm, MPI_ERR_COUNT, "count is %d, not 0 or more", count);
  call->count = (size_t)count;
  return mpi_calls_check_kind(call);
}

/* ---- Calls ---- */

/* Reports why the communicator has no state. Returns MPI_SUCCESS if memory ran out: the
 * communicator's calls are then dense. All other failures come from the program's environment. */
static int report_attach_failure(MPI_Comm comm) {
  onebit_status_t status = ob_attached_read_failure(comm);
  if (status == ONEBIT_OK || status == ONEBIT_ERROR_MEMORY)
    return MPI_SUCCESS;
  return report_code(comm, MPI_ERR_OTHER);
}

/* Finds the exchange that compresses a call whose arguments were checked, or NULL if the call is
 * sent dense. Reports errors, except those that
 * MPI has already reported. */
static int find_exchange(const struct ob_mpi_call *call, struct ob_exchange **exchange,
                         bool *withdraw) {
  struct ob_attached *attached = ob_attached_get(call->comm, REPEATS);
  int code = MPI_SUCCESS;
  *exchange = NULL;
  if (!attached)
    return report_attach_failure(call->comm);
  *exchange = ob_attached_agree(attached, call, withdraw, &code);
  bool own = code == MPI_ERR_COUNT || code == MPI_ERR_OTHER;
  return own ? report_code(call->comm, code) : code;
}

/* Makes a call dense, with a nonblocking call of MPI, as all ranks do. While it waits, it advances
 * the operations in flight, which other ranks may wait for. */
static int mpi_calls_run_dense(const struct ob_mpi_call *call) {
  MPI_Request request;
  int size = 1;
  OB_TRY_MPI(ob_mpi_call_begin(call, &request));
  OB_TRY_MPI(ob_wait_for_request(call->comm, &request, "a call without compression"));
  OB_TRY_MPI(PMPI_Comm_size(call->comm, &size));
  return ob_mpi_call_end(call, size);
}

/* Makes a checked call, blocking. Reports its errors. */
static int run_call(const struct ob_mpi_call *call) {
  struct ob_exchange *exchange;
  bool withdraw;
  if (call->count == 0)
    return MPI_SUCCESS;
  OB_TRY_MPI(find_exchange(call, &exchange, &withdraw));
  if (!exchange)
    return mpi_calls_run_dense(call);
  int code = ob_exchange_run(exchange, call, withdraw);
  return code == MPI_SUCCESS ? code : report_code(call->comm, code);
}

int ONEBIT_Allreduce(const void *sendbuf, void *recvbuf, int count, MPI_Datatype datatype,
                     MPI_Op op, MPI_Comm comm) {
  OB_CALL_SCOPE;
  struct ob_mpi_call call = {ONEBIT_ALLREDUCE, comm, sendbuf, recvbuf, 0, datatype, op};
  OB_TRY_MPI(check_call(&call, count));
  return run_call(&call);
}

int ONEBIT_Reduce_scatter_block(const void *sendbuf, void *recvbuf, int recvcount,
                                MPI_Datatype datatype, MPI_Op op, MPI_Comm comm) {
  OB_CALL_SCOPE;
  struct ob_mpi_call call = {ONEBIT_REDUCE_SCATTER, comm, sendbuf, recvbuf, 0, datatype, op};
  OB_TRY_MPI(check_call(&call, recvcount));
  return run_call(&call);
}

int ONEBIT_Allgather(const void *sendbuf, int sendcount, MPI_Datatype sendtype, void *recvbuf,
                     int recvcount, MPI_Datatype recvtype, MPI_Comm comm) {
  OB_CALL_SCOPE;
  struct ob_mpi_call call = {ONEBIT_ALLGATHER, comm, sendbuf, recvbuf, 0, recvtype, MPI_OP_NULL};
  OB_TRY_MPI(check_call(&call, recvcount));
  if (sendbuf != MPI_IN_PLACE && sendcount != recvcount)
    return report_error(comm, MPI_ERR_COUNT, "sendcount is %d, recvcount %d", sendcount, recvcount);
  if (sendbuf != MPI_IN_PLACE && sendtype != recvtype)
    return report_error(comm, MPI_ERR_TYPE, "sendtype and recvtype differ");
  return run_call(&call);
}

int ONEBIT_Forget(const void *buffer, MPI_Comm comm) {
  OB_CALL_SCOPE;
  OB_TRY_MPI(check_comm(comm));
  if (!buffer)
    return report_error(comm, MPI_ERR_BUFFER, "buffer is NULL");
  struct ob_attached *attached = ob_attached_find(comm);
  if (attached && ob_attached_forget(attached, buffer) != ONEBIT_OK)
    return report_error(comm, MPI_ERR_REQUEST, "another call on the buffer is in flight");
  return MPI_SUCCESS;
}

/* ---- Handles ---- */

static bool watch_finalize(void) {
  if (check_mpi_is_running() != MPI_SUCCESS)
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

/* ---- Requests ---- */

struct onebit_mpi_request {
  struct onebit_mpi_request *next, *previous; /* the list of this process */
  struct ob_mpi_call call; /* its communicator is MPI_COMM_NULL once that has been freed */
  int size;
  bool persistent, active;
  struct ob_operation *operation;
  MPI_Request dense;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static ONEBIT_Request requests;

/* ---- The list of requests ---- */

static void requests_add(ONEBIT_Request request) {
  OB_LOCKED(&lock);
  request->next = requests;
  if (requests)
    requests->previous = request;
  requests = request;
}

static void requests_release(ONEBIT_Request *handle) {
  ONEBIT_Request request = *handle;
  pthread_mutex_lock(&lock);
  if (request->next)
    request->next->previous = request->previous;
  if (request->previous)
    request->previous->next = request->next;
  else
    requests = request->next;
  pthread_mutex_unlock(&lock);
  ob_handle_release(request);
  *handle = ONEBIT_REQUEST_NULL;
}

void ob_requests_detach_comm(MPI_Comm comm) {
  OB_LOCKED(&lock);
  for (ONEBIT_Request request = requests; request; request = request->next)
    if (request->call.comm == comm)
      request->call.comm = MPI_COMM_NULL;
}

static MPI_Comm request_comm(ONEBIT_Request request) {
  OB_LOCKED(&lock);
  return request->call.comm;
}

/* Checks a handle that a program gives as a request, before it is dereferenced. */
static int check_handle(ONEBIT_Request request) {
  if (ob_handle_check(request, OB_HANDLE_MPI_REQUEST, "request") == ONEBIT_OK)
    return MPI_SUCCESS;
  return report_code(MPI_COMM_NULL, MPI_ERR_REQUEST);
}

/* ---- Beginning ---- */

static int requests_check(struct ob_mpi_call *call, int count, ONEBIT_Request *request) {
  OB_TRY_MPI(check_mpi_is_running());
  if (!request)
    return report_error(call->comm, MPI_ERR_REQUEST, "request is NULL");
  *request = ONEBIT_REQUEST_NULL;
  return check_call(call, count);
}

static ONEBIT_Request requests_make(const struct ob_mpi_call *call, bool persistent) {
  ONEBIT_Request request = ob_handle_create(OB_HANDLE_MPI_REQUEST, sizeof *request);
  if (!request)
    return NULL;
  *request = (struct onebit_mpi_request){
      .call = *call, .persistent = persistent, .dense = MPI_REQUEST_NULL};
  requests_add(request);
  return request;
}

static int requests_begin(ONEBIT_Request request) {
  const struct ob_mpi_call *call = &request->call;
  struct ob_exchange *exchange;
  bool withdraw;
  request->active = true;
  if (call->count == 0)
    return MPI_SUCCESS;
  int code = find_exchange(call, &exchange, &withdraw);
  if (code == MPI_SUCCESS)
    code = PMPI_Comm_size(call->comm, &request->size);
  if (code == MPI_SUCCESS && !exchange)
    code = ob_mpi_call_begin(call, &request->dense);
  else if (code == MPI_SUCCESS) {
    code = ob_exchange_begin(exchange, call, withdraw, &request->operation);
    if (code != MPI_SUCCESS)
      report_code(call->comm, code);
  }
  request->active = code == MPI_SUCCESS;
  return code;
}

/* Begins a nonblocking allreduce. If there is no memory for a request, the call is completed before
 * the function returns, since the other ranks make it too. */
int ONEBIT_Iallreduce(const void *sendbuf, void *recvbuf, int count, MPI_Datatype datatype,
                      MPI_Op op, MPI_Comm comm, ONEBIT_Request *request) {
  OB_CALL_SCOPE;
  struct ob_mpi_call call = {ONEBIT_ALLREDUCE, comm, sendbuf, recvbuf, 0, datatype, op};
  OB_TRY_MPI(requests_check(&call, count, request));
  *request = requests_make(&call, false);
  if (!*request) {
    OB_TRY_MPI(run_call(&call));
    return report_error(comm, MPI_ERR_NO_MEM, "out of memory for a request");
  }
  int code = requests_begin(*request);
  if (code != MPI_SUCCESS)
    requests_release(request);
  return code;
}

int ONEBIT_Allreduce_init(const void *sendbuf, void *recvbuf, int count, MPI_Datatype datatype,
                          MPI_Op op, MPI_Comm comm, MPI_Info info, ONEBIT_Request *request) {
  OB_CALL_SCOPE;
  struct ob_mpi_call call = {ONEBIT_ALLREDUCE, comm, sendbuf, recvbuf, 0, datatype, op};
  (void)info;
  OB_TRY_MPI(requests_check(&call, count, request));
  *request = requests_make(&call, true);
  return *request ? MPI_SUCCESS : report_error(comm, MPI_ERR_NO_MEM, "out of memory for a request");
}

int ONEBIT_Start(ONEBIT_Request *request) {
  OB_CALL_SCOPE;
  OB_TRY_MPI(check_mpi_is_running());
  OB_TRY_MPI(check_handle(request ? *request : ONEBIT_REQUEST_NULL));
  MPI_Comm comm = request_comm(*request);
  if (!(*request)->persistent)
    return report_error(comm, MPI_ERR_REQUEST, "request is not persistent");
  if ((*request)->active)
    return report_error(comm, MPI_ERR_REQUEST, "request is active");
  if (comm == MPI_COMM_NULL)
    return report_error(comm, MPI_ERR_COMM, "the request's communicator has been freed");
  return requests_begin(*request);
}

/* ---- Ending ---- */

static void set_empty_status(MPI_Status *status, int code) {
  if (status == MPI_STATUS_IGNORE)
    return;
  status->MPI_SOURCE = MPI_ANY_SOURCE;
  status->MPI_TAG = MPI_ANY_TAG;
  status->MPI_ERROR = code;
  PMPI_Status_set_elements(status, MPI_BYTE, 0);
  PMPI_Status_set_cancelled(status, 0);
}

static void requests_end(ONEBIT_Request *request) {
  (*request)->active = false;
  if (!(*request)->persistent)
    requests_release(request);
}

/* Waits for the request's operation or MPI request, or tests it. Reports an error of an operation;
 * MPI itself reports errors of its requests. */
static int requests_finish(ONEBIT_Request request, bool wait, bool *done) {
  int code, flag = 1;
  if (request->operation) {
    code = wait ? ob_operation_wait(&request->operation)
                : ob_operation_test(&request->operation, done);
    *done |= wait;
    return code == MPI_SUCCESS ? code : report_code(request_comm(request), code);
  }
  *done = true;
  if (request->dense == MPI_REQUEST_NULL)
    return MPI_SUCCESS;
  ob_queues_advance();
  code = wait ? ob_wait_for_request(request->call.comm, &request->dense, "ONEBIT_Wait")
              : PMPI_Test(&request->dense, &flag, MPI_STATUS_IGNORE);
  *done = code != MPI_SUCCESS || flag;
  return code == MPI_SUCCESS && flag ? ob_mpi_call_end(&request->call, request->size) : code;
}

static int poll_request(ONEBIT_Request *request, bool wait, bool *done, MPI_Status *status) {
  int code = *request ? check_handle(*request) : MPI_SUCCESS;
  *done = true;
  if (code == MPI_SUCCESS && *request && (*request)->active) {
    code = requests_finish(*request, wait, done);
    if (*done)
      requests_end(request);
  }
  if (*done)
    set_empty_status(status, code);
  return code;
}

static int requests_check_request(const ONEBIT_Request *request) {
  OB_TRY_MPI(check_mpi_is_running());
  return request ? MPI_SUCCESS : report_error(MPI_COMM_NULL, MPI_ERR_REQUEST, "request is NULL");
}

int ONEBIT_Wait(ONEBIT_Request *request, MPI_Status *status) {
  OB_CALL_SCOPE;
  bool done;
  OB_TRY_MPI(requests_check_request(request));
  return poll_request(request, true, &done, status);
}

int ONEBIT_Test(ONEBIT_Request *request, int *flag, MPI_Status *status) {
  OB_CALL_SCOPE;
  bool done;
  OB_TRY_MPI(requests_check_request(request));
  if (!flag)
    return report_error(MPI_COMM_NULL, MPI_ERR_ARG, "flag is NULL");
  int code = poll_request(request, false, &done, status);
  *flag = done;
  return code;
}

int ONEBIT_Waitall(int count, ONEBIT_Request *array, MPI_Status *statuses) {
  OB_CALL_SCOPE;
  int worst = MPI_SUCCESS;
  OB_TRY_MPI(check_mpi_is_running());
  if (count < 0)
    return report_error(MPI_COMM_NULL, MPI_ERR_COUNT, "count is %d, not 0 or more", count);
  if (count > 0 && !array)
    return report_error(MPI_COMM_NULL, MPI_ERR_REQUEST, "requests is NULL");
  for (int i = 0; i < count; i++) {
    bool done;
    MPI_Status *status = statuses == MPI_STATUSES_IGNORE ? MPI_STATUS_IGNORE : &statuses[i];
    if (poll_request(&array[i], true, &done, status) != MPI_SUCCESS)
      worst = MPI_ERR_IN_STATUS;
  }
  return worst;
}

int ONEBIT_Request_free(ONEBIT_Request *request) {
  OB_CALL_SCOPE;
  OB_TRY_MPI(requests_check_request(request));
  OB_TRY_MPI(check_handle(*request));
  if ((*request)->active)
    return report_error(request_comm(*request), MPI_ERR_REQUEST, "request is active");
  requests_release(request);
  return MPI_SUCCESS;
}
