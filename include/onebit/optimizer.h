/*
 * Optimizers that converge with one bit an element.
 *
 * 1-bit Adam (Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's
 * Convergence Speed", arXiv 2102.02888). It starts as data-parallel Adam, with gradients averaged
 * in full precision, until the variance has settled; then the variance is frozen and the momentum
 * is what the ranks exchange, one bit an element with the error fed back:
 *
 *   warm-up      g = mean over ranks of gradient
 *                m = b1 m + (1 - b1) g
 *                v = b2 v + (1 - b2) g^2
 *                p = p - lr (m^ / (sqrt(v^) + eps) + wd p)
 *
 *   compressed   m = compressed allreduce of (b1 m + (1 - b1) gradient of this rank)
 *                v as it was at the freeze
 *                p = p - lr (m^ / (sqrt(v^) + eps) + wd p)
 *
 * with m^ = m / (1 - b1^t), v^ = v / (1 - b2^t) (in the compressed stage v^ keeps the t of the
 * freeze). An element whose variance is exactly zero at the freeze never had a gradient: its step
 * would be m / eps, so it gets none (weight decay still applies).
 *
 * The arithmetic is float32; b1, b2, 1 - b1, 1 - b2 and the bias corrections are computed in double
 * and rounded once. Gradients are local: do not average them over the ranks before the step, the
 * optimizer does. All ranks must start from the same parameters; the steps keep them equal, bit for
 * bit.
 */
#ifndef ONEBIT_OPTIMIZER_H
#define ONEBIT_OPTIMIZER_H

#include <stddef.h>
#include <stdint.h>

#include "onebit/collectives.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct onebit_optimizer *onebit_optimizer_t;

/* A tensor to optimize. The arrays are the caller's, aligned to float, apart from each other, and
 * must outlive the optimizer. Fill unnamed fields with zero. */
typedef struct onebit_tensor {
  float *parameter;           /* count floats, updated in place by each step, equal on all ranks */
  const float *gradient;      /* count floats, this rank's own gradient, read by each step */
  size_t count;               /* elements; 0 is allowed, with NULL arrays */
  float weight_decay;         /* decoupled, as in AdamW: wd above. Default 0 */
  float learning_rate_factor; /* multiplies the step's learning rate. 0 means the default, 1 */
} onebit_tensor_t;

/* freeze_step: find the step from the variance (see onebit_adam_options_t), or never freeze: plain
 * Adam. */
#define ONEBIT_FREEZE_AUTOMATIC ((size_t)0)
#define ONEBIT_FREEZE_NEVER     ((size_t)-1)

/* Start from ONEBIT_ADAM_OPTIONS_INIT; in every field zero means the default. All ranks give the
 * same, except threads. */
typedef struct onebit_adam_options {
  size_t size;    /* sizeof(onebit_adam_options_t) */
  double beta1;   /* in (0, 1); default 0.9 */
  double beta2;   /* in (0, 1); default 0.999 */
  double epsilon; /* positive; default 1e-8 */
  /* Number of warm-up steps, at least 1; default ONEBIT_FREEZE_AUTOMATIC. In profile deepspeed
   * DeepSpeed's own count, whose first call makes no step: freeze_step - 1 steps of warm-up, and at
   * least one. */
  size_t freeze_step;
  /* Automatic freeze: with D = 1 / (1 - beta2) rounded up, freeze after the first step t > D whose
   * variance satisfies
   *   threshold <= |v(t - D)| / |v(t)| <= 1 / threshold
   * in the sum of absolute values (bias-corrected unless no_bias_correction is set); in (0, 1);
   * default 0.96 (the criterion of arXiv 2102.02888). */
  double freeze_threshold;
  int no_bias_correction; /* nonzero: m^ = m and v^ = v. Profile deepspeed sets it */
  /* DEEPSPEED: DeepSpeed's OnebitAdam: no bias correction, one call a tensor with its padding and
   * scales, a step m / eps where the variance is zero, no compression when there is one rank. */
  onebit_profile_t profile;
  onebit_scale_t scale; /* as in onebit_plan_options_t, and so are the next four */
  size_t block_size;    /* a block never spans two tensors */
  size_t chunk_size;
  int no_error_feedback;
  int threads;
  /* Elements: tensors are exchanged in buckets of at least so many, taken from the last tensor
   * backwards, so that a bucket can leave while the backward pass still computes the gradients of
   * the tensors before (onebit_optimizer_begin); what is left over for the first tensors is a
   * bucket of its own. A tensor is never split. Default 0: one bucket of everything. With
   * ONEBIT_BLOCK_BUFFER a bucket is the buffer that has one scale; otherwise no bit of any result
   * depends on bucket_size, where the exchanges of all buckets follow the same schedule. Profile
   * deepspeed has a bucket a tensor: leave it 0. */
  size_t bucket_size;
  /* Default ONEBIT_SCHEDULE_AUTOMATIC: hierarchical when there are several hosts with as many ranks
   * each, more than one; else exchange. Not ONEBIT_SCHEDULE_ALLGATHER. */
  onebit_schedule_t schedule;
  /* Where parameters and gradients are, as in onebit_plan_options_t. All ranks need not agree; if
   * they do not, and hosts have several ranks, name a schedule that both devices have. */
  onebit_device_t device;
} onebit_adam_options_t;

/* clang-format off */
#define ONEBIT_ADAM_OPTIONS_INIT \
  { sizeof(onebit_adam_options_t), 0, 0, 0, 0, 0, 0, ONEBIT_PROFILE_DEFAULT, ONEBIT_SCALE_RMS, \
    0, 0, 0, 0, 0, ONEBIT_SCHEDULE_AUTOMATIC, ONEBIT_DEVICE_HOST }
/* clang-format on */

/* Makes a 1-bit Adam optimizer of a list of tensors. Collective: all ranks give the same counts, in
 * the same order, and the same options, and all get the same success or failure.
 *   comm        the ranks; must outlive the optimizer
 *   tensors     ntensors descriptions; copied, the arrays they point to are not
 *   ntensors    0 or more
 *   options     or NULL for the defaults; not kept
 *   optimizer   out: the optimizer; NULL when the call fails
 * Memory, in bytes a parameter: 12 (momentum then kept value, variance then reciprocal denominator,
 * averaged gradient then second kept value) + 8 / size + 1/2 for messages; plain data-parallel Adam
 * with a buffer for the mean takes 12.
 * Errors: those of onebit_plan_create; ONEBIT_ERROR_ARGUMENT also for a NULL or misaligned array,
 * arrays that overlap, a weight decay or factor that is negative or not finite. */
onebit_status_t onebit_adam_create(onebit_comm_t comm, const onebit_tensor_t *tensors,
                                   size_t ntensors, const onebit_adam_options_t *options,
                                   onebit_optimizer_t *optimizer);

/* One step: reads the gradients, exchanges, updates the parameters. Collective.
 *   optimizer       the optimizer
 *   learning_rate   of this step, the same on all ranks, finite and not negative; in a step that
 *                   onebit_optimizer_begin opened, the one given there
 * ONEBIT_SKIPPED (some rank's gradient was not finite) and all errors but two leave parameters,
 * moments, kept errors and the step count as they were, on every rank; then the caller may go on
 * with the next gradients. After ONEBIT_ERROR_MESSAGE (a message was damaged on its way) and
 * ONEBIT_ERROR_TRANSPORT a part of the parameters may be updated: go back to a checkpoint.
 * Errors: ONEBIT_SKIPPED, ONEBIT_ERROR_ARGUMENT (also for what went wrong on this rank since the
 * step was opened), ONEBIT_ERROR_MISMATCH (learning_rate differs between ranks),
 * ONEBIT_ERROR_MESSAGE, ONEBIT_ERROR_PEER, ONEBIT_ERROR_TRANSPORT, ONEBIT_ERROR_DEVICE. */
onebit_status_t onebit_optimizer_step(onebit_optimizer_t optimizer, float learning_rate);

/* The same step in parts, so that it overlaps with the backward pass:
 *
 *   onebit_optimizer_begin(optimizer, rate);
 *   for each tensor, as the backward pass comes to it:
 *     compute its gradient
 *     onebit_optimizer_ready(optimizer, tensor);
 *   onebit_optimizer_step(optimizer, rate);
 *
 * begin opens a step. ready says that this rank's gradient of one tensor is final: when the whole
 * bucket is (bucket_size above), its exchange starts. Every call of ready moves the exchanges in
 * flight on; between two of them that are far apart, onebit_progress does. No thread is involved.
 * step starts what has not been started, the last bucket at least, waits for all, and updates all
 * parameters, or none. begin and ready are local: each rank may call ready in an order of its own,
 * for some tensors or for all, or make its step without them. No bit of any result depends on it.
 *   optimizer       the optimizer
 *   learning_rate   of this step (it travels with the messages), finite and not negative
 *   tensor          place in the list given to onebit_adam_create, once a step; a tensor without
 *                   elements need not be ready
 * From ready to the end of step the tensor's gradient is the library's to read. Parameters do not
 * change before step.
 * What is wrong is said at once, and again by the step, which then fails on every rank and changes
 * nothing: the other ranks get ONEBIT_ERROR_PEER. When no step is open (a begin that failed opens
 * none) it is not told further. What goes wrong in an exchange is reported by step.
 * Errors: ONEBIT_ERROR_ARGUMENT (optimizer is NULL; a learning_rate out of range; begin with a step
 * open; ready with none open, for a tensor that is not in the list, or for the second time),
 * ONEBIT_ERROR_UNSUPPORTED (begin of an optimizer on a device). */
onebit_status_t onebit_optimizer_begin(onebit_optimizer_t optimizer, float learning_rate);
onebit_status_t onebit_optimizer_ready(onebit_optimizer_t optimizer, size_t tensor);

typedef enum onebit_stage { ONEBIT_STAGE_WARMUP = 0, ONEBIT_STAGE_COMPRESSED = 1 } onebit_stage_t;

/* Set `size` to sizeof(onebit_optimizer_info_t), the call fills in the rest. */
typedef struct onebit_optimizer_info {
  size_t size;
  onebit_stage_t stage; /* of the next step */
  uint64_t steps;       /* made, without the skipped ones */
  uint64_t skipped;     /* steps that every rank skipped */
  uint64_t freeze_step; /* warm-up steps made before the freeze; 0 while in warm-up */
  /* |v(t - D)| / |v(t)| of the automatic freeze at the latest step; 0 when not known. */
  double variance_ratio;
  double momentum_norm;      /* Euclidean norm of the momentum that the ranks share */
  double error_norm;         /* Euclidean norm of this rank's kept worker error */
  uint64_t warmup_bytes;     /* bytes that a warm-up step sends from this rank */
  uint64_t compressed_bytes; /* bytes that a compressed step sends from this rank */
  uint64_t memory_bytes;     /* bytes allocated by the optimizer on this rank */
} onebit_optimizer_info_t;

/* Says how the optimizer stands. Local; reads the state once for the norms, and on a device waits
 * for steps on streams and copies the state to the host for it.
 *   optimizer   the optimizer
 *   info        out: all of it; `size` is set by the caller
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL, or a size the library does not know), ONEBIT_ERROR_MEMORY,
 * ONEBIT_ERROR_DEVICE. */
onebit_status_t onebit_optimizer_get_info(onebit_optimizer_t optimizer,
                                          onebit_optimizer_info_t *info);

/* Gives the optimizer back; parameters and gradients stay. Local, except while a step is open: then
 * the step is first ended, as one that fails on every rank, which waits for the others' step.
 *   optimizer   the optimizer; NULL is fine */
void onebit_optimizer_destroy(onebit_optimizer_t optimizer);

#ifdef __cplusplus
}
#endif
#endif
