/*
 * NCCL's interface: communicators, from creation to destruction.
 */
#include <stdio.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <thread>
#include <utility>

#include "cuda_runtime.h"
#include "emulation_device.h"
#include "inside.h"
#include "nccl_matching.h"

namespace emulation {

namespace {

std::vector<comm_ptr> &comms() {
  static std::vector<comm_ptr> all;
  return all;
}

/* Communicators that were destroyed or aborted. They are kept so that no new communicator gets the
 * same address. */
std::vector<comm_ptr> &ended_comms() {
  static std::vector<comm_ptr> all;
  return all;
}

/* Communicators that not all ranks have joined yet. */
std::map<std::string, std::shared_ptr<shared_state>> &incomplete_comms() {
  static std::map<std::string, std::shared_ptr<shared_state>> all;
  return all;
}

/* The last part of creating a communicator: waiting for the other ranks. */
using deferred_wait = std::function<ncclResult_t(lock &)>;
thread_local std::vector<deferred_wait> deferred_waits;

/* Waits for the other ranks. In a group it leaves the wait to the end of the group, since this
 * thread may create the other ranks later in the same group. */
ncclResult_t wait_or_defer(lock &held, deferred_wait wait) {
  if (!in_group())
    return wait(held);
  deferred_waits.push_back(std::move(wait));
  return ncclSuccess;
}

/* Joins the communicator of this id; the first rank creates it. */
ncclResult_t join(const comm_ptr &comm, int ranks, const std::string &id) {
  std::shared_ptr<shared_state> &all = incomplete_comms()[id];
  if (!all)
    all = std::make_shared<shared_state>();
  if (all->ranks.empty())
    all->ranks.resize(static_cast<size_t>(ranks));
  if (all->ranks.size() != static_cast<size_t>(ranks))
    return refuse(ncclInvalidArgument, "the ranks differ in the number of ranks");
  if (!all->ranks[static_cast<size_t>(comm->rank)].expired())
    return refuse(ncclInvalidUsage, "a rank is there twice");
  all->ranks[static_cast<size_t>(comm->rank)] = comm;
  all->joined++;
  comm->shared = all;
  return ncclSuccess;
}

/* Reads a configuration. NULL changes nothing. Numbers that are not set are
 * NCCL_CONFIG_UNDEF_INT. */
ncclResult_t read_config(const ncclConfig_t *config, bool *blocking) {
  const ncclConfig_t initial = NCCL_CONFIG_INITIALIZER;
  if (!config)
    return ncclSuccess;
  if (config->size != initial.size || config->magic != initial.magic)
    return refuse(ncclInvalidArgument, "not initialized with NCCL_CONFIG_INITIALIZER");
  bool unset = config->blocking == NCCL_CONFIG_UNDEF_INT;
  if (!unset && config->blocking != 0 && config->blocking != 1)
    return refuse(ncclInvalidArgument, "blocking is neither 0 nor 1");
  *blocking = unset || config->blocking;
  return ncclSuccess;
}

ncclResult_t wait_for_ranks(lock &held, const comm_ptr &comm, const std::string &id,
                            ncclComm_t *handle) {
  shared_state &all = *comm->shared;
  while (static_cast<size_t>(all.joined) < all.ranks.size())
    wait_for_others(held, "the other ranks in ncclCommInitRank");
  incomplete_comms().erase(id);
  wake_others();
  comms().push_back(comm);
  *handle = comm.get();
  return collective_result(*comm);
}

ncclResult_t create_communicator(ncclComm_t *handle, int ranks, const ncclUniqueId &unique,
                                 int rank, const ncclConfig_t *config) {
  if (!handle || ranks < 1 || rank < 0 || rank >= ranks)
    return refuse(ncclInvalidArgument, "no such rank");
  std::string id(unique.internal, sizeof unique.internal);
  auto comm = std::make_shared<ncclComm>();
  comm->rank = rank;
  comm->device = current_device();
  if (ncclResult_t error = read_config(config, &comm->blocking))
    return error;
  lock held(guard());
  if (ncclResult_t error = join(comm, ranks, id))
    return error;
  wake_others();
  return wait_or_defer(held,
                       [=](lock &waiting) { return wait_for_ranks(waiting, comm, id, handle); });
}

/* Adds the next rank to a communicator whose ranks are all created at once. */
comm_ptr append_rank(const std::shared_ptr<shared_state> &all, int device) {
  auto comm = std::make_shared<ncclComm>();
  comm->shared = all;
  comm->rank = all->joined++;
  comm->device = device;
  all->ranks.push_back(comm);
  comms().push_back(comm);
  return comm;
}

/* Follows NCCL's rule that each device may appear only once. */
ncclResult_t check_devices(const std::vector<int> &devices) {
  int count = 0;
  if (cudaGetDeviceCount(&count))
    return refuse(ncclUnhandledCudaError, "there is no device");
  std::vector<bool> taken(static_cast<size_t>(count));
  for (int device : devices) {
    if (device < 0 || device >= count)
      return refuse(ncclInvalidArgument, "no such device");
    if (taken[static_cast<size_t>(device)])
      return refuse(ncclInvalidUsage, "a device is there twice");
    taken[static_cast<size_t>(device)] = true;
  }
  return ncclSuccess;
}

ncclResult_t init_all(ncclComm_t *handles, const std::vector<int> &devices) {
  if (ncclResult_t error = check_devices(devices))
    return error;
  lock held(guard());
  auto all = std::make_shared<shared_state>();
  for (int device : devices)
    *handles++ = append_rank(all, device).get();
  return ncclSuccess;
}

/* Makes a communicator of the ranks of each color, ordered by key and then by parent rank. */
void divide_ranks(const shared_state &parent, std::vector<choice> &choices) {
  std::vector<size_t> order(choices.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return choices[a].key < choices[b].key; });
  std::map<int, std::shared_ptr<shared_state>> made;
  for (size_t rank : order) {
    choice &its = choices[rank];
    if (its.color == NCCL_SPLIT_NOCOLOR)
      continue;
    std::shared_ptr<shared_state> &all = made[its.color];
    if (!all)
      all = std::make_shared<shared_state>();
    its.made = append_rank(all, parent.ranks[rank].lock()->device);
    its.made->blocking = its.blocking;
  }
}

/* Stores this rank's choice. The last of the `wanted` ranks to call it divides the communicator. */
std::shared_ptr<division> choose(ncclComm &comm, const choice &mine, size_t wanted) {
  shared_state &parent = *comm.shared;
  long number = comm.splits++;
  std::shared_ptr<division> &entry = parent.divisions[number];
  if (!entry)
    entry = std::make_shared<division>();
  std::shared_ptr<division> here = entry;
  here->choices.resize(parent.ranks.size(), {NCCL_SPLIT_NOCOLOR, 0, true, nullptr});
  here->wanted = wanted;
  here->choices[static_cast<size_t>(comm.rank)] = mine;
  if (++here->present == wanted) {
    parent.divisions.erase(number);
    divide_ranks(parent, here->choices);
    wake_others();
  }
  return here;
}

ncclResult_t wait_for_choices(lock &held, const comm_ptr &comm,
                              const std::shared_ptr<division> &here, ncclComm_t *handle) {
  while (here->present < here->wanted && !comm->error)
    wait_for_others(held, "the other ranks in ncclCommSplit or ncclCommShrink");
  if (here->present < here->wanted)
    return refuse(comm->error, "a rank failed while the others waited for each other");
  const comm_ptr &made = here->choices[static_cast<size_t>(comm->rank)].made;
  *handle = made.get();
  return made ? collective_result(*made) : ncclSuccess;
}

ncclResult_t split_communicator(ncclComm_t handle, choice mine, size_t left_out, ncclComm_t *made,
                                const ncclConfig_t *config) {
  lock held(guard());
  comm_ptr comm = find_comm(handle);
  if (!comm || !made)
    return refuse(ncclInvalidArgument, "unknown communicator, or the result's pointer is NULL");
  if (mine.color < 0 && mine.color != NCCL_SPLIT_NOCOLOR)
    return refuse(ncclInvalidArgument, "a color is not negative, or NCCL_SPLIT_NOCOLOR");
  if (comm->error)
    return refuse(comm->error, "the communicator has failed before");
  if (comm->finalized)
    return refuse(ncclInvalidArgument, "the communicator is finalized");
  mine.blocking = comm->blocking;
  if (ncclResult_t error = read_config(config, &mine.blocking))
    return error;
  std::shared_ptr<division> here = choose(*comm, mine, comm->shared->ranks.size() - left_out);
  return wait_or_defer(held,
                       [=](lock &waiting) { return wait_for_choices(waiting, comm, here, made); });
}

/* Completes the queued operations and the last one, which completes all earlier operations too. A
 * launched graph's operations are completed through the stream on which it was launched. */
void complete_operations(lock &held, const comm_ptr &comm) {
  const char *whom = "kernels of NCCL, in ncclCommFinalize or ncclCommDestroy";
  while (!comm->queued.empty())
    complete_operation(held, operation_ptr(comm->queued.front()), whom);
  complete_operation(held, operation_ptr(comm->last), whom);
}

ncclResult_t finalize_communicator(ncclComm_t handle) {
  if (group_has_calls())
    return refuse(ncclInvalidUsage, "calls of this group have not begun");
  lock held(guard());
  comm_ptr comm = find_comm(handle);
  if (!comm || comm->finalized)
    return refuse(ncclInvalidArgument, "no such communicator, or finalized before");
  comm->finalized = true;
  complete_operations(held, comm);
  return comm->error ? refuse(comm->error, "the communicator has failed") : ncclSuccess;
}

ncclResult_t end_communicator(ncclComm_t handle, bool abort) {
  lock held(guard());
  comm_ptr comm = find_comm(handle);
  if (!comm)
    return refuse(ncclInvalidArgument, "no such communicator");
  if (comm->polled)
    fatal("use after free: a communicator is given back while another thread is in "
          "ncclCommGetAsyncError");
  close_windows(handle, abort);
  if (abort)
    abort_rank(*comm);
  else
    complete_operations(held, comm);
  comms().erase(std::find(comms().begin(), comms().end(), comm));
  ended_comms().push_back(comm);
  while (is_in_graph(comm.get()))
    wait_for_others(held, "graphs that have calls on a communicator which is given back");
  return ncclSuccess;
}

ncclResult_t read_property(ncclComm_t handle, int *answer, int (*what)(const ncclComm &)) {
  lock held(guard());
  comm_ptr comm = find_comm(handle);
  if (!comm || !answer)
    return refuse(ncclInvalidArgument, "unknown communicator, or the result's pointer is NULL");
  *answer = what(*comm);
  return ncclSuccess;
}

} // namespace

ncclResult_t run_deferred_waits() {
  lock held(guard());
  ncclResult_t all = ncclSuccess;
  for (const deferred_wait &wait : std::exchange(deferred_waits, {})) {
    ncclResult_t one = wait(held);
    if (all == ncclSuccess || all == ncclInProgress)
      all = one ? one : all;
  }
  return all;
}

void drop_deferred_waits() { deferred_waits.clear(); }

ncclResult_t collective_result(const ncclComm &made) {
  return made.blocking ? ncclSuccess : ncclInProgress;
}

comm_ptr find_comm(ncclComm_t handle) {
  for (const comm_ptr &comm : comms())
    if (comm.get() == handle)
      return comm;
  for (const comm_ptr &comm : ended_comms())
    if (comm.get() == handle)
      fatal("use after free: a call on a communicator that was destroyed or aborted");
  return nullptr;
}

} // namespace emulation

using namespace emulation;

ncclResult_t ncclGetUniqueId(ncclUniqueId *uniqueId) {
  static long number;
  lock held(guard());
  *uniqueId = {};
  snprintf(uniqueId->internal, sizeof uniqueId->internal, "emulated %ld", ++number);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank) {
  return create_communicator(comm, nranks, commId, rank, nullptr);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank,
                                    ncclConfig_t *config) {
  return create_communicator(comm, nranks, commId, rank, config);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int nranks, int rank, int nId,
                                      ncclUniqueId *commIds, ncclConfig_t *config) {
  if (nId < 1 || !commIds)
    return refuse(ncclInvalidArgument, "no id");
  return ncclCommInitRankConfig(comm, nranks, commIds[0], rank, config);
}

ncclResult_t ncclCommInitAll(ncclComm_t *comm, int ndev, const int *devlist) {
  if (!comm || ndev < 1)
    return refuse(ncclInvalidArgument, "ndev is below 1, or comm is NULL");
  std::vector<int> devices(static_cast<size_t>(ndev));
  std::iota(devices.begin(), devices.end(), 0);
  if (devlist)
    std::copy_n(devlist, ndev, devices.begin());
  return init_all(comm, devices);
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm,
                           ncclConfig_t *config) {
  return split_communicator(comm, {color, key, true, nullptr}, 0, newcomm, config);
}

ncclResult_t ncclCommShrink(ncclComm_t comm, int *, int excludeRanksCount, ncclComm_t *newcomm,
                            ncclConfig_t *config, int shrinkFlags) {
  if (excludeRanksCount < 1 || shrinkFlags != NCCL_SHRINK_DEFAULT)
    return refuse(ncclInvalidArgument, "nobody is excluded, or the flags are not emulated");
  return split_communicator(comm, {0, 0, true, nullptr}, static_cast<size_t>(excludeRanksCount),
                            newcomm, config);
}

ncclResult_t ncclCommRevoke(ncclComm_t handle, int revokeFlags) {
  lock held(guard());
  comm_ptr comm = find_comm(handle);
  if (!comm || revokeFlags)
    return refuse(ncclInvalidArgument, "no such communicator, or flags");
  abort_rank(*comm);
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) { return finalize_communicator(comm); }

ncclResult_t ncclCommDestroy(ncclComm_t comm) { return end_communicator(comm, false); }
ncclResult_t ncclCommAbort(ncclComm_t comm) { return end_communicator(comm, true); }

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError) {
  lock held(guard());
  comm_ptr of = find_comm(comm);
  if (!of)
    return refuse(ncclInvalidArgument, "no such communicator");
  of->polled++;
  held.unlock();
  std::this_thread::yield(); /* lets another thread use the communicator meanwhile */
  held.lock();
  of->polled--;
  *asyncError = of->error;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
  return read_property(
      comm, count, [](const ncclComm &of) { return static_cast<int>(of.shared->ranks.size()); });
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) {
  return read_property(comm, device, [](const ncclComm &of) { return of.device; });
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
  return read_property(comm, rank, [](const ncclComm &of) { return of.rank; });
}

void emulation_nccl_break(ncclComm_t comm) {
  lock held(guard());
  if (comm_ptr found = find_comm(comm))
    found->breaks = true;
}
