/* A compressed step of an optimizer in a CUDA graph, replayed many times: it gives the same bits as
 * the host, in cases where the host takes no part. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/training.h"

#ifdef ONEBIT_EMULATED_CUDA
#define REPLAYS 100
#else
#define REPLAYS 1000
#endif

#define WARMUP   2
#define ATTEMPTS (WARMUP + REPLAYS)
#define SPAN     20 /* parameters are compared after this many replays */
#define SPANS    (REPLAYS / SPAN)
#define RATE     2e-3f

#define FROZEN .freeze_step = WARMUP

/* Gradients repeat after TRAINING_ATTEMPTS, including those that are not finite. */
static const struct training_case cases[] = {
    ADAM("one bucket", ONE_STREAM, 1u << 9, FROZEN, .beta1 = 0.9),
    ADAM("buckets", ONE_STREAM, 1u << 5 | 1u << 6, FROZEN, .common.bucket_size = 40),
    {.name = "buckets, in parts",
     .optimizer = {ANY(adam, FROZEN, .common.bucket_size = 40)},
     .traits = IN_PARTS | RATE_THERE,
     .poison = 1u << 5 | 1u << 6},
    ADAM("one scale, no error feedback", ONE_STREAM, 0, FROZEN,
         .common.block_size = ONEBIT_BLOCK_BUFFER, .common.no_error_feedback = 1),
    ADAM("deepspeed", ONE_STREAM, 1u << 9, .common.profile = ONEBIT_PROFILE_DEEPSPEED,
         .freeze_step = WARMUP + 1),
    {.name = "lamb",
     .optimizer = {ANY(lamb, .freeze_step = WARMUP)},
     .poison = 1u << 2 | 1u << 9}, /* the first compressed step is skipped, too */
    {.name = "lamb, buckets, in parts",
     .optimizer = {ANY(lamb, FROZEN, .common.bucket_size = 40)},
     .traits = IN_PARTS | RATE_THERE,
     .poison = 1u << 5 | 1u << 6},
    {.name = "lamb, deepspeed",
     .optimizer = {ANY(lamb, .freeze_step = WARMUP + 1,
                       .common.profile = ONEBIT_PROFILE_DEEPSPEED)},
     .traits = RATE_THERE},
    {.name = "efficient",
     .optimizer = {ANY(efficient_adam, .warmup_steps = WARMUP, .common.bucket_size = 40)},
     .traits = RATE_THERE,
     .poison = 1u << 2 | 1u << 9},
    {.name = "efficient, trust ratios",
     .optimizer = {ANY(efficient_adam, .warmup_steps = WARMUP, .trust_ratio = 1)},
     .poison = 1u << 2 | 1u << 9},
    {.name = "lion",
     .optimizer = {ANY(lion, .common.bucket_size = 40)},
     .traits = RATE_THERE,
     .poison = 1u << 2 | 1u << 9},
    {.name = "momentum",
     .optimizer = {ANY(momentum, .warmup_steps = WARMUP)},
     .traits = RATE_THERE,
     .poison = 1u << 9},
    {.name = "a tensor uncompressed",
     .optimizer = {ANY(adam, FROZEN)},
     .traits = PLAIN_TENSOR | RATE_THERE,
     .poison = 1u << 9},
};
#define CASES (sizeof cases / sizeof cases[0])

struct long_record {
  float first[TRAINING_ELEMENTS]; /* after the first replay */
  float parameters[SPANS][TRAINING_ELEMENTS];
  onebit_optimizer_info_t info[TRAINING_RANKS];
};

static bool is_poisoned(const struct training_case *what, int attempt) {
  return what->poison >> attempt % TRAINING_ATTEMPTS & 1;
}

static float rate_of(const struct training_case *what, int attempt) {
  return what->traits & RATE_THERE ? training_rate_of(attempt % TRAINING_ATTEMPTS) : RATE;
}

static void record_case(const struct training_case *what, const struct gpu_rank *self,
                        struct long_record *record) {
  struct learner learner;
  check_case("%s, rank %d of %d on the host", what->name, self->rank, self->size);
  if (!learner_open(&learner, what, self->comm, self->rank, self->size, false))
    return;
  for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
    const int replays = attempt + 1 - WARMUP;
    learner_send_gradients(&learner, attempt % TRAINING_ATTEMPTS, NULL);
    CHECK_STATUS(onebit_optimizer_step(learner.optimizer, rate_of(what, attempt)),
                 is_poisoned(what, attempt) ? ONEBIT_SKIPPED : ONEBIT_OK);
    if (self->rank == 0 && replays == 1)
      memcpy(record->first, learner.parameters, sizeof record->first);
    if (self->rank == 0 && replays > 0 && replays % SPAN == 0)
      memcpy(record->parameters[replays / SPAN - 1], learner.parameters, sizeof record->first);
  }
  record->info[self->rank].size = sizeof record->info[0];
  CHECK_STATUS(onebit_optimizer_get_info(learner.optimizer, &record->info[self->rank]), ONEBIT_OK);
  learner_close(&learner);
}

static void record_cases(const struct gpu_rank *self, void *context) {
  struct long_record *records = context;
  for (size_t k = 0; k < CASES; k++)
    if (sample_has(k, CASES))
      record_case(&cases[k], self, &records[k]);
}

/* --- Rates in memory of the device */

static struct rates {
  float *now, *pinned; /* the current rate; the rates of all attempts */
} no_rates;

/* Returns NaN where the rate is in device memory, since the argument is then ignored. */
static float rate_argument(const struct learner *learner) {
  return learner->what->traits & RATE_THERE ? NAN : RATE;
}

static struct rates open_rates(struct learner *learner) {
  struct rates rates = no_rates;
  if (!(learner->what->traits & RATE_THERE))
    return rates;
  CHECK_CUDA(cudaMalloc((void **)&rates.now, sizeof(float)));
  CHECK_CUDA(cudaMallocHost((void **)&rates.pinned, ATTEMPTS * sizeof(float)));
  CHECK_STATUS(onebit_optimizer_set_learning_rate_pointer(learner->optimizer, rates.now),
               ONEBIT_OK);
  return rates;
}

static void send_rate(const struct learner *learner, const struct rates *rates, int attempt) {
  if (!rates->now)
    return;
  rates->pinned[attempt] = rate_of(learner->what, attempt);
  CHECK_CUDA(cudaMemcpyAsync(rates->now, &rates->pinned[attempt], sizeof(float),
                             cudaMemcpyHostToDevice, learner->streams[0]));
}

static void close_rates(const struct rates *rates) {
  CHECK_CUDA(cudaFree(rates->now));
  CHECK_CUDA(cudaFreeHost(rates->pinned));
}

/* --- A graph */

/* Checks that no step can be captured in the warm-up, nor before the host knows that it is over;
 * then nothing is put on the stream. */
static void check_refusal(struct learner *learner) {
  cudaGraph_t graph = NULL;
  cudaStream_t stream = learner->streams[0];
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CHECK_STATUS(onebit_optimizer_step_stream(learner->optimizer, RATE, stream),
               ONEBIT_ERROR_UNSUPPORTED);
  CHECK(strstr(onebit_last_error(), "warm-up") &&
            strstr(onebit_last_error(), "onebit_optimizer_synchronize"),
        "the message is: %s", onebit_last_error());
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  if (graph)
    cudaGraphDestroy(graph);
}

/* Makes the first steps; a method without a warm-up refuses no capture. */
static void warm_up(struct learner *learner, const struct rates *rates) {
  const bool refused = !learner->what->optimizer.method->initial.no_warmup;
  for (int attempt = 0; attempt < WARMUP; attempt++) {
    if (refused)
      check_refusal(learner);
    learner_send_gradients(learner, attempt, learner->streams[0]);
    send_rate(learner, rates, attempt);
    CHECK_STATUS(onebit_optimizer_step_stream(learner->optimizer, rate_argument(learner),
                                              learner->streams[0]),
                 ONEBIT_OK);
  }
  if (refused)
    check_refusal(learner);
  CHECK_STATUS(onebit_optimizer_synchronize(learner->optimizer), ONEBIT_OK);
}

static void enqueue_step(struct learner *learner, cudaStream_t stream) {
  onebit_optimizer_t optimizer = learner->optimizer;
  const bool in_parts = learner->what->traits & IN_PARTS;
  const float rate = rate_argument(learner);
  if (in_parts)
    CHECK_STATUS(onebit_optimizer_begin_stream(optimizer, rate, stream), ONEBIT_OK);
  for (size_t t = in_parts ? TRAINING_TENSORS : 0; t-- > 0;)
    CHECK_STATUS(onebit_optimizer_ready_stream(optimizer, t, stream), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_step_stream(optimizer, rate, stream), ONEBIT_OK);
}

static cudaGraphExec_t capture_step(struct learner *learner) {
  cudaGraph_t graph = NULL;
  cudaGraphExec_t runs = NULL;
  cudaStream_t stream = learner->streams[0];
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  enqueue_step(learner, stream);
  if (CHECK_CUDA(cudaStreamEndCapture(stream, &graph)))
    CHECK_CUDA(cudaGraphInstantiate(&runs, graph, 0));
  if (graph)
    cudaGraphDestroy(graph);
  return runs;
}

static void check_parameters(struct learner *learner, const float *wanted, int attempt) {
  learner_fetch(learner, 0, learner->streams[0]);
  CHECK_CUDA(cudaStreamSynchronize(learner->streams[0]));
  training_check_parameters(learner, learner_fetched(learner, 0), wanted, attempt);
}

static void replay_step(struct learner *learner, const struct rates *rates, cudaGraphExec_t graph,
                        const struct long_record *record) {
  for (int attempt = WARMUP; attempt < ATTEMPTS; attempt++) {
    const int replays = attempt + 1 - WARMUP;
    learner_send_gradients(learner, attempt % TRAINING_ATTEMPTS, learner->streams[0]);
    send_rate(learner, rates, attempt);
    CHECK_CUDA(cudaGraphLaunch(graph, learner->streams[0]));
    if (replays == 1)
      check_parameters(learner, record->first, attempt);
    if (replays % SPAN == 0)
      check_parameters(learner, record->parameters[replays / SPAN - 1], attempt);
  }
}

static void compare_case(const struct training_case *what, onebit_comm_t comm,
                         const struct gpu_rank *self, const struct long_record *record) {
  struct learner learner;
  check_case("%s, rank %d of %d", what->name, self->rank, self->size);
  if (!learner_open(&learner, what, comm, self->rank, self->size, true))
    return;
  const struct rates rates = open_rates(&learner);
  warm_up(&learner, &rates);
  cudaGraphExec_t graph = capture_step(&learner);
  if (CHECK(graph, "no graph")) {
    replay_step(&learner, &rates, graph, record);
    CHECK_STATUS(onebit_optimizer_synchronize(learner.optimizer),
                 what->poison ? ONEBIT_SKIPPED : ONEBIT_OK);
    training_check_info(learner.optimizer, &record->info[self->rank]);
    CHECK_CUDA(cudaGraphExecDestroy(graph));
  }
  close_rates(&rates);
  learner_close(&learner);
}

static void replay_over_nccl(const struct gpu_rank *self, void *context) {
  struct training_nccl group;
  struct long_record *records = context;
  if (training_nccl_open(&group, self))
    for (size_t k = 0; k < CASES; k++)
      if (sample_has(k, CASES))
        compare_case(&cases[k], group.comm, self, &records[k]);
  training_nccl_close(&group);
}

static void replays_over_nccl(void) {
  struct long_record *records = gpu_allocate_area(CASES * sizeof *records);
  for (int size = 1; size <= 3; size++)
    if (gpu_run_loopback(size, record_cases, records))
      gpu_run_ranks(size, replay_over_nccl, records);
}

static void replay_alone(const struct gpu_rank *self, void *context) {
  onebit_comm_t comm;
  struct long_record *records = context;
  if (CHECK_STATUS(onebit_comm_create_self(&comm), ONEBIT_OK))
    for (size_t k = 0; k < CASES; k++)
      if (sample_has(k, CASES))
        compare_case(&cases[k], comm, self, &records[k]);
  onebit_comm_destroy(comm);
}

static void replays_alone(void) {
  struct long_record *records = gpu_allocate(CASES, sizeof *records);
  if (gpu_run_loopback(1, record_cases, records))
    gpu_run_loopback(1, replay_alone, records);
  free(records);
}

/* Returns the first parameter, which is a tensor of its own. */
static float first_parameter(struct learner *learner) {
  float value = 0.0f;
  CHECK_CUDA(cudaStreamSynchronize(learner->streams[0]));
  CHECK_CUDA(cudaMemcpy(&value, learner->parameters, sizeof value, cudaMemcpyDeviceToHost));
  return value;
}

/* With one element a message is exact, and with a constant gradient g m^ / (sqrt(v^) + eps) is
 * always g (1 - b1^t) / (1 - b1^t) / |g|: all steps have equal lengths. With the factor of the
 * captured step they would grow. */
static void compare_lengths(struct learner *learner, cudaGraphExec_t graph) {
  float before = first_parameter(learner);
  for (int i = 0; i < 4; i++) {
    CHECK_CUDA(cudaGraphLaunch(graph, learner->streams[0]));
    float now = first_parameter(learner), length = fabsf(now - before);
    CHECK(fabsf(length - RATE) < 1e-3f * RATE, "replay %d moves by %g, not %g", i, (double)length,
          (double)RATE);
    before = now;
  }
}

static void check_changing_factor(const struct gpu_rank *self, void *context) {
  onebit_comm_t comm;
  struct learner learner;
  if (!CHECK_STATUS(onebit_comm_create_self(&comm), ONEBIT_OK) ||
      !learner_open(&learner, context, comm, self->rank, self->size, true))
    return;
  warm_up(&learner, &no_rates);
  cudaGraphExec_t graph = capture_step(&learner);
  if (CHECK(graph, "no graph")) {
    compare_lengths(&learner, graph);
    CHECK_CUDA(cudaGraphExecDestroy(graph));
  }
  learner_close(&learner);
  onebit_comm_destroy(comm);
}

/* The form of two streams is the one whose gradients stay the same. */
static void the_factor_is_of_the_replay(void) {
  struct training_case what = ADAM("the factor", TWO_STREAMS, 0, FROZEN, .beta1 = 0.9);
  gpu_run_loopback(1, check_changing_factor, &what);
}

/* --- Steps that no graph can have */

static const struct training_case refused[] = {
    {.name = "0/1 Adam", .optimizer = {ANY(zero_one_adam, .variance_freeze_step = WARMUP)}},
    {.name = "clipping", .optimizer = {ANY(momentum, .common.clip_norm = 1)}},
};
static const char *const words[] = {"zero_one_adam sends depends", "clip_norm is 1"};

static void check_refused_steps(const struct gpu_rank *self, void *context) {
  onebit_comm_t comm;
  (void)self, (void)context;
  CHECK_STATUS(onebit_comm_create_self(&comm), ONEBIT_OK);
  for (size_t k = 0; k < sizeof refused / sizeof refused[0]; k++) {
    struct learner learner;
    cudaGraph_t graph = NULL;
    check_case("%s", refused[k].name);
    if (!learner_open(&learner, &refused[k], comm, 0, 1, true))
      return;
    learner_send_gradients(&learner, 0, learner.streams[0]);
    CHECK_STATUS(onebit_optimizer_step_stream(learner.optimizer, RATE, learner.streams[0]),
                 ONEBIT_OK);
    CHECK_CUDA(cudaStreamBeginCapture(learner.streams[0], cudaStreamCaptureModeThreadLocal));
    CHECK_STATUS(onebit_optimizer_step_stream(learner.optimizer, RATE, learner.streams[0]),
                 ONEBIT_ERROR_UNSUPPORTED);
    CHECK(strstr(onebit_last_error(), words[k]), "the message is: %s", onebit_last_error());
    CHECK_STATUS(
        onebit_optimizer_set_learning_rate_pointer(learner.optimizer, (float *)learner.parameters),
        k == 0 ? ONEBIT_ERROR_UNSUPPORTED : ONEBIT_OK);
    CHECK_CUDA(cudaStreamEndCapture(learner.streams[0], &graph));
    if (graph)
      cudaGraphDestroy(graph);
    CHECK_STATUS(onebit_optimizer_synchronize(learner.optimizer), ONEBIT_OK);
    learner_close(&learner);
  }
  onebit_comm_destroy(comm);
}

static void some_steps_are_refused(void) { gpu_run_loopback(1, check_refused_steps, NULL); }

static const struct gpu_test tests[] = {
    {"replayed over NCCL", replays_over_nccl, false},
    {"replayed alone", replays_alone, false},
    {"some steps are refused", some_steps_are_refused, false},
    {"the factor is of the replay", the_factor_is_of_the_replay, false},
};
GPU_SUITE("graphs", tests)
