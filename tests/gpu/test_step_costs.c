/*
 * The costs of a step on a stream: no allocation, no wait, and a number of kernels; and exchanges
 * begin beside the backward pass. Only the emulated device counts.
 */
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/training.h"

#ifdef ONEBIT_EMULATED_CUDA
#include "cuda/bucket.h"
#include <emulation.h>

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
  atomic_int arrived;
  const struct training_case *what;
  long kernels, buckets;
};

/* Makes threads wait for each other, any number of times: `turn` counts them. */
static void wait_for_threads(struct costs *costs, int size, int *turn) {
  atomic_fetch_add(&costs->arrived, 1);
  for (++*turn; atomic_load(&costs->arrived) < *turn * size;)
    sched_yield();
}

/* Sets each gradient to NULL and back, as torch does around a backward pass. */
static void move_gradients(struct learner *learner) {
  for (size_t t = 0; t < TRAINING_TENSORS; t++) {
    const void *here = learner->optimizer->list[t].gradient;
    CHECK_STATUS(onebit_optimizer_set_gradient(learner->optimizer, t, NULL), ONEBIT_OK);
    CHECK_STATUS(onebit_optimizer_set_gradient(learner->optimizer, t, here), ONEBIT_OK);
  }
}

static void count_a_step(struct learner *learner, struct costs *costs) {
  int turn = 0;
  learner_send_gradients(learner, WARMUP, learner->streams[0]);
  CHECK_CUDA(cudaStreamSynchronize(learner->streams[0]));
  wait_for_threads(costs, learner->size, &turn);
  if (learner->rank == 0)
    emulation_reset_counts();
  wait_for_threads(costs, learner->size, &turn);
  move_gradients(learner);
  CHECK_STATUS(onebit_optimizer_step_stream(learner->optimizer, RATE, learner->streams[0]),
               ONEBIT_OK);
  wait_for_threads(costs, learner->size, &turn);
  const struct emulation_counters called = emulation_counts();
  wait_for_threads(costs, learner->size, &turn);
  CHECK_CUDA(cudaStreamSynchronize(learner->streams[0]));
  wait_for_threads(costs, learner->size, &turn);
  const struct emulation_counters ran = emulation_counts();
  wait_for_threads(costs, learner->size, &turn);
  CHECK(called.synchronisations == 0, "the host waited %ld times", called.synchronisations);
  CHECK(called.allocations == 0, "%ld allocations", called.allocations);
  CHECK(ran.copies == 2 * costs->buckets * learner->size, "%ld copies on %d ranks", ran.copies,
        learner->size);
  CHECK(ran.kernels == costs->kernels * learner->size, "%ld kernels on %d ranks, not %ld each",
        ran.kernels, learner->size, costs->kernels);
  if (learner->rank == 0)
    printf("  %s, %d ranks: %ld kernels a rank\n", costs->what->name, learner->size,
           ran.kernels / learner->size);
}

static void count_steps(onebit_comm_t comm, const struct gpu_rank *self, struct costs *costs) {
  struct learner learner;
  if (!learner_open(&learner, costs->what, comm, self->rank, self->size, true))
    return;
  warm_up(&learner);
  count_a_step(&learner, costs);
  CHECK_STATUS(onebit_optimizer_synchronize(learner.optimizer), ONEBIT_OK);
  learner_close(&learner);
}

static void count_over_nccl(const struct gpu_rank *self, void *context) {
  struct training_nccl group;
  if (training_nccl_open(&group, self))
    count_steps(group.comm, self, context);
  training_nccl_close(&group);
}

static void count_alone(const struct gpu_rank *self, void *context) {
  onebit_comm_t comm;
  if (CHECK_STATUS(onebit_comm_create_self(&comm), ONEBIT_OK))
    count_steps(comm, self, context);
  onebit_comm_destroy(comm);
}

/* Launches for one bucket: count; compress, which seals; reduce, which opens and seals; open, which
 * decides (decide, where one rank has no messages to open); apply; conclude, which copies the
 * results that stay. Every bucket has these, and a kernel joins them. */
static const struct training_case single =
    ADAM("one bucket", ONE_STREAM, 0, FROZEN, .common.bucket_size = 0);
static const struct training_case four =
    ADAM("four buckets", ONE_STREAM, 0, FROZEN, .common.bucket_size = 40);

static void costs_are_known(void) {
  for (int size = 0; size <= 3; size++) { /* 0: one rank, without NCCL */
    const long each = 6;
    struct costs one = {.what = &single, .kernels = each, .buckets = 1};
    struct costs more = {.what = &four, .kernels = 4 * each + 1, .buckets = 4};
    if (size == 0) {
      gpu_run_loopback(1, count_alone, &one);
      gpu_run_loopback(1, count_alone, &more);
    } else {
      gpu_run_ranks(size, count_over_nccl, &one);
      gpu_run_ranks(size, count_over_nccl, &more);
    }
  }
}

/* --- Creation */

/* Returns how often the host waits for the device while an optimizer and its test are created. */
static long count_waits_of_creation(const struct training_case *what) {
  struct learner learner;
  onebit_comm_t comm;
  long waits = 0;
  if (!CHECK_STATUS(onebit_comm_create_self(&comm), ONEBIT_OK))
    return 0;
  emulation_reset_counts();
  if (learner_open(&learner, what, comm, 0, 1, true)) {
    waits = emulation_counts().synchronisations;
    learner_close(&learner);
  }
  onebit_comm_destroy(comm);
  return waits;
}

/* A wait for the default stream is a wait for whatever the program does there. A bucket has two
 * plans, each of which copies two arrays and waits once, and arrays of its own, which it copies as
 * one. */
static void creation_waits_little(void) {
  const long each = (count_waits_of_creation(&four) - count_waits_of_creation(&single)) / 3;
  CHECK(each > 0 && each <= 2 * 3 + 1, "the host waits %ld times for a bucket", each);
}

/* --- Exchange beside the backward pass */

static bool is_eager(void) {
  const char *mode = getenv("EMULATED_STREAMS");
  return mode && !strcmp(mode, "eager");
}

static void note_reached(void *reached) { atomic_store((atomic_int *)reached, 1); }

/* Checks the time between reporting the tensors of the last buckets as ready and reporting the
 * others: when the optimizer's own stream has ended, the exchanges of those buckets have run, while
 * later work on the caller's stream has not begun. */
static void exchange_early(struct learner *learner, struct costs *costs) {
  const struct ob_bucket_device *device = learner->optimizer->buckets[0].device;
  cudaStream_t stream = learner->streams[0];
  atomic_int reached = 0;
  int turn = 0;
  learner_send_gradients(learner, WARMUP, stream);
  CHECK_CUDA(cudaStreamSynchronize(stream));
  wait_for_threads(costs, learner->size, &turn);
  if (learner->rank == 0)
    emulation_reset_counts();
  wait_for_threads(costs, learner->size, &turn);
  CHECK_STATUS(onebit_optimizer_begin_stream(learner->optimizer, RATE, stream), ONEBIT_OK);
  for (size_t t = TRAINING_TENSORS; t-- > 1;)
    CHECK_STATUS(onebit_optimizer_ready_stream(learner->optimizer, t, stream), ONEBIT_OK);
  CHECK_CUDA(cudaLaunchHostFunc(stream, note_reached, &reached));
  const struct emulation_counters called = emulation_counts();
  CHECK(called.synchronisations == 0 && called.allocations == 0, "%ld waits, %ld allocations",
        called.synchronisations, called.allocations);
  wait_for_threads(costs, learner->size, &turn);
  CHECK_CUDA(cudaStreamSynchronize(device->parts));
  wait_for_threads(costs, learner->size, &turn);
  const struct emulation_counters ran = emulation_counts();
  CHECK(ran.kernels >= costs->kernels * learner->size, "%ld kernels on %d ranks, not %ld each",
        ran.kernels, learner->size, costs->kernels);
  CHECK(!atomic_load(&reached) || is_eager(), "the exchange has waited for later work");
  wait_for_threads(costs, learner->size, &turn);
  CHECK_STATUS(onebit_optimizer_ready_stream(learner->optimizer, 0, stream), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_step_stream(learner->optimizer, RATE, stream), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_synchronize(learner->optimizer), ONEBIT_OK);
  CHECK_CUDA(cudaStreamSynchronize(stream));
  if (learner->rank == 0)
    printf("  %d ranks: %ld kernels a rank before the last tensor is ready\n", learner->size,
           ran.kernels / learner->size);
}

static void overlap_over_nccl(const struct gpu_rank *self, void *context) {
  struct training_nccl group;
  struct learner learner;
  struct costs *costs = context;
  if (training_nccl_open(&group, self) &&
      learner_open(&learner, costs->what, group.comm, self->rank, self->size, true)) {
    warm_up(&learner);
    exchange_early(&learner, costs);
    learner_close(&learner);
  }
  training_nccl_close(&group);
}

/* Each of three buckets launches compress, reduce and decide, at least. */
static void exchanges_begin_early(void) {
  for (int size = 2; size <= 3; size++) {
    struct costs costs = {.what = &four, .kernels = 3 * 3};
    gpu_run_ranks(size, overlap_over_nccl, &costs);
  }
}

#else

static void exchanges_begin_early(void) {
  SKIP("only the emulated device counts what is launched");
}

static void costs_are_known(void) { SKIP("only the emulated device counts what is launched"); }

static void creation_waits_little(void) { SKIP("only the emulated device counts waits"); }

#endif

static const struct gpu_test tests[] = {
    {"costs are known", costs_are_known, false},
    {"creation waits little", creation_waits_little, false},
    {"exchanges begin early", exchanges_begin_early, false},
};
GPU_SUITE("step_costs", tests)
