/*
 * The functions of NCCL that the project uses. Ranks are threads of one process. The header
 * compiles as C99 and C++.
 */
#ifndef EMULATION_NCCL_H
#define EMULATION_NCCL_H

#include <limits.h>

#include "cuda_runtime_api.h"

#define NCCL_MAJOR                        2
#define NCCL_MINOR                        28
#define NCCL_PATCH                        9
#define NCCL_VERSION_CODE                 22809
#define NCCL_VERSION(major, minor, patch) ((major)*10000 + (minor)*100 + (patch))
#define NCCL_UNIQUE_ID_BYTES              128

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ncclComm *ncclComm_t;
#define NCCL_COMM_NULL NULL
typedef struct {
  char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
  ncclNumResults = 8
} ncclResult_t;

typedef enum {
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclInt = 2,
  ncclInt64 = 4,
  ncclFloat16 = 6,
  ncclHalf = 6,
  ncclFloat32 = 7,
  ncclFloat = 7,
  ncclBfloat16 = 9
} ncclDataType_t;

typedef enum { ncclSum = 0, ncclMax = 2, ncclAvg = 4 } ncclRedOp_t;

#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_UNDEF_PTR NULL
#define NCCL_SPLIT_NOCOLOR    -1

/* The layout of this struct is NCCL's own. Only the setting `blocking` has an effect in the
 * emulation. */
typedef struct ncclConfig_v22800 {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int blocking;
  int cgaClusterSize;
  int minCTAs;
  int maxCTAs;
  const char *netName;
  int splitShare;
  int trafficClass;
  const char *commName;
  int collnetEnable;
  int CTAPolicy;
  int shrinkShare;
  int nvlsCTAs;
  int nChannelsPerNetPeer;
  int nvlinkCentricSched;
} ncclConfig_t;

/* clang-format off */
#define NCCL_CONFIG_INITIALIZER {                                       \
  sizeof(ncclConfig_t),                             /* size */          \
  0xcafebeef,                                       /* magic */         \
  NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH), /* version */       \
  NCCL_CONFIG_UNDEF_INT,                            /* blocking */      \
  NCCL_CONFIG_UNDEF_INT,                            /* cgaClusterSize */ \
  NCCL_CONFIG_UNDEF_INT,                            /* minCTAs */       \
  NCCL_CONFIG_UNDEF_INT,                            /* maxCTAs */       \
  NCCL_CONFIG_UNDEF_PTR,                            /* netName */       \
  NCCL_CONFIG_UNDEF_INT,                            /* splitShare */    \
  NCCL_CONFIG_UNDEF_INT,                            /* trafficClass */  \
  NCCL_CONFIG_UNDEF_PTR,                            /* commName */      \
  NCCL_CONFIG_UNDEF_INT,                            /* collnetEnable */ \
  NCCL_CONFIG_UNDEF_INT,                            /* CTAPolicy */     \
  NCCL_CONFIG_UNDEF_INT,                            /* shrinkShare */   \
  NCCL_CONFIG_UNDEF_INT,                            /* nvlsCTAs */      \
  NCCL_CONFIG_UNDEF_INT,                            /* nChannelsPerNetPeer */ \
  NCCL_CONFIG_UNDEF_INT,                            /* nvlinkCentricSched */ \
}
/* clang-format on */

ncclResult_t ncclGetVersion(int *version);
const char *ncclGetErrorString(ncclResult_t result);
const char *ncclGetLastError(ncclComm_t comm);

ncclResult_t ncclGetUniqueId(ncclUniqueId *uniqueId);
/* In a group, the next three functions return ncclInProgress and set their handles at the end of
 * the group. */
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank);
/* The functions that get a configuration wait for the other ranks even if `blocking` is 0. In that
 * case they return ncclInProgress, which a program must handle, although the communicator is ready
 * and ncclCommGetAsyncError gives ncclSuccess. Without a configuration, ncclCommSplit uses the
 * parent communicator's. */
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank,
                                    ncclConfig_t *config);
/* The first element of commIds identifies the communicator; the others are ignored. */
ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int nranks, int rank, int nId,
                                      ncclUniqueId *commIds, ncclConfig_t *config);
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm,
                           ncclConfig_t *config);
/* Only the ranks that are not excluded call this function, and they wait for each other. */
#define NCCL_SHRINK_DEFAULT 0
ncclResult_t ncclCommShrink(ncclComm_t comm, int *excludeRanksList, int excludeRanksCount,
                            ncclComm_t *newcomm, ncclConfig_t *config, int shrinkFlags);
/* Ends this rank's operations. Afterwards the communicator can only be destroyed or aborted. */
ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags);
/* Creates the communicators of all ranks in one thread, without waiting for other threads. */
ncclResult_t ncclCommInitAll(ncclComm_t *comm, int ndev, const int *devlist);
/* Waits for this rank's operations, but not for the other ranks. */
ncclResult_t ncclCommFinalize(ncclComm_t comm);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError);
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count);
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device);
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank);

ncclResult_t ncclMemAlloc(void **ptr, size_t size);
ncclResult_t ncclMemFree(void *ptr);

/* Windows are only recorded. Registration is collective and waits for the other ranks. The memory
 * must come from ncclMemAlloc and have the same size on all ranks. Freeing memory that still
 * belongs to a window ends the process. */
typedef struct ncclWindow_vidmem *ncclWindow_t;
#define NCCL_WIN_DEFAULT        0x00
#define NCCL_WIN_COLL_SYMMETRIC 0x01
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win,
                                    int winFlags);
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win);

ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount,
                           ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count,
                           ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream);
ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount,
                               ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream);

ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);

/* Makes the next operation of this rank fail as if its link broke. All ranks get ncclRemoteError
 * from ncclCommGetAsyncError. */
void emulation_nccl_break(ncclComm_t comm);

/* Counts the windows of all ranks: registrations so far, and windows that are registered now.
 * EMULATED_NCCL_VERSION=21800 emulates NCCL 2.18, which has no windows. In that version a call that
 * registers a window ends the process. */
struct emulation_nccl_counters {
  long registrations, windows;
};
struct emulation_nccl_counters emulation_nccl_counts(void);

#ifdef __cplusplus
}
#endif

#endif
