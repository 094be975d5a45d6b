/* The state of a rank of nccl_program, and its cases. */
#ifndef ONEBIT_TESTS_PRELOAD_NCCL_PROGRAM_H
#define ONEBIT_TESTS_PRELOAD_NCCL_PROGRAM_H

#include <cuda_runtime_api.h>
#include <stddef.h>

#include "base/nccl_releases.h"

enum { COUNT = 20000, STEPS = 40, RANKS_MOST = 8 };

/* The state of a rank: a thread's, or a process's. */
extern _Thread_local int rank;
extern _Thread_local ncclComm_t comm;
extern _Thread_local cudaStream_t stream;
extern _Thread_local float *host; /* pinned, COUNT + 1 */
extern int size;

/* --- nccl_program.c: checks that end the process */

void fail(const char *what, int step, int i, double is, double wanted);
void check_cuda(cudaError_t error, const char *call);
void check_nccl(ncclResult_t result, const char *call);
#define CUDA(call) check_cuda((call), #call)
#define NCCL(call) check_nccl((call), #call)

/* Returns zeroed memory of the device. */
void *device_memory(size_t bytes);

/* Copy between `host` and the device. Both wait: the host's memory is reused at once. */
void load(void *to, size_t bytes);
void fetch(const void *from, size_t bytes);

/* exact returns the values; fill writes them, times a factor, to device memory, and check compares
 * them. */
float exact(int step, int i);
void fill(float *to, int count, int step, float times);
void check(const char *what, const float *from, int count, int step, float times);

/* Sums on the rank's communicator and stream. captured_end returns a graph of the sums since
 * captured_begin, to be launched on the stream. */
void sum(const void *from, void *to, size_t count);
void captured_begin(void);
cudaGraphExec_t captured_end(void);

/* --- Cases: nccl_sums.c, nccl_others.c */

void steady(void), queued(void), feedback(void), types(void), groups(void), crowd(void),
    moves(void), another(void);
void reuse(void), not_a_number(void), foreign(void), gather_and_scatter(void), order(void),
    streams(void), graph(void), early_graph(void), graph_of_several(void), graph_feedback(void),
    communicators(void), shrunk(void), nonblocking(void);

#endif
