/* 1-bit Adam on the host and on a device: the same case, step by step. */
#define _GNU_SOURCE
#include "tests/gpu/adam.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef ONEBIT_HAVE_NCCL
#include "onebit/nccl.h"
#endif

static const struct {
  size_t count;
  float weight_decay, factor;
} tensors[ADAM_TENSORS] = {{1, 0.0f, 0.0f},    {7, 0.01f, 0.5f}, {33, 0.0f, 2.0f},
                           {2049, 0.1f, 1.0f}, {0, 0.3f, 0.0f},  {5000, 0.0f, 0.0f}};

#define SKEW 1 /* floats: parameters are not aligned to 16 bytes */

/* --- Values */

/* In (-1, 1), the same in every run; some are zero, and of different size in different places. */
static float drawn(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t x = (a * 7919u + b * 104729u + c) * 2654435761u;
  x = (x ^ x >> 15) * 2246822519u;
  x ^= x >> 13;
  float value = (float)(x >> 8) * 0x1p-23f - 1.0f;
  return x % 43 == 0 ? 0.0f : value * (c / 1000 % 3 == 1 ? 1e-3f : 1.0f);
}

float adam_rate(int attempt) { return 1e-3f * (float)(1 + attempt % 3); }

/* On two streams nothing else may put the steps in order: then gradients stay the same. */
static void fill_gradients(const struct adam_learner *learner, int attempt, float *gradients) {
  const uint32_t time = learner->what->form == TWO_STREAMS ? 0 : (uint32_t)attempt;
  for (size_t i = 0; i < ADAM_ELEMENTS; i++)
    gradients[i] = i % 13 == 5 ? 0.0f : drawn((uint32_t)learner->rank + 1, time, (uint32_t)i);
  if (learner->what->poison >> attempt & 1 && learner->rank == learner->size - 1)
    gradients[1234] = NAN;
}

/* --- A learner */

static float *take_pinned(size_t count) {
  float *memory = NULL;
  CHECK_CUDA(cudaMallocHost((void **)&memory, count * sizeof(float)));
  return memory;
}

static bool take_memory(struct adam_learner *learner) {
  const size_t count = SKEW + 2 * ADAM_ELEMENTS;
  if (!learner->device) {
    learner->memory = gpu_allocate(count, sizeof(float));
    learner->sent = gpu_allocate(ADAM_ELEMENTS * ADAM_ATTEMPTS, sizeof(float));
    learner->fetched = gpu_allocate(ADAM_ELEMENTS * ADAM_ATTEMPTS, sizeof(float));
    return true;
  }
  learner->sent = take_pinned(ADAM_ELEMENTS * ADAM_ATTEMPTS);
  learner->fetched = take_pinned(ADAM_ELEMENTS * ADAM_ATTEMPTS);
  return CHECK_CUDA(cudaMalloc((void **)&learner->memory, count * sizeof(float))) &&
         CHECK_CUDA(cudaStreamCreateWithFlags(&learner->streams[0], cudaStreamNonBlocking)) &&
         CHECK_CUDA(cudaStreamCreateWithFlags(&learner->streams[1], cudaStreamNonBlocking)) &&
         learner->sent && learner->fetched;
}

static void place_tensors(struct adam_learner *learner) {
  learner->parameters = learner->memory + SKEW;
  learner->gradients = learner->parameters + ADAM_ELEMENTS;
  for (size_t k = 0, first = 0; k < ADAM_TENSORS; first += tensors[k++].count)
    learner->tensors[k] = (onebit_tensor_t){
        .parameter = tensors[k].count ? learner->parameters + first : NULL,
        .gradient = tensors[k].count ? learner->gradients + first : NULL,
        .count = tensors[k].count,
        .weight_decay = tensors[k].weight_decay,
        .learning_rate_factor = tensors[k].factor,
    };
}

static void move(const struct adam_learner *learner, float *to, const float *from,
                 cudaStream_t stream) {
  if (learner->device)
    CHECK_CUDA(cudaMemcpyAsync(to, from, ADAM_ELEMENTS * sizeof *to, cudaMemcpyDefault, stream));
  else
    memcpy(to, from, ADAM_ELEMENTS * sizeof *to);
}

bool adam_learner_open(struct adam_learner *learner, const struct adam_case *what,
                       onebit_comm_t comm, int rank, int size, bool device) {
  *learner = (struct adam_learner){.what = what, .rank = rank, .size = size, .device = device};
  onebit_adam_options_t options = what->options;
  options.common.device = device ? ONEBIT_DEVICE_CUDA : ONEBIT_DEVICE_HOST;
  options.common.threads = 1;
  if (!take_memory(learner))
    exit(2); /* the other ranks would wait for this one */
  place_tensors(learner);
  for (size_t i = 0; i < ADAM_ELEMENTS; i++)
    learner->fetched[i] = drawn(0, 99, (uint32_t)i);
  move(learner, learner->parameters, learner->fetched, learner->streams[0]);
  if (device)
    CHECK_CUDA(cudaStreamSynchronize(learner->streams[0]));
  return CHECK_STATUS(
      onebit_adam_create(comm, learner->tensors, ADAM_TENSORS, &options, &learner->optimizer),
      ONEBIT_OK);
}

void adam_learner_close(struct adam_learner *learner) {
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

void adam_send_gradients(struct adam_learner *learner, int attempt, cudaStream_t stream) {
  float *sent = learner->sent + attempt * ADAM_ELEMENTS;
  fill_gradients(learner, attempt, sent);
  move(learner, learner->gradients, sent, stream);
}

/* --- Comparing */

void adam_check_parameters(const float *got, const float *wanted, int attempt) {
  size_t differing = 0, first = 0;
  for (size_t i = ADAM_ELEMENTS; i-- > 0;)
    if (memcmp(&got[i], &wanted[i], sizeof *got) != 0) {
      first = i;
      differing++;
    }
  CHECK(!differing, "attempt %d: parameter %zu is %.9g and should be %.9g; %zu differ", attempt,
        first, (double)got[first], (double)wanted[first], differing);
}

#define CHECK_FACT(name, format, type)                                                             \
  CHECK(info.name == wanted->name, #name " is " format ", and should be " format, (type)info.name, \
        (type)wanted->name)

void adam_check_info(onebit_optimizer_t optimizer, const onebit_optimizer_info_t *wanted) {
  onebit_optimizer_info_t info = {.size = sizeof info};
  if (!CHECK_STATUS(onebit_optimizer_get_info(optimizer, &info), ONEBIT_OK))
    return;
  CHECK_FACT(stage, "%d", int);
  CHECK_FACT(steps, "%llu", unsigned long long);
  CHECK_FACT(skipped, "%llu", unsigned long long);
  CHECK_FACT(freeze_step, "%llu", unsigned long long);
  CHECK_FACT(variance_ratio, "%.17g", double);
  CHECK_FACT(momentum_norm, "%.17g", double);
  CHECK_FACT(error_norm, "%.17g", double);
}

/* --- A case */

static bool is_without_stream(const struct adam_learner *learner, int attempt) {
  enum adam_form form = learner->what->form;
  return !learner->device || form == NO_STREAM || (form == SOME_WITHOUT && attempt % 3 == 2);
}

static cudaStream_t stream_of(const struct adam_learner *learner, int attempt) {
  enum adam_form form = learner->what->form;
  return form == DEFAULT_STREAM ? NULL : learner->streams[form == TWO_STREAMS ? attempt % 2 : 0];
}

/* On two streams the gradients are there once, before all steps. */
static void make_ready(struct adam_learner *learner, int attempt) {
  cudaStream_t stream = stream_of(learner, attempt);
  const bool once = learner->what->form == TWO_STREAMS;
  if (!once || attempt == 0)
    adam_send_gradients(learner, attempt, stream);
  if (learner->device && (once ? attempt == 0 : is_without_stream(learner, attempt)))
    CHECK_CUDA(cudaStreamSynchronize(stream));
}

static onebit_status_t make_step(struct adam_learner *learner, int attempt) {
  const float rate = adam_rate(attempt);
  return is_without_stream(learner, attempt)
             ? onebit_optimizer_step(learner->optimizer, rate)
             : onebit_optimizer_step_stream(learner->optimizer, rate, stream_of(learner, attempt));
}

/* Nobody waits for the copy: the caller looks when all is over. */
static void fetch(struct adam_learner *learner, int attempt) {
  if (learner->what->form != TWO_STREAMS || !learner->device || attempt == ADAM_ATTEMPTS - 1)
    move(learner, learner->fetched + attempt * ADAM_ELEMENTS, learner->parameters,
         stream_of(learner, attempt));
}

void adam_record_case(const struct adam_case *what, onebit_comm_t comm, int rank, int size,
                      struct adam_record *record) {
  struct adam_learner learner;
  check_case("%s, rank %d of %d on the host", what->name, rank, size);
  if (!adam_learner_open(&learner, what, comm, rank, size, false))
    return;
  for (int attempt = 0; attempt < ADAM_ATTEMPTS; attempt++) {
    onebit_optimizer_info_t *info = &record->info[rank][attempt];
    info->size = sizeof *info;
    make_ready(&learner, attempt);
    onebit_status_t status = make_step(&learner, attempt);
    CHECK_STATUS(onebit_optimizer_get_info(learner.optimizer, info), ONEBIT_OK);
    if (rank > 0)
      continue;
    record->status[attempt] = status;
    memcpy(record->parameters[attempt], learner.parameters, sizeof record->parameters[attempt]);
  }
  adam_learner_close(&learner);
}

/* A step on a stream may not know yet that it is skipped. */
static void check_status_of(const struct adam_learner *learner, int attempt, onebit_status_t got,
                            onebit_status_t wanted) {
  const bool early = !is_without_stream(learner, attempt) && got == ONEBIT_OK;
  CHECK(got == wanted || early, "attempt %d returned %d, not %d: %s", attempt, (int)got,
        (int)wanted, onebit_last_error());
}

/* How all steps on streams have ended together. */
static void check_outcome(const struct adam_learner *learner, const struct adam_record *record) {
  onebit_status_t wanted = ONEBIT_OK;
  for (int attempt = 0; attempt < ADAM_ATTEMPTS; attempt++)
    if (record->status[attempt] != ONEBIT_OK && !is_without_stream(learner, attempt))
      wanted = record->status[attempt];
  CHECK_STATUS(onebit_optimizer_synchronize(learner->optimizer), wanted);
  CHECK_STATUS(onebit_optimizer_synchronize(learner->optimizer), ONEBIT_OK);
}

static void check_all(struct adam_learner *learner, const struct adam_record *record) {
  const int last = ADAM_ATTEMPTS - 1;
  check_outcome(learner, record);
  fetch(learner, last); /* the wait before was for the steps, and not for copies */
  CHECK_CUDA(cudaDeviceSynchronize());
  for (int attempt = 0; attempt <= last; attempt++)
    if (attempt == last || learner->what->form != TWO_STREAMS)
      adam_check_parameters(learner->fetched + attempt * ADAM_ELEMENTS, record->parameters[attempt],
                            attempt);
  adam_check_info(learner->optimizer, &record->info[learner->rank][last]);
}

void adam_compare_case(const struct adam_case *what, onebit_comm_t comm, int rank, int size,
                       const struct adam_record *record) {
  struct adam_learner learner;
  check_case("%s, form %d, rank %d of %d", what->name, (int)what->form, rank, size);
  if (!adam_learner_open(&learner, what, comm, rank, size, true))
    return;
  for (int attempt = 0; attempt < ADAM_ATTEMPTS; attempt++) {
    make_ready(&learner, attempt);
    onebit_status_t status = make_step(&learner, attempt);
    check_status_of(&learner, attempt, status, record->status[attempt]);
    if (attempt < ADAM_ATTEMPTS - 1)
      fetch(&learner, attempt);
    if (is_without_stream(&learner, attempt))
      adam_check_info(learner.optimizer, &record->info[rank][attempt]);
  }
  check_all(&learner, record);
  adam_learner_close(&learner);
}

/* --- NCCL */

#ifdef ONEBIT_EMULATED_CUDA
/* Every rank wants a device of its own there. */
__attribute__((constructor)) static void have_devices(void) { setenv("EMULATED_DEVICES", "4", 0); }
#endif

#ifdef ONEBIT_HAVE_NCCL
bool adam_nccl_open(struct adam_nccl *group, const struct gpu_rank *self) {
  ncclUniqueId id;
  ncclComm_t nccl;
  memset(&id, 0, sizeof id);
  *group = (struct adam_nccl){0};
#ifdef ONEBIT_EMULATED_CUDA
  CHECK_CUDA(cudaSetDevice(self->rank));
#endif
  if (self->rank == 0)
    CHECK(ncclGetUniqueId(&id) == ncclSuccess, "NCCL has no unique id");
  gpu_broadcast(self, &id, sizeof id);
  ncclResult_t result = ncclCommInitRank(&nccl, self->size, id, self->rank);
  if (!CHECK(result == ncclSuccess, "NCCL: %s", ncclGetErrorString(result)))
    return false;
  group->nccl = nccl;
  return CHECK_STATUS(onebit_comm_create_nccl(nccl, &group->comm), ONEBIT_OK);
}

void adam_nccl_close(struct adam_nccl *group) {
  onebit_comm_destroy(group->comm);
  if (group->nccl)
    ncclCommDestroy(group->nccl);
}
#else
bool adam_nccl_open(struct adam_nccl *group, const struct gpu_rank *self) {
  (void)self;
  *group = (struct adam_nccl){0};
  check_skip("this build is without NCCL");
  return false;
}

void adam_nccl_close(struct adam_nccl *group) { (void)group; }
#endif
