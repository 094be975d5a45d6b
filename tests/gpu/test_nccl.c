/*
 * Communicators over NCCL: what is not for them, and what becomes of calls when NCCL fails or
 * somebody gives up.
 */
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "tests/gpu/plans.h"

#ifdef ONEBIT_HAVE_NCCL
#include "onebit/nccl.h"

enum { ELEMENTS = 1000 };

/* --- What is not for them */

static void refuse_host(const struct gpu_rank *self, void *context) {
  (void)context;
  onebit_plan_t plan;
  CHECK_STATUS(onebit_plan_create(self->comm, ELEMENTS, NULL, &plan), ONEBIT_ERROR_UNSUPPORTED);
  CHECK(!plan && strstr(onebit_last_error(), "ONEBIT_DEVICE_HOST"), "%s", onebit_last_error());
}

static void host_plan(void) { ranks_nccl(2, refuse_host, NULL); }

/* Rank 1 makes things of a communicator while another device is current than its own; the other
 * ranks hear of it. */
static void elsewhere(const struct gpu_rank *self, void *context) {
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
  CHECK_STATUS(onebit_comm_create_nccl(ranks_nccl_comm(), &comm), wanted);
  CHECK(!comm, "a communicator nevertheless");
  CHECK(self->rank != 1 || strstr(onebit_last_error(), "device 0 is current"), "%s",
        onebit_last_error());
  CHECK_STATUS(onebit_plan_create(self->comm, ELEMENTS, &options, &plan), wanted);
  CHECK(!plan, "a plan nevertheless");
  CHECK(self->rank != 1 || strstr(onebit_last_error(), "device 0 is current"), "%s",
        onebit_last_error());
  CHECK_CUDA(cudaSetDevice(here));
}

/* Ranks that are processes may all have the one device that there is. */
static void another_device(void) {
#ifdef ONEBIT_EMULATED_CUDA
  ranks_nccl(3, elsewhere, NULL);
#else
  int devices = 0;
  CHECK_CUDA(cudaGetDeviceCount(&devices));
  if (devices < 3)
    SKIP("there are %d devices: each of three ranks wants one of its own", devices);
  ranks_nccl(3, elsewhere, NULL);
#endif
}

static void nobody(void) {
  onebit_comm_t comm;
  CHECK_STATUS(onebit_comm_create_nccl(NULL, &comm), ONEBIT_ERROR_ARGUMENT);
  CHECK_STATUS(onebit_comm_abort(NULL), ONEBIT_ERROR_ARGUMENT);
}

/* --- NCCL fails */

/* Ranks that are threads share the failure of one: it must not come while others are in an earlier
 * call. */
#ifdef ONEBIT_EMULATED_CUDA
static pthread_barrier_t barrier;

static void meet(void) { pthread_barrier_wait(&barrier); }

static void three_ranks(gpu_rank_body *body, void *context) {
  pthread_barrier_init(&barrier, NULL, 3);
  ranks_nccl(3, body, context);
  pthread_barrier_destroy(&barrier);
}
#else
static void meet(void) {}

static void three_ranks(gpu_rank_body *body, void *context) { ranks_nccl(3, body, context); }
#endif

static bool create(struct part *part, const struct gpu_rank *self) {
  const struct plan_case what = plan_case_simple(ONEBIT_ALLREDUCE, ELEMENTS);
  if (!part_create(part, self->comm, &what, true))
    return false;
  part_make(part, 0, false);
  part_load(part);
  CHECK_CUDA(cudaStreamSynchronize(NULL));
  return true;
}

/* After the transport has failed: at once, and the same words for everything. */
static void check_broken(struct part *part) {
  onebit_request_t request;
  CHECK_STATUS(part_call(part), ONEBIT_ERROR_TRANSPORT);
  CHECK_STATUS(part_put(part, NULL), ONEBIT_ERROR_TRANSPORT);
  CHECK_STATUS(part_start(part, &request), ONEBIT_ERROR_TRANSPORT);
  CHECK_STATUS(onebit_scale_result_stream(part->out, 1, part->plan, NULL), ONEBIT_ERROR_TRANSPORT);
  CHECK_STATUS(onebit_plan_reset_residual_stream(part->plan, NULL), ONEBIT_ERROR_TRANSPORT);
}

#ifdef ONEBIT_EMULATED_CUDA

/* The link breaks in a call that waits itself, or in one that somebody waits for. */
static void break_link(const struct gpu_rank *self, void *context) {
  const bool *on_stream = context;
  struct part part;
  if (!create(&part, self))
    return;
  CHECK_STATUS(part_call(&part), ONEBIT_OK);
  meet();
  if (self->rank == 0)
    emulation_nccl_break(ranks_nccl_comm());
  if (*on_stream) {
    const onebit_status_t put = part_put(&part, NULL);
    CHECK(put == ONEBIT_OK || put == ONEBIT_ERROR_TRANSPORT, "status %d", put);
    CHECK_STATUS(onebit_plan_synchronize(part.plan), ONEBIT_ERROR_TRANSPORT);
    CHECK(strstr(onebit_last_error(), "NCCL"), "%s", onebit_last_error());
  } else {
    CHECK_STATUS(part_call(&part), ONEBIT_ERROR_TRANSPORT);
    CHECK(strstr(onebit_last_error(), "NCCL"), "%s", onebit_last_error());
  }
  check_broken(&part);
  part_destroy(&part);
}

static void broken_link(void) {
  bool on_stream[] = {false, true};
  for (int i = 0; i < 2; i++)
    three_ranks(break_link, &on_stream[i]);
}

#endif

/* --- Somebody gives up */

static void *abort_soon(void *context) {
  onebit_comm_t comm = context;
  usleep(200 * 1000);
  CHECK_STATUS(onebit_comm_abort(comm), ONEBIT_OK);
  return NULL;
}

/* Rank 1 never comes; the others wait in a call until another thread of theirs gives up. */
static void give_up(const struct gpu_rank *self, void *context) {
  (void)context;
  struct part part;
  pthread_t thread;
  if (!create(&part, self))
    return;
  CHECK_STATUS(part_call(&part), ONEBIT_OK);
  meet();
  ranks_nccl_gone();
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

static void aborted(void) { three_ranks(give_up, NULL); }

static const struct gpu_test tests[] = {
    {"no plans on the host", host_plan, false},
    {"another device is current", another_device, false},
    {"handles that are none", nobody, false},
#ifdef ONEBIT_EMULATED_CUDA
    {"a link breaks", broken_link, false},
#endif
    {"given up while others wait", aborted, false},
};
GPU_SUITE("nccl", tests)

#endif
