/* The state of a rank of nccl_program, and its cases. */
#ifndef ONEBIT_TESTS_PRELOAD_NCCL_PROGRAM_H
#define ONEBIT_TESTS_PRELOAD_NCCL_PROGRAM_H

#include <cuda_runtime_api.h>
#include <stddef.h>

#include "base/nccl_releases.h"

enum { COUNT = 20000, STEPS = 40, RANKS_MOST = 8 };

/* The state of a rank, which is a thread or a process. */
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

/* Copy between `host` and the device, and wait for the copy, because `host` is used again at
 * once. */
void copy_to_device(void *to, size_t bytes);
void copy_from_device(const void *from, size_t bytes);

/* exact_value returns element i of a step's values. fill_exact writes these values, times a factor,
 * to device memory. check_values compares an array with them. */
float exact_value(int step, int i);
void fill_exact(float *to, int count, int step, float times);
void check_values(const char *what, const float *from, int count, int step, float times);

/* Sums on the rank's communicator and stream. end_capture returns a graph of the sums since
 * begin_capture, which can be launched on the stream. */
void sum_on_stream(const void *from, void *to, size_t count);
void begin_capture(void);
cudaGraphExec_t end_capture(void);

/* --- Cases: nccl_sums.c, nccl_others.c */

void sum_steadily(void), sum_without_waiting(void), sum_with_feedback(void), average_types(void),
    sum_in_groups(void), sum_in_large_group(void), sum_in_moved_buffers(void),
    sum_another_tensor(void);
void sum_in_reused_buffer(void), sum_not_a_number(void), make_other_calls(void),
    gather_and_scatter(void), change_order(void), alternate_streams(void), capture_sums(void),
    capture_early(void), capture_several_sums(void), sum_with_feedback_in_graph(void),
    sum_on_communicators(void), sum_on_shrunk_communicator(void),
    sum_on_nonblocking_communicator(void);

#endif
