/*
 * NCCL's own functions, which those of libonebit-nccl.so replace: ob_next_ncclX is the next ncclX
 * in the order of libraries. The library is also preloaded into processes without NCCL, and into
 * those that load theirs later (Python's modules), so it is not linked with NCCL.
 */
#ifndef OB_DROPIN_NCCL_NEXT_H
#define OB_DROPIN_NCCL_NEXT_H

#include <stdbool.h>

#include "base/nccl_releases.h"

/* X(name, parameters, arguments) for all functions that the library calls. A missing one gives
 * ncclInternalError. */
#define OB_NCCL_FUNCTIONS(X)                                                                       \
  X(CommInitRank, (ncclComm_t * comm, int nranks, ncclUniqueId id, int rank),                      \
    (comm, nranks, id, rank))                                                                      \
  X(CommInitRankConfig,                                                                            \
    (ncclComm_t * comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t *config),              \
    (comm, nranks, id, rank, config))                                                              \
  X(CommInitRankScalable,                                                                          \
    (ncclComm_t * comm, int nranks, int rank, int ids, ncclUniqueId *id, ncclConfig_t *config),    \
    (comm, nranks, rank, ids, id, config))                                                         \
  X(CommInitAll, (ncclComm_t * comms, int ndev, const int *devices), (comms, ndev, devices))       \
  X(CommSplit, (ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config),   \
    (comm, color, key, newcomm, config))                                                           \
  X(CommShrink,                                                                                    \
    (ncclComm_t comm, int *excluded, int count, ncclComm_t *newcomm, ncclConfig_t *config,         \
     int flags),                                                                                   \
    (comm, excluded, count, newcomm, config, flags))                                               \
  X(CommRevoke, (ncclComm_t comm, int flags), (comm, flags))                                       \
  X(CommFinalize, (ncclComm_t comm), (comm))                                                       \
  X(CommDestroy, (ncclComm_t comm), (comm))                                                        \
  X(CommAbort, (ncclComm_t comm), (comm))                                                          \
  X(CommGetAsyncError, (ncclComm_t comm, ncclResult_t * result), (comm, result))                   \
  X(CommCount, (const ncclComm_t comm, int *count), (comm, count))                                 \
  X(CommCuDevice, (const ncclComm_t comm, int *device), (comm, device))                            \
  X(CommUserRank, (const ncclComm_t comm, int *rank), (comm, rank))                                \
  X(GetVersion, (int *version), (version))                                                         \
  X(GroupStart, (void), ())                                                                        \
  X(GroupEnd, (void), ())                                                                          \
  X(Send,                                                                                          \
    (const void *buffer, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,         \
     cudaStream_t stream),                                                                         \
    (buffer, count, datatype, peer, comm, stream))                                                 \
  X(Recv,                                                                                          \
    (void *buffer, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,               \
     cudaStream_t stream),                                                                         \
    (buffer, count, datatype, peer, comm, stream))                                                 \
  X(AllReduce,                                                                                     \
    (const void *sendbuf, void *recvbuf, size_t count, ncclDataType_t datatype, ncclRedOp_t op,    \
     ncclComm_t comm, cudaStream_t stream),                                                        \
    (sendbuf, recvbuf, count, datatype, op, comm, stream))                                         \
  X(ReduceScatter,                                                                                 \
    (const void *sendbuf, void *recvbuf, size_t count, ncclDataType_t datatype, ncclRedOp_t op,    \
     ncclComm_t comm, cudaStream_t stream),                                                        \
    (sendbuf, recvbuf, count, datatype, op, comm, stream))                                         \
  X(AllGather,                                                                                     \
    (const void *sendbuf, void *recvbuf, size_t count, ncclDataType_t datatype, ncclComm_t comm,   \
     cudaStream_t stream),                                                                         \
    (sendbuf, recvbuf, count, datatype, comm, stream))

#define OB_NCCL_DECLARE(name, parameters, arguments) ncclResult_t ob_next_nccl##name parameters;
OB_NCCL_FUNCTIONS(OB_NCCL_DECLARE)
#undef OB_NCCL_DECLARE

/* NCCL's header declares them without saying that they have no parameters. */
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);

/* The library's ncclCommAbort (dropin/rules.mk). */
ncclResult_t ob_nccl_leave_to_program(ncclComm_t comm);

/* True if the process has NCCL, whoever has loaded it. */
bool ob_next_is_loaded(void);

/* The two functions that return text. */
const char *ob_next_ncclGetErrorString(ncclResult_t result);
const char *ob_next_ncclGetLastError(ncclComm_t comm);

#endif
