/*
 * Runs the threads of a CTA as fibers, which wait for each other in barriers and warp collectives.
 * The last fiber to arrive computes the results of all fibers.
 */
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "emulation_device.h"
#include "inside.h"

__thread uint3 threadIdx, blockIdx;
__thread dim3 blockDim, gridDim;

namespace emulation {

namespace {

constexpr unsigned LANES = 32, MAX_THREADS = 1024;

/* The value that a shuffle reads from a lane that does not take part. CUDA leaves this value
 * undefined. Here it is a NaN, as a float and as a double, so that a test notices its use. */
constexpr uint64_t NOBODY = 0xfffdeadbfffdeadb;

const char *name(collective kind) {
  static const char *const names[] = {"__syncwarp", "__ballot_sync", "a shuffle"};
  return names[static_cast<int>(kind)];
}

struct cuda_thread {
  std::unique_ptr<fiber> stack;
  uint3 index;
  unsigned number; /* its number in the block */
  uint64_t value, result;
  unsigned source;
};

/* A group of lanes that wait for the other lanes of their mask. */
struct lane_group {
  collective kind;
  unsigned mask, arrived;
};

struct warp {
  unsigned alive;
  std::vector<lane_group> groups;
};

/* The order in which threads and CTAs run. */
class order {
public:
  order() {
    const char *text = getenv("EMULATED_ORDER"), *seed = getenv("EMULATED_SEED");
    if (text && !strcmp(text, "forward"))
      kind_ = forward;
    else if (text && !strcmp(text, "backward"))
      kind_ = backward;
    else if (text && *text && strcmp(text, "shuffle"))
      fatal("EMULATED_ORDER is '%s': not forward, backward or shuffle", text);
    random_.seed(seed ? static_cast<unsigned>(atol(seed)) : 1);
  }

  size_t choose(size_t count) {
    return kind_ == forward ? 0 : kind_ == backward ? count - 1 : random_() % count;
  }

  std::vector<size_t> arrange(size_t count) {
    std::vector<size_t> all(count);
    std::iota(all.begin(), all.end(), size_t{0});
    if (kind_ == backward)
      std::reverse(all.begin(), all.end());
    if (kind_ == shuffle)
      std::shuffle(all.begin(), all.end(), random_);
    return all;
  }

private:
  enum { forward, backward, shuffle } kind_ = shuffle;
  std::minstd_rand random_;
};

/* The threads that may run, with one bit per thread. */
class ready_set {
public:
  void insert(unsigned number) {
    words_[number / 64] |= uint64_t{1} << number % 64;
    count_++;
  }
  size_t count() const { return count_; }

  /* Removes and returns the n-th thread. */
  unsigned remove_nth(size_t n) {
    unsigned word = 0;
    for (size_t here; n >= (here = static_cast<size_t>(__builtin_popcountll(words_[word]))); word++)
      n -= here;
    uint64_t rest = words_[word];
    for (; n; n--)
      rest &= rest - 1;
    words_[word] &= ~(rest & -rest);
    count_--;
    return word * 64 + static_cast<unsigned>(__builtin_ctzll(rest));
  }

private:
  uint64_t words_[MAX_THREADS / 64] = {};
  size_t count_ = 0;
};

/* The fibers of an OS thread, which all blocks on that OS thread use, and the block that runs
 * now. */
class processor {
public:
  void run(dim3 grid, dim3 block, const std::function<void()> &thread);
  uint64_t wait_for_lanes(collective kind, unsigned mask, uint64_t value, unsigned source);
  void wait_for_block();
  unsigned current() const { return current_->number; }
  bool inside() const { return current_; }

private:
  static void run_fiber(void *self);
  void prepare(dim3 block);
  void run_block(order &by);
  void wait() { switch_context(*current_->stack, scheduler_); }
  lane_group &find_group(warp &of, collective kind, unsigned mask, unsigned lane);
  void finish_if_complete(unsigned warp_number, lane_group &group);
  uint64_t result(const lane_group &group, const cuda_thread *lanes, unsigned lane) const;
  void exit_thread();
  void check_barrier() const;
  [[noreturn]] void explain_deadlock() const;

  context scheduler_;
  std::vector<cuda_thread> threads_;
  std::vector<warp> warps_;
  ready_set ready_;
  unsigned alive_ = 0, exited_ = 0;
  cuda_thread *current_ = nullptr;
  const std::function<void()> *kernel_ = nullptr;

  unsigned barrier_arrived_ = 0;
  std::vector<unsigned> barrier_waiting_;
};

thread_local processor here;

/* The function of a fiber, which runs one CUDA thread after another. */
void processor::run_fiber(void *self) {
  auto *me = static_cast<processor *>(self);
  me->current_->stack->begin(me->scheduler_);
  for (;;) {
    (*me->kernel_)();
    me->exit_thread();
    me->wait();
  }
}

void processor::prepare(dim3 block) {
  size_t count = size_t{block.x} * block.y * block.z;
  while (threads_.size() < count) {
    threads_.emplace_back();
    threads_.back().stack = std::make_unique<fiber>(run_fiber, this);
    threads_.back().number = static_cast<unsigned>(threads_.size() - 1);
  }
  for (unsigned i = 0; i < count; i++)
    threads_[i].index = {i % block.x, i / block.x % block.y, i / block.x / block.y};
  warps_.resize((count + LANES - 1) / LANES);
}

void processor::run(dim3 grid, dim3 block, const std::function<void()> &thread) {
  if (inside())
    fatal("a kernel was launched from inside a kernel");
  prepare(block);
  kernel_ = &thread;
  gridDim = grid;
  blockDim = block;
  order by;
  for (size_t i : by.arrange(size_t{grid.x} * grid.y * grid.z)) {
    blockIdx = {static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                static_cast<unsigned>(i / grid.x / grid.y)};
    run_block(by);
  }
}

void processor::run_block(order &by) {
  alive_ = blockDim.x * blockDim.y * blockDim.z;
  exited_ = 0;
  for (unsigned i = 0; i < alive_; i++)
    ready_.insert(i);
  for (size_t i = 0; i < warps_.size(); i++) {
    unsigned lanes = std::min<unsigned>(LANES, alive_ - static_cast<unsigned>(i) * LANES);
    warps_[i].alive = lanes == LANES ? ~0u : (1u << lanes) - 1;
  }
  while (alive_) {
    if (!ready_.count())
      explain_deadlock();
    current_ = &threads_[ready_.remove_nth(by.choose(ready_.count()))];
    threadIdx = current_->index;
    switch_context(scheduler_, *current_->stack);
    current_ = nullptr;
  }
}

/* Returns the group of waiting lanes that `lane` belongs to. Lanes of one mask must all call the
 * same collective with the same mask; lanes of disjoint masks may call different ones. */
lane_group &processor::find_group(warp &of, collective kind, unsigned mask, unsigned lane) {
  if (!(mask >> lane & 1))
    fatal("%s: lane %u is not in its own mask %08x", name(kind), lane, mask);
  for (lane_group &group : of.groups) {
    if (!(group.mask & mask))
      continue;
    if (group.mask != mask || group.kind != kind)
      fatal("divergent warp: lane %u is in %s with mask %08x, while lanes %08x are in %s with "
            "mask %08x",
            lane, name(kind), mask, group.arrived, name(group.kind), group.mask);
    return group;
  }
  of.groups.push_back({kind, mask, 0});
  return of.groups.back();
}

uint64_t processor::result(const lane_group &group, const cuda_thread *lanes, unsigned lane) const {
  if (group.kind == collective::shuffle) {
    unsigned source = lanes[lane].source;
    return source < LANES && group.arrived >> source & 1 ? lanes[source].value : NOBODY;
  }
  uint64_t ballot = 0;
  for (unsigned rest = group.arrived; rest; rest &= rest - 1) {
    unsigned i = static_cast<unsigned>(__builtin_ctz(rest));
    ballot |= (lanes[i].value & 1) << i;
  }
  return ballot;
}

/* Ends the collective when all lanes of its mask have arrived. As on the hardware, lanes that have
 * exited are not waited for. */
void processor::finish_if_complete(unsigned warp_number, lane_group &group) {
  warp &of = warps_[warp_number];
  if (group.arrived != (group.mask & of.alive))
    return;
  cuda_thread *lanes = &threads_[size_t{warp_number} * LANES];
  uint64_t common = 0;
  if (group.kind != collective::shuffle)
    common = result(group, lanes, 0);
  for (unsigned rest = group.arrived; rest; rest &= rest - 1) {
    unsigned lane = static_cast<unsigned>(__builtin_ctz(rest));
    lanes[lane].result = group.kind == collective::shuffle ? result(group, lanes, lane) : common;
    ready_.insert(lanes[lane].number);
  }
  of.groups.erase(of.groups.begin() + (&group - of.groups.data()));
}

uint64_t processor::wait_for_lanes(collective kind, unsigned mask, uint64_t value,
                                   unsigned source) {
  unsigned lane = current_->number % LANES, warp_number = current_->number / LANES;
  current_->value = value;
  current_->source = source;
  lane_group &group = find_group(warps_[warp_number], kind, mask, lane);
  group.arrived |= 1u << lane;
  cuda_thread *me = current_;
  finish_if_complete(warp_number, group);
  wait();
  return me->result;
}

void processor::check_barrier() const {
  if (barrier_arrived_ && exited_)
    fatal("__syncthreads was reached by only part of the CTA: %u of its threads wait there, %u "
          "have exited",
          barrier_arrived_, exited_);
}

void processor::wait_for_block() {
  barrier_arrived_++;
  check_barrier();
  barrier_waiting_.push_back(current_->number);
  if (barrier_arrived_ == alive_) {
    for (unsigned number : barrier_waiting_)
      ready_.insert(number);
    barrier_waiting_.clear();
    barrier_arrived_ = 0;
  }
  wait();
}

void processor::exit_thread() {
  unsigned lane = current_->number % LANES, warp_number = current_->number / LANES;
  alive_--;
  exited_++;
  check_barrier();
  warp &of = warps_[warp_number];
  of.alive &= ~(1u << lane);
  for (lane_group &group : of.groups)
    if (group.mask >> lane & 1) {
      finish_if_complete(warp_number, group);
      break;
    }
}

void processor::explain_deadlock() const {
  for (size_t i = 0; i < warps_.size(); i++)
    for (const lane_group &group : warps_[i].groups)
      fatal(
          "deadlock: in warp %zu of the CTA lanes %08x wait in %s with mask %08x, whose lanes %08x "
          "do not arrive; %u threads wait in a barrier",
          i, group.arrived, name(group.kind), group.mask,
          group.mask & warps_[i].alive & ~group.arrived, barrier_arrived_);
  fatal("deadlock: %u of %u threads wait in __syncthreads", barrier_arrived_, alive_);
}

} // namespace

uint64_t wait_for_warp(collective kind, unsigned mask, uint64_t value, unsigned source) {
  return here.wait_for_lanes(kind, mask, value, source);
}

void wait_for_cta() { here.wait_for_block(); }

unsigned lane() { return here.current() % LANES; }

void run_grid(dim3 grid, dim3 block, const std::function<void()> &thread) {
  here.run(grid, block, thread);
}

} // namespace emulation
