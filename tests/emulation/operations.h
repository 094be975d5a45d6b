/*
 * Work on streams, as a graph of operations that is run as late as possible: when the host waits.
 * One mutex guards all of it; it is not held while an operation runs.
 */
#ifndef EMULATION_OPERATIONS_H
#define EMULATION_OPERATIONS_H

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda_runtime_api.h"

struct ncclComm;

namespace emulation {

struct operation;
struct capture;
using operation_ptr = std::shared_ptr<operation>;
using stream_ptr = std::shared_ptr<CUstream_st>;
using lock = std::unique_lock<std::mutex>;

/* The work of an operation. A graph keeps it to do it again. */
struct work {
  /* Called without the lock. Returns false if it has only begun; finish() is then called later. */
  std::function<bool(const operation_ptr &)> start;
  /* Called with the lock: `enqueued` when it enters a queue; `needs` once it has begun, to list the
   * operations that another rank must run before it can end, as far as they are known. */
  std::function<void(const operation_ptr &)> enqueued;
  std::function<std::vector<operation_ptr>(const operation &)> needs;
  /* The communicator that a graph with this in it holds, or none. */
  const ncclComm *comm = nullptr;
};

/* Makes work that is done when the function returns. */
work plain(std::function<void()> function);

struct operation {
  work what;
  stream_ptr stream; /* none: it is done, or a node of a graph that was launched */
  std::vector<operation_ptr> after;
  enum { queued, running, done } state = queued;
  std::chrono::steady_clock::time_point ended;
};

} // namespace emulation

struct CUstream_st {
  CUstream_st(int on, bool blocks, bool as_default = false)
      : device(on), blocking(blocks), is_default(as_default) {}

  const int device;
  const bool blocking; /* orders itself with the device's default stream */
  const bool is_default;
  bool destroyed = false; /* no handle any more: what it holds still runs */
  std::deque<emulation::operation_ptr> queue;
  emulation::operation_ptr last;
  std::shared_ptr<emulation::capture> capturing;
  std::vector<size_t> capture_tail; /* the nodes that the next one comes after */
};

struct CUevent_st {
  int device;
  unsigned flags;
  emulation::operation_ptr recorded;
  std::shared_ptr<emulation::capture> captured; /* recorded in this capture, at these nodes */
  std::vector<size_t> capture_nodes;
};

namespace emulation {

std::mutex &guard();

/* Enqueues the work after all that the kind of the stream demands, and after `after`. */
operation_ptr enqueue(lock &held, const stream_ptr &stream, work what,
                      std::vector<operation_ptr> after = {});
/* Adds an operation without a stream, for graphs. */
operation_ptr add_node(work what, std::vector<operation_ptr> after);

/* Runs every operation that `wanted` needs, and `wanted`. NULL is done already. If nothing can run,
 * the message says that the host waits for `whom`. */
void complete(lock &held, const operation_ptr &wanted,
              const char *whom = "an operation of another thread or rank");
/* Runs one operation that `wanted` needs, if one can run. */
bool advance(lock &held, const operation_ptr &wanted);
bool is_done(const operation_ptr &wanted);
/* Finishes an operation that start() said is not over yet. */
void finish(const operation_ptr &begun);
/* Wakes all threads that sleep in wait_for_others(). */
void wake_others();
/* Sleeps until some operation has ended. Ends the process after EMULATED_TIMEOUT. */
void wait_for_others(lock &held, const char *whom);

/* Returns the stream of a handle, or none. */
stream_ptr find_stream(cudaStream_t handle);
std::vector<stream_ptr> streams_of(int device);
void synchronise_device(lock &held, int device,
                        const char *whom = "an operation of another thread or rank");

/* The value of an environment variable. */
long setting(const char *name, long otherwise);

} // namespace emulation

#endif
