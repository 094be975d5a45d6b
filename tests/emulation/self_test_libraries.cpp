/*
 * Tests of NCCL between threads.
 */
#include <atomic>
#include <functional>
#include <stdlib.h>
#include <string.h>
#include <thread>
#include <vector>

#include "emulation.h"
#include "nccl.h"
#include "self_test.h"

namespace {

constexpr int RANKS = 4;

struct rank {
  int number;
  ncclUniqueId id;
  ncclComm_t comm;
  cudaStream_t stream;
  int *memory; /* 16 numbers */
};

ncclUniqueId new_id() {
  ncclUniqueId id;
  EXPECT(ncclGetUniqueId(&id) == ncclSuccess);
  return id;
}

ncclResult_t join_communicator(rank &self) {
  return ncclCommInitRank(&self.comm, RANKS, self.id, self.number);
}

/* Waits until NCCL reports the error while the kernel still spins. The abort of the rank then ends
 * the kernel. */
void expect_error(rank &of, ncclResult_t expected) {
  ncclResult_t error = ncclSuccess;
  while (!error) {
    cudaStreamQuery(of.stream); /* runs an operation, so that the wait makes progress */
    EXPECT(ncclCommGetAsyncError(of.comm, &error) == ncclSuccess);
  }
  EXPECT(error == expected);
  EXPECT(ncclSend(of.memory, 1, ncclInt32, 0, of.comm, of.stream) != ncclSuccess);
  EXPECT(ncclCommAbort(of.comm) == ncclSuccess);
  of.comm = nullptr;
}

void run_rank(int number, ncclUniqueId id, const std::function<void(rank &)> &body) {
  rank self = {number, id, nullptr, nullptr, nullptr};
  EXPECT(cudaSetDevice(number % 2) == cudaSuccess);
  EXPECT(cudaStreamCreateWithFlags(&self.stream, cudaStreamNonBlocking) == cudaSuccess);
  self.memory = pinned<int>(16);
  EXPECT(join_communicator(self) == ncclSuccess);
  body(self);
  EXPECT(cudaStreamSynchronize(self.stream) == cudaSuccess);
  if (self.comm)
    EXPECT(ncclCommDestroy(self.comm) == ncclSuccess);
  EXPECT(cudaStreamDestroy(self.stream) == cudaSuccess);
  EXPECT(cudaFreeHost(self.memory) == cudaSuccess);
}

/* Runs the body as each rank, each on a thread. */
void on_ranks(const std::function<void(rank &)> &body) {
  const ncclUniqueId id = new_id();
  std::vector<std::thread> threads;
  for (int number = 0; number < RANKS; number++)
    threads.emplace_back(run_rank, number, id, body);
  for (std::thread &thread : threads)
    thread.join();
}

/* Rank r sends 10 r + p to rank p. */
ncclResult_t enqueue_all_to_all(const rank &self) {
  EXPECT(ncclGroupStart() == ncclSuccess);
  for (int peer = 0; peer < RANKS; peer++) {
    ncclSend(self.memory + peer, 1, ncclInt32, peer, self.comm, self.stream);
    ncclRecv(self.memory + 8 + peer, 1, ncclInt32, peer, self.comm, self.stream);
  }
  return ncclGroupEnd();
}

bool has_arrived(const rank &self) {
  bool right = true;
  for (int peer = 0; peer < RANKS; peer++)
    right &= self.memory[8 + peer] == 10 * peer + self.number;
  return right;
}

void fill(const rank &self) {
  memset(self.memory, 0, 16 * sizeof(int));
  for (int peer = 0; peer < RANKS; peer++)
    self.memory[peer] = 10 * self.number + peer;
}

/* Each rank synchronises its two streams in a different order. */
void crossed_streams(rank &self) {
  cudaStream_t other;
  EXPECT(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking) == cudaSuccess);
  self.memory[0] = self.memory[1] = 1;
  EXPECT(ncclAllReduce(self.memory, self.memory + 8, 1, ncclInt32, ncclSum, self.comm,
                       self.stream) == ncclSuccess);
  EXPECT(ncclAllReduce(self.memory + 1, self.memory + 9, 1, ncclInt32, ncclSum, self.comm, other) ==
         ncclSuccess);
  EXPECT(cudaStreamSynchronize(self.number ? other : self.stream) == cudaSuccess);
  EXPECT(cudaStreamSynchronize(self.number ? self.stream : other) == cudaSuccess);
  EXPECT(self.memory[8] == RANKS && self.memory[9] == RANKS);
  EXPECT(cudaStreamDestroy(other) == cudaSuccess);
}

/* The work of a rank's device progresses while its host is busy. */
void one_rank_waits(rank &self) {
  static std::atomic<bool> arrived{false};
  fill(self);
  EXPECT(enqueue_all_to_all(self) == ncclSuccess);
  while (self.number && !arrived)
    std::this_thread::yield();
  EXPECT(cudaStreamSynchronize(self.stream) == cudaSuccess);
  EXPECT(has_arrived(self));
  arrived = true;
}

void send_mismatched(rank &self) {
  if (self.number == 0)
    EXPECT(ncclSend(self.memory, 2, ncclInt32, 1, self.comm, self.stream) == ncclSuccess);
  else /* refused if the error arrived first */
    ncclRecv(self.memory, 1, ncclInt32, self.number == 1 ? 0 : 1, self.comm, self.stream);
  expect_error(self, self.number < 2 ? ncclInvalidArgument : ncclRemoteError);
}

void broken_link(rank &self) {
  if (self.number == 2)
    emulation_nccl_break(self.comm);
  enqueue_all_to_all(self); /* refused if the error arrived first */
  expect_error(self, ncclRemoteError);
}

/* When a rank aborts, the other ranks get an error. */
void abort_one(rank &self) {
  if (self.number) {
    enqueue_all_to_all(self); /* refused if the error arrived first */
    return expect_error(self, ncclRemoteError);
  }
  EXPECT(ncclCommAbort(self.comm) == ncclSuccess);
  self.comm = nullptr;
}

void wrong_calls(rank &self) {
  int local = 0;
  EXPECT(ncclSend(&local, 1, ncclInt32, 0, self.comm, self.stream) == ncclInvalidArgument);
  EXPECT(ncclSend(self.memory, 1, ncclInt32, RANKS, self.comm, self.stream) == ncclInvalidArgument);
  EXPECT(ncclGroupStart() == ncclSuccess);
  EXPECT(ncclRecv(self.memory, 17, ncclInt32, 0, self.comm, self.stream) == ncclInvalidArgument);
  EXPECT(ncclGroupEnd() == ncclInvalidArgument && ncclGroupEnd() == ncclInvalidUsage);
}

void receive_from_nobody() {
  setenv("EMULATED_TIMEOUT", "1", 1);
  ncclUniqueId id;
  ncclComm_t comm;
  int *memory = pinned<int>(1);
  ncclGetUniqueId(&id);
  ncclCommInitRank(&comm, 1, id, 0);
  ncclRecv(memory, 1, ncclInt32, 0, comm, nullptr);
  cudaStreamSynchronize(nullptr);
}

/* ---- NCCL's calls that make and end communicators ---- */

/* Enqueues an allreduce that gives the largest of the ranks' numbers. */
ncclResult_t enqueue_largest(const rank &self, int value) {
  self.memory[0] = value;
  self.memory[1] = 0;
  return ncclAllReduce(self.memory, self.memory + 1, 1, ncclInt32, ncclMax, self.comm, self.stream);
}

bool equals_later(const rank &self, int expected) {
  EXPECT(cudaStreamSynchronize(self.stream) == cudaSuccess);
  return self.memory[1] == expected;
}

void revoke_communicator(rank &self) {
  EXPECT(ncclCommRevoke(self.comm, 1) == ncclInvalidArgument);
  EXPECT(ncclCommRevoke(self.comm, 0) == ncclSuccess);
  EXPECT(enqueue_largest(self, self.number) == ncclRemoteError);
}

/* The abort of one rank ends the wait of the other ranks. */
void split_that_fails(rank &self) {
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
  EXPECT(ncclGroupStart() == ncclSuccess && enqueue_largest(self, self.number) == ncclSuccess);
  EXPECT(ncclCommFinalize(self.comm) == ncclInvalidUsage && ncclGroupEnd() == ncclInvalidUsage);
  EXPECT(enqueue_largest(self, self.number) == ncclSuccess);
  EXPECT(ncclCommFinalize(self.comm) == ncclSuccess && self.memory[1] == RANKS - 1);
  EXPECT(enqueue_largest(self, self.number) == ncclInvalidArgument);
  EXPECT(ncclCommSplit(self.comm, 0, 0, &none, nullptr) == ncclInvalidArgument && !none);
  EXPECT(ncclCommFinalize(self.comm) == ncclInvalidArgument);
}

/* ncclCommFinalize also waits for a collective that another thread has begun. */
void finalize_what_runs(rank &self) {
  static std::atomic<int> waiting{0};
  if (self.number) {
    EXPECT(enqueue_largest(self, self.number) == ncclSuccess);
    cudaStreamQuery(self.stream); /* starts the operation */
    waiting++;
    EXPECT(ncclCommFinalize(self.comm) == ncclSuccess && self.memory[1] == RANKS - 1);
    return;
  }
  while (waiting < RANKS - 1)
    std::this_thread::yield();
  EXPECT(enqueue_largest(self, 0) == ncclSuccess && equals_later(self, RANKS - 1));
}

/* Registers a window on each rank. Memory of another kind or size is refused. */
void register_windows(rank &self) {
  void *memory = nullptr;
  ncclWindow_t made = nullptr;
  EXPECT(ncclMemAlloc(&memory, 64) == ncclSuccess);
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

void test_nccl() {
  for (const auto &body :
       {crossed_streams, one_rank_waits, send_mismatched, broken_link, abort_one, wrong_calls})
    on_ranks(body);
  EXPECT(aborts_with(receive_from_nobody, "nothing has moved"));
}

void test_communicators() {
  for (const auto &body :
       {split_that_fails, revoke_communicator, finalize, finalize_what_runs, register_windows})
    on_ranks(body);
  EXPECT(aborts_with(free_a_window, "gives back the memory of a window"));
  EXPECT(aborts_with(destroy_with_window, "that has windows"));
  EXPECT(aborts_with(window_of_old, "NCCL 22600 has no ncclCommWindowRegister"));
}
