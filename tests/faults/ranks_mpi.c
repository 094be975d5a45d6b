/*
 * Ranks that mpirun starts. Each runs this program again, with --participant. Message faults are
 * committed in MPI_Isend, which this file replaces through MPI's profiling interface.
 */
#include "tests/faults/faults.h"

#ifdef ONEBIT_HAVE_MPI
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "onebit/mpi.h"

static struct participant *own;

void run_mpi(struct shared *shared, const char *program, const char *path) {
  (void)shared;
  execlp("tests/scripts/ranks", "ranks", "4", program, "--participant", path, (char *)NULL);
  exit(3);
}

static onebit_status_t connect_mpi(struct participant *participant, onebit_comm_t *comm) {
  (void)participant;
  return onebit_comm_create_mpi(MPI_COMM_WORLD, comm);
}

int participant_mpi(struct shared *shared) {
  static struct participant participant;
  if (!shared || MPI_Init(NULL, NULL) != MPI_SUCCESS)
    return 3;
  participant.shared = shared;
  MPI_Comm_rank(MPI_COMM_WORLD, &participant.rank);
  shared->records[participant.rank].process = getpid();
  own = &participant;
  participant_run(&participant, connect_mpi);
  int status = shared->records[participant.rank].status;
  if (status != ONEBIT_OK) /* _exit, because MPI_Finalize would wait for the lost rank */
    _exit(status < 0 ? 4 : 5);
  return MPI_Finalize() != MPI_SUCCESS;
}

/* Sends a copy of the library's message, which a fault may change. The copy is not freed, since
 * this function does not know when the send ends. */
int MPI_Isend(const void *data, int count, MPI_Datatype type, int peer, int tag, MPI_Comm comm,
              MPI_Request *request) {
  if (!own || !own->messages_fail || type != MPI_BYTE)
    return PMPI_Isend(data, count, type, peer, tag, comm, request);
  size_t bytes = (size_t)count;
  unsigned char *copy = malloc(bytes + 8);
  if (!copy)
    return MPI_ERR_NO_MEM;
  memcpy(copy, data, bytes);
  enum fate fate = commit_message_fault(own, copy, &bytes);
  if (fate == IS_HELD)
    participant_sleep(own->held_until - participant_clock());
  if (fate == IS_LOST) { /* the message is lost */
    free(copy);
    return PMPI_Isend(data, 0, type, MPI_PROC_NULL, tag, comm, request);
  }
  if (fate == GOES_TWICE) {
    MPI_Request other;
    PMPI_Isend(copy, (int)bytes, type, peer, tag, comm, &other);
    PMPI_Request_free(&other);
  }
  return PMPI_Isend(copy, (int)bytes, type, peer, tag, comm, request);
}

#else
void run_mpi(struct shared *shared, const char *program, const char *path) {
  (void)shared, (void)program, (void)path;
}

int participant_mpi(struct shared *shared) {
  (void)shared;
  return 3;
}
#endif
