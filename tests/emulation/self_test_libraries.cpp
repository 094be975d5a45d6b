/*
 * NCCL between threads.
 */
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "emulation.h"
#include "nccl.h"
#include "self_test.h"

namespace {

constexpr int RANKS = 3;

struct rank {
  int number;
  ncclComm_t comm;
  cudaStream_t stream;
  int *memory; /* 16 numbers */
};

/* NCCL reports the error while the kernel still spins; the rank's abort ends it. */
void expect_error(rank &of, ncclResult_t expected) {
  ncclResult_t error = ncclSuccess;
  while (!error) {
    cudaStreamQuery(of.stream); /* moves it */
    EXPECT(ncclCommGetAsyncError(of.comm, &error) == ncclSuccess);
  }
  EXPECT(error == expected);
  EXPECT(ncclSend(of.memory, 1, ncclInt32, 0, of.comm, of.stream) != ncclSuccess);
  EXPECT(ncclCommAbort(of.comm) == ncclSuccess);
  of.comm = nullptr;
}

void live(int number, ncclUniqueId id, const std::function<void(rank &)> &body) {
  rank self = {number, nullptr, nullptr, nullptr};
  EXPECT(cudaSetDevice(number % 2) == cudaSuccess);
  EXPECT(cudaStreamCreateWithFlags(&self.stream, cudaStreamNonBlocking) == cudaSuccess);
  self.memory = pinned<int>(16);
  EXPECT(ncclCommInitRank(&self.comm, RANKS, id, number) == ncclSuccess);
  body(self);
  EXPECT(cudaStreamSynchronize(self.stream) == cudaSuccess);
  if (self.comm)
    EXPECT(ncclCommDestroy(self.comm) == ncclSuccess);
  EXPECT(cudaStreamDestroy(self.stream) == cudaSuccess);
  EXPECT(cudaFreeHost(self.memory) == cudaSuccess);
}

/* Runs the body as each rank, each on a thread. */
void on_ranks(const std::function<void(rank &)> &body) {
  ncclUniqueId id;
  EXPECT(ncclGetUniqueId(&id) == ncclSuccess);
  std::vector<std::thread> threads;
  for (int number = 0; number < RANKS; number++)
    threads.emplace_back(live, number, id, body);
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

/* The ranks wait for their two streams in different orders. */
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

/* The device makes progress while the host of a rank does something else. */
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

void mismatch(rank &self) {
  if (self.number == 0)
    EXPECT(ncclSend(self.memory, 2, ncclInt32, 1, self.comm, self.stream) == ncclSuccess);
  else /* refused where the error was faster */
    ncclRecv(self.memory, 1, ncclInt32, self.number == 1 ? 0 : 1, self.comm, self.stream);
  expect_error(self, self.number < 2 ? ncclInvalidArgument : ncclRemoteError);
}

void broken_link(rank &self) {
  if (self.number == 2)
    emulation_nccl_break(self.comm);
  enqueue_all_to_all(self); /* refused where the error was faster */
  expect_error(self, ncclRemoteError);
}

/* The others get an error when a rank aborts. */
void abort_one(rank &self) {
  if (self.number) {
    enqueue_all_to_all(self); /* refused where the error was faster */
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

} // namespace

void test_nccl() {
  for (const auto &body :
       {crossed_streams, one_rank_waits, mismatch, broken_link, abort_one, wrong_calls})
    on_ranks(body);
  EXPECT(aborts_with(receive_from_nobody, "nothing has moved"));
}
