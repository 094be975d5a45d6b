/* Memory on the host and on the device, and their comparison. */
#include "tests/gpu/twin.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "compression/numerics.h"
#include "tests/gpu/harness.h"

/* The alignment of CUDA's own allocations; and the least pattern between arrays. */
#define TWIN_ALIGNMENT ((size_t)256)
#define TWIN_GAP       ((size_t)256)

bool twin_create(struct twin *twin, size_t room) {
  *twin = (struct twin){.room = room};
  if (!CHECK_CUDA(cudaMalloc((void **)&twin->device, room)))
    return false;
  twin->host = gpu_allocate(room, 1);
  twin->back = gpu_allocate(room, 1);
  twin_clear(twin);
  return true;
}

void twin_destroy(struct twin *twin) {
  free(twin->host);
  free(twin->back);
  CHECK_CUDA(cudaFree(twin->device));
}

/* Fills with bytes that are unexpected large floats: -1.6e25 and the like. */
static void fill_pattern(unsigned char *bytes, size_t count) {
  for (size_t i = 0; i < count; i++)
    bytes[i] = (unsigned char)(0xd3 + i % 7);
}

void twin_clear(struct twin *twin) {
  twin->count = 0;
  twin->used = TWIN_GAP;
  fill_pattern(twin->host, TWIN_GAP);
}

/* Both memories are aligned only as their allocators do it: what counts is the device's address. */
void *twin_take(struct twin *twin, const char *name, size_t bytes, enum twin_content content,
                size_t skew) {
  size_t at = (twin->used + TWIN_ALIGNMENT - 1) / TWIN_ALIGNMENT * TWIN_ALIGNMENT + skew;
  size_t end = at + bytes + TWIN_GAP;
  if (twin->count == TWIN_ARRAYS || end > twin->room) {
    CHECK(false, "the twin is too small for %zu bytes of %s", bytes, name);
    abort();
  }
  fill_pattern(twin->host + twin->used, end - twin->used);
  twin->arrays[twin->count++] = (struct twin_array){name, at, bytes, content};
  twin->used = end;
  return twin->host + at;
}

void *twin_on_device(const struct twin *twin, const void *host) {
  return host ? twin->device + ((const unsigned char *)host - twin->host) : NULL;
}

void *twin_in_back(const struct twin *twin, const void *host) {
  return host ? twin->back + ((const unsigned char *)host - twin->host) : NULL;
}

bool twin_send(struct twin *twin) { return gpu_copy(twin->device, twin->host, twin->used); }

bool twin_fetch(struct twin *twin) {
  return CHECK_CUDA(cudaDeviceSynchronize()) &&
         CHECK_CUDA(cudaMemcpy(twin->back, twin->device, twin->used, cudaMemcpyDeviceToHost));
}

static size_t unit_of(enum twin_content content) {
  static const size_t units[] = {1, 4, 2, 2, 8};
  return units[content];
}

static double number_at(const unsigned char *bytes, enum twin_content content) {
  uint16_t half;
  float single;
  double number;
  switch (content) {
  case TWIN_FLOAT32:
    memcpy(&single, bytes, sizeof single);
    return (double)single;
  case TWIN_BFLOAT16:
  case TWIN_FLOAT16:
    memcpy(&half, bytes, sizeof half);
    return (double)(content == TWIN_FLOAT16 ? ob_from_float16(half) : ob_from_bfloat16(half));
  case TWIN_FLOAT64:
    memcpy(&number, bytes, sizeof number);
    return number;
  default:
    return *bytes;
  }
}

static bool is_same(const struct twin *twin, size_t at, enum twin_content content) {
  const unsigned char *host = twin->host + at, *device = twin->back + at;
  return memcmp(host, device, unit_of(content)) == 0 ||
         (content != TWIN_BYTES && isnan(number_at(host, content)) &&
          isnan(number_at(device, content)));
}

static bool check_array(const struct twin *twin, const struct twin_array *array, const char *file,
                        int line) {
  size_t unit = unit_of(array->content), count = array->bytes / unit, first = count, differing = 0;
  if (memcmp(twin->host + array->at, twin->back + array->at, array->bytes) == 0)
    return true;
  for (size_t i = count; i-- > 0;)
    if (!is_same(twin, array->at + i * unit, array->content)) {
      first = i;
      differing++;
    }
  size_t at = array->at + first * unit;
  return differing == 0 ||
         check_note(false, file, line, "%s[%zu] is %.9g and should be %.9g; %zu of %zu differ",
                    array->name, first, number_at(twin->back + at, array->content),
                    number_at(twin->host + at, array->content), differing, count);
}

static bool check_gap(const struct twin *twin, size_t from, size_t to, const char *before,
                      const char *file, int line) {
  return memcmp(twin->host + from, twin->back + from, to - from) == 0 ||
         check_note(false, file, line, "memory after %s (of %zu bytes) is written to", before,
                    to - from);
}

bool twin_check(const struct twin *twin, const char *file, int line) {
  size_t end = 0;
  const char *before = "the beginning";
  bool same = true;
  for (size_t i = 0; i < twin->count; i++) {
    const struct twin_array *array = &twin->arrays[i];
    same &= check_gap(twin, end, array->at, before, file, line);
    same &= check_array(twin, array, file, line);
    end = array->at + array->bytes;
    before = array->name;
  }
  return check_gap(twin, end, twin->used, before, file, line) && same;
}
