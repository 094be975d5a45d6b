/*
 * An optimizer: its state, shared by the files that create it and step it.
 *
 * What is compressed together is a bucket: consecutive tensors, or in profile deepspeed what
 * DeepSpeed compresses together. A bucket's arrays lie as its plan's residuals do
 * (compression/message.h). Those of 1-bit Adam, LAMB and momentum SGD change their meaning at the
 * freeze:
 *
 *                    warm-up              compressed
 *   residuals now  momentum m           compensated momentum c
 *   residuals next mean gradient        the other copy of c
 *   variance         v                    1 / (sqrt(v^) + epsilon)
 *   momentum         -                    the last message: signs and scales
 *
 * What the optimizers do not have in common is a row of the table of methods; the arithmetic is
 * compression/passes.h's.
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
  /* Sharded: these two are reduce-scatters, and allgathers bring back what the servers of the
   * shares have made of the gradients, steps in bits (or NULL) and parameters. Else NULL. */
  onebit_plan_t steps_back, parameters_back;
  struct ob_bucket_device *device; /* the executor's own, where it is a device */
  bool uncompressed;               /* exchanged dense in every step */
  /* The part of the layout that arrays and master values cover: all of it, or if sharded the part
   * that this rank serves. They begin at its first word. */
  size_t first_block, blocks, first_word, words;
  /* By slot; NULL if the method has no such array. Without arrays of their own, momentum and
   * scratch use the two copies of the residuals, which are not needed until bits are sent. */
  float *arrays[OB_ARRAYS];
  float *masters;        /* NULL: the parameters are float32 themselves */
  double *sums[OB_SUMS]; /* of a pass, one a block */
  /* By piece of the plan: where its parameters (the master values), the caller's in their own type
   * where these are not the same (else NULL), its gradients and mean gradients lie, and its
   * constants. Sharded it has no master values and no mean gradients, which are the share's, and
   * always the caller's parameters. */
  float **parameters;
  void **copies;
  const void **gradients;
  void **means;
  float *factors, *weight_decays;
  float *learning_rates; /* factor * the step's learning rate */
  float *scalings;       /* as in struct ob_source */
  float *floors;         /* likewise: 0 except for tables */
  bool has_tables;       /* true if one of them is not 0 */
  size_t *tensor_of;     /* which tensor it is of; tensor_count: of none */
  struct ob_pass_sink sink;
  size_t filled;  /* tensors that have elements */
  size_t waiting; /* tensors of the bucket that are not ready in this step */
  bool started;   /* its exchange, in this step; and that it has ended, or is on a stream */
  bool ended;
};

struct ob_tensor {
  size_t bucket, count;
  uint64_t first;                /* elements of the tensors before it */
  size_t first_block, end_block; /* of its bucket's layout */
  bool ready;                    /* in this step */
};

/* A step being made. */
struct ob_step_state {
  bool open;     /* between begin and step */
  bool streamed; /* then: all of its calls name a stream */
  float learning_rate;
  enum ob_exchange exchange;
  bool weighed; /* gradient_factor is known */
  float gradient_factor;
  size_t senders, started; /* buckets that exchange something; those whose exchange has begun */
  /* Seconds in onebit_optimizer_ready, and in the method's preparation of what it sends. */
  double ready, prepare;
  bool on_stream;
  void *stream;
  /* The caller's latest stream in an open step, which is on a stream of the executor's; and whether
   * it is captured. */
  void *caller;
  bool captured;
  /* This rank's errors and, when the exchanges have ended, their outcome. */
  struct ob_outcome outcome;
};

/* The host's time in steps so far, in seconds. */
struct ob_times {
  double compress, network, update;
  double all; /* the whole step, of which the three above are parts */
};

struct ob_part; /* checkpoint/checkpoint.h */

/* The table of places: where the arrays are, and who makes the local passes. All rows have check,
 * pass and sum; any other member is NULL where there is nothing to do. */
struct ob_optimizer_executor {
  onebit_status_t (*check)(const char *name, const void *array);
  /* Creates the device's part of one bucket, after all other parts. */
  onebit_status_t (*create)(struct onebit_optimizer *optimizer, struct ob_bucket *bucket);
  void (*destroy)(struct ob_bucket *bucket);
  /* In an open step on streams: puts further work of the step behind the caller's stream, and
   * finish makes the caller's stream wait for the step. NULL: the executor has no streams. */
  onebit_status_t (*follow)(struct onebit_optimizer *optimizer, void *stream);
  /* Adds the executor's part to the call that is about to start. */
  onebit_status_t (*prepare)(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                             struct ob_call *call);
  /* Called when all buckets' exchanges have ended, or are on the stream, before anything is
   * applied. */
  onebit_status_t (*join)(struct onebit_optimizer *optimizer);
  /* A pass over the bucket's arrays. */
  onebit_status_t (*pass)(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                          const struct ob_pass_sink *sink);
  /* Returns sum number `which` of the latest pass, over the blocks first .. end - 1, in their
   * order. */
  onebit_status_t (*sum)(struct onebit_optimizer *optimizer, struct ob_bucket *bucket, int which,
                         size_t first, size_t end, double *sum);
  /* 1-bit LAMB (optimizer->own is a struct ob_lamb): from the sums of the latest pass to the
   * numbers of the bucket's tensors, and to the learning rates of what follows. A deferred executor
   * does it behind that pass. NULL: the host does it. */
  onebit_status_t (*lamb)(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                          enum ob_lamb_stage stage);
  /* Called when the address of a piece's gradient has changed in bucket->gradients. */
  onebit_status_t (*repoint)(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                             size_t piece);
  /* Called when a piece's factor or weight decay has changed. */
  onebit_status_t (*reweigh)(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                             size_t piece);
  /* Called when the factors of the bucket's servers have changed. */
  void (*serve)(struct ob_bucket *bucket);
  /* Deferred, after all plans have settled: how many steps were made, how many skipped. */
  void (*counts)(const struct onebit_optimizer *optimizer, uint64_t *steps, uint64_t *skipped);
  /* Called when all of a step is on its stream; a step without a stream is over when this
   * returns. */
  onebit_status_t (*finish)(struct onebit_optimizer *optimizer);
  /* Makes the host wait for passes of steps on streams. */
  onebit_status_t (*wait)(struct onebit_optimizer *optimizer);
  /* Called after a checkpoint was loaded, which replaces arrays, steps and skipped. NULL: the
   * executor has no copies. */
  onebit_status_t (*restored)(struct onebit_optimizer *optimizer);
};

extern const struct ob_optimizer_executor ob_optimizer_executor_host;

/* 1-bit LAMB and other optimizers with trust ratios (lamb.c), for which optimizer->own is a struct
 * ob_lamb: runs a stage in the executor, or on the host. */
onebit_status_t ob_lamb_run(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                            enum ob_lamb_stage stage);
onebit_status_t ob_lamb_on_host(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                enum ob_lamb_stage stage);
/* A step of dense LAMB on mean gradients. */
onebit_status_t ob_lamb_dense(struct onebit_optimizer *optimizer, struct ob_bucket *bucket);
/* Makes recipe->own, with the recipe's limits. */
onebit_status_t ob_lamb_make_own(struct ob_recipe *recipe, size_t ntensors);
/* Members of a method. */
onebit_status_t ob_lamb_tell(const struct onebit_optimizer *optimizer, size_t tensor,
                             onebit_tensor_statistics_t *statistics);
size_t ob_lamb_numbers(struct onebit_optimizer *optimizer, struct ob_numbers list[OB_MAX_NUMBERS]);

#ifdef ONEBIT_HAVE_CUDA
extern const struct ob_optimizer_executor ob_optimizer_executor_cuda;
#endif

struct onebit_optimizer {
  onebit_comm_t comm;
  onebit_comm_t latest; /* to which it was to be moved last, or NULL */
  const struct ob_optimizer_executor *executor;
  const struct ob_method *method, *asked; /* asked: the row that has its options */
  void *own;                              /* the method's */
  /* The caller's, with the gradients, factors and weight decays of now: buckets are made from it.
   */
  onebit_tensor_t *list;
  size_t list_count;
  /* After a move that failed half-way: the state, since there are no buckets. Else NULL. */
  struct ob_part *held;
  /* The host learns how a step ended only when it asks (ob_optimizer_catch_up). */
  bool deferred;
  uint64_t unknown;          /* steps since it asked last */
  struct ob_outcome outcome; /* of steps on streams */
  struct ob_moments moments;
  onebit_optimizer_options_t options; /* defaults filled in */
  struct ob_bucket *buckets;          /* in the order of their tensors */
  struct ob_tensor *tensors;
  size_t bucket_count, tensor_count;
  uint64_t steps, skipped, frozen_at;
  bool began_frozen;   /* without a warm-up: frozen_at is 0 */
  uint64_t zero_steps; /* before the first gradient, which a warm-up that divides does not count */
  float *chunks;       /* scratch of such a warm-up's end: two chunks of moments */
  uint64_t exchanges[3]; /* steps, by enum ob_exchange */
  uint64_t sent[2];      /* bytes, likewise: of calls that this host made */
  struct ob_times times;
  struct ob_step_state step;
  /* Automatic freeze: norms of the variance after the last `window` steps, a ring. */
  double *norms, variance_ratio;
  size_t window;
  double loss_scale;   /* 1 without loss scaling */
  uint64_t good_steps; /* since the scale changed */
  /* Clipping: the exchange of the sums of squares, or NULL; this rank's sum; and the mean over all
   * ranks. */
  onebit_plan_t squares;
  float *square[2];
  double gradient_norm;
  /* The hash of factors, weight decays, beta1 and tag that were set since the ranks agreed on them:
   * 0 if none was. Whether some wait for a synchronisation. The latest beta1, which that of moments
   * follows when it may. */
  uint32_t constants;
  double beta1;
  uint64_t tag;
  bool constants_wait;
  /* Scratch of checkpoints, one a tensor; NULL where buckets do not move between widths. */
  struct ob_ladder_state *ladders;
  bool refused; /* a plan has refused a message (struct onebit_plan) */
  /* In device memory: the learning rate of steps, which the host then does not know, and passes as
   * 0 to calls. NULL: calls have the rate. */
  const float *rate;
  /* Parameters were compared at least once; the calls of step since then, the same number on all
   * ranks. */
  bool compared;
  uint64_t calls, compare_interval;
  uint64_t *hashes; /* scratch: one a tensor */
  /* Deferred: steps skipped because of the norm, before the exchange of buckets, whose skips the
   * executor counts. */
  uint64_t skipped_by_norm;
  struct ob_metrics *metrics; /* NULL: this rank writes none */
  uint64_t own_bytes;
  uint64_t constant_bytes; /* of what does not depend on the communicator */
};

/* --- Making one (optimizer.c) */

/* Collective: an optimizer of the method, of its options or NULL. What is wrong with them on one
 * rank is agreed on all the same. */
onebit_status_t ob_optimizer_create(onebit_comm_t comm, const struct ob_method *method,
                                    const void *options, const onebit_tensor_t *tensors,
                                    size_t ntensors, onebit_optimizer_t *optimizer);

/* Buckets, plans and what else depends on the communicator, from the list: collective. `status` is
 * how this rank fares so far. And gives all of that back, which is local, whatever is in flight. */
onebit_status_t ob_optimizer_build(struct onebit_optimizer *optimizer, onebit_status_t status);
void ob_optimizer_strip(struct onebit_optimizer *optimizer);
void ob_optimizer_abandon_plans(struct onebit_optimizer *optimizer); /* the first of that */

/* Collective: fails on all ranks of comm unless their optimizers are of the same kind, with the
 * same options and tensors. */
onebit_status_t ob_optimizer_agree(struct onebit_optimizer *optimizer, onebit_comm_t comm,
                                   onebit_status_t status);

void ob_part_release(struct ob_part *part); /* checkpoint/part.c; NULL is fine */

/* Fails if there are no buckets, after a move that failed. */
static inline onebit_status_t ob_optimizer_check_held(const struct onebit_optimizer *optimizer) {
  if (optimizer->held)
    return ob_error(ONEBIT_ERROR_TRANSPORT,
                    "optimizer is on no communicator since onebit_optimizer_move failed: call it "
                    "again, with one of the ranks that are left");
  return ONEBIT_OK;
}

/* Allocates memory that counts as the optimizer's. NULL when out of memory. */
static inline void *ob_optimizer_allocate(struct onebit_optimizer *optimizer, size_t count,
                                          size_t size) {
  optimizer->own_bytes += count * size;
  return ob_allocate(count, size);
}

/* Arguments (arguments.c), each ONEBIT_OK or a status with its error message: the options that all
 * optimizers have; whether this method can be compressed as its options ask, in so many bits. */
onebit_status_t ob_check_common(const onebit_optimizer_options_t *options);
onebit_status_t ob_check_recipe(const struct ob_recipe *recipe, int bits, int max_bits);
/* An array of a tensor: `name` is "parameter" or "gradient"; and all tensors, whose arrays may not
 * overlap. ONEBIT_ERROR_MEMORY too. */
onebit_status_t ob_check_array(const struct ob_optimizer_executor *executor, const char *name,
                               size_t tensor, const void *array, onebit_dtype_t dtype);
onebit_status_t ob_check_tensors(const struct onebit_optimizer *optimizer,
                                 const onebit_tensor_t *tensors, size_t count);

/* Allocates everything of a bucket except its plans, which exist already (bucket.c); sets the
 * master values from the parameters. ONEBIT_ERROR_MEMORY: some of it may be allocated. */
onebit_status_t ob_bucket_allocate(struct onebit_optimizer *optimizer, struct ob_bucket *bucket);
void ob_bucket_release(const struct onebit_optimizer *optimizer, struct ob_bucket *bucket);
onebit_status_t ob_bucket_make_masters(const struct onebit_optimizer *optimizer,
                                       struct ob_bucket *bucket);

/* Buckets (buckets.c): groups the tensors, which makes room for them; makes each bucket and its
 * plans, which is collective; gives them back. */
onebit_status_t ob_buckets_group(struct onebit_optimizer *optimizer, const onebit_tensor_t *tensors,
                                 size_t count);
onebit_status_t ob_buckets_create(struct onebit_optimizer *optimizer,
                                  const onebit_tensor_t *tensors, struct ob_plan_shape *shape,
                                  size_t *counts);
void ob_buckets_destroy(struct onebit_optimizer *optimizer);
bool ob_is_uncompressed(const struct onebit_optimizer *optimizer, const onebit_tensor_t *tensor);
/* Arrays that only dense steps want are there while there are such, or `warm`, and else not: of one
 * copy of the residuals that of the mean gradient; and variances of divided gradients. Errors:
 * ONEBIT_ERROR_MEMORY, of wanting one. */
onebit_status_t ob_buckets_fit_arrays(struct onebit_optimizer *optimizer, bool warm);

onebit_status_t ob_buckets_set_gradient(struct onebit_optimizer *optimizer, size_t tensor,
                                        const void *gradient);
/* Applies the list's new factor and weight decay of the tensor. */
onebit_status_t ob_buckets_set_constants(struct onebit_optimizer *optimizer, size_t tensor);
void ob_buckets_set_serving(struct onebit_optimizer *optimizer); /* beta1 of now */

/* --- A step (step.c) */

/* In profile deepspeed one rank alone does not compress; it freezes the variance all the same. */
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
  return ob_outcome_tell(&optimizer->step.outcome);
}

/* True if ranks exchange nothing in the step being made. */
bool ob_optimizer_sends_nothing(const struct onebit_optimizer *optimizer);

/* Factors, weight decays, beta1 and tag (terms.c): what waits comes into force, where it may.
 * What the ranks must agree on in a call of the step being made: a rate, of that name and those. */
onebit_status_t ob_constants_apply(struct onebit_optimizer *optimizer);
void ob_constants_agree(const struct onebit_optimizer *optimizer, float rate, const char *name,
                        struct ob_call *call);

/* Steps in parts, with a stream or without: opens one; a tensor is ready. Notes a mistake unless
 * all calls of the open step are of one form. */
onebit_status_t ob_optimizer_begin_on(onebit_optimizer_t optimizer, float learning_rate,
                                      bool streamed);
onebit_status_t ob_optimizer_ready_on(onebit_optimizer_t optimizer, size_t tensor, bool streamed,
                                      void *stream);
onebit_status_t ob_step_check_form(struct onebit_optimizer *optimizer, bool streamed);

/* Counts a step that was made; the stage follows. */
onebit_status_t ob_optimizer_advance(struct onebit_optimizer *optimizer);

/* Deferred, the host must know the stage: in the warm-up, how many steps were made, from where on
 * the next one may be beyond it. */
bool ob_optimizer_must_catch_up(const struct onebit_optimizer *optimizer);

/* Makes a step on a stream of the device, or without one. */
onebit_status_t ob_optimizer_step_on(onebit_optimizer_t optimizer, float learning_rate,
                                     bool on_stream, void *stream);

/* Waits for steps on streams; then steps, skipped and the stage are known. How the steps ended is
 * kept, as is what ob_optimizer_note is given, until ob_optimizer_end_outcome. */
onebit_status_t ob_optimizer_catch_up(onebit_optimizer_t optimizer);
static inline onebit_status_t ob_optimizer_note(onebit_optimizer_t optimizer,
                                                onebit_status_t status) {
  return ob_outcome_add(&optimizer->outcome, status);
}
onebit_status_t ob_optimizer_end_outcome(onebit_optimizer_t optimizer);
/* Fail while a step is open. reach_idle: waits for those on streams. */
onebit_status_t ob_optimizer_check_idle(const struct onebit_optimizer *optimizer);
onebit_status_t ob_optimizer_reach_idle(onebit_optimizer_t optimizer);

/* Ends an open step as one that has failed, and tells the other ranks. */
void ob_optimizer_abandon(struct onebit_optimizer *optimizer);
/* Drops results of the step that are held, without applying them. */
void ob_step_revoke(struct onebit_optimizer *optimizer);

/* Sets step.gradient_factor, by which gradients of the step are multiplied (terms.c). Collective if
 * there is clipping, and then `status` is this rank's status so far, with the latest error
 * message. */
onebit_status_t ob_optimizer_weigh(struct onebit_optimizer *optimizer, onebit_status_t status);

/* Collective over the survivors of `from`, to which the object is moved; where ranks are lost
 * meanwhile, again without these. *survivors: NULL, then the communicator that they have. */
onebit_status_t ob_shrink_and_move(onebit_comm_t from, onebit_comm_t *survivors,
                                   onebit_status_t (*move)(void *object, onebit_comm_t comm),
                                   void *object);

/* A checkpoint was loaded, so the ranks have the same: ob_plan_accept of all plans. */
onebit_status_t ob_optimizer_accept(struct onebit_optimizer *optimizer);

/* compares: true if the step being made compares the ranks' parameters: the first one does, and
 * steps at the interval that was set. compare: compares them, collectively; `status` is this rank's
 * status so far. */
bool ob_optimizer_compares(struct onebit_optimizer *optimizer);
onebit_status_t ob_optimizer_compare(struct onebit_optimizer *optimizer, onebit_status_t status);

/* Creates the memory of clipping, once the buckets are made. Collective. */
onebit_status_t ob_weigh_create(struct onebit_optimizer *optimizer);
void ob_weigh_destroy(struct onebit_optimizer *optimizer);

/* Limits the loss scale: gradients of float16 overflow long before, and float32 and bfloat16 have
 * enough exponents without one. */
#define OB_MAX_LOSS_SCALE 0x1p64

/* Changes the loss scale after a step, made or skipped. */
void ob_optimizer_rescale(struct onebit_optimizer *optimizer, uint64_t made, uint64_t skipped);

/* --- Metrics of a training (report.c): where ONEBIT_METRICS names a file, a row each
 * ONEBIT_METRICS_EVERY steps */

/* Opens the file where this rank writes one; optimizer->metrics is NULL where it does not.
 * ONEBIT_ERROR_ARGUMENT, ONEBIT_ERROR_FILE, ONEBIT_ERROR_MEMORY. */
onebit_status_t ob_metrics_open(onebit_optimizer_t optimizer);
/* Called when a step has ended with that status: writes a row if one is due. A failed call is no
 * step, and its error message is kept. If writing fails, this warns once, and writes no more. */
void ob_metrics_step(onebit_optimizer_t optimizer, float learning_rate, onebit_status_t status);
void ob_metrics_close(onebit_optimizer_t optimizer);

/* --- Functions that methods share (bucket.c) */

/* Returns the factors of step number `step` (from 1), except those that differ by piece. */
struct ob_pass_factors ob_factors_of(const struct onebit_optimizer *optimizer, uint64_t step);

/* Lion's, which are the same for all steps. */
struct ob_lion_factors ob_lion_factors_of(const struct onebit_optimizer *optimizer);

/* The bound of the steps on bits whose variance is not their own (ONEBIT_STEP_BOUND). */
float ob_step_bound(const struct onebit_optimizer *optimizer);

/* A pass of that step on the bucket: all that any pass needs. Steps are not bounded. */
struct ob_pass_sink ob_bucket_sink(const struct onebit_optimizer *optimizer,
                                   const struct ob_bucket *bucket, enum ob_pass_kind kind,
                                   uint64_t step);

/* Run one pass over one bucket; over all compressed buckets. */
onebit_status_t ob_bucket_pass(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                               enum ob_pass_kind kind, uint64_t step);
onebit_status_t ob_buckets_pass(struct onebit_optimizer *optimizer, enum ob_pass_kind kind,
                                uint64_t step);
/* Whatever is to be done for each of the latter. */
onebit_status_t ob_buckets_each(struct onebit_optimizer *optimizer,
                                onebit_status_t (*of)(struct onebit_optimizer *optimizer,
                                                      struct ob_bucket *bucket));

/* Applies the exchanges that were held. */
onebit_status_t ob_buckets_apply(struct onebit_optimizer *optimizer);

/* Fills in the usual call: it sends the momentum, and the pass `kind` applies the result. */
void ob_momentum_call(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                      enum ob_pass_kind kind, struct ob_call *call);
/* The call divides gradients by the root of this rank's own second moments, after bucket->sink is
 * set. */
void ob_moments_call(const struct onebit_optimizer *optimizer, const struct ob_bucket *bucket,
                     uint64_t step, struct ob_call *call);

/* The freeze (freeze.c), for methods that have a warm-up of dense steps. */

/* True if the warm-up is over. Without one, frozen_at stays 0. */
static inline bool ob_optimizer_is_frozen(const struct onebit_optimizer *optimizer) {
  return optimizer->frozen_at || optimizer->began_frozen;
}

/* The optimizer is in a warm-up of divided gradients, in which the host must know each step. */
bool ob_optimizer_divides(const struct onebit_optimizer *optimizer);

/* Returns the number of the warm-up's last step, unless the variance decides. */
size_t ob_freeze_last_step(const struct onebit_optimizer *optimizer);

/* Does the same, but if the step is found from the variance returns the latest step in which it can
 * be found. */
uint64_t ob_freeze_latest_step(const struct onebit_optimizer *optimizer);

/* True if the freeze should have come 1 / (1 - beta2) steps ago, or earlier: the variance lags. */
bool ob_freeze_is_late(const struct onebit_optimizer *optimizer);

/* Returns the kind of the next step's messages: unless the method says, bits once it is frozen, if
 * it compresses. */
enum ob_exchange ob_optimizer_exchange(const struct onebit_optimizer *optimizer);

/* Room for the norms, where the freeze is found from them. */
onebit_status_t ob_freeze_create(struct onebit_optimizer *optimizer);

/* Returns the sum of the variances that this rank keeps, from the latest pass. */
onebit_status_t ob_freeze_sum(struct onebit_optimizer *optimizer, double *sum);

/* Sets the residuals of the warm-up's exchange to zero, and returns their memory. */
onebit_status_t ob_freeze_forget_residuals(struct onebit_optimizer *optimizer,
                                           struct ob_bucket *bucket);

#endif
