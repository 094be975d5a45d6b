/* Memory for a replay. Without CUDA there is only the host's. */
#include "tools/replay/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool take_on_host(struct replay_memory *memory, char words[REPLAY_WORDS]) {
  memory->input = calloc(memory->count, sizeof(float));
  memory->output = calloc(memory->count, sizeof(float));
  if (memory->input && memory->output)
    return true;
  snprintf(words, REPLAY_WORDS, "no memory for %zu values", memory->count);
  return false;
}

#ifdef ONEBIT_HAVE_CUDA
#include <cuda_runtime_api.h>

static bool told(cudaError_t error, char words[REPLAY_WORDS]) {
  if (error == cudaSuccess)
    return true;
  snprintf(words, REPLAY_WORDS, "CUDA: %s", cudaGetErrorString(error));
  return false;
}

static bool take_on_device(struct replay_memory *memory, int rank, char words[REPLAY_WORDS]) {
  const size_t bytes = memory->count * sizeof(float);
  int devices = 0;
  return told(cudaGetDeviceCount(&devices), words) &&
         told(cudaSetDevice(devices ? rank % devices : 0), words) &&
         told(cudaMalloc((void **)&memory->input, bytes), words) &&
         told(cudaMalloc((void **)&memory->output, bytes), words);
}

static void release_on_device(struct replay_memory *memory) {
  cudaFree(memory->input);
  cudaFree(memory->output);
}

static bool copy_on_device(float *to, const float *from, size_t bytes, char words[REPLAY_WORDS]) {
  return told(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), words) &&
         told(cudaDeviceSynchronize(), words);
}
#else
static bool take_on_device(struct replay_memory *memory, int rank, char words[REPLAY_WORDS]) {
  (void)memory, (void)rank;
  snprintf(words, REPLAY_WORDS, "this build is without CUDA: it has no device cuda");
  return false;
}

/* Never called: nothing was taken. */
static void release_on_device(struct replay_memory *memory) { (void)memory; }

static bool copy_on_device(float *to, const float *from, size_t bytes, char words[REPLAY_WORDS]) {
  (void)to, (void)from, (void)bytes, (void)words;
  return false;
}
#endif

bool replay_memory_take(struct replay_memory *memory, onebit_device_t device, int rank,
                        size_t count, char words[REPLAY_WORDS]) {
  *memory = (struct replay_memory){.device = device, .count = count};
  return device == ONEBIT_DEVICE_HOST ? take_on_host(memory, words)
                                      : take_on_device(memory, rank, words);
}

void replay_memory_release(struct replay_memory *memory) {
  if (memory->device == ONEBIT_DEVICE_HOST) {
    free(memory->input);
    free(memory->output);
  } else {
    release_on_device(memory);
  }
}

bool replay_memory_copy(const struct replay_memory *memory, float *to, const float *from,
                        char words[REPLAY_WORDS]) {
  const size_t bytes = memory->count * sizeof(float);
  if (memory->device != ONEBIT_DEVICE_HOST)
    return copy_on_device(to, from, bytes, words);
  memcpy(to, from, bytes);
  return true;
}
