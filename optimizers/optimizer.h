/*
 * The state of an optimizer, which the files that create it and step it share.
 *
 * A bucket is a group of tensors that are compressed together: consecutive ones, or in profile
 * deepspeed those that DeepSpeed compresses together. A bucket's arrays have the order of its
 * plan's residuals (compression/message.h). The arrays of 1-bit Adam, LAMB and momentum SGD change
 * their meaning at the freeze:
 *
 *                    warm-up              compressed
 *   residuals now  momentum m           compensated momentum c
 *   residuals next mean gradient        the other copy of c
 *   variance         v                    1 / (sqrt(v^) + epsilon)
 *   momentum         -                    the last message: signs and scales
 */
#ifndef OB_OPTIMIZERS_OPTIMIZER_H
#define OB_OPTIMIZERS_OPTIMIZER_H

#include "base/error.h"
#include "base/memory.h"
#include "collectives/communicator.h"
#include "collectives/plan.h"
#include "onebit/adam.h"
#include "onebit/optimizer.h"
#include "onebit/statistics.h"
#include "optimizers/method.h"

struct ob_bucket {
  onebit_plan_t bits, dense;
  /* With sharded state `bits` and `dense` are reduce-scatters, and these are the allgathers of the
   * servers' results: compressed steps (or NULL), and parameters. Without sharded state both are
   * NULL. */
  onebit_plan_t steps_back, parameters_back;
  struct ob_bucket_device *device; /* the executor's state, on a device */
  bool uncompressed;               /* exchanged dense in every step */
  /* The part of the layout that arrays and master values cover, from their first element on: all of
   * it, or with sharded state the part that this rank serves. */
  size_t first_block, blocks, first_word, words;
  /* The arrays by slot; NULL if the method has no such array. Momentum and scratch without arrays
   * of their own use the two copies of the residual, which are not needed until bits are sent. */
  float *arrays[OB_ARRAYS];
  float *masters;        /* NULL: the parameters are float32 themselves */
  double *sums[OB_SUMS]; /* the sums of a pass, one per block */
  /* For each piece of the plan: its parameters (the master values, if there are any); the caller's
   * parameters in their own type, or NULL if they are float32; its gradients and mean gradients;
   * its factor and weight decay. With sharded state `parameters` and `means` are NULL if the arrays
   * of the shard replace them, and `copies` are always the caller's parameters. */
  float **parameters;
  void **copies;
  const void **gradients;
  void **means;
  float *factors, *weight_decays;
  float *learning_rates; /* factor * the step's learning rate */
  float *scalings;       /* as in struct ob_source */
  float *floors;         /* as in struct ob_source: 0 except for tables */
  bool has_tables;       /* true if one of the floors is not 0 */
  size_t *tensor_of;     /* the tensor of each piece; tensor_count: none */
  struct ob_pass_sink sink;
  size_t filled;  /* tensors that have elements */
  size_t waiting; /* tensors of the bucket that are not ready in this step */
  bool started;   /* the bucket's exchange in this step has started */
  bool ended;     /* the exchange has ended, or is on a stream */
};

struct ob_tensor {
  size_t bucket, count;
  uint64_t first;                /* number of elements in the tensors before it */
  size_t first_block, end_block; /* its blocks in the layout of its bucket */
  bool ready;                    /* the gradient is ready in this step */
};

/* A step being made. */
struct ob_step_state {
  bool open;     /* between begin and step */
  bool streamed; /* all calls of the open step name a stream */
  float learning_rate;
  enum ob_exchange exchange;
  bool weighed; /* gradient_factor is known */
  float gradient_factor;
  size_t senders, started; /* buckets with an exchange; buckets whose exchange has begun */
  /* Seconds in onebit_optimizer_ready, and in the method's `prepare`. */
  double ready, prepare;
  bool on_stream;
  void *stream;
  /* If the open step runs on a stream of the executor: the caller's latest stream, and whether it
   * is being captured. */
  void *caller;
  bool captured;
  /* This rank's errors; after the exchanges, the outcome of the step. */
  struct ob_outcome outcome;
};

/* The host's time in steps so far, in seconds. */
struct ob_times {
  double compress, network, update;
  double all; /* the whole step, of which the three above are parts */
};

struct ob_part; /* checkpoint/checkpoint.h */

/* The table of executors. An executor determines the memory of arrays, and runs the passes. All
 * rows have check, pass and sum; another member is NULL if there is nothing to do. */
struct ob_optimizer_executor {
  onebit_status_t (*check)(const char *name, const void *array);
  /* Creates the device's part of one bucket, after all other parts. */
  onebit_status_t (*create)(struct onebit_optimizer *optimizer, struct ob_bucket *bucket);
  void (*destroy)(struct ob_bucket *bucket);
  /* In an open step on streams: orders further work of the step after the caller's stream; `finish`
   * makes the caller's stream wait for the step. NULL: the executor has no streams. */
  onebit_status_t (*follow)(struct onebit_optimizer *optimizer, void *stream);
  /* Adds the executor's part to the call that is about to start. */
  onebit_status_t (*prepare)(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                             struct ob_call *call);
  /* Called when all buckets' exchanges have ended, or are on the stream, before anything is
   * applied. */
  onebit_status_t (*join)(struct onebit_optimizer *optimizer);
  /* Runs a pass over the bucket's arrays. */
  onebit_status_t (*pass)(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                          const struct ob_pass_sink *sink);
  /* Returns sum number `which` of the latest pass, over the blocks first .. end - 1, in their
   * order. */
  onebit_status_t (*sum)(struct onebit_optimizer *optimizer, struct ob_bucket *bucket, int which,
                         size_t first, size_t end, double *sum);
  /* 1-bit LAMB (optimizer->own is a struct ob_lamb): computes per-tensor coefficients of the bucket
   * from the sums of the latest pass, and learning rates of the next passes from the coefficients.
   * A deferred executor orders this work after that pass. NULL: the host computes both. */
  onebit_status_t (*lamb)(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                          enum ob_lamb_stage stage);
  /* Called when the address of a piece's gradient has changed in bucket->gradients. */
  onebit_status_t (*repoint)(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                             size_t piece);
  /* Called when a piece's factor or weight decay has changed. */
  onebit_status_t (*reweigh)(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                             size_t piece);
  /* Called when the factors by which this rank multiplies means as a server have changed. */
  void (*set_server_factors)(struct ob_bucket *bucket);
  /* Returns how many steps were made and how many were skipped. Only a deferred executor has this
   * function; it is called after all plans have settled. */
  void (*counts)(const struct onebit_optimizer *optimizer, uint64_t *steps, uint64_t *skipped);
  /* Called when all work of a step is on its stream. A step without a stream has ended when this
   * function returns. */
  onebit_status_t (*finish)(struct onebit_optimizer *optimizer);
  /* Makes the host wait for passes of steps on streams. */
  onebit_status_t (*wait)(struct onebit_optimizer *optimizer);
  /* Called after a checkpoint was loaded, which replaces arrays, steps and skipped. NULL: the
   * executor has no copies of these. */
  onebit_status_t (*restored)(struct onebit_optimizer *optimizer);
};

extern const struct ob_optimizer_executor ob_optimizer_executor_host;

/* ob_lamb_run runs a stage of 1-bit LAMB or of another optimizer with trust ratios (lamb.c) in the
 * executor, ob_lamb_on_host on the host. optimizer->own is a struct ob_lamb. */
onebit_status_t ob_lamb_run(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                            enum ob_lamb_stage stage);
onebit_status_t ob_lamb_on_host(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                enum ob_lamb_stage stage);
/* Makes a step of dense LAMB from mean gradients. */
onebit_status_t ob_lamb_make_dense_step(struct onebit_optimizer *optimizer,
                                        struct ob_bucket *bucket);
/* Makes recipe->own with the limits of the recipe. */
onebit_status_t ob_lamb_make_own(struct ob_recipe *recipe, size_t ntensors);
/* The members add_statistics and numbers of methods whose `own` is a struct ob_lamb. */
onebit_status_t ob_lamb_fill_statistics(const struct onebit_optimizer *optimizer, size_t tensor,
                                        onebit_tensor_statistics_t *statistics);
size_t ob_lamb_numbers(struct onebit_optimizer *optimizer, struct ob_numbers list[OB_MAX_NUMBERS]);

#ifdef ONEBIT_HAVE_CUDA
extern const struct ob_optimizer_executor ob_optimizer_executor_cuda;
#endif

struct onebit_optimizer {
  onebit_comm_t comm;
  onebit_comm_t latest; /* the communicator of the latest move, also if that failed; or NULL */
  const struct ob_optimizer_executor *executor;
  const struct ob_method *method, *asked; /* asked: the row of its options */
  void *own;                              /* belongs to the method */
  /* The caller's list of tensors, with the current gradients, factors and weight decays; buckets
   * are made from it. */
  onebit_tensor_t *list;
  size_t list_count;
  /* The state after a move that failed half-way and left no buckets, else NULL. */
  struct ob_part *held;
  /* The host learns how a step ended only when it asks the device (ob_optimizer_catch_up). */
  bool deferred;
  uint64_t unknown;          /* steps since the host asked last */
  struct ob_outcome outcome; /* the outcome of steps on streams */
  struct ob_moments moments;
  onebit_optimizer_options_t options; /* defaults filled in */
  struct ob_bucket *buckets;          /* in the order of their tensors */
  struct ob_tensor *tensors;
  size_t bucket_count, tensor_count;
  uint64_t steps, skipped, frozen_at;
  bool began_frozen; /* no warm-up was made: frozen_at is 0 */
  /* Steps before the first gradient; a warm-up of divided gradients does not count them. */
  uint64_t zero_steps;
  float *chunks;         /* scratch for the end of such a warm-up: two chunks of moments */
  uint64_t exchanges[3]; /* steps, by enum ob_exchange */
  uint64_t sent[2];      /* bytes sent in calls of the host, by enum ob_exchange */
  struct ob_times times;
  struct ob_step_state step;
  /* Automatic freeze: norms of the variance after the last `window` steps, a ring. */
  double *norms, variance_ratio;
  size_t window;
  double loss_scale;   /* 1 without loss scaling */
  uint64_t good_steps; /* since the scale changed */
  /* Clipping: the plan that exchanges sums of squares, or NULL; this rank's sum and the mean over
   * all ranks; the norm. */
  onebit_plan_t squares;
  float *square[2];
  double gradient_norm;
  /* constants: the hash of the factors, weight decays, beta1 and tag that were set since the ranks
   * last agreed on them, or 0. constants_wait: some take effect at the next synchronisation. beta1:
   * the latest one; moments.beta1 follows it when it may. */
  uint32_t constants;
  double beta1;
  uint64_t tag;
  bool constants_wait;
  /* Scratch of checkpoints, one entry per tensor; NULL if buckets do not change their width. */
  struct ob_ladder_state *ladders;
  bool refused; /* a plan has refused a message (struct onebit_plan) */
  /* The learning rate in device memory, which the host does not know: calls then pass 0. NULL:
   * calls have the rate. */
  const float *rate;
  /* compared: parameters were compared at least once. calls: the number of calls that made a step
   * since then, equal on all ranks. */
  bool compared;
  uint64_t calls, compare_interval;
  uint64_t *hashes; /* scratch: one per tensor */
  /* With a deferred executor: steps that were skipped because of the norm, before buckets were
   * exchanged. The executor counts other skipped steps. */
  uint64_t skipped_by_norm;
  struct ob_metrics *metrics; /* NULL: this rank writes none */
  uint64_t own_bytes;
  uint64_t constant_bytes; /* the part of own_bytes that does not depend on the communicator */
};

/* --- Creating an optimizer (optimizer.c) */

/* Creates an optimizer of the method with its options, or with defaults if `options` is NULL.
 * Collective. If the options are wrong on one rank, creating fails on all ranks. */
onebit_status_t ob_optimizer_create(onebit_comm_t comm, const struct ob_method *method,
                                    const void *options, const onebit_tensor_t *tensors,
                                    size_t ntensors, onebit_optimizer_t *optimizer);

/* ob_optimizer_build creates the buckets, the plans and all else that depends on the communicator,
 * from the list of tensors. Collective; `status` is this rank's status so far. ob_optimizer_strip
 * destroys these objects without messages, even if calls are in flight. ob_optimizer_abandon_plans,
 * its first part, ends the calls in flight. */
onebit_status_t ob_optimizer_build(struct onebit_optimizer *optimizer, onebit_status_t status);
void ob_optimizer_strip(struct onebit_optimizer *optimizer);
void ob_optimizer_abandon_plans(struct onebit_optimizer *optimizer);

/* Collective: fails on all ranks of comm unless their optimizers are of the same kind, with the
 * same options and tensors. */
onebit_status_t ob_optimizer_agree(struct onebit_optimizer *optimizer, onebit_comm_t comm,
                                   onebit_status_t status);

void ob_part_release(struct ob_part *part); /* checkpoint/part.c; NULL is fine */

/* Fails if there are no buckets, after a move that failed. */
static inline onebit_status_t ob_optimizer_check_held(const struct onebit_optimizer *optimizer) {
  if (optimizer->held)
    return ob_error(ONEBIT_ERROR_TRANSPORT,
                    "optimizer has no communicator since onebit_optimizer_move failed: call "
                    "onebit_optimizer_move again, with a communicator of the remaining ranks");
  return ONEBIT_OK;
}

/* Allocates memory that counts as the optimizer's. NULL when out of memory. */
static inline void *ob_optimizer_allocate(struct onebit_optimizer *optimizer, size_t count,
                                          size_t size) {
  optimizer->own_bytes += count * size;
  return ob_allocate(count, size);
}

/* Checks of arguments (arguments.c); each returns ONEBIT_OK, or a status with its error message.
 * ob_check_common checks the options that all optimizers have; ob_check_recipe checks that the
 * method supports the options and the number of bits. */
onebit_status_t ob_check_common(const onebit_optimizer_options_t *options);
onebit_status_t ob_check_recipe(const struct ob_recipe *recipe, int bits, int max_bits);
/* ob_check_array checks an array of a tensor; `name` is "parameter" or "gradient". ob_check_tensors
 * checks all tensors, whose arrays must not overlap; it may return ONEBIT_ERROR_MEMORY. */
onebit_status_t ob_check_array(const struct ob_optimizer_executor *executor, const char *name,
                               size_t tensor, const void *array, onebit_dtype_t dtype);
onebit_status_t ob_check_tensors(const struct onebit_optimizer *optimizer,
                                 const onebit_tensor_t *tensors, size_t count);

/* ob_bucket_allocate allocates everything of a bucket except its plans, which exist already
 * (bucket.c). After ONEBIT_ERROR_MEMORY some of it may be allocated. ob_bucket_make_masters sets
 * the master values from the parameters. */
onebit_status_t ob_bucket_allocate(struct onebit_optimizer *optimizer, struct ob_bucket *bucket);
void ob_bucket_release(const struct onebit_optimizer *optimizer, struct ob_bucket *bucket);
onebit_status_t ob_bucket_make_masters(const struct onebit_optimizer *optimizer,
                                       struct ob_bucket *bucket);

/* Buckets (buckets.c). ob_buckets_group assigns tensors to buckets, and allocates the lists of
 * both. ob_buckets_create creates each bucket and its plans: collective. */
onebit_status_t ob_buckets_group(struct onebit_optimizer *optimizer, const onebit_tensor_t *tensors,
                                 size_t count);
onebit_status_t ob_buckets_create(struct onebit_optimizer *optimizer,
                                  const onebit_tensor_t *tensors, struct ob_plan_shape *shape,
                                  size_t *counts);
void ob_buckets_destroy(struct onebit_optimizer *optimizer);
bool ob_is_uncompressed(const struct onebit_optimizer *optimizer, const onebit_tensor_t *tensor);
/* Allocates the arrays that only dense steps need, if dense steps may follow or `warm` is set, and
 * otherwise releases them: the mean gradient, if the residual has one copy, and the variances of
 * divided gradients. Returns ONEBIT_ERROR_MEMORY if allocating fails. */
onebit_status_t ob_buckets_fit_arrays(struct onebit_optimizer *optimizer, bool warm);

onebit_status_t ob_buckets_set_gradient(struct onebit_optimizer *optimizer, size_t tensor,
                                        const void *gradient);
/* Applies the list's new factor and weight decay of the tensor. */
onebit_status_t ob_buckets_set_constants(struct onebit_optimizer *optimizer, size_t tensor);
/* Makes the residuals of replicated servers equal after a state was loaded (replicas.c).
 * Collective; `status` is that of loading, an error on all ranks or on none. */
onebit_status_t ob_buckets_share_servers(struct onebit_optimizer *optimizer,
                                         onebit_status_t status);
/* Sets the factors of servers from the current betas. */
void ob_buckets_set_serving(struct onebit_optimizer *optimizer);

/* --- A step (step.c) */

/* Returns false for a single rank in profile deepspeed, which does not compress, though it freezes
 * the variance. */
static inline bool ob_optimizer_compresses(const struct onebit_optimizer *optimizer) {
  return optimizer->options.profile != ONEBIT_PROFILE_DEEPSPEED || optimizer->comm->size > 1;
}

/* Returns the kind of messages that the bucket sends in the step being made. */
static inline enum ob_exchange ob_bucket_exchange(const struct onebit_optimizer *optimizer,
                                                  const struct ob_bucket *bucket) {
  return bucket->uncompressed ? OB_EXCHANGE_DENSE : optimizer->step.exchange;
}

/* Adds a status to the outcome of the step being made; returns the outcome so far, with its error
 * message. */
static inline onebit_status_t ob_step_note(struct onebit_optimizer *optimizer,
                                           onebit_status_t status) {
  return ob_outcome_add(&optimizer->step.outcome, status);
}
static inline onebit_status_t ob_step_outcome(const struct onebit_optimizer *optimizer) {
  return ob_outcome_status(&optimizer->step.outcome);
}

/* Returns true if ranks exchange nothing in the step being made. */
bool ob_optimizer_sends_nothing(const struct onebit_optimizer *optimizer);

/* Factors, weight decays, beta1 and tag (terms.c). ob_constants_apply puts waiting constants into
 * effect, if that is allowed now. ob_constants_agree sets the value of a call on which ranks must
 * agree: the learning rate, called `name` in error messages, combined with the constants. */
onebit_status_t ob_constants_apply(struct onebit_optimizer *optimizer);
void ob_constants_agree(const struct onebit_optimizer *optimizer, float rate, const char *name,
                        struct ob_call *call);

/* Steps in parts, with a stream or without. ob_optimizer_begin_on opens a step;
 * ob_optimizer_ready_on says that a tensor's gradient is ready; ob_step_check_form notes an error
 * unless all calls of the open step have a stream, or none has. */
onebit_status_t ob_optimizer_begin_on(onebit_optimizer_t optimizer, float learning_rate,
                                      bool streamed);
onebit_status_t ob_optimizer_ready_on(onebit_optimizer_t optimizer, size_t tensor, bool streamed,
                                      void *stream);
onebit_status_t ob_step_check_form(struct onebit_optimizer *optimizer, bool streamed);

/* Counts a step that was made, and changes the stage if that is due. */
onebit_status_t ob_optimizer_advance(struct onebit_optimizer *optimizer);

/* Returns true if the host must wait for a deferred executor before the next step, because it has
 * to know the stage: in the warm-up, as soon as the next step may be beyond it. */
bool ob_optimizer_must_catch_up(const struct onebit_optimizer *optimizer);

/* Makes a step on a stream of the device, or without one. */
onebit_status_t ob_optimizer_step_on(onebit_optimizer_t optimizer, float learning_rate,
                                     bool on_stream, void *stream);

/* Waits for steps on streams; then steps, skipped and the stage are known. The outcome of these
 * steps, and the statuses that ob_optimizer_note adds, are kept until ob_optimizer_end_outcome
 * returns them. */
onebit_status_t ob_optimizer_catch_up(onebit_optimizer_t optimizer);
static inline onebit_status_t ob_optimizer_note(onebit_optimizer_t optimizer,
                                                onebit_status_t status) {
  return ob_outcome_add(&optimizer->outcome, status);
}
onebit_status_t ob_optimizer_end_outcome(onebit_optimizer_t optimizer);
/* ob_optimizer_check_idle and ob_optimizer_reach_idle fail while a step is open.
 * ob_optimizer_reach_idle also waits for steps on streams. */
onebit_status_t ob_optimizer_check_idle(const struct onebit_optimizer *optimizer);
onebit_status_t ob_optimizer_reach_idle(onebit_optimizer_t optimizer);

/* Ends an open step as one that has failed, and tells the other ranks. */
void ob_optimizer_abandon(struct onebit_optimizer *optimizer);
/* Discards results of the step that are held. */
void ob_step_revoke(struct onebit_optimizer *optimizer);

/* Sets step.gradient_factor, by which gradients of the step are multiplied (terms.c). Collective if
 * there is clipping, and then `status` is this rank's status so far, with the latest error
 * message. */
onebit_status_t ob_optimizer_set_gradient_factor(struct onebit_optimizer *optimizer,
                                                 onebit_status_t status);

/* Moves the object to the survivors of `from`: collective over these. If further ranks are lost
 * meanwhile, it starts again without them. *survivors is NULL at first, then the communicator of
 * the survivors. */
onebit_status_t ob_shrink_and_move(onebit_comm_t from, onebit_comm_t *survivors,
                                   onebit_status_t (*move)(void *object, onebit_comm_t comm),
                                   void *object);

/* Called when a checkpoint was loaded, after which ranks have the same state: calls ob_plan_accept
 * of all plans. */
onebit_status_t ob_optimizer_accept(struct onebit_optimizer *optimizer);

/* ob_optimizer_must_compare returns true if the step being made compares the ranks' parameters: the
 * first step does, and then one step in each interval that was set. ob_optimizer_compare compares
 * them. Collective; `status` is this rank's status so far. */
bool ob_optimizer_must_compare(struct onebit_optimizer *optimizer);
onebit_status_t ob_optimizer_compare(struct onebit_optimizer *optimizer, onebit_status_t status);

/* Creates the plan and the memory of clipping, once the buckets are made: collective. */
onebit_status_t ob_clipping_create(struct onebit_optimizer *optimizer);
void ob_clipping_destroy(struct onebit_optimizer *optimizer);

/* The largest loss scale: gradients of float16 overflow with much smaller ones, and float32 and
 * bfloat16 need no loss scale. */
#define OB_MAX_LOSS_SCALE 0x1p64

/* Changes the loss scale after steps that were made or skipped. */
void ob_optimizer_adjust_loss_scale(struct onebit_optimizer *optimizer, uint64_t made,
                                    uint64_t skipped);

/* --- Training metrics (report.c): if ONEBIT_METRICS names a file, one row is written every
 * ONEBIT_METRICS_EVERY steps */

/* Opens the file, if this rank writes one; otherwise optimizer->metrics stays NULL. Errors:
 * ONEBIT_ERROR_ARGUMENT, ONEBIT_ERROR_FILE, ONEBIT_ERROR_MEMORY. */
onebit_status_t ob_metrics_open(onebit_optimizer_t optimizer);
/* Called when a step has ended with that status: writes a row if one is due. A failed call is not a
 * step, and its error message is kept. If writing fails, this function warns once and writes no
 * more. */
void ob_metrics_add_step(onebit_optimizer_t optimizer, float learning_rate, onebit_status_t status);
void ob_metrics_close(onebit_optimizer_t optimizer);

/* --- Functions that methods share (bucket.c) */

/* Returns the factors of step number `step` (from 1), except those that differ by piece. */
struct ob_pass_factors ob_make_factors(const struct onebit_optimizer *optimizer, uint64_t step);

/* Returns the factors of Lion, which are the same for all steps. */
struct ob_lion_factors ob_make_lion_factors(const struct onebit_optimizer *optimizer);

/* Returns the bound of compressed steps with a frozen variance (ONEBIT_STEP_BOUND), or infinity. */
float ob_step_bound(const struct onebit_optimizer *optimizer);

/* Returns the operands of a pass on the bucket in that step. Steps are not bounded. */
struct ob_pass_sink ob_bucket_make_sink(const struct onebit_optimizer *optimizer,
                                        const struct ob_bucket *bucket, enum ob_pass_kind kind,
                                        uint64_t step);

/* Run a pass over one bucket, and over all compressed buckets. */
onebit_status_t ob_bucket_run_pass(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                   enum ob_pass_kind kind, uint64_t step);
onebit_status_t ob_buckets_run_pass(struct onebit_optimizer *optimizer, enum ob_pass_kind kind,
                                    uint64_t step);
/* Calls `body` for each compressed bucket. */
onebit_status_t ob_buckets_for_each(struct onebit_optimizer *optimizer,
                                    onebit_status_t (*body)(struct onebit_optimizer *optimizer,
                                                            struct ob_bucket *bucket));

/* Applies the results of all buckets that were exchanged with `hold`. Returns the worst status. */
onebit_status_t ob_buckets_apply(struct onebit_optimizer *optimizer);

/* Fills in the usual call: it sends the momentum, and the pass `kind` applies the result. */
void ob_fill_momentum_call(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                           enum ob_pass_kind kind, struct ob_call *call);
/* Makes the call divide gradients by the root of this rank's own second moments. bucket->sink must
 * be set. */
void ob_fill_moments_call(const struct onebit_optimizer *optimizer, const struct ob_bucket *bucket,
                          uint64_t step, struct ob_call *call);

/* The freeze (freeze.c), for methods that have a warm-up of dense steps. */

/* Returns true if the warm-up is over. If there was none, frozen_at stays 0. */
static inline bool ob_optimizer_is_frozen(const struct onebit_optimizer *optimizer) {
  return optimizer->frozen_at || optimizer->began_frozen;
}

/* Returns true in a warm-up of divided gradients, in which the host must know how each step
 * ended. */
bool ob_optimizer_divides_gradients(const struct onebit_optimizer *optimizer);

/* Returns the number of the warm-up's last step, unless the variance determines it. */
size_t ob_freeze_last_step(const struct onebit_optimizer *optimizer);

/* Returns the number of the warm-up's last step; if the variance determines it, the largest number
 * that it can have. */
uint64_t ob_freeze_latest_step(const struct onebit_optimizer *optimizer);

/* Returns true if the freeze was due at least 1 / (1 - beta2) steps ago, and the variance still
 * lags. */
bool ob_freeze_is_late(const struct onebit_optimizer *optimizer);

/* Returns the form of the next step's exchange. If the method does not determine it, the exchange
 * is compressed once the optimizer is frozen, if it compresses. */
enum ob_exchange ob_optimizer_exchange(const struct onebit_optimizer *optimizer);

/* Allocates the memory that the freeze needs: norms, or chunks of moments. */
onebit_status_t ob_freeze_create(struct onebit_optimizer *optimizer);

/* Returns the sum of the variances that this rank keeps, from the latest pass. */
onebit_status_t ob_freeze_sum_variances(struct onebit_optimizer *optimizer, double *sum);

/* Sets the residuals of the warm-up's exchange to zero, and returns their memory. */
onebit_status_t ob_freeze_forget_residuals(struct onebit_optimizer *optimizer,
                                           struct ob_bucket *bucket);

#endif
