/*
 * NCCL's interface: groups, and the calls that become operations on streams.
 */
#include <algorithm>
#include <atomic>
#include <map>
#include <set>
#include <utility>

#include "compression/numerics.h"
#include "cuda_runtime.h"
#include "emulation_device.h"
#include "inside.h"
#include "nccl_matching.h"

namespace emulation {

namespace {

/* A call that waits for the end of the group that it is in. */
struct call {
  comm_ptr comm;
  stream_ptr stream;
  transfer what;
};

thread_local int group_depth = 0;
thread_local ncclResult_t group_error = ncclSuccess;
thread_local std::vector<call> group;
thread_local std::string last_words;

ncclResult_t enqueue_group() {
  std::vector<call> calls = std::exchange(group, {});
  lock held(guard());
  while (!calls.empty()) {
    call first = calls.front();
    auto other = std::stable_partition(calls.begin(), calls.end(), [&](const call &one) {
      return one.comm == first.comm && one.stream == first.stream;
    });
    std::vector<transfer> transfers;
    std::for_each(calls.begin(), other, [&](const call &one) { transfers.push_back(one.what); });
    calls.erase(calls.begin(), other);
    work what = nccl_work(first.comm, std::move(transfers));
    if (result(submit(held, first.stream, std::move(what), &first.comm->last, first.comm->last)))
      return refuse(ncclUnhandledCudaError, "the stream takes no operation");
  }
  return ncclSuccess;
}

/* times_read: how many times `count` elements a call reads. times_written: how many times it
 * writes. */
size_t times_read(const transfer &what, size_t ranks) {
  return what.kind == transfer::receive ? 0 : what.kind == transfer::reduce_scatter ? ranks : 1;
}
size_t times_written(const transfer &what, size_t ranks) {
  return what.kind == transfer::send ? 0 : what.kind == transfer::all_gather ? ranks : 1;
}

bool memory_is_right(const transfer &what, size_t ranks) {
  size_t bytes = what.count * size_of(what.type);
  size_t read = bytes * times_read(what, ranks), written = bytes * times_written(what, ranks);
  return (!read || device_can_touch(what.from, read)) &&
         (!written || device_can_touch(what.to, written));
}

ncclResult_t add_call(ncclComm_t handle, cudaStream_t stream_handle, const transfer &what) {
  lock held(guard());
  comm_ptr comm = find_comm(handle);
  stream_ptr stream = find_stream(stream_handle);
  if (!comm || !stream)
    return refuse(ncclInvalidArgument, "no such communicator or stream");
  if (comm->error)
    return refuse(comm->error, "the communicator has failed before");
  if (comm->finalized)
    return refuse(ncclInvalidArgument, "the communicator is finalized");
  size_t ranks = comm->shared->ranks.size();
  if (stream->device != comm->device)
    return refuse(ncclInvalidArgument, "the stream belongs to another device");
  if (what.peer < 0 || static_cast<size_t>(what.peer) >= ranks)
    return refuse(ncclInvalidArgument, "no such peer");
  if (what.type < ncclUint8 || what.type > ncclBfloat16 || what.reduction > ncclAvg)
    return refuse(ncclInvalidArgument, "no such data type or reduction");
  if (!memory_is_right(what, ranks))
    return refuse(ncclInvalidArgument, "a buffer is not memory of a device, or too small");
  if (what.kind == transfer::send)
    count(counted::sent_bytes, static_cast<long>(what.count * size_of(what.type)));
  group.push_back({comm, stream, what});
  held.unlock();
  return group_depth ? ncclSuccess : enqueue_group();
}

} // namespace

bool in_group() { return group_depth > 0; }
bool group_has_calls() { return !group.empty(); }

ncclResult_t refuse(ncclResult_t code, const char *words) {
  last_words = words;
  if (group_depth)
    group_error = code;
  return code;
}

} // namespace emulation

using namespace emulation;

ncclResult_t ncclGetVersion(int *version) {
  *version = static_cast<int>(read_setting("EMULATED_NCCL_VERSION", NCCL_VERSION_CODE));
  return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t code) {
  static const char *const words[] = {"no error",
                                      "unhandled cuda error",
                                      "unhandled system error",
                                      "internal error",
                                      "invalid argument",
                                      "invalid usage",
                                      "remote process exited or there was a network error",
                                      "NCCL operation in progress"};
  return code >= 0 && code < ncclNumResults ? words[code] : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t) { return last_words.c_str(); }

ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return add_call(comm, stream,
                  {transfer::send, sendbuff, nullptr, count, datatype, ncclSum, peer});
}
ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return add_call(comm, stream,
                  {transfer::receive, nullptr, recvbuff, count, datatype, ncclSum, peer});
}
ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount,
                           ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream) {
  return add_call(comm, stream,
                  {transfer::all_gather, sendbuff, recvbuff, sendcount, datatype, ncclSum, 0});
}
ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count,
                           ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  return add_call(comm, stream, {transfer::all_reduce, sendbuff, recvbuff, count, datatype, op, 0});
}
ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount,
                               ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
  return add_call(comm, stream,
                  {transfer::reduce_scatter, sendbuff, recvbuff, recvcount, datatype, op, 0});
}

ncclResult_t ncclGroupStart(void) {
  group_depth++;
  return ncclSuccess;
}

/* Runs the calls of the group. Runs none of them if one is wrong. */
ncclResult_t ncclGroupEnd(void) {
  if (!group_depth)
    return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--group_depth)
    return ncclSuccess;
  ncclResult_t error = std::exchange(group_error, ncclSuccess);
  if (error)
    drop_deferred_waits();
  ncclResult_t made = error ? error : run_deferred_waits();
  if (made != ncclSuccess && made != ncclInProgress) {
    group.clear();
    return made;
  }
  ncclResult_t code = enqueue_group();
  return code ? code : made;
}

/*
 * ---- Reductions ----
 *
 * NCCL's reductions. NCCL adds in an order of its own. This code adds in the order of the ranks,
 * and adds 16-bit floats in float32.
 */

namespace emulation {

namespace {

/* Loads and stores an element of type T. `number` is the type of the arithmetic. */
template <typename T> struct element {
  using number = T;
  static T load(const void *from, size_t i) { return static_cast<const T *>(from)[i]; }
  static void store(void *to, size_t i, T value) { static_cast<T *>(to)[i] = value; }
};
template <onebit_dtype_t dtype> struct narrow {
  using number = float;
  static float load(const void *from, size_t i) { return ob_load(from, i, dtype); }
  static void store(void *to, size_t i, float value) { ob_store(to, i, dtype, value); }
};

template <typename T> T combine(T a, T b, ncclRedOp_t reduction) {
  return reduction == ncclMax ? std::max(a, b) : static_cast<T>(a + b);
}

template <typename Element>
void reduce_as(void *to, const std::vector<const void *> &from, size_t count,
               ncclRedOp_t reduction) {
  using number = typename Element::number;
  for (size_t i = 0; i < count; i++) {
    number value = Element::load(from[0], i);
    for (size_t rank = 1; rank < from.size(); rank++)
      value = combine(value, Element::load(from[rank], i), reduction);
    if (reduction == ncclAvg)
      value = static_cast<number>(value / static_cast<number>(from.size()));
    Element::store(to, i, value);
  }
}

} // namespace

size_t size_of(ncclDataType_t type) {
  switch (type) {
  case ncclUint8:
    return 1;
  case ncclFloat16:
  case ncclBfloat16:
    return 2;
  case ncclInt32:
  case ncclFloat32:
    return 4;
  default:
    return 8;
  }
}

void reduce(void *to, const std::vector<const void *> &from, size_t count, ncclDataType_t type,
            ncclRedOp_t reduction) {
  switch (type) {
  case ncclUint8:
    return reduce_as<element<uint8_t>>(to, from, count, reduction);
  case ncclInt32:
    return reduce_as<element<int32_t>>(to, from, count, reduction);
  case ncclInt64:
    return reduce_as<element<int64_t>>(to, from, count, reduction);
  case ncclFloat16:
    return reduce_as<narrow<ONEBIT_FLOAT16>>(to, from, count, reduction);
  case ncclBfloat16:
    return reduce_as<narrow<ONEBIT_BFLOAT16>>(to, from, count, reduction);
  case ncclFloat32:
    return reduce_as<element<float>>(to, from, count, reduction);
  }
}

} // namespace emulation

/*
 * ---- Windows ----
 *
 * Memory of NCCL, and windows, which only newer versions of NCCL have.
 */

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

/* Records this rank's call and waits for the calls of the other ranks. */
bool all_agree(lock &held, ncclComm &comm, size_t size) {
  shared_state &shared = *comm.shared;
  long number = comm.registrations++;
  std::shared_ptr<registration> &entry = shared.registrations[number];
  if (!entry)
    entry = std::make_shared<registration>();
  std::shared_ptr<registration> here = entry;
  here->differs |= here->present && here->size != size;
  here->size = size;
  if (++here->present == shared.ranks.size()) {
    shared.registrations.erase(number);
    wake_others();
  }
  while (here->present < shared.ranks.size() && !comm.error)
    wait_for_others(held, "the other ranks in ncclCommWindowRegister");
  return here->present == shared.ranks.size() && !here->differs;
}

} // namespace

void require_version(int version, const char *function) {
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
  require_version(21900, "ncclMemAlloc");
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
  require_version(22700, "ncclCommWindowRegister");
  lock held(guard());
  comm_ptr comm = find_comm(handle);
  if (!comm || !win || (winFlags & ~NCCL_WIN_COLL_SYMMETRIC) || !is_free_for_one(buff, size))
    return refuse(ncclInvalidArgument, "no such communicator, or no memory of ncclMemAlloc");
  if (comm->error || !all_agree(held, *comm, size))
    return refuse(comm->error ? comm->error : ncclInvalidArgument,
                  "the window's arguments differ between ranks");
  *win = new ncclWindow_vidmem{handle, buff};
  windows().insert(*win);
  registrations++;
  return collective_result(*comm);
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t handle, ncclWindow_t win) {
  require_version(22700, "ncclCommWindowDeregister");
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
