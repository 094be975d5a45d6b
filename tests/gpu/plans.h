/*
 * Cases of plans, and ranks that run them: over loopback, where the ranks are threads and the host
 * walks the steps, and over NCCL, where the device does.
 */
#ifndef ONEBIT_TESTS_GPU_PLANS_H
#define ONEBIT_TESTS_GPU_PLANS_H

#include "tests/gpu/part.h"

/* The product of all options; case `index` of it. */
/* The cases to walk: of all, one of `thinner`. The caller frees the rows. */
struct sample plan_cases_sample(const char *name, size_t thinner);
struct plan_case plan_case_at(size_t index);

/* In words, for check_case. */
const char *plan_case_words(const struct plan_case *what, char *text, size_t room);

/* A case with the default options. */
struct plan_case plan_case_simple(onebit_operation_t operation, size_t count);

/* Ranks in groups, each with self->comm: over loopback; over NCCL; a single one with itself. */
typedef bool plan_ranks(int size, gpu_rank_body *body, void *context);
plan_ranks ranks_nccl, ranks_self;

#ifdef ONEBIT_EMULATED_CUDA
/* Over loopback that moves messages in memory of the device, as a CUDA-aware MPI does: where that
 * device is emulated, the threads can. */
plan_ranks ranks_aware;
void ranks_make_aware(onebit_comm_t comm);
#endif

/* Runs the body on `size` ranks, over loopback and then over NCCL. */
void plan_ranks_both(int size, gpu_rank_body *body, void *context);

#ifdef ONEBIT_HAVE_NCCL
#include <nccl.h>

/* This rank's NCCL communicator, in ranks_nccl; and that it was aborted, and is gone. */
ncclComm_t ranks_nccl_comm(void);
void ranks_nccl_gone(void);
#endif

#endif
