/* Replaces NCCL's collectives, reads the settings at the start, and reports at the end. */
#define _GNU_SOURCE /* RTLD_NEXT */
#include "dropin/nccl/preload.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/process.h"
#include "dropin/elements.h"
#include "dropin/preload.h"

/* ---- NCCL's own functions, found when they are first called ---- */

/* Finds a function of NCCL: after this library in the loader's search order if NCCL is linked to
 * the program, or in the loaded library if the program has loaded NCCL at run time. */
static void *find_nccl_function(const char *name) {
  void *found = dlsym(RTLD_NEXT, name);
  if (found)
    return found;
  void *library = dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD);
  return library ? dlsym(library, name) : NULL;
}

/* Returns true if the process has NCCL, through whichever library. */
static bool is_nccl_loaded(void) { return find_nccl_function("ncclCommInitRank") != NULL; }

/* Looks up a function. All threads find the same one. */
static void *look_up_nccl_function(_Atomic(void *) *known, const char *name) {
  void *found = atomic_load_explicit(known, memory_order_acquire);
  if (!found) {
    found = find_nccl_function(name);
    atomic_store_explicit(known, found, memory_order_release);
  }
  return found;
}

/* Defines a call of NCCL's function: C has no cast from void * to a function's address. */
#define OB_NCCL_DEFINE(name, parameters, arguments)                                                \
  ncclResult_t ob_next_nccl##name parameters {                                                     \
    static _Atomic(void *) known;                                                                  \
    ncclResult_t(*function) parameters;                                                            \
    void *found = look_up_nccl_function(&known, "nccl" #name);                                     \
    memcpy(&function, &found, sizeof function);                                                    \
    return function ? function arguments : ncclInternalError;                                      \
  }
OB_NCCL_FUNCTIONS(OB_NCCL_DEFINE)

const char *ob_next_ncclGetErrorString(ncclResult_t result) {
  static _Atomic(void *) known;
  const char *(*function)(ncclResult_t);
  void *found = look_up_nccl_function(&known, "ncclGetErrorString");
  memcpy(&function, &found, sizeof function);
  return function ? function(result) : "NCCL is not loaded";
}

const char *ob_next_ncclGetLastError(ncclComm_t comm) {
  static _Atomic(void *) known;
  const char *(*function)(ncclComm_t);
  void *found = look_up_nccl_function(&known, "ncclGetLastError"); /* exists from NCCL 2.13 on */
  memcpy(&function, &found, sizeof function);
  return function ? function(comm) : "";
}

/* ---- The start ---- */

enum { MESSAGE_BYTES = 512 };
static char wrong_settings[MESSAGE_BYTES], unusable[MESSAGE_BYTES];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static atomic_bool seen; /* the program has made a communicator */

static bool report_and_judge(void);

/* Checks that the driver is new enough for the library's own CUDA runtime, which may be newer than
 * the program's runtime. */
static void check_driver(void) {
  int driver = 0, runtime = 0;
  if (cudaDriverGetVersion(&driver) == cudaSuccess &&
      cudaRuntimeGetVersion(&runtime) == cudaSuccess && driver / 1000 < runtime / 1000)
    snprintf(unusable, sizeof unusable,
             "onebit was built for CUDA %d, but the driver is for CUDA %d", runtime / 1000,
             driver / 1000);
}

/* Reads the settings. Rejects a range of bits: a plan on a device does not change its bits. */
static onebit_status_t nccl_preload_read_settings(void) {
  OB_TRY(ob_preload_read_settings());
  if (!ob_rules_have_bit_range(&ob_preload.rules))
    return ONEBIT_OK;
  return ob_error(
      ONEBIT_ERROR_ARGUMENT,
      "a range of bits (ONEBIT_BITS or rules) works only in host memory, not with NCCL");
}

static void nccl_preload_start(void) {
  OB_CALL_SCOPE;
  ob_counters_start(ob_seconds());
  check_driver();
  if (nccl_preload_read_settings() != ONEBIT_OK)
    snprintf(wrong_settings, sizeof wrong_settings, "%s", onebit_last_error());
  ob_preload_judge_exit(report_and_judge);
}

void ob_nccl_start(void) {
  pthread_once(&once, nccl_preload_start);
  atomic_store(&seen, true);
}

const char *ob_nccl_wrong_settings(void) { return wrong_settings[0] ? wrong_settings : NULL; }

const char *ob_nccl_unusable_reason(void) { return unusable[0] ? unusable : NULL; }

/* Guards the variables for the line that is printed at the start. A thread's first communicator is
 * usually that of all ranks. Rank 0 of this communicator prints the line, and so does each rank
 * whose own rules are wrong. Communicators of one rank print nothing. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool prints;
static int ranks; /* number of ranks of that communicator; 0: none was created */

static void print_start(const struct ob_nccl_comm *comm, const char *refused) {
  char over[32];
  int version = 0;
  ob_next_ncclGetVersion(&version); /* the number 22809 stands for version 2.28.9 */
  snprintf(over, sizeof over, "NCCL %d.%d.%d", version / 10000, version / 100 % 100, version % 100);
  ob_preload_refuse(refused);
  ob_report_start(comm->size, over, "ncclAllReduce of float, bfloat16 or half sums");
}

void ob_nccl_print_start(const struct ob_nccl_comm *comm, const char *refused) {
  static _Thread_local bool printed;
  bool wrong_here = refused && refused == ob_nccl_wrong_settings();
  pthread_mutex_lock(&lock);
  if (!printed) {
    prints |= comm->rank == 0;
    ranks = comm->size;
    if (wrong_here || (comm->rank == 0 && !(refused && !*refused)))
      print_start(comm, refused);
  }
  printed = true;
  pthread_mutex_unlock(&lock);
  if (!refused)
    ob_preload_open();
}

/* ---- The end ---- */

static void nccl_preload_report(const onebit_counters_t *counters) {
  struct ob_report report = {.ranks = ranks,
                             .own_only = true,
                             .calls = "on its streams",
                             .span = "from the first communicator on",
                             .own = *counters,
                             .compressed = counters->compressed,
                             .bytes_sent = counters->bytes_sent,
                             .bytes_dense = counters->bytes_dense,
                             .seconds = counters->seconds,
                             .seconds_saved = counters->seconds_saved,
                             .max_residual_ratio = ob_report_max_residual_ratio()};
  ob_report_print(&report);
}

static bool report_and_judge(void) {
  OB_CALL_SCOPE;
  onebit_counters_t counters = {.size = sizeof counters};
  if (!ranks)
    return true;
  onebit_counters_get(&counters);
  if (prints)
    nccl_preload_report(&counters);
  return counters.compressed || !ob_preload.required;
}

/* Warns of calls that bypass this library, because the program has looked up NCCL's functions with
 * dlsym. A launcher loads NCCL, too, so only a process with a rank warns, and only rank 0. */
__attribute__((destructor)) static void warn_of_unseen_calls(void) {
  const char *rank = getenv("RANK");
  rank = rank ? rank : getenv("OMPI_COMM_WORLD_RANK");
  rank = rank ? rank : getenv("PMI_RANK");
  if (rank && !strcmp(rank, "0") && !atomic_load(&seen) && is_nccl_loaded())
    ob_report_print_unseen(
        "NCCL is loaded, but libonebit-nccl.so has seen no communicator: a library that loads "
        "NCCL by dlopen (CuPy, JAX) bypasses it");
}

/* ---- Properties of a call */

enum ob_reason ob_nccl_resolve(const struct ob_nccl_call *call, struct ob_nccl_kind *kind) {
  *kind = (struct ob_nccl_kind){ONEBIT_FLOAT32, false};
  switch (call->datatype) {
  case ncclFloat32:
    break;
  case ncclBfloat16:
    kind->dtype = ONEBIT_BFLOAT16;
    break;
  case ncclFloat16:
    kind->dtype = ONEBIT_FLOAT16;
    break;
  default:
    return OB_REASON_TYPE;
  }
  if (call->operation == ONEBIT_ALLGATHER)
    return OB_REASON_NONE;
  kind->sum = call->op == ncclSum;
  return kind->sum || call->op == ncclAvg ? OB_REASON_NONE : OB_REASON_OPERATION;
}

ncclResult_t ob_nccl_run_dense(const struct ob_nccl_call *call) {
  switch (call->operation) {
  case ONEBIT_ALLREDUCE:
    return ob_next_ncclAllReduce(call->sendbuf, call->recvbuf, call->count, call->datatype,
                                 call->op, call->comm, call->stream);
  case ONEBIT_ALLGATHER:
    return ob_next_ncclAllGather(call->sendbuf, call->recvbuf, call->count, call->datatype,
                                 call->comm, call->stream);
  case ONEBIT_REDUCE_SCATTER:
    return ob_next_ncclReduceScatter(call->sendbuf, call->recvbuf, call->count, call->datatype,
                                     call->op, call->comm, call->stream);
  }
  return ncclInternalError;
}

/* Returns true while a graph is captured. NCCL requires that either all ranks capture a call or
 * none, so the answer is the same on all ranks. */
static bool is_captured(cudaStream_t stream) {
  enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    cudaGetLastError(); /* the default stream is not captured, but another one is */
    return false;
  }
  return status != cudaStreamCaptureStatusNone;
}

static struct ob_record *nccl_preload_find_record(const struct ob_nccl_call *call,
                                                  onebit_dtype_t dtype,
                                                  const struct ob_nccl_comm *comm) {
  const struct ob_record_of of = {(uint64_t)(uintptr_t)call->comm,
                                  comm->size,
                                  ob_report_operation(call->operation),
                                  dtype,
                                  0,
                                  call->count};
  struct ob_record *record = ob_counters_find(&of);
  return record ? record
                : ob_counters_make(&of, "a communicator", ob_report_dtype(dtype),
                                   call->count * ob_elements_size(dtype));
}

static enum ob_reason nccl_preload_judge(const struct ob_nccl_call *call,
                                         const struct ob_nccl_comm *comm,
                                         struct ob_nccl_kind *kind) {
  enum ob_reason reason = ob_nccl_resolve(call, kind);
  if (reason != OB_REASON_NONE)
    return reason;
  if (comm && comm->size < 2)
    return OB_REASON_ALONE;
  if (!comm || !comm->settled)
    return OB_REASON_REFUSED;
  return ob_rules_judge(&ob_preload.rules, call->operation, kind->dtype, call->count, comm->size);
}

/* Decides on a call in a captured graph. Ranks can not agree during a capture. So a call is
 * compressed only if it has a position in the loop that the ranks follow, and a plan. All ranks
 * find the same position, by the order of calls since the capture began. */
static void decide_captured(uint64_t signature, struct ob_nccl_decision *decision) {
  struct ob_nccl_comm *comm = decision->comm;
  int position = ob_loops_find(comm->loops, signature, comm->captured);
  int number = position == OB_NO_POSITION ? 0 : *ob_loops_tensor(comm->loops, position);
  decision->reason = OB_REASON_CAPTURED;
  if (number <= 0)
    return;
  decision->reason = OB_REASON_NONE;
  decision->captured = true;
  decision->position = comm->captured = position;
  decision->record = comm->tensor[number - 1]->record;
}

static struct ob_nccl_decision nccl_preload_decide(const struct ob_nccl_call *call) {
  struct ob_nccl_decision decision = {.comm = ob_nccl_comm_acquire(call->comm)};
  struct ob_nccl_comm *comm = decision.comm;
  struct ob_nccl_kind kind;
  bool look;
  decision.reason = nccl_preload_judge(call, comm, &kind);
  if (decision.reason == OB_REASON_WATCHED)
    decision.record = nccl_preload_find_record(call, kind.dtype, comm);
  if (decision.reason != OB_REASON_NONE)
    return decision;
  uint64_t signature = ob_loops_signature(call->operation, kind.dtype, kind.sum, call->count);
  if (is_captured(call->stream)) {
    decide_captured(signature, &decision);
    return decision;
  }
  comm->captured = OB_NO_POSITION;
  decision.record = nccl_preload_find_record(call, kind.dtype, comm);
  decision.position =
      ob_loops_position(comm->loops, signature, call->sendbuf, call->recvbuf, &look);
  ob_nccl_reset_residuals_of_left_loop(comm, call->stream);
  comm->look |= look;
  if (decision.position == OB_NO_POSITION)
    decision.reason = ob_loops_reason(comm->loops);
  return decision;
}

/* ---- Calls ---- */

static ncclResult_t run_now(const struct ob_nccl_call *call,
                            const struct ob_nccl_decision *decision) {
  if (decision->comm && decision->comm->failed)
    return ncclRemoteError;
  if (decision->reason == OB_REASON_NONE)
    return ob_nccl_run(call, decision);
  struct ob_nccl_timer *timer =
      decision->record ? ob_nccl_timer_begin(decision->comm, NULL, decision->record, call->stream)
                       : NULL;
  ncclResult_t result = ob_nccl_run_dense(call);
  ob_nccl_timer_end(timer, call->stream);
  return result;
}

static ncclResult_t run_in_group(const struct ob_nccl_call *call,
                                 const struct ob_nccl_decision *decision) {
  ncclResult_t result = ncclSuccess;
  if (decision->reason != OB_REASON_NONE)
    result = ob_nccl_run_dense(call);
  if (!decision->record) {
    ob_nccl_comm_release(decision->comm);
    return result;
  }
  return ob_nccl_group_add(call, decision) ? result : ncclSystemError;
}

static ncclResult_t nccl_preload_run(const struct ob_nccl_call *call) {
  OB_CALL_SCOPE;
  struct ob_nccl_decision decision = nccl_preload_decide(call);
  if (decision.reason != OB_REASON_NONE)
    ob_record_count_dense(decision.record, decision.reason, OB_NOT_TIMED);
  if (ob_nccl_in_group())
    return run_in_group(call, &decision);
  ncclResult_t result = run_now(call, &decision);
  if (decision.comm && decision.comm->look && result == ncclSuccess)
    ob_nccl_find_loop(decision.comm);
  ob_nccl_comm_release(decision.comm);
  return result;
}

OB_PRELOAD_VISIBLE ncclResult_t ncclAllReduce(const void *sendbuf, void *recvbuf, size_t count,
                                              ncclDataType_t datatype, ncclRedOp_t op,
                                              ncclComm_t comm, cudaStream_t stream) {
  if (ob_preload_is_small(ONEBIT_ALLREDUCE, count))
    return ob_next_ncclAllReduce(sendbuf, recvbuf, count, datatype, op, comm, stream);
  return nccl_preload_run(&(struct ob_nccl_call){ONEBIT_ALLREDUCE, sendbuf, recvbuf, count,
                                                 datatype, op, comm, stream});
}

OB_PRELOAD_VISIBLE ncclResult_t ncclReduceScatter(const void *sendbuf, void *recvbuf,
                                                  size_t recvcount, ncclDataType_t datatype,
                                                  ncclRedOp_t op, ncclComm_t comm,
                                                  cudaStream_t stream) {
  if (ob_preload_is_small(ONEBIT_REDUCE_SCATTER, recvcount))
    return ob_next_ncclReduceScatter(sendbuf, recvbuf, recvcount, datatype, op, comm, stream);
  return nccl_preload_run(&(struct ob_nccl_call){ONEBIT_REDUCE_SCATTER, sendbuf, recvbuf, recvcount,
                                                 datatype, op, comm, stream});
}

OB_PRELOAD_VISIBLE ncclResult_t ncclAllGather(const void *sendbuf, void *recvbuf, size_t sendcount,
                                              ncclDataType_t datatype, ncclComm_t comm,
                                              cudaStream_t stream) {
  if (ob_preload_is_small(ONEBIT_ALLGATHER, sendcount))
    return ob_next_ncclAllGather(sendbuf, recvbuf, sendcount, datatype, comm, stream);
  return nccl_preload_run(&(struct ob_nccl_call){ONEBIT_ALLGATHER, sendbuf, recvbuf, sendcount,
                                                 datatype, ncclSum, comm, stream});
}
