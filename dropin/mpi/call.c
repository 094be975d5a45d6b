/* Maps the types and operations of MPI's calls to those of the library, and makes dense calls. */
#include <limits.h>
#include <stdatomic.h>
#include <string.h>

#include "base/call_scope.h"
#include "base/lock.h"
#include "dropin/elements.h"
#include "dropin/mpi/exchange.h"

/* ---- The library's own handles ---- */

struct handles {
  MPI_Datatype bfloat16, float16;
  MPI_Op sum, average;
};

/* Functions read the handles without a lock: either all handles are set, or none is. */
static const struct handles none; /* all bytes are zero, which is no valid handle */
static struct handles made;
static _Atomic(const struct handles *) known = &none;
static pthread_mutex_t handles_lock = PTHREAD_MUTEX_INITIALIZER;
static bool ended;

static const struct handles *get_handles(void) {
  return atomic_load_explicit(&known, memory_order_acquire);
}

static onebit_dtype_t get_own_dtype(MPI_Datatype type) {
  return type == get_handles()->bfloat16  ? ONEBIT_BFLOAT16
         : type == get_handles()->float16 ? ONEBIT_FLOAT16
                                          : ONEBIT_FLOAT32;
}

/* Adds elements, as an MPI_User_function. */
static void add_elements(void *from, void *to, int *count, MPI_Datatype *type) {
  OB_CALL_SCOPE;
  ob_elements_add(get_own_dtype(*type), to, from, (size_t)*count);
}

/* Sets the result to not-a-number (all bits are set), as an MPI_User_function. MPI's own reductions
 * can not compute a mean with this operation, since a mean does not follow from partial means. So
 * they must not return anything that looks like a result. */
static void set_nan(void *from, void *to, int *count, MPI_Datatype *type) {
  MPI_Aint low, extent;
  (void)from;
  if (PMPI_Type_get_extent(*type, &low, &extent) == MPI_SUCCESS)
    memset(to, 0xff, (size_t)*count * (size_t)extent);
}

static MPI_Datatype make_type(const char *name) {
  MPI_Datatype type;
  if (PMPI_Type_contiguous((int)sizeof(uint16_t), MPI_BYTE, &type) != MPI_SUCCESS)
    return MPI_DATATYPE_NULL;
  PMPI_Type_set_name(type, name);
  if (PMPI_Type_commit(&type) != MPI_SUCCESS)
    return MPI_DATATYPE_NULL;
  return type;
}

static MPI_Op make_op(MPI_User_function *function) {
  MPI_Op op;
  return PMPI_Op_create(function, 1, &op) == MPI_SUCCESS ? op : MPI_OP_NULL;
}

bool ob_mpi_is_running(void) {
  int initialized = 0, finalized = 1;
  if (ob_mpi_bind() != ONEBIT_OK)
    return false;
  PMPI_Initialized(&initialized);
  PMPI_Finalized(&finalized);
  return initialized && !finalized;
}

static const struct handles *make_handles(void) {
  if (get_handles() == &none && ob_mpi_is_running()) {
    pthread_mutex_lock(&handles_lock);
    if (get_handles() == &none && !ended) {
      made = (struct handles){make_type("ONEBIT_BFLOAT16_TYPE"), make_type("ONEBIT_FLOAT16_TYPE"),
                              make_op(add_elements), make_op(set_nan)};
      atomic_store_explicit(&known, &made, memory_order_release);
    }
    pthread_mutex_unlock(&handles_lock);
  }
  return get_handles();
}

static void free_type(MPI_Datatype *type) {
  if (*type != MPI_DATATYPE_NULL)
    PMPI_Type_free(type);
}

static void free_op(MPI_Op *op) {
  if (*op != MPI_OP_NULL)
    PMPI_Op_free(op);
}

void ob_mpi_handles_free(void) {
  OB_LOCKED(&handles_lock);
  ended = true;
  if (atomic_exchange(&known, &none) == &made) {
    free_type(&made.bfloat16);
    free_type(&made.float16);
    free_op(&made.sum);
    free_op(&made.average);
  }
}

MPI_Datatype ob_mpi_type(onebit_dtype_t dtype) {
  const struct handles *own = make_handles();
  return dtype == ONEBIT_FLOAT32    ? MPI_FLOAT
         : own == &none             ? MPI_DATATYPE_NULL
         : dtype == ONEBIT_BFLOAT16 ? own->bfloat16
                                    : own->float16;
}

MPI_Op ob_mpi_average(void) {
  const struct handles *own = make_handles();
  return own == &none ? MPI_OP_NULL : own->average;
}

/* ---- Properties of a call */

/* Returns true if the type is this MPI library's half-precision type. MPI has no standard name for
 * one. */
static bool is_mpi_half(MPI_Datatype type) {
#if defined(OPEN_MPI)
  return ob_mpi()->ompi_mpi_short_float && type == (MPI_Datatype)ob_mpi()->ompi_mpi_short_float;
#elif defined(MPIX_C_FLOAT16)
  return type == MPIX_C_FLOAT16;
#else
  (void)type;
  return false;
#endif
}

/* Returns true for C's float, and for Fortran's REAL if it has 4 bytes, which depends on the
 * compiler's flags when MPI was built. */
static bool is_float(MPI_Datatype type) {
  int bytes = 0;
  if (type == MPI_FLOAT || type == MPI_REAL4)
    return true;
  return type == MPI_REAL && PMPI_Type_size(type, &bytes) == MPI_SUCCESS && bytes == 4;
}

static bool is_double(MPI_Datatype type) {
  int bytes = 0;
  return type == MPI_DOUBLE || type == MPI_REAL8 ||
         (type == MPI_DOUBLE_PRECISION && PMPI_Type_size(type, &bytes) == MPI_SUCCESS &&
          bytes == 8);
}

static bool is_own_type(MPI_Datatype type) {
  const struct handles *own = get_handles();
  return own != &none && type != MPI_DATATYPE_NULL &&
         (type == own->bfloat16 || type == own->float16);
}

static bool find_dtype(MPI_Datatype type, onebit_dtype_t *dtype) {
  if (type == MPI_DATATYPE_NULL)
    return false;
  if (is_float(type))
    *dtype = ONEBIT_FLOAT32;
  else if (is_double(type))
    *dtype = OB_DOUBLE;
  else if (is_mpi_half(type))
    *dtype = ONEBIT_FLOAT16;
  else if (is_own_type(type))
    *dtype = get_own_dtype(type);
  else
    return false;
  return true;
}

static bool is_average(MPI_Op op) {
  return get_handles() != &none && op != MPI_OP_NULL && op == get_handles()->average;
}

enum ob_reason ob_mpi_call_resolve(const struct ob_mpi_call *call, onebit_dtype_t *dtype,
                                   bool *sum) {
  *sum = false;
  *dtype = OB_OTHER_TYPE;
  if (!find_dtype(call->datatype, dtype) ||
      (*dtype == OB_DOUBLE && call->operation != ONEBIT_ALLREDUCE))
    return OB_REASON_TYPE;
  if (call->operation != ONEBIT_ALLGATHER) {
    *sum = call->op == MPI_SUM;
    if (!*sum && !is_average(call->op))
      return OB_REASON_OPERATION;
  }
  return call->count ? OB_REASON_NONE : OB_REASON_SMALL;
}

/* ---- Dense calls ---- */

/* Returns the MPI_Op of the dense call. For a mean it is a sum, which ob_mpi_call_end divides. The
 * library has its own sum for the types that it defines, since MPI can not add them. */
static MPI_Op dense_op(const struct ob_mpi_call *call) {
  bool adds = call->op == MPI_SUM || is_average(call->op);
  return !adds ? call->op : is_own_type(call->datatype) ? get_handles()->sum : MPI_SUM;
}

int ob_mpi_call_end(const struct ob_mpi_call *call, int size) {
  OB_CALL_SCOPE;
  onebit_dtype_t dtype;
  if (call->operation == ONEBIT_ALLGATHER || !is_average(call->op) || size == 1)
    return MPI_SUCCESS;
  if (!find_dtype(call->datatype, &dtype))
    return MPI_ERR_TYPE;
  ob_elements_divide(dtype, call->recvbuf, call->count, (float)size);
  return MPI_SUCCESS;
}

/* Makes the call with MPI's own function. The call is blocking if `request` is NULL. */
static int call_mpi(const struct ob_mpi_call *call, MPI_Request *request) {
  const void *send = call->sendbuf;
  void *receive = call->recvbuf;
  const int n = (int)call->count;
  const MPI_Datatype type = call->datatype;
  const MPI_Op op = dense_op(call);
  switch (call->operation) {
  case ONEBIT_ALLREDUCE:
    return request ? PMPI_Iallreduce(send, receive, n, type, op, call->comm, request)
                   : PMPI_Allreduce(send, receive, n, type, op, call->comm);
  case ONEBIT_ALLGATHER:
    return request ? PMPI_Iallgather(send, n, type, receive, n, type, call->comm, request)
                   : PMPI_Allgather(send, n, type, receive, n, type, call->comm);
  case ONEBIT_REDUCE_SCATTER:
    return request ? PMPI_Ireduce_scatter_block(send, receive, n, type, op, call->comm, request)
                   : PMPI_Reduce_scatter_block(send, receive, n, type, op, call->comm);
  }
  return MPI_ERR_INTERN;
}

/* Runs a call with more elements than an int counts, by MPI 4's functions. */
static int run_large(const struct ob_mpi_call *call) {
  const MPI_Count count = (MPI_Count)call->count;
  if (call->operation == ONEBIT_ALLREDUCE && PMPI_Allreduce_c)
    return PMPI_Allreduce_c(call->sendbuf, call->recvbuf, count, call->datatype, dense_op(call),
                            call->comm);
  if (call->operation == ONEBIT_ALLGATHER && PMPI_Allgather_c)
    return PMPI_Allgather_c(call->sendbuf, count, call->datatype, call->recvbuf, count,
                            call->datatype, call->comm);
  if (call->operation == ONEBIT_REDUCE_SCATTER && PMPI_Reduce_scatter_block_c)
    return PMPI_Reduce_scatter_block_c(call->sendbuf, call->recvbuf, count, call->datatype,
                                       dense_op(call), call->comm);
  return MPI_ERR_COUNT;
}

static int begin_large(const struct ob_mpi_call *call, MPI_Request *request) {
  const MPI_Count count = (MPI_Count)call->count;
  if (call->operation == ONEBIT_ALLREDUCE && PMPI_Iallreduce_c)
    return PMPI_Iallreduce_c(call->sendbuf, call->recvbuf, count, call->datatype, dense_op(call),
                             call->comm, request);
  if (call->operation == ONEBIT_ALLGATHER && PMPI_Iallgather_c)
    return PMPI_Iallgather_c(call->sendbuf, count, call->datatype, call->recvbuf, count,
                             call->datatype, call->comm, request);
  if (call->operation == ONEBIT_REDUCE_SCATTER && PMPI_Ireduce_scatter_block_c)
    return PMPI_Ireduce_scatter_block_c(call->sendbuf, call->recvbuf, count, call->datatype,
                                        dense_op(call), call->comm, request);
  return MPI_ERR_COUNT;
}

int ob_mpi_call_run_dense(const struct ob_mpi_call *call) {
  int size = 1, code = call->count > INT_MAX ? run_large(call) : call_mpi(call, NULL);
  if (code == MPI_SUCCESS)
    code = PMPI_Comm_size(call->comm, &size);
  return code == MPI_SUCCESS ? ob_mpi_call_end(call, size) : code;
}

int ob_mpi_call_begin(const struct ob_mpi_call *call, MPI_Request *request) {
  return call->count > INT_MAX ? begin_large(call, request) : call_mpi(call, request);
}
