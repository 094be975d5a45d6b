/*
 * NCCL's memory, and windows, which newer versions have.
 */
#include <atomic>
#include <map>
#include <set>

#include "cuda_runtime.h"
#include "device.h"
#include "emulation_device.h"
#include "nccl_communicators.h"

struct ncclWindow_vidmem {
  ncclComm_t comm;
  void *memory;
};

namespace emulation {

namespace {

std::map<void *, size_t> &allocated() {
  static std::map<void *, size_t> all;
  return all;
}
std::set<ncclWindow_t> &windows() {
  static std::set<ncclWindow_t> all;
  return all;
}
std::atomic<long> registrations;

bool is_free_for_one(void *memory, size_t size) {
  auto found = allocated().find(memory);
  return found != allocated().end() && size && size <= found->second;
}

/* Records this rank's call and waits for the others'. */
bool all_agree(lock &held, ncclComm &comm, size_t size) {
  clique &ranks = *comm.ranks;
  long number = comm.registrations++;
  std::shared_ptr<registration> &entry = ranks.registrations[number];
  if (!entry)
    entry = std::make_shared<registration>();
  std::shared_ptr<registration> here = entry;
  here->differs |= here->present && here->size != size;
  here->size = size;
  if (++here->present == ranks.ranks.size()) {
    ranks.registrations.erase(number);
    wake_others();
  }
  while (here->present < ranks.ranks.size() && !comm.error)
    wait_for_others(held, "the other ranks in ncclCommWindowRegister");
  return here->present == ranks.ranks.size() && !here->differs;
}

} // namespace

void must_be_there(int version, const char *function) {
  int loaded = 0;
  ncclGetVersion(&loaded);
  if (loaded < version)
    fatal("NCCL %d has no %s", loaded, function);
}

void close_windows(ncclComm_t comm, bool abort) {
  for (auto at = windows().begin(); at != windows().end();) {
    ncclWindow_t window = *at;
    if (window->comm != comm) {
      ++at;
      continue;
    }
    if (!abort)
      fatal("ncclCommDestroy of a communicator that has windows");
    at = windows().erase(at);
    delete window;
  }
}

} // namespace emulation

using namespace emulation;

ncclResult_t ncclMemAlloc(void **ptr, size_t size) {
  must_be_there(21900, "ncclMemAlloc");
  if (cudaMalloc(ptr, size))
    return refuse(ncclUnhandledCudaError, "cudaMalloc failed");
  lock held(guard());
  allocated()[*ptr] = size;
  return ncclSuccess;
}

ncclResult_t ncclMemFree(void *ptr) {
  {
    lock held(guard());
    for (ncclWindow_t window : windows())
      if (window->memory == ptr)
        fatal("ncclMemFree gives back the memory of a window");
    allocated().erase(ptr);
  }
  return cudaFree(ptr) ? refuse(ncclUnhandledCudaError, "cudaFree failed") : ncclSuccess;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t handle, void *buff, size_t size, ncclWindow_t *win,
                                    int winFlags) {
  must_be_there(22700, "ncclCommWindowRegister");
  lock held(guard());
  comm_ptr comm = find_comm(handle);
  if (!comm || !win || (winFlags & ~NCCL_WIN_COLL_SYMMETRIC) || !is_free_for_one(buff, size))
    return refuse(ncclInvalidArgument, "no such communicator, or no memory of ncclMemAlloc");
  if (comm->error || !all_agree(held, *comm, size))
    return refuse(comm->error ? comm->error : ncclInvalidArgument, "not alike on all ranks");
  *win = new ncclWindow_vidmem{handle, buff};
  windows().insert(*win);
  registrations++;
  return answer(*comm);
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t handle, ncclWindow_t win) {
  must_be_there(22700, "ncclCommWindowDeregister");
  lock held(guard());
  comm_ptr comm = find_comm(handle);
  if (!comm || !windows().count(win) || win->comm != handle)
    return refuse(ncclInvalidArgument, "no such communicator or window");
  windows().erase(win);
  delete win;
  return ncclSuccess;
}

struct emulation_nccl_counters emulation_nccl_counts(void) {
  lock held(guard());
  return {registrations, static_cast<long>(windows().size())};
}
