/*
 * Tests the costs of calls and steps besides their arithmetic: the numbers of kernels, NCCL groups,
 * copies, events and host waits. Sizes are 1 Mi to 1 Gi elements on 1 to 64 ranks, too large for
 * the emulated device to compute. The library makes real calls, and the emulated device only counts
 * their operations and leaves memory untouched.
 *
 *   gpu_tests --filter '*64 ranks'    prints the table of docs/measured; with a stride up to 8
 */
#include <stdio.h>
#include <string.h>

#include "onebit/adam.h"
#include "onebit/efficient_adam.h"
#include "tests/gpu/plans.h"

#define MI ((size_t)1 << 20)

enum { SIZES = 3, CALLS = 2 };
static const size_t sizes[SIZES] = {MI, 64 * MI, 1024 * MI};

/* The plan, memory and optimizer of a rank. */
struct own {
  onebit_plan_t plan;
  onebit_optimizer_t optimizer;
  float *memory[2];
};

/* The number of kernels that a rank launches in a call (`kernels`), and the number that each chunk
 * adds with short or long messages. `alone`: the number for a single rank, whose plans have one
 * chunk. Every chunk makes two exchanges. */
struct row {
  const char *name;
  bool (*create)(onebit_comm_t comm, size_t count, struct own *own);
  onebit_status_t (*call)(void *own);
  void (*destroy)(const struct own *own);
  long kernels, short_kernels, more_kernels, alone;
  size_t chunks[SIZES];
};

static bool allocate_memory(struct own *own, size_t count) {
  return CHECK_CUDA(cudaMalloc((void **)&own->memory[0], count * sizeof(float))) &&
         CHECK_CUDA(cudaMalloc((void **)&own->memory[1], count * sizeof(float)));
}

static void free_memory(const struct own *own) {
  CHECK_CUDA(cudaFree(own->memory[0]));
  CHECK_CUDA(cudaFree(own->memory[1]));
}

static bool create_plan(onebit_comm_t comm, size_t count, onebit_profile_t profile,
                        struct own *own) {
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  options.device = ONEBIT_DEVICE_CUDA;
  options.profile = profile;
  return allocate_memory(own, count) &&
         CHECK_STATUS(onebit_plan_create(comm, count, &options, &own->plan), ONEBIT_OK);
}

static bool create_default(onebit_comm_t comm, size_t count, struct own *own) {
  return create_plan(comm, count, ONEBIT_PROFILE_DEFAULT, own);
}

static bool create_deepspeed(onebit_comm_t comm, size_t count, struct own *own) {
  return create_plan(comm, count, ONEBIT_PROFILE_DEEPSPEED, own);
}

static onebit_status_t call_plan(void *context) {
  const struct own *own = context;
  return onebit_allreduce_stream(own->memory[0], own->memory[1], own->plan, NULL);
}

static void destroy_plan(const struct own *own) {
  CHECK_STATUS(onebit_plan_synchronize(own->plan), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_destroy(own->plan), ONEBIT_OK);
  free_memory(own);
}

static onebit_tensor_t make_tensor(const struct own *own, size_t count) {
  return (onebit_tensor_t){.parameter = own->memory[0], .gradient = own->memory[1], .count = count};
}

static bool create_adam(onebit_comm_t comm, size_t count, struct own *own) {
  onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
  options.common.device = ONEBIT_DEVICE_CUDA;
  options.freeze_step = 1000;
  if (!allocate_memory(own, count))
    return false;
  const onebit_tensor_t tensor = make_tensor(own, count);
  return CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, &options, &own->optimizer), ONEBIT_OK);
}

static bool create_efficient(onebit_comm_t comm, size_t count, struct own *own) {
  onebit_efficient_adam_options_t options = ONEBIT_EFFICIENT_ADAM_OPTIONS_INIT;
  options.common.device = ONEBIT_DEVICE_CUDA;
  options.warmup_steps = ONEBIT_WARMUP_NONE;
  if (!allocate_memory(own, count))
    return false;
  const onebit_tensor_t tensor = make_tensor(own, count);
  return CHECK_STATUS(onebit_efficient_adam_create(comm, &tensor, 1, &options, &own->optimizer),
                      ONEBIT_OK);
}

static onebit_status_t call_step(void *context) {
  const struct own *own = context;
  return onebit_optimizer_step_stream(own->optimizer, 1e-3f, NULL);
}

static void destroy_optimizer(const struct own *own) {
  CHECK_STATUS(onebit_optimizer_synchronize(own->optimizer), ONEBIT_OK);
  onebit_optimizer_destroy(own->optimizer);
  free_memory(own);
}

#define PLAN(create)      create, call_plan, destroy_plan
#define OPTIMIZER(create) create, call_step, destroy_optimizer

static const struct row rows[] = {
    {"allreduce", PLAN(create_default), 1, 4, 7, 7, {1, 4, 8}},
    {"allreduce, deepspeed", PLAN(create_deepspeed), 3, 6, 7, 9, {1, 1, 1}},
    {"step of Efficient-Adam", OPTIMIZER(create_efficient), 2, 4, 7, 8, {1, 4, 8}},
    {"warm-up step of 1-bit Adam", OPTIMIZER(create_adam), 3, 7, 7, 9, {1, 16, 16}},
};
#define ROWS (sizeof rows / sizeof rows[0])

/* True if a message of one bit per element has at most 8 runs of 1024 words, including its
 * scales. */
static bool is_short(const struct row *row, size_t k, long ranks) {
  const size_t elements = sizes[k] / (size_t)ranks / row->chunks[k];
  return elements / 32 + elements / 2048 <= 8 * 1024;
}

static void compare_counts(const struct row *row, size_t k, long ranks,
                           const struct emulation_counters *counts) {
  const long chunks = ranks > 1 ? (long)row->chunks[k] : 1;
  const long more = is_short(row, k, ranks) ? row->short_kernels : row->more_kernels;
  const long kernels = ranks > 1 ? row->kernels + chunks * more : row->alone;
  const long groups = ranks > 1 ? 2 * chunks : 0;
  CHECK(counts->kernels == ranks * kernels, "%ld kernels, not %ld", counts->kernels / ranks,
        kernels);
  CHECK(counts->groups == ranks * groups, "%ld groups, not %ld", counts->groups / ranks, groups);
  CHECK(counts->copies == ranks && counts->memsets == 0, "%ld copies, %ld memsets", counts->copies,
        counts->memsets);
  CHECK(counts->synchronisations == 0, "the host waited %ld times", counts->synchronisations);
  CHECK(counts->allocations == 0, "%ld allocations", counts->allocations);
}

/* Checks the text in which a plan explains its number of messages. */
static void check_explanation(const struct row *row, size_t k, int ranks, onebit_plan_t plan) {
  const size_t chunks = ranks > 1 ? row->chunks[k] : 1;
  onebit_plan_info_t info = {.size = sizeof info};
  char words[80];
  CHECK_STATUS(onebit_plan_get_info(plan, &info), ONEBIT_OK);
  snprintf(words, sizeof words,
           "on a device: %zu message%s to each rank in each phase, of at most %zu", chunks,
           chunks == 1 ? "" : "s", info.chunk_size);
  CHECK(info.chunks == chunks, "%zu chunks, not %zu", info.chunks, chunks);
  CHECK(strstr(onebit_plan_explain(plan), words), "'%s' is not in: %s", words,
        onebit_plan_explain(plan));
}

static void count_row(const struct gpu_rank *self, const struct row *row, size_t k) {
  struct own own = {0};
  struct emulation_counters counts = {0};
  check_case("rank %d of %d, %s of %zu Mi", self->rank, self->size, row->name, sizes[k] / MI);
  if (!row->create(self->comm, sizes[k], &own))
    return;
  if (own.plan)
    check_explanation(row, k, self->size, own.plan);
  for (int call = 0; call < CALLS; call++) /* the first call may differ from the later ones */
    counts = count_call(row->call, &own);
  if (self->rank == 0) {
    compare_counts(row, k, self->size, &counts);
    printf("| %s | %d | %zu Mi | %ld | %ld | %ld | %ld | %ld |\n", row->name, self->size,
           sizes[k] / MI, counts.kernels / self->size, counts.groups / self->size,
           counts.copies / self->size, counts.events / self->size,
           counts.synchronisations / self->size);
  }
  row->destroy(&own);
}

static void count_rows(const struct gpu_rank *self, void *context) {
  (void)context;
  for (size_t i = 0; i < ROWS; i++)
    for (size_t k = 0; k < SIZES; k++)
      count_row(self, &rows[i], k);
}

static void count_sizes(void) {
  static const int ranks[] = {1, 2, 8, 64};
  emulation_only_count(1);
  printf("| call | ranks | elements | kernels | NCCL groups | copies | events | host waits |\n"
         "|---|---|---|---|---|---|---|---|\n");
  for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++) {
    if (ranks[i] > 8 && test_share() > 1)
      break;
    (ranks[i] == 1 ? run_ranks_self : run_ranks_nccl)(ranks[i], count_rows, NULL);
  }
  emulation_only_count(0);
}

static const struct gpu_test tests[] = {{"1 to 64 ranks", count_sizes, EMULATED}};
GPU_SUITE("counts of sizes", tests)
