/*
 * Tests calls on streams: their order with earlier and later work, calls on several streams, and
 * several requests in flight. The emulated device runs work as late as CUDA permits, so a missing
 * dependency gives a wrong result.
 */
#include <pthread.h>
#include <stdlib.h>

#include "onebit/momentum.h"
#include "tests/gpu/plans.h"

enum { CALLS = 6, PLANS = 3 };
#define ELEMENTS 3001

static const onebit_operation_t operations[] = {ONEBIT_ALLREDUCE, ONEBIT_ALLGATHER,
                                                ONEBIT_REDUCE_SCATTER};

/* Computes the expected results by making the calls one by one and waiting for each. */
static void compute_expected(onebit_comm_t comm, const struct plan_case *what,
                             uint64_t results[CALLS]) {
  struct part part;
  if (!part_create(&part, comm, what, true))
    return;
  for (unsigned i = 0; i < CALLS; i++) {
    part_load_input(&part, i, false);
    CHECK_STATUS(part_call(&part), ONEBIT_OK);
    part_fetch(&part);
    results[i] = hash_bytes(part.received, part.received_bytes);
  }
  part_destroy(&part);
}

/* The buffers of one call. */
struct call_buffers {
  void *in, *out, *sent, *received;
};

static void open_buffers(struct call_buffers *buffers, struct part *part, unsigned step) {
  CHECK_CUDA(cudaMalloc(&buffers->in, part->sent_bytes));
  CHECK_CUDA(cudaMalloc(&buffers->out, part->received_bytes));
  CHECK_CUDA(cudaHostAlloc(&buffers->sent, part->sent_bytes, cudaHostAllocDefault));
  CHECK_CUDA(cudaHostAlloc(&buffers->received, part->received_bytes, cudaHostAllocDefault));
  part->sent = buffers->sent;
  part_write_input(part, step, false);
}

static void close_buffers(const struct call_buffers *buffers) {
  CHECK_CUDA(cudaFree(buffers->in));
  CHECK_CUDA(cudaFree(buffers->out));
  CHECK_CUDA(cudaFreeHost(buffers->sent));
  CHECK_CUDA(cudaFreeHost(buffers->received));
}

/* Enqueues a call with the copies of its input and result. Then overwrites both buffers on the
 * stream, so that a call that runs too late gets another result. */
static void enqueue_with_buffers(struct part *part, const struct call_buffers *buffers,
                                 cudaStream_t stream) {
  part->in = buffers->in;
  part->out = buffers->out;
  part->sent = buffers->sent;
  part->received = buffers->received;
  part_load_on(part, stream);
  CHECK_STATUS(part_enqueue(part, stream), ONEBIT_OK);
  part_fetch_on(part, stream);
  CHECK_CUDA(cudaMemsetAsync(part->in, 0xff, part->sent_bytes, stream));
  CHECK_CUDA(cudaMemsetAsync(part->out, 0xff, part->received_bytes, stream));
}

/* Makes the calls on two streams alternately, or all on one, and compares their results. */
static void compare_on_streams(onebit_comm_t comm, const struct plan_case *what, cudaStream_t one,
                               cudaStream_t two, const uint64_t wanted[CALLS]) {
  struct part part;
  struct call_buffers buffers[CALLS];
  if (!part_create(&part, comm, what, true))
    return;
  struct part own = part;
  for (unsigned i = 0; i < CALLS; i++)
    open_buffers(&buffers[i], &part, i);
  for (unsigned i = 0; i < CALLS; i++)
    enqueue_with_buffers(&part, &buffers[i], i % 2 ? two : one);
  CHECK_STATUS(onebit_plan_synchronize(part.plan), ONEBIT_OK);
  CHECK_CUDA(cudaStreamSynchronize(one));
  CHECK_CUDA(cudaStreamSynchronize(two));
  for (unsigned i = 0; i < CALLS; i++) {
    CHECK(hash_bytes(buffers[i].received, part.received_bytes) == wanted[i], "call %u: other bits",
          i);
    close_buffers(&buffers[i]);
  }
  part_destroy(&own);
}

static void check_order(const struct gpu_rank *self, void *context) {
  (void)context;
  cudaStream_t blocking, other;
  CHECK_CUDA(cudaStreamCreate(&blocking));
  CHECK_CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  for (size_t i = 0; i < sizeof operations / sizeof operations[0]; i++) {
    const struct plan_case what = default_plan_case(operations[i], ELEMENTS);
    uint64_t wanted[CALLS] = {0};
    check_case("rank %d of %d, operation %d", self->rank, self->size, (int)operations[i]);
    compute_expected(self->comm, &what, wanted);
    compare_on_streams(self->comm, &what, other, other, wanted);
    compare_on_streams(self->comm, &what, NULL, NULL, wanted);
    compare_on_streams(self->comm, &what, blocking, other, wanted);
  }
  CHECK_CUDA(cudaStreamDestroy(blocking));
  CHECK_CUDA(cudaStreamDestroy(other));
}

/* Starts requests on all plans, makes a call on one more plan, and completes the requests in
 * reverse order. */
static void check_requests(const struct gpu_rank *self, void *context) {
  (void)context;
  struct part parts[PLANS + 1];
  uint64_t wanted[CALLS] = {0};
  onebit_request_t requests[PLANS];
  const struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, ELEMENTS);
  compute_expected(self->comm, &what, wanted);
  for (int p = 0; p <= PLANS; p++)
    if (!part_create(&parts[p], self->comm, &what, true))
      return;
  for (unsigned i = 0; i < CALLS; i++) {
    for (int p = 0; p <= PLANS; p++)
      part_load_input(&parts[p], i, false);
    for (int p = 0; p < PLANS; p++)
      CHECK_STATUS(part_start(&parts[p], &requests[p]), ONEBIT_OK);
    CHECK_STATUS(onebit_plan_synchronize(parts[0].plan), ONEBIT_ERROR_BUSY);
    CHECK_STATUS(i % 2 ? part_call(&parts[PLANS]) : part_enqueue_and_wait(&parts[PLANS], NULL),
                 ONEBIT_OK);
    for (int p = PLANS - 1; p >= 0; p--)
      CHECK_STATUS(onebit_wait(&requests[p]), ONEBIT_OK);
    for (int p = 0; p <= PLANS; p++) {
      part_fetch(&parts[p]);
      CHECK(hash_bytes(parts[p].received, parts[p].received_bytes) == wanted[i],
            "plan %d, call %u: other bits", p, i);
    }
  }
  for (int p = 0; p <= PLANS; p++)
    part_destroy(&parts[p]);
}

static void calls_keep_order(void) { run_ranks_both(3, check_order, NULL); }

static void calls_keep_order_alone(void) { run_ranks_self(1, check_order, NULL); }

static void requests_end_in_any_order(void) { run_ranks_both(3, check_requests, NULL); }

static void requests_end_in_any_order_alone(void) { run_ranks_self(1, check_requests, NULL); }

/* --- Graphs */

enum { NOT_FINITE = 7 }; /* the replay whose input is not finite */

static void replay_once(struct part *part, struct part *other, cudaGraphExec_t graph,
                        cudaStream_t stream, unsigned number) {
  const bool not_finite = number == NOT_FINITE;
  part_write_input(part, number, not_finite && part->rank == 0);
  part_load_on(part, stream);
  CHECK_CUDA(cudaGraphLaunch(graph, stream));
  part_fetch_on(part, stream);
  CHECK_CUDA(cudaStreamSynchronize(stream));
  part_load_input(other, number, not_finite && part->rank == 0);
  CHECK_STATUS(part_call(other), not_finite ? ONEBIT_SKIPPED : ONEBIT_OK);
  part_fetch(other);
  CHECK(hash_bytes(part->received, part->received_bytes) ==
            hash_bytes(other->received, other->received_bytes),
        "replay %u: other bits than a call's", number);
  if (not_finite)
    CHECK_STATUS(onebit_plan_synchronize(part->plan), ONEBIT_SKIPPED);
}

/* Replays a graph of a plan's call, in which messages overlap with kernels. A second plan, with one
 * message, makes the same calls without a graph. Every replay, and a call without a graph at the
 * end, must give the same bits as the second plan's call. */
static void compare_replays(const struct gpu_rank *self, void *context) {
  const unsigned replays = *(const unsigned *)context;
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (size_t i = 0; i < sizeof operations / sizeof operations[0]; i++) {
    struct part part, other;
    struct plan_case what = default_plan_case(operations[i], 301);
    what.options.block_size = 32;
    check_case("rank %d of %d, operation %d", self->rank, self->size, (int)operations[i]);
    struct plan_case cut = what;
    cut.options.chunk_size = operations[i] == ONEBIT_ALLREDUCE ? 64 : 160; /* two messages */
    if (!part_create(&part, self->comm, &cut, true) ||
        !part_create(&other, self->comm, &what, true))
      return;
    CHECK((part.info.chunks == 2 || self->size == 1) && other.info.chunks == 1,
          "%zu and %zu messages", part.info.chunks, other.info.chunks);
    cudaGraphExec_t graph = part_capture(&part, stream);
    for (unsigned number = 0; graph && number < replays; number++)
      replay_once(&part, &other, graph, stream, number);
    CHECK_STATUS(onebit_plan_synchronize(part.plan), ONEBIT_OK);
    part_load_input(&part, replays, false);
    CHECK_STATUS(part_call(&part), ONEBIT_OK);
    part_load_input(&other, replays, false);
    CHECK_STATUS(part_call(&other), ONEBIT_OK);
    const struct traces a = part_hash_traces(&part), b = part_hash_traces(&other);
    CHECK(traces_equal(&a, &b), "a call after the replays: other bits");
    if (graph)
      CHECK_CUDA(cudaGraphExecDestroy(graph));
    part_destroy(&part);
    part_destroy(&other);
  }
  CHECK_CUDA(cudaStreamDestroy(stream));
}

/* Returns the number of replays. The emulated device runs threads one by one, so it makes a tenth
 * of them. */
static unsigned replay_count(void) {
  const size_t replays = IS_EMULATED ? 100 : 1000;
  return (unsigned)(replays / test_share()) + NOT_FINITE + 2;
}

static void replays_equal_calls_alone(void) {
  unsigned replays = replay_count();
  run_ranks_self(1, compare_replays, &replays);
}

static void replays_equal_calls_over_nccl(void) {
  unsigned replays = replay_count();
  run_ranks_nccl(3, compare_replays, &replays);
}

static void refuse_capture(struct part *part, enum cudaStreamCaptureMode mode) {
  cudaStream_t stream;
  cudaGraph_t graph = NULL;
  size_t nodes = 1;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK_CUDA(cudaStreamBeginCapture(stream, mode));
  CHECK_STATUS(part_enqueue(part, stream), ONEBIT_ERROR_UNSUPPORTED);
  if (CHECK_CUDA(cudaStreamEndCapture(stream, &graph))) {
    CHECK_CUDA(cudaGraphGetNodes(graph, NULL, &nodes));
    CHECK(nodes == 0, "%zu nodes of a call that was refused", nodes);
    CHECK_CUDA(cudaGraphDestroy(graph));
  }
  CHECK_CUDA(cudaStreamDestroy(stream));
}

/* Checks that a call that needs the host's work cannot be captured. The capture must end properly,
 * and later calls must succeed. */
static void check_refused_capture(const struct gpu_rank *self, void *context) {
  (void)context;
  struct part part;
  const struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, ELEMENTS);
  if (!part_create(&part, self->comm, &what, true))
    return;
  part_load_input(&part, 0, false);
  refuse_capture(&part, cudaStreamCaptureModeThreadLocal);
  refuse_capture(&part, cudaStreamCaptureModeRelaxed);
  CHECK_STATUS(onebit_plan_synchronize(part.plan), ONEBIT_ERROR_UNSUPPORTED);
  CHECK_STATUS(part_call(&part), ONEBIT_OK);
  part_destroy(&part);
}

static void capture_by_host_is_refused(void) { gpu_run_loopback(2, check_refused_capture, NULL); }

/* --- Another thread captures */

/* Regions of memory: zeros, NaNs, and the result. */
enum { ZEROS, NANS, RESULT, REGIONS };

struct beside {
  onebit_comm_t comm;
  int device;
  cudaStream_t stream;
  float *memory[REGIONS];
};

static void make_calls(const struct beside *with) {
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  onebit_plan_t plan;
  options.device = ONEBIT_DEVICE_CUDA;
  if (!CHECK_STATUS(onebit_plan_create(with->comm, ELEMENTS, &options, &plan), ONEBIT_OK))
    return;
  for (int k = ZEROS; k <= NANS; k++) {
    const onebit_status_t wanted = k == NANS ? ONEBIT_SKIPPED : ONEBIT_OK;
    CHECK_STATUS(onebit_allreduce(with->memory[k], with->memory[RESULT], plan), wanted);
    onebit_allreduce_stream(with->memory[k], with->memory[RESULT], plan, with->stream);
    CHECK_STATUS(onebit_plan_synchronize(plan), wanted);
  }
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
}

static void make_steps(const struct beside *with) {
  onebit_momentum_options_t options = ONEBIT_MOMENTUM_OPTIONS_INIT;
  onebit_optimizer_t optimizer;
  const onebit_tensor_t tensor = {
      .parameter = with->memory[RESULT], .gradient = with->memory[NANS], .count = ELEMENTS};
  options.common.device = ONEBIT_DEVICE_CUDA;
  if (!CHECK_STATUS(onebit_momentum_create(with->comm, &tensor, 1, &options, &optimizer),
                    ONEBIT_OK))
    return;
  CHECK_STATUS(onebit_optimizer_set_gradient(optimizer, 0, with->memory[ZEROS]), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_step(optimizer, 1), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_step_stream(optimizer, 1, with->stream), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_synchronize(optimizer), ONEBIT_OK);
  onebit_optimizer_destroy(optimizer);
}

static void *work_beside(void *context) {
  const struct beside *with = context;
  CHECK_CUDA(cudaSetDevice(with->device));
  check_case("device %d", with->device);
  make_calls(with);
  make_steps(with);
  return NULL;
}

/* Checks that another thread can use the library during a global capture. CUDA makes such a capture
 * invalid if another thread calls certain functions, unless that thread has excluded itself
 * (cudaThreadExchangeStreamCaptureMode). */
static void work_during_capture(const struct gpu_rank *self, void *context) {
  struct beside with = {.comm = self->comm};
  cudaStream_t stream;
  cudaGraph_t graph = NULL;
  pthread_t thread;
  (void)context;
  CHECK_CUDA(cudaGetDevice(&with.device));
  for (int k = 0; k < REGIONS; k++) {
    CHECK_CUDA(cudaMalloc((void **)&with.memory[k], ELEMENTS * sizeof(float)));
    CHECK_CUDA(cudaMemset(with.memory[k], k == NANS ? 0xff : 0, ELEMENTS * sizeof(float)));
  }
  CHECK_CUDA(cudaStreamSynchronize(NULL));
  CHECK_CUDA(cudaStreamCreateWithFlags(&with.stream, cudaStreamNonBlocking));
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  pthread_create(&thread, NULL, work_beside, &with);
  pthread_join(thread, NULL);
  if (CHECK_CUDA(cudaStreamEndCapture(stream, &graph)))
    CHECK_CUDA(cudaGraphDestroy(graph));
  CHECK_CUDA(cudaStreamDestroy(stream));
  CHECK_CUDA(cudaStreamDestroy(with.stream));
  for (int k = 0; k < REGIONS; k++)
    CHECK_CUDA(cudaFree(with.memory[k]));
}

static void work_during_capture_succeeds(void) {
  run_ranks_both(1, work_during_capture, NULL); /* threads of other ranks would also disturb the
                                                 * capture */
  run_ranks_self(1, work_during_capture, NULL);
}

static const struct gpu_test tests[] = {
    {"in order with other work", calls_keep_order, ANY_DEVICE},
    {"in order, a rank alone", calls_keep_order_alone, ANY_DEVICE},
    {"requests of several plans", requests_end_in_any_order, ANY_DEVICE},
    {"requests, a rank alone", requests_end_in_any_order_alone, ANY_DEVICE},
    {"replays equal calls, a rank alone", replays_equal_calls_alone, ANY_DEVICE},
    {"replays equal calls over NCCL", replays_equal_calls_over_nccl, ANY_DEVICE},
    {"no graph where the host takes part", capture_by_host_is_refused, ANY_DEVICE},
    {"beside another thread's capture", work_during_capture_succeeds, ANY_DEVICE},
};
GPU_SUITE("streams", tests)
