/*
 * Actions that CUDA's and NCCL's documents allow a driver, and most drivers seldom take: copies
 * that are late, calls that wait, kernels that spin.
 */
#include <stdlib.h>

#include <thread>

#include "nccl.h"
#include "self_test.h"

namespace {

__global__ void set(int *memory, int value) { *memory = value; }
__global__ void copy(int *to, const int *from) { *to = *from; }

cudaStream_t new_stream() {
  cudaStream_t stream;
  EXPECT(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  return stream;
}

int *on_device(int value) {
  void *memory;
  EXPECT(cudaMalloc(&memory, 2 * sizeof(int)) == cudaSuccess);
  EXPECT(cudaMemset(memory, value, 2 * sizeof(int)) == cudaSuccess);
  EXPECT(cudaStreamSynchronize(nullptr) == cudaSuccess);
  return static_cast<int *>(memory);
}

/* The value that a stream which is not ordered with the default one sees. */
int seen_by(cudaStream_t stream, const int *memory, int *seen) {
  EXPECT(launch(stream, 1, 1, copy, seen, memory) == cudaSuccess);
  EXPECT(cudaStreamSynchronize(stream) == cudaSuccess);
  return *seen;
}

/* The call returns when the bytes are staged; they arrive when the default stream comes to the
 * copy. */
void late_copy() {
  cudaStream_t stream = new_stream();
  int *memory = on_device(0), *seen = pinned<int>(1), value = 7;
  EXPECT(cudaMemcpy(memory, &value, sizeof value, cudaMemcpyHostToDevice) == cudaSuccess);
  value = 8;
  EXPECT(seen_by(stream, memory, seen) == 0);
  EXPECT(cudaStreamSynchronize(nullptr) == cudaSuccess && seen_by(stream, memory, seen) == 7);
  EXPECT(cudaMemset(memory, 0, sizeof value) == cudaSuccess && seen_by(stream, memory, seen) == 7);
  EXPECT(cudaMemcpy(memory + 1, memory, sizeof value, cudaMemcpyDeviceToDevice) == cudaSuccess);
  EXPECT(seen_by(stream, memory + 1, seen) == 0 && seen_by(stream, memory, seen) == 7);
  *seen = 9; /* pinned memory is not staged: the host waits */
  EXPECT(cudaMemcpy(memory, seen, sizeof value, cudaMemcpyHostToDevice) == cudaSuccess);
  EXPECT(seen_by(stream, memory, seen) == 9);
  EXPECT(cudaStreamDestroy(stream) == cudaSuccess);
  EXPECT(cudaFree(memory) == cudaSuccess && cudaFreeHost(seen) == cudaSuccess);
}

/* The copy waits for its stream's earlier work, and is late nevertheless. */
void late_copy_on_a_stream() {
  cudaStream_t stream = new_stream(), other = new_stream();
  int *memory = on_device(0), *seen = pinned<int>(1), value = 7;
  EXPECT(launch(stream, 1, 1, set, memory, 5) == cudaSuccess);
  EXPECT(cudaMemcpyAsync(memory, &value, sizeof value, cudaMemcpyHostToDevice, stream) ==
         cudaSuccess);
  EXPECT(seen_by(other, memory, seen) == 5 && seen_by(stream, memory, seen) == 7);
  EXPECT(cudaStreamDestroy(stream) == cudaSuccess && cudaStreamDestroy(other) == cudaSuccess);
  EXPECT(cudaFree(memory) == cudaSuccess && cudaFreeHost(seen) == cudaSuccess);
}

/* A destroyed stream still does its work. */
void destroyed_stream() {
  cudaStream_t stream = new_stream();
  int *seen = pinned<int>(1);
  EXPECT(launch(stream, 1, 1, set, seen, 1) == cudaSuccess);
  EXPECT(cudaStreamDestroy(stream) == cudaSuccess && *seen == 0);
  EXPECT(cudaStreamDestroy(stream) == cudaErrorInvalidResourceHandle);
  EXPECT(cudaDeviceSynchronize() == cudaSuccess && *seen == 1);
  EXPECT(cudaFreeHost(seen) == cudaSuccess);
}

/* A communicator whose link has broken, and its kernel on the stream. */
struct spinning {
  int *memory = pinned<int>(1), *other = pinned<int>(1), *device = on_device(0);
  cudaStream_t stream = new_stream();
  ncclComm_t comm = nullptr;

  spinning() {
    ncclUniqueId id;
    ncclResult_t error = ncclSuccess;
    setenv("EMULATED_TIMEOUT", "1", 1);
    EXPECT(ncclGetUniqueId(&id) == ncclSuccess);
    EXPECT(ncclCommInitRank(&comm, 1, id, 0) == ncclSuccess);
    emulation_nccl_break(comm);
    EXPECT(ncclRecv(memory, 1, ncclInt32, 0, comm, stream) == ncclSuccess);
    EXPECT(cudaStreamQuery(stream) == cudaErrorNotReady);
    EXPECT(ncclCommGetAsyncError(comm, &error) == ncclSuccess && error == ncclRemoteError);
    EXPECT(cudaStreamQuery(stream) == cudaErrorNotReady);
    cudaGetLastError();
  }
};

void ends_by_abort() {
  spinning scene;
  EXPECT(ncclCommAbort(scene.comm) == ncclSuccess);
  EXPECT(cudaStreamSynchronize(scene.stream) == cudaSuccess);
  EXPECT(cudaStreamDestroy(scene.stream) == cudaSuccess);
  EXPECT(cudaFree(scene.device) == cudaSuccess && cudaFreeHost(scene.memory) == cudaSuccess);
  EXPECT(cudaFreeHost(scene.other) == cudaSuccess);
  unsetenv("EMULATED_TIMEOUT");
}

void copy_to_host() {
  spinning scene;
  int value;
  cudaMemcpyAsync(&value, scene.device, sizeof value, cudaMemcpyDeviceToHost, scene.stream);
}
void copy_from_host() {
  spinning scene;
  int value = 1;
  cudaMemcpyAsync(scene.device, &value, sizeof value, cudaMemcpyHostToDevice, scene.stream);
}
void free_memory() { cudaFree(spinning().device); }
void free_pinned() { cudaFreeHost(spinning().other); }
void destroy_it() { ncclCommDestroy(spinning().comm); }

/* The communicator's call is in a graph, which outlives it. */
void abort_before_graph() {
  int *memory = pinned<int>(1);
  ncclComm_t comm = nullptr;
  cudaStream_t stream = new_stream();
  cudaGraph_t graph;
  setenv("EMULATED_TIMEOUT", "1", 1);
  EXPECT(ncclCommInitAll(&comm, 1, nullptr) == ncclSuccess);
  EXPECT(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed) == cudaSuccess);
  EXPECT(ncclRecv(memory, 1, ncclInt32, 0, comm, stream) == ncclSuccess);
  EXPECT(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  ncclCommAbort(comm);
}

void ask_what_is_gone() {
  spinning scene;
  ncclResult_t error;
  ncclCommAbort(scene.comm);
  ncclCommGetAsyncError(scene.comm, &error);
}
void abort_twice() {
  spinning scene;
  ncclCommAbort(scene.comm);
  ncclCommAbort(scene.comm);
}

} // namespace

void test_driver() {
  late_copy();
  late_copy_on_a_stream();
  destroyed_stream();
  ends_by_abort();
  EXPECT(aborts_with(copy_to_host, "behind whose work a copy to the host ends"));
  EXPECT(aborts_with(copy_from_host, "behind whose work a copy from pageable memory begins"));
  EXPECT(aborts_with(free_memory, "the device, whose work cudaFree waits for"));
  EXPECT(aborts_with(free_pinned, "the device, whose work cudaFreeHost waits for"));
  EXPECT(aborts_with(destroy_it, "ncclCommDestroy"));
  EXPECT(aborts_with(abort_before_graph, "graphs that have calls on a communicator"));
  EXPECT(aborts_with(ask_what_is_gone, "use after free"));
  EXPECT(aborts_with(abort_twice, "use after free"));
}
