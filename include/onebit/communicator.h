/*
 * Communicators: who takes part, and how bytes move between them.
 *
 * A communicator is one rank's handle on a group of ranks. Five kinds exist: `self` (one rank),
 * `loopback` (the ranks are threads of one process; for tests, and for trying things out without
 * MPI), MPI (onebit/mpi.h), between GPUs NCCL (onebit/nccl.h), and `custom`, over functions of the
 * caller's (onebit/custom.h). Plans and optimizers may outlive the handle they were made on.
 *
 * Threads: different communicators may be used from different threads at once; plans of one
 * communicator too, when the communicator is not MPI or when MPI was initialised with
 * MPI_THREAD_MULTIPLE. Creation calls on one communicator are collective and must be made in the
 * same order on all of its ranks.
 *
 * Nonblocking calls move on whenever the library is called (onebit_progress). With
 * ONEBIT_PROGRESS=thread in the environment a thread of the library's own moves them, which wants a
 * core to spare; over MPI it needs MPI_THREAD_MULTIPLE, or creating a communicator fails with
 * ONEBIT_ERROR_UNSUPPORTED. Any other value of it than `calls` and `thread` is an
 * ONEBIT_ERROR_ARGUMENT.
 */
#ifndef ONEBIT_COMMUNICATOR_H
#define ONEBIT_COMMUNICATOR_H

#include <stddef.h>
#include <stdint.h>

#include "onebit/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct onebit_comm *onebit_comm_t;

/* Makes a communicator of this rank alone. Every collective works on it, and compresses as it would
 * with more ranks. Local.
 *   comm   out: the communicator; NULL when the call fails
 * Errors: ONEBIT_ERROR_ARGUMENT (comm is NULL), ONEBIT_ERROR_MEMORY. */
onebit_status_t onebit_comm_create_self(onebit_comm_t *comm);

/* Makes a group of `size` ranks that are threads of this process. Local: one thread calls it.
 *   size    number of ranks, 1 to 4096
 *   comms   out: `size` handles; all NULL when memory is out, untouched when size is wrong
 * The caller hands comms[k] to the thread that is rank k; from then on each handle belongs to its
 * thread, and each is destroyed on its own, in any order.
 * Errors: ONEBIT_ERROR_ARGUMENT (size out of range, comms is NULL), ONEBIT_ERROR_MEMORY. */
onebit_status_t onebit_comm_create_loopback(int size, onebit_comm_t *comms);

/* The same, as if the ranks were on several hosts: for trying what a cluster would do, and for
 * tests. Consecutive ranks share a host; where size is not a multiple of hosts some have one more.
 *   size    number of ranks, 1 to 4096
 *   hosts   number of hosts, 1 to size
 *   comms   as above
 * Errors: as above; ONEBIT_ERROR_ARGUMENT also for hosts out of range. */
onebit_status_t onebit_comm_create_loopback_hosts(int size, int hosts, onebit_comm_t *comms);

/* This rank's number, 0 to size - 1, and the number of ranks. Local.
 *   comm   the communicator; NULL or no communicator: -1 and 0 (onebit/status.h)
 * Thread-safe. */
int onebit_comm_rank(onebit_comm_t comm);
int onebit_comm_size(onebit_comm_t comm);

/* The number of hosts that the ranks are on. Local.
 *   comm   the communicator; NULL or no communicator: 0
 * Thread-safe. */
int onebit_comm_hosts(onebit_comm_t comm);

/* Bytes of messages that this rank has handed to the transport for other ranks since the
 * communicator was made: headers, scales and bits, without what the network adds. Local.
 *   comm   the communicator; NULL or no communicator: 0
 * Thread-safe. */
uint64_t onebit_comm_bytes_sent(onebit_comm_t comm);

/* Gives the communicator back. Local, except that an MPI communicator must be destroyed on all of
 * its ranks and before MPI_Finalize.
 *   comm   the communicator; NULL is fine; what is no communicator, for example one that was
 *          destroyed before, is left alone, and onebit_last_error() says so
 * Plans and optimizers that were made on it go on as before. The last of them that is destroyed
 * gives back what they share: until then the communicator counts as not destroyed for what it was
 * made from (MPI_Finalize, ncclCommDestroy, the context of callbacks). */
void onebit_comm_destroy(onebit_comm_t comm);

#ifdef __cplusplus
}
#endif
#endif
