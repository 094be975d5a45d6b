/*
 * An MPI collective as a program called it, in the library's terms. Only this module handles what
 * MPI has and onebit does not (other types, operations, layouts).
 */
#ifndef OB_DROPIN_MPI_CALL_H
#define OB_DROPIN_MPI_CALL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/bound_mpi.h"
#include "dropin/counters.h"
#include "onebit/onebit.h"

/* Returns the code of an MPI call, or of one that gives such codes, unless it is MPI_SUCCESS. */
#define OB_TRY_MPI(call)                                                                           \
  do {                                                                                             \
    const int ob_try_code = (call);                                                                \
    if (ob_try_code != MPI_SUCCESS)                                                                \
      return ob_try_code;                                                                          \
  } while (0)

struct ob_mpi_call {
  onebit_operation_t operation;
  MPI_Comm comm;
  const void *sendbuf; /* as the program gave it: may be MPI_IN_PLACE */
  void *recvbuf;
  size_t count; /* with the meaning that the operation gives it: onebit_operation_t */
  MPI_Datatype datatype;
  MPI_Op op; /* MPI_OP_NULL for an allgather */
};

/* Finds the type and operation in the library's terms, by which all ranks judge alike: buffers do
 * not matter. Doubles have sums only; OB_OTHER_TYPE where the type is none of the library's. */
enum ob_reason ob_mpi_call_resolve(const struct ob_mpi_call *call, onebit_dtype_t *dtype,
                                   bool *sum);

/* Makes the call with the MPI library: PMPI_Allreduce, PMPI_Allgather, PMPI_Reduce_scatter_block;
 * types that only onebit knows (ONEBIT_Type_bfloat16) have a dense sum of their own. Returns an MPI
 * error code. */
int ob_mpi_call_dense(const struct ob_mpi_call *call);

/* The same in parts: the request is MPI's; after it the result may want a division by the
 * communicator's size, which ob_mpi_call_end does. */
int ob_mpi_call_begin(const struct ob_mpi_call *call, MPI_Request *request);
int ob_mpi_call_end(const struct ob_mpi_call *call, int size);

/* The library's handles, made on first use and freed by MPI_Finalize; MPI_DATATYPE_NULL and
 * MPI_OP_NULL when MPI does not make them, and before MPI is initialised or after its end.
 * Thread-safe. */
MPI_Datatype ob_mpi_type(onebit_dtype_t dtype);
MPI_Op ob_mpi_average(void);

/* True if MPI is initialised and not yet finalised. */
bool ob_mpi_is_running(void);

/* Frees the handles: MPI_Finalize calls it. */
void ob_mpi_handles_free(void);

#endif
