/*
 * Defines the functions by whose names programs call MPI's collectives in C; preload_calls.c and
 * preload_flights.c implement them. This file handles two differences between MPI libraries.
 *
 * Handles: in Open MPI they are addresses, in MPICH numbers of 32 bits. The functions here take
 * handles in an integer type that holds both, so that handles of another MPI library than that of
 * the build are passed on unchanged.
 *
 * Counts: the functions with MPI 4's large counts (names with _c) are defined even if the mpi.h of
 * the build lacks them. Counts that an int holds go to the functions without _c. Calls with larger
 * counts are compressed, or passed on to MPI's own function. If the MPI library has no such
 * function, the call returns an error: the count is never truncated.
 */
#include <limits.h>

#include "base/bound_mpi.h"
#include "base/process.h"
#include "dropin/mpi/preload.h"

typedef uintptr_t any; /* a handle of any MPI library */

/* Defines a function that programs know as `name`. mpi.h may declare it with other parameters, or
 * not at all. */
#define ENTRY(name, parameters)                                                                    \
  int ob_entry_##name parameters __asm__(#name);                                                   \
  OB_PRELOAD_VISIBLE int ob_entry_##name parameters

/* Casts a function of the MPI library (base/bound_mpi.h) to one with these parameters. */
#define WIDE(call, parameters) ((int(*) parameters)(void (*)(void))(call))

static bool fits_int(MPI_Count count) { return count >= INT_MIN && count <= INT_MAX; }

/* Returns an error for a count that no function of the MPI library takes. MPI itself rejects
 * negative counts. */
static int refuse_count(any comm) {
  if (!ob_mpi_is_foreign())
    PMPI_Comm_call_errhandler((MPI_Comm)comm, MPI_ERR_COUNT);
  return MPI_ERR_COUNT;
}

/* ---- Blocking ---- */

/* Makes a call with more elements than an int counts. */
static int run_large_call(const struct ob_mpi_call *call) {
  if (call->comm == MPI_COMM_NULL || ob_preload_is_small(call->operation, call->count))
    return ob_mpi_call_run_dense(call);
  return ob_preload_run_call(call);
}

#define REDUCTION(call, operation)                                                                 \
  ENTRY(MPI_##call,                                                                                \
        (const void *sendbuf, void *recvbuf, int count, any datatype, any op, any comm)) {         \
    if (ob_mpi_is_foreign())                                                                       \
      return WIDE(PMPI_##call, (const void *, void *, int, any, any, any))(                        \
          sendbuf, recvbuf, count, datatype, op, comm);                                            \
    return MPI_##call(sendbuf, recvbuf, count, (MPI_Datatype)datatype, (MPI_Op)op,                 \
                      (MPI_Comm)comm);                                                             \
  }                                                                                                \
  ENTRY(MPI_##call##_c,                                                                            \
        (const void *sendbuf, void *recvbuf, MPI_Count count, any datatype, any op, any comm)) {   \
    if (fits_int(count))                                                                           \
      return ob_entry_MPI_##call(sendbuf, recvbuf, (int)count, datatype, op, comm);                \
    if (!PMPI_##call##_c)                                                                          \
      return refuse_count(comm);                                                                   \
    if (ob_mpi_is_foreign() || count < 0)                                                          \
      return WIDE(PMPI_##call##_c, (const void *, void *, MPI_Count, any, any, any))(              \
          sendbuf, recvbuf, count, datatype, op, comm);                                            \
    const struct ob_mpi_call large = {operation,     (MPI_Comm)comm,         sendbuf,   recvbuf,   \
                                      (size_t)count, (MPI_Datatype)datatype, (MPI_Op)op};          \
    return run_large_call(&large);                                                                 \
  }
REDUCTION(Allreduce, ONEBIT_ALLREDUCE)
REDUCTION(Reduce_scatter_block, ONEBIT_REDUCE_SCATTER)

ENTRY(MPI_Allgather, (const void *sendbuf, int sendcount, any sendtype, void *recvbuf,
                      int recvcount, any recvtype, any comm)) {
  if (ob_mpi_is_foreign())
    return WIDE(PMPI_Allgather, (const void *, int, any, void *, int, any, any))(
        sendbuf, sendcount, sendtype, recvbuf, recvcount, recvtype, comm);
  return MPI_Allgather(sendbuf, sendcount, (MPI_Datatype)sendtype, recvbuf, recvcount,
                       (MPI_Datatype)recvtype, (MPI_Comm)comm);
}

ENTRY(MPI_Allgather_c, (const void *sendbuf, MPI_Count sendcount, any sendtype, void *recvbuf,
                        MPI_Count recvcount, any recvtype, any comm)) {
  if (fits_int(sendcount) && fits_int(recvcount))
    return ob_entry_MPI_Allgather(sendbuf, (int)sendcount, sendtype, recvbuf, (int)recvcount,
                                  recvtype, comm);
  if (!PMPI_Allgather_c)
    return refuse_count(comm);
  bool alike = sendbuf == MPI_IN_PLACE ||
               (sendcount == recvcount && (MPI_Datatype)sendtype == (MPI_Datatype)recvtype);
  if (ob_mpi_is_foreign() || recvcount < 0 || !alike)
    return WIDE(PMPI_Allgather_c, (const void *, MPI_Count, any, void *, MPI_Count, any, any))(
        sendbuf, sendcount, sendtype, recvbuf, recvcount, recvtype, comm);
  const struct ob_mpi_call large = {ONEBIT_ALLGATHER,  (MPI_Comm)comm,         sendbuf,    recvbuf,
                                    (size_t)recvcount, (MPI_Datatype)recvtype, MPI_OP_NULL};
  return run_large_call(&large);
}

/* ---- Collectives that are never compressed, and counted if they are large ---- */

#define WATCHED(call, name, count, type, comm, parameters, types, ...)                             \
  ENTRY(MPI_##call, parameters) {                                                                  \
    double start = ob_seconds();                                                                   \
    int code = WIDE(PMPI_##call, types)(__VA_ARGS__);                                              \
    if (!ob_mpi_is_foreign() && code == MPI_SUCCESS)                                               \
      ob_preload_count_uncompressed(name, count, (MPI_Datatype)type, (MPI_Comm)comm,               \
                                    ob_seconds() - start);                                         \
    return code;                                                                                   \
  }
WATCHED(Reduce, "reduce", count, type, comm,
        (const void *sendbuf, void *recvbuf, int count, any type, any op, int root, any comm),
        (const void *, void *, int, any, any, int, any), sendbuf, recvbuf, count, type, op, root,
        comm)
WATCHED(Bcast, "broadcast", count, type, comm,
        (void *buffer, int count, any type, int root, any comm), (void *, int, any, int, any),
        buffer, count, type, root, comm)
WATCHED(Reduce_scatter, "reduce-scatter", *counts, type, comm,
        (const void *sendbuf, void *recvbuf, const int *counts, any type, any op, any comm),
        (const void *, void *, const int *, any, any, any), sendbuf, recvbuf, counts, type, op,
        comm)
WATCHED(Ireduce, "nonblocking reduce", count, type, comm,
        (const void *sendbuf, void *recvbuf, int count, any type, any op, int root, any comm,
         MPI_Request *request),
        (const void *, void *, int, any, any, int, any, MPI_Request *), sendbuf, recvbuf, count,
        type, op, root, comm, request)
WATCHED(Ibcast, "nonblocking broadcast", count, type, comm,
        (void *buffer, int count, any type, int root, any comm, MPI_Request *request),
        (void *, int, any, int, any, MPI_Request *), buffer, count, type, root, comm, request)
WATCHED(Ireduce_scatter, "nonblocking reduce-scatter", *counts, type, comm,
        (const void *sendbuf, void *recvbuf, const int *counts, any type, any op, any comm,
         MPI_Request *request),
        (const void *, void *, const int *, any, any, any, MPI_Request *), sendbuf, recvbuf, counts,
        type, op, comm, request)
WATCHED(Ireduce_scatter_block, "nonblocking reduce-scatter", count, type, comm,
        (const void *sendbuf, void *recvbuf, int count, any type, any op, any comm,
         MPI_Request *request),
        (const void *, void *, int, any, any, any, MPI_Request *), sendbuf, recvbuf, count, type,
        op, comm, request)

/* ---- Nonblocking ---- */

ENTRY(MPI_Iallreduce, (const void *sendbuf, void *recvbuf, int count, any datatype, any op,
                       any comm, MPI_Request *request)) {
  if (ob_mpi_is_foreign())
    return WIDE(PMPI_Iallreduce, (const void *, void *, int, any, any, any, MPI_Request *))(
        sendbuf, recvbuf, count, datatype, op, comm, request);
  return MPI_Iallreduce(sendbuf, recvbuf, count, (MPI_Datatype)datatype, (MPI_Op)op, (MPI_Comm)comm,
                        request);
}

ENTRY(MPI_Iallreduce_c, (const void *sendbuf, void *recvbuf, MPI_Count count, any datatype, any op,
                         any comm, MPI_Request *request)) {
  if (fits_int(count))
    return ob_entry_MPI_Iallreduce(sendbuf, recvbuf, (int)count, datatype, op, comm, request);
  if (!PMPI_Iallreduce_c)
    return refuse_count(comm);
  bool small = ob_preload_is_small(ONEBIT_ALLREDUCE, (size_t)count);
  if (ob_mpi_is_foreign() || small || count < 0 || (MPI_Comm)comm == MPI_COMM_NULL || !request)
    return WIDE(PMPI_Iallreduce_c, (const void *, void *, MPI_Count, any, any, any, MPI_Request *))(
        sendbuf, recvbuf, count, datatype, op, comm, request);
  const struct ob_mpi_call large = {ONEBIT_ALLREDUCE, (MPI_Comm)comm,         sendbuf,   recvbuf,
                                    (size_t)count,    (MPI_Datatype)datatype, (MPI_Op)op};
  return ob_preload_begin_call(&large, request);
}

/* ---- Persistent: MPI 4's name, and the name of Open MPI 4's extension ---- */

#define INIT(name)                                                                                 \
  ENTRY(name, (const void *sendbuf, void *recvbuf, int count, any type, any op, any comm,          \
               any info, MPI_Request *request)) {                                                  \
    if (!P##name) /* the program was built for a newer MPI than it runs with */                    \
      return MPI_ERR_OTHER;                                                                        \
    if (!ob_mpi_is_foreign())                                                                      \
      ob_preload_count_uncompressed("persistent allreduce", count, (MPI_Datatype)type,             \
                                    (MPI_Comm)comm, OB_NOT_TIMED);                                 \
    return WIDE(P##name, (const void *, void *, int, any, any, any, any, MPI_Request *))(          \
        sendbuf, recvbuf, count, type, op, comm, info, request);                                   \
  }
INIT(MPI_Allreduce_init)
INIT(MPIX_Allreduce_init)

/*
 * ---- Fortran ----
 *
 * Open MPI's Fortran functions call PMPI, so that they bypass wrappers in C. The collectives
 * therefore have wrappers with their Fortran names too: for mpif.h and `use mpi` in the spelling of
 * every compiler, and for `use mpi_f08`. Waits and tests need none (preload_flights.c). MPICH's
 * Fortran functions call those of C.
 */
#ifdef OPEN_MPI

/* In Fortran, constants such as MPI_IN_PLACE are addresses of variables. These exist in libmpi and
 * in the program's common blocks, and the dynamic linker makes them one variable. Only one spelling
 * exists, that of this Fortran compiler, so all spellings are weak symbols. */
#define CONSTANT(lower, upper)                                                                     \
  extern int lower __attribute__((weak)), lower##_ __attribute__((weak)),                          \
      lower##__ __attribute__((weak)), upper __attribute__((weak));                                \
  static bool is_##lower(const void *from) {                                                       \
    return from && (from == &lower || from == &lower##_ || from == &lower##__ || from == &upper);  \
  }
CONSTANT(mpi_fortran_in_place, MPI_FORTRAN_IN_PLACE)
CONSTANT(mpi_fortran_bottom, MPI_FORTRAN_BOTTOM)

static void *convert_address(void *from) {
  if (is_mpi_fortran_in_place(from))
    return MPI_IN_PLACE;
  return is_mpi_fortran_bottom(from) ? MPI_BOTTOM : from;
}

/* Sets the error code. In `use mpi_f08` the argument may be absent. */
static void set_error(MPI_Fint *error, int code) {
  if (error)
    *error = (MPI_Fint)code;
}

/* Defines a subroutine under each of its names. */
#define FORTRAN(lower, upper, parameters)                                                          \
  void lower##_ parameters;                                                                        \
  OB_PRELOAD_VISIBLE void lower parameters __attribute__((alias(#lower "_")));                     \
  OB_PRELOAD_VISIBLE void lower##__ parameters __attribute__((alias(#lower "_")));                 \
  OB_PRELOAD_VISIBLE void upper parameters __attribute__((alias(#lower "_")));                     \
  OB_PRELOAD_VISIBLE void lower##_f08_ parameters __attribute__((alias(#lower "_")));              \
  OB_PRELOAD_VISIBLE void lower##_ parameters

/* Calls MPI_Init without arguments: Fortran passes none, and Open MPI finds the program's own. */
FORTRAN(mpi_init, MPI_INIT, (MPI_Fint * error)) { set_error(error, MPI_Init(NULL, NULL)); }

FORTRAN(mpi_init_thread, MPI_INIT_THREAD,
        (const MPI_Fint *required, MPI_Fint *provided, MPI_Fint *error)) {
  int level = MPI_THREAD_SINGLE;
  set_error(error, MPI_Init_thread(NULL, NULL, (int)*required, &level));
  *provided = (MPI_Fint)level;
}

FORTRAN(mpi_finalize, MPI_FINALIZE, (MPI_Fint * error)) { set_error(error, MPI_Finalize()); }

FORTRAN(mpi_allreduce, MPI_ALLREDUCE,
        (void *sendbuf, void *recvbuf, const MPI_Fint *count, const MPI_Fint *datatype,
         const MPI_Fint *op, const MPI_Fint *comm, MPI_Fint *error)) {
  set_error(error, MPI_Allreduce(convert_address(sendbuf), convert_address(recvbuf), (int)*count,
                                 PMPI_Type_f2c(*datatype), PMPI_Op_f2c(*op), PMPI_Comm_f2c(*comm)));
}

FORTRAN(mpi_reduce_scatter_block, MPI_REDUCE_SCATTER_BLOCK,
        (void *sendbuf, void *recvbuf, const MPI_Fint *count, const MPI_Fint *datatype,
         const MPI_Fint *op, const MPI_Fint *comm, MPI_Fint *error)) {
  set_error(error, MPI_Reduce_scatter_block(convert_address(sendbuf), convert_address(recvbuf),
                                            (int)*count, PMPI_Type_f2c(*datatype), PMPI_Op_f2c(*op),
                                            PMPI_Comm_f2c(*comm)));
}

FORTRAN(mpi_allgather, MPI_ALLGATHER,
        (void *sendbuf, const MPI_Fint *sendcount, const MPI_Fint *sendtype, void *recvbuf,
         const MPI_Fint *recvcount, const MPI_Fint *recvtype, const MPI_Fint *comm,
         MPI_Fint *error)) {
  set_error(error, MPI_Allgather(convert_address(sendbuf), (int)*sendcount,
                                 PMPI_Type_f2c(*sendtype), convert_address(recvbuf),
                                 (int)*recvcount, PMPI_Type_f2c(*recvtype), PMPI_Comm_f2c(*comm)));
}

FORTRAN(mpi_iallreduce, MPI_IALLREDUCE,
        (void *sendbuf, void *recvbuf, const MPI_Fint *count, const MPI_Fint *datatype,
         const MPI_Fint *op, const MPI_Fint *comm, MPI_Fint *request, MPI_Fint *error)) {
  MPI_Request handle = MPI_REQUEST_NULL;
  int code =
      MPI_Iallreduce(convert_address(sendbuf), convert_address(recvbuf), (int)*count,
                     PMPI_Type_f2c(*datatype), PMPI_Op_f2c(*op), PMPI_Comm_f2c(*comm), &handle);
  if (code == MPI_SUCCESS)
    *request = PMPI_Request_c2f(handle);
  set_error(error, code);
}
#endif
