/*
 * Communicators over the library's own TCP connections, several between each two ranks. They are
 * for networks that MPI and NCCL do not span, and for long-distance links, on which more bytes are
 * in flight than the window of one connection allows. They need no MPI and no other library; any
 * launcher that gives each process its number works, such as torchrun or a loop over ssh. Traffic
 * is neither encrypted nor authenticated: send it through a tunnel between sites (docs/wan.md).
 *
 * How ranks find each other. Rank 0 listens at an address that all ranks know (`rendezvous`). Each
 * other rank listens at a port that the system chooses, at the address that reaches rank 0. Of each
 * two ranks the one with the higher number connects to the other, `streams` times, and once more
 * for a control connection, which reports the end of the communicator. So each rank must be able to
 * reach all ranks with lower numbers. A host name that resolves to a loopback address on rank 0's
 * own host (127.0.1.1 on Debian) works.
 *
 * A name identifies the job: the option `secret`, else ONEBIT_JOB of the environment, else the
 * launcher's job number (TORCHELASTIC_RUN_ID, unless it is "none", PMIX_NAMESPACE,
 * OMPI_MCA_ess_base_jobid, PALS_APID, FLUX_JOB_ID, SLURM_JOB_ID with SLURM_STEP_ID, PBS_JOBID,
 * LSB_JOBID). Rank 0 accepts ranks that prove that they know the name. It tells a rank of another
 * job that this is another job, and rejects all other connections. Later connections are identified
 * by a random key that rank 0 makes for each communicator. Two jobs without a name, or in one
 * allocation without steps, cannot be told apart if they use the same port at the same time. To
 * detect this, rank 0 waits 2 s for a second rank with the same number, and keeps the port as long
 * as the communicator exists. If it finds two jobs, all ranks that have connected get an error.
 *
 * A rank whose process ends while it joins can be started again. If a rank runs out of open files
 * (the soft limit is raised to the hard limit), ports or memory, it gets an error with the system's
 * message at once, and so do all ranks that contact rank 0 within 2 s.
 *
 * A message is sent in segments, each over the next connection that has space (docs/wan.md). The
 * system chooses the buffer sizes (net.ipv4.tcp_rmem, tcp_wmem). Messages progress whenever a rank
 * calls the library; with ONEBIT_PROGRESS=thread a thread progresses them at all times.
 *
 * If the process of a rank ends, the others notice it at once, because the system closes its
 * connections; a host that vanishes without closing them is noticed after ONEBIT_TIMEOUT. A host
 * that returns before that continues. A forked child cannot use the communicator: it makes its own.
 */
#ifndef ONEBIT_SOCKETS_H
#define ONEBIT_SOCKETS_H

#include <stddef.h>

#include "onebit/communicator.h"
#include "onebit/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Start from ONEBIT_SOCKETS_OPTIONS_INIT; in every field zero means the default. */
typedef struct onebit_sockets_options {
  size_t size; /* sizeof(onebit_sockets_options_t): lets the struct grow */
  /* This rank's number, 0 to ranks - 1, and the number of ranks. Default (both 0): RANK and
   * WORLD_SIZE of the environment, as torchrun sets them. */
  int rank, ranks;
  /* The address where rank 0 listens, "host:port", the same on all ranks. The host is a name, an
   * IPv4 address, or an IPv6 address in brackets. A link-local address also names this host's
   * network interface, which may differ between ranks: "[fe80::1%eth0]:29400". Default: MASTER_ADDR
   * and MASTER_PORT of the environment; torchrun itself listens there unless it is told to use
   * another port. */
  const char *rendezvous;
  /* Ranks that give the same name share a host, and its /dev/shm. Default: the name from
   * gethostname. */
  const char *host;
  /* A secret, the same on all ranks of this job; it becomes the job's name and is never sent.
   * Default: the name comes from the environment, as above. */
  const char *secret;
  /* Connections that carry messages between two ranks, 1 to ONEBIT_SOCKETS_STREAMS; all ranks use
   * rank 0's value. Default 16, or 8 with more than 32 ranks, because each connection is an open
   * file. With the default, only one connection is used if the round trip is shorter than 2 ms. */
  int streams;
  /* Seconds that a rank waits for others, here and in all calls; INFINITY: for ever. Default
   * ONEBIT_TIMEOUT, as onebit/communicator.h has it. */
  double timeout;
} onebit_sockets_options_t;

/* clang-format off */
#define ONEBIT_SOCKETS_OPTIONS_INIT \
  { sizeof(onebit_sockets_options_t), 0, 0, NULL, NULL, NULL, 0, 0 }
#define ONEBIT_SOCKETS_STREAMS 64 /* the largest number of connections between two ranks */
/* clang-format on */

/* Makes a communicator over sockets. Collective: all ranks call it, each with its number. A
 * single rank connects to nothing and needs no rendezvous.
 *   options   NULL: all options from the environment. Not kept after the call
 *   comm      out: the communicator; NULL when the call fails
 * Errors: ONEBIT_ERROR_ARGUMENT (an option out of range, or missing here and in the environment; a
 * name that does not resolve; the other ranks get ONEBIT_ERROR_TRANSPORT after their timeout),
 * ONEBIT_ERROR_MISMATCH (ranks differ in their number of ranks), ONEBIT_ERROR_MEMORY,
 * ONEBIT_ERROR_TRANSPORT (the port is in use, also by another job; two ranks have the same number,
 * or different versions of the library; a system call failed on a rank; ranks did not join within
 * the timeout: the message names them). */
onebit_status_t onebit_comm_create_sockets(const onebit_sockets_options_t *options,
                                           onebit_comm_t *comm);

#ifdef __cplusplus
}
#endif
#endif
