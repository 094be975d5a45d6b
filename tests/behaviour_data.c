/* Inputs, memory and files of behaviour_digest. */
#define _DEFAULT_SOURCE
#include "tests/behaviour_data.h"

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/behaviour_wire.h"

float input(size_t i, int rank, int step) {
  const size_t k = i + (size_t)rank * 7919 + (size_t)step * 104729;
  if (k % 53 == 0 || k / 2503 % 11 == 10)
    return k % 2 ? -0.0f : 0.0f;
  const float coarse = (float)(k * 31 % 1009) - 504.0f, fine = (float)(k * 17 % 97) - 48.0f;
  return (coarse / 504.7f + fine / 9973.0f) * ldexpf(1.0f, (int)(k / 701 % 9) - 6);
}

void store(void *buffer, size_t i, onebit_dtype_t dtype, float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t exponent = (bits >> 23 & 255) > 112 ? (bits >> 23 & 255) - 112 : 0;
  const uint32_t half = (bits >> 16 & 0x8000) | (exponent > 31 ? 31 : exponent) << 10 |
                        (exponent > 0 && exponent < 31 ? bits >> 13 & 0x3ff : 0);
  if (dtype == ONEBIT_FLOAT32)
    ((float *)buffer)[i] = value;
  else
    ((uint16_t *)buffer)[i] = (uint16_t)(dtype == ONEBIT_BFLOAT16 ? bits >> 16 : half);
}

size_t bytes_of(onebit_dtype_t dtype) { return dtype == ONEBIT_FLOAT32 ? 4 : 2; }

void *memory(size_t bytes) {
  void *made = calloc(1, bytes + 64);
  if (!made)
    abort();
  return made;
}

uint64_t digest_files(const char *directory) {
  uint64_t sum = 0;
  DIR *list = opendir(directory);
  for (const struct dirent *entry; list && (entry = readdir(list)) != NULL;) {
    char path[400];
    static char text[1 << 20];
    snprintf(path, sizeof path, "%s/%s", directory, entry->d_name);
    FILE *file = entry->d_name[0] == '.' ? NULL : fopen(path, "rb");
    if (!file)
      continue;
    sum += digest(digest(DIGEST, entry->d_name, strlen(entry->d_name)), text,
                  fread(text, 1, sizeof text, file));
    fclose(file);
    remove(path);
  }
  if (list)
    closedir(list);
  rmdir(directory);
  return sum;
}
