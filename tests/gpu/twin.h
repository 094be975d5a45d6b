/*
 * Memory twice: on the host, and on the device.
 *
 * A test takes arrays from the twin and fills the host's; the device's becomes a copy. Then the
 * library's codec works on the one and a kernel on the other, and afterwards both are the same in
 * every byte: the arrays, and what lies between them, which is a pattern.
 */
#ifndef ONEBIT_TESTS_GPU_TWIN_H
#define ONEBIT_TESTS_GPU_TWIN_H

#include <stdbool.h>
#include <stddef.h>

/* The content of an array. A NaN may be another one on the device: processors make different
 * ones. */
enum twin_content { TWIN_BYTES, TWIN_FLOAT32, TWIN_BFLOAT16, TWIN_FLOAT16, TWIN_FLOAT64 };

struct twin_array {
  const char *name;
  size_t at, bytes;
  enum twin_content content;
};

#define TWIN_ARRAYS 320

struct twin {
  unsigned char *host, *device, *back; /* back: what the device's was when it was fetched */
  size_t room, used;
  struct twin_array arrays[TWIN_ARRAYS];
  size_t count;
};

/* False, and noted, when the device has no such memory. */
bool twin_create(struct twin *twin, size_t room);
void twin_destroy(struct twin *twin);

/* Gives all arrays back. */
void twin_clear(struct twin *twin);

/* An array on the host, full of the pattern. It begins `skew` bytes after a multiple of 256. */
void *twin_take(struct twin *twin, const char *name, size_t bytes, enum twin_content content,
                size_t skew);

/* Return the address on the device, and in the fetched copy, for an address of the host's memory;
 * NULL for NULL. */
void *twin_on_device(const struct twin *twin, const void *host);
void *twin_in_back(const struct twin *twin, const void *host);

bool twin_send(struct twin *twin);
bool twin_fetch(struct twin *twin); /* after all that was launched */

/* Compares; the failure tells the array and the place. */
bool twin_check(const struct twin *twin, const char *file, int line);
#define CHECK_TWIN(twin) twin_check((twin), __FILE__, __LINE__)

#endif
