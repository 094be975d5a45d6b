/* Ranks over NCCL, threads with a device each. Only with the emulated device: there each rank has
 * its own device, and a rank that fails does not take another's driver with it. */
#define _GNU_SOURCE
#include "tests/faults/faults.h"

#if defined(ONEBIT_HAVE_NCCL) && defined(ONEBIT_EMULATED_CUDA)
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <stdlib.h>
#include <string.h>

#include "onebit/nccl.h"

static _Thread_local ncclComm_t own;

static onebit_status_t connect_nccl(struct participant *participant, onebit_comm_t *comm) {
  struct scene *scene = participant->scene;
  ncclUniqueId id;
  memcpy(&id, scene->unique_id, sizeof id);
  if (ncclCommInitRank(&own, RANKS, id, participant->rank) != ncclSuccess)
    return ONEBIT_ERROR_TRANSPORT;
  return onebit_comm_create_nccl(own, comm);
}

static void *rank_thread(void *argument) {
  struct participant *participant = argument;
  cudaSetDevice(participant->rank);
  participant_run(participant, connect_nccl);
  return NULL;
}

void run_nccl(struct scene *scene) {
  ncclUniqueId id;
  setenv("EMULATED_DEVICES", "4", 1);
  if (ncclGetUniqueId(&id) != ncclSuccess)
    exit(3);
  memcpy(scene->unique_id, &id, sizeof id);
  run_in_threads(scene, rank_thread);
}

#else
void run_nccl(struct scene *scene) { (void)scene; }
#endif
