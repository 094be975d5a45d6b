/* Declares types and functions that some releases of NCCL since 2.18 lack; files include it after
 * nccl.h. */
#ifndef OB_BASE_NCCL_RELEASES_H
#define OB_BASE_NCCL_RELEASES_H

#include <nccl.h>

/* Before release 2.28 only NCCL's header for CUDA C++ declares this type, and C code lacks it. The
 * number is the same in all releases. */
#if NCCL_VERSION_CODE < 22800
#define ncclBfloat16 ((ncclDataType_t)9)
#endif

/* This function is new in 2.23. A program may call it even if this library was built with an older
 * NCCL. */
#if NCCL_VERSION_CODE < 22300
ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int nranks, int rank, int ids,
                                      ncclUniqueId *id, ncclConfig_t *config);
#endif

/* This function is new in 2.27. */
#if NCCL_VERSION_CODE < 22700
ncclResult_t ncclCommShrink(ncclComm_t comm, int *excluded, int count, ncclComm_t *newcomm,
                            ncclConfig_t *config, int flags);
#endif

/* This function is new in 2.28. */
#if NCCL_VERSION_CODE < 22800
ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags);
#endif

#endif
