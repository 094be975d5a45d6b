/* Values on the command line: numbers, names. */
#include <ctype.h>
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "bench/bench_values.h"

const char *bench_read_number(const char *text, bool suffix, size_t *number) {
  static const char letters[] = "KMG";
  char *end;
  if (!isdigit((unsigned char)*text))
    return NULL;
  errno = 0;
  unsigned long long value = strtoull(text, &end, 10);
  const char *letter = *end && suffix ? strchr(letters, toupper((unsigned char)*end)) : NULL;
  unsigned shift = letter ? 10 * (unsigned)(letter - letters + 1) : 0;
  if (errno || value > (SIZE_MAX >> shift))
    return NULL;
  *number = (size_t)value << shift;
  return end + (letter != NULL);
}

bool bench_whole_number(const char *text, size_t low, size_t high, size_t *number) {
  const char *end = bench_read_number(text, false, number);
  return end && !*end && *number >= low && *number <= high;
}

bool bench_whole_int(const char *text, int low, int high, int *number) {
  size_t value;
  if (!bench_whole_number(text, (size_t)low, (size_t)high, &value))
    return false;
  *number = (int)value;
  return true;
}

int bench_among(const char *text, size_t length, const char *const *names) {
  for (int i = 0; names[i]; i++)
    if (strlen(names[i]) == length && strncmp(text, names[i], length) == 0)
      return i;
  return -1;
}
