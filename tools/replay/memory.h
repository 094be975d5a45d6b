/*
 * The arrays that the library works on in a replay: in memory of the host, or of a CUDA device.
 */
#ifndef TOOLS_REPLAY_MEMORY_H
#define TOOLS_REPLAY_MEMORY_H

#include <stdbool.h>
#include <stddef.h>

#include "onebit/plan.h"
#include "tools/replay/case.h"

struct replay_memory {
  onebit_device_t device;
  size_t count;
  float *input, *output; /* count each */
};

/* Where there are several devices rank r takes number r, and begins again after the last. False,
 * with words: there is no such device in this build or on this machine, or no memory. */
bool replay_memory_take(struct replay_memory *memory, onebit_device_t device, int rank,
                        size_t count, char words[REPLAY_WORDS]);
void replay_memory_release(struct replay_memory *memory);

/* All of an array, with one end in memory of the host. False, with words, when the device fails. */
bool replay_memory_copy(const struct replay_memory *memory, float *to, const float *from,
                        char words[REPLAY_WORDS]);

#endif
