/* Tests errors of 1-bit Adam on devices: every rank must get an error, no rank may hang, and no
 * parameter or state may change. */
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "tests/gpu/training.h"

static const struct training_case plain = {
    .name = "errors", .optimizer = {ANY(adam, .freeze_step = 2)}, .form = ONE_STREAM};

/* Runs the body on 1 to 3 ranks over both transports. The last rank makes the mistake. */
static void run_on_both(gpu_rank_body *body) {
  for (int size = 1; size <= 3; size++)
    run_ranks_both(size, body, NULL);
}

static bool is_last(const struct gpu_rank *self) { return self->rank == self->size - 1; }

/* --- Arrays in the wrong memory */

/* Tries to create an optimizer of one tensor. The last rank's tensor is wrong, so creation must
 * fail on all ranks. */
static void check_refused(const struct gpu_rank *self, float *parameter, float *gradient,
                          onebit_device_t device, const char *part) {
  onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
  onebit_tensor_t tensor = {.parameter = parameter, .gradient = gradient, .count = 64};
  onebit_optimizer_t optimizer;
  options.common.device = device;
  CHECK_STATUS(onebit_adam_create(self->comm, &tensor, 1, &options, &optimizer),
               is_last(self) ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
  CHECK(!optimizer, "a failed creation left an optimizer");
  if (is_last(self))
    CHECK_MESSAGE(part);
}

static void check_arrays_elsewhere(const struct gpu_rank *self, void *context) {
  float host[128], *device, *there;
  const bool guilty = is_last(self);
  const int now = current_device(), other = other_device();
  (void)context;
  CHECK_CUDA(cudaMalloc((void **)&device, sizeof host));
  check_refused(self, guilty ? host : device, device + 64, ONEBIT_DEVICE_CUDA,
                "tensors[0].parameter is");
  check_refused(self, device, guilty ? host : device + 64, ONEBIT_DEVICE_CUDA, "in host memory");
  if (other != now) {
    CHECK_CUDA(cudaSetDevice(other));
    CHECK_CUDA(cudaMalloc((void **)&there, sizeof host));
    CHECK_CUDA(cudaSetDevice(now));
    check_refused(self, device, guilty ? there : device + 64, ONEBIT_DEVICE_CUDA,
                  "tensors[0].gradient is");
    CHECK_CUDA(cudaFree(there));
  }
  CHECK_CUDA(cudaFree(device));
}

static void check_arrays_of_another_device(const struct gpu_rank *self, void *context) {
  float host[128], *device;
  (void)context;
  CHECK_CUDA(cudaMalloc((void **)&device, sizeof host));
  check_refused(self, is_last(self) ? device : host, host + 64, ONEBIT_DEVICE_HOST,
                "memory of CUDA device");
  CHECK_CUDA(cudaFree(device));
}

static void arrays_must_be_there(void) {
  run_on_both(check_arrays_elsewhere);
  for (int size = 1; size <= 3; size++)
    gpu_run_loopback(size, check_arrays_of_another_device, NULL);
}

/* --- Steps */

/* Makes a step on the stream and returns its status, which is known at once or after a wait. */
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

/* Checks that the parameters are those that were fetched as attempt 0. */
static void check_unchanged(struct learner *learner) {
  fetch_parameters(learner, 1);
  CHECK(!memcmp(learner_fetched(learner, 0), learner_fetched(learner, 1),
                TRAINING_ELEMENTS * sizeof(float)),
        "parameters changed");
}

static void check_good_step(struct learner *learner, int attempt) {
  learner_send_gradients(learner, attempt, learner->streams[0]);
  CHECK_STATUS(step_on_stream(learner, training_rate_of(attempt)), ONEBIT_OK);
}

/* Checks that a step fails with the status `wanted`, with and without a stream, and changes
 * nothing. */
static void check_step(struct learner *learner, float rate, onebit_status_t wanted,
                       const char *part) {
  onebit_optimizer_info_t before = {.size = sizeof before};
  CHECK_STATUS(onebit_optimizer_get_info(learner->optimizer, &before), ONEBIT_OK);
  fetch_parameters(learner, 0);
  CHECK_STATUS(step_on_stream(learner, rate), wanted);
  CHECK_MESSAGE(part);
  CHECK_STATUS(onebit_optimizer_synchronize(learner->optimizer), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_step(learner->optimizer, rate), wanted);
  CHECK_MESSAGE(part);
  CHECK_STATUS(onebit_optimizer_synchronize(learner->optimizer), ONEBIT_OK);
  check_unchanged(learner);
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

/* Makes a step in parts (begin, ready, step). After some buckets have been sent, the last rank
 * passes a wrong argument. */
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
  CHECK_MESSAGE(!mixed     ? "tensor 1 is ready a second time"
                : streamed ? "begun with a stream"
                           : "begun without a stream");
}

static void check_steps_in_parts(struct learner *learner) {
  const bool guilty = learner->rank == learner->size - 1;
  const onebit_status_t wanted = guilty ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER;
  fetch_parameters(learner, 0);
  for (int k = 0; k < 4; k++) {
    check_wrong_part(learner, k & 1, k & 2);
    if (k & 1)
      CHECK_STATUS(step_on_stream(learner, 0.5f), wanted);
    else
      CHECK_STATUS(onebit_optimizer_step(learner->optimizer, 0.5f), wanted);
    CHECK_STATUS(onebit_optimizer_synchronize(learner->optimizer), ONEBIT_OK);
  }
  check_unchanged(learner);
  CHECK_STATUS(onebit_optimizer_ready(learner->optimizer, 0), ONEBIT_ERROR_ARGUMENT);
  CHECK_MESSAGE("no step is open");
}

/* Learning rates that the last rank passes; the other ranks pass 0.5. */
static const struct {
  float rate;
  onebit_status_t guilty, others;
  const char *part;
} device_rates[] = {{-1.0f, ONEBIT_ERROR_ARGUMENT, ONEBIT_ERROR_PEER, "in device memory is -1"},
                    {0.25f, ONEBIT_ERROR_MISMATCH, ONEBIT_ERROR_MISMATCH, "learning_rate differs"}};

/* Sets wrong learning rates in device memory. If the host sends the messages, it reads the rate and
 * refuses it. */
static void check_wrong_device_rates(struct learner *learner) {
  const bool guilty = learner->rank == learner->size - 1;
  onebit_optimizer_t optimizer = learner->optimizer;
  float host = 0.5f, *rate;
  CHECK_CUDA(cudaMalloc((void **)&rate, sizeof *rate));
  onebit_status_t status = onebit_optimizer_set_learning_rate_pointer(optimizer, rate);
  const bool refused = status == ONEBIT_ERROR_UNSUPPORTED;
  if (refused)
    CHECK_MESSAGE("the host needs the rate, so it cannot be in device memory");
  else
    CHECK_STATUS(onebit_optimizer_set_learning_rate_pointer(optimizer, &host),
                 ONEBIT_ERROR_ARGUMENT);
  fetch_parameters(learner, 0);
  for (size_t k = 0; !refused && k < (learner->size > 1 ? 2 : 1); k++) {
    const float value = guilty ? device_rates[k].rate : 0.5f;
    CHECK_CUDA(
        cudaMemcpyAsync(rate, &value, sizeof value, cudaMemcpyHostToDevice, learner->streams[0]));
    CHECK_CUDA(cudaStreamSynchronize(learner->streams[0]));
    CHECK_STATUS(step_on_stream(learner, 0.5f),
                 guilty ? device_rates[k].guilty : device_rates[k].others);
    if (guilty)
      CHECK_MESSAGE(device_rates[k].part);
  }
  check_unchanged(learner);
  CHECK_STATUS(onebit_optimizer_set_learning_rate_pointer(optimizer, NULL), ONEBIT_OK);
  CHECK_CUDA(cudaFree(rate));
}

/* Makes steps with wrong arguments in the warm-up and after it, with one bucket and several. */
static void check_wrong_steps(const struct gpu_rank *self, void *context) {
  (void)context;
  for (size_t bucket = 0; bucket <= 40; bucket += 40) {
    struct training_case what = plain;
    struct learner learner;
    what.optimizer = (struct any_case){ANY(adam, .freeze_step = 2, .common.bucket_size = bucket)};
    if (!learner_open(&learner, &what, self, true))
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

/* Passes a stream of another device on one rank, which must notice the error and report it to the
 * others. */
static void check_wrong_stream(const struct gpu_rank *self, void *context) {
  struct learner learner;
  cudaStream_t other;
  const int now = current_device();
  (void)context;
  if (other_device() == now)
    SKIP("there is one device only");
  CHECK_CUDA(cudaSetDevice(other_device()));
  CHECK_CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  CHECK_CUDA(cudaSetDevice(now));
  if (learner_open(&learner, &plain, self, true)) {
    cudaStream_t own = learner.streams[0];
    check_good_step(&learner, 0);
    learner.streams[0] = is_last(self) ? other : own;
    CHECK_STATUS(step_on_stream(&learner, 0.5f),
                 is_last(self) ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
    learner.streams[0] = own;
    check_good_step(&learner, 1);
    learner_close(&learner);
  }
  CHECK_CUDA(cudaStreamDestroy(other));
}

static void streams_must_be_right(void) { run_on_both(check_wrong_stream); }

/* --- Failures of the device and of memory */

/* Makes one allocation fail on one rank: on the host, on the device, or of pinned memory. */
static bool create_without_memory(const struct gpu_rank *self, const float *arrays) {
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
  onebit_status_t status = onebit_adam_create(self->comm, tensors, 2, &options, &optimizer);
  CHECK(status == ONEBIT_OK || status == ONEBIT_ERROR_MEMORY ||
            (status == ONEBIT_ERROR_PEER && self->size > 1),
        "status %d: %s", (int)status, onebit_last_error());
  CHECK((optimizer != NULL) == (status == ONEBIT_OK), "status and handle do not agree");
  onebit_optimizer_destroy(optimizer);
  return status == ONEBIT_OK;
}

/* The functions that make an allocation fail: one for the library's own allocator, one for
 * CUDA's. */
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
  shortage->done[self->rank] = create_without_memory(self, arrays);
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

/* Launch number n of a step fails on one rank. `launches` is the number of launches of the previous
 * step. */
struct failing {
  long n, launches;
};

static void fail_a_launch(const struct gpu_rank *self, void *context) {
  struct failing *failing = context;
  struct learner learner;
  if (!learner_open(&learner, &plain, self, true))
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

static void a_failed_launch_is_reported(void) {
  plan_ranks *const ranks[] = {gpu_run_loopback, run_ranks_self};
  for (size_t k = 0; k < 2; k++) {
    struct failing failing = {0};
    do {
      failing.n++;
      ranks[k](1, fail_a_launch, &failing);
    } while (failing.n < failing.launches);
    CHECK(failing.launches > 4, "a step has %ld launches", failing.launches);
  }
}

/* Makes a launch fail on one of two ranks, whose step must end with an error. The other rank's step
 * must end too. Its status depends on how far the first rank had come. */
static void fail_one_of_two(const struct gpu_rank *self, void *context) {
  const long *number = context;
  struct learner learner;
  if (!learner_open(&learner, &plain, self, true))
    return;
  for (int attempt = 0; attempt < 4; attempt++)
    check_good_step(&learner, attempt);
  learner_send_gradients(&learner, 4, learner.streams[0]);
  CHECK_CUDA(cudaStreamSynchronize(learner.streams[0]));
  gpu_await_ranks();
  if (self->rank == 0)
    emulation_fail_launch(*number);
  onebit_status_t status = step_on_stream(&learner, 1e-3f);
  CHECK(status == ONEBIT_OK || status == ONEBIT_ERROR_DEVICE || status == ONEBIT_ERROR_PEER ||
            status == ONEBIT_ERROR_MESSAGE,
        "launch %ld fails: %d: %s", *number, (int)status, onebit_last_error());
  learner_close(&learner);
}

static void a_failed_launch_holds_nobody_up(void) {
  for (long number = 1; number < 24; number++) {
    gpu_run_loopback(2, fail_one_of_two, &number);
    emulation_fail_launch(0);
    run_ranks_nccl(2, fail_one_of_two, &number);
    emulation_fail_launch(0);
  }
}

static const struct gpu_test tests[] = {
    {"arrays must be there", arrays_must_be_there, ANY_DEVICE},
    {"steps must be right", steps_must_be_right, ANY_DEVICE},
    {"streams must be right", streams_must_be_right, ANY_DEVICE},
    {"no memory reaches all ranks", no_memory_reaches_all_ranks, EMULATED},
    {"a failed launch is told", a_failed_launch_is_reported, EMULATED},
    {"a failed launch holds nobody up", a_failed_launch_holds_nobody_up, EMULATED},
};
GPU_SUITE("adam errors", tests)
