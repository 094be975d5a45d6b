/* Tests compressed optimizer steps in a CUDA graph that is replayed many times. The results must
 * have the same bits as on the host. The cases are optimizers whose steps need no work of the
 * host. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/training.h"

#define REPLAYS  (IS_EMULATED ? 100 : 1000)
#define WARMUP   2
#define ATTEMPTS (WARMUP + REPLAYS)
#define SPAN     20 /* parameters are compared after this many replays */
#define SPANS    (REPLAYS / SPAN)
#define RATE     2e-3f

#define BIT(k)    (1u << (k))
#define FROZEN    .freeze_step = WARMUP
#define LATER     .freeze_step = WARMUP + 1
#define BUCKETS   .common.bucket_size = 40
#define DEEPSPEED .common.profile = ONEBIT_PROFILE_DEEPSPEED

#define CASE(kind, is_named, is_poisoned, with, ...)                                               \
  TRAINING_CASE(kind, is_named, ONE_STREAM, is_poisoned, with, 0, __VA_ARGS__)

/* Gradients repeat after TRAINING_ATTEMPTS steps, including the gradients that are not finite.
 * BIT(k) makes a gradient of attempt k not finite; with BIT(2) the first compressed step is
 * skipped, too. */
static const struct training_case cases[] = {
    CASE(adam, "one bucket", BIT(9), 0, FROZEN, .beta1 = 0.9),
    CASE(adam, "buckets", BIT(5) | BIT(6), 0, FROZEN, BUCKETS),
    CASE(adam, "buckets, in parts", BIT(5) | BIT(6), IN_PARTS | RATE_ON_DEVICE, FROZEN, BUCKETS),
    CASE(adam, "one scale, no error feedback", 0, 0, FROZEN,
         .common.block_size = ONEBIT_BLOCK_BUFFER, .common.no_error_feedback = 1),
    CASE(adam, "deepspeed", BIT(9), 0, LATER, DEEPSPEED),
    CASE(lamb, "lamb", BIT(2) | BIT(9), 0, FROZEN),
    CASE(lamb, "lamb, buckets, in parts", BIT(5) | BIT(6), IN_PARTS | RATE_ON_DEVICE, FROZEN,
         BUCKETS),
    CASE(lamb, "lamb, deepspeed", 0, RATE_ON_DEVICE, LATER, DEEPSPEED),
    CASE(efficient_adam, "efficient", BIT(2) | BIT(9), RATE_ON_DEVICE, .warmup_steps = WARMUP,
         BUCKETS),
    CASE(efficient_adam, "efficient, trust ratios", BIT(2) | BIT(9), 0, .warmup_steps = WARMUP,
         .trust_ratio = 1),
    CASE(lion, "lion", BIT(2) | BIT(9), RATE_ON_DEVICE, BUCKETS),
    CASE(momentum, "momentum", BIT(9), RATE_ON_DEVICE, .warmup_steps = WARMUP),
    CASE(adam, "a tensor uncompressed", BIT(9), PLAIN_TENSOR | RATE_ON_DEVICE, FROZEN),
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
  return what->traits & RATE_ON_DEVICE ? training_rate_of(attempt % TRAINING_ATTEMPTS) : RATE;
}

static void record_case(const struct training_case *what, const struct gpu_rank *self,
                        struct long_record *record) {
  struct learner learner;
  check_case("%s, rank %d of %d on the host", what->name, self->rank, self->size);
  if (!learner_open(&learner, what, self, false))
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

/* --- Learning rates in device memory */

struct rates {
  float *now, *pinned; /* the current rate; the rates of all attempts */
};

/* Returns the learning-rate argument of a step. It is NaN if the rate is in device memory, since
 * the argument must then be ignored. */
static float rate_argument(const struct learner *learner) {
  return learner->what->traits & RATE_ON_DEVICE ? NAN : RATE;
}

static struct rates open_rates(struct learner *learner) {
  struct rates rates = {NULL, NULL};
  if (!(learner->what->traits & RATE_ON_DEVICE))
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

/* Checks that a step cannot be captured, with a message that contains `part`. The stream must stay
 * empty. */
static void check_refusal(struct learner *learner, const char *part) {
  cudaGraph_t graph = NULL;
  cudaStream_t stream = learner->streams[0];
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CHECK_STATUS(onebit_optimizer_step_stream(learner->optimizer, RATE, stream),
               ONEBIT_ERROR_UNSUPPORTED);
  CHECK_MESSAGE(part);
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  if (graph)
    cudaGraphDestroy(graph);
}

/* Makes the warm-up steps. Checks that no step can be captured during the warm-up, nor before the
 * host knows that the warm-up is over. Methods without a warm-up accept every capture. */
static void warm_up(struct learner *learner, const struct rates *rates) {
  static const char part[] = "whether the warm-up is over: call onebit_optimizer_synchronize";
  const bool refused = !learner->what->optimizer.method->initial.no_warmup;
  for (int attempt = 0; attempt < WARMUP; attempt++) {
    if (refused)
      check_refusal(learner, part);
    learner_send_gradients(learner, attempt, learner->streams[0]);
    send_rate(learner, rates, attempt);
    CHECK_STATUS(onebit_optimizer_step_stream(learner->optimizer, rate_argument(learner),
                                              learner->streams[0]),
                 ONEBIT_OK);
  }
  if (refused)
    check_refusal(learner, part);
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
  training_check_parameters(learner_fetched(learner, 0), wanted, TRAINING_ELEMENTS, ONEBIT_FLOAT32,
                            attempt);
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

static void compare_case(const struct training_case *what, const struct gpu_rank *self,
                         const struct long_record *record) {
  struct learner learner;
  check_case("%s, rank %d of %d", what->name, self->rank, self->size);
  if (!learner_open(&learner, what, self, true))
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

static void compare_cases(const struct gpu_rank *self, void *context) {
  struct long_record *records = context;
  for (size_t k = 0; k < CASES; k++)
    if (sample_has(k, CASES))
      compare_case(&cases[k], self, &records[k]);
}

static void replays_over_nccl(void) {
  struct long_record *records = gpu_allocate_area(CASES * sizeof *records);
  for (int size = 1; size <= 3; size++)
    if (gpu_run_loopback(size, record_cases, records))
      run_ranks_nccl(size, compare_cases, records);
}

static void replays_alone(void) {
  struct long_record *records = gpu_allocate(CASES, sizeof *records);
  if (gpu_run_loopback(1, record_cases, records))
    run_ranks_self(1, compare_cases, records);
  free(records);
}

/* --- Steps that cannot be captured in a graph */

static const struct training_case refused[] = {
    {.name = "0/1 Adam", .optimizer = {ANY(zero_one_adam, .variance_freeze_step = WARMUP)}},
    {.name = "clipping", .optimizer = {ANY(momentum, .common.clip_norm = 1)}},
};
static const char *const words[] = {"steps of zero_one_adam send different messages",
                                    "clip_norm is 1"};

static void check_refused_steps(const struct gpu_rank *self, void *context) {
  (void)context;
  for (size_t k = 0; k < sizeof refused / sizeof refused[0]; k++) {
    struct learner learner;
    check_case("%s", refused[k].name);
    if (!learner_open(&learner, &refused[k], self, true))
      return;
    learner_send_gradients(&learner, 0, learner.streams[0]);
    CHECK_STATUS(onebit_optimizer_step_stream(learner.optimizer, RATE, learner.streams[0]),
                 ONEBIT_OK);
    check_refusal(&learner, words[k]);
    CHECK_STATUS(
        onebit_optimizer_set_learning_rate_pointer(learner.optimizer, (float *)learner.parameters),
        k == 0 ? ONEBIT_ERROR_UNSUPPORTED : ONEBIT_OK);
    CHECK_STATUS(onebit_optimizer_synchronize(learner.optimizer), ONEBIT_OK);
    learner_close(&learner);
  }
}

static void some_steps_are_refused(void) { run_ranks_self(1, check_refused_steps, NULL); }

static const struct gpu_test tests[] = {
    {"replayed over NCCL", replays_over_nccl, ANY_DEVICE},
    {"replayed alone", replays_alone, ANY_DEVICE},
    {"some steps are refused", some_steps_are_refused, ANY_DEVICE},
};
GPU_SUITE("graphs", tests)
