/*
 * The queues of streams, and the choice of the operation that runs next.
 */
#include "operations.h"

#include <stdlib.h>
#include <string.h>

#include <condition_variable>
#include <unordered_set>

#include "emulation_device.h"
#include "memory.h"

namespace emulation {

namespace {

std::condition_variable &ended() {
  static std::condition_variable condition;
  return condition;
}

bool eager() {
  const char *text = getenv("EMULATED_STREAMS");
  if (!text || !*text || !strcmp(text, "deferred"))
    return false;
  if (strcmp(text, "eager"))
    fatal("EMULATED_STREAMS is '%s': not deferred or eager", text);
  return true;
}

/* Follows CUDA's rule: the default stream waits for all blocking streams of its device, and they
 * for it. */
void order_with_default(const CUstream_st &stream, std::vector<operation_ptr> &after) {
  if (!stream.blocking)
    return;
  for (const stream_ptr &other : streams_of(stream.device))
    if (other.get() != &stream && other->blocking && (stream.is_default || other->is_default) &&
        other->last)
      after.push_back(other->last);
}

/* The operations that one waits for: the first of its stream, and those that it comes after; or,
 * begun, those that other ranks have to run. */
std::vector<operation_ptr> obstacles(const operation_ptr &wanted) {
  if (wanted->state == operation::running)
    return wanted->what.needs ? wanted->what.needs(*wanted) : std::vector<operation_ptr>();
  std::vector<operation_ptr> found;
  if (wanted->stream && wanted->stream->queue.front() != wanted)
    found.push_back(wanted->stream->queue.front());
  for (const operation_ptr &other : wanted->after)
    if (!is_done(other))
      found.push_back(other);
  return found;
}

/* Returns an operation that `wanted` needs and that can run now, or none. */
operation_ptr find_runnable(const operation_ptr &wanted) {
  std::vector<operation_ptr> open{wanted};
  std::unordered_set<operation *> seen;
  while (!open.empty()) {
    operation_ptr next = open.back();
    open.pop_back();
    if (!seen.insert(next.get()).second)
      continue;
    std::vector<operation_ptr> before = obstacles(next);
    if (before.empty() && next->state == operation::queued)
      return next;
    open.insert(open.end(), before.begin(), before.end());
  }
  return nullptr;
}

/* Moves the function out first: another thread may finish the operation before it returns here. */
bool begin(const operation_ptr &next) {
  device_access open;
  auto start = std::move(next->what.start);
  return start(next);
}

} // namespace

long setting(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text && *text ? atol(text) : otherwise;
}

std::mutex &guard() {
  static std::mutex mutex;
  return mutex;
}

work plain(std::function<void()> function) {
  return {[function = std::move(function)](const operation_ptr &) {
            function();
            return true;
          },
          nullptr, nullptr};
}

bool is_done(const operation_ptr &wanted) { return !wanted || wanted->state == operation::done; }

void wake_others() { ended().notify_all(); }

void finish(const operation_ptr &begun) {
  begun->state = operation::done;
  begun->ended = std::chrono::steady_clock::now();
  begun->after.clear();
  if (begun->stream)
    begun->stream->queue.pop_front();
  begun->stream = nullptr; /* breaks the cycle: this may be its stream's last operation */
  begun->what = {};
  wake_others();
}

bool advance(lock &held, const operation_ptr &wanted) {
  operation_ptr next = find_runnable(wanted);
  if (!next)
    return false;
  next->state = operation::running;
  held.unlock();
  bool over = begin(next);
  held.lock();
  if (over)
    finish(next);
  return true;
}

void wait_for_others(lock &held, const char *whom) {
  long seconds = setting("EMULATED_TIMEOUT", 60);
  if (ended().wait_for(held, std::chrono::seconds(seconds)) == std::cv_status::timeout)
    fatal("nothing has moved for %ld seconds while waiting for %s", seconds, whom);
}

void complete(lock &held, const operation_ptr &wanted, const char *whom) {
  while (!is_done(wanted))
    if (!advance(held, wanted))
      wait_for_others(held, whom);
}

operation_ptr add_node(work what, std::vector<operation_ptr> after) {
  auto added = std::make_shared<operation>();
  added->what = std::move(what);
  added->after = std::move(after);
  if (added->what.enqueued)
    added->what.enqueued(added);
  return added;
}

operation_ptr enqueue(lock &held, const stream_ptr &stream, work what,
                      std::vector<operation_ptr> after) {
  order_with_default(*stream, after);
  operation_ptr added = add_node(std::move(what), std::move(after));
  added->stream = stream;
  stream->queue.push_back(added);
  stream->last = added;
  if (eager())
    while (!is_done(added) && advance(held, added)) {
    }
  return added;
}

void synchronise_device(lock &held, int device, const char *whom) {
  for (const stream_ptr &stream : streams_of(device))
    complete(held, stream->last, whom);
}

} // namespace emulation
