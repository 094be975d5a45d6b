/*
 * NCCL's calls that make and end communicators.
 */
#include <stdlib.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "nccl.h"
#include "self_test.h"

namespace {

constexpr int RANKS = 4;

/* A rank's stream and memory on the current device, and a communicator that a test makes. */
struct rank {
  int number;
  ncclUniqueId id;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  long long *memory = pinned<long long>(8);

  rank(int of, const ncclUniqueId &where) : number(of), id(where) {
    EXPECT(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  }
  void end() {
    EXPECT(cudaStreamSynchronize(stream) == cudaSuccess);
    EXPECT(ncclCommDestroy(comm) == ncclSuccess);
    EXPECT(cudaStreamDestroy(stream) == cudaSuccess);
    EXPECT(cudaFreeHost(memory) == cudaSuccess);
  }
};

ncclUniqueId new_id() {
  ncclUniqueId id;
  EXPECT(ncclGetUniqueId(&id) == ncclSuccess);
  return id;
}

ncclResult_t join(rank &self) { return ncclCommInitRank(&self.comm, RANKS, self.id, self.number); }

/* Runs the body as each rank, each on a thread; the body makes the communicator. */
void on_ranks(const std::function<void(rank &)> &body) {
  ncclUniqueId id = new_id();
  std::vector<std::thread> threads;
  for (int number = 0; number < RANKS; number++)
    threads.emplace_back([=] {
      EXPECT(cudaSetDevice(number % 2) == cudaSuccess);
      rank self(number, id);
      body(self);
      self.end();
    });
  for (std::thread &thread : threads)
    thread.join();
}

/* The largest of the ranks' numbers. */
ncclResult_t enqueue_largest(const rank &self, long long value) {
  self.memory[0] = value;
  self.memory[1] = 0;
  return ncclAllReduce(self.memory, self.memory + 1, 1, ncclInt64, ncclMax, self.comm, self.stream);
}

bool reaches(const rank &self, long long expected) {
  EXPECT(cudaStreamSynchronize(self.stream) == cudaSuccess);
  return self.memory[1] == expected;
}

void revoke(rank &self) {
  EXPECT(join(self) == ncclSuccess);
  EXPECT(ncclCommRevoke(self.comm, 1) == ncclInvalidArgument);
  EXPECT(ncclCommRevoke(self.comm, 0) == ncclSuccess);
  EXPECT(enqueue_largest(self, self.number) == ncclRemoteError);
}

/* A rank that aborts releases the others. */
void split_that_fails(rank &self) {
  EXPECT(join(self) == ncclSuccess);
  if (self.number) {
    ncclComm_t none = nullptr;
    EXPECT(ncclCommSplit(self.comm, 0, 0, &none, nullptr) == ncclRemoteError && !none);
    return;
  }
  EXPECT(ncclCommAbort(self.comm) == ncclSuccess);
  EXPECT(ncclCommInitRank(&self.comm, 1, new_id(), 0) == ncclSuccess);
}

void finalize(rank &self) {
  ncclComm_t none = nullptr;
  EXPECT(join(self) == ncclSuccess);
  EXPECT(ncclGroupStart() == ncclSuccess && enqueue_largest(self, self.number) == ncclSuccess);
  EXPECT(ncclCommFinalize(self.comm) == ncclInvalidUsage && ncclGroupEnd() == ncclInvalidUsage);
  EXPECT(enqueue_largest(self, self.number) == ncclSuccess);
  EXPECT(ncclCommFinalize(self.comm) == ncclSuccess && self.memory[1] == RANKS - 1);
  EXPECT(enqueue_largest(self, self.number) == ncclInvalidArgument);
  EXPECT(ncclCommSplit(self.comm, 0, 0, &none, nullptr) == ncclInvalidArgument && !none);
  EXPECT(ncclCommFinalize(self.comm) == ncclInvalidArgument);
}

/* A collective that another thread has begun is over too when the communicator is final. */
void finalize_what_runs(rank &self) {
  static std::atomic<int> waiting{0};
  EXPECT(join(self) == ncclSuccess);
  if (self.number) {
    EXPECT(enqueue_largest(self, self.number) == ncclSuccess);
    cudaStreamQuery(self.stream); /* begins it */
    waiting++;
    EXPECT(ncclCommFinalize(self.comm) == ncclSuccess && self.memory[1] == RANKS - 1);
    return;
  }
  while (waiting < RANKS - 1)
    std::this_thread::yield();
  EXPECT(enqueue_largest(self, 0) == ncclSuccess && reaches(self, RANKS - 1));
}

/* Registers a window on each rank; memory of another kind or size is refused. */
void window(rank &self) {
  void *memory = nullptr;
  ncclWindow_t made = nullptr;
  EXPECT(join(self) == ncclSuccess && ncclMemAlloc(&memory, 64) == ncclSuccess);
  EXPECT(ncclCommWindowRegister(self.comm, self.memory, 8, &made, NCCL_WIN_COLL_SYMMETRIC) ==
         ncclInvalidArgument);
  EXPECT(ncclCommWindowRegister(self.comm, memory, self.number ? 32 : 64, &made,
                                NCCL_WIN_COLL_SYMMETRIC) == ncclInvalidArgument);
  EXPECT(ncclCommWindowRegister(self.comm, memory, 64, &made, NCCL_WIN_COLL_SYMMETRIC) ==
         ncclSuccess);
  EXPECT(ncclCommWindowDeregister(self.comm, made) == ncclSuccess);
  EXPECT(ncclCommWindowDeregister(self.comm, made) == ncclInvalidArgument);
  EXPECT(ncclMemFree(memory) == ncclSuccess);
}

ncclComm_t with_window(void **memory, ncclWindow_t *made) {
  ncclComm_t comm = nullptr;
  ncclCommInitAll(&comm, 1, nullptr);
  ncclMemAlloc(memory, 64);
  ncclCommWindowRegister(comm, *memory, 64, made, NCCL_WIN_DEFAULT);
  return comm;
}
void free_a_window() {
  void *memory;
  ncclWindow_t made;
  with_window(&memory, &made);
  ncclMemFree(memory);
}
void destroy_with_window() {
  void *memory;
  ncclWindow_t made;
  ncclCommDestroy(with_window(&memory, &made));
}
void window_of_old() {
  void *memory;
  ncclWindow_t made;
  setenv("EMULATED_NCCL_VERSION", "22600", 1);
  with_window(&memory, &made);
}
} // namespace

void test_communicators() {
  for (const auto &body : {split_that_fails, revoke, finalize, finalize_what_runs, window})
    on_ranks(body);
  EXPECT(aborts_with(free_a_window, "gives back the memory of a window"));
  EXPECT(aborts_with(destroy_with_window, "that has windows"));
  EXPECT(aborts_with(window_of_old, "NCCL 22600 has no ncclCommWindowRegister"));
}
