/* Creates the arrays that codec kernels read and write, and appends their contents to a kernel's
 * result. */
#define _DEFAULT_SOURCE
#include "tests/codec_cases.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "compression/codec.h"

struct guarded_array array_create(size_t bytes) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page + page;
  char *mapping = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED || mprotect(mapping + whole - page, page, PROT_NONE)) {
    perror("guarded memory");
    exit(2);
  }
  return (struct guarded_array){mapping + whole - page - bytes, mapping, whole};
}

void array_destroy(struct guarded_array *array) { munmap(array->mapping, array->mapped); }

size_t count_words(size_t count) { return (count + OB_LANES - 1) / OB_LANES; }

struct guarded_array words_create(size_t count, uint32_t salt) {
  struct guarded_array array = array_create(count_words(count) * OB_LANES * sizeof(float));
  for (size_t i = 0; i < count; i++)
    ((float *)array.data)[i] = value_at(i, salt, VALUES_GRADIENTS);
  return array;
}

struct guarded_array moments_create(size_t count, uint32_t salt) {
  struct guarded_array array = array_create(count_words(count) * OB_LANES * sizeof(uint16_t));
  for (size_t i = 0; i < count; i++) {
    float value = i % 5 == 2 ? 0 : value_at(i, salt, VALUES_GRADIENTS);
    ((uint16_t *)array.data)[i] = ob_to_bfloat16(value * value);
  }
  return array;
}

struct guarded_array fields_create(size_t count, unsigned width, uint32_t salt) {
  struct guarded_array array = array_create(count_words(count) * width * sizeof(uint32_t));
  for (size_t w = 0; w < count_words(count) * width; w++)
    ((uint32_t *)array.data)[w] = scramble((uint32_t)w + salt);
  return array;
}

struct guarded_array bits_create(size_t count, uint32_t salt) {
  return fields_create(count, 1, salt);
}

void result_add(struct result *result, const void *data, size_t size) {
  result->bytes = realloc(result->bytes, result->size + size + 1);
  if (size)
    memcpy(result->bytes + result->size, data, size);
  result->size += size;
}

void result_add_sum(struct result *result, float sum) {
  float residual = ob_is_finite(sum) ? sum : INFINITY;
  result_add(result, &residual, sizeof residual);
}

void result_add_array(struct result *result, struct guarded_array *array, size_t size) {
  result_add(result, array->data, size);
  array_destroy(array);
}

void result_add_numbers(struct result *result, struct guarded_array *array, size_t count) {
  float *numbers = array->data;
  for (size_t i = 0; i < count; i++)
    if (isnan(numbers[i]))
      numbers[i] = NAN;
  result_add_array(result, array, count * sizeof *numbers);
}
