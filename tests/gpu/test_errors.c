/* The outcome of wrong arguments and failures: an error with a message on the rank that caused it,
 * ONEBIT_ERROR_PEER on the others, and no rank hangs; then the next call succeeds. */
#define _DEFAULT_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/plans.h"

#ifdef ONEBIT_EMULATED_CUDA
#include <emulation.h>
#include <pthread.h>

#include "base/memory.h"
#endif

#define ELEMENTS 1000

static int device_count(void) {
  int devices = 0;
  CHECK_CUDA(cudaGetDeviceCount(&devices));
  return devices;
}

static int current_device(void) {
  int device = -1;
  CHECK_CUDA(cudaGetDevice(&device));
  return device;
}

/* Another device than the current one; there are several. */
static int other_device(void) { return (current_device() + 1) % device_count(); }

/* --- One rank's arguments are wrong */

/* The memory from which a test makes wrong arguments. */
struct foreign {
  float *host, *device; /* memory of the host; memory of another device, or NULL */
  cudaStream_t stream;  /* of another device, or NULL */
};

static void open_foreign(struct foreign *foreign) {
  const int here = current_device();
  *foreign = (struct foreign){.host = gpu_allocate(ELEMENTS, sizeof(float))};
  if (device_count() == 1)
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

/* Defines a wrong call. */
#define CALLS(name, call)                                                                          \
  static onebit_status_t name(struct part *part, const struct foreign *foreign) {                  \
    (void)foreign;                                                                                 \
    return call;                                                                                   \
  }

CALLS(host_sendbuf, onebit_allreduce(foreign->host, part->out, part->plan))
CALLS(pinned_recvbuf, onebit_allreduce(part->in, part->received, part->plan))
CALLS(another_devices, onebit_allreduce(foreign->device, part->out, part->plan))
CALLS(no_sendbuf, onebit_allreduce(NULL, part->out, part->plan))
CALLS(misaligned, onebit_allreduce((char *)part->in + 1, part->out, part->plan))
CALLS(overlapping, onebit_allreduce(part->in, (float *)part->in + 1, part->plan))
CALLS(wrong_operation, onebit_allgather(part->in, part->out, part->plan))
CALLS(no_request, onebit_iallreduce(part->in, part->out, part->plan, NULL))

static onebit_status_t no_recvbuf(struct part *part, const struct foreign *foreign) {
  (void)foreign;
  onebit_status_t status = onebit_allreduce_stream(part->in, NULL, part->plan, NULL);
  onebit_plan_synchronize(part->plan);
  return status;
}

static onebit_status_t foreign_stream(struct part *part, const struct foreign *foreign) {
  onebit_status_t status =
      onebit_allreduce_stream(part->in, part->out, part->plan, foreign->stream);
  CHECK_STATUS(onebit_plan_synchronize(part->plan), status);
  return status;
}

static const struct wrong {
  const char *words; /* a part of the error's message */
  onebit_status_t (*call)(struct part *part, const struct foreign *foreign);
  bool several; /* needs several devices */
} wrongs[] = {
    {"sendbuf is 0x", host_sendbuf, false},
    {"memory of the host", pinned_recvbuf, false},
    {"not of device", another_devices, true},
    {"sendbuf is NULL", no_sendbuf, false},
    {"recvbuf is NULL", no_recvbuf, false},
    {"not aligned to 4 bytes", misaligned, false},
    {"overlap", overlapping, false},
    {"plan is for allreduce, not for allgather", wrong_operation, false},
    {"not a stream of CUDA device", foreign_stream, true},
    {"request is NULL", no_request, false},
};

static void load(struct part *part, unsigned step) {
  part_write_input(part, step, false);
  part_load(part);
  CHECK_CUDA(cudaStreamSynchronize(NULL));
}

/* Makes an error on the last rank, on a stream or not; the other ranks learn of it. */
static void err(struct part *part, const struct wrong *wrong, const struct foreign *foreign,
                bool on_stream) {
  char rank[32];
  snprintf(rank, sizeof rank, "rank %d", part->size - 1);
  if (part->rank == part->size - 1) {
    CHECK_STATUS(wrong->call(part, foreign), ONEBIT_ERROR_ARGUMENT);
    CHECK(strstr(onebit_last_error(), wrong->words), "not '%s' but: %s", wrong->words,
          onebit_last_error());
    return;
  }
  CHECK_STATUS(on_stream ? part_enqueue_and_wait(part, NULL) : part_call(part), ONEBIT_ERROR_PEER);
  CHECK(strstr(onebit_last_error(), rank), "not '%s' but: %s", rank, onebit_last_error());
}

static void errs(const struct gpu_rank *self, void *context) {
  (void)context;
  struct part part;
  struct foreign foreign;
  const struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, ELEMENTS);
  if (!part_create(&part, self->comm, &what, true))
    return;
  open_foreign(&foreign);
  for (size_t i = 0; i < 2 * sizeof wrongs / sizeof wrongs[0]; i++) {
    const struct wrong *wrong = &wrongs[i / 2];
    check_case("rank %d: %s", self->rank, wrong->words);
    if (wrong->several && device_count() == 1)
      continue;
    load(&part, (unsigned)i);
    struct traces before = part_hash_traces(&part);
    err(&part, wrong, &foreign, i % 2 == 1);
    struct traces after = part_hash_traces(&part);
    CHECK(traces_equal(&before, &after), "a call that failed has changed something");
    CHECK_STATUS(part_call(&part), ONEBIT_OK);
    CHECK_STATUS(onebit_plan_synchronize(part.plan), ONEBIT_OK);
  }
  close_foreign(&foreign);
  part_destroy(&part);
}

static void arguments(void) { run_ranks_both(3, errs, NULL); }

static void arguments_alone(void) { run_ranks_self(1, errs, NULL); }

/* --- A plan on the host */

/* Rank 0's plan is on the host, and is given device memory; then it is called on a stream. */
static void host_among_devices(const struct gpu_rank *self, void *context) {
  (void)context;
  struct part part;
  void *memory;
  const bool host = self->rank == 0;
  const struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, ELEMENTS);
  if (!part_create(&part, self->comm, &what, !host))
    return;
  load(&part, 0);
  CHECK_CUDA(cudaMalloc(&memory, part.sent_bytes));
  CHECK_STATUS(host ? onebit_allreduce(memory, part.out, part.plan) : part_call(&part),
               host ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
  CHECK(!host || strstr(onebit_last_error(), "memory of CUDA device"), "%s", onebit_last_error());
  CHECK_STATUS(part_enqueue_and_wait(&part, NULL),
               host ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
  CHECK(!host || strstr(onebit_last_error(), "ONEBIT_DEVICE_HOST"), "%s", onebit_last_error());
  CHECK_STATUS(part_call(&part), ONEBIT_OK);
  CHECK_CUDA(cudaFree(memory));
  part_destroy(&part);
}

static void host_plan(void) { gpu_run_loopback(2, host_among_devices, NULL); }

/* --- Another device is current */

static void from_elsewhere(const struct gpu_rank *self, void *context) {
  (void)context;
  struct part part, twin;
  cudaStream_t stream;
  const int here = current_device(), elsewhere = other_device();
  const struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, ELEMENTS);
  if (!part_create(&part, self->comm, &what, true) || !part_create(&twin, self->comm, &what, true))
    return;
  CHECK_CUDA(cudaStreamCreate(&stream));
  load(&part, 0);
  load(&twin, 0);
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

static void another_is_current(void) {
  if (device_count() == 1)
    SKIP("there is one device");
  run_ranks_both(2, from_elsewhere, NULL);
}

/* A thread that has not used CUDA, and to which device 0 is current, works on a plan of another:
 * what it does leaves no context on device 0. */
#ifdef ONEBIT_EMULATED_CUDA
static void *call_there(void *context) {
  struct part *part = context;
  CHECK_STATUS(part_call(part), ONEBIT_OK);
  CHECK_STATUS(part_enqueue_and_wait(part, NULL), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_reset_residual(part->plan), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_destroy(part->plan), ONEBIT_OK);
  part->plan = NULL;
  return NULL;
}

static void from_new_thread(const struct gpu_rank *self, void *context) {
  struct part part;
  pthread_t thread;
  const struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, ELEMENTS);
  (void)context;
  CHECK_CUDA(cudaSetDevice(1));
  if (!part_create(&part, self->comm, &what, true))
    return;
  load(&part, 0);
  emulation_forget_contexts();
  pthread_create(&thread, NULL, call_there, &part);
  pthread_join(thread, NULL);
  CHECK(!emulation_has_context(0), "device 0 has a context");
  part_destroy(&part);
}

static void no_context(void) {
  gpu_run_loopback(1, from_new_thread, NULL);
  run_ranks_self(1, from_new_thread, NULL);
}
#endif

/* --- Ranks that do not agree */

static void differ(const struct gpu_rank *self, void *context) {
  (void)context;
  onebit_plan_t plan;
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  options.device = ONEBIT_DEVICE_CUDA;
  CHECK_STATUS(onebit_plan_create(self->comm, 100 + (size_t)self->rank, &options, &plan),
               ONEBIT_ERROR_MISMATCH);
  CHECK(!plan && strstr(onebit_last_error(), "count differs"), "%s", onebit_last_error());
  options.block_size = self->rank == 1 ? 33 : 0;
  CHECK_STATUS(onebit_plan_create(self->comm, 100, &options, &plan),
               self->rank == 1 ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
}

static void disagreement(void) { run_ranks_both(3, differ, NULL); }

#ifdef ONEBIT_EMULATED_CUDA

/* --- Failures on demand */

static void refuse_device(const struct gpu_rank *self, void *context) {
  onebit_plan_t plan;
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  options.device = ONEBIT_DEVICE_CUDA;
  CHECK_STATUS(onebit_plan_create(self->comm, 100, &options, &plan), ONEBIT_ERROR_UNSUPPORTED);
  CHECK(strstr(onebit_last_error(), context), "not '%s' but: %s", (const char *)context,
        onebit_last_error());
}

static void no_device(void) {
  setenv("EMULATED_CAPABILITY", "7.5", 1);
  run_ranks_self(1, refuse_device, "compute capability 7");
  unsetenv("EMULATED_CAPABILITY");
  setenv("EMULATED_DEVICES", "0", 1);
  run_ranks_self(1, refuse_device, "no CUDA-capable device");
  unsetenv("EMULATED_DEVICES");
}

static pthread_barrier_t barrier;

static bool first_of_all(void) {
  return pthread_barrier_wait(&barrier) == PTHREAD_BARRIER_SERIAL_THREAD;
}

static size_t memory_left(void) {
  size_t left = 0, total;
  first_of_all();
  CHECK_CUDA(cudaMemGetInfo(&left, &total));
  first_of_all();
  return left;
}

/* Fails every allocation of a plan once, on one rank or the other: all ranks get an error, and all
 * memory is freed. */
static void out_of_memory(const struct gpu_rank *self, void *context) {
  void (*const fail_at)(long) = *(void (**)(long))context;
  onebit_plan_t plan = NULL;
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  options.device = ONEBIT_DEVICE_CUDA;
  options.block_size = 256;
  options.chunk_size = 256; /* two messages, or four of one rank */
  for (long n = 1; !plan && n < 1000; n++) {
    const size_t left = memory_left();
    check_case("rank %d, allocation %ld", self->rank, n);
    if (first_of_all())
      fail_at(n);
    first_of_all();
    onebit_status_t status = onebit_plan_create(self->comm, ELEMENTS, &options, &plan);
    if (!plan) {
      CHECK(status == ONEBIT_ERROR_MEMORY, "status %d: %s", status, onebit_last_error());
      const size_t now = memory_left();
      CHECK(now == left, "%zu bytes are left of %zu", now, left);
    }
  }
  fail_at(0);
  CHECK(plan, "no plan in the end");
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
}

/* --- A launch fails */

static onebit_status_t ends[2];

/* Fails one rank's launch: that rank returns CUDA's message, and the other learns of the failure,
 * unless it had all messages already. False: the launch was not reached, and both ranks succeed. */
static bool fail_launch(struct part *part, long n) {
  load(part, (unsigned)n);
  if (first_of_all())
    emulation_fail_launch(n);
  first_of_all();
  const onebit_status_t own = n % 2 ? part_enqueue_and_wait(part, NULL) : part_call(part);
  CHECK(own != ONEBIT_ERROR_DEVICE || strstr(onebit_last_error(), "too many resources"), "%s",
        onebit_last_error());
  ends[part->rank] = own;
  first_of_all();
  emulation_fail_launch(0);
  first_of_all();
  const onebit_status_t other = ends[part->size - 1 - part->rank];
  const bool hit = own == ONEBIT_ERROR_DEVICE || other == ONEBIT_ERROR_DEVICE;
  CHECK(own == ONEBIT_OK || (hit && (own == ONEBIT_ERROR_DEVICE || own == ONEBIT_ERROR_PEER)),
        "status %d here, %d on the other rank: %s", own, other, onebit_last_error());
  CHECK(n > 2 || part->size == 1 || own != ONEBIT_OK,
        "status %d: the other's failure is unheard of", own);
  return hit;
}

static void launches(const struct gpu_rank *self, void *context) {
  (void)context;
  struct part part;
  struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, ELEMENTS);
  what.options.block_size = 256;
  what.options.chunk_size = 256;
  if (!part_create(&part, self->comm, &what, true))
    return;
  for (long n = 1; fail_launch(&part, n) && n < 100; n++) {
    check_case("rank %d, launch %ld", self->rank, n);
    load(&part, 0);
    CHECK_STATUS(part_call(&part), ONEBIT_OK);
  }
  part_destroy(&part);
}

static void with_barrier(int size, plan_ranks *ranks, gpu_rank_body *body, void *context) {
  pthread_barrier_init(&barrier, NULL, (unsigned)size);
  ranks(size, body, context);
  pthread_barrier_destroy(&barrier);
}

static void memory(void) {
  static void (*const fails[])(long) = {emulation_fail_allocation, ob_memory_fail_at};
  for (int i = 0; i < 2; i++) {
    with_barrier(2, gpu_run_loopback, out_of_memory, (void *)(uintptr_t)&fails[i]);
    with_barrier(2, run_ranks_nccl, out_of_memory, (void *)(uintptr_t)&fails[i]);
    with_barrier(1, run_ranks_self, out_of_memory, (void *)(uintptr_t)&fails[i]);
  }
}

static void launch_loopback(void) { with_barrier(2, gpu_run_loopback, launches, NULL); }

static void launch_nccl(void) { with_barrier(2, run_ranks_nccl, launches, NULL); }

static void launch_alone(void) { with_barrier(1, run_ranks_self, launches, NULL); }

#endif

static const struct gpu_test tests[] = {
    {"one rank's arguments", arguments, false},
    {"the only rank's arguments", arguments_alone, false},
    {"a plan on the host among devices", host_plan, false},
    {"another device is current", another_is_current, false},
    {"ranks that do not agree", disagreement, false},
#ifdef ONEBIT_EMULATED_CUDA
    {"no device is new enough", no_device, false},
    {"a device that no plan uses gets no context", no_context, false},
    {"out of memory", memory, false},
    {"a launch over loopback", launch_loopback, false},
    {"a launch over NCCL", launch_nccl, false},
    {"a launch alone", launch_alone, false},
#endif
};
GPU_SUITE("errors", tests)
