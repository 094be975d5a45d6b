/*
 * behaviour_digest [FILTER]: runs every optimizer, and every collective, with many options over
 * ranks that are threads, and prints a line a case: digests of results after several steps, of
 * checkpoints, of the messages, and the bytes sent. Equal lines are equal bits. Only cases whose
 * name contains FILTER are run. tests/scripts/compare-builds links this file with the libraries of
 * two commits: it uses the public headers only.
 */
#define _DEFAULT_SOURCE
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "onebit/onebit.h"
#include "tests/behaviour.h"

enum { MAX_RANKS = 4, STEPS = 14, TENSORS = 4 };
static const size_t counts[TENSORS] = {3001, 33, 2048, 777};
enum { ELEMENTS = 3001 + 33 + 2048 + 777 };

/* The state that the ranks of a case share, and the state of one rank. */
struct group {
  const struct behaviour *what;
  int size, hosts;
  pthread_barrier_t barrier;
  void *parts[MAX_RANKS];
  size_t part_bytes[MAX_RANKS];
  char directory[64];
};
struct rank {
  struct group *group;
  onebit_comm_t comm;
  int number;
  uint64_t results[3], checkpoint, loaded, state, norms; /* digests */
  uint64_t sent;
  pthread_t thread;
};

/* A case: the function that each rank runs, and its options. */
struct behaviour {
  const char *name;
  void (*run)(struct rank *rank);
  onebit_status_t (*create)(onebit_comm_t comm, const onebit_tensor_t *tensors,
                            const onebit_optimizer_options_t *common, onebit_optimizer_t *made);
  onebit_optimizer_options_t common;
  onebit_plan_options_t plan;
  bool in_parts; /* gradients become ready one by one */
  bool poisoned; /* some gradients are not finite */
  bool mixed;    /* one tensor stays uncompressed */
};

/* --- Optimizers */

#define CREATOR(name, type, upper, ...)                                                            \
  static onebit_status_t name(onebit_comm_t comm, const onebit_tensor_t *tensors,                  \
                              const onebit_optimizer_options_t *common,                            \
                              onebit_optimizer_t *made) {                                          \
    onebit_##type##_options_t options = ONEBIT_##upper##_OPTIONS_INIT;                             \
    options.common = *common;                                                                      \
    __VA_ARGS__;                                                                                   \
    return onebit_##type##_create(comm, tensors, TENSORS, &options, made);                         \
  }
CREATOR(efficient_adam, efficient_adam, EFFICIENT_ADAM, (void)0)
CREATOR(efficient_trust, efficient_adam, EFFICIENT_ADAM, options.trust_ratio = 1)
CREATOR(efficient_gain, efficient_adam, EFFICIENT_ADAM, options.gain = 0.7; options.beta1 = 0.8)
CREATOR(adam, adam, ADAM, options.freeze_step = 4)
CREATOR(adam_automatic, adam, ADAM, options.beta2 = 0.75)
CREATOR(adam_step, adam, ADAM, options.freeze_step = 4;
        options.exchange = ONEBIT_ADAM_EXCHANGE_STEP)
CREATOR(adam_shards_step, adam, ADAM, options.freeze_step = 4; options.shards = ONEBIT_SHARDS_STEP)
CREATOR(adam_shards_parameters, adam, ADAM, options.freeze_step = 4;
        options.shards = ONEBIT_SHARDS_PARAMETERS)
CREATOR(lamb, lamb, LAMB, options.freeze_step = 4)
CREATOR(zero_one, zero_one_adam, ZERO_ONE_ADAM, options.variance_freeze_step = 6;
        options.variance_update_scaler = 2; options.local_step_scaler = 3;
        options.local_step_clipper = 4)
CREATOR(zero_one_variance, zero_one_adam, ZERO_ONE_ADAM, options.variance_update_scaler = 3)
CREATOR(lion, lion, LION, (void)0)
CREATOR(momentum, momentum, MOMENTUM, (void)0)
CREATOR(momentum_warmup, momentum, MOMENTUM, options.warmup_steps = 4)

#define METHOD(name)                                                                               \
  { #name, name }
static const struct {
  const char *name;
  onebit_status_t (*create)(onebit_comm_t, const onebit_tensor_t *,
                            const onebit_optimizer_options_t *, onebit_optimizer_t *);
} methods[] = {METHOD(efficient_adam),
               METHOD(efficient_trust),
               METHOD(efficient_gain),
               METHOD(adam),
               METHOD(adam_automatic),
               METHOD(adam_step),
               METHOD(adam_shards_step),
               METHOD(adam_shards_parameters),
               METHOD(lamb),
               METHOD(zero_one),
               METHOD(zero_one_variance),
               METHOD(lion),
               METHOD(momentum),
               METHOD(momentum_warmup)};

/* A model: its parameters, its gradients, and its optimizer. */
struct model {
  char *parameters, *gradients;
  onebit_tensor_t tensors[TENSORS];
  onebit_optimizer_t optimizer;
};

static onebit_status_t model_create(struct model *model, const struct rank *rank) {
  const struct behaviour *what = rank->group->what;
  const size_t wide = bytes_of(what->common.parameter_dtype);
  const size_t deep = bytes_of(what->common.gradient_dtype);
  *model = (struct model){.parameters = allocate_zeros(ELEMENTS * wide),
                          .gradients = allocate_zeros(ELEMENTS * deep)};
  for (size_t i = 0; i < ELEMENTS; i++)
    store_value(model->parameters, i, what->common.parameter_dtype, input_value(i, 9, 77));
  for (size_t k = 0, first = 0; k < TENSORS; first += counts[k++])
    model->tensors[k] = (onebit_tensor_t){.parameter = model->parameters + first * wide,
                                          .gradient = model->gradients + first * deep,
                                          .count = counts[k],
                                          .weight_decay = k == 2 ? 0.01f : 0.0f,
                                          .learning_rate_factor = k == 1 ? 0.5f : 0.0f,
                                          .uncompressed = what->mixed && k == 3};
  return what->create(rank->comm, model->tensors, &what->common, &model->optimizer);
}

static void model_destroy(struct model *model) {
  onebit_optimizer_destroy(model->optimizer);
  free(model->parameters);
  free(model->gradients);
}

static onebit_status_t model_step(struct model *model, const struct rank *rank, int step) {
  const struct behaviour *what = rank->group->what;
  const float rate = 0.01f / (float)(1 + step / 5);
  double scale = 1;
  onebit_optimizer_get_loss_scale(model->optimizer, &scale);
  for (size_t i = 0; i < ELEMENTS; i++)
    store_value(model->gradients, i, what->common.gradient_dtype,
                input_value(i, rank->number, step) * (float)scale);
  if (what->poisoned && step % 5 == 2 && rank->number == step % rank->group->size)
    store_value(model->gradients, (size_t)step * 977 % ELEMENTS, what->common.gradient_dtype,
                INFINITY);
  if (what->in_parts) {
    onebit_optimizer_begin(model->optimizer, rate);
    for (size_t k = TENSORS; k-- > 0;)
      onebit_optimizer_ready(model->optimizer, k);
  }
  return onebit_optimizer_step(model->optimizer, rate);
}

static void add_state(struct rank *rank, const struct model *model) {
  onebit_optimizer_info_t info = {.size = sizeof info};
  onebit_optimizer_get_info(model->optimizer, &info);
  const uint64_t numbers[] = {info.stage,
                              info.steps,
                              info.skipped,
                              info.freeze_step,
                              info.warmup_bytes,
                              info.compressed_bytes,
                              (uint64_t)info.synchronized,
                              info.exchanges[0],
                              info.exchanges[1],
                              info.exchanges[2]};
  const double norms[] = {info.variance_ratio, info.momentum_norm, info.residual_norm,
                          info.loss_scale, info.gradient_norm};
  rank->state = digest_bytes(rank->state, numbers, sizeof numbers);
  rank->norms = digest_bytes(DIGEST, norms, sizeof norms);
}

static uint64_t parameters_digest(const struct rank *rank, const struct model *model) {
  return digest_bytes(DIGEST, model->parameters,
                      ELEMENTS * bytes_of(rank->group->what->common.parameter_dtype));
}

/* Saves this rank's part of the checkpoint, digests it, and gives it to the group. */
static void save_checkpoint(struct rank *rank, const struct model *model) {
  struct group *group = rank->group;
  size_t bytes = 0;
  onebit_optimizer_save(model->optimizer, NULL, 0, &bytes);
  void *part = allocate_zeros(bytes);
  const onebit_status_t status = onebit_optimizer_save(model->optimizer, part, bytes, &bytes);
  rank->checkpoint = digest_bytes(digest_bytes(DIGEST, &status, sizeof status), part, bytes);
  group->parts[rank->number] = part;
  group->part_bytes[rank->number] = bytes;
  onebit_optimizer_save_files(model->optimizer, group->directory);
  pthread_barrier_wait(&group->barrier);
}

/* Loads the checkpoint into a new model, and trains it further. */
static void load_checkpoint(struct rank *rank) {
  struct group *group = rank->group;
  struct model model;
  onebit_status_t status = model_create(&model, rank);
  if (status == ONEBIT_OK)
    status = onebit_optimizer_load(model.optimizer, (const void *const *)group->parts,
                                   group->part_bytes, group->size);
  rank->loaded = digest_bytes(DIGEST, &status, sizeof status);
  for (int step = STEPS; step < STEPS + 3 && model.optimizer; step++)
    model_step(&model, rank, step);
  rank->loaded ^= parameters_digest(rank, &model);
  model_destroy(&model);
  pthread_barrier_wait(&group->barrier);
  free(group->parts[rank->number]);
}

static void train_model(struct rank *rank) {
  struct model model;
  onebit_status_t status = model_create(&model, rank);
  rank->state = digest_bytes(rank->state, &status, sizeof status);
  for (int step = 0; step < STEPS && model.optimizer; step++) {
    status = model_step(&model, rank, step);
    rank->state = digest_bytes(rank->state, &status, sizeof status);
    if (step == 2 || step == 7 || step == STEPS - 1)
      rank->results[step / 5] = parameters_digest(rank, &model);
  }
  if (model.optimizer) {
    add_state(rank, &model);
    save_checkpoint(rank, &model);
    load_checkpoint(rank);
  }
  rank->sent = onebit_comm_bytes_sent(rank->comm);
  model_destroy(&model);
}

/* --- Collectives */

static onebit_status_t call_operation(onebit_plan_t plan, onebit_operation_t operation,
                                      const void *from, void *to) {
  return operation == ONEBIT_ALLREDUCE   ? onebit_allreduce(from, to, plan)
         : operation == ONEBIT_ALLGATHER ? onebit_allgather(from, to, plan)
                                         : onebit_reduce_scatter(from, to, plan);
}

static void add_residual(struct rank *rank, onebit_plan_t plan) {
  onebit_plan_info_t info = {.size = sizeof info};
  onebit_plan_get_info(plan, &info);
  float *worker = allocate_zeros(info.worker_residual_count * 4);
  float *server = allocate_zeros(info.server_residual_count * 4);
  const onebit_status_t status = onebit_plan_export_residual(plan, worker, server);
  rank->checkpoint = digest_bytes(DIGEST, worker, info.worker_residual_count * 4);
  rank->checkpoint = digest_bytes(rank->checkpoint, server, info.server_residual_count * 4);
  const uint64_t numbers[] = {info.chunks, info.wire_bytes, info.schedule,
                              info.wire,   info.chunk_size, (uint64_t)status};
  rank->state = digest_bytes(rank->state, numbers, sizeof numbers);
  free(worker);
  free(server);
}

static void run_exchanges(struct rank *rank) {
  const struct behaviour *what = rank->group->what;
  const size_t wide = bytes_of(what->plan.dtype), size = (size_t)rank->group->size;
  const size_t in = ELEMENTS * (what->plan.operation == ONEBIT_REDUCE_SCATTER ? size : 1);
  const size_t out = ELEMENTS * (what->plan.operation == ONEBIT_ALLGATHER ? size : 1);
  void *from = allocate_zeros(in * wide), *to = allocate_zeros(out * wide);
  onebit_plan_t plan;
  onebit_status_t status = onebit_plan_create(rank->comm, ELEMENTS, &what->plan, &plan);
  rank->state = digest_bytes(rank->state, &status, sizeof status);
  for (int step = 0; step < STEPS && plan; step++) {
    for (size_t i = 0; i < in; i++)
      store_value(from, i, what->plan.dtype, input_value(i, rank->number, step));
    if (what->poisoned && step % 5 == 2 && rank->number == step % (int)size)
      store_value(from, (size_t)step * 977 % in, what->plan.dtype, NAN);
    status = call_operation(plan, what->plan.operation, from, to);
    rank->state = digest_bytes(rank->state, &status, sizeof status);
    if (step == 2 || step == 7 || step == STEPS - 1)
      rank->results[step / 5] = digest_bytes(DIGEST, to, out * wide);
  }
  if (plan)
    add_residual(rank, plan);
  rank->sent = onebit_comm_bytes_sent(rank->comm);
  onebit_plan_destroy(plan);
  free(from);
  free(to);
}

/* --- One case on its ranks */

static void *rank_main(void *argument) {
  struct rank *rank = argument;
  if (!rank->comm)
    rank->comm = wire_connect(rank->number, rank->group->size, rank->group->hosts);
  rank->group->what->run(rank);
  onebit_comm_destroy(rank->comm);
  return NULL;
}

static void print_line(const struct group *group, const struct rank *ranks, const char *transport,
                       uint64_t messages) {
  uint64_t all[7] = {0}, sent = 0;
  for (int r = 0; r < group->size; r++) {
    const uint64_t own[] = {ranks[r].results[0], ranks[r].results[1], ranks[r].results[2],
                            ranks[r].checkpoint, ranks[r].loaded,     ranks[r].state,
                            ranks[r].norms};
    for (int k = 0; k < 7; k++)
      all[k] = digest_bytes(all[k], &own[k], sizeof own[k]);
    sent += ranks[r].sent;
  }
  printf("%s, %d ranks on %d hosts, %s: results %016" PRIx64 " %016" PRIx64 " %016" PRIx64
         ", state %016" PRIx64 ", norms %016" PRIx64 ", saved %016" PRIx64 ", loaded %016" PRIx64
         ", files %016" PRIx64 ", messages %016" PRIx64 ", %" PRIu64 " bytes\n",
         group->what->name, group->size, group->hosts, transport, all[0], all[1], all[2], all[5],
         all[6], all[3], all[4], digest_files(group->directory), messages, sent);
}

static void run_on(const struct behaviour *what, int size, int hosts, bool on_wire) {
  struct group group = {.what = what, .size = size, .hosts = hosts};
  struct rank ranks[MAX_RANKS];
  onebit_comm_t comms[MAX_RANKS] = {NULL};
  snprintf(group.directory, sizeof group.directory, "/tmp/behaviour-%ld", (long)getpid());
  pthread_barrier_init(&group.barrier, NULL, (unsigned)size);
  if (!on_wire && onebit_comm_create_loopback_hosts(size, hosts, comms) != ONEBIT_OK)
    exit(2);
  for (int r = 0; r < size; r++) {
    ranks[r] = (struct rank){.group = &group, .comm = comms[r], .number = r, .state = DIGEST};
    if (pthread_create(&ranks[r].thread, NULL, rank_main, &ranks[r]))
      exit(2);
  }
  for (int r = 0; r < size; r++)
    pthread_join(ranks[r].thread, NULL);
  pthread_barrier_destroy(&group.barrier);
  print_line(&group, ranks, on_wire ? "wire" : "loopback", on_wire ? wire_digest() : 0);
}

static const char *wanted = "";

static void run_case(const char *kind, struct behaviour what) {
  static const int groups[][2] = {{1, 1}, {2, 1}, {3, 1}, {4, 2}};
  char name[96];
  snprintf(name, sizeof name, "%s, %s", kind, what.name);
  what.name = name;
  for (size_t k = 0; k < sizeof groups / sizeof groups[0] && strstr(name, wanted); k++) {
    run_on(&what, groups[k][0], groups[k][1], false);
    run_on(&what, groups[k][0], groups[k][1], true);
  }
}

/* --- All cases */

static const struct behaviour optimizer_cases[] = {
    {.name = "defaults"},
    {.name = "small chunks", .common = {.chunk_size = 64, .block_size = 64}},
    {.name = "buckets in parts", .common = {.bucket_size = 2000}, .in_parts = true},
    {.name = "an uncompressed tensor", .common = {.dense_below = 40}, .mixed = true},
    {.name = "one scale", .common = {.block_size = ONEBIT_BLOCK_BUFFER}},
    {.name = "mean of absolute values", .common = {.scale = ONEBIT_SCALE_MEAN_ABSOLUTE}},
    {.name = "no error feedback", .common = {.no_error_feedback = 1}},
    {.name = "exchange", .common = {.schedule = ONEBIT_SCHEDULE_EXCHANGE, .threads = 2}},
    {.name = "skipped steps",
     .common = {.initial_loss_scale = 1024, .loss_scale_interval = 3},
     .poisoned = true},
    {.name = "clipped", .common = {.clip_norm = 2, .gradient_factor = 0.5}},
    {.name = "16 bits",
     .common = {.gradient_dtype = ONEBIT_FLOAT16, .parameter_dtype = ONEBIT_BFLOAT16}},
    {.name = "profile deepspeed", .common = {.profile = ONEBIT_PROFILE_DEEPSPEED}},
};

static const struct behaviour plan_cases[] = {
    {.name = "defaults"},
    {.name = "exchange", .plan = {.schedule = ONEBIT_SCHEDULE_EXCHANGE, .threads = 2}},
    {.name = "allgather", .plan = {.schedule = ONEBIT_SCHEDULE_ALLGATHER}},
    {.name = "hierarchical", .plan = {.schedule = ONEBIT_SCHEDULE_HIERARCHICAL}},
    {.name = "dense", .plan = {.wire = ONEBIT_WIRE_DENSE}, .poisoned = true},
    {.name = "small chunks", .plan = {.chunk_size = 64, .block_size = 64}},
    {.name = "one scale", .plan = {.block_size = ONEBIT_BLOCK_BUFFER}, .poisoned = true},
    {.name = "skipped calls", .plan = {.scale = ONEBIT_SCALE_MEAN_ABSOLUTE}, .poisoned = true},
    {.name = "profile deepspeed", .plan = {.profile = ONEBIT_PROFILE_DEEPSPEED}},
};

static void run_optimizers(void) {
  for (size_t m = 0; m < sizeof methods / sizeof methods[0]; m++)
    for (size_t k = 0; k < sizeof optimizer_cases / sizeof optimizer_cases[0]; k++) {
      struct behaviour what = optimizer_cases[k];
      what.run = train_model;
      what.create = methods[m].create;
      run_case(methods[m].name, what);
    }
}

static void run_collectives(void) {
  static const char *const operations[] = {"allreduce", "allgather", "reduce_scatter"};
  static const char *const types[] = {"float32", "bfloat16", "float16"};
  for (int kind = 0; kind < 9; kind++)
    for (size_t k = 0; k < sizeof plan_cases / sizeof plan_cases[0]; k++) {
      struct behaviour what = plan_cases[k];
      char name[40];
      what.run = run_exchanges;
      what.plan.size = sizeof what.plan;
      what.plan.operation = (onebit_operation_t)(kind / 3);
      what.plan.dtype = (onebit_dtype_t)(kind % 3);
      snprintf(name, sizeof name, "%s of %s", operations[kind / 3], types[kind % 3]);
      run_case(name, what);
    }
}

int main(int count, char **arguments) {
  wanted = count > 1 ? arguments[1] : "";
  setenv("ONEBIT_TUNING", "none", 1);
  run_optimizers();
  run_collectives();
  return 0;
}
