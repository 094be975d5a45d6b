/*
 * Cases of 1-bit Adam: on the host they are recorded, on a device they must give the same bits.
 */
#ifndef ONEBIT_TESTS_GPU_ADAM_H
#define ONEBIT_TESTS_GPU_ADAM_H

#include "onebit/cuda.h"
#include "tests/gpu/harness.h"

#define ADAM_TENSORS  6
#define ADAM_ELEMENTS 7090
#define ADAM_ATTEMPTS 14 /* at a step: some are skipped */
#define ADAM_RANKS    4

/* How steps are made: on one stream, on two in turn, on the default stream; without a stream; or on
 * a stream, but every third without. */
enum adam_form { ONE_STREAM, TWO_STREAMS, DEFAULT_STREAM, NO_STREAM, SOME_WITHOUT, ADAM_FORMS };

struct adam_case {
  const char *name;
  onebit_adam_options_t options;
  enum adam_form form;
  unsigned poison; /* a bit an attempt: a gradient of the last rank is not a number */
};

/* What the host's optimizer came to after each attempt. Parameters are the same on all ranks. */
struct adam_record {
  float parameters[ADAM_ATTEMPTS][ADAM_ELEMENTS];
  onebit_status_t status[ADAM_ATTEMPTS];
  onebit_optimizer_info_t info[ADAM_RANKS][ADAM_ATTEMPTS];
};

/* A rank's tensors, and the optimizer of them: sizes around a word and a block, and none; on a
 * device parameters are not aligned to 16 bytes. */
struct adam_learner {
  const struct adam_case *what;
  int rank, size;
  bool device;
  float *memory, *parameters, *gradients; /* the latter are parts */
  float *sent, *fetched;                  /* pinned: gradients and parameters of each attempt */
  cudaStream_t streams[2];
  onebit_tensor_t tensors[ADAM_TENSORS];
  onebit_optimizer_t optimizer;
};

/* Collective: false, and noted, when the optimizer cannot be made. `device` false: on the host. */
bool adam_learner_open(struct adam_learner *learner, const struct adam_case *what,
                       onebit_comm_t comm, int rank, int size, bool device);
void adam_learner_close(struct adam_learner *learner);

/* This rank's gradients of an attempt, put in their place on the stream. */
void adam_send_gradients(struct adam_learner *learner, int attempt, cudaStream_t stream);
float adam_rate(int attempt);

/* Runs a case on one rank of a communicator, and records it or compares it. */
void adam_record_case(const struct adam_case *what, onebit_comm_t comm, int rank, int size,
                      struct adam_record *record);
void adam_compare_case(const struct adam_case *what, onebit_comm_t comm, int rank, int size,
                       const struct adam_record *record);

/* Notes when `count` parameters do not have the recorded bits. */
void adam_check_parameters(const float *got, const float *wanted, int attempt);
void adam_check_info(onebit_optimizer_t optimizer, const onebit_optimizer_info_t *wanted);

/* A communicator over NCCL, of the ranks of gpu_ranks; on the emulated device each rank takes a
 * device of its own. False, and noted, when there is none. */
struct adam_nccl {
  void *nccl;
  onebit_comm_t comm;
};
bool adam_nccl_open(struct adam_nccl *group, const struct gpu_rank *self);
void adam_nccl_close(struct adam_nccl *group);

#endif
