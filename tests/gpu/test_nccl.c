/*
 * Communicators over NCCL: calls that they refuse, and the outcome of calls when NCCL fails or a
 * rank gives up.
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

/* --- Plans and communicators that NCCL refuses */

static void create_host_plan(const struct gpu_rank *self, void *context) {
  (void)context;
  onebit_plan_t plan;
  CHECK_STATUS(onebit_plan_create(self->comm, ELEMENTS, NULL, &plan), ONEBIT_ERROR_UNSUPPORTED);
  CHECK(!plan && strstr(onebit_last_error(), "ONEBIT_DEVICE_HOST"), "%s", onebit_last_error());
}

static void host_plans_are_refused(void) { run_ranks_nccl(2, create_host_plan, NULL); }

/* Rank 1 creates objects of a communicator while its device is not current; the other ranks learn
 * of the error. */
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
  CHECK_STATUS(onebit_comm_create_nccl(rank_nccl_comm(), &comm), wanted);
  CHECK(!comm, "a communicator nevertheless");
  CHECK(self->rank != 1 || strstr(onebit_last_error(), "device 0 is current"), "%s",
        onebit_last_error());
  CHECK_STATUS(onebit_plan_create(self->comm, ELEMENTS, &options, &plan), wanted);
  CHECK(!plan, "a plan nevertheless");
  CHECK(self->rank != 1 || strstr(onebit_last_error(), "device 0 is current"), "%s",
        onebit_last_error());
  CHECK_CUDA(cudaSetDevice(here));
}

/* Ranks that are processes may all share a single device. */
static void another_device_is_refused(void) {
#ifdef ONEBIT_EMULATED_CUDA
  run_ranks_nccl(3, create_on_wrong_device, NULL);
#else
  int devices = 0;
  CHECK_CUDA(cudaGetDeviceCount(&devices));
  if (devices < 3)
    SKIP("there are %d devices: each of three ranks wants one of its own", devices);
  run_ranks_nccl(3, create_on_wrong_device, NULL);
#endif
}

/* --- NCCL fails */

/* On the emulated device ranks are threads, and one rank's failure reaches all of them: a barrier
 * delays it until no rank is in an earlier call. */
#ifdef ONEBIT_EMULATED_CUDA
static pthread_barrier_t barrier;

static void wait_for_ranks(void) { pthread_barrier_wait(&barrier); }

static void run_with_barrier(int size, gpu_rank_body *body, void *context) {
  pthread_barrier_init(&barrier, NULL, (unsigned)size);
  run_ranks_nccl(size, body, context);
  pthread_barrier_destroy(&barrier);
}
#else
static void wait_for_ranks(void) {}

static void run_with_barrier(int size, gpu_rank_body *body, void *context) {
  run_ranks_nccl(size, body, context);
}
#endif

static bool create_part(struct part *part, const struct gpu_rank *self) {
  const struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, ELEMENTS);
  if (!part_create(part, self->comm, &what, true))
    return false;
  part_write_input(part, 0, false);
  part_load(part);
  CHECK_CUDA(cudaStreamSynchronize(NULL));
  return true;
}

/* After the transport has failed every call fails at once, with the same message. */
static void check_broken(struct part *part) {
  onebit_request_t request;
  CHECK_STATUS(part_call(part), ONEBIT_ERROR_TRANSPORT);
  CHECK_STATUS(part_enqueue(part, NULL), ONEBIT_ERROR_TRANSPORT);
  CHECK_STATUS(part_start(part, &request), ONEBIT_ERROR_TRANSPORT);
  CHECK_STATUS(onebit_scale_result_stream(part->out, 1, part->plan, NULL), ONEBIT_ERROR_TRANSPORT);
  CHECK_STATUS(onebit_plan_reset_residual_stream(part->plan, NULL), ONEBIT_ERROR_TRANSPORT);
}

#ifdef ONEBIT_EMULATED_CUDA

/* Breaks rank 0's link during a blocking call, or during a call on a stream, for which the test
 * waits afterwards. */
static void break_link(const struct gpu_rank *self, void *context) {
  const bool *on_stream = context;
  struct part part;
  if (!create_part(&part, self))
    return;
  CHECK_STATUS(part_call(&part), ONEBIT_OK);
  wait_for_ranks();
  if (self->rank == 0)
    emulation_nccl_break(rank_nccl_comm());
  if (*on_stream) {
    const onebit_status_t put = part_enqueue(&part, NULL);
    CHECK(put == ONEBIT_OK || put == ONEBIT_ERROR_TRANSPORT, "status %d", put);
    CHECK_STATUS(onebit_plan_synchronize(part.plan), ONEBIT_ERROR_TRANSPORT);
    CHECK(strstr(onebit_last_error(), "NCCL"), "%s", onebit_last_error());
  } else {
    CHECK_STATUS(part_call(&part), ONEBIT_ERROR_TRANSPORT);
    CHECK(strstr(onebit_last_error(), "NCCL"), "%s", onebit_last_error());
  }
  forget_nccl_comm();
  check_broken(&part);
  part_destroy(&part);
}

static void broken_link_is_an_error(void) {
  bool on_stream[] = {false, true};
  for (int i = 0; i < 2; i++)
    run_with_barrier(3, break_link, &on_stream[i]);
}

#endif

/* --- Features of newer versions of NCCL */

#ifdef ONEBIT_EMULATED_CUDA

/* A dense plan just large enough to use a window, in one chunk; the messages of all ranks have
 * equal lengths. */
enum { LARGE = 3 * 2048 * 33 };

static void *results; /* of all ranks, from the call before */

static void compare_with_older_nccl(const struct gpu_rank *self, void *context) {
  struct plan_case what = default_plan_case(ONEBIT_ALLREDUCE, LARGE);
  struct part part;
  const bool *older = context;
  unsigned char *before = (unsigned char *)results + (size_t)self->rank * LARGE * sizeof(float);
  what.options.wire = ONEBIT_WIRE_DENSE;
  what.options.chunk_size = LARGE;
  if (!part_create(&part, self->comm, &what, true))
    return;
  part_write_input(&part, 0, false);
  part_load(&part);
  CHECK_CUDA(cudaStreamSynchronize(NULL));
  CHECK_STATUS(part_call(&part), ONEBIT_OK);
  part_fetch(&part);
  if (*older)
    memcpy(before, part.received, part.received_bytes);
  CHECK(!memcmp(before, part.received, part.received_bytes), "other bits than with NCCL 2.18");
  wait_for_ranks();
  CHECK(emulation_nccl_counts().windows == (*older ? 0 : 3), "%ld windows",
        emulation_nccl_counts().windows);
  wait_for_ranks();
  part_destroy(&part);
}

static void windows_keep_results(void) {
  bool older[] = {true, false};
  results = gpu_allocate(3 * (size_t)LARGE, sizeof(float));
  for (int k = 0; k < 2; k++) {
    setenv("EMULATED_NCCL_VERSION", older[k] ? "21800" : "22809", 1);
    run_with_barrier(3, compare_with_older_nccl, &older[k]);
    CHECK(emulation_nccl_counts().windows == 0, "a window is left");
  }
  unsetenv("EMULATED_NCCL_VERSION");
  free(results);
}

#endif

/* --- A rank aborts, or does not call */

static void *abort_soon(void *context) {
  onebit_comm_t comm = context;
  usleep(200 * 1000);
  CHECK_STATUS(onebit_comm_abort(comm), ONEBIT_OK);
  return NULL;
}

/* Rank 1 never calls; the other ranks wait in a call until another thread of theirs aborts. */
static void abort_during_call(const struct gpu_rank *self, void *context) {
  (void)context;
  struct part part;
  pthread_t thread;
  if (!create_part(&part, self))
    return;
  CHECK_STATUS(part_call(&part), ONEBIT_OK);
  wait_for_ranks();
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

static void abort_ends_waiting_calls(void) { run_with_barrier(3, abort_during_call, NULL); }

/* Rank 1 never calls: ranks that wait for it get an error and free everything, while NCCL waits for
 * the end of a graph. */
static void destroy_captured_plan(const struct gpu_rank *self, void *context) {
  struct part part;
  cudaStream_t stream;
  (void)context;
  if (!create_part(&part, self))
    return;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaGraphExec_t graph = part_capture(&part, stream);
  wait_for_ranks();
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

static void abort_while_graph_exists(void) {
  setenv("ONEBIT_TIMEOUT", "0.5", 1);
  run_with_barrier(2, destroy_captured_plan, NULL);
  unsetenv("ONEBIT_TIMEOUT");
}

/* Rank 1 never calls: host messages of the other ranks are queued behind earlier ones, but do not
 * wait in the driver, and time out. */
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

static void messages_without_peer_time_out(void) {
  setenv("ONEBIT_TIMEOUT", "0.5", 1);
  run_ranks_nccl(2, send_without_peer, NULL);
  unsetenv("ONEBIT_TIMEOUT");
}

/* Rank 1 never calls, and the others give up by themselves: their objects can be destroyed, though
 * calls are still on streams. */
static void destroy_plans_with_calls(const struct gpu_rank *self, void *context) {
  (void)context;
  struct part parts[2];
  if (!create_part(&parts[0], self) || !create_part(&parts[1], self))
    return;
  wait_for_ranks();
  for (int k = 0; k < 2 && self->rank != 1; k++)
    CHECK_STATUS(part_enqueue(&parts[k], NULL), ONEBIT_OK);
  forget_nccl_comm();
  if (self->rank == 1)
    usleep(1500 * 1000);
  for (int k = 0; k < 2; k++)
    part_destroy(&parts[k]);
}

static void plans_with_calls_are_destroyed(void) {
  setenv("ONEBIT_TIMEOUT", "0.5", 1);
  run_with_barrier(3, destroy_plans_with_calls, NULL);
  unsetenv("ONEBIT_TIMEOUT");
}

/* Everything is freed while a step that rank 1 never makes is on the stream. */
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
  setenv("ONEBIT_TIMEOUT", "0.5", 1);
  run_ranks_nccl(2, destroy_optimizer_with_step, NULL);
  unsetenv("ONEBIT_TIMEOUT");
}

/* Asks for NCCL's health without pause, while another thread aborts the communicator, which frees
 * what this thread reads. */
static void *poll_health(void *context) {
  while (ob_comm_health(context) == ONEBIT_OK)
    continue;
  return NULL;
}

static void abort_while_polled(const struct gpu_rank *self, void *context) {
  (void)context;
  pthread_t thread;
  wait_for_ranks();
  pthread_create(&thread, NULL, poll_health, self->comm);
  usleep(20 * 1000);
  CHECK_STATUS(onebit_comm_abort(self->comm), ONEBIT_OK);
  forget_nccl_comm();
  pthread_join(thread, NULL);
}

static void health_is_polled_during_abort(void) {
  for (int k = 0; k < 10; k++)
    run_with_barrier(2, abort_while_polled, NULL);
}

static const struct gpu_test tests[] = {
    {"no plans on the host", host_plans_are_refused, false},
    {"another device is current", another_device_is_refused, false},
#ifdef ONEBIT_EMULATED_CUDA
    {"a link breaks", broken_link_is_an_error, false},
    {"windows", windows_keep_results, false},
#endif
    {"a communicator is aborted while others wait", abort_ends_waiting_calls, false},
    {"messages of the host without a rank", messages_without_peer_time_out, false},
    {"calls are in flight at the end", plans_with_calls_are_destroyed, false},
    {"a communicator is aborted while a graph uses it", abort_while_graph_exists, false},
    {"a step without a rank", optimizer_with_step_is_destroyed, false},
    {"its error is read while another thread aborts it", health_is_polled_during_abort, false},
};
GPU_SUITE("nccl", tests)

#endif
