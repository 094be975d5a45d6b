/*
 * Allocations have guard zones, and freed memory is kept for a while, filled with a pattern. A
 * write past the end of an allocation, or after its free, is therefore found. AddressSanitizer
 * finds more, so builds with it use malloc and free directly.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "emulation_device.h"
#include "inside.h"

namespace emulation {

namespace {

/* The size of guard zones, and cudaMalloc's alignment. */
#if EMULATION_ASAN
constexpr size_t ZONE = 0;
#else
constexpr size_t ZONE = 4096;
#endif
constexpr size_t ALIGNMENT = 4096, KEPT = size_t{32} << 20;
/* Bytes of a zone that are checked at each synchronisation. */
constexpr size_t CHECKED = 512;
/* Byte patterns for memory. Each is a NaN when read as a float. */
constexpr unsigned char FRESH = 0xff, FREED = 0xfe, GUARD = 0xfd;

struct allocation {
  unsigned char *whole;
  size_t size;
  int device;
  bool pinned;
  bool filled; /* filled with patterns; otherwise neither written nor checked */

  unsigned char *start() const { return whole + ZONE; }
  size_t room() const { return (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + ALIGNMENT; }
  size_t extent() const { return ZONE + room() + ZONE; }
};

std::map<uintptr_t, allocation> &allocations() {
  static std::map<uintptr_t, allocation> all;
  return all;
}
/* The host memory that is registered, by address and size. Copies from it do not have to wait. */
std::map<uintptr_t, size_t> &registered() {
  static std::map<uintptr_t, size_t> all;
  return all;
}
std::deque<allocation> freed;
size_t freed_bytes, used[MAX_DEVICES];

bool is_filled(const unsigned char *bytes, size_t size, unsigned char with) {
  return !size || (*bytes == with && !memcmp(bytes, bytes + 1, size - 1));
}

uintptr_t address_of(const void *pointer) { return reinterpret_cast<uintptr_t>(pointer); }

/* Returns the allocation that holds this address. */
const allocation *find(const void *pointer) {
  auto next = allocations().upper_bound(address_of(pointer));
  if (next == allocations().begin())
    return nullptr;
  const allocation &candidate = std::prev(next)->second;
  size_t offset = address_of(pointer) - address_of(candidate.start());
  return offset < candidate.size ? &candidate : nullptr;
}

void check_guards(const allocation &block) {
  if (ZONE && block.filled &&
      !(is_filled(block.start() - CHECKED, CHECKED, GUARD) &&
        is_filled(block.start() + block.size, CHECKED, GUARD)))
    fatal("out of bounds: something was written just outside of the %zu bytes that were "
          "allocated at %p",
          block.size, static_cast<void *>(block.start()));
}

/* Returns the oldest freed block to the system. Ends the process if the block was written to after
 * its free. */
void forget_oldest() {
  allocation block = freed.front();
  freed.pop_front();
  freed_bytes -= block.extent();
  if (!is_filled(block.whole, block.extent(), FREED))
    fatal("use after free: something was written into the %zu bytes that were allocated at %p",
          block.size, static_cast<void *>(block.start()));
  munmap(block.whole, block.extent());
}

void discard_memory(const allocation &block) {
  if (!block.filled) {
    munmap(block.whole, block.extent());
    return;
  }
  if (!ZONE)
    return free(block.whole);
  memset(block.whole, FREED, block.extent());
  freed.push_back(block);
  freed_bytes += block.extent();
  while (freed_bytes > KEPT)
    forget_oldest();
}

unsigned char *obtain_memory(const allocation &block) {
  void *exact;
  if (!ZONE && block.filled)
    return posix_memalign(&exact, 256, block.size) ? nullptr : static_cast<unsigned char *>(exact);
  void *pages = mmap(nullptr, block.extent(), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return pages == MAP_FAILED ? nullptr : static_cast<unsigned char *>(pages);
}

/* Allocates memory. The caller holds the lock. */
cudaError_t allocate(void **pointer, size_t size, bool pinned) {
  if (!pointer)
    return cudaErrorInvalidValue;
  *pointer = nullptr;
  if (cudaError_t refused = refuse_in_capture())
    return refused;
  count(counted::allocations);
  int device = use_device();
  const bool filled = !is_left_out(size);
  if (allocation_fails() || (!pinned && filled && size > DEVICE_MEMORY - used[device]))
    return cudaErrorMemoryAllocation;
  if (!size)
    return cudaSuccess;
  allocation block{nullptr, size, device, pinned, filled};
  if (!(block.whole = obtain_memory(block)))
    return cudaErrorMemoryAllocation;
  if (ZONE && filled)
    memset(block.whole, GUARD, block.extent());
  if (filled)
    memset(block.start(), FRESH, size);
  if (!pinned && filled)
    used[device] += size;
  allocations().emplace(address_of(block.start()), block);
  *pointer = block.start();
  return cudaSuccess;
}

/* Frees memory. The caller holds the lock. Freeing device memory and freeing pinned memory both
 * wait for all of the device's work, even for a kernel of NCCL whose peers are gone, because
 * nothing may still use the memory. */
cudaError_t release(lock &held, void *pointer, bool pinned) {
  if (!pointer)
    return cudaSuccess;
  auto place = allocations().find(address_of(pointer));
  if (place == allocations().end() || place->second.pinned != pinned)
    return cudaErrorInvalidValue;
  if (cudaError_t refused = refuse_in_capture())
    return refused;
  allocation block = place->second;
  count(counted::synchronisations);
  synchronise_device(held, block.device,
                     pinned ? "the device, whose work cudaFreeHost waits for"
                            : "the device, whose work cudaFree waits for");
  check_guards(block);
  if (!pinned && block.filled)
    used[block.device] -= block.size;
  allocations().erase(address_of(pointer));
  discard_memory(block);
  return cudaSuccess;
}

bool is_registered(const void *pointer, size_t size) {
  auto next = registered().upper_bound(address_of(pointer));
  if (next == registered().begin())
    return false;
  const auto &[start, bytes] = *std::prev(next);
  return address_of(pointer) - start <= bytes && size <= bytes - (address_of(pointer) - start);
}

/* Registers memory. The caller holds the lock. Like allocations, registering and unregistering may
 * wait for the device. */
cudaError_t register_memory(lock &held, void *pointer, size_t size) {
  if (!pointer || !size)
    return cudaErrorInvalidValue;
  if (cudaError_t refused = refuse_in_capture())
    return refused;
  count(counted::allocations);
  if (allocation_fails())
    return cudaErrorMemoryAllocation;
  if (is_registered(pointer, 1))
    return cudaErrorHostMemoryAlreadyRegistered;
  synchronise_device(held, current_device());
  registered().emplace(address_of(pointer), size);
  return cudaSuccess;
}

cudaError_t unregister_memory(lock &held, void *pointer) {
  if (!registered().count(address_of(pointer)))
    return cudaErrorHostMemoryNotRegistered;
  synchronise_device(held, current_device());
  registered().erase(address_of(pointer));
  return cudaSuccess;
}

enum class place { pageable, pinned, device, broken };

/* Returns the kind of memory of these bytes. It is `broken` if the bytes end beyond their
 * allocation. */
place find_place(const void *pointer, size_t size) {
  const allocation *block = find(pointer);
  if (!block)
    return is_registered(pointer, size) ? place::pinned : place::pageable;
  if (address_of(pointer) - address_of(block->start()) + size > block->size)
    return place::broken;
  return block->pinned ? place::pinned : place::device;
}

bool matches(place actual, bool says_device) {
  return says_device ? actual == place::device
                     : actual == place::pageable || actual == place::pinned;
}

/* True if the kind of copy matches the kind of memory on both sides. */
bool matches_both(cudaMemcpyKind kind, place to, place from) {
  if (to == place::broken || from == place::broken)
    return false;
  if (kind == cudaMemcpyDefault)
    return true;
  return matches(to, kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) &&
         matches(from, kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice);
}

struct rows {
  char *to;
  const char *from;
  size_t to_pitch, from_pitch, width, height;
};

size_t row_span(size_t pitch, const rows &copy) { return pitch * (copy.height - 1) + copy.width; }

void copy_now(const rows &copy) {
  for (size_t row = 0; row < copy.height; row++)
    memmove(copy.to + row * copy.to_pitch, copy.from + row * copy.from_pitch, copy.width);
}

/* Makes a copy that reads from a snapshot of the source, taken at enqueue time. */
work staged_copy(const rows &copy) {
  auto bytes = std::make_shared<std::vector<char>>(copy.width * copy.height);
  rows first = copy, second = copy;
  first.to = bytes->data();
  second.from = bytes->data();
  first.to_pitch = second.from_pitch = copy.width;
  copy_now(first);
  return make_work([second, bytes] {
    count(counted::copies);
    copy_now(second);
  });
}

/* Copies from pageable memory to a device as late as CUDA permits. The host waits for the stream's
 * earlier work, stages the bytes and returns. The stream makes the copy later. */
cudaError_t stage_copy(lock &held, const rows &copy, const stream_ptr &stream) {
  operation_ptr reached;
  cudaError_t error = submit(held, stream, make_work([] {}), &reached);
  if (error)
    return error;
  count(counted::synchronisations);
  complete_operation(held, reached, "a stream: a copy from pageable memory begins after its work");
  return submit(held, stream, staged_copy(copy));
}

/* Copies rows. The host waits for a copy to pageable memory, as with real devices. If `wait` is
 * true, the host waits for all copies except those between devices. */
cudaError_t copy_rows(const rows &copy, cudaMemcpyKind kind, cudaStream_t handle, bool wait) {
  if (copy.width > copy.to_pitch || copy.width > copy.from_pitch)
    return cudaErrorInvalidPitchValue;
  if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault)
    return cudaErrorInvalidMemcpyDirection;
  lock held(guard());
  stream_ptr stream = find_stream(handle);
  if (!stream)
    return cudaErrorInvalidResourceHandle;
  if (!copy.width || !copy.height)
    return cudaSuccess;
  place to = find_place(copy.to, row_span(copy.to_pitch, copy));
  place from = find_place(copy.from, row_span(copy.from_pitch, copy));
  if (!copy.to || !copy.from || !matches_both(kind, to, from))
    return cudaErrorInvalidValue;
  if (wait)
    if (cudaError_t refused = refuse_in_capture())
      return refused;
  bool captured = stream->capturing != nullptr;
  if (from == place::pageable && to == place::device && !captured)
    return stage_copy(held, copy, stream);
  bool host_waits = to == place::pageable || from == place::pageable ||
                    (wait && !(to == place::device && from == place::device));
  operation_ptr done;
  cudaError_t error = submit(held, stream, make_work([copy] {
                               count(counted::copies);
                               copy_now(copy);
                             }),
                             &done);
  if (error || captured || !host_waits)
    return error;
  count(counted::synchronisations);
  complete_operation(held, done, "a stream: a copy to the host ends after its work");
  return cudaSuccess;
}

} // namespace

bool device_can_touch(const void *pointer, size_t size) {
  place actual = find_place(pointer, size);
  return actual == place::device || actual == place::pinned;
}

void check_memory() {
  for (const auto &[start, block] : allocations())
    check_guards(block);
}

} // namespace emulation

using namespace emulation;

static cudaError_t fill_memory(void *pointer, int value, size_t size, cudaStream_t handle) {
  lock held(guard());
  stream_ptr stream = find_stream(handle);
  if (!stream)
    return cudaErrorInvalidResourceHandle;
  if (!size)
    return cudaSuccess;
  if (!device_can_touch(pointer, size))
    return cudaErrorInvalidValue;
  return submit(held, stream, make_work([=] {
                  count(counted::memsets);
                  if (!is_left_out(size))
                    memset(pointer, value, size);
                }));
}

cudaError_t cudaMalloc(void **devPtr, size_t size) {
  lock held(guard());
  return result(allocate(devPtr, size, false));
}
cudaError_t cudaFree(void *devPtr) {
  lock held(guard());
  return result(release(held, devPtr, false));
}
cudaError_t cudaHostAlloc(void **pHost, size_t size, unsigned int) {
  lock held(guard());
  return result(allocate(pHost, size, true));
}
cudaError_t cudaHostRegister(void *ptr, size_t size, unsigned int) {
  lock held(guard());
  return result(register_memory(held, ptr, size));
}
cudaError_t cudaHostUnregister(void *ptr) {
  lock held(guard());
  return result(unregister_memory(held, ptr));
}
cudaError_t cudaMallocHost(void **ptr, size_t size) { return cudaHostAlloc(ptr, size, 0); }
cudaError_t cudaFreeHost(void *ptr) {
  lock held(guard());
  return result(release(held, ptr, true));
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
  lock held(guard());
  *total = DEVICE_MEMORY;
  *available = DEVICE_MEMORY - used[current_device()];
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *ptr) {
  lock held(guard());
  const allocation *block = find(ptr);
  use_device();
  void *address = const_cast<void *>(ptr);
  if (!block)
    *attributes = {cudaMemoryTypeUnregistered, -2, nullptr, address};
  else if (block->pinned)
    *attributes = {cudaMemoryTypeHost, block->device, address, address};
  else
    *attributes = {cudaMemoryTypeDevice, block->device, address, nullptr};
  return cudaSuccess;
}

static rows one_row(void *dst, const void *src, size_t count) {
  return {static_cast<char *>(dst), static_cast<const char *>(src), count, count, count, 1};
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t count, enum cudaMemcpyKind kind) {
  return result(copy_rows(one_row(dst, src, count), kind, nullptr, true));
}
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t count, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return result(copy_rows(one_row(dst, src, count), kind, stream, false));
}
cudaError_t cudaMemcpy2DAsync(void *dst, size_t dpitch, const void *src, size_t spitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream) {
  int limit = 0;
  cudaDeviceGetAttribute(&limit, cudaDevAttrMaxPitch, 0);
  if (dpitch > static_cast<size_t>(limit) || spitch > static_cast<size_t>(limit))
    return result(cudaErrorInvalidPitchValue);
  return result(copy_rows(
      {static_cast<char *>(dst), static_cast<const char *>(src), dpitch, spitch, width, height},
      kind, stream, false));
}
cudaError_t cudaMemset(void *devPtr, int value, size_t count) {
  return result(fill_memory(devPtr, value, count, nullptr));
}
cudaError_t cudaMemsetAsync(void *devPtr, int value, size_t count, cudaStream_t stream) {
  return result(fill_memory(devPtr, value, count, stream));
}
