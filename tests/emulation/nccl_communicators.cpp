/*
 * NCCL's interface: communicators, from their making to their end.
 */
#include "nccl_communicators.h"

#include <stdio.h>

#include <algorithm>

#include "device.h"

namespace emulation {

namespace {

std::vector<comm_ptr> &comms() {
  static std::vector<comm_ptr> all;
  return all;
}

/* Communicators that not all ranks have joined yet. */
std::map<std::string, std::shared_ptr<clique>> &forming() {
  static std::map<std::string, std::shared_ptr<clique>> all;
  return all;
}

/* The communicator of this id; made by the first rank that comes. */
ncclResult_t join(const comm_ptr &comm, int ranks, const std::string &id) {
  std::shared_ptr<clique> &all = forming()[id];
  if (!all)
    all = std::make_shared<clique>();
  if (all->ranks.empty())
    all->ranks.resize(static_cast<size_t>(ranks));
  if (all->ranks.size() != static_cast<size_t>(ranks))
    return refuse(ncclInvalidArgument, "the ranks differ in the number of ranks");
  if (!all->ranks[static_cast<size_t>(comm->rank)].expired())
    return refuse(ncclInvalidUsage, "a rank is there twice");
  all->ranks[static_cast<size_t>(comm->rank)] = comm;
  all->joined++;
  comm->ranks = all;
  return ncclSuccess;
}

ncclResult_t init(ncclComm_t *handle, int ranks, const std::string &id, int rank) {
  if (!handle || ranks < 1 || rank < 0 || rank >= ranks)
    return refuse(ncclInvalidArgument, "no such rank");
  if (in_group())
    return refuse(ncclInvalidUsage, "emulated ranks are threads: none is made in a group");
  lock held(guard());
  auto comm = std::make_shared<ncclComm>();
  comm->rank = rank;
  comm->device = current_device();
  if (ncclResult_t error = join(comm, ranks, id))
    return error;
  while (comm->ranks->joined < ranks)
    wait_for_others(held, "the other ranks in ncclCommInitRank");
  forming().erase(id);
  wake_others();
  comms().push_back(comm);
  *handle = comm.get();
  return ncclSuccess;
}

ncclResult_t forget(ncclComm_t handle, bool abort) {
  lock held(guard());
  comm_ptr comm = find_comm(handle);
  if (!comm)
    return refuse(ncclInvalidArgument, "no such communicator");
  if (abort)
    fail(*comm->ranks, nullptr, ncclRemoteError);
  while (!abort && !comm->queued.empty())
    complete(held, operation_ptr(comm->queued.front()));
  comms().erase(std::find(comms().begin(), comms().end(), comm));
  return ncclSuccess;
}

ncclResult_t tell(ncclComm_t handle, int *answer, int (*what)(const ncclComm &)) {
  lock held(guard());
  comm_ptr comm = find_comm(handle);
  if (!comm || !answer)
    return refuse(ncclInvalidArgument, "no such communicator, or nowhere to answer to");
  *answer = what(*comm);
  return ncclSuccess;
}

} // namespace

comm_ptr find_comm(ncclComm_t handle) {
  for (const comm_ptr &comm : comms())
    if (comm.get() == handle)
      return comm;
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
  return init(comm, nranks, std::string(commId.internal, sizeof commId.internal), rank);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) { return forget(comm, false); }
ncclResult_t ncclCommAbort(ncclComm_t comm) { return forget(comm, true); }

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError) {
  int answer = ncclSuccess;
  ncclResult_t code = tell(comm, &answer, [](const ncclComm &of) -> int { return of.error; });
  *asyncError = static_cast<ncclResult_t>(answer);
  return code;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
  return tell(comm, count,
              [](const ncclComm &of) { return static_cast<int>(of.ranks->ranks.size()); });
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) {
  return tell(comm, device, [](const ncclComm &of) { return of.device; });
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
  return tell(comm, rank, [](const ncclComm &of) { return of.rank; });
}

void emulation_nccl_break(ncclComm_t comm) {
  lock held(guard());
  if (comm_ptr found = find_comm(comm))
    found->breaks = true;
}
