/*
 * 1-bit Adam on devices of several hosts, staged and over NCCL, against the same on processors:
 * warm-up, freeze and compressed steps, skipped ones too and one with ranks at odds, in one bucket
 * and in many, and replayed from a graph.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "onebit/cuda.h"
#include "tests/codec_values.h"
#include "tests/gpu/hosts.h"

enum {
  TENSORS = 3,
  ELEMENTS = 5003 + 17 + 4100,
  STEPS = 10,
  FREEZE = 3,
  AT_ODDS = 6,
  CAPTURED = 7
};

static const size_t counts[TENSORS] = {5003, 17, 4100};
static const float rate = 1e-2f;

struct adam_case {
  const char *name;
  onebit_adam_options_t options;
};

#define OPTIONS(...)                                                                               \
  { .size = sizeof(onebit_adam_options_t), .freeze_step = FREEZE, __VA_ARGS__ }

static const struct adam_case cases[] = {
    {"one bucket", OPTIONS(.beta2 = 0.9)},
    {"buckets, many messages",
     OPTIONS(.common.bucket_size = 100, .common.block_size = 64, .common.chunk_size = 128,
             .common.scale = ONEBIT_SCALE_MEAN_ABSOLUTE)},
    {"nothing kept", OPTIONS(.common.no_error_feedback = 1)},
};
#define CASES (sizeof cases / sizeof cases[0])

/* The results of a rank over loopback. */
struct record {
  float parameters[STEPS][ELEMENTS];
  onebit_status_t status[STEPS];
  onebit_optimizer_info_t info;
};

struct learner {
  int rank, size;
  bool device, on_stream;        /* on_stream: no host takes part */
  float *parameters, *gradients; /* where the optimizer is */
  float *sent, *fetched;         /* here */
  cudaStream_t stream;
  cudaGraphExec_t graph;
  onebit_optimizer_t optimizer;
};

static float *take(bool device) {
  void *memory = NULL;
  if (!device)
    return gpu_allocate(ELEMENTS, sizeof(float));
  CHECK_CUDA(cudaMalloc(&memory, ELEMENTS * sizeof(float)));
  return memory;
}

static void copy(float *to, const float *from) { gpu_copy(to, from, ELEMENTS * sizeof(float)); }

/* Over NCCL the optimizer finds by itself what it should do on several hosts; on one, or with one
 * rank on each, that would be the exchange. */
static bool open_learner(struct learner *learner, onebit_comm_t comm,
                         const struct hosts_split *split, const struct adam_case *what) {
  onebit_adam_options_t options = what->options;
  onebit_tensor_t tensors[TENSORS];
  bool several = split->hosts > 1 && split->each > 1;
  options.common.device = learner->device ? ONEBIT_DEVICE_CUDA : ONEBIT_DEVICE_HOST;
  options.common.schedule =
      learner->on_stream && several ? ONEBIT_SCHEDULE_AUTOMATIC : ONEBIT_SCHEDULE_HIERARCHICAL;
  learner->parameters = take(learner->device);
  learner->gradients = take(learner->device);
  learner->sent = take(false);
  learner->fetched = take(false);
  for (size_t t = 0, at = 0; t < TENSORS; at += counts[t++])
    tensors[t] = (onebit_tensor_t){.parameter = learner->parameters + at,
                                   .gradient = learner->gradients + at,
                                   .count = counts[t],
                                   .weight_decay = 0.01f * (float)t};
  for (size_t i = 0; i < ELEMENTS; i++)
    learner->sent[i] = value_at(i, 5, VALUES_GRADIENTS);
  copy(learner->parameters, learner->sent);
  if (learner->device)
    CHECK_CUDA(cudaStreamCreateWithFlags(&learner->stream, cudaStreamNonBlocking));
  return CHECK_STATUS(onebit_adam_create(comm, tensors, TENSORS, &options, &learner->optimizer),
                      ONEBIT_OK);
}

static void close_learner(struct learner *learner) {
  onebit_optimizer_destroy(learner->optimizer);
  if (learner->graph)
    CHECK_CUDA(cudaGraphExecDestroy(learner->graph));
  if (learner->device) {
    CHECK_CUDA(cudaStreamDestroy(learner->stream));
    CHECK_CUDA(cudaFree(learner->parameters));
    CHECK_CUDA(cudaFree(learner->gradients));
  } else {
    free(learner->parameters);
    free(learner->gradients);
  }
  free(learner->sent);
  free(learner->fetched);
}

/* In the warm-up, and once compressed, a gradient is not a number. */
static void make_gradients(struct learner *learner, int step) {
  bool spoilt = learner->rank == 1 && (step == 1 || step == 5);
  for (size_t i = 0; i < ELEMENTS; i++)
    learner->sent[i] = value_at(i, (uint32_t)(97 * step + learner->rank), VALUES_GRADIENTS);
  if (spoilt)
    learner->sent[ELEMENTS / 2] = NAN;
  copy(learner->gradients, learner->sent);
}

static onebit_status_t step_in_graph(struct learner *learner) {
  cudaGraph_t graph = NULL;
  if (!learner->graph) {
    CHECK_CUDA(cudaStreamBeginCapture(learner->stream, cudaStreamCaptureModeThreadLocal));
    CHECK_STATUS(onebit_optimizer_step_stream(learner->optimizer, rate, learner->stream),
                 ONEBIT_OK);
    CHECK_CUDA(cudaStreamEndCapture(learner->stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&learner->graph, graph, 0));
    CHECK_CUDA(cudaGraphDestroy(graph));
  }
  CHECK_CUDA(cudaGraphLaunch(learner->graph, learner->stream));
  CHECK_CUDA(cudaStreamSynchronize(learner->stream));
  return onebit_optimizer_synchronize(learner->optimizer);
}

/* In one step a rank has a rate of its own. */
static onebit_status_t make_step(struct learner *learner, int step) {
  float own = step == AT_ODDS && learner->rank == learner->size - 1 ? 2 * rate : rate;
  if (!learner->device || step % 3 == 2)
    return onebit_optimizer_step(learner->optimizer, own);
  if (learner->on_stream && step >= CAPTURED)
    return step_in_graph(learner);
  onebit_status_t status = onebit_optimizer_step_stream(learner->optimizer, own, learner->stream);
  CHECK_CUDA(cudaStreamSynchronize(learner->stream));
  onebit_status_t settled = onebit_optimizer_synchronize(learner->optimizer);
  return status == ONEBIT_OK ? settled : status;
}

static void after_step(struct learner *learner, int step, onebit_status_t status,
                       struct record *record) {
  copy(learner->fetched, learner->parameters);
  if (!learner->device) {
    record->status[step] = status;
    memcpy(record->parameters[step], learner->fetched, sizeof record->parameters[step]);
    return;
  }
  CHECK((status == ONEBIT_ERROR_MISMATCH) == (step == AT_ODDS), "step %d: status %d", step,
        (int)status);
  CHECK(status == record->status[step], "step %d: status %d, not %d (%s)", step, (int)status,
        (int)record->status[step], onebit_last_error());
  CHECK(!memcmp(learner->fetched, record->parameters[step], sizeof record->parameters[step]),
        "step %d: parameters have other bits", step);
}

static void after_all(struct learner *learner, struct record *record) {
  onebit_optimizer_info_t info = {.size = sizeof info};
  CHECK_STATUS(onebit_optimizer_get_info(learner->optimizer, &info), ONEBIT_OK);
  CHECK(info.stage == ONEBIT_STAGE_COMPRESSED && info.freeze_step == FREEZE && info.skipped == 2,
        "%llu steps of warm-up, %llu skipped", (unsigned long long)info.freeze_step,
        (unsigned long long)info.skipped);
  if (!learner->device)
    record->info = info;
  CHECK(info.steps == record->info.steps && info.momentum_norm == record->info.momentum_norm &&
            info.residual_norm == record->info.residual_norm &&
            info.compressed_bytes == record->info.compressed_bytes &&
            info.warmup_bytes == record->info.warmup_bytes,
        "norms %.9g and %.9g, not %.9g and %.9g", info.momentum_norm, info.residual_norm,
        record->info.momentum_norm, record->info.residual_norm);
}

struct shared {
  const struct adam_case *what;
  struct record *records;
};

static void on_rank(const struct gpu_rank *self, const struct hosts_split *split,
                    enum hosts_place place, void *context) {
  const struct shared *shared = context;
  struct record *record = &shared->records[self->rank];
  struct learner learner = {.rank = self->rank, .size = self->size};
  learner.device = place != ON_PROCESSOR;
  learner.on_stream = place == OVER_NCCL;
  check_case("%s: %d hosts of %d%s, rank %d", shared->what->name, split->hosts, split->each,
             split->in_turns ? " in turns" : "", self->rank);
  if (open_learner(&learner, self->comm, split, shared->what)) {
    for (int step = 0; step < STEPS; step++) {
      make_gradients(&learner, step);
      after_step(&learner, step, make_step(&learner, step), record);
    }
    after_all(&learner, record);
  }
  close_learner(&learner);
}

static void has_the_bits_of_loopback(void) {
  struct record *records = gpu_area(HOSTS_MOST_RANKS * sizeof *records);
  const struct sample sample =
      sample_product("hierarchical_adam", 1, (const size_t[]){HOSTS_SPLITS, CASES}, 2);
  for (size_t k = 0; k < sample.count; k++) {
    struct shared shared = {&cases[sample.rows[k] / HOSTS_SPLITS], records};
    hosts_run(&hosts_splits[sample.rows[k] % HOSTS_SPLITS], on_rank, &shared);
  }
  free(sample.rows);
}

static const struct gpu_test tests[] = {
    {"has the bits of loopback", has_the_bits_of_loopback, false},
};
GPU_SUITE("hierarchical adam", tests)
