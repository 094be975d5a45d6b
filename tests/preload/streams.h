/* Declarations that the source files of `streams` share. */
#ifndef ONEBIT_TESTS_PRELOAD_STREAMS_H
#define ONEBIT_TESTS_PRELOAD_STREAMS_H

#include <mpi.h>

enum { COUNT = 20000 };

extern int rank, size;
extern MPI_Comm comm; /* the communicator of the case */

/* Random numbers that are the same in every run. The seed makes them this rank's own, or the same
 * on all ranks. */
void seed_random(unsigned long long from);
double draw_uniform(void);
float draw_normal(void);

float *allocate_floats(size_t count);

/* Sums over the ranks; the bits of the result are part of the program's output. */
void sum_over_ranks(const float *from, float *to, int count);

/* Cases that train a model (trainers.c). */
void train_with_sgd(void);
void train_policy_and_critic(void);
void sum_like_policy_and_critic(void);
void train_on_new_samples(void);
void train_with_double_sums(void);
void train_on_same_samples(void);

#endif
