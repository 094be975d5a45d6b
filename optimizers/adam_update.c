/* What a step of 1-bit Adam computes once the exchange is through, and the freeze. */
#include <math.h>

#include "base/error.h"
#include "optimizers/adam.h"

struct ob_adam_factors ob_adam_factors_of(const struct onebit_optimizer *optimizer, uint64_t step) {
  const onebit_adam_options_t *options = &optimizer->options;
  struct ob_adam_factors factors = {
      .beta1 = (float)options->beta1,
      .beta2 = (float)options->beta2,
      .one_minus_beta1 = (float)(1 - options->beta1),
      .one_minus_beta2 = (float)(1 - options->beta2),
      .momentum_factor = 1,
      .variance_factor = 1,
      .epsilon = (float)options->epsilon,
  };
  if (!options->no_bias_correction) {
    factors.momentum_factor = ob_adam_momentum_factor(options->beta1, step);
    factors.variance_factor = ob_adam_variance_factor(options->beta2, step);
  }
  return factors;
}

static float *momentum_of(const struct ob_adam_unit *unit) {
  return unit->bits->worker.values[unit->bits->worker.now];
}

/* What the blocks of a unit need in a local pass. */
struct pass {
  struct ob_adam_unit *unit;
  struct ob_adam_factors factors;
  bool keep_zero; /* an element without variance does not move */
};

static void adam_body(void *context, size_t first, size_t end, int thread) {
  struct pass *pass = context;
  struct ob_adam_unit *unit = pass->unit;
  const struct ob_layout *layout = &unit->bits->layout;
  size_t piece = 0;
  (void)thread;
  for (size_t b = first; b < end; b++) {
    struct ob_block block = ob_layout_block(layout, b, &piece);
    const struct ob_piece *at = &layout->piece[block.piece];
    const float *mean = unit->means[block.piece];
    struct ob_adam_run run = {
        .count = block.valid,
        .gradient = mean + (block.word - at->first_word) * OB_LANES,
        .momentum = momentum_of(unit) + block.word * OB_LANES,
        .variance = unit->variance + block.word * OB_LANES,
        .parameter = unit->parameters[block.piece] + block.offset,
        .factors = pass->factors,
        .learning_rate = unit->learning_rates[block.piece],
        .weight_decay = unit->weight_decays[block.piece],
    };
    unit->block_sums[b] = block.valid ? (double)unit->bits->work.codec->adam(&run) : 0;
  }
}

/* The variance is frozen, so only its reciprocal root is needed; the momentum becomes, as a kept
 * value, all that the first compressed step wants of it: beta1 * m, sent with scale 0. */
static void freeze_body(void *context, size_t first, size_t end, int thread) {
  struct pass *pass = context;
  struct ob_adam_unit *unit = pass->unit;
  size_t piece = 0;
  (void)thread;
  for (size_t b = first; b < end; b++) {
    struct ob_block block = ob_layout_block(&unit->bits->layout, b, &piece);
    float *momentum = momentum_of(unit) + block.word * OB_LANES;
    float *variance = unit->variance + block.word * OB_LANES;
    for (size_t i = 0; i < block.count; i++) {
      momentum[i] = pass->factors.beta1 * momentum[i];
      variance[i] = ob_adam_reciprocal(variance[i], pass->keep_zero, &pass->factors);
    }
  }
}

/* The frozen step of a rank that does not compress: its momentum stays a float array, already times
 * beta1. */
static void frozen_body(void *context, size_t first, size_t end, int thread) {
  struct pass *pass = context;
  struct ob_adam_unit *unit = pass->unit;
  const struct ob_layout *layout = &unit->bits->layout;
  size_t piece = 0;
  (void)thread;
  for (size_t b = first; b < end; b++) {
    struct ob_block block = ob_layout_block(layout, b, &piece);
    size_t within = (block.word - layout->piece[block.piece].first_word) * OB_LANES;
    const float *mean = (const float *)unit->means[block.piece] + within;
    float *momentum = momentum_of(unit) + block.word * OB_LANES;
    const float *reciprocal = unit->variance + block.word * OB_LANES;
    float *parameter = unit->parameters[block.piece] + block.offset;
    for (size_t i = 0; i < block.valid; i++) {
      float m = ob_adam_frozen_momentum(momentum[i], mean[i], &pass->factors);
      parameter[i] =
          ob_adam_parameter(parameter[i], m * reciprocal[i], unit->learning_rates[block.piece],
                            unit->weight_decays[block.piece]);
      momentum[i] = pass->factors.beta1 * m;
    }
  }
}

static onebit_status_t pass_on_host(struct onebit_optimizer *optimizer, struct ob_adam_unit *unit,
                                    enum ob_adam_pass kind, uint64_t step) {
  static void (*const bodies[])(void *, size_t, size_t, int) = {
      [OB_ADAM_STEP] = adam_body, [OB_ADAM_FREEZE] = freeze_body, [OB_ADAM_FROZEN] = frozen_body};
  struct pass pass = {unit, ob_adam_factors_of(optimizer, step),
                      optimizer->options.profile != ONEBIT_PROFILE_DEEPSPEED};
  ob_parallel(unit->bits->work.threads, 0, unit->bits->layout.blocks, bodies[kind], &pass);
  return ONEBIT_OK;
}

static onebit_status_t norm_on_host(struct onebit_optimizer *optimizer, struct ob_adam_unit *unit,
                                    double *norm) {
  (void)optimizer;
  *norm = 0;
  for (size_t b = 0; b < unit->bits->layout.blocks; b++)
    *norm += unit->block_sums[b];
  return ONEBIT_OK;
}

static onebit_status_t check_on_host(const char *name, const void *array) {
  return ob_place_check_host(NULL, name, array);
}

static onebit_status_t no_unit(struct onebit_optimizer *optimizer, struct ob_adam_unit *unit) {
  (void)optimizer, (void)unit;
  return ONEBIT_OK;
}

static void nothing(struct ob_adam_unit *unit) { (void)unit; }

static onebit_status_t no_call(struct onebit_optimizer *optimizer, struct ob_adam_unit *unit,
                               struct ob_call *call) {
  (void)optimizer, (void)unit, (void)call;
  return ONEBIT_OK;
}

static onebit_status_t no_join(struct onebit_optimizer *optimizer, bool bits) {
  (void)optimizer, (void)bits;
  return ONEBIT_OK;
}

static onebit_status_t not_needed(struct onebit_optimizer *optimizer) {
  (void)optimizer;
  return ONEBIT_OK;
}

const struct ob_adam_place ob_adam_place_host = {.check = check_on_host,
                                                 .create = no_unit,
                                                 .destroy = nothing,
                                                 .prepare = no_call,
                                                 .join = no_join,
                                                 .pass = pass_on_host,
                                                 .norm = norm_on_host,
                                                 .finish = not_needed,
                                                 .wait = not_needed};

static onebit_status_t run_pass(struct onebit_optimizer *optimizer, enum ob_adam_pass kind,
                                uint64_t step) {
  for (size_t u = 0; u < optimizer->unit_count; u++)
    OB_TRY(optimizer->place->pass(optimizer, &optimizer->units[u], kind, step));
  return ONEBIT_OK;
}

/* The variance's norm after the latest step, with its bias correction. */
static onebit_status_t variance_norm(struct onebit_optimizer *optimizer, double *norm) {
  double of_unit, root = (double)ob_adam_factors_of(optimizer, optimizer->steps).variance_factor;
  *norm = 0;
  for (size_t u = 0; u < optimizer->unit_count; u++) {
    OB_TRY(optimizer->place->norm(optimizer, &optimizer->units[u], &of_unit));
    *norm += of_unit;
  }
  *norm *= root * root;
  return ONEBIT_OK;
}

/* Remembers the variance's norm, and says whether it has settled: whether it changed by less than
 * the threshold in the last `window` steps. */
static onebit_status_t settled(struct onebit_optimizer *optimizer, bool *yes) {
  double norm, threshold = optimizer->options.freeze_threshold;
  OB_TRY(variance_norm(optimizer, &norm));
  double *slot = &optimizer->norms[optimizer->steps % optimizer->window], before = *slot;
  *slot = norm;
  *yes = false;
  if (optimizer->steps <= optimizer->window)
    return ONEBIT_OK;
  optimizer->variance_ratio = norm > 0 ? before / norm : 0;
  *yes = optimizer->variance_ratio >= threshold && optimizer->variance_ratio <= 1 / threshold;
  return ONEBIT_OK;
}

/* DeepSpeed counts a first call that makes no step. */
size_t ob_adam_last_of_warmup(const struct onebit_optimizer *optimizer) {
  size_t wanted = optimizer->options.freeze_step;
  if (optimizer->options.profile == ONEBIT_PROFILE_DEEPSPEED && wanted != ONEBIT_FREEZE_NEVER)
    wanted = wanted > 2 ? wanted - 1 : 1;
  return wanted;
}

onebit_status_t ob_adam_freeze(struct onebit_optimizer *optimizer) {
  bool now = optimizer->steps == ob_adam_last_of_warmup(optimizer);
  if (optimizer->frozen_at)
    return ONEBIT_OK;
  if (optimizer->options.freeze_step == ONEBIT_FREEZE_AUTOMATIC)
    OB_TRY(settled(optimizer, &now));
  if (!now)
    return ONEBIT_OK;
  OB_TRY(run_pass(optimizer, OB_ADAM_FREEZE, optimizer->steps));
  optimizer->frozen_at = optimizer->steps;
  return ONEBIT_OK;
}

/* Exchanges that were held: of one unit they were not, where the host knows how they ended. */
static onebit_status_t apply(struct onebit_optimizer *optimizer, bool bits) {
  OB_TRY(optimizer->place->join(optimizer, bits));
  for (size_t u = 0; u < optimizer->unit_count; u++) {
    onebit_plan_t plan = bits ? optimizer->units[u].bits : optimizer->units[u].dense;
    if (plan->call.hold)
      ob_plan_apply(plan);
  }
  return ONEBIT_OK;
}

onebit_status_t ob_adam_update(struct onebit_optimizer *optimizer) {
  uint64_t step = optimizer->steps + 1;
  bool bits = optimizer->frozen_at && ob_adam_compresses(optimizer);
  OB_TRY(apply(optimizer, bits));
  if (!bits)
    OB_TRY(run_pass(optimizer, optimizer->frozen_at ? OB_ADAM_FROZEN : OB_ADAM_STEP, step));
  optimizer->steps = step;
  if (optimizer->deferred)
    optimizer->unknown++;
  else
    OB_TRY(ob_adam_freeze(optimizer));
  return optimizer->place->finish(optimizer);
}
