/*
 * Tests of CUDA's rules for streams, events, capture and memory, and of late execution.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <thread>

#include "emulation.h"
#include "inside.h"
#include "self_test.h"

namespace {

__global__ void increment(int *memory) { ++*memory; }

cudaEvent_t new_event() {
  cudaEvent_t event;
  EXPECT(cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess);
  return event;
}

void test_deferral(cudaStream_t stream, int *seen) {
  *seen = 0;
  EXPECT(launch(stream, 1, 1, set, seen, 1) == cudaSuccess);
  EXPECT(*seen == 0);
  EXPECT(cudaStreamQuery(stream) == cudaErrorNotReady && cudaGetLastError() == cudaErrorNotReady);
  EXPECT(cudaStreamQuery(stream) == cudaSuccess && *seen == 1);
  EXPECT(launch(stream, 1, 1, set, seen, 2) == cudaSuccess && *seen == 1);
  EXPECT(cudaStreamSynchronize(stream) == cudaSuccess && *seen == 2);
}

/* The second stream reads the value that the first stream wrote only if it waits for the event. */
void test_events(cudaStream_t first, cudaStream_t second, int *seen) {
  cudaEvent_t event = new_event();
  EXPECT(cudaEventQuery(event) == cudaSuccess);
  for (int waits = 0; waits < 2; waits++) {
    seen[0] = seen[1] = 0;
    EXPECT(launch(first, 1, 1, set, seen, 3) == cudaSuccess);
    EXPECT(cudaEventRecord(event, first) == cudaSuccess);
    if (waits)
      EXPECT(cudaStreamWaitEvent(second, event) == cudaSuccess);
    EXPECT(launch(second, 1, 1, copy, seen + 1, seen) == cudaSuccess);
    EXPECT(cudaStreamSynchronize(second) == cudaSuccess && seen[1] == 3 * waits);
    EXPECT(cudaEventSynchronize(event) == cudaSuccess && seen[0] == 3);
  }
  EXPECT(cudaEventDestroy(event) == cudaSuccess);
}

/* The default stream orders itself with blocking streams, and not with nonblocking streams. */
void test_default_stream(int *seen) {
  for (unsigned flags : {cudaStreamDefault, cudaStreamNonBlocking}) {
    cudaStream_t stream = new_stream(flags);
    int ordered = flags == cudaStreamDefault;
    seen[0] = seen[1] = 0;
    EXPECT(launch(stream, 1, 1, set, seen, 1) == cudaSuccess);
    EXPECT(launch(nullptr, 1, 1, copy, seen + 1, seen) == cudaSuccess);
    EXPECT(cudaStreamSynchronize(nullptr) == cudaSuccess && seen[1] == ordered);
    EXPECT(launch(nullptr, 1, 1, set, seen, 2) == cudaSuccess);
    EXPECT(launch(stream, 1, 1, copy, seen + 1, seen) == cudaSuccess);
    EXPECT(cudaStreamSynchronize(stream) == cudaSuccess && seen[1] == 1 + ordered);
    EXPECT(cudaDeviceSynchronize() == cudaSuccess);
    EXPECT(cudaStreamDestroy(stream) == cudaSuccess);
  }
}

/* Tests two threads, one of which passes an event to the other. */
void test_two_threads(int *seen) {
  cudaEvent_t event = new_event();
  std::atomic<bool> recorded{false};
  cudaStream_t first = new_stream(cudaStreamNonBlocking);
  *seen = 0;
  std::thread other([&] {
    cudaStream_t second = new_stream(cudaStreamNonBlocking);
    while (!recorded)
      std::this_thread::yield();
    EXPECT(cudaStreamWaitEvent(second, event) == cudaSuccess);
    EXPECT(launch(second, 1, 1, copy, seen + 1, seen) == cudaSuccess);
    EXPECT(cudaStreamSynchronize(second) == cudaSuccess && seen[1] == 9);
    EXPECT(cudaStreamDestroy(second) == cudaSuccess);
  });
  EXPECT(launch(first, 1, 1, set, seen, 9) == cudaSuccess);
  EXPECT(cudaEventRecord(event, first) == cudaSuccess);
  recorded = true;
  other.join();
  EXPECT(cudaStreamDestroy(first) == cudaSuccess && cudaEventDestroy(event) == cudaSuccess);
}

void test_launch_errors(cudaStream_t stream, int *seen) {
  EXPECT(launch(stream, 0, 1, set, seen, 1) == cudaErrorInvalidConfiguration);
  EXPECT(launch(stream, 1, 1025, set, seen, 1) == cudaErrorInvalidConfiguration);
  EXPECT(cudaGetLastError() == cudaErrorInvalidConfiguration && cudaGetLastError() == cudaSuccess);
  EXPECT(cudaSetDevice(1) == cudaSuccess);
  EXPECT(launch(stream, 1, 1, set, seen, 1) == cudaErrorInvalidResourceHandle);
  EXPECT(cudaSetDevice(0) == cudaSuccess && cudaSetDevice(2) == cudaErrorInvalidDevice);
  emulation_fail_launch(2);
  EXPECT(launch(stream, 1, 1, set, seen, 1) == cudaSuccess);
  EXPECT(launch(stream, 1, 1, set, seen, 1) == cudaErrorLaunchOutOfResources);
  EXPECT(launch(stream, 1, 1, set, seen, 1) == cudaSuccess);
  EXPECT(cudaGetLastError() == cudaErrorLaunchOutOfResources);
}

void test_counts(cudaStream_t stream, int *seen, void *device) {
  EXPECT(cudaStreamSynchronize(stream) == cudaSuccess);
  emulation_reset_counts();
  EXPECT(launch(stream, 1, 1, set, seen, 1) == cudaSuccess);
  EXPECT(cudaMemsetAsync(device, 0, 4, stream) == cudaSuccess);
  EXPECT(cudaMemcpyAsync(device, seen, 4, cudaMemcpyHostToDevice, stream) == cudaSuccess);
  EXPECT(cudaStreamSynchronize(stream) == cudaSuccess);
  struct emulation_counters counts = emulation_counts();
  EXPECT(counts.kernels == 1 && counts.copies == 1 && counts.memsets == 1);
  EXPECT(counts.synchronisations == 1 && counts.allocations == 0 && counts.events == 0);
}

/* With emulation_only_count kernels do not run, and large allocations stay untouched. */
void test_only_counting(cudaStream_t stream, int *seen) {
  const size_t large = size_t{1} << 40;
  void *memory = nullptr;
  *seen = 5;
  emulation_reset_counts();
  emulation_only_count(1);
  EXPECT(cudaMalloc(&memory, large) == cudaSuccess);
  EXPECT(cudaMemsetAsync(memory, 1, large, stream) == cudaSuccess);
  EXPECT(launch(stream, 1, 1, set, seen, 1) == cudaSuccess);
  EXPECT(cudaStreamSynchronize(stream) == cudaSuccess);
  EXPECT(cudaFree(memory) == cudaSuccess);
  emulation_only_count(0);
  struct emulation_counters counts = emulation_counts();
  EXPECT(counts.kernels == 1 && counts.memsets == 1 && *seen == 5);
}

void test_attributes(void *device, void *host) {
  int local = 0;
  cudaPointerAttributes attributes;
  EXPECT(cudaPointerGetAttributes(&attributes, (char *)device + 5) == cudaSuccess);
  EXPECT(attributes.type == cudaMemoryTypeDevice && attributes.device == 0);
  EXPECT(cudaPointerGetAttributes(&attributes, host) == cudaSuccess);
  EXPECT(attributes.type == cudaMemoryTypeHost && attributes.hostPointer == host);
  EXPECT(cudaPointerGetAttributes(&attributes, &local) == cudaSuccess);
  EXPECT(attributes.type == cudaMemoryTypeUnregistered);
}

void test_copies(void *device, int *host) {
  int local[4] = {1, 2, 3, 4}, back[4] = {};
  EXPECT(cudaMemcpy(device, local, 16, cudaMemcpyHostToDevice) == cudaSuccess);
  EXPECT(cudaMemcpy(back, device, 16, cudaMemcpyDeviceToHost) == cudaSuccess && back[3] == 4);
  EXPECT(cudaMemcpy2DAsync(host, 4, device, 8, 4, 2, cudaMemcpyDefault) == cudaSuccess);
  EXPECT(cudaDeviceSynchronize() == cudaSuccess && host[0] == 1 && host[1] == 3);
  EXPECT(cudaMemcpy(local, back, 16, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  EXPECT(cudaMemcpy(device, device, 4, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
  EXPECT(cudaMemcpy(device, local, 17, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  EXPECT(cudaMemset(local, 0, 4) == cudaErrorInvalidValue);
}

void test_allocation() {
  void *memory = nullptr, *second = nullptr;
  size_t before, after, total;
  EXPECT(cudaMemGetInfo(&before, &total) == cudaSuccess);
  emulation_fail_allocation(2);
  EXPECT(cudaMalloc(&memory, 1000) == cudaSuccess && (uintptr_t)memory % 256 == 0);
  EXPECT(cudaMalloc(&second, 8) == cudaErrorMemoryAllocation && !second);
  EXPECT(cudaMalloc(&second, total) == cudaErrorMemoryAllocation);
  EXPECT(cudaMemGetInfo(&after, &total) == cudaSuccess && before - after == 1000);
  EXPECT(cudaFreeHost(memory) == cudaErrorInvalidValue);
  EXPECT(cudaFree(memory) == cudaSuccess && cudaFree(memory) == cudaErrorInvalidValue);
  EXPECT(cudaFree(nullptr) == cudaSuccess);
}

/* Begins a capture of a fork to a second stream, work on both, and a join. */
void begin_fork(cudaStream_t first, cudaStream_t second, cudaEvent_t fork, cudaEvent_t join,
                int *memory) {
  EXPECT(cudaStreamBeginCapture(first, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  EXPECT(launch(first, 1, 1, increment, memory) == cudaSuccess);
  EXPECT(cudaEventRecord(fork, first) == cudaSuccess);
  EXPECT(cudaStreamWaitEvent(second, fork) == cudaSuccess);
  EXPECT(launch(second, 1, 1, copy, memory + 1, memory) == cudaSuccess);
  EXPECT(cudaEventRecord(join, second) == cudaSuccess);
  EXPECT(cudaStreamWaitEvent(first, join) == cudaSuccess);
  EXPECT(launch(first, 1, 1, increment, memory) == cudaSuccess);
}

/* A capture that was invalidated gives no graph. The next capture gives one. */
cudaGraphExec_t capture_fork(cudaStream_t first, cudaStream_t second, int *memory) {
  cudaEvent_t fork = new_event(), join = new_event();
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  size_t nodes;
  begin_fork(first, second, fork, join, memory);
  EXPECT(cudaEventQuery(fork) == cudaErrorCapturedEvent);
  EXPECT(cudaStreamEndCapture(first, &graph) == cudaErrorStreamCaptureInvalidated && !graph);
  begin_fork(first, second, fork, join, memory);
  EXPECT(cudaStreamEndCapture(first, &graph) == cudaSuccess);
  EXPECT(cudaGraphGetNodes(graph, nullptr, &nodes) == cudaSuccess && nodes == 3);
  EXPECT(cudaGraphInstantiate(&executable, graph) == cudaSuccess);
  EXPECT(cudaGraphDestroy(graph) == cudaSuccess);
  EXPECT(cudaEventDestroy(fork) == cudaSuccess && cudaEventDestroy(join) == cudaSuccess);
  return executable;
}

void test_capture_errors(cudaStream_t first, cudaStream_t second, int *memory) {
  cudaGraph_t graph;
  cudaStreamCaptureStatus status;
  cudaEvent_t event = new_event();
  EXPECT(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal) ==
         cudaErrorStreamCaptureUnsupported);
  EXPECT(cudaStreamBeginCapture(first, cudaStreamCaptureModeGlobal) == cudaSuccess);
  EXPECT(cudaStreamIsCapturing(first, &status) == cudaSuccess &&
         status == cudaStreamCaptureStatusActive);
  EXPECT(cudaStreamSynchronize(first) == cudaErrorStreamCaptureUnsupported);
  EXPECT(launch(first, 1, 1, increment, memory) == cudaErrorStreamCaptureInvalidated);
  EXPECT(cudaStreamEndCapture(first, &graph) == cudaErrorStreamCaptureInvalidated);

  EXPECT(cudaStreamBeginCapture(first, cudaStreamCaptureModeGlobal) == cudaSuccess);
  void *more;
  EXPECT(cudaMalloc(&more, 8) == cudaErrorStreamCaptureUnsupported);
  EXPECT(cudaStreamEndCapture(first, &graph) == cudaErrorStreamCaptureInvalidated);

  EXPECT(cudaStreamBeginCapture(first, cudaStreamCaptureModeGlobal) == cudaSuccess);
  EXPECT(cudaEventRecord(event, first) == cudaSuccess);
  EXPECT(cudaStreamWaitEvent(second, event) == cudaSuccess);
  EXPECT(launch(second, 1, 1, increment, memory) == cudaSuccess);
  EXPECT(cudaStreamEndCapture(first, &graph) == cudaErrorStreamCaptureUnjoined && !graph);
  EXPECT(cudaStreamIsCapturing(second, &status) == cudaSuccess &&
         status == cudaStreamCaptureStatusNone);
  EXPECT(cudaEventDestroy(event) == cudaSuccess);
}

} // namespace

void test_streams() {
  int *seen = pinned<int>(4);
  void *device;
  EXPECT(cudaMalloc(&device, 16) == cudaSuccess);
  cudaStream_t first = new_stream(cudaStreamNonBlocking), second = new_stream(cudaStreamDefault);
  test_deferral(first, seen);
  test_events(first, second, seen);
  test_default_stream(seen);
  test_two_threads(seen);
  test_launch_errors(first, seen);
  test_counts(first, seen, device);
  test_only_counting(first, seen);
  EXPECT(cudaStreamDestroy(first) == cudaSuccess && cudaStreamDestroy(second) == cudaSuccess);
  EXPECT(cudaStreamSynchronize(first) == cudaErrorInvalidResourceHandle);
  EXPECT(cudaFree(device) == cudaSuccess && cudaFreeHost(seen) == cudaSuccess);
}

void test_eager() {
  int *seen = pinned<int>(1);
  setenv("EMULATED_STREAMS", "eager", 1);
  EXPECT(launch(nullptr, 1, 1, set, seen, 1) == cudaSuccess && *seen == 1);
  unsetenv("EMULATED_STREAMS");
  EXPECT(cudaFreeHost(seen) == cudaSuccess);
}

void test_memory() {
  int *host = pinned<int>(4);
  void *device;
  EXPECT(cudaMalloc(&device, 16) == cudaSuccess);
  test_attributes(device, host);
  test_copies(device, host);
  test_allocation();
  EXPECT(cudaFree(device) == cudaSuccess && cudaFreeHost(host) == cudaSuccess);
}

void test_capture() {
  int *memory = pinned<int>(2);
  cudaStream_t first = new_stream(cudaStreamNonBlocking), second = new_stream(cudaStreamDefault);
  cudaGraphExec_t executable = capture_fork(first, second, memory);
  EXPECT(memory[0] == 0);
  for (int launches = 1; launches <= 3; launches++) {
    EXPECT(cudaGraphLaunch(executable, first) == cudaSuccess);
    EXPECT(cudaStreamSynchronize(first) == cudaSuccess);
    EXPECT(memory[0] == 2 * launches && memory[1] == 2 * launches - 1);
  }
  EXPECT(cudaGraphExecDestroy(executable) == cudaSuccess);
  test_capture_errors(first, second, memory);
  EXPECT(cudaStreamDestroy(first) == cudaSuccess && cudaStreamDestroy(second) == cudaSuccess);
  EXPECT(cudaFreeHost(memory) == cudaSuccess);
}
