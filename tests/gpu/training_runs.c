/* Creates learners, and runs tables of training cases over each transport. */
#define _GNU_SOURCE
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "compression/numerics.h"
#include "onebit/checkpoint.h"
#include "tests/gpu/training.h"

/* --- A learner */

static const struct {
  size_t count;
  float weight_decay, factor;
} tensors[TRAINING_TENSORS] = {{1, 0.0f, 0.0f},    {7, 0.01f, 0.5f}, {33, 0.0f, 2.0f},
                               {2049, 0.1f, 1.0f}, {0, 0.3f, 0.0f},  {5000, 0.0f, 0.0f}};

enum { PLAIN = 2, MISSING = 3 }; /* tensors to which traits apply */

#define SKEW 1 /* in elements, so that parameters are not aligned to 16 bytes */

/* --- Values */

/* Draws a number in (-1, 1) that is the same in every run. Some numbers are zero, and magnitudes
 * differ from element to element. */
static float draw_number(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t x = (a * 7919u + b * 104729u + c) * 2654435761u;
  x = (x ^ x >> 15) * 2246822519u;
  x ^= x >> 13;
  float value = (float)(x >> 8) * 0x1p-23f - 1.0f;
  return x % 43 == 0 ? 0.0f : value * (c / 1000 % 3 == 1 ? 1e-3f : 1.0f);
}

static float gradient_scale(const struct learner *learner) {
  double scale = 1;
  if (training_options(learner->what)->initial_loss_scale > 0 &&
      !(learner->what->traits & WITHOUT_SCALE))
    CHECK_STATUS(onebit_optimizer_get_loss_scale(learner->optimizer, &scale), ONEBIT_OK);
  return (float)scale;
}

/* Computes the gradients of an attempt. With two streams they are the same in all steps: copying
 * new gradients between steps would order the two streams. Each element is stored only once, since
 * an earlier copy to the device may still be reading the array. */
static void fill_gradients(const struct learner *learner, int attempt, void *gradients) {
  const uint32_t time = learner->what->form == TWO_STREAMS ? 0 : (uint32_t)attempt;
  const onebit_dtype_t dtype = learner->gradient_dtype;
  const float scale = gradient_scale(learner);
  const bool poisoned = learner->what->poison >> attempt & 1 && learner->rank == learner->size - 1;
  for (size_t i = 0; i < TRAINING_ELEMENTS; i++) {
    const float value = draw_number((uint32_t)learner->rank + 1, time, (uint32_t)i);
    const float ordinary = i % 13 == 5 ? 0.0f : value * scale;
    ob_store(gradients, i, dtype, poisoned && i == 1234 ? NAN : ordinary);
  }
}

/* --- Memory */

static size_t gradient_bytes(const struct learner *learner) {
  return TRAINING_ELEMENTS * ob_dtype_size(learner->gradient_dtype);
}

size_t learner_parameter_bytes(const struct learner *learner) {
  return TRAINING_ELEMENTS * ob_dtype_size(learner->parameter_dtype);
}

static char *allocate_pinned(size_t bytes) {
  char *memory = NULL;
  CHECK_CUDA(cudaMallocHost((void **)&memory, bytes));
  return memory;
}

static bool allocate_memory(struct learner *learner) {
  const size_t each = TRAINING_ELEMENTS * sizeof(float), all = each * TRAINING_MOST;
  const size_t bytes = (SKEW + 2 * TRAINING_ELEMENTS) * sizeof(float);
  if (!learner->device) {
    learner->memory = gpu_allocate(bytes, 1);
    learner->sent = gpu_allocate(all, 1);
    learner->fetched = gpu_allocate(all, 1);
    return true;
  }
  learner->sent = allocate_pinned(all);
  learner->fetched = allocate_pinned(all);
  return CHECK_CUDA(cudaMalloc((void **)&learner->memory, bytes)) &&
         CHECK_CUDA(cudaStreamCreateWithFlags(&learner->streams[0], cudaStreamNonBlocking)) &&
         CHECK_CUDA(cudaStreamCreateWithFlags(&learner->streams[1], cudaStreamNonBlocking)) &&
         learner->sent && learner->fetched;
}

static void place_tensors(struct learner *learner) {
  const size_t parameter = ob_dtype_size(learner->parameter_dtype);
  const size_t gradient = ob_dtype_size(learner->gradient_dtype);
  learner->parameters = learner->memory + SKEW * parameter;
  learner->gradients = learner->memory + (SKEW + TRAINING_ELEMENTS) * sizeof(float);
  for (size_t k = 0, first = 0; k < TRAINING_TENSORS; first += tensors[k++].count)
    learner->tensors[k] = (onebit_tensor_t){
        .parameter = tensors[k].count ? learner->parameters + first * parameter : NULL,
        .gradient = tensors[k].count ? learner->gradients + first * gradient : NULL,
        .count = tensors[k].count,
        .weight_decay = tensors[k].weight_decay,
        .learning_rate_factor = tensors[k].factor,
        .uncompressed = learner->what->traits & TABLES ? ONEBIT_TABLE : 0,
    };
  if (learner->what->traits & PLAIN_TENSOR)
    learner->tensors[PLAIN].uncompressed = 1;
}

static void copy_bytes(const struct learner *learner, void *to, const void *from, size_t bytes,
                       cudaStream_t stream) {
  if (learner->device)
    CHECK_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
  else
    memcpy(to, from, bytes);
}

static void draw_parameters(struct learner *learner, uint32_t salt) {
  for (size_t i = 0; i < TRAINING_ELEMENTS; i++)
    ob_store(learner->fetched, i, learner->parameter_dtype, draw_number(0, salt, (uint32_t)i));
  copy_bytes(learner, learner->parameters, learner->fetched, learner_parameter_bytes(learner),
             learner->streams[0]);
  if (learner->device)
    CHECK_CUDA(cudaStreamSynchronize(learner->streams[0]));
}

/* --- The optimizer */

static onebit_status_t create_optimizer(struct learner *learner) {
  const struct any_case *what = &learner->what->optimizer;
  struct any_options options = any_options_of(what->method, what->options);
  any_common(&options)->device = learner->device ? ONEBIT_DEVICE_CUDA : ONEBIT_DEVICE_HOST;
  any_common(&options)->threads = 1;
  return any_create(&options, learner->comm, learner->tensors, TRAINING_TENSORS,
                    &learner->optimizer);
}

bool learner_open(struct learner *learner, const struct training_case *what,
                  const struct gpu_rank *self, bool device) {
  const onebit_optimizer_options_t *options = training_options(what);
  *learner = (struct learner){.what = what,
                              .comm = self->comm,
                              .rank = self->rank,
                              .size = self->size,
                              .device = device,
                              .gradient_dtype = options->gradient_dtype,
                              .parameter_dtype = options->parameter_dtype};
  if (!allocate_memory(learner))
    exit(2); /* ends the process, since the other ranks would wait for this one */
  place_tensors(learner);
  draw_parameters(learner, 99);
  return CHECK_STATUS(create_optimizer(learner), ONEBIT_OK);
}

bool learner_replace(struct learner *learner, const char *directory) {
  bool saved = CHECK_STATUS(onebit_optimizer_save_files(learner->optimizer, directory), ONEBIT_OK);
  onebit_optimizer_destroy(learner->optimizer);
  learner->optimizer = NULL;
  draw_parameters(learner, 77);
  return saved && CHECK_STATUS(create_optimizer(learner), ONEBIT_OK) &&
         CHECK_STATUS(onebit_optimizer_load_files(learner->optimizer, directory), ONEBIT_OK);
}

void learner_close(struct learner *learner) {
  onebit_optimizer_destroy(learner->optimizer);
  if (!learner->device) {
    free(learner->memory);
    free(learner->sent);
    free(learner->fetched);
    return;
  }
  CHECK_CUDA(cudaDeviceSynchronize());
  CHECK_CUDA(cudaStreamDestroy(learner->streams[0]));
  CHECK_CUDA(cudaStreamDestroy(learner->streams[1]));
  CHECK_CUDA(cudaFree(learner->memory));
  CHECK_CUDA(cudaFreeHost(learner->sent));
  CHECK_CUDA(cudaFreeHost(learner->fetched));
}

void learner_send_gradients(struct learner *learner, int attempt, cudaStream_t stream) {
  char *sent = learner->sent + (size_t)attempt * TRAINING_ELEMENTS * sizeof(float);
  fill_gradients(learner, attempt, sent);
  copy_bytes(learner, learner->gradients, sent, gradient_bytes(learner), stream);
  if (learner->what->traits & NO_GRADIENT && learner->rank % 2)
    CHECK_STATUS(
        onebit_optimizer_set_gradient(learner->optimizer, MISSING,
                                      attempt % 3 == 1 ? NULL : learner->tensors[MISSING].gradient),
        ONEBIT_OK);
}

char *learner_fetched(const struct learner *learner, int attempt) {
  return learner->fetched + (size_t)attempt * TRAINING_ELEMENTS * sizeof(float);
}

void learner_fetch(struct learner *learner, int attempt, cudaStream_t stream) {
  copy_bytes(learner, learner_fetched(learner, attempt), learner->parameters,
             learner_parameter_bytes(learner), stream);
}

/* --- Trainings */

void training_run_case(const void *cases, size_t k, const struct gpu_rank *self, bool device,
                       void *record) {
  const struct training_case *what = (const struct training_case *)cases + k;
  if (device)
    training_compare_case(what, self, record);
  else
    training_record_case(what, self, record);
}

bool training_saves_case(const void *cases, size_t k) {
  return ((const struct training_case *)cases)[k].traits & SAVED_ANEW;
}

void training_check_own(const void *cases, size_t k, int rank, const void *of_own,
                        const void *of_all) {
  const struct training_case *what = (const struct training_case *)cases + k;
  const struct training_record *own = of_own, *record = of_all;
  for (int attempt = 0; attempt < training_attempts(what); attempt++)
    training_check_parameters(own->parameters[rank][attempt], record->parameters[rank][attempt],
                              TRAINING_ELEMENTS, training_options(what)->parameter_dtype, attempt);
}

/* --- Runs */

struct run {
  const struct training_table *table;
  char *records;
};

static void run_case(const struct run *run, size_t k, const struct gpu_rank *self, bool device) {
  const struct training_table *table = run->table;
  table->run(table->cases, k, self, device, run->records + k * table->record_bytes);
}

static void run_cases(const struct run *run, const struct gpu_rank *self, bool device) {
  for (size_t k = 0; k < run->table->count; k++)
    if (sample_has(k, run->table->count))
      run_case(run, k, self, device);
}

static void record_cases(const struct gpu_rank *self, void *context) {
  run_cases(context, self, false);
}

static void compare_cases(const struct gpu_rank *self, void *context) {
  run_cases(context, self, true);
}

/* For each number of ranks, records the training cases on the host, and runs `compare` with the
 * records. */
static void compare_sizes(const struct training_table *table, int first, int last,
                          plan_ranks *ranks, gpu_rank_body *compare) {
  struct run run = {table, gpu_allocate_area(table->count * table->record_bytes)};
  for (int size = first; size <= last; size++)
    if (gpu_run_loopback(size, record_cases, &run))
      ranks(size, compare, &run);
}

void training_run(const struct training_table *table, plan_ranks *ranks) {
  compare_sizes(table, 1, ranks == run_ranks_self ? 1 : TRAINING_RANKS, ranks, compare_cases);
}

/* Runs odd ranks on a device, and the others on the host. */
static void compare_mixed(const struct gpu_rank *self, void *context) {
  const struct run *run = context;
  const struct training_table *table = run->table;
  for (size_t k = 0; k < table->count; k++) {
    if (!sample_has(k, table->count) || table->saves(table->cases, k))
      continue;
    if (self->rank % 2) {
      run_case(run, k, self, true);
      continue;
    }
    void *own = gpu_allocate(1, table->record_bytes);
    table->run(table->cases, k, self, false, own);
    table->check_own(table->cases, k, self->rank, own, run->records + k * table->record_bytes);
    free(own);
  }
}

void training_run_mixed(const struct training_table *table) {
  compare_sizes(table, 2, TRAINING_RANKS, gpu_run_loopback, compare_mixed);
}
