/*
 * The requests of onebit/mpi_calls.h. One holds an operation of an exchange, or MPI's own request
 * where a call is dense from its beginning.
 */
#include "base/call_scope.h"
#include "base/lock.h"
#include "dropin/mpi/calls.h"
#include "dropin/mpi/queue.h"
#include "onebit/mpi_calls.h"

struct onebit_mpi_request {
  struct onebit_mpi_request *next, *previous; /* of this process */
  struct ob_mpi_call call; /* its communicator is MPI_COMM_NULL once that has been freed */
  int size;
  bool persistent, active;
  struct ob_operation *operation;
  MPI_Request dense;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static ONEBIT_Request requests;

/* ---- Their list ---- */

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

void ob_requests_orphan(MPI_Comm comm) {
  OB_LOCKED(&lock);
  for (ONEBIT_Request request = requests; request; request = request->next)
    if (request->call.comm == comm)
      request->call.comm = MPI_COMM_NULL;
}

static MPI_Comm comm_of(ONEBIT_Request request) {
  OB_LOCKED(&lock);
  return request->call.comm;
}

/* Checks a handle that a program gives as a request, before it is dereferenced. */
static int check_handle(ONEBIT_Request request) {
  if (ob_handle_check(request, OB_HANDLE_MPI_REQUEST, "request") == ONEBIT_OK)
    return MPI_SUCCESS;
  return ob_call_exchange_failed(MPI_COMM_NULL, MPI_ERR_REQUEST);
}

/* ---- Beginning ---- */

static int requests_check(struct ob_mpi_call *call, int count, ONEBIT_Request *request) {
  OB_TRY_MPI(ob_call_begin_mpi());
  if (!request)
    return ob_call_failed(call->comm, MPI_ERR_REQUEST, "request is NULL");
  *request = ONEBIT_REQUEST_NULL;
  return ob_call_check(call, count);
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
  int code = ob_call_find(call, &exchange, &withdraw);
  if (code == MPI_SUCCESS)
    code = PMPI_Comm_size(call->comm, &request->size);
  if (code == MPI_SUCCESS && !exchange)
    code = ob_mpi_call_begin(call, &request->dense);
  else if (code == MPI_SUCCESS) {
    code = ob_exchange_begin(exchange, call, withdraw, &request->operation);
    if (code != MPI_SUCCESS)
      ob_call_exchange_failed(call->comm, code);
  }
  request->active = code == MPI_SUCCESS;
  return code;
}

/* Without memory for a request the call is made all the same, since the other ranks make it. */
int ONEBIT_Iallreduce(const void *sendbuf, void *recvbuf, int count, MPI_Datatype datatype,
                      MPI_Op op, MPI_Comm comm, ONEBIT_Request *request) {
  OB_CALL_SCOPE;
  struct ob_mpi_call call = {ONEBIT_ALLREDUCE, comm, sendbuf, recvbuf, 0, datatype, op};
  OB_TRY_MPI(requests_check(&call, count, request));
  *request = requests_make(&call, false);
  if (!*request) {
    OB_TRY_MPI(ob_call_run(&call));
    return ob_call_failed(comm, MPI_ERR_NO_MEM, "no memory for a request");
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
  return *request ? MPI_SUCCESS : ob_call_failed(comm, MPI_ERR_NO_MEM, "no memory for a request");
}

int ONEBIT_Start(ONEBIT_Request *request) {
  OB_CALL_SCOPE;
  OB_TRY_MPI(ob_call_begin_mpi());
  OB_TRY_MPI(check_handle(request ? *request : ONEBIT_REQUEST_NULL));
  MPI_Comm comm = comm_of(*request);
  if (!(*request)->persistent)
    return ob_call_failed(comm, MPI_ERR_REQUEST, "request is not persistent");
  if ((*request)->active)
    return ob_call_failed(comm, MPI_ERR_REQUEST, "request is active");
  if (comm == MPI_COMM_NULL)
    return ob_call_failed(comm, MPI_ERR_COMM, "the request's communicator has been freed");
  return requests_begin(*request);
}

/* ---- Ending ---- */

static void set_empty(MPI_Status *status, int code) {
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

/* Finishes what the request holds, without a call of the error handler. */
static int requests_finish(ONEBIT_Request request, bool wait, bool *done) {
  int code, flag = 1;
  if (request->operation) {
    code = wait ? ob_operation_wait(&request->operation)
                : ob_operation_test(&request->operation, done);
    *done |= wait;
    return code == MPI_SUCCESS ? code : ob_call_exchange_failed(comm_of(request), code);
  }
  *done = true;
  if (request->dense == MPI_REQUEST_NULL)
    return MPI_SUCCESS;
  ob_queues_move();
  code = wait ? ob_wait_moving(request->call.comm, &request->dense, "ONEBIT_Wait")
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
    set_empty(status, code);
  return code;
}

static int requests_check_request(const ONEBIT_Request *request) {
  OB_TRY_MPI(ob_call_begin_mpi());
  return request ? MPI_SUCCESS : ob_call_failed(MPI_COMM_NULL, MPI_ERR_REQUEST, "request is NULL");
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
    return ob_call_failed(MPI_COMM_NULL, MPI_ERR_ARG, "flag is NULL");
  int code = poll_request(request, false, &done, status);
  *flag = done;
  return code;
}

int ONEBIT_Waitall(int count, ONEBIT_Request *array, MPI_Status *statuses) {
  OB_CALL_SCOPE;
  int worst = MPI_SUCCESS;
  OB_TRY_MPI(ob_call_begin_mpi());
  if (count < 0)
    return ob_call_failed(MPI_COMM_NULL, MPI_ERR_COUNT, "count is %d", count);
  if (count > 0 && !array)
    return ob_call_failed(MPI_COMM_NULL, MPI_ERR_REQUEST, "requests is NULL");
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
    return ob_call_failed(comm_of(*request), MPI_ERR_REQUEST, "request is active");
  requests_release(request);
  return MPI_SUCCESS;
}
