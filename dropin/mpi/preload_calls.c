/* The collectives in the place of MPI's. */
#include <stdio.h>
#include <string.h>

#include "base/call_scope.h"
#include "base/clock.h"
#include "dropin/mpi/attached.h"
#include "dropin/mpi/preload_flights.h"

/* The record of calls like this one. A communicator's handle is a pointer or a number. */
static struct ob_record *record_of(const struct ob_mpi_call *call, onebit_dtype_t dtype, int size) {
  struct ob_record_of of = {0, size, call->operation, dtype, call->count};
  memcpy(&of.communicator, &call->comm,
         sizeof call->comm < sizeof of.communicator ? sizeof call->comm : sizeof of.communicator);
  struct ob_record *record = ob_counters_find(&of);
  if (record)
    return record;
  char name[MPI_MAX_OBJECT_NAME];
  int length = 0;
  bool named = PMPI_Comm_get_name(call->comm, name, &length) == MPI_SUCCESS && length;
  return ob_counters_make(&of, named ? name : "a communicator");
}

/* What is decided without a word to other ranks, in the order of what it costs to find out. */
static enum ob_reason judge(const struct ob_mpi_call *call, struct ob_followed *followed) {
  onebit_dtype_t dtype;
  bool sum;
  int other = 1, size = 1;
  enum ob_reason reason = ob_mpi_call_resolve(call, &dtype, &sum);
  if (reason != OB_REASON_NONE)
    return reason;
  if (PMPI_Comm_test_inter(call->comm, &other) != MPI_SUCCESS || other ||
      PMPI_Comm_size(call->comm, &size) != MPI_SUCCESS || size < 2)
    return OB_REASON_ALONE;
  if (!ob_rules_compress(&ob_preload.rules, call->operation, dtype, call->count, size))
    return OB_REASON_RULE;
  followed->named = ob_rules_name(&ob_preload.rules, call->operation, dtype, call->count, size);
  followed->bits = ob_rules_bits(&ob_preload.rules, call->operation, dtype, call->count, size);
  followed->record = record_of(call, dtype, size);
  followed->budget = ob_preload.rules.budget;
  return ob_preload_settled(call->comm, size);
}

void ob_preload_note(onebit_operation_t operation, size_t count, MPI_Comm comm) {
  struct ob_attached *attached = comm != MPI_COMM_NULL ? ob_attached_known(comm) : NULL;
  if (attached)
    ob_attached_note(attached, operation, count);
}

static int fail(const struct ob_mpi_call *call, int code) { /* most programs leave it to end them */
  int rank = 0;
  PMPI_Comm_rank(call->comm, &rank);
  fprintf(stderr, "onebit: rank %d: %s\n", rank, onebit_last_error());
  PMPI_Comm_call_errhandler(call->comm, code);
  return code;
}

int ob_preload_decide(const struct ob_mpi_call *call, struct ob_preload_decision *decision) {
  OB_CALL_SCOPE;
  *decision = (struct ob_preload_decision){.withdraw = false};
  struct ob_followed followed = {.named = false};
  decision->reason = judge(call, &followed);
  decision->record = followed.record;
  if (decision->reason != OB_REASON_NONE) {
    ob_preload_note(call->operation, call->count, call->comm);
    return MPI_SUCCESS;
  }
  double start = ob_seconds();
  ob_flights_hold();
  struct ob_attached *attached = ob_attached_of(call->comm, ob_preload.rules.warmup);
  followed.reason = OB_REASON_REFUSED;
  if (attached)
    decision->exchange = ob_attached_follow(attached, call, &followed);
  decision->withdraw = followed.withdraw;
  decision->reason = followed.reason;
  decision->candidate = followed.candidate;
  ob_flights_release();
  ob_record_decided(decision->record, ob_seconds() - start);
  return followed.failed ? fail(call, MPI_ERR_OTHER) : MPI_SUCCESS;
}

void ob_preload_sent(struct ob_record *record, const struct ob_tally *tally) {
  ob_record_sent(record, tally->bits, tally->bytes_sent, tally->bytes_dense);
  if (tally->moved)
    ob_record_moved(record);
}

/* What the record makes of a call that its exchange has done. */
static void note(const struct ob_mpi_call *call, const struct ob_preload_decision *decision,
                 uint64_t before, double seconds) {
  const struct ob_tally *tally = ob_exchange_tally(decision->exchange);
  if (tally->compressed == before) {
    ob_record_pass(decision->record, OB_REASON_WITHDRAWN, seconds);
    return;
  }
  ob_record_compressed(decision->record, seconds);
  ob_preload_sent(decision->record, tally);
  ob_residual_sample(decision->record, call, ob_exchange_plan(decision->exchange));
}

/* A blocking call that is not small. An MPI error code. */
static int make_call(const struct ob_mpi_call *call) {
  OB_CALL_SCOPE;
  struct ob_preload_decision decision;
  double begin = ob_seconds();
  int code = ob_preload_decide(call, &decision);
  if (code != MPI_SUCCESS)
    return code;
  double start = ob_seconds();
  if (!decision.exchange) {
    OB_CALL_OF_PROGRAM(code = ob_mpi_call_dense(call));
    ob_record_pass(decision.record, decision.reason, ob_seconds() - start);
    ob_candidate_time(decision.candidate, false, ob_seconds() - start);
    return code;
  }
  const uint64_t before = ob_exchange_tally(decision.exchange)->compressed;
  ob_flights_hold();
  code = ob_exchange_run(decision.exchange, call, decision.withdraw);
  ob_flights_release();
  if (code != MPI_SUCCESS)
    return fail(call, code);
  ob_candidate_time(decision.candidate, true, ob_seconds() - begin);
  note(call, &decision, before, ob_seconds() - start);
  return code;
}

OB_PRELOAD_VISIBLE int MPI_Allreduce(const void *sendbuf, void *recvbuf, int count,
                                     MPI_Datatype datatype, MPI_Op op, MPI_Comm comm) {
  if (ob_preload_small(ONEBIT_ALLREDUCE, (size_t)count)) {
    ob_preload_note(ONEBIT_ALLREDUCE, (size_t)count, comm);
    return PMPI_Allreduce(sendbuf, recvbuf, count, datatype, op, comm);
  }
  if (count < 0 || comm == MPI_COMM_NULL)
    return PMPI_Allreduce(sendbuf, recvbuf, count, datatype, op, comm);
  const struct ob_mpi_call call = {ONEBIT_ALLREDUCE, comm,     sendbuf, recvbuf,
                                   (size_t)count,    datatype, op};
  return make_call(&call);
}

OB_PRELOAD_VISIBLE int MPI_Reduce_scatter_block(const void *sendbuf, void *recvbuf, int count,
                                                MPI_Datatype datatype, MPI_Op op, MPI_Comm comm) {
  if (ob_preload_small(ONEBIT_REDUCE_SCATTER, (size_t)count) || count < 0 || comm == MPI_COMM_NULL)
    return PMPI_Reduce_scatter_block(sendbuf, recvbuf, count, datatype, op, comm);
  const struct ob_mpi_call call = {ONEBIT_REDUCE_SCATTER, comm,     sendbuf, recvbuf,
                                   (size_t)count,         datatype, op};
  return make_call(&call);
}

/* Where one side's count or type differs from the other's, which MPI allows, it is not ours. In
 * place, the receiving side's are the ones that count. */
OB_PRELOAD_VISIBLE int MPI_Allgather(const void *sendbuf, int sendcount, MPI_Datatype sendtype,
                                     void *recvbuf, int recvcount, MPI_Datatype recvtype,
                                     MPI_Comm comm) {
  bool alike = sendbuf == MPI_IN_PLACE || (sendcount == recvcount && sendtype == recvtype);
  if (ob_preload_small(ONEBIT_ALLGATHER, (size_t)recvcount) || recvcount < 0 ||
      comm == MPI_COMM_NULL || !alike)
    return PMPI_Allgather(sendbuf, sendcount, sendtype, recvbuf, recvcount, recvtype, comm);
  const struct ob_mpi_call call = {ONEBIT_ALLGATHER,  comm,     sendbuf,    recvbuf,
                                   (size_t)recvcount, recvtype, MPI_OP_NULL};
  return make_call(&call);
}

int ob_preload_call(const struct ob_mpi_call *call) { return make_call(call); }
