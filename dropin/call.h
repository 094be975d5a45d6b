/*
 * An MPI collective as a program called it, in the library's terms. What MPI has and onebit does
 * not (other types, operations, layouts) is found here, and nowhere else.
 */
#ifndef OB_DROPIN_CALL_H
#define OB_DROPIN_CALL_H

#include <mpi.h>
#include <stdbool.h>
#include <stdint.h>

#include "onebit/onebit.h"

struct ob_mpi_call {
  onebit_operation_t operation;
  MPI_Comm comm;
  const void *sendbuf; /* as the program gave it: may be MPI_IN_PLACE */
  void *recvbuf;
  size_t count; /* with the meaning that the operation gives it: onebit_operation_t */
  MPI_Datatype datatype;
  MPI_Op op; /* MPI_OP_NULL for an allgather */
};

/* Why a call can not be compressed, or is not. Reports count by it. */
enum ob_reason {
  OB_REASON_NONE = 0,  /* it can be */
  OB_REASON_TYPE,      /* not float, bfloat16, half */
  OB_REASON_OPERATION, /* neither a sum nor a mean */
  OB_REASON_SMALL,     /* below the least number of bytes */
  OB_REASON_ALONE,     /* one rank, or an inter-communicator */
  OB_REASON_RULE,      /* a rule says so, or none asks for it (allgathers) */
  OB_REASON_LEARNING,  /* not yet seen often enough, with these buffers */
  OB_REASON_UNSTABLE,  /* buffers or the order of calls change from step to step */
  /* compressed, but a rank had other buffers or no finite values: sent again dense */
  OB_REASON_WITHDRAWN,
  OB_REASON_MEMORY,  /* a plan could not be made, on some rank */
  OB_REASON_REFUSED, /* ranks differ in rules or version, or threads forbid it */
  OB_REASON_COUNT
};
const char *ob_reason_words(enum ob_reason reason);

/* The type and operation in the library's terms, by which all ranks judge alike: buffers do not
 * matter. */
enum ob_reason ob_mpi_call_resolve(const struct ob_mpi_call *call, onebit_dtype_t *dtype,
                                   bool *sum);

/* The call as it is, by the MPI library: PMPI_Allreduce, PMPI_Allgather, PMPI_Reduce_scatter_block;
 * of types that only onebit knows (ONEBIT_Type_bfloat16) a dense sum of its own. An MPI error code.
 */
int ob_mpi_call_dense(const struct ob_mpi_call *call);

/* The same in parts: the request is MPI's; after it the result may want a division by the
 * communicator's size, which ob_mpi_call_end does. */
int ob_mpi_call_begin(const struct ob_mpi_call *call, MPI_Request *request);
int ob_mpi_call_end(const struct ob_mpi_call *call, int size);

/* Elements that a rank gets: count, of an allgather those of `size` ranks. */
size_t ob_mpi_call_received(const struct ob_mpi_call *call, int size);

/* Equal for calls with the same operation, count, type and kind of result, whatever the ranks' own
 * handles are; of calls that ob_mpi_call_resolve accepts. */
uint64_t ob_mpi_call_signature(const struct ob_mpi_call *call, onebit_dtype_t dtype, bool sum);

/* The library's handles, made on first use and freed by MPI_Finalize; MPI_DATATYPE_NULL and
 * MPI_OP_NULL when MPI does not make them. Before MPI is initialised, and after its end: the same.
 * Thread-safe. */
MPI_Datatype ob_mpi_type(onebit_dtype_t dtype);
MPI_Op ob_mpi_average(void);

/* Frees them: by what MPI_Finalize calls. */
void ob_mpi_handles_free(void);

#endif
