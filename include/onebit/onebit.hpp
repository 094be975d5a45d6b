/*
 * onebit for C++14: RAII handles, errors as exceptions, buffers with their counts. It is
 * header-only: every call is one call of the C interface, whose headers are the manual; the
 * comments here describe the differences. Communicators over MPI are in onebit/mpi.hpp; for those
 * over NCCL and calls on streams pass get() to the calls of onebit/nccl.h and onebit/cuda.h.
 *
 * Errors. What returns a negative status in C throws onebit::error, with that status and the
 * message of onebit_last_error. ONEBIT_SKIPPED is no exception, and ONEBIT_WARNING and
 * ONEBIT_IN_PROGRESS are none: calls that can end so return the status.
 *
 * If a buffer does not fit its plan, the other ranks get an error before the exception is thrown. A
 * program that catches the exception of one collective call must not skip later ones on that rank
 * alone.
 *
 * Handles can be moved and not copied. One that is moved from, or made without arguments, is empty:
 * get() is NULL. Destroy what was made on a communicator before it, and a request before its plan,
 * as a scope does.
 *
 * Cost: no virtual call, no allocation and no lock of its own; a plan remembers two counts and the
 * size of an element, and compares buffers with them. What allocates says so.
 */
#ifndef ONEBIT_ONEBIT_HPP
#define ONEBIT_ONEBIT_HPP

#if __cplusplus < 201402L
#error "onebit/onebit.hpp needs C++14 or newer"
#endif

#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "onebit/onebit.h"

namespace onebit {

/* A negative status other than ONEBIT_SKIPPED, and the message that goes with it. */
class error : public std::runtime_error {
public:
  error(onebit_status_t status, const std::string &message)
      : std::runtime_error(std::string(onebit_status_string(status)) + ": " + message),
        status_(status) {}
  onebit_status_t status() const noexcept { return status_; }

private:
  onebit_status_t status_;
};

/* Throws error for what failed; returns any other status as it is. For calls of the C interface
 * too: onebit::check(onebit_progress(comm.get())). */
inline onebit_status_t check(onebit_status_t status) {
  if (status < ONEBIT_OK && status != ONEBIT_SKIPPED)
    throw error(status, onebit_last_error());
  return status;
}

/* Buffers: a pointer and a count of elements, from {pointer, count}, an array, or anything with
 * data() and size(): std::vector<float>, std::array, std::span. Nothing is copied and the memory
 * stays the caller's. Elements are float, or whatever stands for bfloat16 or float16. */
template <typename Void> class basic_buffer {
  template <typename Container>
  using element_of = std::remove_pointer_t<decltype(std::declval<Container &>().data())>;
  template <typename T> /* no void, and nothing constant to write to */
  using if_usable =
      std::enable_if_t<!std::is_void<T>::value && std::is_convertible<T *, Void *>::value>;

public:
  template <typename T, typename = if_usable<T>>
  basic_buffer(T *data, std::size_t count) noexcept : basic_buffer(data, count, sizeof(T)) {
    static_assert(std::is_trivially_copyable<T>::value, "elements are plain values");
  }
  template <typename T, std::size_t Count, typename = if_usable<T>>
  basic_buffer(T (&array)[Count]) noexcept : basic_buffer(array, Count) {}
  template <typename Container, typename T = element_of<Container>, typename = if_usable<T>>
  basic_buffer(Container &&container) noexcept
      : basic_buffer(container.data(), static_cast<std::size_t>(container.size())) {}
  /* Elements of so many bytes, of a type that only the running program knows. */
  basic_buffer(Void *data, std::size_t count, std::size_t element) noexcept
      : data_(data), count_(count), element_(element) {}

  Void *data() const noexcept { return data_; }
  std::size_t count() const noexcept { return count_; }
  std::size_t element() const noexcept { return element_; }

private:
  Void *data_;
  std::size_t count_, element_;
};
using input = basic_buffer<const void>;
using output = basic_buffer<void>;

/* The base of all handles, which own the object and destroy it. */
template <typename Pointer, void (*destroy)(Pointer)> class handle {
public:
  handle() noexcept = default;
  explicit handle(Pointer pointer) noexcept : pointer_(pointer) {}
  handle(handle &&other) noexcept : pointer_(other.release()) {}
  handle &operator=(handle &&other) noexcept {
    if (this != &other)
      reset(other.release());
    return *this;
  }
  handle(const handle &) = delete;
  handle &operator=(const handle &) = delete;
  ~handle() { reset(nullptr); }

  /* The handle for calls of the C interface; still owned here. */
  Pointer get() const noexcept { return pointer_; }
  explicit operator bool() const noexcept { return pointer_ != nullptr; }
  /* No longer owned here: the caller destroys it. */
  Pointer release() noexcept { return std::exchange(pointer_, nullptr); }

protected:
  Pointer pointer_ = nullptr;

private:
  void reset(Pointer pointer) noexcept {
    if (pointer_)
      destroy(pointer_);
    pointer_ = pointer;
  }
};

namespace detail {
inline void destroy_communicator(onebit_comm_t comm) { onebit_comm_destroy(comm); }
inline void destroy_plan(onebit_plan_t plan) { onebit_plan_destroy(plan); }
inline void destroy_optimizer(onebit_optimizer_t optimizer) { onebit_optimizer_destroy(optimizer); }
inline void finish_request(onebit_request_t request) { onebit_wait(&request); }

/* Returns what a call reports in a structure that begins with its size. */
template <typename Info, typename Pointer>
Info read_info(onebit_status_t (*get)(Pointer, Info *), Pointer object) {
  Info info = {};
  info.size = sizeof info;
  check(get(object, &info));
  return info;
}

/* Returns this rank's part of a checkpoint of an object, and allocates it. */
template <typename Pointer>
std::vector<unsigned char> save_part(onebit_status_t (*save)(Pointer, void *, std::size_t,
                                                             std::size_t *),
                                     Pointer object) {
  std::size_t bytes = 0;
  check(save(object, nullptr, 0, &bytes));
  std::vector<unsigned char> part(bytes);
  check(save(object, part.data(), part.size(), &bytes));
  return part;
}
} // namespace detail

/* onebit/communicator.h */
class communicator : public handle<onebit_comm_t, detail::destroy_communicator> {
public:
  using handle::handle;

  static communicator self() {
    onebit_comm_t made = nullptr;
    check(onebit_comm_create_self(&made));
    return communicator(made);
  }
  /* Ranks that are threads: hand each to its thread. Allocates the vector. */
  static std::vector<communicator> loopback(int size, int hosts = 1) {
    std::vector<onebit_comm_t> made(size > 0 ? static_cast<std::size_t>(size) : 1);
    std::vector<communicator> ranks;
    ranks.reserve(made.size());
    check(onebit_comm_create_loopback_hosts(size, hosts, made.data()));
    for (onebit_comm_t rank : made)
      ranks.emplace_back(rank);
    return ranks;
  }

  int rank() const noexcept { return onebit_comm_rank(get()); }
  int size() const noexcept { return onebit_comm_size(get()); }
  int hosts() const noexcept { return onebit_comm_hosts(get()); }
  std::uint64_t bytes_sent() const noexcept { return onebit_comm_bytes_sent(get()); }
  void progress() { check(onebit_progress(get())); }
  void abort() { check(onebit_comm_abort(get())); }
  communicator shrink() {
    onebit_comm_t made = nullptr;
    check(onebit_comm_shrink(get(), &made));
    return communicator(made);
  }
};

/* A call in flight, whose buffers are the library's until it is finished. The destructor waits for
 * it, because the buffers may not go before; its status is then lost. */
class request : public handle<onebit_request_t, detail::finish_request> {
public:
  using handle::handle;

  /* ONEBIT_IN_PROGRESS; or how it ended, ONEBIT_OK or ONEBIT_SKIPPED, and then this is empty. */
  onebit_status_t test() { return check(onebit_test(&pointer_)); }
  onebit_status_t wait() { return check(onebit_wait(&pointer_)); }
};

/* onebit_plan_options_t with its defaults. */
struct plan_options : onebit_plan_options_t {
  plan_options() noexcept : onebit_plan_options_t ONEBIT_PLAN_OPTIONS_INIT {}
};

/* onebit/plan.h and onebit/collectives.h */
class plan : public handle<onebit_plan_t, detail::destroy_plan> {
public:
  plan() noexcept = default;
  /* Collective, and all ranks succeed or all throw. */
  plan(const communicator &comm, std::size_t count,
       const onebit_plan_options_t &options = plan_options())
      : element_(options.dtype == ONEBIT_FLOAT32 ? 4 : 2) {
    check(onebit_plan_create(comm.get(), count, &options, &pointer_));
    const std::size_t all = count * static_cast<std::size_t>(comm.size());
    send_ = options.operation == ONEBIT_REDUCE_SCATTER ? all : count;
    receive_ = options.operation == ONEBIT_ALLGATHER ? all : count;
  }

  /* Collective. ONEBIT_OK, or ONEBIT_SKIPPED on every rank: nothing was changed. */
  onebit_status_t allreduce(input send, output receive) {
    return run(onebit_allreduce, send, receive);
  }
  onebit_status_t allreduce(output in_place) {
    const input same(in_place.data(), in_place.count(), in_place.element());
    return run(onebit_allreduce, same, in_place);
  }
  onebit_status_t allgather(input send, output receive) {
    return run(onebit_allgather, send, receive);
  }
  onebit_status_t reduce_scatter(input send, output receive) {
    return run(onebit_reduce_scatter, send, receive);
  }
  request iallreduce(input send, output receive) { return start(onebit_iallreduce, send, receive); }
  request iallgather(input send, output receive) { return start(onebit_iallgather, send, receive); }
  request ireduce_scatter(input send, output receive) {
    return start(onebit_ireduce_scatter, send, receive);
  }

  onebit_plan_info_t info() const { return detail::read_info(onebit_plan_get_info, get()); }
  const char *explain() const noexcept { return onebit_plan_explain(get()); } /* the plan's text */
  void export_residual(float *worker, float *server) const {
    check(onebit_plan_export_residual(get(), worker, server));
  }
  void import_residual(const float *worker, const float *server) {
    check(onebit_plan_import_residual(get(), worker, server));
  }
  void set_bits(int bits) { check(onebit_plan_set_bits(get(), bits)); }
  void reset_residual() { check(onebit_plan_reset_residual(get())); }
  void reset() { check(onebit_plan_reset(get())); } /* after a damaged message */

private:
  template <typename Buffer> bool fits(const Buffer &buffer, std::size_t count) const noexcept {
    return buffer.count() == count && buffer.element() == element_;
  }
  [[noreturn]] void throw_misfit(const char *name, std::size_t count, std::size_t element,
                                 std::size_t wanted) const {
    throw error(ONEBIT_ERROR_ARGUMENT, std::string(name) + " has " + std::to_string(count) +
                                           " elements of " + std::to_string(element) +
                                           " bytes, the plan " + std::to_string(wanted) + " of " +
                                           std::to_string(element_));
  }
  [[noreturn]] void throw_misfit(const input &send, const output &receive) const {
    if (!fits(send, send_))
      throw_misfit("the buffer to send", send.count(), send.element(), send_);
    throw_misfit("the buffer to receive", receive.count(), receive.element(), receive_);
  }
  /* Passes the buffers; if they do not fit it passes NULL, which is an error on the other ranks. */
  onebit_status_t run(onebit_status_t (*call)(const void *, void *, onebit_plan_t),
                      const input &send, const output &receive) {
    if (fits(send, send_) && fits(receive, receive_))
      return check(call(send.data(), receive.data(), get()));
    call(nullptr, nullptr, get());
    throw_misfit(send, receive);
  }
  request start(onebit_status_t (*call)(const void *, void *, onebit_plan_t, onebit_request_t *),
                const input &send, const output &receive) {
    const bool good = fits(send, send_) && fits(receive, receive_);
    onebit_request_t made = nullptr;
    const onebit_status_t status =
        call(good ? send.data() : nullptr, good ? receive.data() : nullptr, get(), &made);
    request started(made);
    if (!good)
      throw_misfit(send, receive); /* `started` waits for the request: the others get the error */
    check(status);
    return started;
  }

  std::size_t send_ = 0, receive_ = 0, element_ = 0;
};

} // namespace onebit

#include "onebit/optimizer.hpp"
#include "onebit/outer.hpp"

#endif
