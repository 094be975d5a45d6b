/*
 * Open MPI's Fortran calls go on to PMPI, past wrappers in C: so the collectives have wrappers of
 * their names in Fortran too, for mpif.h and `use mpi` as every compiler spells them, and for `use
 * mpi_f08`. Waits and tests need none (preload_flights.h). MPICH's Fortran calls C's names.
 */
#include "base/bound_mpi.h"

#ifdef OPEN_MPI
#include "dropin/mpi/preload.h"

/* Fortran's constants are addresses, of variables in libmpi and of common blocks in the program,
 * which the dynamic linker makes one. Spellings that are not this Fortran's do not exist. */
#define CONSTANT(lower, upper)                                                                     \
  extern int lower __attribute__((weak)), lower##_ __attribute__((weak)),                          \
      lower##__ __attribute__((weak)), upper __attribute__((weak));                                \
  static bool is_##lower(const void *from) {                                                       \
    return from && (from == &lower || from == &lower##_ || from == &lower##__ || from == &upper);  \
  }
CONSTANT(mpi_fortran_in_place, MPI_FORTRAN_IN_PLACE)
CONSTANT(mpi_fortran_bottom, MPI_FORTRAN_BOTTOM)

static void *address(void *from) {
  if (is_mpi_fortran_in_place(from))
    return MPI_IN_PLACE;
  return is_mpi_fortran_bottom(from) ? MPI_BOTTOM : from;
}

/* Sets the error code, which is absent in `use mpi_f08` where the program leaves it out. */
static void set_error(MPI_Fint *error, int code) {
  if (error)
    *error = (MPI_Fint)code;
}

/* Defines a subroutine under all of its names. */
#define FORTRAN(lower, upper, parameters)                                                          \
  void lower##_ parameters;                                                                        \
  OB_PRELOAD_VISIBLE void lower parameters __attribute__((alias(#lower "_")));                     \
  OB_PRELOAD_VISIBLE void lower##__ parameters __attribute__((alias(#lower "_")));                 \
  OB_PRELOAD_VISIBLE void upper parameters __attribute__((alias(#lower "_")));                     \
  OB_PRELOAD_VISIBLE void lower##_f08_ parameters __attribute__((alias(#lower "_")));              \
  OB_PRELOAD_VISIBLE void lower##_ parameters

/* Calls MPI_Init without arguments, which Open MPI has, not Fortran. */
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
  set_error(error, MPI_Allreduce(address(sendbuf), address(recvbuf), (int)*count,
                                 PMPI_Type_f2c(*datatype), PMPI_Op_f2c(*op), PMPI_Comm_f2c(*comm)));
}

FORTRAN(mpi_reduce_scatter_block, MPI_REDUCE_SCATTER_BLOCK,
        (void *sendbuf, void *recvbuf, const MPI_Fint *count, const MPI_Fint *datatype,
         const MPI_Fint *op, const MPI_Fint *comm, MPI_Fint *error)) {
  set_error(error, MPI_Reduce_scatter_block(address(sendbuf), address(recvbuf), (int)*count,
                                            PMPI_Type_f2c(*datatype), PMPI_Op_f2c(*op),
                                            PMPI_Comm_f2c(*comm)));
}

FORTRAN(mpi_allgather, MPI_ALLGATHER,
        (void *sendbuf, const MPI_Fint *sendcount, const MPI_Fint *sendtype, void *recvbuf,
         const MPI_Fint *recvcount, const MPI_Fint *recvtype, const MPI_Fint *comm,
         MPI_Fint *error)) {
  set_error(error, MPI_Allgather(address(sendbuf), (int)*sendcount, PMPI_Type_f2c(*sendtype),
                                 address(recvbuf), (int)*recvcount, PMPI_Type_f2c(*recvtype),
                                 PMPI_Comm_f2c(*comm)));
}

FORTRAN(mpi_iallreduce, MPI_IALLREDUCE,
        (void *sendbuf, void *recvbuf, const MPI_Fint *count, const MPI_Fint *datatype,
         const MPI_Fint *op, const MPI_Fint *comm, MPI_Fint *request, MPI_Fint *error)) {
  MPI_Request handle = MPI_REQUEST_NULL;
  int code =
      MPI_Iallreduce(address(sendbuf), address(recvbuf), (int)*count, PMPI_Type_f2c(*datatype),
                     PMPI_Op_f2c(*op), PMPI_Comm_f2c(*comm), &handle);
  if (code == MPI_SUCCESS)
    *request = PMPI_Request_c2f(handle);
  set_error(error, code);
}
#endif
