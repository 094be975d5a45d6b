/* Ranks that are threads with a device each, over NCCL: of the emulated device, where a device of
 * its own for everyone is at hand, and a rank that fails takes no other's driver with it. */
#define _GNU_SOURCE
#include "tests/faults/faults.h"

#if defined(ONEBIT_HAVE_NCCL) && defined(ONEBIT_EMULATED_CUDA)
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "onebit/nccl.h"

static _Thread_local ncclComm_t own;

static onebit_status_t connect_nccl(struct seat *seat, onebit_comm_t *comm) {
  struct scene *scene = seat->scene;
  ncclUniqueId id;
  memcpy(&id, scene->unique_id, sizeof id);
  cudaSetDevice(seat->rank);
  if (ncclCommInitRank(&own, RANKS, id, seat->rank) != ncclSuccess)
    return ONEBIT_ERROR_TRANSPORT;
  return onebit_comm_create_nccl(own, comm);
}

static void *rank_thread(void *argument) {
  struct seat *seat = argument;
  seat_run(seat, connect_nccl);
  return NULL;
}

void run_nccl(struct scene *scene) {
  pthread_t threads[RANKS];
  struct seat seats[RANKS];
  ncclUniqueId id;
  setenv("EMULATED_DEVICES", "4", 1);
  if (ncclGetUniqueId(&id) != ncclSuccess)
    exit(3);
  memcpy(scene->unique_id, &id, sizeof id);
  for (int rank = 0; rank < RANKS; rank++) {
    seats[rank] = (struct seat){.scene = scene, .rank = rank};
    if (pthread_create(&threads[rank], NULL, rank_thread, &seats[rank]))
      exit(3);
  }
  for (int rank = 0; rank < RANKS; rank++)
    pthread_join(threads[rank], NULL);
}

#else
void run_nccl(struct scene *scene) { (void)scene; }
#endif
