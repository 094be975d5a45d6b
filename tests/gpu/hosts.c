/* Ranks on hosts that they are told of. */
#define _DEFAULT_SOURCE
#include "tests/gpu/hosts.h"

#include <stdlib.h>

#include "collectives/communicator.h"

#ifdef ONEBIT_HAVE_NCCL
#include "onebit/nccl.h"
#endif

const struct hosts_split hosts_splits[HOSTS_SPLITS] = {{2, 2, false}, {2, 3, false}, {2, 3, true},
                                                       {3, 2, false}, {4, 1, false}, {1, 3, false}};

struct run {
  const struct hosts_split *split;
  hosts_body *body;
  void *context;
};

static void tell_hosts(onebit_comm_t comm, const struct hosts_split *split) {
  int host_of[HOSTS_MOST_RANKS];
  for (int r = 0; r < comm->size; r++)
    host_of[r] = split->in_turns ? r % split->hosts : r / split->each;
  ob_hosts_destroy(&comm->hosts);
  CHECK_STATUS(ob_hosts_create(&comm->hosts, host_of, comm->rank, comm->size), ONEBIT_OK);
}

static void run_here(const struct gpu_rank *self, const struct run *run, bool device) {
  check_case("%d hosts of %d%s, rank %d, %s", run->split->hosts, run->split->each,
             run->split->in_turns ? " in turns" : "", self->rank, device ? "NCCL" : "loopback");
  tell_hosts(self->comm, run->split);
  run->body(self, run->split, device, run->context);
}

static void on_processor(const struct gpu_rank *self, void *context) {
  run_here(self, context, false);
}

#ifdef ONEBIT_HAVE_NCCL
static bool check_nccl(ncclResult_t result, const char *call) {
  return CHECK(result == ncclSuccess, "%s: %s", call, ncclGetErrorString(result));
}

/* Ranks that are threads have a device each: what waits for all of a device (cudaFree does) would
 * wait for another rank's messages too. */
static void over_nccl(const struct gpu_rank *self, void *context) {
  struct gpu_rank here = *self;
  ncclUniqueId id = {{0}};
  ncclComm_t nccl;
  int devices = 1;
  CHECK_CUDA(cudaGetDeviceCount(&devices));
  CHECK_CUDA(cudaSetDevice(self->rank % devices));
  if (self->rank == 0)
    check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
  gpu_broadcast(self, &id, sizeof id);
  if (!check_nccl(ncclCommInitRank(&nccl, self->size, id, self->rank), "ncclCommInitRank"))
    return;
  if (CHECK_STATUS(onebit_comm_create_nccl(nccl, &here.comm), ONEBIT_OK))
    run_here(&here, context, true);
  onebit_comm_destroy(here.comm);
  check_nccl(ncclCommDestroy(nccl), "ncclCommDestroy");
}
#endif

void hosts_run(const struct hosts_split *split, hosts_body *body, void *context) {
  struct run run = {split, body, context};
  int size = split->hosts * split->each;
#ifdef ONEBIT_HAVE_NCCL
#ifdef ONEBIT_EMULATED_CUDA
  setenv("EMULATED_DEVICES", "6", 1);
#endif
  if (gpu_threads(size, on_processor, &run))
    gpu_ranks(size, over_nccl, &run);
#ifdef ONEBIT_EMULATED_CUDA
  unsetenv("EMULATED_DEVICES");
#endif
#else
  (void)run, (void)size, (void)on_processor;
  SKIP("this build is without NCCL");
#endif
}
