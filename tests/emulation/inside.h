/* The internal interface of the emulated device: operations, captures, devices, memory, blocks,
 * fibers. */
#ifndef EMULATION_INSIDE_H
#define EMULATION_INSIDE_H

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <stddef.h>
#include <thread>
#include <vector>

#ifndef __x86_64__
#include <ucontext.h>
#endif

#include "cuda_runtime_api.h"
#include "emulation.h"

/* ---- AddressSanitizer, for which gcc and clang define different macros ---- */

#ifndef __has_feature
#define __has_feature(name) 0
#endif

#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#define EMULATION_ASAN 1
#else
#define EMULATION_ASAN 0
#endif

/*
 * ---- Operations ----
 *
 * Work on streams is a graph of operations. They run as late as possible, which is when the host
 * waits. One mutex guards the graph. It is not held while an operation runs.
 */

struct ncclComm;

namespace emulation {

struct operation;
struct capture;
using operation_ptr = std::shared_ptr<operation>;
using stream_ptr = std::shared_ptr<CUstream_st>;
using lock = std::unique_lock<std::mutex>;

/* The work of an operation. A graph keeps it for its next launch. */
struct work {
  /* Starts the work, without the lock. Returns true if the work is done. Returns false if the work
   * has only begun and finish_operation() will be called later. */
  std::function<bool(const operation_ptr &)> start;
  /* Both functions are called with the lock held. `enqueued` is called when the operation enters a
   * queue. `needs` is called after the operation has begun. It returns the known operations of
   * other ranks that must run before this one can end. */
  std::function<void(const operation_ptr &)> enqueued;
  std::function<std::vector<operation_ptr>(const operation &)> needs;
  /* The communicator that a graph with this operation keeps in use, or NULL. */
  const ncclComm *comm = nullptr;
};

/* Makes work that is done when the function returns. */
work make_work(std::function<void()> function);

struct operation {
  work what;
  stream_ptr stream; /* NULL if the operation is done, or is a node of a launched graph */
  std::vector<operation_ptr> after;
  enum { queued, running, done } state = queued;
  std::chrono::steady_clock::time_point ended;
};

} // namespace emulation

struct CUstream_st {
  CUstream_st(int on, bool blocks, bool as_default = false)
      : device(on), blocking(blocks), is_default(as_default) {}

  const int device;
  const bool blocking; /* the stream is ordered with the device's default stream */
  const bool is_default;
  bool destroyed = false; /* the handle is invalid, but queued work still runs */
  std::deque<emulation::operation_ptr> queue;
  emulation::operation_ptr last;
  std::shared_ptr<emulation::capture> capturing;
  std::vector<size_t> capture_tail; /* the nodes on which the next captured node depends */
};

struct CUevent_st {
  int device;
  unsigned flags;
  emulation::operation_ptr recorded;
  std::shared_ptr<emulation::capture> captured; /* the capture in which the event was recorded,
                                                 * after capture_nodes */
  std::vector<size_t> capture_nodes;
};

namespace emulation {

std::mutex &guard();

/* Enqueues the work. It runs after the operations `after`, after earlier work of the stream, and
 * after work of other streams with which CUDA orders this stream. */
operation_ptr enqueue(lock &held, const stream_ptr &stream, work what,
                      std::vector<operation_ptr> after = {});
/* Adds an operation of a launched graph, which belongs to no stream. */
operation_ptr add_node(work what, std::vector<operation_ptr> after);

/* Runs all operations that `wanted` needs, and `wanted` itself unless it is NULL. If no operation
 * can run, the process ends with a message that the host waits for `whom`. */
void complete_operation(lock &held, const operation_ptr &wanted,
                        const char *whom = "an operation of another thread or rank");
/* Runs one operation that `wanted` needs, if any of them can run now. */
bool advance_operation(lock &held, const operation_ptr &wanted);
bool is_done(const operation_ptr &wanted);
/* Finishes an operation whose start() has returned false. */
void finish_operation(const operation_ptr &begun);
/* Wakes all threads that sleep in wait_for_others(). */
void wake_others();
/* Sleeps until any operation has ended. Ends the process after EMULATED_TIMEOUT. */
void wait_for_others(lock &held, const char *whom);

/* Returns the stream of a handle, or NULL. */
stream_ptr find_stream(cudaStream_t handle);
std::vector<stream_ptr> streams_of(int device);
void synchronise_device(lock &held, int device,
                        const char *whom = "an operation of another thread or rank");

/* Returns the value of an environment variable, or `otherwise` if it is not set. */
long read_setting(const char *name, long otherwise);

/* ---- Stream capture and graphs ---- */

struct graph_node {
  work what;
  std::vector<size_t> after;
};

struct capture {
  stream_ptr origin;
  std::vector<stream_ptr> streams;
  std::vector<graph_node> nodes;
  cudaStreamCaptureMode mode;
  std::thread::id owner;
  bool invalid = false;
};

/* Enqueues the work after the stream's last operation and after `after`. If the stream is being
 * captured, adds a node to its capture instead. All work on streams goes through this function. The
 * caller holds the lock. */
cudaError_t submit(lock &held, const stream_ptr &stream, work what,
                   operation_ptr *submitted = nullptr, const operation_ptr &after = nullptr);

/* True if a graph, or the operations of a launched graph, contain calls on the communicator. NCCL
 * ends a communicator only after the last graph with calls on it has ended. The caller holds the
 * lock. */
bool is_in_graph(const ncclComm *comm);

/* Returns the error of a call that waits on a stream that is being captured, and ends its
 * capture. */
cudaError_t refuse_capturing(CUstream_st &stream);

/* Record an event, or wait for an event, on a stream that is being captured. */
cudaError_t record_in_capture(CUevent_st &event, const stream_ptr &stream);
cudaError_t wait_in_capture(const stream_ptr &stream, const CUevent_st &event);

/* ---- Devices, errors and counters ---- */

constexpr int MAX_DEVICES = 64;

int current_device();
/* Returns the current device after making its context, as most calls do. */
int use_device();

/* Stores an error for cudaGetLastError and returns it; returns success unchanged. */
cudaError_t result(cudaError_t error);

enum class counted {
  kernels,
  copies,
  memsets,
  synchronisations,
  allocations,
  groups,
  events,
  sent_bytes,
  kinds
};
void count(counted what, long times = 1);

/* only_counts is true while emulation_only_count is on, so that kernels are counted and not run.
 * is_left_out is true if a copy or fill of `bytes` bytes is not made either. */
bool only_counts();
bool is_left_out(size_t bytes);

/* True if a test has asked for this allocation (kernel launch) to fail. */
bool allocation_fails();
bool launch_fails();

/* Returns an error for a call that CUDA forbids during a capture, and ends that capture. The caller
 * holds the lock. */
cudaError_t refuse_in_capture();

/* ---- Device memory and pinned host memory ---- */

constexpr size_t DEVICE_MEMORY = size_t{4} << 30; /* bytes of one device */

/* True if a kernel may access these bytes. The caller holds the lock. */
bool device_can_touch(const void *pointer, size_t size);

/* Ends the process if bytes next to an allocation were overwritten. The caller holds the lock. */
void check_memory();

/* ---- Blocks ---- */

/* Runs a grid at once, on the calling OS thread. */
void run_grid(dim3 grid, dim3 block, const std::function<void()> &thread);

/* ---- Fibers: stacks that one OS thread switches between ---- */

/* An execution context: an OS thread's own stack, or a fiber's. */
struct context {
#ifdef __x86_64__
  void *stack_pointer = nullptr;
#else
  ucontext_t registers;
#endif
  /* The bounds of the stack, which AddressSanitizer needs. */
  const void *bottom = nullptr;
  size_t size = 0;
  void *fake_stack = nullptr;
};

/* Calls entry(argument) on a stack of its own at the first switch to the fiber. entry never
 * returns. */
class fiber : public context {
public:
  fiber(void (*entry)(void *), void *argument);
  ~fiber();
  fiber(const fiber &) = delete;
  fiber &operator=(const fiber &) = delete;

  void begin(context &caller); /* entry must call this function first */

private:
  void *mapping_;
};

/* Stops `from`, the running context, and continues `to`. */
void switch_context(context &from, context &to);

} // namespace emulation

#endif
