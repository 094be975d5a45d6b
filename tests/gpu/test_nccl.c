/*
 * Tests communicators over NCCL: calls that the library refuses, and the outcome of calls when NCCL
 * fails or a rank aborts.
 */
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "collectives/communicator.h"
#include "collectives/watch.h"
#include "onebit/adam.h"
#include "tests/gpu/plans.h"

#ifdef ONEBIT_HAVE_NCCL
#include "onebit/nccl.h"

enum { ELEMENTS = 1000 };

/* --- Plans and communicators that are refused over NCCL */

static void create_host_plan(const struct gpu_rank *self, void *context) {
  (void)context;
  onebit_plan_t plan;
  CHECK_STATUS(onebit_plan_create(self->comm, ELEMENTS, NULL, &plan), ONEBIT_ERROR_UNSUPPORTED);
  CHECK(!plan, "a plan nevertheless");
  CHECK_MESSAGE("ONEBIT_DEVICE_HOST");
}

static void host_plans_are_refused(void) { run_ranks_nccl(2, create_host_plan, NULL); }

/* Creates objects of a communicator while rank 1's current device is not the communicator's. The
 * other ranks must get an error too. */
static void create_on_wrong_device(const struct gpu_rank *self, void *context) {
  (void)context;
  onebit_plan_t plan;
  onebit_comm_t comm;
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  int here = 0;
  options.device = ONEBIT_DEVICE_CUDA;
  CHECK_CUDA(cudaGetDevice(&here));
  if (self->rank == 1)
    CHECK_CUDA(cudaSetDevice(0));
  const onebit_status_t wanted = self->rank == 1 ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER;
  const char *message = self->rank == 1 ? "device 0 is the current one" : "rank 1";
  CHECK_STATUS(onebit_comm_create_nccl(rank_nccl_comm(), &comm), wanted);
  CHECK(!comm, "a communicator nevertheless");
  CHECK_MESSAGE(message);
  CHECK_STATUS(onebit_plan_create(self->comm, ELEMENTS, &options, &plan), wanted);
  CHECK(!plan, "a plan nevertheless");
  CHECK_MESSAGE(message);
  CHECK_CUDA(cudaSetDevice(here));
}

/* If the machine has only one device, there is no wrong device, and nothing is tested. */
static void another_device_is_refused(void) {
  int devices = 0;
  CHECK_CUDA(cudaGetDeviceCount(&devices));
  if (!IS_EMULATED && devices < 3)
    SKIP("there are %d devices: each of three ranks wants one of its own", devices);
  run_ranks_nccl(3, create_on_wrong_device, NULL);
}

/* --- NCCL fails */

/* On the emulated device ranks are threads, and a failure of one rank reaches all ranks at once.
 * gpu_await_ranks therefore delays the failure until no rank is in an earlier call. */

static bool create_part(struct part *part, const struct gpu_rank *self) {
  const struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, ELEMENTS);
  if (!part_create(part, self->comm, &what, true))
    return false;
  part_load_input(part, 0, false);
  return true;
}

/* Checks that, after the transport has failed, every call fails at once with the transport
 * error. */
static void check_broken(struct part *part) {
  onebit_request_t request;
  CHECK_STATUS(part_call(part), ONEBIT_ERROR_TRANSPORT);
  CHECK_STATUS(part_enqueue(part, NULL), ONEBIT_ERROR_TRANSPORT);
  CHECK_STATUS(part_start(part, &request), ONEBIT_ERROR_TRANSPORT);
  CHECK_STATUS(onebit_scale_result_stream(part->out, 1, part->plan, NULL), ONEBIT_ERROR_TRANSPORT);
  CHECK_STATUS(onebit_plan_reset_residual_stream(part->plan, NULL), ONEBIT_ERROR_TRANSPORT);
}

/* Breaks rank 0's link during a blocking call, or during a call on a stream. In the second case the
 * test waits for the call afterwards. */
static void break_link(const struct gpu_rank *self, void *context) {
  const bool *on_stream = context;
  struct part part;
  if (!create_part(&part, self))
    return;
  CHECK_STATUS(part_call(&part), ONEBIT_OK);
  gpu_await_ranks();
  if (self->rank == 0)
    emulation_nccl_break(rank_nccl_comm());
  if (*on_stream) {
    const onebit_status_t put = part_enqueue(&part, NULL);
    CHECK(put == ONEBIT_OK || put == ONEBIT_ERROR_TRANSPORT, "status %d", put);
    CHECK_STATUS(onebit_plan_synchronize(part.plan), ONEBIT_ERROR_TRANSPORT);
  } else {
    CHECK_STATUS(part_call(&part), ONEBIT_ERROR_TRANSPORT);
  }
  CHECK_MESSAGE("NCCL");
  forget_nccl_comm();
  check_broken(&part);
  part_destroy(&part);
}

static void broken_link_is_an_error(void) {
  bool on_stream[] = {false, true};
  for (int i = 0; i < 2; i++)
    run_ranks_nccl(3, break_link, &on_stream[i]);
}

/* --- Features of newer versions of NCCL */

/* The element count of a dense plan that is just large enough to use a window, in one chunk. It
 * makes the messages of all ranks equally long. */
enum { LARGE = 3 * 2048 * 33 };

static void *results; /* all ranks' results of the previous call */

static void compare_with_older_nccl(const struct gpu_rank *self, void *context) {
  struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, LARGE);
  struct part part;
  const bool *older = context;
  unsigned char *before = (unsigned char *)results + (size_t)self->rank * LARGE * sizeof(float);
  what.options.wire = ONEBIT_WIRE_DENSE;
  what.options.chunk_size = LARGE;
  if (!part_create(&part, self->comm, &what, true))
    return;
  part_load_input(&part, 0, false);
  CHECK_STATUS(part_call(&part), ONEBIT_OK);
  part_fetch(&part);
  if (*older)
    memcpy(before, part.received, part.received_bytes);
  CHECK(!memcmp(before, part.received, part.received_bytes), "other bits than with NCCL 2.18");
  gpu_await_ranks();
  CHECK(emulation_nccl_counts().windows == (*older ? 0 : 3), "%ld windows",
        emulation_nccl_counts().windows);
  gpu_await_ranks();
  part_destroy(&part);
}

static void windows_keep_results(void) {
  bool older[] = {true, false};
  results = gpu_allocate(3 * (size_t)LARGE, sizeof(float));
  for (int k = 0; k < 2; k++) {
    setenv("EMULATED_NCCL_VERSION", older[k] ? "21800" : "22809", 1);
    run_ranks_nccl(3, compare_with_older_nccl, &older[k]);
    CHECK(emulation_nccl_counts().windows == 0, "a window is left");
  }
  unsetenv("EMULATED_NCCL_VERSION");
  free(results);
}

/* --- A rank aborts, or does not call */

static void *abort_soon(void *context) {
  onebit_comm_t comm = context;
  usleep(200 * 1000);
  CHECK_STATUS(onebit_comm_abort(comm), ONEBIT_OK);
  return NULL;
}

/* Rank 1 never calls. The other ranks wait in a call until another thread of the same rank aborts
 * the communicator. */
static void abort_during_call(const struct gpu_rank *self, void *context) {
  (void)context;
  struct part part;
  pthread_t thread;
  if (!create_part(&part, self))
    return;
  CHECK_STATUS(part_call(&part), ONEBIT_OK);
  gpu_await_ranks();
  forget_nccl_comm();
  if (self->rank == 1) {
    abort_soon(self->comm);
  } else {
    pthread_create(&thread, NULL, abort_soon, self->comm);
    CHECK_STATUS(part_call(&part), ONEBIT_ERROR_TRANSPORT);
    pthread_join(thread, NULL);
    check_broken(&part);
  }
  CHECK_STATUS(onebit_comm_abort(self->comm), ONEBIT_OK);
  CHECK_STATUS(part_call(&part), ONEBIT_ERROR_TRANSPORT);
  part_destroy(&part);
}

static void abort_ends_waiting_calls(void) { run_ranks_nccl(3, abort_during_call, NULL); }

/* Rank 1 never calls. The other ranks, which wait for it, must get an error and must be able to
 * free everything, although NCCL does not end a communicator that a graph uses. */
static void destroy_captured_plan(const struct gpu_rank *self, void *context) {
  struct part part;
  cudaStream_t stream;
  (void)context;
  if (!create_part(&part, self))
    return;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaGraphExec_t graph = part_capture(&part, stream);
  gpu_await_ranks();
  forget_nccl_comm();
  if (self->rank == 1)
    usleep(1500 * 1000);
  else
    CHECK_STATUS(part_call(&part), ONEBIT_ERROR_TRANSPORT);
  part_destroy(&part);
  CHECK_STATUS(onebit_comm_abort(self->comm), ONEBIT_OK);
  CHECK_CUDA(cudaStreamSynchronize(stream));
  CHECK_CUDA(cudaGraphExecDestroy(graph));
  CHECK_CUDA(cudaStreamDestroy(stream));
}

static void run_with_short_timeout(int size, gpu_rank_body *body) {
  setenv("ONEBIT_TIMEOUT", "0.5", 1);
  run_ranks_nccl(size, body, NULL);
  unsetenv("ONEBIT_TIMEOUT");
}

static void abort_while_graph_exists(void) { run_with_short_timeout(2, destroy_captured_plan); }

/* Rank 1 never calls. Rank 0 sends a message from host memory, which is queued behind an earlier
 * one. The second message must not wait inside the CUDA driver, and must time out. */
static void send_without_peer(const struct gpu_rank *self, void *context) {
  const struct ob_transport *transport = self->comm->transport;
  struct ob_batch *batches[2] = {NULL, NULL};
  unsigned char bytes[2] = {0, 0};
  (void)context;
  if (self->rank == 1)
    usleep(1500 * 1000);
  for (int k = 0; k < 2 && self->rank == 0; k++) {
    CHECK_STATUS(ob_batch_create(self->comm, 1, &batches[k]), ONEBIT_OK);
    batches[k]->sends = batches[k]->receives = 1;
    batches[k]->send[0] = (struct ob_endpoint){&bytes[0], 1, 1};
    batches[k]->receive[0] = (struct ob_endpoint){&bytes[1], 1, 1};
    CHECK_STATUS(transport->begin(batches[k], 1), ONEBIT_OK);
  }
  if (self->rank == 0)
    CHECK_STATUS(ob_watch_batch(batches[1], "two messages"), ONEBIT_ERROR_TRANSPORT);
  forget_nccl_comm();
  onebit_comm_abort(self->comm);
  for (int k = 0; k < 2; k++)
    ob_batch_destroy(batches[k]);
}

static void messages_without_peer_time_out(void) { run_with_short_timeout(2, send_without_peer); }

/* Rank 1 never calls, and the other ranks time out. They must be able to destroy their plans
 * although calls are still queued on streams. */
static void destroy_plans_with_calls(const struct gpu_rank *self, void *context) {
  (void)context;
  struct part parts[2];
  if (!create_part(&parts[0], self) || !create_part(&parts[1], self))
    return;
  gpu_await_ranks();
  for (int k = 0; k < 2 && self->rank != 1; k++)
    CHECK_STATUS(part_enqueue(&parts[k], NULL), ONEBIT_OK);
  forget_nccl_comm();
  if (self->rank == 1)
    usleep(1500 * 1000);
  for (int k = 0; k < 2; k++)
    part_destroy(&parts[k]);
}

static void plans_with_calls_are_destroyed(void) {
  run_with_short_timeout(3, destroy_plans_with_calls);
}

/* Checks that everything can be freed while a step is queued on the stream that rank 1 never
 * makes. */
static void destroy_optimizer_with_step(const struct gpu_rank *self, void *context) {
  onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
  onebit_optimizer_t optimizer;
  float zeros[ELEMENTS] = {0}, *memory;
  (void)context;
  options.common.device = ONEBIT_DEVICE_CUDA;
  CHECK_CUDA(cudaMalloc((void **)&memory, 2 * sizeof zeros));
  gpu_copy(memory, zeros, sizeof zeros);
  gpu_copy(memory + ELEMENTS, zeros, sizeof zeros);
  const onebit_tensor_t tensor = {
      .parameter = memory, .gradient = memory + ELEMENTS, .count = ELEMENTS};
  CHECK_STATUS(onebit_adam_create(self->comm, &tensor, 1, &options, &optimizer), ONEBIT_OK);
  if (self->rank == 1)
    usleep(1500 * 1000);
  else
    CHECK_STATUS(onebit_optimizer_step_stream(optimizer, 1, NULL), ONEBIT_OK);
  forget_nccl_comm();
  onebit_optimizer_destroy(optimizer);
  onebit_comm_abort(self->comm);
  CHECK_CUDA(cudaFree(memory));
}

static void optimizer_with_step_is_destroyed(void) {
  run_with_short_timeout(2, destroy_optimizer_with_step);
}

/* Queries the communicator's health in a loop. Meanwhile another thread aborts the communicator,
 * which frees the state that this thread reads. */
static void *poll_health(void *context) {
  while (ob_comm_health(context) == ONEBIT_OK)
    continue;
  return NULL;
}

static void abort_while_polled(const struct gpu_rank *self, void *context) {
  (void)context;
  pthread_t thread;
  gpu_await_ranks();
  pthread_create(&thread, NULL, poll_health, self->comm);
  usleep(20 * 1000);
  CHECK_STATUS(onebit_comm_abort(self->comm), ONEBIT_OK);
  forget_nccl_comm();
  pthread_join(thread, NULL);
}

static void health_is_polled_during_abort(void) {
  for (int k = 0; k < 10; k++)
    run_ranks_nccl(2, abort_while_polled, NULL);
}

static const struct gpu_test tests[] = {
    {"no plans on the host", host_plans_are_refused, ANY_DEVICE},
    {"another device is current", another_device_is_refused, ANY_DEVICE},
    {"a link breaks", broken_link_is_an_error, EMULATED},
    {"windows", windows_keep_results, EMULATED},
    {"a communicator is aborted while others wait", abort_ends_waiting_calls, ANY_DEVICE},
    {"messages of the host without a rank", messages_without_peer_time_out, ANY_DEVICE},
    {"calls are in flight at the end", plans_with_calls_are_destroyed, ANY_DEVICE},
    {"a communicator is aborted while a graph uses it", abort_while_graph_exists, ANY_DEVICE},
    {"a step without a rank", optimizer_with_step_is_destroyed, ANY_DEVICE},
    {"its error is read while another thread aborts it", health_is_polled_during_abort, ANY_DEVICE},
};
GPU_SUITE("nccl", tests)

#endif
