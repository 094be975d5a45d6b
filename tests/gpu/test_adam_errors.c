/* Errors of 1-bit Adam on devices: every rank gets an error, none hangs, nothing changes. */
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "tests/gpu/training.h"

#ifdef ONEBIT_EMULATED_CUDA
#include <emulation.h>
#include <sched.h>
#include <stdatomic.h>
#endif

static const struct training_case plain = {
    .name = "errors", .optimizer = {ANY(adam, .freeze_step = 2)}, .form = ONE_STREAM};

/* The calls of a rank, over either transport; the last rank makes the mistake. */
typedef void scenario(onebit_comm_t comm, int rank, int size);

struct play {
  scenario *scenario;
};

static void run_over_loopback(const struct gpu_rank *self, void *context) {
  ((struct play *)context)->scenario(self->comm, self->rank, self->size);
}

static void run_over_nccl(const struct gpu_rank *self, void *context) {
  struct training_nccl group;
  if (training_nccl_open(&group, self)) {
    check_case("over NCCL, rank %d of %d", self->rank, self->size);
    ((struct play *)context)->scenario(group.comm, self->rank, self->size);
  }
  training_nccl_close(&group);
}

static void run_on_both(scenario *what) {
  struct play play = {what};
  for (int size = 1; size <= 3; size++) {
    gpu_run_loopback(size, run_over_loopback, &play);
    gpu_run_ranks(size, run_over_nccl, &play);
  }
}

static bool error_contains(const char *part) {
  return CHECK(strstr(onebit_last_error(), part), "the words \"%s\" do not say \"%s\"",
               onebit_last_error(), part);
}

/* --- Arrays in the wrong memory */

/* Creates an optimizer of one tensor. The last rank's tensor is wrong, so no rank gets an
 * optimizer. */
static void check_refused(onebit_comm_t comm, int rank, int size, float *parameter, float *gradient,
                          onebit_device_t device, const char *part) {
  onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
  onebit_tensor_t tensor = {.parameter = parameter, .gradient = gradient, .count = 64};
  onebit_optimizer_t optimizer;
  options.common.device = device;
  CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, &options, &optimizer),
               rank == size - 1 ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
  CHECK(!optimizer, "a failed creation left an optimizer");
  if (rank == size - 1)
    error_contains(part);
}

static void check_arrays_elsewhere(onebit_comm_t comm, int rank, int size) {
  float host[128], *device, *there;
  const bool guilty = rank == size - 1;
  int now = 0, count = 0;
  CHECK_CUDA(cudaMalloc((void **)&device, sizeof host));
  check_refused(comm, rank, size, guilty ? host : device, device + 64, ONEBIT_DEVICE_CUDA,
                "tensors[0].parameter is");
  check_refused(comm, rank, size, device, guilty ? host : device + 64, ONEBIT_DEVICE_CUDA,
                "memory of the host");
  CHECK_CUDA(cudaGetDevice(&now));
  CHECK_CUDA(cudaGetDeviceCount(&count));
  if (count > 1) {
    CHECK_CUDA(cudaSetDevice((now + 1) % count));
    CHECK_CUDA(cudaMalloc((void **)&there, sizeof host));
    CHECK_CUDA(cudaSetDevice(now));
    check_refused(comm, rank, size, device, guilty ? there : device + 64, ONEBIT_DEVICE_CUDA,
                  "tensors[0].gradient is");
    CHECK_CUDA(cudaFree(there));
  }
  CHECK_CUDA(cudaFree(device));
}

static void check_arrays_of_another_device(onebit_comm_t comm, int rank, int size) {
  float host[128], *device;
  CHECK_CUDA(cudaMalloc((void **)&device, sizeof host));
  check_refused(comm, rank, size, rank == size - 1 ? device : host, host + 64, ONEBIT_DEVICE_HOST,
                "memory of CUDA device");
  CHECK_CUDA(cudaFree(device));
}

static void arrays_must_be_there(void) {
  struct play play = {check_arrays_of_another_device};
  run_on_both(check_arrays_elsewhere);
  for (int size = 1; size <= 3; size++)
    gpu_run_loopback(size, run_over_loopback, &play);
}

/* --- Steps */

/* Makes a step on the stream and returns its status, known at once or later. */
static onebit_status_t step_on_stream(struct learner *learner, float rate) {
  onebit_status_t status =
      onebit_optimizer_step_stream(learner->optimizer, rate, learner->streams[0]);
  onebit_status_t later = onebit_optimizer_synchronize(learner->optimizer);
  CHECK(status == ONEBIT_OK || later == status, "first %d, then %d: %s", (int)status, (int)later,
        onebit_last_error());
  return later;
}

static void fetch_parameters(struct learner *learner, int attempt) {
  CHECK_CUDA(cudaStreamSynchronize(learner->streams[0]));
  CHECK_CUDA(cudaMemcpy(learner_fetched(learner, attempt), learner->parameters,
                        TRAINING_ELEMENTS * sizeof(float), cudaMemcpyDefault));
}

static void check_good_step(struct learner *learner, int attempt) {
  learner_send_gradients(learner, attempt, learner->streams[0]);
  CHECK_STATUS(step_on_stream(learner, training_rate_of(attempt)), ONEBIT_OK);
}

/* Checks a step that must fail with these statuses, on a stream and without, and what it must not
 * change. */
static void check_step(struct learner *learner, float rate, onebit_status_t wanted,
                       const char *part) {
  const size_t bytes = TRAINING_ELEMENTS * sizeof(float);
  onebit_optimizer_info_t before = {.size = sizeof before};
  CHECK_STATUS(onebit_optimizer_get_info(learner->optimizer, &before), ONEBIT_OK);
  fetch_parameters(learner, 0);
  CHECK_STATUS(step_on_stream(learner, rate), wanted);
  error_contains(part);
  CHECK_STATUS(onebit_optimizer_synchronize(learner->optimizer), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_step(learner->optimizer, rate), wanted);
  error_contains(part);
  CHECK_STATUS(onebit_optimizer_synchronize(learner->optimizer), ONEBIT_OK);
  fetch_parameters(learner, 1);
  CHECK(!memcmp(learner_fetched(learner, 0), learner_fetched(learner, 1), bytes),
        "parameters changed");
  training_check_info(learner->optimizer, &before);
}

static void check_wrong_rates(struct learner *learner, int attempt) {
  const bool guilty = learner->rank == learner->size - 1;
  learner_send_gradients(learner, attempt, learner->streams[0]);
  CHECK_CUDA(cudaStreamSynchronize(learner->streams[0]));
  check_step(learner, guilty ? -1.0f : 0.5f, guilty ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER,
             guilty ? "learning_rate is -1" : "rank ");
  if (learner->size > 1)
    check_step(learner, guilty ? 0.25f : 0.5f, ONEBIT_ERROR_MISMATCH, "learning_rate");
}

/* Makes a mistake on the last rank in a step in parts, when some buckets have been sent. */
static void check_wrong_part(struct learner *learner, bool streamed, bool mixed) {
  onebit_optimizer_t optimizer = learner->optimizer;
  cudaStream_t stream = learner->streams[0];
  if (streamed)
    CHECK_STATUS(onebit_optimizer_begin_stream(optimizer, 0.5f, stream), ONEBIT_OK);
  else
    CHECK_STATUS(onebit_optimizer_begin(optimizer, 0.5f), ONEBIT_OK);
  for (size_t t = TRAINING_TENSORS; t-- > 1;)
    CHECK_STATUS(streamed ? onebit_optimizer_ready_stream(optimizer, t, stream)
                          : onebit_optimizer_ready(optimizer, t),
                 ONEBIT_OK);
  if (learner->rank < learner->size - 1)
    return;
  CHECK_STATUS(streamed == mixed ? onebit_optimizer_ready(optimizer, mixed ? 0 : 1)
                                 : onebit_optimizer_ready_stream(optimizer, mixed ? 0 : 1, stream),
               ONEBIT_ERROR_ARGUMENT);
  error_contains(!mixed     ? "tensor 1 is ready a second time"
                 : streamed ? "begun with a stream"
                            : "begun without a stream");
}

static void check_steps_in_parts(struct learner *learner) {
  const bool guilty = learner->rank == learner->size - 1;
  const onebit_status_t wanted = guilty ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER;
  const size_t bytes = TRAINING_ELEMENTS * sizeof(float);
  fetch_parameters(learner, 0);
  for (int k = 0; k < 4; k++) {
    check_wrong_part(learner, k & 1, k & 2);
    if (k & 1)
      CHECK_STATUS(step_on_stream(learner, 0.5f), wanted);
    else
      CHECK_STATUS(onebit_optimizer_step(learner->optimizer, 0.5f), wanted);
    CHECK_STATUS(onebit_optimizer_synchronize(learner->optimizer), ONEBIT_OK);
  }
  fetch_parameters(learner, 1);
  CHECK(!memcmp(learner_fetched(learner, 0), learner_fetched(learner, 1), bytes),
        "parameters changed");
  CHECK_STATUS(onebit_optimizer_ready(learner->optimizer, 0), ONEBIT_ERROR_ARGUMENT);
  error_contains("no step is open");
}

/* Learning rates of the last rank; the other ranks have 0.5. */
static const struct {
  float rate;
  onebit_status_t guilty, others;
  const char *part;
} rates_there[] = {
    {-1.0f, ONEBIT_ERROR_ARGUMENT, ONEBIT_ERROR_PEER, "in memory of the device is -1"},
    {0.25f, ONEBIT_ERROR_MISMATCH, ONEBIT_ERROR_MISMATCH, "learning_rate differs"}};

/* Sets wrong rates in memory of the device; if the host sends the messages, it refuses such a
 * rate. */
static void check_wrong_device_rates(struct learner *learner) {
  const bool guilty = learner->rank == learner->size - 1;
  onebit_optimizer_t optimizer = learner->optimizer;
  const size_t bytes = TRAINING_ELEMENTS * sizeof(float);
  float host = 0.5f, *rate;
  CHECK_CUDA(cudaMalloc((void **)&rate, sizeof *rate));
  onebit_status_t status = onebit_optimizer_set_learning_rate_pointer(optimizer, rate);
  const bool refused = status == ONEBIT_ERROR_UNSUPPORTED;
  if (refused)
    error_contains("the host sends and updates with the rate");
  else
    CHECK_STATUS(onebit_optimizer_set_learning_rate_pointer(optimizer, &host),
                 ONEBIT_ERROR_ARGUMENT);
  fetch_parameters(learner, 0);
  for (size_t k = 0; !refused && k < (learner->size > 1 ? 2 : 1); k++) {
    const float value = guilty ? rates_there[k].rate : 0.5f;
    CHECK_CUDA(
        cudaMemcpyAsync(rate, &value, sizeof value, cudaMemcpyHostToDevice, learner->streams[0]));
    CHECK_CUDA(cudaStreamSynchronize(learner->streams[0]));
    CHECK_STATUS(step_on_stream(learner, 0.5f),
                 guilty ? rates_there[k].guilty : rates_there[k].others);
    if (guilty)
      error_contains(rates_there[k].part);
  }
  fetch_parameters(learner, 1);
  CHECK(!memcmp(learner_fetched(learner, 0), learner_fetched(learner, 1), bytes),
        "parameters changed");
  CHECK_STATUS(onebit_optimizer_set_learning_rate_pointer(optimizer, NULL), ONEBIT_OK);
  CHECK_CUDA(cudaFree(rate));
}

/* Makes wrong steps in the warm-up and after it, with one bucket and with several. */
static void check_wrong_steps(onebit_comm_t comm, int rank, int size) {
  for (size_t bucket = 0; bucket <= 40; bucket += 40) {
    struct training_case what = plain;
    struct learner learner;
    what.optimizer = (struct any_case){ANY(adam, .freeze_step = 2, .common.bucket_size = bucket)};
    if (!learner_open(&learner, &what, comm, rank, size, true))
      return;
    for (int attempt = 0; attempt < 6; attempt++) {
      check_wrong_rates(&learner, attempt);
      check_steps_in_parts(&learner);
      check_wrong_device_rates(&learner);
      check_good_step(&learner, attempt);
    }
    learner_close(&learner);
  }
}

static void steps_must_be_right(void) { run_on_both(check_wrong_steps); }

/* Passes a stream of another device: this rank notices it, and reports it to the others. */
static void check_wrong_stream(onebit_comm_t comm, int rank, int size) {
  struct learner learner;
  cudaStream_t other;
  int now = 0, count = 0;
  CHECK_CUDA(cudaGetDevice(&now));
  CHECK_CUDA(cudaGetDeviceCount(&count));
  if (count < 2)
    SKIP("there is one device only");
  CHECK_CUDA(cudaSetDevice((now + 1) % count));
  CHECK_CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  CHECK_CUDA(cudaSetDevice(now));
  if (learner_open(&learner, &plain, comm, rank, size, true)) {
    cudaStream_t own = learner.streams[0];
    check_good_step(&learner, 0);
    learner.streams[0] = rank == size - 1 ? other : own;
    CHECK_STATUS(step_on_stream(&learner, 0.5f),
                 rank == size - 1 ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
    learner.streams[0] = own;
    check_good_step(&learner, 1);
    learner_close(&learner);
  }
  CHECK_CUDA(cudaStreamDestroy(other));
}

static void streams_must_be_right(void) { run_on_both(check_wrong_stream); }

/* --- Failures of the device and of memory */

#ifdef ONEBIT_EMULATED_CUDA

/* Fails one allocation of one rank, on the host, on the device, or of pinned memory. */
static bool create_without_memory(onebit_comm_t comm, int rank, int size, const float *arrays) {
  onebit_adam_options_t options = *(const onebit_adam_options_t *)plain.optimizer.options;
  onebit_tensor_t tensors[2] = {{.count = 640}, {.count = 33}};
  onebit_optimizer_t optimizer;
  for (int k = 0; k < 2; k++) {
    float *parameter = (float *)(size_t)arrays + 2000 * k;
    tensors[k].parameter = parameter;
    tensors[k].gradient = parameter + 1000;
  }
  options.common.bucket_size = 10;
  options.common.device = ONEBIT_DEVICE_CUDA;
  onebit_status_t status = onebit_adam_create(comm, tensors, 2, &options, &optimizer);
  CHECK(status == ONEBIT_OK || status == ONEBIT_ERROR_MEMORY ||
            (status == ONEBIT_ERROR_PEER && size > 1),
        "rank %d: %d: %s", rank, (int)status, onebit_last_error());
  CHECK((optimizer != NULL) == (status == ONEBIT_OK), "status and handle do not agree");
  onebit_optimizer_destroy(optimizer);
  return status == ONEBIT_OK;
}

/* The allocators that fail: the library's own, and CUDA's. */
static void (*const fail_at[])(long) = {ob_memory_fail_at, emulation_fail_allocation};

struct shortage {
  long n;
  int which;
  bool done[TRAINING_RANKS];
};

static void run_without_memory(const struct gpu_rank *self, void *context) {
  struct shortage *shortage = context;
  float *arrays = NULL;
  size_t before = 0, after = 0, total;
  CHECK_CUDA(cudaMalloc((void **)&arrays, 4000 * sizeof *arrays));
  CHECK_CUDA(cudaMemGetInfo(&before, &total));
  if (self->rank == 0)
    fail_at[shortage->which](shortage->n);
  shortage->done[self->rank] = create_without_memory(self->comm, self->rank, self->size, arrays);
  if (self->size == 1) {
    CHECK_CUDA(cudaMemGetInfo(&after, &total));
    CHECK(after == before, "allocation %ld fails, and %zu bytes stay", shortage->n, before - after);
  }
  CHECK_CUDA(cudaFree(arrays));
}

static void no_memory_reaches_all_ranks(void) {
  for (int size = 1; size <= 2; size++)
    for (int which = 0; which < 2; which++) {
      struct shortage shortage = {.which = which};
      for (size_t k = 0; !shortage.done[0] && CHECK(shortage.n < 2000, "it never succeeds"); k++) {
        shortage.n = 1 + (long)(size == 1 ? k : sample_entry(3 * k));
        gpu_run_loopback(size, run_without_memory, &shortage);
        fail_at[which](0);
        for (int r = 1; r < size; r++)
          CHECK(shortage.done[r] == shortage.done[0], "allocation %ld: not all ranks fail",
                shortage.n);
      }
      CHECK(shortage.n > 10, "there were hardly any allocations");
    }
}

/* One rank's launch fails in a step; `launches` were counted in the step before. */
struct failing {
  long n, launches;
};

static void fail_a_launch(onebit_comm_t comm, struct failing *failing) {
  struct learner learner;
  if (!learner_open(&learner, &plain, comm, 0, 1, true))
    return;
  for (int attempt = 0; attempt < 4; attempt++) {
    emulation_reset_counts();
    check_good_step(&learner, attempt);
    failing->launches = emulation_counts().kernels;
  }
  learner_send_gradients(&learner, 4, learner.streams[0]);
  emulation_fail_launch(failing->n);
  CHECK(step_on_stream(&learner, 1e-3f) == ONEBIT_ERROR_DEVICE, "launch %ld of %ld fails: %s",
        failing->n, failing->launches, onebit_last_error());
  emulation_fail_launch(0);
  learner_close(&learner);
}

static void fail_over_loopback(const struct gpu_rank *self, void *context) {
  fail_a_launch(self->comm, context);
}

static void fail_with_one_rank(const struct gpu_rank *self, void *context) {
  onebit_comm_t comm;
  (void)self;
  if (CHECK_STATUS(onebit_comm_create_self(&comm), ONEBIT_OK))
    fail_a_launch(comm, context);
  onebit_comm_destroy(comm);
}

static void a_failed_launch_is_reported(void) {
  gpu_rank_body *const bodies[] = {fail_over_loopback, fail_with_one_rank};
  for (size_t k = 0; k < 2; k++) {
    struct failing failing = {0};
    do {
      failing.n++;
      gpu_run_loopback(1, bodies[k], &failing);
    } while (failing.n < failing.launches);
    CHECK(failing.launches > 4, "a step has %ld launches", failing.launches);
  }
}

/* The number of the launch that fails on one of two ranks: that rank gets an error, and the other
 * rank's step ends, too. Its status depends on how far the step had come. */
static long the_launch;
static atomic_int ready;

static void fail_one_of_two(onebit_comm_t comm, int rank, int size) {
  struct learner learner;
  if (!learner_open(&learner, &plain, comm, rank, size, true))
    return;
  for (int attempt = 0; attempt < 4; attempt++)
    check_good_step(&learner, attempt);
  learner_send_gradients(&learner, 4, learner.streams[0]);
  CHECK_CUDA(cudaStreamSynchronize(learner.streams[0]));
  atomic_fetch_add(&ready, 1);
  while (atomic_load(&ready) < size)
    sched_yield();
  if (rank == 0)
    emulation_fail_launch(the_launch);
  onebit_status_t status = step_on_stream(&learner, 1e-3f);
  CHECK(status == ONEBIT_OK || status == ONEBIT_ERROR_DEVICE || status == ONEBIT_ERROR_PEER ||
            status == ONEBIT_ERROR_MESSAGE,
        "launch %ld fails: %d: %s", the_launch, (int)status, onebit_last_error());
  learner_close(&learner);
}

static void a_failed_launch_holds_nobody_up(void) {
  struct play play = {fail_one_of_two};
  for (the_launch = 1; the_launch < 24; the_launch++) {
    atomic_store(&ready, 0);
    gpu_run_loopback(2, run_over_loopback, &play);
    emulation_fail_launch(0);
    atomic_store(&ready, 0);
    gpu_run_ranks(2, run_over_nccl, &play);
    emulation_fail_launch(0);
  }
}

#else

static void no_memory_reaches_all_ranks(void) {
  SKIP("no allocation of a real device fails when it is told to");
}

static void a_failed_launch_is_reported(void) {
  SKIP("no launch on a real device fails when it is told to");
}

static void a_failed_launch_holds_nobody_up(void) { a_failed_launch_is_reported(); }

#endif

static const struct gpu_test tests[] = {
    {"arrays must be there", arrays_must_be_there, false},
    {"steps must be right", steps_must_be_right, false},
    {"streams must be right", streams_must_be_right, false},
    {"no memory reaches all ranks", no_memory_reaches_all_ranks, false},
    {"a failed launch is told", a_failed_launch_is_reported, false},
    {"a failed launch holds nobody up", a_failed_launch_holds_nobody_up, false},
};
GPU_SUITE("adam errors", tests)
