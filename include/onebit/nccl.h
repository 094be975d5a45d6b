/*
 * Communicators over NCCL (2.18 or newer): GPUs exchange messages without a host in between. They
 * have a header of their own; a library built without NCCL does not have them.
 */
#ifndef ONEBIT_NCCL_H
#define ONEBIT_NCCL_H

#include <nccl.h>

#include "onebit/communicator.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Makes a communicator of the ranks of an NCCL communicator. Collective over nccl_comm.
 *   nccl_comm   borrowed: it must outlive the communicator and what was made on it, and operations
 *               of the program on it must not be in flight on other streams at the same time as
 *               the library's (NCCL's own rule for one communicator on several streams)
 *   comm        out: the communicator; NULL when the call fails
 * Plans and optimizers on it must have device ONEBIT_DEVICE_CUDA, and use the device of nccl_comm.
 * An error that NCCL finds later (another rank died, a network failed) is an ONEBIT_ERROR_TRANSPORT
 * of the next call or of the call that waits.
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
