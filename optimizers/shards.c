/*
 * 1-bit Adam whose state is sharded. Gradients go to the server of each share, and what it makes of
 * their mean comes back to all:
 *
 *                    in                          the server                      back
 *   warm-up,         dense reduce-scatter        Adam on its share               parameters, dense
 *   uncompressed
 *   STEP             reduce-scatter of bits      momentum; step in scratch       steps, in bits
 *   PARAMETERS       likewise                    momentum; moves its share       parameters, dense
 *
 * What changes when. After the exchange in, all ranks know that every gradient is sound. Whatever
 * brings parameters back moves them as they are, so nothing is left to spoil it, and the server
 * changes its state at once. A step in bits may yet overflow: then all ranks skip, and until that
 * is decided the kept errors of both exchanges, the momentum and the parameters are the old ones.
 */
#include <float.h>
#include <math.h>

#include "base/error.h"
#include "base/memory.h"
#include "optimizers/optimizer.h"

/* --- The sum of the variances, for a freeze that is found from it: each rank tells all the others
 * that of its share. A double as floats, exactly: three of its mantissa, one of its exponent. */

enum { PARTS = 4 };

struct sums {
  onebit_plan_t plan; /* NULL: nobody asks */
  float own[PARTS], *all;
  double sum;
};

static void split(double value, float parts[PARTS]) {
  int exponent;
  double rest = frexp(value, &exponent);
  for (int k = 0; k < PARTS - 1; k++) {
    parts[k] = (float)rest;
    rest -= (double)parts[k];
  }
  parts[PARTS - 1] = (float)exponent;
}

static double join(const float parts[PARTS]) {
  return ldexp((double)parts[0] + (double)parts[1] + (double)parts[2], (int)parts[3]);
}

static onebit_status_t create_plan(struct onebit_optimizer *optimizer, struct sums *sums) {
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  struct ob_plan_shape shape;
  size_t count, valid;
  options.operation = ONEBIT_ALLGATHER;
  options.wire = ONEBIT_WIRE_DENSE;
  options.threads = 1;
  onebit_status_t status = ob_plan_resolve(&options, &shape);
  ob_plan_cut(&shape, 1, PARTS, &count, &valid);
  OB_TRY(ob_plan_create(optimizer->comm, status, &shape, PARTS, &sums->plan));
  sums->plan->inputs[0] = sums->own;
  for (int r = 0; r < optimizer->comm->size; r++)
    sums->plan->outputs[r] = sums->all + (size_t)r * PARTS;
  return ONEBIT_OK;
}

static onebit_status_t create(struct onebit_optimizer *optimizer) {
  size_t ranks = (size_t)optimizer->comm->size;
  struct sums *sums = ob_optimizer_take(optimizer, 1, sizeof *sums);
  optimizer->own = sums;
  if (sums)
    sums->all = ob_optimizer_take(optimizer, ranks * PARTS, sizeof *sums->all);
  onebit_status_t status = sums && sums->all
                               ? ONEBIT_OK
                               : ob_error(ONEBIT_ERROR_MEMORY, "no memory for %zu sums", ranks);
  OB_TRY(ob_agree(optimizer->comm, status, NULL, 0));
  if (optimizer->moments.freeze_step != ONEBIT_FREEZE_AUTOMATIC)
    return ONEBIT_OK;
  return create_plan(optimizer, sums);
}

static void destroy(struct onebit_optimizer *optimizer) {
  struct sums *sums = optimizer->own;
  if (!sums)
    return;
  onebit_plan_destroy(sums->plan);
  ob_release(sums->all);
}

onebit_plan_t ob_shards_sums(const struct onebit_optimizer *optimizer) {
  const struct sums *sums = optimizer->own;
  return sums->plan;
}

double ob_shards_variance(const struct onebit_optimizer *optimizer) {
  const struct sums *sums = optimizer->own;
  return sums->sum;
}

/* --- Plans and options */

onebit_status_t ob_shards_check(const onebit_adam_options_t *options) {
  const onebit_optimizer_options_t *common = &options->common;
  int shards = (int)options->shards;
  if (options->exchange == ONEBIT_ADAM_EXCHANGE_STEP)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "exchange is ONEBIT_ADAM_EXCHANGE_STEP, shards is %d, which says what is "
                    "exchanged: leave exchange 0",
                    shards);
  if (options->shards == ONEBIT_SHARDS_STEP && common->parameter_dtype != ONEBIT_FLOAT32)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "shards is ONEBIT_SHARDS_STEP, parameter_dtype is %d: every rank adds steps to "
                    "parameters, which must be ONEBIT_FLOAT32",
                    (int)common->parameter_dtype);
  if (common->profile == ONEBIT_PROFILE_DEEPSPEED)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "profile is ONEBIT_PROFILE_DEEPSPEED, shards is %d: DeepSpeed has no such "
                    "1-bit Adam",
                    shards);
  if (common->schedule == ONEBIT_SCHEDULE_HIERARCHICAL)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "schedule is ONEBIT_SCHEDULE_HIERARCHICAL, shards is %d: shares have the "
                    "exchange only",
                    shards);
  if (common->device != ONEBIT_DEVICE_HOST)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "device is %d, shards is %d: shares are for memory of the host",
                    (int)common->device, shards);
  return ONEBIT_OK;
}

static bool sends_steps(const struct onebit_optimizer *optimizer, const struct ob_unit *unit) {
  return optimizer->moments.shards == ONEBIT_SHARDS_STEP && !unit->uncompressed;
}

/* What servers send back: float32 steps that are compressed, parameters in their own type. */
static struct ob_plan_shape shape_back(const struct ob_plan_shape *in, onebit_dtype_t dtype) {
  struct ob_plan_shape back = *in;
  back.options.operation = ONEBIT_ALLGATHER;
  back.options.dtype = back.output_dtype = dtype;
  return back;
}

onebit_status_t ob_shards_plans(struct onebit_optimizer *optimizer, struct ob_unit *unit,
                                const struct ob_plan_shape *bits, const struct ob_plan_shape *dense,
                                size_t count) {
  struct ob_plan_shape in = *bits, dense_in = *dense;
  in.of_shares = dense_in.of_shares = true;
  in.momentum = in.served = false;
  in.options.operation = dense_in.options.operation = ONEBIT_REDUCE_SCATTER;
  struct ob_plan_shape steps = shape_back(&in, ONEBIT_FLOAT32);
  struct ob_plan_shape parameters = shape_back(&dense_in, optimizer->options.parameter_dtype);
  OB_TRY(ob_plan_create(optimizer->comm, ONEBIT_OK, &in, count, &unit->bits));
  OB_TRY(ob_plan_create(optimizer->comm, ONEBIT_OK, &dense_in, count, &unit->dense));
  if (sends_steps(optimizer, unit))
    OB_TRY(ob_plan_create(optimizer->comm, ONEBIT_OK, &steps, count, &unit->steps_back));
  return ob_plan_create(optimizer->comm, ONEBIT_OK, &parameters, count, &unit->parameters_back);
}

/* --- A step */

static enum ob_exchange exchange(const struct onebit_optimizer *optimizer) {
  return optimizer->frozen_at ? OB_EXCHANGE_BITS : OB_EXCHANGE_DENSE;
}

/* Gradients, with the error of what was sent of them. */
static void call(struct onebit_optimizer *optimizer, struct ob_unit *unit, struct ob_call *call) {
  (void)optimizer, (void)unit;
  call->hold = true;
}

static void pass_share(struct ob_unit *unit, const struct ob_pass_sink *sink) {
  const struct ob_message_shape share = {.first = unit->first_block, .blocks = unit->blocks};
  ob_pass_blocks(&unit->bits->work, NULL, NULL, &share, sink);
}

static void pass(const struct onebit_optimizer *optimizer, struct ob_unit *unit,
                 enum ob_pass_kind kind) {
  struct ob_pass_sink sink = ob_unit_sink(optimizer, unit, kind, optimizer->steps + 1);
  pass_share(unit, &sink);
}

/* Starts a call of the way back; true if it has to be waited for. */
static bool start(struct onebit_optimizer *optimizer, onebit_plan_t plan, struct ob_call *call) {
  call->agreed = ob_bits_of(optimizer->step.learning_rate);
  call->agreed_name = "learning_rate";
  onebit_status_t status = ob_plan_start(plan, ob_step_outcome(optimizer), call);
  ob_step_note(optimizer, status);
  ob_engine_advance(optimizer->comm->engine);
  return status == ONEBIT_OK;
}

/* The server's step is m^ / (sqrt(v^) + eps), whose error it keeps. What comes back is that, and no
 * factor has to be added. */
static void start_steps(struct onebit_optimizer *optimizer, struct ob_unit *unit) {
  ob_plan_visit(unit->bits, NULL);
  pass(optimizer, unit, OB_PASS_SHARE);
  unit->sink = ob_unit_sink(optimizer, unit, OB_PASS_APPLY_STEP, optimizer->steps + 1);
  struct ob_call call = {.source = {.factor = 1,
                                    .weight = unit->sink.factors.adam.momentum_factor,
                                    .reciprocals = unit->arrays[OB_VARIANCE]},
                         .sink = &unit->sink,
                         .share = unit->arrays[OB_SCRATCH],
                         .hold = optimizer->unit_count > 1};
  unit->sink.factors.adam.momentum_factor = 1;
  unit->started = start(optimizer, unit->steps_back, &call);
}

/* The step stands: what it was made from becomes the state. */
static void accept_steps(struct ob_unit *unit) {
  float *momentum = unit->arrays[OB_SCRATCH];
  if (unit->steps_back->call.hold)
    ob_plan_apply(unit->steps_back);
  ob_plan_commit(unit->bits);
  unit->arrays[OB_SCRATCH] = unit->arrays[OB_MOMENTUM];
  unit->arrays[OB_MOMENTUM] = momentum;
}

static bool goes_by_steps(const struct onebit_optimizer *optimizer, const struct ob_unit *unit) {
  return unit->steps_back && ob_unit_exchange(optimizer, unit) == OB_EXCHANGE_BITS;
}

static onebit_status_t exchange_steps(struct onebit_optimizer *optimizer) {
  for (size_t u = optimizer->unit_count; u-- > 0;)
    if (goes_by_steps(optimizer, &optimizer->units[u]))
      start_steps(optimizer, &optimizer->units[u]);
  for (size_t u = optimizer->unit_count; u-- > 0;) {
    struct ob_unit *unit = &optimizer->units[u];
    if (goes_by_steps(optimizer, unit) && unit->started)
      ob_step_note(optimizer, ob_plan_test(unit->steps_back, true));
  }
  OB_TRY(ob_step_outcome(optimizer));
  for (size_t u = 0; u < optimizer->unit_count; u++)
    if (goes_by_steps(optimizer, &optimizer->units[u]))
      accept_steps(&optimizer->units[u]);
  return ONEBIT_OK;
}

/* Parameters go back from where they lie, and come to where they lie. */
static void start_parameters(struct onebit_optimizer *optimizer, struct ob_unit *unit) {
  bool bits = ob_unit_exchange(optimizer, unit) == OB_EXCHANGE_BITS;
  if (bits) {
    ob_plan_visit(unit->bits, NULL);
    ob_plan_commit(unit->bits);
  }
  pass(optimizer, unit, bits ? OB_PASS_SHARE_MOVE : OB_PASS_ADAM);
  struct ob_call call = {
      .source = {.inputs = (const void *const *)unit->copies, .factor = 1, .weight = 1},
      .outputs = unit->copies};
  unit->started = start(optimizer, unit->parameters_back, &call);
}

/* While the freeze is looked for. */
static bool start_sums(struct onebit_optimizer *optimizer) {
  struct sums *sums = optimizer->own;
  if (!sums->plan || optimizer->frozen_at)
    return false;
  ob_step_note(optimizer, ob_freeze_sum(optimizer, &sums->sum));
  split(fmin(sums->sum, DBL_MAX), sums->own);
  struct ob_call call = {.source = {.inputs = sums->plan->inputs, .factor = 1, .weight = 1},
                         .outputs = sums->plan->outputs};
  return start(optimizer, sums->plan, &call);
}

/* In the order of the ranks, so that all come to the same one. */
static void finish_sums(struct onebit_optimizer *optimizer) {
  struct sums *sums = optimizer->own;
  ob_step_note(optimizer, ob_plan_test(sums->plan, true));
  sums->sum = 0;
  for (int r = 0; r < optimizer->comm->size; r++)
    sums->sum += join(sums->all + (size_t)r * PARTS);
}

static onebit_status_t exchange_parameters(struct onebit_optimizer *optimizer) {
  for (size_t u = optimizer->unit_count; u-- > 0;)
    if (!goes_by_steps(optimizer, &optimizer->units[u]))
      start_parameters(optimizer, &optimizer->units[u]);
  if (start_sums(optimizer))
    finish_sums(optimizer);
  for (size_t u = optimizer->unit_count; u-- > 0;) {
    struct ob_unit *unit = &optimizer->units[u];
    if (!goes_by_steps(optimizer, unit) && unit->started)
      ob_step_note(optimizer, ob_plan_test(unit->parameters_back, true));
  }
  return ob_step_outcome(optimizer);
}

/* Uncompressed tensors move when it is sure that the others will. */
static onebit_status_t update(struct onebit_optimizer *optimizer) {
  OB_TRY(exchange_steps(optimizer));
  return exchange_parameters(optimizer);
}

/* The variance becomes a reciprocal; the momentum stays what it is: it is no kept value here. */
static onebit_status_t advance(struct onebit_optimizer *optimizer) {
  bool due;
  OB_TRY(ob_freeze_is_due(optimizer, &due));
  if (!due)
    return ONEBIT_OK;
  for (size_t u = 0; u < optimizer->unit_count; u++) {
    struct ob_unit *unit = &optimizer->units[u];
    struct ob_pass_sink sink = ob_unit_sink(optimizer, unit, OB_PASS_FREEZE, optimizer->steps);
    sink.factors.adam.beta1 = 1;
    if (!unit->uncompressed)
      pass_share(unit, &sink);
  }
  optimizer->frozen_at = optimizer->steps;
  return ONEBIT_OK;
}

const struct ob_method ob_method_shards = {.name = "adam",
                                           .sharded = true,
                                           .arrays = OB_MASK(OB_MOMENTUM) | OB_MASK(OB_VARIANCE) |
                                                     OB_MASK(OB_SCRATCH),
                                           .create = create,
                                           .exchange = exchange,
                                           .call = call,
                                           .update = update,
                                           .advance = advance,
                                           .destroy = destroy};
