/*
 * Tests the costs of a step on a stream. A step must allocate nothing, must not wait, and must
 * launch a known number of kernels. Exchanges must begin during the backward pass. Only the
 * emulated device counts.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/bucket.h"
#include "tests/gpu/training.h"

#define WARMUP 2
#define RATE   2e-3f
#define FROZEN .freeze_step = WARMUP

static void warm_up(struct learner *learner) {
  for (int attempt = 0; attempt < WARMUP; attempt++) {
    learner_send_gradients(learner, attempt, learner->streams[0]);
    CHECK_STATUS(onebit_optimizer_step_stream(learner->optimizer, RATE, learner->streams[0]),
                 ONEBIT_OK);
  }
  CHECK_STATUS(onebit_optimizer_synchronize(learner->optimizer), ONEBIT_OK);
}

struct costs {
  const struct training_case *what;
  long kernels, buckets, waits;
};

/* Sets each gradient to NULL and back, as torch does around a backward pass. */
static void move_gradients(struct learner *learner) {
  for (size_t t = 0; t < TRAINING_TENSORS; t++) {
    const void *here = learner->optimizer->list[t].gradient;
    CHECK_STATUS(onebit_optimizer_set_gradient(learner->optimizer, t, NULL), ONEBIT_OK);
    CHECK_STATUS(onebit_optimizer_set_gradient(learner->optimizer, t, here), ONEBIT_OK);
  }
}

static onebit_status_t make_step(void *context) {
  struct learner *learner = context;
  move_gradients(learner);
  return onebit_optimizer_step_stream(learner->optimizer, RATE, learner->streams[0]);
}

static void count_step(struct learner *learner, const struct costs *costs) {
  learner_send_gradients(learner, WARMUP, learner->streams[0]);
  CHECK_CUDA(cudaStreamSynchronize(learner->streams[0]));
  const struct emulation_counters ran = count_call(make_step, learner);
  CHECK(ran.synchronisations == 0, "the host waited %ld times", ran.synchronisations);
  CHECK(ran.allocations == 0, "%ld allocations", ran.allocations);
  CHECK(ran.copies == 2 * costs->buckets * learner->size, "%ld copies on %d ranks", ran.copies,
        learner->size);
  CHECK(ran.kernels == costs->kernels * learner->size, "%ld kernels on %d ranks, not %ld each",
        ran.kernels, learner->size, costs->kernels);
  if (learner->rank == 0)
    printf("  %s, %d ranks: %ld kernels a rank\n", costs->what->name, learner->size,
           ran.kernels / learner->size);
}

static void count_steps(const struct gpu_rank *self, void *context) {
  const struct costs *costs = context;
  struct learner learner;
  if (!learner_open(&learner, costs->what, self, true))
    return;
  warm_up(&learner);
  count_step(&learner, costs);
  CHECK_STATUS(onebit_optimizer_synchronize(learner.optimizer), ONEBIT_OK);
  learner_close(&learner);
}

/* The cases. A bucket launches the kernels count, compress (also seals messages), reduce (also
 * checks and seals messages), open (also decides whether results are applied), apply and conclude
 * (also copies the permanent results). A single rank has no messages to open and launches decide
 * instead of open. With several buckets, one more kernel joins their outcomes. */
static const struct training_case single =
    ADAM("one bucket", ONE_STREAM, 0, FROZEN, .common.bucket_size = 0);
static const struct training_case four =
    ADAM("four buckets", ONE_STREAM, 0, FROZEN, .common.bucket_size = 40);

static void costs_are_known(void) {
  const long each = 6;
  struct costs costs[] = {{.what = &single, .kernels = each, .buckets = 1},
                          {.what = &four, .kernels = 4 * each + 1, .buckets = 4}};
  for (int k = 0; k < 2; k++) {
    run_ranks_self(1, count_steps, &costs[k]);
    for (int size = 1; size <= 3; size++)
      run_ranks_nccl(size, count_steps, &costs[k]);
  }
}

/* --- Creation */

/* Counts how often the host waits for the device while an optimizer and its test are created. */
static void count_waits_of_creation(const struct gpu_rank *self, void *context) {
  struct costs *costs = context;
  struct learner learner;
  emulation_reset_counts();
  if (learner_open(&learner, costs->what, self, true)) {
    costs->waits = emulation_counts().synchronisations;
    learner_close(&learner);
  }
}

/* Checks that creating an optimizer waits seldom for the default stream, since such a wait also
 * waits for the program's work on that stream. A bucket has two plans, each of which copies two
 * arrays and waits once. The bucket's other arrays are copied together. */
static void creation_waits_little(void) {
  struct costs one = {.what = &single}, more = {.what = &four};
  run_ranks_self(1, count_waits_of_creation, &one);
  run_ranks_self(1, count_waits_of_creation, &more);
  const long each = (more.waits - one.waits) / 3;
  CHECK(each > 0 && each <= 2 * 3 + 1, "the host waits %ld times for a bucket", each);
}

/* --- Exchanges that overlap with the backward pass */

static bool is_eager(void) {
  const char *mode = getenv("EMULATED_STREAMS");
  return mode && !strcmp(mode, "eager");
}

static void note_reached(void *reached) { atomic_store((atomic_int *)reached, 1); }

/* Reports all tensors except the first as ready, checks, and then reports the first. At the check,
 * the optimizer's own stream has finished its work, so the exchanges of the last buckets have run.
 * Later work on the caller's stream must not have begun. */
static void exchange_early(struct learner *learner, const struct costs *costs) {
  const struct ob_bucket_device *device = learner->optimizer->buckets[0].device;
  cudaStream_t stream = learner->streams[0];
  atomic_int reached = 0;
  learner_send_gradients(learner, WARMUP, stream);
  CHECK_CUDA(cudaStreamSynchronize(stream));
  if (gpu_await_ranks())
    emulation_reset_counts();
  gpu_await_ranks();
  CHECK_STATUS(onebit_optimizer_begin_stream(learner->optimizer, RATE, stream), ONEBIT_OK);
  for (size_t t = TRAINING_TENSORS; t-- > 1;)
    CHECK_STATUS(onebit_optimizer_ready_stream(learner->optimizer, t, stream), ONEBIT_OK);
  CHECK_CUDA(cudaLaunchHostFunc(stream, note_reached, &reached));
  const struct emulation_counters called = emulation_counts();
  CHECK(called.synchronisations == 0 && called.allocations == 0, "%ld waits, %ld allocations",
        called.synchronisations, called.allocations);
  gpu_await_ranks();
  CHECK_CUDA(cudaStreamSynchronize(device->parts));
  gpu_await_ranks();
  const struct emulation_counters ran = emulation_counts();
  CHECK(ran.kernels >= costs->kernels * learner->size, "%ld kernels on %d ranks, not %ld each",
        ran.kernels, learner->size, costs->kernels);
  CHECK(!atomic_load(&reached) || is_eager(), "the exchange has waited for later work");
  gpu_await_ranks();
  CHECK_STATUS(onebit_optimizer_ready_stream(learner->optimizer, 0, stream), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_step_stream(learner->optimizer, RATE, stream), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_synchronize(learner->optimizer), ONEBIT_OK);
  CHECK_CUDA(cudaStreamSynchronize(stream));
  if (learner->rank == 0)
    printf("  %d ranks: %ld kernels a rank before the last tensor is ready\n", learner->size,
           ran.kernels / learner->size);
}

static void check_overlap(const struct gpu_rank *self, void *context) {
  const struct costs *costs = context;
  struct learner learner;
  if (!learner_open(&learner, costs->what, self, true))
    return;
  warm_up(&learner);
  exchange_early(&learner, costs);
  learner_close(&learner);
}

/* Each of the three buckets launches at least compress, reduce and decide. */
static void exchanges_begin_early(void) {
  for (int size = 2; size <= 3; size++) {
    struct costs costs = {.what = &four, .kernels = 3 * 3};
    run_ranks_nccl(size, check_overlap, &costs);
  }
}

static const struct gpu_test tests[] = {
    {"costs are known", costs_are_known, EMULATED},
    {"creation waits little", creation_waits_little, EMULATED},
    {"exchanges begin early", exchanges_begin_early, EMULATED},
};
GPU_SUITE("step_costs", tests)
