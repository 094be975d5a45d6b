/*
 * The common interface of the optimizers, which converge with one bit per element. Each optimizer
 * has a header with its formulas, its options and the function that creates it:
 *
 *   efficient_adam.h  Efficient-Adam with one bit: the one to begin with
 *   momentum.h        1-bit momentum SGD
 *   lion.h            Lion in one bit
 *   adam.h            1-bit Adam, also in shards
 *   lamb.h            1-bit LAMB
 *   zero_one_adam.h   0/1 Adam, most of whose steps exchange nothing
 *
 * checkpoint.h saves and loads any of them. docs/optimizers.md says how to choose.
 *
 * An optimizer is made from a list of tensors, and makes steps: it reads the gradients, exchanges,
 * and updates the parameters. Gradients are local: the optimizer averages them over the ranks, so
 * the caller must not. All ranks must start from the same parameters; the steps keep them equal,
 * bit for bit (0/1 Adam: at its synchronisations). The caller gives every step its learning rate,
 * so learning-rate schedules are up to the caller.
 *
 * Mixed precision. Gradients and parameters may be float16 or bfloat16. For such parameters the
 * optimizer has float32 master values (4 bytes per parameter), which begin as the parameters. Each
 * step rounds the master values and writes them to the parameters. A master value beyond the
 * largest float16 is kept, and is written to the parameter as +-65504. All arithmetic is float32;
 * factors that are the same for all elements are computed in double and rounded once. Mean
 * gradients are float32 too, in memory and in dense messages.
 *
 * The value of a gradient. The value in the array is multiplied by gradient_factor (1 / k, if the
 * gradient is a sum over k micro-batches), divided by the loss scale if there is one, and
 * multiplied by the factor of clipping: in one multiplication, before gradients of different ranks
 * are added. A step is skipped if some gradient's value is not finite, or too large for sums of
 * squares in float32.
 *
 * Loss scaling. With initial_loss_scale the caller multiplies its loss by the scale that
 * onebit_optimizer_get_loss_scale returns, and the step divides the gradients by it. A step that is
 * skipped because some rank's gradients are not finite (ONEBIT_SKIPPED) halves the scale;
 * loss_scale_interval good steps in a row double it, up to 2^64. The scale is the same on all
 * ranks.
 *
 * Clipping. With clip_norm gradients are multiplied by min(1, clip_norm / norm), where
 *   norm = sqrt(mean over ranks of |gradient of the rank|^2)
 * and |.| is the Euclidean norm over all tensors; docs/optimizers.md compares it with the norm of
 * the mean gradient. Clipping costs a pass over the gradients and one message of four bytes before
 * the first exchange of a step can begin. If the norm is 2^32 or more, the step is skipped, as if
 * the norm were not finite.
 *
 * After a rank was lost, the other ranks can continue in the same job (onebit_optimizer_shrink),
 * and new ranks can join them (onebit_optimizer_move): docs/reliability.md.
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

/* A tensor to optimize. The arrays are the caller's, aligned to their type. They must not overlap,
 * and must outlive the optimizer. Fill unnamed fields with zero. */
typedef struct onebit_tensor {
  /* count elements of parameter_dtype, updated in place by each step, equal on all ranks at the
   * beginning */
  void *parameter;
  /* count elements of gradient_dtype, this rank's own gradient, read by each step; NULL: this
   * rank's gradient is zero (onebit_optimizer_set_gradient can change that) */
  const void *gradient;
  size_t count;               /* elements; 0 is allowed, with NULL arrays */
  float weight_decay;         /* wd in the formulas: decoupled, as in AdamW. Default 0 */
  float learning_rate_factor; /* multiplies the step's learning rate. 0 means the default, 1 */
  /* Nonzero: the gradient is always averaged in full precision, and the tensor takes its
   * optimizer's uncompressed step in all stages. ONEBIT_TABLE is different: the tensor is
   * compressed, as an output table. */
  int uncompressed;
} onebit_tensor_t;

/* A value of onebit_tensor_t.uncompressed for an output table: a tensor with a row for each of many
 * words or classes, each of which is rarely the right one. The last matrix of a language model is
 * an example. Efficient-Adam divides the gradients of a table by larger values (V_k in
 * efficient_adam.h), which would harm other tensors. Other optimizers refuse this value, and an
 * outer step ignores it. Checkpoints do not contain it. */
#define ONEBIT_TABLE (-1)

/* Values of freeze_step. AUTOMATIC: the optimizer finds the step from the variance
 * (onebit_adam_options_t). NEVER: it never freezes, and is plain Adam. */
#define ONEBIT_FREEZE_AUTOMATIC ((size_t)0)
#define ONEBIT_FREEZE_NEVER     ((size_t)-1)

/* Values of warmup_steps of Efficient-Adam and momentum SGD: the default number, and no warm-up. */
#define ONEBIT_WARMUP_STEPS 40
#define ONEBIT_WARMUP_NONE  ((size_t)-1)

/* ONEBIT_FREEZE_AUTOMATIC freezes after this many times 1 / (1 - beta2) steps at the latest. */
#define ONEBIT_FREEZE_LATEST 3

/* The largest step of an element, as a multiple of the learning rate, while its variance is frozen
 * or not updated. Without this bound an element whose variance is small compared with its block's
 * scale would make steps of any size (docs/optimizers.md). Weight decay is not part of the step.
 * Profile deepspeed has no bound. */
#define ONEBIT_STEP_BOUND 3.0f

/* The options that all optimizers have. Start from ONEBIT_OPTIMIZER_OPTIONS_INIT; in every field
 * zero means the default. All ranks give the same options, except threads and device. */
typedef struct onebit_optimizer_options {
  /* ONEBIT_PROFILE_DEEPSPEED: the arithmetic of the corresponding optimizer of DeepSpeed, which
   * each optimizer's header names. */
  onebit_profile_t profile;
  onebit_scale_t scale; /* as in onebit_plan_options_t, and so are the next four */
  size_t block_size;    /* a block never spans two tensors */
  size_t chunk_size;
  int no_error_feedback;
  int threads;
  /* The smallest number of elements in a bucket. Tensors are exchanged in buckets, from the last
   * tensor backwards, so that the exchange of a bucket can overlap with the rest of the backward
   * pass (onebit_optimizer_begin). The bucket with the first tensors may have fewer. A tensor is
   * never split. Default 0: one bucket of all tensors. With ONEBIT_BLOCK_BUFFER a bucket is the
   * buffer that has one scale. Otherwise no bit of any result depends on bucket_size, if the
   * exchanges of all buckets follow the same schedule. Profile deepspeed decides which tensors are
   * compressed together: leave bucket_size 0 with it. */
  size_t bucket_size;
  /* Default ONEBIT_SCHEDULE_AUTOMATIC: hierarchical if several hosts each have the same number of
   * ranks, which is more than one; else exchange. ONEBIT_SCHEDULE_ALLGATHER gives the results of
   * the exchange, bit for bit: every rank sends its message to all others, and does the work of all
   * servers. A step then waits for one message instead of two, which is faster if the delay of the
   * link takes longer than the additional bytes: with P ranks a rank sends P / 2 times as many. It
   * needs more memory: 8 bytes per element. The warm-up uses the exchange. It needs host memory,
   * blocks with scales of their own, and max_bits equal to bits; Lion and sharded state do not
   * support it. */
  onebit_schedule_t schedule;
  /* The memory of parameters and gradients, as in onebit_plan_options_t. Ranks may have different
   * devices; if they do, and hosts have several ranks, choose a schedule that both devices
   * support. */
  onebit_device_t device;
  onebit_dtype_t gradient_dtype;  /* default ONEBIT_FLOAT32 */
  onebit_dtype_t parameter_dtype; /* default ONEBIT_FLOAT32, without master values */
  double gradient_factor;         /* positive; default 1 */
  double clip_norm;               /* positive; default 0: no clipping */
  double initial_loss_scale;      /* 1 to 2^64; default 0: no loss scaling. 65536 is usual */
  size_t loss_scale_interval;     /* good steps in a row that double the scale; default 2000 */
  double min_loss_scale;          /* the lower limit of the scale; default 1 */
  size_t dense_below; /* tensors of fewer elements are `uncompressed`; default 0: none */
  /* Bits per element for the mean gradients of the warm-up, 4 or 8. These messages have an error
   * feedback of their own (none with no_error_feedback) and the scales of ONEBIT_SCALE_RMS.
   * Default: 8 for Efficient-Adam and momentum SGD's default warm-up, otherwise 0, which means
   * float32. 1-bit Adam without shards and 1-bit LAMB also support warmup_bits; it needs profile
   * default. `uncompressed` tensors stay dense. Memory: until the freeze as much again as the
   * residual of the compressed stage. */
  int warmup_bits;
  /* Bits per element of compressed messages: 1, 2, 4 or 8, default 1; Lion's servers always send
   * signs. A bucket whose residual outgrows its messages raises its bits up to max_bits, as plans
   * do (onebit/plan.h); max_bits defaults to `bits`. More than one bit needs host memory, profile
   * default and a scale for each block, and excludes shards and Efficient-Adam's trust_ratio.
   * Memory: messages have space for max_bits. Statistics and checkpoints contain the present bits
   * of each bucket. */
  int bits, max_bits;
  /* Copies of the residuals, as in onebit_plan_options_t; default 2. One copy takes 4 + 4 / size
   * bytes per parameter less. After a step that is skipped or fails, it restores residuals only to
   * within two roundings. (With clip_norm a skipped step changes nothing: gradients that are not
   * finite are found before anything is compressed.) One copy needs one bit and host memory, and
   * excludes shards, 1-bit LAMB and ONEBIT_SCHEDULE_HIERARCHICAL. Optimizers with a compressed
   * warm-up have the second copy until the warm-up ends. */
  int residual_copies;
} onebit_optimizer_options_t;

/* clang-format off */
#define ONEBIT_OPTIMIZER_OPTIONS_INIT \
  { ONEBIT_PROFILE_DEFAULT, ONEBIT_SCALE_RMS, 0, 0, 0, 0, 0, ONEBIT_SCHEDULE_AUTOMATIC, \
    ONEBIT_DEVICE_HOST, ONEBIT_FLOAT32, ONEBIT_FLOAT32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
/* clang-format on */

/* Makes a step: reads the gradients, exchanges, updates the parameters. Collective.
 *   optimizer       the optimizer
 *   learning_rate   of this step, the same on all ranks, finite and not negative; in a step that
 *                   onebit_optimizer_begin opened, the rate that begin was given
 * ONEBIT_SKIPPED (some rank's gradient was not finite) and all errors but two leave parameters,
 * moments, residuals and the step count unchanged, on every rank; the caller may then go on with
 * the next gradients. After ONEBIT_ERROR_MESSAGE (a message was damaged on its way) and
 * ONEBIT_ERROR_TRANSPORT a part of the parameters may be updated, or the other ranks may have made
 * the step: go back to a checkpoint. Until a checkpoint is loaded, every step returns
 * ONEBIT_ERROR_MESSAGE on the rank that has refused a message, and every step that exchanges
 * something returns ONEBIT_ERROR_PEER on the others.
 * Errors: ONEBIT_SKIPPED, ONEBIT_ERROR_ARGUMENT (also for an error of this rank since the step was
 * opened), ONEBIT_ERROR_MISMATCH (ranks differ in learning_rate, or in the values given to
 * onebit_optimizer_set_learning_rate_factor, onebit_optimizer_set_weight_decay,
 * onebit_optimizer_set_beta1 or onebit_optimizer_set_tag),
 * ONEBIT_ERROR_MESSAGE, ONEBIT_ERROR_PEER, ONEBIT_ERROR_TRANSPORT, ONEBIT_ERROR_DEVICE. */
onebit_status_t onebit_optimizer_step(onebit_optimizer_t optimizer, float learning_rate);

/* Make the same step in parts, so that it overlaps with the backward pass:
 *
 *   onebit_optimizer_begin(optimizer, rate);
 *   for each tensor, as the backward pass comes to it:
 *     compute its gradient
 *     onebit_optimizer_ready(optimizer, tensor);
 *   onebit_optimizer_step(optimizer, rate);
 *
 * begin opens a step. ready says that this rank's gradient of one tensor is final. When all tensors
 * of a bucket (bucket_size above) are ready, the exchange of the bucket starts. Every call of ready
 * progresses the exchanges in flight; if two calls are far apart, call onebit_progress between
 * them. No thread is involved. step starts the other exchanges, waits for all, and updates all
 * parameters, or none. begin and ready are local: each rank may call ready in an order of its own,
 * for some tensors or for all, or make its step without begin and ready. No bit of any result
 * depends on this.
 *   optimizer       the optimizer
 *   learning_rate   of this step (it travels with the messages), finite and not negative
 *   tensor          index in the list that the optimizer was made from, at most once per step; a
 *                   tensor without elements need not be ready
 * The caller must not write to the tensor's gradient between ready and the end of step. Parameters
 * do not change before step.
 * An error is returned at once, and again by the step, which then fails on every rank and changes
 * nothing: the other ranks get ONEBIT_ERROR_PEER. If no step is open (a begin that failed opens
 * none), the other ranks do not learn of the error. Errors of an exchange are returned by step. On
 * a device the gradient must be complete when ready is called; onebit_optimizer_ready_stream
 * (onebit/cuda.h) does not need that.
 * Errors: ONEBIT_ERROR_ARGUMENT (no optimizer; a learning_rate out of range; begin with a step
 * open; ready with none open, for a tensor that is not in the list, or for the second time; a step
 * that was begun on a stream), ONEBIT_ERROR_DEVICE. */
onebit_status_t onebit_optimizer_begin(onebit_optimizer_t optimizer, float learning_rate);
onebit_status_t onebit_optimizer_ready(onebit_optimizer_t optimizer, size_t tensor);

/* Sets the array of this rank's gradient of a tensor from the next step on. Local; not allowed
 * while a step is open, or while a graph replays one. Steps in flight on streams read the array
 * that they began with. Each rank may set other arrays.
 *   optimizer   the optimizer
 *   tensor      place in the list that the optimizer was made from
 *   gradient    as in onebit_tensor_t
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL, no such tensor, a misaligned array), ONEBIT_ERROR_BUSY (a
 * step is open), ONEBIT_ERROR_DEVICE. */
onebit_status_t onebit_optimizer_set_gradient(onebit_optimizer_t optimizer, size_t tensor,
                                              const void *gradient);

/* Set learning_rate_factor and weight_decay of a tensor (onebit_tensor_t) from the next step on:
 * for schedules of groups of tensors. Local and without a message, but all ranks must set the same
 * values between the same steps: otherwise the next step is an ONEBIT_ERROR_MISMATCH (a step whose
 * rate is in device memory does not check this). Messages, residuals and moments do not depend on
 * these values. If parameters differ between ranks now (the info's `synchronized` is 0), 0/1 Adam
 * uses new values from its next synchronisation on. Checkpoints do not contain these values. The
 * call waits for steps on streams, and fails while a step is open.
 *   optimizer      the optimizer
 *   tensor         place in the list that the optimizer was made from
 *   factor         finite and not negative; 0: the tensor does not change
 *   weight_decay   decoupled; finite and not negative
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL, no such tensor, a number out of range), ONEBIT_ERROR_BUSY (a
 * step is open), ONEBIT_ERROR_DEVICE. */
onebit_status_t onebit_optimizer_set_learning_rate_factor(onebit_optimizer_t optimizer,
                                                          size_t tensor, float factor);
onebit_status_t onebit_optimizer_set_weight_decay(onebit_optimizer_t optimizer, size_t tensor,
                                                  float weight_decay);

/* Sets beta1 from the next step on (for momentum SGD, `momentum`). It is for schedules that change
 * beta1 along with the learning rate. Local, but all ranks must set the same value, as with
 * onebit_optimizer_set_weight_decay. Bias corrections use the step's beta1 as if all steps had had
 * it, as in PyTorch. Right after the freeze the new value holds from the second compressed step on,
 * because the momentum of the first one is already multiplied by the old value. Checkpoints do not
 * contain beta1: before loading one, set the beta1 of its latest step. A step that a CUDA graph has
 * captured keeps the beta1 that was set during the capture. The call waits for steps on streams,
 * and fails while a step is open.
 *   optimizer   the optimizer
 *   beta1       in (0, 1)
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL, a number out of range), ONEBIT_ERROR_BUSY (a step is open),
 * ONEBIT_ERROR_DEVICE. */
onebit_status_t onebit_optimizer_set_beta1(onebit_optimizer_t optimizer, double beta1);

/* Sets a tag: any number, which must be equal on all ranks from the next step on. It is compared
 * along with the learning rate, so that a step fails if the ranks' programs have diverged (one rank
 * has left a step out). Local; it waits for steps on streams, and fails while a step is open. The
 * tag is 0 in the beginning and after onebit_optimizer_move; checkpoints do not contain it.
 *   optimizer   the optimizer
 *   tag         any number
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL), ONEBIT_ERROR_BUSY (a step is open), ONEBIT_ERROR_DEVICE. */
onebit_status_t onebit_optimizer_set_tag(onebit_optimizer_t optimizer, uint64_t tag);

/* Takes over 16-bit parameters to which the caller has written: the next step continues from their
 * present values. Without this call the step continues from the master values, and the written
 * values are lost. A parameter that equals its rounded master value keeps the master value; float32
 * parameters have no master values. Local, but all ranks must have written the same values; reads
 * all parameters, and waits for steps on streams.
 *   optimizer   the optimizer; not while a step is open
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL), ONEBIT_ERROR_BUSY (a step is open), ONEBIT_ERROR_MEMORY,
 * ONEBIT_ERROR_DEVICE. */
onebit_status_t onebit_optimizer_take_parameters(onebit_optimizer_t optimizer);

/* Checks that all ranks have the same parameters, to the bit. The first onebit_optimizer_step also
 * checks this, unless the optimizer counts its steps on a device: if parameters differ, the step
 * fails on every rank and changes nothing. Collective; reads all parameters once, on a device
 * copies them to the host, and waits for steps on streams.
 *   optimizer   the optimizer; no step may be open, and with 0/1 Adam the info's `synchronized`
 *               must not be 0, since parameters then differ
 * Errors: ONEBIT_ERROR_MISMATCH (parameters differ: the message names the first such tensor, and
 * the ranks), ONEBIT_ERROR_ARGUMENT (NULL), ONEBIT_ERROR_BUSY (a step is open),
 * ONEBIT_ERROR_MEMORY, ONEBIT_ERROR_PEER, ONEBIT_ERROR_MESSAGE, ONEBIT_ERROR_TRANSPORT,
 * ONEBIT_ERROR_DEVICE. */
onebit_status_t onebit_optimizer_compare(onebit_optimizer_t optimizer);

/* Makes every `steps`-th call of onebit_optimizer_step compare the parameters first, as
 * onebit_optimizer_compare does. Local, but the ranks must give the same number, between the same
 * steps.
 *   optimizer   the optimizer
 *   steps       0, the default: only the first step compares
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL), ONEBIT_ERROR_UNSUPPORTED (an optimizer that counts its
 * steps on a device: call onebit_optimizer_compare). */
onebit_status_t onebit_optimizer_set_compare_interval(onebit_optimizer_t optimizer, uint64_t steps);

/* Gets the factor by which to multiply the next step's loss; 1 without loss scaling. Local; waits
 * for steps on streams.
 *   optimizer   the optimizer
 *   scale       out
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL), ONEBIT_ERROR_DEVICE. */
onebit_status_t onebit_optimizer_get_loss_scale(onebit_optimizer_t optimizer, double *scale);

/* The stages of an optimizer. In the warm-up the ranks exchange gradients, dense or in warmup_bits;
 * in the compressed stage they exchange the values that the optimizer's header describes. */
typedef enum onebit_stage { ONEBIT_STAGE_WARMUP = 0, ONEBIT_STAGE_COMPRESSED = 1 } onebit_stage_t;

/* Set `size` to sizeof(onebit_optimizer_info_t), the call fills in the rest. */
typedef struct onebit_optimizer_info {
  size_t size;
  onebit_stage_t stage; /* of the next step */
  uint64_t steps;       /* steps made, without the skipped ones */
  uint64_t skipped;     /* steps that every rank skipped */
  uint64_t freeze_step; /* warm-up steps made before the freeze; 0 while in warm-up */
  /* |v(t - D)| / |v(t)| of the automatic freeze at the latest step; 0 when not known. */
  double variance_ratio;
  double momentum_norm;      /* Euclidean norm of the momentum that the ranks share */
  double residual_norm;      /* Euclidean norm of this rank's worker residual */
  uint64_t warmup_bytes;     /* bytes that a warm-up step sends from this rank */
  uint64_t compressed_bytes; /* bytes that a compressed step sends from this rank */
  uint64_t memory_bytes;     /* bytes allocated by the optimizer on this rank */
  const char *name;          /* "efficient_adam", "adam", "lamb", "zero_one_adam" or "momentum" */
  double loss_scale;         /* as in onebit_optimizer_get_loss_scale */
  double gradient_norm;      /* of the latest step, before clipping; 0 without clipping */
  int synchronized;          /* 0: parameters may differ between ranks, by 0/1 Adam's local steps */
  uint64_t exchanges[3];     /* steps that sent dense gradients; compressed values; nothing */
  double bits;               /* mean number of bits of a compressed element in the next step */
  uint64_t moves;            /* changes of a bucket's bits so far (max_bits) */
} onebit_optimizer_info_t;

/* Reports the optimizer's state. Local; reads the state once for the norms, and on a device waits
 * for steps on streams and copies the state to the host.
 *   optimizer   the optimizer
 *   info        out: all of it; `size` is set by the caller
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL, or a size the library does not know), ONEBIT_ERROR_MEMORY,
 * ONEBIT_ERROR_DEVICE. */
onebit_status_t onebit_optimizer_get_info(onebit_optimizer_t optimizer,
                                          onebit_optimizer_info_t *info);

/* Returns the stage and the number of steps without reading the state, in contrast to
 * onebit_optimizer_get_info, whose norms take as long as a pass over it. Local; on a device waits
 * for steps on streams.
 *   optimizer   the optimizer
 *   stage       out: the stage of the next step
 *   steps       out: steps made, without the skipped ones
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL), ONEBIT_ERROR_DEVICE. */
onebit_status_t onebit_optimizer_get_stage(onebit_optimizer_t optimizer, onebit_stage_t *stage,
                                           uint64_t *steps);

/* Moves the optimizer to another communicator: one of the remaining ranks after a rank was lost, or
 * one with new ranks. Collective over the new communicator; ranks that are only in the old one take
 * no part. The old communicator may be aborted or broken. Exchanges in flight on it, and an open
 * step, end without a message.
 *   optimizer   the optimizer of each rank of comm. Survivors pass theirs. A joining rank passes a
 *               new optimizer of the same kind, with the same list of tensors and options, on any
 *               communicator (onebit_comm_create_self). It must have made fewer steps
 *   comm        the new communicator; it must outlive the optimizer. The old communicator must only
 *               outlive this call
 * Afterwards all replicas are equal to the bit. Parameters, momentum, variance and all other state
 * that is equal on all ranks are copied from one rank, the source, which is the lowest of the ranks
 * with the most steps. If the loss of a rank interrupted a step, this step counts as made on all
 * ranks if the source has made it, and otherwise on none. If onebit_optimizer_step failed on the
 * source while results were applied, a part of the parameters has made the step, and makes its next
 * step with the same step number. Go on with the next gradients.
 *   own residuals   survivors keep theirs, and joining ranks begin with the mean of the survivors'
 *                   residuals; the same holds for moments of a rank's own gradients
 *   server residuals, Lion's momentum, shards of state
 *                   go to the ranks that now serve their elements. Of the lost rank's state,
 *                   residuals and momentum are replaced by zeros, and the variance of a shard by
 *                   the mean of its tensor's variance
 *   0/1 Adam        between two synchronisations parameters and momentum become their means
 * A rank counts as joining, and its own state is not used, if it has made no step, or has made more
 * than 1 + local_step_clipper steps less than the source. If comm cannot have a hierarchical
 * schedule, ONEBIT_SCHEDULE_AUTOMATIC replaces it. Memory: during the call as much again as
 * the optimizer's state.
 * On failure all ranks of comm that are still there get an error. The state is kept: make another
 * communicator of the ranks that are left, and call this function again. Until then steps fail.
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL), ONEBIT_ERROR_MISMATCH (optimizers differ between ranks),
 * ONEBIT_ERROR_UNSUPPORTED (an optimizer on a device; exchange of steps in profile
 * deepspeed, with one rank left), ONEBIT_ERROR_MEMORY, ONEBIT_ERROR_PEER, ONEBIT_ERROR_TRANSPORT,
 * ONEBIT_ERROR_MESSAGE, ONEBIT_ERROR_DEVICE. */
onebit_status_t onebit_optimizer_move(onebit_optimizer_t optimizer, onebit_comm_t comm);

/* Continues with the remaining ranks after a step that failed with ONEBIT_ERROR_TRANSPORT or
 * ONEBIT_ERROR_PEER. Calls onebit_comm_shrink for the optimizer's communicator, and
 * onebit_optimizer_move with the result, and repeats both if another rank is lost meanwhile.
 * Collective over the remaining ranks; if some of them are still in a step, that step fails.
 *
 *   onebit_comm_t old = comm;
 *   if (onebit_optimizer_shrink(optimizer, &comm) == ONEBIT_OK)
 *     onebit_comm_destroy(old);
 *
 *   optimizer   of each remaining rank
 *   survivors   out: the new communicator, owned by the caller; destroy it after the optimizer, and
 *               destroy the old one now. After a failure: the latest communicator that was made,
 *               from which another call of this function continues, or NULL
 * Errors: those of onebit_comm_shrink and onebit_optimizer_move. */
onebit_status_t onebit_optimizer_shrink(onebit_optimizer_t optimizer, onebit_comm_t *survivors);

/* Destroys the optimizer; parameters and gradients stay. Local, except while a step is open: it
 * then first ends the step, which fails on every rank, and waits for the other ranks' steps.
 *   optimizer   the optimizer; NULL is fine. A handle that is no optimizer, for example one that
 *               was destroyed before, is left alone, and onebit_last_error() says so */
void onebit_optimizer_destroy(onebit_optimizer_t optimizer);

#ifdef __cplusplus
}
#endif
#endif
