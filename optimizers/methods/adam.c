/*
 * The functions of 1-bit Adam, and of 1-bit Adam with sharded state. With sharded state each rank
 * is the server of a shard: it receives gradients, and sends results computed from their mean to
 * all ranks:
 *
 *                    in                          the server                      back
 *   warm-up,         dense reduce-scatter        Adam on its shard               parameters, dense
 *   uncompressed
 *   STEP             reduce-scatter of bits      momentum, and the step          steps, in bits
 *   PARAMETERS       likewise                    momentum; moves its shard       parameters, dense
 *
 * After the exchange of gradients all ranks know that every gradient is finite, and nothing can
 * fail the step any more: compressed steps are in -1 .. 1, and parameters are sent as they are. So
 * the server changes its state before it sends results back, and never has to undo that. Without
 * the bound of 1 steps would grow and oscillate (docs/optimizers.md).
 */
#include <float.h>
#include <math.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/process.h"
#include "onebit/adam.h"
#include "optimizers/optimizer.h"

/* --- Sharded -----------------------------------------------------------------------------------*/

/* The automatic freeze needs the sum of the variances: each rank sends its shard's sum to all
 * ranks. A double is sent exactly as floats: three of its mantissa, one of its exponent. */

enum { PARTS = 4 };

struct own {
  onebit_plan_t sums; /* NULL: nothing needs the sums */
  float part[PARTS], *parts;
  double variance;
  double passed; /* seconds of the passes in this step */
};

static void split_double(double value, float parts[PARTS]) {
  int exponent;
  double remainder = frexp(value, &exponent);
  for (int k = 0; k < PARTS - 1; k++) {
    parts[k] = (float)remainder;
    remainder -= (double)parts[k];
  }
  parts[PARTS - 1] = (float)exponent;
}

static double join_double(const float parts[PARTS]) {
  return ldexp((double)parts[0] + (double)parts[1] + (double)parts[2], (int)parts[3]);
}

static onebit_status_t shards_create(struct onebit_optimizer *optimizer) {
  size_t ranks = (size_t)optimizer->comm->size;
  struct own *own = ob_optimizer_allocate(optimizer, 1, sizeof *own);
  optimizer->own = own;
  if (own)
    own->parts = ob_optimizer_allocate(optimizer, ranks * PARTS, sizeof *own->parts);
  onebit_status_t status = own && own->parts
                               ? ONEBIT_OK
                               : ob_error(ONEBIT_ERROR_MEMORY, "out of memory for %zu sums", ranks);
  OB_TRY(ob_agree(optimizer->comm, status, NULL, 0));
  if (optimizer->moments.freeze_step != ONEBIT_FREEZE_AUTOMATIC)
    return ONEBIT_OK;
  return ob_plan_create_numbers(optimizer->comm, ONEBIT_OK, ONEBIT_ALLGATHER, ONEBIT_DEVICE_HOST,
                                PARTS, &optimizer->refused, &own->sums);
}

static void shards_destroy(struct onebit_optimizer *optimizer) {
  struct own *own = optimizer->own;
  if (!own)
    return;
  onebit_plan_destroy(own->sums);
  ob_release(own->parts);
}

static onebit_plan_t adam_get_sums(const struct onebit_optimizer *optimizer) {
  const struct own *own = optimizer->own;
  return own->sums;
}

static double adam_get_variance(const struct onebit_optimizer *optimizer) {
  const struct own *own = optimizer->own;
  return own->variance;
}

/* --- Plans */

static bool bucket_sends_steps(const struct onebit_optimizer *optimizer,
                               const struct ob_bucket *bucket) {
  return optimizer->moments.shards == ONEBIT_SHARDS_STEP && !bucket->uncompressed;
}

/* Returns the shape of the plan by which servers send results: steps as compressed float32,
 * parameters in their own type. */
static struct ob_plan_shape make_shape_back(const struct ob_plan_shape *in, onebit_dtype_t dtype) {
  struct ob_plan_shape back = *in;
  back.options.operation = ONEBIT_ALLGATHER;
  back.options.dtype = back.output_dtype = dtype;
  return back;
}

static onebit_status_t adam_create_plans(struct onebit_optimizer *optimizer,
                                         struct ob_bucket *bucket, const struct ob_plan_shape *bits,
                                         const struct ob_plan_shape *dense, size_t count) {
  struct ob_plan_shape in = *bits, dense_in = *dense;
  in.of_segments = dense_in.of_segments = true;
  in.momentum = in.from_servers = false;
  in.options.operation = dense_in.options.operation = ONEBIT_REDUCE_SCATTER;
  struct ob_plan_shape steps = make_shape_back(&in, ONEBIT_FLOAT32);
  struct ob_plan_shape parameters = make_shape_back(&dense_in, optimizer->options.parameter_dtype);
  OB_TRY(ob_plan_create(optimizer->comm, ONEBIT_OK, &in, count, &bucket->bits));
  OB_TRY(ob_plan_create(optimizer->comm, ONEBIT_OK, &dense_in, count, &bucket->dense));
  if (bucket_sends_steps(optimizer, bucket))
    OB_TRY(ob_plan_create(optimizer->comm, ONEBIT_OK, &steps, count, &bucket->steps_back));
  OB_TRY(ob_plan_create(optimizer->comm, ONEBIT_OK, &parameters, count, &bucket->parameters_back));
  ob_plan_start_timing(bucket->parameters_back, ob_seconds);
  if (bucket->steps_back)
    ob_plan_start_timing(bucket->steps_back, ob_seconds);
  return ONEBIT_OK;
}

/* --- A step */

/* Sends gradients plus the residual of the gradients sent before. */
static void shards_call(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                        struct ob_call *call) {
  (void)bucket;
  call->hold = optimizer->bucket_count > 1;
}

static void run_pass_on_shard(struct ob_bucket *bucket, const struct ob_pass_sink *sink) {
  const struct ob_message_shape segment = {.first = bucket->first_block, .blocks = bucket->blocks};
  ob_pass_blocks(ob_plan_work(bucket->bits), NULL, NULL, &segment, sink);
}

static void shards_run_pass(const struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                            enum ob_pass_kind kind) {
  struct ob_pass_sink sink = ob_bucket_make_sink(optimizer, bucket, kind, optimizer->steps + 1);
  struct own *own = optimizer->own;
  double began = ob_seconds();
  run_pass_on_shard(bucket, &sink);
  own->passed += ob_seconds() - began;
}

/* Starts a call that sends results back; returns true if it has to be waited for. */
static bool shards_start_call(struct onebit_optimizer *optimizer, onebit_plan_t plan,
                              struct ob_call *call) {
  ob_constants_agree(optimizer, optimizer->step.learning_rate, "learning_rate", call);
  onebit_status_t status = ob_plan_start(plan, ob_step_outcome(optimizer), call);
  ob_step_note(optimizer, status);
  ob_engine_advance(optimizer->comm->engine);
  return status == ONEBIT_OK;
}

/* Sends the steps m^ / (sqrt(v^) + eps), which need no further factor. */
static void send_steps(struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  shards_run_pass(optimizer, bucket, OB_PASS_SHARD);
  bucket->sink = ob_bucket_make_sink(optimizer, bucket, OB_PASS_APPLY_STEP, optimizer->steps + 1);
  bucket->sink.factors.adam.momentum_factor = 1;
  struct ob_call call = {.source = {.factor = 1, .weight = 1},
                         .sink = &bucket->sink,
                         .shard = bucket->arrays[OB_SCRATCH]};
  bucket->started = shards_start_call(optimizer, bucket->steps_back, &call);
}

/* Updates the parameters of the shard, and sends them in place. */
static void send_parameters(struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  bool bits = ob_bucket_exchange(optimizer, bucket) == OB_EXCHANGE_BITS;
  shards_run_pass(optimizer, bucket, bits ? OB_PASS_SHARD_MOVE : OB_PASS_ADAM);
  struct ob_call call = {
      .source = {.inputs = (const void *const *)bucket->copies, .factor = 1, .weight = 1},
      .outputs = bucket->copies};
  bucket->started = shards_start_call(optimizer, bucket->parameters_back, &call);
}

static onebit_plan_t get_plan_of_steps_back(const struct onebit_optimizer *optimizer,
                                            const struct ob_bucket *bucket) {
  bool bits = ob_bucket_exchange(optimizer, bucket) == OB_EXCHANGE_BITS;
  return bits && bucket->steps_back ? bucket->steps_back : bucket->parameters_back;
}

/* Starts sending the sum of variances, if the freeze is not decided yet; returns true if it has to
 * be waited for. */
static bool send_sum(struct onebit_optimizer *optimizer) {
  struct own *own = optimizer->own;
  if (!own->sums || optimizer->frozen_at)
    return false;
  ob_step_note(optimizer, ob_freeze_sum_variances(optimizer, &own->variance));
  split_double(fmin(own->variance, DBL_MAX), own->part);
  struct ob_call call = ob_plan_call(own->sums, own->part, own->parts);
  return shards_start_call(optimizer, own->sums, &call);
}

static onebit_status_t wait_for_plan(struct onebit_optimizer *optimizer, onebit_plan_t plan) {
  bool bits = ob_plan_is_compressed(plan);
  optimizer->sent[bits ? OB_EXCHANGE_BITS : OB_EXCHANGE_DENSE] += ob_plan_wire_bytes(plan);
  return ob_step_note(optimizer, ob_plan_test(plan, true));
}

/* Adds the sums in the order of the ranks, so that all ranks get the same result. */
static void gather_sums(struct onebit_optimizer *optimizer) {
  struct own *own = optimizer->own;
  wait_for_plan(optimizer, own->sums);
  own->variance = 0;
  for (int r = 0; r < optimizer->comm->size; r++)
    own->variance += join_double(own->parts + (size_t)r * PARTS);
}

/* Subtracts the time of codecs and messages from the update's seconds, which include all work since
 * results began to be sent back, as step.c does. */
static void shards_count_times(struct onebit_optimizer *optimizer, double seconds) {
  const struct own *own = optimizer->own;
  struct ob_spent spent = {0};
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    const struct ob_spent its =
        ob_plan_read_spent(get_plan_of_steps_back(optimizer, &optimizer->buckets[u]));
    spent.compress += its.compress;
    spent.apply += its.apply;
  }
  double network = seconds - own->passed - spent.compress - spent.apply;
  network = network > 0 ? network : 0;
  optimizer->times.compress += spent.compress;
  optimizer->times.network += network;
  optimizer->times.update -= spent.compress + network;
}

static onebit_status_t shards_update(struct onebit_optimizer *optimizer) {
  struct own *own = optimizer->own;
  OB_TRY(ob_buckets_apply(optimizer));
  double began = ob_seconds();
  own->passed = 0;
  for (size_t u = optimizer->bucket_count; u-- > 0;) {
    struct ob_bucket *bucket = &optimizer->buckets[u];
    if (get_plan_of_steps_back(optimizer, bucket) == bucket->steps_back)
      send_steps(optimizer, bucket);
    else
      send_parameters(optimizer, bucket);
  }
  if (send_sum(optimizer))
    gather_sums(optimizer);
  for (size_t u = optimizer->bucket_count; u-- > 0;)
    if (optimizer->buckets[u].started)
      wait_for_plan(optimizer, get_plan_of_steps_back(optimizer, &optimizer->buckets[u]));
  shards_count_times(optimizer, ob_seconds() - began);
  return ob_step_outcome(optimizer);
}

/* Replaces variances by their reciprocals. The momentum does not change, since with sharded state
 * it is not stored in the residual. */
static onebit_status_t shards_freeze(struct onebit_optimizer *optimizer) {
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    struct ob_bucket *bucket = &optimizer->buckets[u];
    struct ob_pass_sink sink =
        ob_bucket_make_sink(optimizer, bucket, OB_PASS_FREEZE, optimizer->steps);
    sink.factors.adam.beta1 = 1;
    if (!bucket->uncompressed)
      run_pass_on_shard(bucket, &sink);
  }
  return ONEBIT_OK;
}

static const struct ob_method with_shards = {.name = "adam",
                                             .sharded = true,
                                             .arrays = OB_MASK(OB_MOMENTUM) | OB_MASK(OB_VARIANCE) |
                                                       OB_MASK(OB_SCRATCH),
                                             .create = shards_create,
                                             .plans = adam_create_plans,
                                             .sums = adam_get_sums,
                                             .variance = adam_get_variance,
                                             .call = shards_call,
                                             .update = shards_update,
                                             .freeze = shards_freeze,
                                             .destroy = shards_destroy};

/* Makes with_shards the recipe's method, or fails if other options do not allow it. */
static onebit_status_t shards_choose(struct ob_recipe *recipe) {
  const onebit_optimizer_options_t *common = &recipe->common;
  int shards = (int)recipe->moments.shards;
  recipe->method = &with_shards;
  if (recipe->moments.exchange == ONEBIT_ADAM_EXCHANGE_STEP)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "exchange is ONEBIT_ADAM_EXCHANGE_STEP, shards is %d: shards already decides "
                    "what is exchanged, so leave exchange 0",
                    shards);
  if (recipe->moments.shards == ONEBIT_SHARDS_STEP && common->parameter_dtype != ONEBIT_FLOAT32)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "shards is ONEBIT_SHARDS_STEP, parameter_dtype is %d: every rank adds steps to "
                    "parameters, which must be ONEBIT_FLOAT32",
                    (int)common->parameter_dtype);
  if (common->profile == ONEBIT_PROFILE_DEEPSPEED)
    return ob_error(
        ONEBIT_ERROR_UNSUPPORTED,
        "profile is ONEBIT_PROFILE_DEEPSPEED, shards is %d: DeepSpeed's 1-bit Adam has no shards",
        shards);
  if (common->schedule == ONEBIT_SCHEDULE_HIERARCHICAL)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "schedule is ONEBIT_SCHEDULE_HIERARCHICAL, shards is %d: shards support "
                    "ONEBIT_SCHEDULE_EXCHANGE only",
                    shards);
  if (common->device != ONEBIT_DEVICE_HOST)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED, "device is %d, shards is %d: shards need host memory",
                    (int)common->device, shards);
  return ONEBIT_OK;
}

/* --- Not sharded -------------------------------------------------------------------------------*/

static bool adam_sends_step(const struct onebit_optimizer *optimizer) {
  return optimizer->moments.exchange == ONEBIT_ADAM_EXCHANGE_STEP;
}

static void adam_call(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                      struct ob_call *call) {
  ob_fill_momentum_call(optimizer, bucket,
                        adam_sends_step(optimizer) ? OB_PASS_APPLY_STEP : OB_PASS_APPLY, call);
  bucket->sink.factors.bound = ob_step_bound(optimizer);
  if (adam_sends_step(optimizer))
    call->source.reciprocals = bucket->arrays[OB_VARIANCE];
}

/* Applies a step. A single rank, which does not compress, also keeps the variance frozen
 * after the freeze. */
static onebit_status_t adam_update(struct onebit_optimizer *optimizer) {
  OB_TRY(ob_buckets_apply(optimizer));
  if (optimizer->step.exchange == OB_EXCHANGE_DENSE)
    OB_TRY(ob_buckets_run_pass(optimizer, optimizer->frozen_at ? OB_PASS_FROZEN : OB_PASS_ADAM,
                               optimizer->steps + 1));
  return ONEBIT_OK;
}

static onebit_status_t adam_freeze(struct onebit_optimizer *optimizer) {
  bool step = adam_sends_step(optimizer) && ob_optimizer_compresses(optimizer);
  return ob_buckets_run_pass(optimizer, step ? OB_PASS_FREEZE_STEP : OB_PASS_FREEZE,
                             optimizer->steps);
}

/* --- The methods' rows -------------------------------------------------------------------------*/

#define OPTIONS onebit_adam_options_t
static const struct ob_option options_of[] = {
    OB_ADAM_OPTIONS,
    OB_FREEZE_OPTIONS,
    OB_CHOICE(exchange, ONEBIT_ADAM_EXCHANGE_STEP, "onebit_adam_exchange_t"),
    OB_CHOICE(shards, ONEBIT_SHARDS_PARAMETERS, "onebit_shards_t"),
};

static onebit_status_t adam_resolve(struct ob_recipe *recipe, size_t ntensors) {
  (void)ntensors;
  return recipe->moments.shards == ONEBIT_SHARDS_NONE ? ONEBIT_OK : shards_choose(recipe);
}

const struct ob_method ob_method_adam = {.name = "adam",
                                         OB_OPTIONS("ONEBIT_ADAM_OPTIONS_INIT", options_of),
                                         .recommended =
                                             "Efficient-Adam (onebit_efficient_adam_create)",
                                         .resolve = adam_resolve,
                                         .momentum = true,
                                         .arrays = OB_MASK(OB_VARIANCE),
                                         .dense_pass = OB_PASS_ADAM,
                                         .call = adam_call,
                                         .update = adam_update,
                                         .freeze = adam_freeze};

OB_METHOD_CREATE(adam)
