/* Defines the library's versions of MPI's collectives. */
#include <stdio.h>
#include <string.h>

#include "base/call_scope.h"
#include "base/process.h"
#include "dropin/elements.h"
#include "dropin/mpi/communicator.h"
#include "dropin/mpi/preload.h"
#include "dropin/preload.h"

/* Returns a handle, which is a pointer or a number, as a number. */
static uint64_t handle_to_number(const void *handle, size_t bytes) {
  uint64_t number = 0;
  memcpy(&number, handle, bytes < sizeof number ? bytes : sizeof number);
  return number;
}

static struct ob_record *make_record(const struct ob_record_of *of, MPI_Comm comm,
                                     MPI_Datatype type, size_t bytes) {
  char name[MPI_MAX_OBJECT_NAME], type_name[MPI_MAX_OBJECT_NAME];
  int length = 0, type_length = 0;
  bool named = PMPI_Comm_get_name(comm, name, &length) == MPI_SUCCESS && length;
  bool type_named = of->dtype == OB_OTHER_TYPE &&
                    PMPI_Type_get_name(type, type_name, &type_length) == MPI_SUCCESS && type_length;
  return ob_counters_make(of, named ? name : "a communicator",
                          of->dtype != OB_OTHER_TYPE ? ob_report_dtype(of->dtype)
                          : type_named               ? type_name
                                                     : "elements of a type without a name",
                          bytes);
}

/* Returns the record of calls like this one, or NULL for a call that is too small to be
 * recorded. */
static struct ob_record *find_or_make_record(const char *name, onebit_dtype_t dtype, size_t count,
                                             MPI_Datatype type, MPI_Comm comm, int comm_size) {
  int size = 0;
  if (type == MPI_DATATYPE_NULL || PMPI_Type_size(type, &size) != MPI_SUCCESS ||
      count * (size_t)size < ob_preload.rules.min_bytes)
    return NULL;
  struct ob_record_of of = {handle_to_number(&comm, sizeof comm),
                            comm_size,
                            name,
                            dtype,
                            dtype == OB_OTHER_TYPE ? handle_to_number(&type, sizeof type) : 0,
                            count};
  struct ob_record *record = ob_counters_find(&of);
  return record ? record : make_record(&of, comm, type, count * (size_t)size);
}

void ob_preload_count_uncompressed(const char *name, MPI_Count count, MPI_Datatype type,
                                   MPI_Comm comm, double seconds) {
  const struct ob_mpi_call call = {
      .operation = ONEBIT_ALLREDUCE, .datatype = type, .op = MPI_SUM, .count = 1};
  onebit_dtype_t dtype;
  bool sum;
  int size = 1;
  if (count <= 0 || !ob_preload.rules.min_bytes || comm == MPI_COMM_NULL ||
      PMPI_Comm_size(comm, &size) != MPI_SUCCESS || size < 2)
    return;
  ob_mpi_call_resolve(&call, &dtype, &sum);
  struct ob_record *record = find_or_make_record(name, dtype, (size_t)count, type, comm, size);
  if (record)
    ob_record_count_dense(record, OB_REASON_CALL, seconds);
}

bool ob_preload_has_invalid_argument(const struct ob_mpi_call *call) {
  return call->comm == MPI_COMM_NULL || !call->sendbuf || !call->recvbuf ||
         call->recvbuf == MPI_IN_PLACE || call->sendbuf == call->recvbuf ||
         (MPI_Count)call->count < 0;
}

/* Returns true if all ranks of the communicator belong to MPI_COMM_WORLD: ranks of another MPI_Init
 * may have other rules, or no preloaded library. */
static bool is_within_world(MPI_Comm comm) {
  MPI_Group group, world, both;
  int size = 0, common = -1;
  if (ob_attached_find(comm))
    return true;
  PMPI_Comm_group(comm, &group);
  PMPI_Comm_group(MPI_COMM_WORLD, &world);
  PMPI_Group_size(group, &size);
  if (PMPI_Group_intersection(group, world, &both) == MPI_SUCCESS) {
    PMPI_Group_size(both, &common);
    PMPI_Group_free(&both);
  }
  PMPI_Group_free(&group);
  PMPI_Group_free(&world);
  return common == size;
}

/* Decides on a call as far as this rank can decide alone. The cheapest checks come first. */
static enum ob_reason preload_calls_judge(const struct ob_mpi_call *call, struct ob_record **record,
                                          struct ob_followed *followed) {
  onebit_dtype_t dtype;
  bool sum;
  int other = 1, size = 1;
  const struct ob_rules *rules = &ob_preload.rules;
  enum ob_reason reason = ob_mpi_call_resolve(call, &dtype, &sum);
  if (PMPI_Comm_test_inter(call->comm, &other) != MPI_SUCCESS || other ||
      PMPI_Comm_size(call->comm, &size) != MPI_SUCCESS || size < 2)
    return reason == OB_REASON_NONE ? OB_REASON_ALONE : reason;
  *record = find_or_make_record(ob_report_operation(call->operation), dtype, call->count,
                                call->datatype, call->comm, size);
  if (reason == OB_REASON_NONE)
    reason = ob_rules_judge(rules, call->operation, dtype, call->count, size);
  if (reason != OB_REASON_NONE)
    return reason;
  followed->bits = ob_rules_bits(rules, call->operation, dtype, call->count, size);
  followed->budget = rules->budget;
  return is_within_world(call->comm) ? OB_REASON_NONE : OB_REASON_REFUSED;
}

void ob_preload_note(onebit_operation_t operation, size_t count, MPI_Comm comm) {
  struct ob_attached *attached = comm != MPI_COMM_NULL ? ob_attached_find(comm) : NULL;
  if (attached)
    ob_attached_note(attached, operation, count);
}

/* Reports an error to the communicator's error handler, which by default ends the program. */
static int report_failure(const struct ob_mpi_call *call, int code) {
  int rank = 0;
  PMPI_Comm_rank(call->comm, &rank);
  fprintf(stderr, "onebit: rank %d: %s\n", rank, onebit_last_error());
  PMPI_Comm_call_errhandler(call->comm, code);
  return code;
}

int ob_preload_decide(const struct ob_mpi_call *call, struct ob_preload_decision *decision) {
  OB_CALL_SCOPE;
  *decision = (struct ob_preload_decision){.exchange = NULL};
  struct ob_followed followed = {.failed = false};
  decision->reason = preload_calls_judge(call, &decision->record, &followed);
  if (decision->reason != OB_REASON_NONE) {
    ob_preload_note(call->operation, call->count, call->comm);
    return MPI_SUCCESS;
  }
  double start = ob_seconds();
  ob_flights_pause();
  struct ob_attached *attached = ob_attached_get(call->comm, ob_preload.rules.warmup);
  followed.reason = OB_REASON_REFUSED;
  if (attached)
    decision->exchange = ob_attached_follow(attached, call, &followed);
  decision->reason = followed.reason;
  decision->tensor = followed.tensor;
  decision->max_bits = followed.bits.max;
  decision->shadow = followed.shadow;
  ob_flights_resume();
  ob_record_count_decision(decision->record, ob_seconds() - start);
  return followed.failed ? report_failure(call, MPI_ERR_OTHER) : MPI_SUCCESS;
}

void ob_preload_count_sent(struct ob_record *record, const struct ob_tally *tally) {
  ob_record_count_sent(record, tally->bits, tally->bytes_sent, tally->bytes_dense);
  if (tally->moved)
    ob_record_count_moves(record);
}

/* Adds one call of an exchange to the statistics of its record. Returns false if the call was
 * withdrawn. */
static bool preload_calls_note(const struct ob_preload_decision *decision, uint64_t before,
                               double seconds) {
  const struct ob_tally *tally = &decision->exchange->tally;
  if (tally->compressed == before) {
    ob_record_count_dense(decision->record, OB_REASON_WITHDRAWN, seconds);
    return false;
  }
  ob_record_count_compressed(decision->record, seconds);
  ob_preload_count_sent(decision->record, tally);
  return true;
}

static int preload_calls_run_compressed(const struct ob_mpi_call *call,
                                        const struct ob_preload_decision *decision) {
  const struct ob_tally *tally = &decision->exchange->tally;
  const uint64_t before = tally->compressed;
  const bool shadowed = ob_shadow_begin(decision->shadow, call);
  double start = ob_seconds();
  ob_flights_pause();
  int code = ob_exchange_run(decision->exchange, call, false);
  double end = ob_seconds();
  if (code == MPI_SUCCESS && preload_calls_note(decision, before, end - start) && shadowed) {
    ob_shadow_end(decision->shadow, call, decision->tensor,
                  tally->bits < decision->max_bits ? 0 : tally->bits, decision->record);
    ob_record_count_decision(decision->record, ob_seconds() - end);
  }
  ob_flights_resume();
  return code == MPI_SUCCESS ? code : report_failure(call, code);
}

/* Makes a blocking call that is not below the minimum size. Returns an MPI error code. */
int ob_preload_run_call(const struct ob_mpi_call *call) {
  OB_CALL_SCOPE;
  struct ob_preload_decision decision;
  if (ob_preload_has_invalid_argument(call))
    return ob_mpi_call_run_dense(call);
  int code = ob_preload_decide(call, &decision);
  if (code != MPI_SUCCESS)
    return code;
  if (decision.exchange)
    return preload_calls_run_compressed(call, &decision);
  double start = ob_seconds();
  OB_CALL_OF_PROGRAM(code = ob_mpi_call_run_dense(call));
  ob_record_count_dense(decision.record, decision.reason, ob_seconds() - start);
  return code;
}

OB_PRELOAD_VISIBLE int MPI_Allreduce(const void *sendbuf, void *recvbuf, int count,
                                     MPI_Datatype datatype, MPI_Op op, MPI_Comm comm) {
  if (ob_preload_is_small(ONEBIT_ALLREDUCE, (size_t)count)) {
    ob_preload_note(ONEBIT_ALLREDUCE, (size_t)count, comm);
    return PMPI_Allreduce(sendbuf, recvbuf, count, datatype, op, comm);
  }
  if (count < 0)
    return PMPI_Allreduce(sendbuf, recvbuf, count, datatype, op, comm);
  const struct ob_mpi_call call = {ONEBIT_ALLREDUCE, comm,     sendbuf, recvbuf,
                                   (size_t)count,    datatype, op};
  return ob_preload_run_call(&call);
}

OB_PRELOAD_VISIBLE int MPI_Reduce_scatter_block(const void *sendbuf, void *recvbuf, int count,
                                                MPI_Datatype datatype, MPI_Op op, MPI_Comm comm) {
  if (ob_preload_is_small(ONEBIT_REDUCE_SCATTER, (size_t)count) || count < 0) {
    double start = ob_seconds();
    int code = PMPI_Reduce_scatter_block(sendbuf, recvbuf, count, datatype, op, comm);
    ob_preload_count_uncompressed("reduce-scatter", count, datatype, comm, ob_seconds() - start);
    return code;
  }
  const struct ob_mpi_call call = {ONEBIT_REDUCE_SCATTER, comm,     sendbuf, recvbuf,
                                   (size_t)count,         datatype, op};
  return ob_preload_run_call(&call);
}

/* Passes on an allgather whose two sides differ in count or type, which MPI allows. For a call in
 * place only the count and type of the receiving side matter. */
OB_PRELOAD_VISIBLE int MPI_Allgather(const void *sendbuf, int sendcount, MPI_Datatype sendtype,
                                     void *recvbuf, int recvcount, MPI_Datatype recvtype,
                                     MPI_Comm comm) {
  bool alike = sendbuf == MPI_IN_PLACE || (sendcount == recvcount && sendtype == recvtype);
  if (ob_preload_is_small(ONEBIT_ALLGATHER, (size_t)recvcount) || recvcount < 0 ||
      comm == MPI_COMM_NULL || !alike)
    return PMPI_Allgather(sendbuf, sendcount, sendtype, recvbuf, recvcount, recvtype, comm);
  const struct ob_mpi_call call = {ONEBIT_ALLGATHER,  comm,     sendbuf,    recvbuf,
                                   (size_t)recvcount, recvtype, MPI_OP_NULL};
  return ob_preload_run_call(&call);
}
