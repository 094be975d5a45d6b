/* Gradient-like data, buffers between guard pages, and comparison to the bit. */
#include <sys/mman.h>

#include "tests/oracle.h"
#include "tests/support.h"

void *allocate(size_t count, size_t size) {
  void *memory = calloc(count ? count : 1, size);
  cr_assert(memory, "no memory for %zu elements of %zu bytes", count, size);
  return memory;
}

float uniform_value(uint64_t place) {
  uint64_t x = (place + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return (float)((x ^ x >> 31) >> 40) / 8388608.0f - 1.0f;
}

size_t dtype_size(onebit_dtype_t dtype) { return dtype == ONEBIT_FLOAT32 ? 4 : 2; }

const char *dtype_name(onebit_dtype_t dtype) {
  return dtype == ONEBIT_FLOAT32 ? "float32" : dtype == ONEBIT_BFLOAT16 ? "bfloat16" : "float16";
}

/* All periods are primes, so none is aligned with words, blocks or runs, and ranks and steps never
 * repeat each other in these tests. The two odd divisors fill the mantissa: sums then round, and a
 * wrong order of adding shows. */
float input_value(size_t i, int rank, int step) {
  size_t k = i + (size_t)rank * 7919 + (size_t)step * 104729;
  if (k % 53 == 0 || (k / 2503) % 11 == 10)
    return k % 2 ? -0.0f : 0.0f;
  float coarse = (float)(k * 31 % 1009) - 504.0f, fine = (float)(k * 17 % 97) - 48.0f;
  float region = (float)((k / 701) % 9) - 6.0f;
  float value = (coarse / 504.7f + fine / 9973.0f) * exp2f(region);
  return k % 211 == 0 ? value * 37.0f : value;
}

void fill_input(void *buffer, onebit_dtype_t dtype, size_t count, int rank, int step) {
  for (size_t i = 0; i < count; i++)
    oracle_store(buffer, i, dtype, input_value(i, rank, step));
}

static size_t page_size(void) { return (size_t)sysconf(_SC_PAGESIZE); }

struct guarded guarded_create(size_t bytes, enum guard guard) {
  size_t page = page_size(), inside = (bytes + page - 1) / page * page;
  struct guarded buffer = {NULL, NULL, inside + 2 * page};
  buffer.mapping =
      mmap(NULL, buffer.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  cr_assert(buffer.mapping != MAP_FAILED, "no memory for a buffer of %zu bytes", bytes);
  char *first = (char *)buffer.mapping + page;
  if (inside)
    cr_assert_eq(mprotect(first, inside, PROT_READ | PROT_WRITE), 0);
  buffer.data = guard == GUARD_BELOW ? first : first + inside - bytes;
  return buffer;
}

void guarded_destroy(struct guarded *buffer) { munmap(buffer->mapping, buffer->mapped); }

static unsigned char pattern_byte(size_t i) { return (unsigned char)(0x5a + i % 13); }

void fill_pattern(void *buffer, size_t bytes) {
  for (size_t i = 0; i < bytes; i++)
    ((unsigned char *)buffer)[i] = pattern_byte(i);
}

bool pattern_holds(const void *buffer, size_t bytes) {
  for (size_t i = 0; i < bytes; i++)
    if (((const unsigned char *)buffer)[i] != pattern_byte(i))
      return false;
  return true;
}

/* The element's bits, as the failure prints them. */
static unsigned bits_of(const void *array, size_t i, size_t size) {
  uint32_t word = 0;
  memcpy(&word, (const char *)array + i * size, size); /* little-endian, as the wire format */
  return word;
}

bool check_bits(const char *what, const void *actual, const void *wanted, size_t count,
                onebit_dtype_t dtype, const char *file, int line) {
  size_t size = dtype_size(dtype), first = count, differing = 0;
  if (count == 0 || memcmp(actual, wanted, count * size) == 0)
    return true;
  for (size_t i = count; i-- > 0;)
    if (bits_of(actual, i, size) != bits_of(wanted, i, size)) {
      first = i;
      differing++;
    }
  return check_note(
      false, file, line, "%s[%zu] is %.9g (0x%x) and should be %.9g (0x%x); %zu of %zu differ",
      what, first, (double)oracle_load(actual, first, dtype), bits_of(actual, first, size),
      (double)oracle_load(wanted, first, dtype), bits_of(wanted, first, size), differing, count);
}
