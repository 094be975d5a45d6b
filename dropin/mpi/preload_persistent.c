/*
 * Persistent allreduces. What the program holds is a persistent receive of nothing from this rank
 * itself: MPI_Start posts it beside the exchange, and when that has ended an empty message to
 * itself completes it. So waits and tests need no wrapper here either.
 */
#include "dropin/mpi/preload_flights.h"

#include <limits.h>
#include <pthread.h>
#include <string.h>

#include "base/memory.h"

struct persistent {
  struct ob_flight flight;
  struct persistent *next;
  MPI_Request handle, dense; /* what the program holds; MPI's own, for calls that are passed on */
  int tag;
  bool is_dense; /* this time */
  struct ob_mpi_call call;
  struct ob_preload_flown flown;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct persistent *persistents;
static atomic_int count;
static MPI_Comm self; /* MPI_COMM_NULL where it could not be made */
static int tags;

static void make_self(void) {
  if (PMPI_Comm_split(MPI_COMM_SELF, 0, 0, &self) != MPI_SUCCESS)
    self = MPI_COMM_NULL;
}

static struct persistent *find(MPI_Request handle) {
  if (!atomic_load_explicit(&count, memory_order_relaxed))
    return NULL;
  pthread_mutex_lock(&lock);
  struct persistent *call = persistents;
  while (call && call->handle != handle)
    call = call->next;
  pthread_mutex_unlock(&lock);
  return call;
}

static bool test(struct ob_flight *flight) {
  struct persistent *call = (struct persistent *)flight;
  int done = 0;
  if (!call->is_dense)
    return ob_preload_flown(&call->flown, &flight->code);
  return PMPI_Test(&call->dense, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done;
}

static void end(struct ob_flight *flight) {
  const struct persistent *call = (const struct persistent *)flight;
  PMPI_Send(NULL, 0, MPI_BYTE, 0, call->tag, self);
}

static int start(struct persistent *call) {
  struct ob_preload_decision decision;
  int code = ob_preload_decide(&call->call, &decision);
  if (code == MPI_SUCCESS)
    code = PMPI_Start(&call->handle);
  if (code != MPI_SUCCESS)
    return code;
  call->is_dense = !decision.exchange;
  if (call->is_dense) {
    ob_record_pass(decision.record, decision.reason, OB_NOT_TIMED);
    code = PMPI_Start(&call->dense);
  } else {
    code = ob_preload_fly(&call->flown, &call->call, &decision);
  }
  if (code == MPI_SUCCESS)
    ob_flights_add(&call->flight);
  return code;
}

/* ---- MPI's calls ---- */

static int make_dense(const struct ob_mpi_call *call, MPI_Info info, MPI_Request *request) {
  const int length = (int)call->count;
  if (call->count > INT_MAX && (MPI_Count)call->count > 0)
    return PMPI_Allreduce_init_c(call->sendbuf, call->recvbuf, (MPI_Count)call->count,
                                 call->datatype, call->op, call->comm, info, request);
  if (PMPI_Allreduce_init)
    return PMPI_Allreduce_init(call->sendbuf, call->recvbuf, length, call->datatype, call->op,
                               call->comm, info, request);
  if (PMPIX_Allreduce_init)
    return PMPIX_Allreduce_init(call->sendbuf, call->recvbuf, length, call->datatype, call->op,
                                call->comm, info, request);
  return MPI_ERR_OTHER; /* the program is of a newer MPI than its library */
}

static int make(const struct ob_mpi_call *what, MPI_Info info, struct persistent *call) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, make_self);
  int code = make_dense(what, info, &call->dense);
  if (code != MPI_SUCCESS)
    return code;
  call->call = *what;
  call->flight.test = test;
  call->flight.end = end;
  pthread_mutex_lock(&lock);
  call->tag = tags++ % 32768; /* every MPI has so many */
  code = self == MPI_COMM_NULL
             ? MPI_ERR_INTERN
             : PMPI_Recv_init(NULL, 0, MPI_BYTE, 0, call->tag, self, &call->handle);
  if (code == MPI_SUCCESS) {
    call->next = persistents;
    persistents = call;
    atomic_fetch_add(&count, 1);
  } else {
    PMPI_Request_free(&call->dense);
  }
  pthread_mutex_unlock(&lock);
  return code;
}

/* A negative count, which is for MPI to refuse, is a very large one here. */
int ob_preload_init(const struct ob_mpi_call *what, MPI_Info info, MPI_Request *request) {
  struct persistent *call = NULL;
  if (!ob_preload_small(ONEBIT_ALLREDUCE, what->count) && what->count > 0 &&
      !ob_preload_is_wrong(what) && request && ob_flights_move())
    call = ob_allocate(1, sizeof *call);
  if (call && make(what, info, call) == MPI_SUCCESS) {
    *request = call->handle;
    return MPI_SUCCESS;
  }
  ob_release(call);
  return make_dense(what, info, request);
}

OB_PRELOAD_VISIBLE int MPI_Start(MPI_Request *request) {
  struct persistent *call = request ? find(*request) : NULL;
  return call ? start(call) : PMPI_Start(request);
}

OB_PRELOAD_VISIBLE int MPI_Startall(int length, MPI_Request requests[]) {
  int code = MPI_SUCCESS;
  if (!atomic_load_explicit(&count, memory_order_relaxed))
    return PMPI_Startall(length, requests);
  for (int i = 0; i < length && code == MPI_SUCCESS; i++)
    code = MPI_Start(&requests[i]);
  return code;
}

OB_PRELOAD_VISIBLE int MPI_Request_free(MPI_Request *request) {
  struct persistent *call = request ? find(*request) : NULL;
  if (!call)
    return PMPI_Request_free(request);
  pthread_mutex_lock(&lock);
  struct persistent **at = &persistents;
  while (*at != call)
    at = &(*at)->next;
  *at = call->next;
  atomic_fetch_sub(&count, 1);
  pthread_mutex_unlock(&lock);
  int code = PMPI_Request_free(&call->dense);
  ob_release(call);
  int own = PMPI_Request_free(request);
  return code == MPI_SUCCESS ? own : code;
}
