/* MPI_Iallreduce: the program's request is a generalized request. */
#include <limits.h>

#include "base/memory.h"
#include "dropin/mpi/preload_flights.h"
#include "dropin/mpi/shadow.h"

/* Tests a flight. Without an operation, for want of memory, the call was made when it began. */
bool ob_flight_test(struct ob_flight *flight) {
  bool compressed = true;
  if (flight->operation) {
    ob_queues_move();
    if (!ob_operation_ended(flight->operation, &compressed))
      return false;
    flight->code = ob_operation_wait(&flight->operation);
  }
  if (compressed) {
    ob_record_compressed(flight->record, OB_NOT_TIMED);
    ob_preload_sent(flight->record, &flight->tally);
  } else {
    ob_record_pass(flight->record, OB_REASON_WITHDRAWN, OB_NOT_TIMED);
  }
  return true;
}

/* Fills in the status of a generalized request for MPI. */
static int query(void *state, MPI_Status *status) {
  const struct ob_flight *flight = state;
  PMPI_Status_set_elements(status, MPI_BYTE, 0);
  PMPI_Status_set_cancelled(status, 0);
  status->MPI_SOURCE = MPI_UNDEFINED;
  status->MPI_TAG = MPI_UNDEFINED;
  return flight->code;
}

static int give_back(void *state) {
  ob_release(state);
  return MPI_SUCCESS;
}

static int cancel(void *state, int complete) { /* no collective can be */
  (void)state, (void)complete;
  return MPI_SUCCESS;
}

static int preload_requests_compressed(const struct ob_mpi_call *what,
                                       const struct ob_preload_decision *decision,
                                       MPI_Request *request) {
  struct ob_flight *flight = ob_allocate(1, sizeof *flight);
  if (!flight || PMPI_Grequest_start(query, give_back, cancel, flight, request) != MPI_SUCCESS) {
    ob_release(flight);
    *request = MPI_REQUEST_NULL; /* it has ended already */
    return ob_exchange_run(decision->exchange, what, false);
  }
  flight->request = *request;
  flight->record = decision->record;
  ob_flights_hold();
  int code = ob_exchange_begin(decision->exchange, what, ob_shadow_is_quiet(decision->shadow, what),
                               &flight->operation);
  flight->tally = *ob_exchange_tally(decision->exchange);
  ob_flights_release();
  if (code == MPI_SUCCESS)
    ob_flights_add(flight);
  return code;
}

int ob_preload_begin(const struct ob_mpi_call *call, MPI_Request *request) {
  struct ob_preload_decision decision = {.reason = OB_REASON_REFUSED};
  bool decides = !ob_preload_is_wrong(call) && ob_flights_move();
  OB_TRY_MPI(decides ? ob_preload_decide(call, &decision) : MPI_SUCCESS);
  if (decision.exchange)
    return preload_requests_compressed(call, &decision, request);
  ob_record_pass(decision.record, decision.reason, OB_NOT_TIMED);
  if (call->count > INT_MAX)
    return PMPI_Iallreduce_c(call->sendbuf, call->recvbuf, (MPI_Count)call->count, call->datatype,
                             call->op, call->comm, request);
  return PMPI_Iallreduce(call->sendbuf, call->recvbuf, (int)call->count, call->datatype, call->op,
                         call->comm, request);
}

OB_PRELOAD_VISIBLE int MPI_Iallreduce(const void *sendbuf, void *recvbuf, int count,
                                      MPI_Datatype datatype, MPI_Op op, MPI_Comm comm,
                                      MPI_Request *request) {
  bool small = ob_preload_small(ONEBIT_ALLREDUCE, (size_t)count);
  if (small)
    ob_preload_note(ONEBIT_ALLREDUCE, (size_t)count, comm);
  if (small || count < 0 || !request)
    return PMPI_Iallreduce(sendbuf, recvbuf, count, datatype, op, comm, request);
  const struct ob_mpi_call call = {ONEBIT_ALLREDUCE, comm,     sendbuf, recvbuf,
                                   (size_t)count,    datatype, op};
  return ob_preload_begin(&call, request);
}
