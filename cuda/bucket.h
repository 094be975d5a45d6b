/* The part of an optimizer's bucket that is on a device, for the files that create it and step
 * it. */
#ifndef OB_CUDA_BUCKET_H
#define OB_CUDA_BUCKET_H

#include "cuda/device.h"
#include "optimizers/optimizer.h"

/* A bucket's plans: the dense and the compressed one. */
enum { OB_DENSE, OB_BITS, OB_PLANS };

/* Addresses of gradients on their way to the device: pinned, by piece. */
struct ob_addresses {
  void **memory;
  cudaEvent_t sent;
};

struct ob_bucket_device {
  const struct onebit_optimizer *optimizer;
  int number;
  /* By piece, in device memory; and on the host, a copy of the scalings on the device. */
  float **parameters;
  void **copies, **gradients, **means;
  float *factors, *weight_decays, *scalings, *floors;
  float *scalings_there;
  struct ob_addresses addresses[2]; /* in turns */
  int turn;
  bool moved; /* the device has not all addresses of now */
  /* Block sums of the latest pass of this kind, in pinned memory; kind -1: no pass has made sums
   * yet. */
  double *sums;
  int which_sums;
  bool counted; /* in this step the device has the bias corrections */
  /* The plans' calls that had ended well when the host looked last; the device's addition to
   * them. */
  uint64_t calls[OB_PLANS], before[OB_PLANS];
  struct ob_cuda_lamb lamb; /* of 1-bit LAMB; what is by tensor is the first bucket's */
  bool rated;               /* there are learning rates of its making */
  cudaStream_t own;         /* for steps without a stream */
  /* States of plans that the first bucket holds for all: those of all buckets' dense plans, then
   * those that buckets use when the compressed plans send bits, then those of uncompressed
   * buckets. */
  struct ob_cuda_state **states;
  uint64_t steps_before, skipped_before; /* calls that the plans' outcomes do not include */
  cudaEvent_t last;                      /* the end of the latest step on any stream */
  cudaStream_t parts;                    /* of steps in parts, beside the caller's */
};

/* Makes the next work on one stream follow the work so far on the other, also in a capture. */
onebit_status_t ob_cuda_step_order(struct onebit_optimizer *optimizer, cudaStream_t first,
                                   cudaStream_t next);

/* Waits, no longer than ONEBIT_TIMEOUT, until the calls that the plans have put on streams are
 * through or their communicator has failed: what waits for a stream or the device next does not
 * wait for a rank. */
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
