/*
 * Compressed collectives with the same arguments as MPI's. A program that sums gradients with
 * MPI_Allreduce calls ONEBIT_Allreduce instead, which sends 8 bits per element: with 8 bits every
 * optimizer trains as with dense sums. The environment variable ONEBIT_BITS, equal on all ranks,
 * sets fewer bits. One bit is for momenta; with gradients in fewer than 8 bits a program's own Adam
 * trains worse, and SGD tolerates only lower learning rates (docs/preload.md). The program creates
 * and destroys nothing: the plan of a tensor (onebit/plan.h) belongs to the communicator, is
 * created by the first call, and ends with MPI_Comm_free or MPI_Finalize.
 *
 * Tensors. The residual belongs to a tensor, which each rank identifies by its two buffers, count,
 * type and operation: every tensor needs a pair of buffers of its own. Until a program's calls on a
 * communicator repeat, each call begins with a message of 32 bytes in which the ranks agree on its
 * tensor; if a rank passes other buffers than before, all ranks make that call uncompressed, as MPI
 * does. Once the ranks have seen the same calls twice in the same order (a loop of fewer than 4096
 * calls), the position in the loop identifies the tensor, without a message and whatever the
 * buffers are; if a rank's buffers change after eight equal calls, its residual is dropped.
 * ONEBIT_Forget announces that a buffer will be used for another tensor. Once 128 buffers, or
 * buffers of 2^28 elements in all, were used only once, calls with further new buffers are made
 * uncompressed.
 *
 * Results. A sum is onebit's mean times the number of ranks, and ONEBIT_AVG is the mean itself; all
 * ranks get the same bits. The result of one call is not exact, but the sum of the results of many
 * calls on a tensor is, to within one call's rounding (onebit_plan_export_residual). These calls
 * are not compressed and have MPI's result: calls with values that are not finite, on communicators
 * of one rank, or with tensors for which there is not enough memory.
 *
 * Buffers are in host memory. Arguments have the same meaning as in MPI, MPI_IN_PLACE too, and
 * ranks give the same count, type and operation. A call that can never be compressed is an error,
 * not a dense call: a call with other types than those below, other operations than MPI_SUM and
 * ONEBIT_AVG, or an inter-communicator.
 *
 * Errors. The results are MPI's error codes; an error is reported through the communicator's error
 * handler (which by default ends the program) and onebit_last_error() has a message for it. All
 * calls: MPI_ERR_COMM (MPI_COMM_NULL, an inter-communicator), MPI_ERR_COUNT (negative, or found to
 * differ between ranks), MPI_ERR_TYPE, MPI_ERR_OP, MPI_ERR_BUFFER (NULL, with a count that is not
 * 0), MPI_ERR_NO_MEM, MPI_ERR_INTERN (a damaged message, a failed transport), and MPI_ERR_OTHER
 * (MPI is not initialised, or already finalised, or is not the kind of MPI library that onebit was
 * built for, in which cases no handler is called; or onebit_comm_create_mpi or onebit_plan_create
 * failed with another error than lack of memory). An argument that is wrong on one rank alone
 * leaves the others waiting, as in MPI.
 *
 * Threads: the rules are those of MPI's collectives. With MPI_THREAD_MULTIPLE different
 * communicators may be used from different threads at once, and a request may be waited for while
 * another thread makes calls.
 *
 * The header is separate. A library built with MPI=0 does not have these functions.
 */
#ifndef ONEBIT_MPI_CALLS_H
#define ONEBIT_MPI_CALLS_H

#include <mpi.h>

#include "onebit/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The element types are MPI_FLOAT, Fortran's MPI_REAL and MPI_REAL4 if they have four bytes, MPI's
 * own half type if it has one (MPIX_C_FLOAT16), and these two types of two bytes. These two are
 * committed, and work in other calls of MPI, but not with MPI's own operations. They are
 * MPI_DATATYPE_NULL if MPI cannot make them, or is not initialised. Local; owned by the library,
 * which frees them in MPI_Finalize.
 * Thread-safe.
 * A sum beyond the largest float16 is infinity, compressed or not, because a program with a loss
 * scale checks for infinity. A compressed mean beyond it is +-65504; an uncompressed mean is the
 * sum, divided by the number of ranks. */
MPI_Datatype ONEBIT_Type_bfloat16(void);
MPI_Datatype ONEBIT_Type_float16(void);
#define ONEBIT_BFLOAT16_TYPE ONEBIT_Type_bfloat16()
#define ONEBIT_FLOAT16_TYPE  ONEBIT_Type_float16()

/* The operation that computes the mean over the ranks. It is only for the calls below: in MPI's own
 * calls it sets every bit of the result, which is then not-a-number. It is MPI_OP_NULL if MPI
 * cannot make it. Local; owned by the library, which frees it in MPI_Finalize. Thread-safe. */
MPI_Op ONEBIT_Op_average(void);
#define ONEBIT_AVG ONEBIT_Op_average()

/* MPI_Allreduce, compressed. Collective.
 *   sendbuf    count elements, or MPI_IN_PLACE: they are in recvbuf
 *   recvbuf    out: count elements
 *   op         MPI_SUM or ONEBIT_AVG
 * Errors: those of all calls, above. */
int ONEBIT_Allreduce(const void *sendbuf, void *recvbuf, int count, MPI_Datatype datatype,
                     MPI_Op op, MPI_Comm comm);

/* MPI_Allgather, compressed: the sum of each rank's elements and its residual is sent with as many
 * bits per element as in an allreduce. Collective.
 *   sendbuf    sendcount elements, or MPI_IN_PLACE: the elements are in this rank's place in
 *              recvbuf, and sendcount and sendtype are ignored
 *   recvbuf    out: recvcount elements of each rank, in rank order
 *   recvcount, recvtype   those of the send buffer
 * Errors: those of all calls, above. */
int ONEBIT_Allgather(const void *sendbuf, int sendcount, MPI_Datatype sendtype, void *recvbuf,
                     int recvcount, MPI_Datatype recvtype, MPI_Comm comm);

/* MPI_Reduce_scatter_block, compressed. Collective.
 *   sendbuf     recvcount elements for each rank, in rank order, or MPI_IN_PLACE: they are in
 *               recvbuf, whose first recvcount elements become the result
 *   recvbuf     out: recvcount elements, this rank's part of the sum
 *   op          MPI_SUM or ONEBIT_AVG
 * Errors: those of all calls, above. */
int ONEBIT_Reduce_scatter_block(const void *sendbuf, void *recvbuf, int recvcount,
                                MPI_Datatype datatype, MPI_Op op, MPI_Comm comm);

/* Forgets the tensors in this buffer: sets this rank's residuals of these tensors to zero, as
 * before the first call. Every rank must call it, between two calls, before a buffer is used for
 * another tensor with the same count, type and operation. Local.
 *   buffer   as given to earlier calls, for sending or receiving; a buffer that was never given is
 *            fine
 * Errors: MPI_ERR_COMM, MPI_ERR_BUFFER (NULL), MPI_ERR_REQUEST (a call on the buffer is in flight:
 * the residual is unchanged). */
int ONEBIT_Forget(const void *buffer, MPI_Comm comm);

/* A call in flight, or a persistent one. It is not an MPI_Request: MPI progresses only its own
 * operations, and cannot wait for another library's without a thread. (Programs that run under the
 * preload library call MPI_Iallreduce, and get an MPI_Request.) */
typedef struct onebit_mpi_request *ONEBIT_Request;
#define ONEBIT_REQUEST_NULL ((ONEBIT_Request)0)

/* MPI_Iallreduce, compressed. Collective. Until the ranks have found that their calls repeat, it
 * waits for the other ranks to make the same call; from then on it returns at once.
 *   request   out: the call in flight; ONEBIT_REQUEST_NULL when the call fails
 * The caller must not use the buffers until the request is done. Calls in flight progress only
 * during calls of this library: a rank that waits in MPI's own calls for something that another
 * rank does after ONEBIT_Wait may wait for ever. Calls complete in the order in which they began,
 * whichever request a rank waits for.
 * Errors: those of all calls, above; MPI_ERR_REQUEST (request is NULL). Errors of the exchange are
 * returned by ONEBIT_Test or ONEBIT_Wait. */
int ONEBIT_Iallreduce(const void *sendbuf, void *recvbuf, int count, MPI_Datatype datatype,
                      MPI_Op op, MPI_Comm comm, ONEBIT_Request *request);

/* MPI-4's MPI_Allreduce_init: makes a persistent request. Each ONEBIT_Start of it begins the same
 * call, as ONEBIT_Iallreduce does. Local; ONEBIT_Start is collective, in the same order on all
 * ranks.
 *   info      ignored
 *   request   out: inactive
 * Errors: those of all calls, above; MPI_ERR_REQUEST (request is NULL). */
int ONEBIT_Allreduce_init(const void *sendbuf, void *recvbuf, int count, MPI_Datatype datatype,
                          MPI_Op op, MPI_Comm comm, MPI_Info info, ONEBIT_Request *request);

/* Begins the call of a persistent request. Collective.
 *   request   inactive; active until it is waited for
 * Errors: those of all calls, above; MPI_ERR_REQUEST (NULL, no request, not persistent, active). */
int ONEBIT_Start(ONEBIT_Request *request);

/* ONEBIT_Wait waits for a request, ONEBIT_Test tests whether it is done. When a persistent request
 * is done, it becomes inactive; any other request becomes ONEBIT_REQUEST_NULL. Local.
 *   request   ONEBIT_REQUEST_NULL and inactive ones are done
 *   flag      out: 1 when it is done, 0 when not
 *   status    out: empty, as MPI's status of a collective; or MPI_STATUS_IGNORE
 * Errors: those of the exchange (all calls, above; if the communicator was freed, they are reported
 * on MPI_COMM_WORLD), MPI_ERR_REQUEST (request is NULL, or a copy of a request that no longer
 * exists), MPI_ERR_ARG (flag is NULL). */
int ONEBIT_Wait(ONEBIT_Request *request, MPI_Status *status);
int ONEBIT_Test(ONEBIT_Request *request, int *flag, MPI_Status *status);

/* Waits for several requests. Local.
 *   requests   count of them
 *   statuses   out: count of them, or MPI_STATUSES_IGNORE
 * Errors: MPI_ERR_IN_STATUS (one or more requests failed: each error is in statuses[i].MPI_ERROR,
 * and the other requests are done too), MPI_ERR_COUNT (negative), MPI_ERR_REQUEST (requests is
 * NULL). */
int ONEBIT_Waitall(int count, ONEBIT_Request *requests, MPI_Status *statuses);

/* Frees an inactive persistent request. Local.
 *   request   becomes ONEBIT_REQUEST_NULL; ONEBIT_REQUEST_NULL is an error, as in MPI
 * Errors: MPI_ERR_REQUEST (NULL, no request, active: nothing is changed). */
int ONEBIT_Request_free(ONEBIT_Request *request);

#ifdef __cplusplus
}
#endif
#endif
