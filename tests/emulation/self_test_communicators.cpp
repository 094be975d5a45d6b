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

ncclConfig_t config_with(int blocking) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = blocking;
  return config;
}

ncclResult_t join(rank &self, int blocking) {
  ncclConfig_t config = config_with(blocking);
  return ncclCommInitRankConfig(&self.comm, RANKS, self.id, self.number, &config);
}

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

void expect_place(ncclComm_t comm, int ranks, int number, int device) {
  int count = -1, mine = -1, on = -1;
  EXPECT(ncclCommCount(comm, &count) == ncclSuccess && count == ranks);
  EXPECT(ncclCommUserRank(comm, &mine) == ncclSuccess && mine == number);
  EXPECT(ncclCommCuDevice(comm, &on) == ncclSuccess && on == device);
}

/* The largest of the ranks' numbers; it exceeds 32 bits, and a double would round it. */
constexpr long long LARGE = (1LL << 53) + 1;
ncclResult_t enqueue_largest(const rank &self, long long value) {
  self.memory[0] = value;
  self.memory[1] = 0;
  return ncclAllReduce(self.memory, self.memory + 1, 1, ncclInt64, ncclMax, self.comm, self.stream);
}

bool reaches(const rank &self, long long expected) {
  EXPECT(cudaStreamSynchronize(self.stream) == cudaSuccess);
  return self.memory[1] == expected;
}

/* Returns the sum over `comm` of the ranks' numbers in its parent. */
long long sum_of_numbers(const rank &self, ncclComm_t comm) {
  self.memory[0] = self.number;
  EXPECT(ncclAllReduce(self.memory, self.memory + 1, 1, ncclInt64, ncclSum, comm, self.stream) ==
         ncclSuccess);
  EXPECT(cudaStreamSynchronize(self.stream) == cudaSuccess);
  return self.memory[1];
}

void configured(rank &self) {
  ncclResult_t error = ncclInProgress;
  EXPECT(join(self, 0) == ncclInProgress);
  EXPECT(ncclCommGetAsyncError(self.comm, &error) == ncclSuccess && error == ncclSuccess);
  expect_place(self.comm, RANKS, self.number, self.number % 2);
  EXPECT(enqueue_largest(self, LARGE - RANKS + self.number) == ncclSuccess);
  EXPECT(reaches(self, LARGE - 1));
  EXPECT(enqueue_largest(self, -LARGE - self.number) == ncclSuccess && reaches(self, -LARGE));
}

void configured_to_block(rank &self) {
  EXPECT(join(self, self.number % 2 ? NCCL_CONFIG_UNDEF_INT : 1) == ncclSuccess);
  EXPECT(enqueue_largest(self, self.number) == ncclSuccess && reaches(self, RANKS - 1));
}

void wrong_configurations() {
  ncclComm_t comm = nullptr;
  ncclConfig_t empty = {}, both = config_with(2);
  EXPECT(ncclCommInitRankConfig(&comm, 1, new_id(), 0, &empty) == ncclInvalidArgument);
  EXPECT(ncclCommInitRankConfig(&comm, 1, new_id(), 0, &both) == ncclInvalidArgument && !comm);
  EXPECT(ncclCommInitRankConfig(&comm, 1, new_id(), 0, nullptr) == ncclSuccess);
  EXPECT(ncclCommSplit(comm, 0, 0, &comm, &empty) == ncclInvalidArgument);
  EXPECT(ncclCommSplit(comm, -2, 0, &comm, nullptr) == ncclInvalidArgument);
  EXPECT(ncclCommSplit(comm, 0, 0, nullptr, nullptr) == ncclInvalidArgument);
  EXPECT(ncclCommDestroy(comm) == ncclSuccess);
}

/* Makes all ranks of this thread, on the given devices or on the first ones. */
std::vector<rank> one_thread(const int *devices) {
  std::vector<rank> ranks;
  ncclComm_t comms[RANKS] = {};
  EXPECT(ncclCommInitAll(comms, RANKS, devices) == ncclSuccess);
  for (int number = 0; number < RANKS; number++) {
    int device = devices ? devices[number] : number;
    EXPECT(cudaSetDevice(device) == cudaSuccess);
    ranks.emplace_back(number, ncclUniqueId{});
    ranks.back().comm = comms[number];
    expect_place(comms[number], RANKS, number, device);
  }
  EXPECT(cudaSetDevice(0) == cudaSuccess);
  return ranks;
}

void largest_of_one_thread(const std::vector<rank> &ranks, bool grouped) {
  if (grouped)
    EXPECT(ncclGroupStart() == ncclSuccess);
  for (const rank &self : ranks)
    EXPECT(enqueue_largest(self, LARGE + self.number) == ncclSuccess);
  for (const rank &self : ranks)
    EXPECT(!grouped || !self.memory[1]);
  if (grouped)
    EXPECT(ncclGroupEnd() == ncclSuccess);
  for (size_t i = ranks.size(); i--;)
    EXPECT(reaches(ranks[i], LARGE + RANKS - 1));
}

/* Each rank sends to the next, in one group: one operation of each communicator. */
void ring_of_one_thread(const std::vector<rank> &ranks) {
  EXPECT(ncclGroupStart() == ncclSuccess);
  for (const rank &self : ranks) {
    int next = (self.number + 1) % RANKS, previous = (self.number + RANKS - 1) % RANKS;
    self.memory[0] = 100 + self.number;
    EXPECT(ncclSend(self.memory, 1, ncclInt64, next, self.comm, self.stream) == ncclSuccess);
    EXPECT(ncclRecv(self.memory + 1, 1, ncclInt64, previous, self.comm, self.stream) ==
           ncclSuccess);
  }
  EXPECT(ncclGroupEnd() == ncclSuccess);
  for (const rank &self : ranks)
    EXPECT(reaches(self, 100 + (self.number + RANKS - 1) % RANKS));
}

void all_by_one_thread() {
  const int others[RANKS] = {2, 0, 3, 1}, *lists[] = {nullptr, others};
  setenv("EMULATED_DEVICES", "4", 1);
  for (const char *streams : {"deferred", "eager"})
    for (const int *devices : lists) {
      setenv("EMULATED_STREAMS", streams, 1);
      std::vector<rank> ranks = one_thread(devices);
      largest_of_one_thread(ranks, true);
      largest_of_one_thread(ranks, false);
      ring_of_one_thread(ranks);
      for (rank &self : ranks)
        self.end();
    }
  unsetenv("EMULATED_STREAMS");
  unsetenv("EMULATED_DEVICES");
}

void wrong_devices() {
  ncclComm_t comms[3] = {};
  const int twice[] = {1, 1}, missing[] = {0, 2}, negative[] = {-1};
  EXPECT(ncclCommInitAll(comms, 2, twice) == ncclInvalidUsage);
  EXPECT(ncclCommInitAll(comms, 2, missing) == ncclInvalidArgument);
  EXPECT(ncclCommInitAll(comms, 1, negative) == ncclInvalidArgument);
  EXPECT(ncclCommInitAll(comms, 3, nullptr) == ncclInvalidArgument);
  EXPECT(ncclCommInitAll(comms, 0, nullptr) == ncclInvalidArgument);
  EXPECT(ncclCommInitAll(nullptr, 1, nullptr) == ncclInvalidArgument && !comms[0]);
}

/* Splits even and odd ranks, reversed by their keys; and again with equal keys. */
void split(rank &self) {
  ncclComm_t half = nullptr, same = nullptr;
  int color = self.number % 2, place = self.number / 2;
  EXPECT(join(self, 1) == ncclSuccess);
  EXPECT(ncclCommSplit(self.comm, color, -self.number, &half, nullptr) == ncclSuccess);
  expect_place(half, RANKS / 2, RANKS / 2 - 1 - place, color);
  EXPECT(sum_of_numbers(self, half) == 2 + 2 * color);
  EXPECT(ncclCommSplit(self.comm, color, 7, &same, nullptr) == ncclSuccess);
  expect_place(same, RANKS / 2, place, color);
  EXPECT(ncclCommDestroy(half) == ncclSuccess);
  EXPECT(sum_of_numbers(self, same) == 2 + 2 * color && sum_of_numbers(self, self.comm) == 6);
  EXPECT(ncclCommDestroy(same) == ncclSuccess);
}

void split_without_one(rank &self) {
  ncclComm_t rest = self.comm;
  bool out = self.number == 1;
  EXPECT(join(self, 1) == ncclSuccess);
  EXPECT(ncclCommSplit(self.comm, out ? NCCL_SPLIT_NOCOLOR : 5, 0, &rest, nullptr) == ncclSuccess);
  EXPECT(out == !rest);
  if (out)
    return;
  EXPECT(sum_of_numbers(self, rest) == 5);
  EXPECT(ncclCommDestroy(rest) == ncclSuccess);
}

void shrink(rank &self) {
  ncclComm_t rest = nullptr;
  int excluded[] = {2};
  EXPECT(join(self, 1) == ncclSuccess);
  if (self.number == 2)
    return;
  EXPECT(ncclCommShrink(self.comm, excluded, 0, &rest, nullptr, 0) == ncclInvalidArgument);
  EXPECT(ncclCommShrink(self.comm, excluded, 1, &rest, nullptr, 1) == ncclInvalidArgument);
  EXPECT(ncclCommShrink(self.comm, excluded, 1, &rest, nullptr, 0) == ncclSuccess);
  expect_place(rest, RANKS - 1, self.number - (self.number > 2), self.number % 2);
  EXPECT(sum_of_numbers(self, rest) == 4);
  EXPECT(ncclCommDestroy(rest) == ncclSuccess);
}

void revoke(rank &self) {
  EXPECT(join(self, 1) == ncclSuccess);
  EXPECT(ncclCommRevoke(self.comm, 1) == ncclInvalidArgument);
  EXPECT(ncclCommRevoke(self.comm, 0) == ncclSuccess);
  EXPECT(enqueue_largest(self, self.number) == ncclRemoteError);
}

/* A split without a configuration has its parent's. */
void split_without_waiting(rank &self) {
  ncclComm_t heir = nullptr, other = nullptr;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  EXPECT(join(self, 0) == ncclInProgress);
  EXPECT(ncclCommSplit(self.comm, 0, 0, &heir, nullptr) == ncclInProgress);
  EXPECT(ncclCommSplit(heir, 0, 0, &other, &config) == ncclSuccess);
  EXPECT(sum_of_numbers(self, heir) == 6 && sum_of_numbers(self, other) == 6);
  EXPECT(ncclCommDestroy(heir) == ncclSuccess && ncclCommDestroy(other) == ncclSuccess);
}

/* A rank that aborts releases the others. */
void split_that_fails(rank &self) {
  EXPECT(join(self, 1) == ncclSuccess);
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
  EXPECT(join(self, 1) == ncclSuccess);
  EXPECT(ncclGroupStart() == ncclSuccess && enqueue_largest(self, self.number) == ncclSuccess);
  EXPECT(ncclCommFinalize(self.comm) == ncclInvalidUsage && ncclGroupEnd() == ncclInvalidUsage);
  EXPECT(enqueue_largest(self, self.number) == ncclSuccess);
  EXPECT(ncclCommFinalize(self.comm) == ncclSuccess && self.memory[1] == RANKS - 1);
  EXPECT(enqueue_largest(self, self.number) == ncclInvalidArgument);
  EXPECT(ncclCommSplit(self.comm, 0, 0, &none, nullptr) == ncclInvalidArgument && !none);
  EXPECT(ncclCommFinalize(self.comm) == ncclInvalidArgument);
}

/* Joins ranks of one thread, whose calls would wait for each other outside of a group. */
ncclResult_t join_in_a_group(std::vector<rank> &ranks) {
  EXPECT(ncclGroupStart() == ncclSuccess);
  for (rank &self : ranks)
    EXPECT(join(self, 0) == ncclSuccess && !self.comm);
  return ncclGroupEnd();
}

void made_in_a_group() {
  ncclUniqueId id = new_id();
  ncclComm_t halves[RANKS] = {};
  std::vector<rank> ranks;
  for (int number = 0; number < RANKS; number++)
    ranks.emplace_back(number, id);
  EXPECT(join_in_a_group(ranks) == ncclInProgress);
  EXPECT(ncclGroupStart() == ncclSuccess);
  for (rank &self : ranks) {
    expect_place(self.comm, RANKS, self.number, 0);
    EXPECT(enqueue_largest(self, self.number) == ncclSuccess);
    EXPECT(ncclCommSplit(self.comm, self.number % 2, 0, &halves[self.number], nullptr) ==
           ncclSuccess);
  }
  EXPECT(!halves[0] && ncclGroupEnd() == ncclInProgress);
  for (rank &self : ranks) {
    EXPECT(reaches(self, RANKS - 1));
    expect_place(halves[self.number], RANKS / 2, self.number / 2, 0);
    EXPECT(ncclCommDestroy(halves[self.number]) == ncclSuccess);
    self.end();
  }
}

/* A group with a wrong call makes no communicator. */
void wrong_in_a_group() {
  ncclComm_t comm = nullptr;
  EXPECT(ncclGroupStart() == ncclSuccess);
  EXPECT(ncclCommInitRank(&comm, 2, new_id(), 0) == ncclSuccess);
  EXPECT(ncclCommInitRank(&comm, 2, new_id(), 2) == ncclInvalidArgument);
  EXPECT(ncclGroupEnd() == ncclInvalidArgument && !comm);
  EXPECT(ncclGroupStart() == ncclSuccess && ncclGroupEnd() == ncclSuccess);
}

/* A collective that another thread has begun is over too when the communicator is final. */
void finalize_what_runs(rank &self) {
  static std::atomic<int> waiting{0};
  EXPECT(join(self, 1) == ncclSuccess);
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
  EXPECT(join(self, 1) == ncclSuccess && ncclMemAlloc(&memory, 64) == ncclSuccess);
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
void memory() {
  void *memory = nullptr, *copy = pinned<long long>(1);
  ncclComm_t comm = nullptr;
  EXPECT(ncclMemAlloc(&memory, sizeof(long long)) == ncclSuccess);
  EXPECT(cudaMemset(memory, 1, sizeof(long long)) == cudaSuccess);
  EXPECT(ncclCommInitAll(&comm, 1, nullptr) == ncclSuccess);
  EXPECT(ncclAllReduce(memory, copy, 1, ncclInt64, ncclSum, comm, nullptr) == ncclSuccess);
  EXPECT(cudaDeviceSynchronize() == cudaSuccess);
  EXPECT(*static_cast<long long *>(copy) == 0x0101010101010101);
  EXPECT(ncclCommDestroy(comm) == ncclSuccess && ncclMemFree(memory) == ncclSuccess);
  EXPECT(ncclMemFree(memory) == ncclUnhandledCudaError && cudaGetLastError() != cudaSuccess);
  EXPECT(cudaFreeHost(copy) == cudaSuccess);
}

} // namespace

void test_communicators() {
  for (const auto &body :
       {configured, configured_to_block, split, split_without_one, split_without_waiting,
        split_that_fails, shrink, revoke, finalize, finalize_what_runs, window})
    on_ranks(body);
  EXPECT(aborts_with(free_a_window, "gives back the memory of a window"));
  EXPECT(aborts_with(destroy_with_window, "that has windows"));
  EXPECT(aborts_with(window_of_old, "NCCL 22600 has no ncclCommWindowRegister"));
  wrong_configurations();
  all_by_one_thread();
  wrong_devices();
  made_in_a_group();
  wrong_in_a_group();
  memory();
}
