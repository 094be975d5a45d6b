/* The common part of the files of `program`. */
#ifndef ONEBIT_TESTS_PRELOAD_PROGRAM_H
#define ONEBIT_TESTS_PRELOAD_PROGRAM_H

#include <stddef.h>

enum { COUNT = 20000, STEPS = 40 };

extern int rank, size;

/* Prints the wrong element and ends the job. */
void fail(const char *what, int step, int i, double is, double wanted);

/* Values of a step, the same on all ranks; check compares their sum over `ranks` ranks. */
float exact(int step, int i);
void fill(float *values, int count, int step);
void check(const char *what, const float *values, int count, int step, int ranks);

float *floats(size_t count);

/* Cases. */
void nonblocking(void);
void unfinished(void);
void progress(void);
void mixture(void);
void persistent(void);
void quiet(void);
void attributes(void);
void arguments(void);
void forked(void);
void reduce_and_broadcast(void);

#endif
