/* What the headers of NCCL 2.18 and later lack of what is used here; for whoever includes nccl.h
 * and calls more than its oldest release has. */
#ifndef OB_BASE_NCCL_RELEASES_H
#define OB_BASE_NCCL_RELEASES_H

#include <nccl.h>

/* C saw this type nowhere before 2.28: it stood behind a macro of CUDA's C++ header. In all
 * releases its number is this one. */
#if NCCL_VERSION_CODE < 22800
#define ncclBfloat16 ((ncclDataType_t)9)
#endif

/* New in 2.23; a program may know it where this was built with an older NCCL. */
#if NCCL_VERSION_CODE < 22300
ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int nranks, int rank, int ids,
                                      ncclUniqueId *id, ncclConfig_t *config);
#endif

#endif
