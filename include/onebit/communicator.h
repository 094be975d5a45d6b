/*
 * Communicators: groups of ranks, and the transports that move bytes between them.
 *
 * A communicator is one rank's handle on a group of ranks. Six kinds exist: `self` (one rank),
 * `loopback` (the ranks are threads of one process; for tests and trials without MPI), MPI
 * (onebit/mpi.h), NCCL for GPUs (onebit/nccl.h), `sockets` (the library's own TCP connections,
 * onebit/sockets.h), and `custom` (functions that the caller supplies, onebit/custom.h). Plans and
 * optimizers may outlive the handle they were made on.
 *
 * Waits: every wait for another rank is bounded. After 10, 60 and 300 seconds without progress a
 * rank prints on standard error for which rank it waits; after ONEBIT_TIMEOUT seconds (default 600;
 * 0 or `never`: no limit) the call returns ONEBIT_ERROR_TRANSPORT with a message that says so, and
 * the communicator is aborted: all calls on all of its ranks end, as after onebit_comm_abort. The
 * limit also holds when ranks make their calls in different orders, when one rank makes a call that
 * others do not make, and when a rank has died. Time in which a process was stopped, or did not
 * call the library, counts as at most one second of a wait. The limit does not cover creation calls
 * of MPI and NCCL themselves, nor the program's work on its own streams of a device.
 *
 * Threads: different communicators may be used from different threads at once; so may different
 * plans of one communicator, but over MPI only if MPI was initialised with MPI_THREAD_MULTIPLE.
 * Creation calls on one communicator are collective and must be made in the same order on all of
 * its ranks.
 *
 * Nonblocking calls progress whenever the library is called (onebit_progress). With
 * ONEBIT_PROGRESS=thread in the environment a thread of the library progresses them; leave a core
 * free for this thread. Over MPI that thread needs MPI_THREAD_MULTIPLE: without it creating a
 * communicator fails with ONEBIT_ERROR_UNSUPPORTED. The only other value is `calls`; anything else
 * is an ONEBIT_ERROR_ARGUMENT.
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

/* Makes a communicator of this rank alone. Every collective works on it, and compresses as with
 * more ranks. Local.
 *   comm   out: the communicator; NULL when the call fails
 * Errors: ONEBIT_ERROR_ARGUMENT (comm is NULL), ONEBIT_ERROR_MEMORY. */
onebit_status_t onebit_comm_create_self(onebit_comm_t *comm);

/* Makes a group of `size` ranks that are threads of this process. Local: one thread calls it.
 *   size    number of ranks, 1 to 4096
 *   comms   out: `size` handles; all NULL if memory runs out, unchanged if size is wrong
 * The caller hands comms[k] to the thread that is rank k; from then on each handle belongs to its
 * thread, and each is destroyed on its own, in any order.
 * Errors: ONEBIT_ERROR_ARGUMENT (size out of range, comms is NULL), ONEBIT_ERROR_MEMORY. */
onebit_status_t onebit_comm_create_loopback(int size, onebit_comm_t *comms);

/* Makes a loopback group whose ranks act as if they were on several hosts, for tests and to try out
 * how a cluster would behave. Consecutive ranks share a host; if size is not a multiple of hosts,
 * some hosts have one rank more.
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
 * communicator was made: headers, scales and bits, without the network's own headers. Local.
 *   comm   the communicator; NULL or no communicator: 0
 * Thread-safe. */
uint64_t onebit_comm_bytes_sent(onebit_comm_t comm);

/* Aborts the communicator: ends every call in flight and every later one, on every rank, with an
 * ONEBIT_ERROR_TRANSPORT whose message names the rank that aborted. Afterwards destroy the objects
 * that were made on it, and the communicator; or call onebit_comm_shrink. Local: it returns at
 * once, and the other ranks learn of the abort while they wait, or in their next call. Over NCCL it
 * calls ncclCommAbort, which destroys nccl_comm; over a custom transport it calls the callback
 * `abort`. A second call does nothing.
 *   comm   the communicator
 * Thread-safe, also while other threads wait in calls on comm. If MPI was initialised below
 * MPI_THREAD_MULTIPLE, one of the waiting threads tells the other ranks.
 * Errors: ONEBIT_ERROR_ARGUMENT (no communicator). */
onebit_status_t onebit_comm_abort(onebit_comm_t comm);

/* Makes a communicator of the remaining ranks of a communicator that has lost ranks. Collective
 * over the remaining ranks. It aborts comm, if that has not happened. Ranks keep their order.
 *   comm        the communicator; the caller must still destroy it, and what was made on it
 *   survivors   out: the new communicator, owned by the caller; NULL when the call fails
 * Loopback: the remaining ranks are those that have not destroyed their handle. A rank that does
 * not make this call within ONEBIT_TIMEOUT is left out, and gets ONEBIT_ERROR_TRANSPORT when it
 * makes the call. MPI with user-level failure mitigation (Open MPI 5 with `mpirun --with-ft ulfm`):
 * the remaining ranks are the processes that have not failed, which must all make the call. Self:
 * the result is again a communicator of this rank.
 * Errors: ONEBIT_ERROR_ARGUMENT (no communicator, survivors is NULL), ONEBIT_ERROR_UNSUPPORTED
 * (other transports, another MPI: end the job, and start it again from the last checkpoint),
 * ONEBIT_ERROR_MEMORY, ONEBIT_ERROR_TRANSPORT. */
onebit_status_t onebit_comm_shrink(onebit_comm_t comm, onebit_comm_t *survivors);

/* Destroys the communicator. Local, except that an MPI communicator must be destroyed on all of its
 * ranks and before MPI_Finalize.
 *   comm   the communicator; NULL is fine. A handle that is no communicator, for example one that
 *          was destroyed before, is left alone, and onebit_last_error() says so
 * Plans and optimizers that were made on it continue to work. Until the last of these is destroyed
 * the program must not call MPI_Finalize, call ncclCommDestroy on its nccl_comm, or free the
 * context of its callbacks. Loopback ranks that wait for a rank that has destroyed the
 * communicator, and everything made on it, get ONEBIT_ERROR_TRANSPORT. A call after MPI_Finalize
 * frees the memory, and does not call MPI. */
void onebit_comm_destroy(onebit_comm_t comm);

#ifdef __cplusplus
}
#endif
#endif
