/* Tests the outcome of wrong arguments and failures. The rank that caused the error must get an
 * error with a message, and the others ONEBIT_ERROR_PEER. No rank may hang, and the next call must
 * succeed. */
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "tests/gpu/plans.h"

#define ELEMENTS 1000

/* --- One rank's arguments are wrong */

/* Memory and a stream that a plan must refuse. */
struct foreign {
  float *host, *device; /* host memory; memory of another device, or NULL */
  cudaStream_t stream;  /* of another device, or NULL */
};

static void open_foreign(struct foreign *foreign) {
  const int here = current_device();
  *foreign = (struct foreign){.host = gpu_allocate(ELEMENTS, sizeof(float))};
  if (other_device() == here)
    return;
  CHECK_CUDA(cudaSetDevice(other_device()));
  CHECK_CUDA(cudaMalloc((void **)&foreign->device, ELEMENTS * sizeof(float)));
  CHECK_CUDA(cudaStreamCreate(&foreign->stream));
  CHECK_CUDA(cudaSetDevice(here));
}

static void close_foreign(const struct foreign *foreign) {
  free(foreign->host);
  CHECK_CUDA(cudaFree(foreign->device));
  if (foreign->stream)
    CHECK_CUDA(cudaStreamDestroy(foreign->stream));
}

/* Defines a function that makes a wrong call. */
#define WRONG_CALL(name, call)                                                                     \
  static onebit_status_t name(struct part *part, const struct foreign *foreign) {                  \
    (void)foreign;                                                                                 \
    return call;                                                                                   \
  }

WRONG_CALL(pass_host_sendbuf, onebit_allreduce(foreign->host, part->out, part->plan))
WRONG_CALL(pass_pinned_recvbuf, onebit_allreduce(part->in, part->received, part->plan))
WRONG_CALL(pass_memory_of_another_device, onebit_allreduce(foreign->device, part->out, part->plan))
WRONG_CALL(pass_no_sendbuf, onebit_allreduce(NULL, part->out, part->plan))

static onebit_status_t pass_no_recvbuf(struct part *part, const struct foreign *foreign) {
  (void)foreign;
  onebit_status_t status = onebit_allreduce_stream(part->in, NULL, part->plan, NULL);
  onebit_plan_synchronize(part->plan);
  return status;
}

static onebit_status_t pass_foreign_stream(struct part *part, const struct foreign *foreign) {
  onebit_status_t status =
      onebit_allreduce_stream(part->in, part->out, part->plan, foreign->stream);
  CHECK_STATUS(onebit_plan_synchronize(part->plan), status);
  return status;
}

static const struct wrong {
  const char *message; /* a part of the error message */
  onebit_status_t (*call)(struct part *part, const struct foreign *foreign);
  bool several; /* needs several devices */
} wrongs[] = {
    {"sendbuf is 0x", pass_host_sendbuf, false},
    {"in host memory", pass_pinned_recvbuf, false},
    {"not of device", pass_memory_of_another_device, true},
    {"sendbuf is NULL", pass_no_sendbuf, false},
    {"recvbuf is NULL", pass_no_recvbuf, false},
    {"not a stream of CUDA device", pass_foreign_stream, true},
};

/* Makes a wrong call on the last rank, on a stream or without one. The other ranks must get an
 * error that names the last rank. */
static void make_wrong_call(struct part *part, const struct wrong *wrong,
                            const struct foreign *foreign, bool on_stream) {
  char rank[32];
  snprintf(rank, sizeof rank, "rank %d", part->size - 1);
  if (part->rank == part->size - 1) {
    CHECK_STATUS(wrong->call(part, foreign), ONEBIT_ERROR_ARGUMENT);
    CHECK_MESSAGE(wrong->message);
    return;
  }
  CHECK_STATUS(on_stream ? part_enqueue_and_wait(part, NULL) : part_call(part), ONEBIT_ERROR_PEER);
  CHECK_MESSAGE(rank);
}

static void make_wrong_calls(const struct gpu_rank *self, void *context) {
  (void)context;
  struct part part;
  struct foreign foreign;
  const struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, ELEMENTS);
  if (!part_create(&part, self->comm, &what, true))
    return;
  open_foreign(&foreign);
  for (size_t i = 0; i < 2 * sizeof wrongs / sizeof wrongs[0]; i++) {
    const struct wrong *wrong = &wrongs[i / 2];
    check_case("rank %d: %s", self->rank, wrong->message);
    if (wrong->several && other_device() == current_device())
      continue;
    part_load_input(&part, (unsigned)i, false);
    struct traces before = part_hash_traces(&part);
    make_wrong_call(&part, wrong, &foreign, i % 2 == 1);
    struct traces after = part_hash_traces(&part);
    CHECK(traces_equal(&before, &after), "a call that failed has changed something");
    CHECK_STATUS(part_call(&part), ONEBIT_OK);
    CHECK_STATUS(onebit_plan_synchronize(part.plan), ONEBIT_OK);
  }
  close_foreign(&foreign);
  part_destroy(&part);
}

static void arguments_are_checked(void) { run_ranks_both(3, make_wrong_calls, NULL); }

static void arguments_are_checked_alone(void) { run_ranks_self(1, make_wrong_calls, NULL); }

/* --- A plan on the host */

/* Calls a plan that is on the host on rank 0, first with device memory, then on a stream. The other
 * ranks' plans are on devices. */
static void call_host_plan_among_devices(const struct gpu_rank *self, void *context) {
  (void)context;
  struct part part;
  void *memory;
  const bool host = self->rank == 0;
  const struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, ELEMENTS);
  if (!part_create(&part, self->comm, &what, !host))
    return;
  part_load_input(&part, 0, false);
  CHECK_CUDA(cudaMalloc(&memory, part.sent_bytes));
  CHECK_STATUS(host ? onebit_allreduce(memory, part.out, part.plan) : part_call(&part),
               host ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
  CHECK_MESSAGE(host ? "memory of CUDA device" : "rank 0");
  CHECK_STATUS(part_enqueue_and_wait(&part, NULL),
               host ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
  CHECK_MESSAGE(host ? "ONEBIT_DEVICE_HOST" : "rank 0");
  CHECK_STATUS(part_call(&part), ONEBIT_OK);
  CHECK_CUDA(cudaFree(memory));
  part_destroy(&part);
}

static void host_plan_works_among_devices(void) {
  gpu_run_loopback(2, call_host_plan_among_devices, NULL);
}

/* --- Another device is current */

static void call_from_another_device(const struct gpu_rank *self, void *context) {
  (void)context;
  struct part part, twin;
  cudaStream_t stream;
  const int here = current_device(), elsewhere = other_device();
  const struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, ELEMENTS);
  if (!part_create(&part, self->comm, &what, true) || !part_create(&twin, self->comm, &what, true))
    return;
  CHECK_CUDA(cudaStreamCreate(&stream));
  part_load_input(&part, 0, false);
  part_load_input(&twin, 0, false);
  CHECK_STATUS(part_call(&twin), ONEBIT_OK);
  CHECK_STATUS(part_call(&twin), ONEBIT_OK);
  CHECK_CUDA(cudaSetDevice(elsewhere));
  CHECK_STATUS(part_call(&part), ONEBIT_OK);
  CHECK(current_device() == elsewhere, "device %d is current after a call", current_device());
  CHECK_STATUS(part_enqueue_and_wait(&part, stream), ONEBIT_OK);
  const struct traces a = part_hash_traces(&part);
  CHECK_STATUS(onebit_plan_reset_residual(part.plan), ONEBIT_OK);
  CHECK(current_device() == elsewhere, "device %d is current at the end", current_device());
  part_destroy(&part);
  CHECK(current_device() == elsewhere, "device %d is current after destroying", current_device());
  CHECK_CUDA(cudaSetDevice(here));
  const struct traces b = part_hash_traces(&twin);
  CHECK(traces_equal(&a, &b), "other bits");
  CHECK_CUDA(cudaStreamDestroy(stream));
  part_destroy(&twin);
}

static void another_device_may_be_current(void) {
  if (other_device() == current_device())
    SKIP("there is one device");
  run_ranks_both(2, call_from_another_device, NULL);
}

/* Calls a plan of device 1 on a thread that has not used CUDA. Device 0 is the thread's current
 * device and must not get a context. */
static void *call_on_new_thread(void *context) {
  struct part *part = context;
  CHECK_STATUS(part_call(part), ONEBIT_OK);
  CHECK_STATUS(part_enqueue_and_wait(part, NULL), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_reset_residual(part->plan), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_destroy(part->plan), ONEBIT_OK);
  part->plan = NULL;
  return NULL;
}

static void run_new_thread(const struct gpu_rank *self, void *context) {
  struct part part;
  pthread_t thread;
  const struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, ELEMENTS);
  (void)context;
  CHECK_CUDA(cudaSetDevice(1));
  if (!part_create(&part, self->comm, &what, true))
    return;
  part_load_input(&part, 0, false);
  emulation_forget_contexts();
  pthread_create(&thread, NULL, call_on_new_thread, &part);
  pthread_join(thread, NULL);
  CHECK(!emulation_has_context(0), "device 0 has a context");
  part_destroy(&part);
}

static void unused_device_gets_no_context(void) {
  gpu_run_loopback(1, run_new_thread, NULL);
  run_ranks_self(1, run_new_thread, NULL);
}

/* --- Failures that the test requests from the emulated device */

static void refuse_device(const struct gpu_rank *self, void *context) {
  onebit_plan_t plan;
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  options.device = ONEBIT_DEVICE_CUDA;
  CHECK_STATUS(onebit_plan_create(self->comm, 100, &options, &plan), ONEBIT_ERROR_UNSUPPORTED);
  CHECK_MESSAGE(context);
}

static void old_device_is_refused(void) {
  setenv("EMULATED_CAPABILITY", "7.5", 1);
  run_ranks_self(1, refuse_device, "compute capability 7");
  unsetenv("EMULATED_CAPABILITY");
  setenv("EMULATED_DEVICES", "0", 1);
  run_ranks_self(1, refuse_device, "no CUDA-capable device");
  unsetenv("EMULATED_DEVICES");
}

static size_t measure_free_memory(void) {
  size_t left = 0, total;
  gpu_await_ranks();
  CHECK_CUDA(cudaMemGetInfo(&left, &total));
  gpu_await_ranks();
  return left;
}

/* Creates plans repeatedly, each time with another allocation that fails on one of the ranks. All
 * ranks must get an error, and all memory must be freed. */
static void fail_allocations(const struct gpu_rank *self, void *context) {
  void (*const fail_at)(long) = *(void (**)(long))context;
  onebit_plan_t plan = NULL;
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  options.device = ONEBIT_DEVICE_CUDA;
  options.block_size = 256;
  options.chunk_size = 256; /* two messages, or four with a single rank */
  for (long n = 1; !plan && n < 1000; n++) {
    const size_t left = measure_free_memory();
    check_case("rank %d, allocation %ld", self->rank, n);
    if (gpu_await_ranks())
      fail_at(n);
    gpu_await_ranks();
    onebit_status_t status = onebit_plan_create(self->comm, ELEMENTS, &options, &plan);
    if (!plan) {
      CHECK(status == ONEBIT_ERROR_MEMORY, "status %d: %s", status, onebit_last_error());
      const size_t now = measure_free_memory();
      CHECK(now == left, "%zu bytes are left of %zu", now, left);
    }
  }
  fail_at(0);
  CHECK(plan, "no plan in the end");
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
}

/* --- A launch fails */

static onebit_status_t ends[2];

/* Makes launch number n fail on one rank, which must return CUDA's error message. The other rank
 * must get an error too, unless it already had all messages. Returns false if the call has fewer
 * than n launches, so that both ranks succeed. */
static bool fail_launch(struct part *part, long n) {
  part_load_input(part, (unsigned)n, false);
  if (gpu_await_ranks())
    emulation_fail_launch(n);
  gpu_await_ranks();
  const onebit_status_t own = n % 2 ? part_enqueue_and_wait(part, NULL) : part_call(part);
  if (own == ONEBIT_ERROR_DEVICE)
    CHECK_MESSAGE("too many resources");
  ends[part->rank] = own;
  gpu_await_ranks();
  emulation_fail_launch(0);
  gpu_await_ranks();
  const onebit_status_t other = ends[part->size - 1 - part->rank];
  const bool hit = own == ONEBIT_ERROR_DEVICE || other == ONEBIT_ERROR_DEVICE;
  CHECK(own == ONEBIT_OK || (hit && (own == ONEBIT_ERROR_DEVICE || own == ONEBIT_ERROR_PEER)),
        "status %d here, %d on the other rank: %s", own, other, onebit_last_error());
  CHECK(n > 2 || part->size == 1 || own != ONEBIT_OK,
        "status %d: the other rank's failure was not reported", own);
  return hit;
}

static void fail_launches(const struct gpu_rank *self, void *context) {
  (void)context;
  struct part part;
  struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, ELEMENTS);
  what.options.block_size = 256;
  what.options.chunk_size = 256;
  if (!part_create(&part, self->comm, &what, true))
    return;
  for (long n = 1; fail_launch(&part, n) && n < 100; n++) {
    check_case("rank %d, launch %ld", self->rank, n);
    part_load_input(&part, 0, false);
    CHECK_STATUS(part_call(&part), ONEBIT_OK);
  }
  part_destroy(&part);
}

static void failed_allocation_is_an_error(void) {
  static void (*const fails[])(long) = {emulation_fail_allocation, ob_memory_fail_at};
  for (int i = 0; i < 2; i++) {
    run_ranks_both(2, fail_allocations, (void *)(uintptr_t)&fails[i]);
    run_ranks_self(1, fail_allocations, (void *)(uintptr_t)&fails[i]);
  }
}

static void failed_launch_of_two(void) { run_ranks_both(2, fail_launches, NULL); }

static void failed_launch_alone(void) { run_ranks_self(1, fail_launches, NULL); }

/* --- An error takes precedence over a skip */

static void enqueue_nonfinite(struct part *part, unsigned step) {
  part_load_input(part, step, part->rank == 0);
  CHECK_STATUS(part_enqueue(part, NULL), ONEBIT_OK);
}

/* Makes a call that fails on rank 0 between calls that are skipped. onebit_plan_synchronize must
 * then return the error, and the other ranks' message must name rank 0. Later calls must
 * succeed. */
static void check_error_after_skips(const struct gpu_rank *self, void *context) {
  (void)context;
  struct part part;
  const struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, 1000);
  if (!part_create(&part, self->comm, &what, true))
    return;
  enqueue_nonfinite(&part, 0);
  enqueue_nonfinite(&part, 1);
  CHECK_STATUS(onebit_plan_synchronize(part.plan), ONEBIT_SKIPPED);
  enqueue_nonfinite(&part, 2);
  void *out = part.out;
  part.out = self->rank == 0 ? NULL : out;
  CHECK_STATUS(part_enqueue(&part, NULL), self->rank == 0 ? ONEBIT_ERROR_ARGUMENT : ONEBIT_OK);
  part.out = out;
  enqueue_nonfinite(&part, 3);
  CHECK_STATUS(onebit_plan_synchronize(part.plan),
               self->rank == 0 ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
  if (self->rank != 0)
    CHECK_MESSAGE("rank 0");
  CHECK_STATUS(onebit_plan_synchronize(part.plan), ONEBIT_OK);
  part_load_input(&part, 4, false);
  CHECK_STATUS(part_call(&part), ONEBIT_OK);
  part_destroy(&part);
}

static void error_outranks_skips_alone(void) { run_ranks_self(1, check_error_after_skips, NULL); }

static void error_outranks_skips_over_nccl(void) {
  run_ranks_nccl(3, check_error_after_skips, NULL);
}

static void error_outranks_skips_over_device_transport(void) {
  run_ranks_aware(3, check_error_after_skips, NULL);
}

static const struct gpu_test tests[] = {
    {"one rank's arguments", arguments_are_checked, ANY_DEVICE},
    {"the only rank's arguments", arguments_are_checked_alone, ANY_DEVICE},
    {"a plan on the host among devices", host_plan_works_among_devices, ANY_DEVICE},
    {"another device is current", another_device_may_be_current, ANY_DEVICE},
    {"no device is new enough", old_device_is_refused, EMULATED},
    {"a device that no plan uses gets no context", unused_device_gets_no_context, EMULATED},
    {"out of memory", failed_allocation_is_an_error, EMULATED},
    {"a launch over loopback and over NCCL", failed_launch_of_two, EMULATED},
    {"a launch alone", failed_launch_alone, EMULATED},
    {"an error after skips, over a transport of device memory",
     error_outranks_skips_over_device_transport, EMULATED},
    {"an error after skips, a rank alone", error_outranks_skips_alone, ANY_DEVICE},
    {"an error after skips, over NCCL", error_outranks_skips_over_nccl, ANY_DEVICE},
};
GPU_SUITE("errors", tests)
