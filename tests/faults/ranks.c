/* Runs ranks as processes or as threads. Over NCCL, ranks are threads. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/faults/faults.h"
#include "tests/support_ports.h"

/* NCCL is tested only on the emulated device. There, each rank has its own device, and a failed
 * rank does not break another rank's driver. */
#if defined(ONEBIT_HAVE_NCCL) && defined(ONEBIT_EMULATED_CUDA)
#define HAS_NCCL 1
#include <cuda_runtime_api.h>
#include <nccl.h>

#include "onebit/nccl.h"
#endif

static void run_rank_process(struct shared *shared, int rank) {
  struct participant participant = {.shared = shared, .rank = rank};
  shared->records[rank].process = getpid();
  participant_run(&participant, connect_tcp);
  _exit(0);
}

void run_processes(struct shared *shared) {
  pid_t processes[RANKS];
  int reserved;
  if ((shared->port = port_reserve(AF_INET, &reserved)) == 0)
    exit(3);
  for (int rank = 0; rank < RANKS; rank++)
    if ((processes[rank] = fork()) == 0)
      run_rank_process(shared, rank);
  for (int rank = 0; rank < RANKS; rank++)
    waitpid(processes[rank], NULL, 0);
  close(reserved);
}

static onebit_comm_t comms[RANKS];

onebit_status_t connect_threads(struct participant *participant, onebit_comm_t *comm) {
  *comm = comms[participant->rank];
  comms[participant->rank] = NULL;
  return ONEBIT_OK;
}

static void *run_rank_thread(void *argument) {
  struct participant *participant = argument;
  participant_run(participant, connect_threads);
  onebit_comm_destroy(comms[participant->rank]); /* the communicator of a rank that has ended
                                                  * without using it */
  return NULL;
}

void run_in_threads(struct shared *shared, void *(*body)(void *participant)) {
  pthread_t threads[RANKS];
  struct participant participants[RANKS];
  for (int rank = 0; rank < RANKS; rank++) {
    participants[rank] = (struct participant){.shared = shared, .rank = rank};
    if (pthread_create(&threads[rank], NULL, body, &participants[rank]))
      exit(3);
  }
  for (int rank = 0; rank < RANKS; rank++)
    pthread_join(threads[rank], NULL);
}

void run_threads(struct shared *shared) {
  if (onebit_comm_create_loopback(RANKS, comms) != ONEBIT_OK)
    exit(3);
  run_in_threads(shared, run_rank_thread);
}

/* --- NCCL: ranks are threads with one device each */

#ifdef HAS_NCCL
static _Thread_local ncclComm_t nccl_own;

static onebit_status_t connect_nccl(struct participant *participant, onebit_comm_t *comm) {
  struct shared *shared = participant->shared;
  ncclUniqueId id;
  memcpy(&id, shared->unique_id, sizeof id);
  if (ncclCommInitRank(&nccl_own, RANKS, id, participant->rank) != ncclSuccess)
    return ONEBIT_ERROR_TRANSPORT;
  return onebit_comm_create_nccl(nccl_own, comm);
}

static void *run_nccl_rank_thread(void *argument) {
  struct participant *participant = argument;
  cudaSetDevice(participant->rank);
  participant_run(participant, connect_nccl);
  return NULL;
}

void run_nccl(struct shared *shared) {
  ncclUniqueId id;
  setenv("EMULATED_DEVICES", "4", 1);
  if (ncclGetUniqueId(&id) != ncclSuccess)
    exit(3);
  memcpy(shared->unique_id, &id, sizeof id);
  run_in_threads(shared, run_nccl_rank_thread);
}

#else
void run_nccl(struct shared *shared) { (void)shared; }
#endif
