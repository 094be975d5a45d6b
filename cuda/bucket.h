/* The device part of an optimizer's bucket: its arrays, streams and addresses of plans' states. */
#ifndef OB_CUDA_BUCKET_H
#define OB_CUDA_BUCKET_H

#include "cuda/device.h"
#include "optimizers/optimizer.h"

/* A bucket's plans: the dense and the compressed one. */
enum { OB_DENSE, OB_BITS, OB_PLANS };

/* Pinned memory with the addresses of gradients, one per piece, for the copy to the device. */
struct ob_addresses {
  void **memory;
  cudaEvent_t sent;
};

struct ob_bucket_device {
  const struct onebit_optimizer *optimizer;
  int number;
  /* A block in device memory, and the arrays in it, which have one entry per piece; device_scalings
   * is the host's copy of the device's scalings. */
  void *arrays;
  float **parameters;
  void **copies, **gradients, **means;
  float *factors, *weight_decays, *scalings, *floors;
  float *device_scalings;
  struct ob_addresses addresses[2]; /* used in turns; `turn` is the latest */
  int turn;
  bool moved; /* an address has changed since the last copy to the device */
  /* The host's copy of the latest pass's sums number which_sums, one per block, in pinned memory;
   * which_sums is -1 while there is no copy. */
  double *sums;
  int which_sums;
  bool counted; /* the device computes this step's bias corrections */
  /* calls: for each plan, how many calls had succeeded when the host last read the device's state.
   * before: the latest value of the state's `before` that was sent. */
  uint64_t calls[OB_PLANS], before[OB_PLANS];
  struct ob_cuda_lamb lamb; /* for 1-bit LAMB; per-tensor arrays belong to the first bucket */
  bool has_learning_rates;  /* lamb.learning_rates have been computed */
  cudaStream_t own;         /* for steps without a stream */
  /* In the first bucket, a device array with the addresses of plans' states: first the states of
   * all buckets' dense plans, then the states that buckets use when compressed plans send bits,
   * then those of uncompressed buckets. */
  struct ob_cuda_state **states;
  uint64_t steps_before, skipped_before; /* calls that plans' outcomes do not count */
  cudaEvent_t last;                      /* the end of the latest step on any stream */
  cudaStream_t parts;                    /* for steps in parts, beside the caller's stream */
};

/* Makes the next work on `next` follow the work so far on `first`, also in a capture. */
onebit_status_t ob_cuda_step_order(struct onebit_optimizer *optimizer, cudaStream_t first,
                                   cudaStream_t next);

/* Waits, at most for ONEBIT_TIMEOUT, until the calls that plans have put on streams are complete or
 * their communicator has failed. After that, waiting for a stream or the device does not depend on
 * other ranks. */
void ob_cuda_step_await(const struct onebit_optimizer *optimizer);

/* Rows of struct ob_optimizer_executor (optimizer_step.c, optimizer_calls.c). */
onebit_status_t ob_cuda_step_follow(struct onebit_optimizer *optimizer, void *stream);
onebit_status_t ob_cuda_step_prepare(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                     struct ob_call *call);
onebit_status_t ob_cuda_step_join(struct onebit_optimizer *optimizer);
onebit_status_t ob_cuda_step_pass(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                  const struct ob_pass_sink *sink);
onebit_status_t ob_cuda_step_sum(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                 int which, size_t first, size_t end, double *sum);
onebit_status_t ob_cuda_step_lamb(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                  enum ob_lamb_stage stage);
onebit_status_t ob_cuda_step_finish(struct onebit_optimizer *optimizer);

#endif
