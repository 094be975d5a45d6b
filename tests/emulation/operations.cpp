/*
 * The queues of streams, and the choice of the operation that runs next.
 */
#include <algorithm>
#include <condition_variable>
#include <stdlib.h>
#include <string.h>
#include <unordered_set>

#include "emulation_device.h"
#include "inside.h"

namespace emulation {

namespace {

std::condition_variable &ended() {
  static std::condition_variable condition;
  return condition;
}

bool is_eager() {
  const char *text = getenv("EMULATED_STREAMS");
  if (!text || !*text || !strcmp(text, "deferred"))
    return false;
  if (strcmp(text, "eager"))
    fatal("EMULATED_STREAMS is '%s': not deferred or eager", text);
  return true;
}

/* Follows CUDA's rule: the default stream waits for all blocking streams of its device, and
 * blocking streams wait for the default stream. */
void order_with_default(const CUstream_st &stream, std::vector<operation_ptr> &after) {
  if (!stream.blocking)
    return;
  for (const stream_ptr &other : streams_of(stream.device))
    if (other.get() != &stream && other->blocking && (stream.is_default || other->is_default) &&
        other->last)
      after.push_back(other->last);
}

/* Returns the operations that `wanted` waits for. Before its start these are the first operation of
 * its stream and the operations that it depends on. After its start these are operations that other
 * ranks must run. */
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

/* Returns an operation that `wanted` needs and that can run now, or NULL. */
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

/* Starts an operation. The function is moved out of the operation first, since another thread may
 * finish the operation before the function returns. */
bool begin(const operation_ptr &next) {
  auto start = std::move(next->what.start);
  return start(next);
}

} // namespace

long read_setting(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text && *text ? atol(text) : otherwise;
}

std::mutex &guard() {
  static std::mutex mutex;
  return mutex;
}

work make_work(std::function<void()> function) {
  return {[function = std::move(function)](const operation_ptr &) {
            function();
            return true;
          },
          nullptr, nullptr};
}

bool is_done(const operation_ptr &wanted) { return !wanted || wanted->state == operation::done; }

void wake_others() { ended().notify_all(); }

void finish_operation(const operation_ptr &begun) {
  begun->state = operation::done;
  begun->ended = std::chrono::steady_clock::now();
  begun->after.clear();
  if (begun->stream)
    begun->stream->queue.pop_front();
  begun->stream = nullptr; /* breaks the cycle: this may be its stream's last operation */
  begun->what = {};
  wake_others();
}

bool advance_operation(lock &held, const operation_ptr &wanted) {
  operation_ptr next = find_runnable(wanted);
  if (!next)
    return false;
  next->state = operation::running;
  held.unlock();
  bool over = begin(next);
  held.lock();
  if (over)
    finish_operation(next);
  return true;
}

void wait_for_others(lock &held, const char *whom) {
  long seconds = read_setting("EMULATED_TIMEOUT", 60);
  if (ended().wait_for(held, std::chrono::seconds(seconds)) == std::cv_status::timeout)
    fatal("nothing has moved for %ld seconds while waiting for %s", seconds, whom);
}

void complete_operation(lock &held, const operation_ptr &wanted, const char *whom) {
  while (!is_done(wanted))
    if (!advance_operation(held, wanted))
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
  if (is_eager())
    while (!is_done(added) && advance_operation(held, added)) {
    }
  return added;
}

void synchronise_device(lock &held, int device, const char *whom) {
  for (const stream_ptr &stream : streams_of(device))
    complete_operation(held, stream->last, whom);
}

/* ---- Streams and events ---- */

namespace {

/* All streams. The default streams of the devices come first. */
std::vector<stream_ptr> &streams() {
  static std::vector<stream_ptr> all = [] {
    std::vector<stream_ptr> defaults;
    for (int device = 0; device < MAX_DEVICES; device++)
      defaults.push_back(std::make_shared<CUstream_st>(device, true, true));
    return defaults;
  }();
  return all;
}

std::vector<cudaEvent_t> &events() {
  static std::vector<cudaEvent_t> all;
  return all;
}

CUevent_st *find_event(cudaEvent_t handle) {
  bool known = std::find(events().begin(), events().end(), handle) != events().end();
  return known ? handle : nullptr;
}

/* Frees streams that are destroyed and have no operations left. */
void forget_destroyed() {
  auto is_over = [](const stream_ptr &stream) {
    return stream->destroyed && stream->queue.empty();
  };
  streams().erase(std::remove_if(streams().begin(), streams().end(), is_over), streams().end());
}

cudaError_t create_stream(cudaStream_t *handle, unsigned flags) {
  if (!handle || flags > cudaStreamNonBlocking)
    return cudaErrorInvalidValue;
  lock held(guard());
  forget_destroyed();
  bool blocking = !(flags & cudaStreamNonBlocking);
  streams().push_back(std::make_shared<CUstream_st>(use_device(), blocking));
  *handle = streams().back().get();
  return cudaSuccess;
}

/* Destroys a stream without waiting: its operations run later, when a thread waits for them or for
 * the device. */
cudaError_t destroy_stream(cudaStream_t handle) {
  lock held(guard());
  stream_ptr stream = find_stream(handle);
  if (!stream || stream->is_default)
    return cudaErrorInvalidResourceHandle;
  if (cudaError_t refused = refuse_capturing(*stream))
    return refused;
  stream->destroyed = true;
  return cudaSuccess;
}

/* Returns the stream's last operation. For the default stream it returns a marker after all work of
 * the blocking streams. */
operation_ptr last_of(lock &held, const stream_ptr &stream) {
  return stream->is_default ? enqueue(held, stream, make_work([] {})) : stream->last;
}

cudaError_t wait_for_stream(cudaStream_t handle) {
  lock held(guard());
  stream_ptr stream = find_stream(handle);
  if (!stream)
    return cudaErrorInvalidResourceHandle;
  if (cudaError_t refused = refuse_capturing(*stream))
    return refused;
  count(counted::synchronisations);
  complete_operation(held, last_of(held, stream));
  check_memory();
  return cudaSuccess;
}

/* Runs one operation, so that a program that calls a query function in a loop makes progress. */
cudaError_t run_one(lock &held, const operation_ptr &wanted) {
  if (is_done(wanted))
    return cudaSuccess;
  advance_operation(held, wanted);
  return cudaErrorNotReady;
}

cudaError_t query_stream(cudaStream_t handle) {
  lock held(guard());
  stream_ptr stream = find_stream(handle);
  if (!stream)
    return cudaErrorInvalidResourceHandle;
  if (cudaError_t refused = refuse_capturing(*stream))
    return refused;
  if (!stream->is_default)
    return run_one(held, stream->last);
  for (const stream_ptr &other : streams_of(stream->device))
    if (other->blocking && !is_done(other->last))
      return run_one(held, other->last);
  return cudaSuccess;
}

cudaError_t make_wait(cudaStream_t handle, cudaEvent_t event_handle) {
  lock held(guard());
  stream_ptr stream = find_stream(handle);
  CUevent_st *event = find_event(event_handle);
  if (!stream || !event)
    return cudaErrorInvalidResourceHandle;
  count(counted::events);
  if (event->captured || stream->capturing)
    return wait_in_capture(stream, *event);
  if (!is_done(event->recorded))
    enqueue(held, stream, make_work([] {}), {event->recorded});
  return cudaSuccess;
}

cudaError_t record_event(cudaEvent_t handle, cudaStream_t stream_handle) {
  lock held(guard());
  stream_ptr stream = find_stream(stream_handle);
  CUevent_st *event = find_event(handle);
  if (!stream || !event || stream->device != event->device)
    return cudaErrorInvalidResourceHandle;
  count(counted::events);
  if (stream->capturing)
    return record_in_capture(*event, stream);
  event->captured = nullptr;
  event->recorded = enqueue(held, stream, make_work([] {}));
  return cudaSuccess;
}

cudaError_t use_event(cudaEvent_t handle, bool wait) {
  lock held(guard());
  CUevent_st *event = find_event(handle);
  use_device();
  if (!event)
    return cudaErrorInvalidResourceHandle;
  if (event->captured)
    return event->captured->invalid = true, cudaErrorCapturedEvent;
  if (cudaError_t refused = refuse_in_capture())
    return refused;
  if (!wait)
    return run_one(held, event->recorded);
  count(counted::synchronisations);
  complete_operation(held, event->recorded);
  check_memory();
  return cudaSuccess;
}

cudaError_t measure_elapsed(float *milliseconds, cudaEvent_t first, cudaEvent_t second) {
  lock held(guard());
  CUevent_st *start = find_event(first), *end = find_event(second);
  if (!start || !end || (start->flags | end->flags) & cudaEventDisableTiming || !start->recorded ||
      !end->recorded)
    return cudaErrorInvalidResourceHandle;
  if (!is_done(start->recorded) || !is_done(end->recorded))
    return cudaErrorNotReady;
  std::chrono::duration<float, std::milli> between = end->recorded->ended - start->recorded->ended;
  *milliseconds = between.count();
  return cudaSuccess;
}

} // namespace

stream_ptr find_stream(cudaStream_t handle) {
  if (!handle)
    return streams()[static_cast<size_t>(use_device())];
  for (const stream_ptr &stream : streams())
    if (stream.get() == handle && !stream->destroyed)
      return stream;
  return nullptr;
}

std::vector<stream_ptr> streams_of(int device) {
  std::vector<stream_ptr> found;
  for (const stream_ptr &stream : streams())
    if (stream->device == device)
      found.push_back(stream);
  return found;
}

} // namespace emulation

using namespace emulation;

cudaError_t cudaStreamCreate(cudaStream_t *pStream) {
  return result(create_stream(pStream, cudaStreamDefault));
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *pStream, unsigned int flags) {
  return result(create_stream(pStream, flags));
}
/* Priorities are only a hint: work runs as late as possible, whatever its priority. */
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *pStream, unsigned int flags, int) {
  return result(create_stream(pStream, flags));
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *leastPriority, int *greatestPriority) {
  *leastPriority = 0;
  *greatestPriority = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return result(destroy_stream(stream)); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return result(wait_for_stream(stream)); }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return result(query_stream(stream)); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  return result(make_wait(stream, event));
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *userData) {
  lock held(guard());
  stream_ptr found = find_stream(stream);
  if (!found || !fn)
    return result(found ? cudaErrorInvalidValue : cudaErrorInvalidResourceHandle);
  return result(submit(held, found, make_work([=] { fn(userData); })));
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
  if (!event || flags & ~cudaEventDisableTiming)
    return result(cudaErrorInvalidValue);
  lock held(guard());
  *event = new CUevent_st{current_device(), flags, nullptr, nullptr, {}};
  events().push_back(*event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return result(record_event(event, stream));
}
cudaError_t cudaEventQuery(cudaEvent_t event) { return result(use_event(event, false)); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return result(use_event(event, true)); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
  return result(measure_elapsed(ms, start, end));
}

/* Destroys an event. Operations that wait for it keep a reference to the recorded operation. */
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  lock held(guard());
  if (!find_event(event))
    return result(cudaErrorInvalidResourceHandle);
  events().erase(std::find(events().begin(), events().end(), event));
  delete event;
  return cudaSuccess;
}
