/*
 * NCCL's interface: groups, and calls that become operations on streams.
 */
#include <algorithm>
#include <utility>

#include "capture.h"
#include "device.h"
#include "memory.h"
#include "nccl_communicators.h"

namespace emulation {

namespace {

/* A call that waits for the end of its group. */
struct call {
  comm_ptr comm;
  stream_ptr stream;
  transfer what;
};

thread_local int group_depth = 0;
thread_local ncclResult_t group_error = ncclSuccess;
thread_local std::vector<call> group;
thread_local std::string last_words;

ncclResult_t flush() {
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

/* The factors of `count` elements that a call reads, and writes. */
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

ncclResult_t add(ncclComm_t handle, cudaStream_t stream_handle, const transfer &what) {
  lock held(guard());
  comm_ptr comm = find_comm(handle);
  stream_ptr stream = find_stream(stream_handle);
  if (!comm || !stream)
    return refuse(ncclInvalidArgument, "no such communicator or stream");
  if (comm->error)
    return refuse(comm->error, "the communicator has failed before");
  if (comm->finalized)
    return refuse(ncclInvalidArgument, "the communicator is finalized");
  size_t ranks = comm->ranks->ranks.size();
  if (stream->device != comm->device)
    return refuse(ncclInvalidArgument, "the stream belongs to another device");
  if (what.peer < 0 || static_cast<size_t>(what.peer) >= ranks)
    return refuse(ncclInvalidArgument, "no such peer");
  if (what.type < ncclInt8 || what.type > ncclBfloat16 || what.reduction > ncclAvg)
    return refuse(ncclInvalidArgument, "no such data type or reduction");
  if (!memory_is_right(what, ranks))
    return refuse(ncclInvalidArgument, "a buffer is not memory of a device, or too small");
  if (what.kind == transfer::send)
    count(counted::sent_bytes, static_cast<long>(what.count * size_of(what.type)));
  group.push_back({comm, stream, what});
  held.unlock();
  return group_depth ? ncclSuccess : flush();
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
  *version = static_cast<int>(setting("EMULATED_NCCL_VERSION", NCCL_VERSION_CODE));
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
  return add(comm, stream, {transfer::send, sendbuff, nullptr, count, datatype, ncclSum, peer});
}
ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, {transfer::receive, nullptr, recvbuff, count, datatype, ncclSum, peer});
}
ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount,
                           ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream,
             {transfer::all_gather, sendbuff, recvbuff, sendcount, datatype, ncclSum, 0});
}
ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count,
                           ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  return add(comm, stream, {transfer::all_reduce, sendbuff, recvbuff, count, datatype, op, 0});
}
ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount,
                               ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
  return add(comm, stream,
             {transfer::reduce_scatter, sendbuff, recvbuff, recvcount, datatype, op, 0});
}

ncclResult_t ncclGroupStart(void) {
  group_depth++;
  return ncclSuccess;
}

/* Runs the calls of the group; none of them if one is wrong. */
ncclResult_t ncclGroupEnd(void) {
  if (!group_depth)
    return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--group_depth)
    return ncclSuccess;
  ncclResult_t error = std::exchange(group_error, ncclSuccess);
  if (error)
    forget_arrivals();
  ncclResult_t made = error ? error : arrive_all();
  if (made != ncclSuccess && made != ncclInProgress) {
    group.clear();
    return made;
  }
  ncclResult_t code = flush();
  return code ? code : made;
}
