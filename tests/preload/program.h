/* Declarations that the source files of `program` share. */
#ifndef ONEBIT_TESTS_PRELOAD_PROGRAM_H
#define ONEBIT_TESTS_PRELOAD_PROGRAM_H

#include <mpi.h>

enum { COUNT = 20000, STEPS = 40 };

extern int rank, size;

/* Prints the wrong element and ends the job. */
void fail(const char *what, int step, int i, double is, double wanted);

/* exact_value returns element i of a step's values, which are equal on all ranks. fill_exact writes
 * all of them. check_sum checks the sum of these values over `ranks` ranks. */
float exact_value(int step, int i);
void fill_exact(float *values, int count, int step);
void check_sum(const char *what, const float *values, int count, int step, int ranks);

/* Sums the values of a step over the ranks of a communicator, and checks the sum. */
void sum_exact(const char *what, float *mine, float *sum, int count, int step, MPI_Comm on);

/* Cases. */
void sum_nonblocking(void);
void leave_request_unfinished(void);
void check_progress(void);
void mix_dense_and_compressed(void);
void sum_persistent(void);
void sum_small_after_large(void);
void check_attributes(void);
void check_wrong_arguments(void);
void check_forked_child(void);
void reduce_and_broadcast(void);

#endif
