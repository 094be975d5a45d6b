/*
 * Communicators over NCCL (2.18 or newer): GPUs exchange messages without a host in between. The
 * header is separate so that code without NCCL can include the others. A library built without NCCL
 * does not have this function.
 */
#ifndef ONEBIT_NCCL_H
#define ONEBIT_NCCL_H

#include <nccl.h>

#include "onebit/communicator.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Makes a communicator of the ranks of an NCCL communicator. Collective over nccl_comm.
 *   nccl_comm   borrowed: it must outlive the communicator and the objects made on it. The
 *               program's own operations on it must not be in flight on other streams at the same
 *               time as the library's (NCCL's own rule for one communicator on several streams)
 *   comm        out: the communicator; NULL when the call fails
 * Plans and optimizers on it must have device ONEBIT_DEVICE_CUDA, and use the device of nccl_comm.
 * If NCCL finds an error later (another rank died, a network failed), the next call or the call
 * that waits returns ONEBIT_ERROR_TRANSPORT.
 * Errors: ONEBIT_ERROR_ARGUMENT (a NULL handle, another device than nccl_comm's is current),
 * ONEBIT_ERROR_MEMORY, ONEBIT_ERROR_DEVICE, ONEBIT_ERROR_TRANSPORT (NCCL's own error). After
 * onebit_comm_abort (onebit/communicator.h), or an ONEBIT_ERROR_TRANSPORT of any object that was
 * made on the communicator (NCCL's error, a wait of ONEBIT_TIMEOUT), nccl_comm is aborted and no
 * longer exists. Otherwise NCCL's kernels would wait for ever, and so would every wait for the
 * device. */
onebit_status_t onebit_comm_create_nccl(ncclComm_t nccl_comm, onebit_comm_t *comm);

#ifdef __cplusplus
}
#endif
#endif
