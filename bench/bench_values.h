/* Values on the command line: numbers, names. */
#ifndef BENCH_VALUES_H
#define BENCH_VALUES_H

#include <stdbool.h>
#include <stddef.h>

/* A whole number with K, M or G behind it where `suffix` allows. The end of what was read; NULL:
 * there is no number. */
const char *bench_read_number(const char *text, bool suffix, size_t *number);

/* The whole text is a number in a range. */
bool bench_whole_number(const char *text, size_t low, size_t high, size_t *number);
bool bench_whole_int(const char *text, int low, int high, int *number);

/* The position of a text of `length` characters among names, which end with NULL; -1: it is not
 * there. */
int bench_among(const char *text, size_t length, const char *const *names);

#endif
