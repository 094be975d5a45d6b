/* The common part of the files of `streams`. */
#ifndef ONEBIT_TESTS_PRELOAD_STREAMS_H
#define ONEBIT_TESTS_PRELOAD_STREAMS_H

#include <mpi.h>

enum { COUNT = 20000 };

extern int rank, size;
extern MPI_Comm comm; /* of the case */

/* Random numbers, with the same seed in each case: this rank's own, or the same on all. */
void seed(unsigned long long from);
double uniform(void);
float normal(void);

float *floats(size_t count);

/* Sums over the ranks; the bits of the result are part of the program's output. */
void reduce(const float *from, float *to, int count);

/* Cases: programs that solve or stack something. */
void gmres(void);
void bicgstab(void);
void stacking(void);

/* Trainings. */
void sgd(void);
void adam(void);
void policy(void);
void critic(void);
void network(void);
void wide(void);
void whole(void);

#endif
