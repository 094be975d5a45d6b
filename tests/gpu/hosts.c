/* Ranks on hosts that they are told of. */
#include "tests/gpu/hosts.h"

#include "collectives/communicator.h"
#include "tests/gpu/plans.h"

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

static void run_here(const struct gpu_rank *self, const struct run *run, enum hosts_place place) {
  static const char *const words[] = {"on the processor", "staged", "NCCL"};
  check_case("%d hosts of %d%s, rank %d, %s", run->split->hosts, run->split->each,
             run->split->in_turns ? " in turns" : "", self->rank, words[place]);
  tell_hosts(self->comm, run->split);
  run->body(self, run->split, place, run->context);
}

static void on_processor(const struct gpu_rank *self, void *context) {
  run_here(self, context, ON_PROCESSOR);
}

static void staged(const struct gpu_rank *self, void *context) { run_here(self, context, STAGED); }

#ifdef ONEBIT_HAVE_NCCL
static void over_nccl(const struct gpu_rank *self, void *context) {
  run_here(self, context, OVER_NCCL);
}
#endif

void hosts_run(const struct hosts_split *split, hosts_body *body, void *context) {
  struct run run = {split, body, context};
  int size = split->hosts * split->each;
  if (!gpu_threads(size, on_processor, &run) || !gpu_threads(size, staged, &run))
    return;
#ifdef ONEBIT_HAVE_NCCL
  ranks_nccl(size, over_nccl, &run);
#endif
}
