/* One step of 1-bit Adam, in both stages, and the freeze between them. */
#include <math.h>

#include "base/error.h"
#include "optimizers/adam.h"

/* The step's factors, for step number `step`, the first being 1. */
static struct ob_adam_factors factors_of(const struct onebit_optimizer *optimizer, uint64_t step) {
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
    factors.momentum_factor = (float)(1 / (1 - pow(options->beta1, (double)step)));
    factors.variance_factor = (float)(1 / sqrt(1 - pow(options->beta2, (double)step)));
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
      bool still = pass->keep_zero && variance[i] == 0;
      momentum[i] = pass->factors.beta1 * momentum[i];
      variance[i] = still ? 0 : 1 / ob_adam_denominator(variance[i], &pass->factors);
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
      float m = momentum[i] + pass->factors.one_minus_beta1 * mean[i];
      parameter[i] =
          ob_adam_parameter(parameter[i], m * reciprocal[i], unit->learning_rates[block.piece],
                            unit->weight_decays[block.piece]);
      momentum[i] = pass->factors.beta1 * m;
    }
  }
}

static void run_pass(struct onebit_optimizer *optimizer, uint64_t step,
                     void (*body)(void *context, size_t first, size_t end, int thread)) {
  for (size_t u = 0; u < optimizer->unit_count; u++) {
    struct ob_adam_unit *unit = &optimizer->units[u];
    struct pass pass = {unit, factors_of(optimizer, step),
                        optimizer->options.profile != ONEBIT_PROFILE_DEEPSPEED};
    ob_parallel(unit->bits->work.threads, 0, unit->bits->layout.blocks, body, &pass);
  }
}

/* Remembers the variance's norm, and says whether it has settled: whether it changed by less than
 * the threshold in the last `window` steps. */
static bool settled(struct onebit_optimizer *optimizer, uint64_t step) {
  double norm = 0, root = (double)factors_of(optimizer, step).variance_factor;
  for (size_t u = 0; u < optimizer->unit_count; u++)
    for (size_t b = 0; b < optimizer->units[u].bits->layout.blocks; b++)
      norm += optimizer->units[u].block_sums[b];
  norm *= root * root; /* the bias correction of the variance */
  double *slot = &optimizer->norms[step % optimizer->window], before = *slot;
  *slot = norm;
  if (step <= optimizer->window)
    return false;
  double threshold = optimizer->options.freeze_threshold;
  optimizer->variance_ratio = norm > 0 ? before / norm : 0;
  return optimizer->variance_ratio >= threshold && optimizer->variance_ratio <= 1 / threshold;
}

static bool freezes_after(struct onebit_optimizer *optimizer, uint64_t step) {
  size_t wanted = optimizer->options.freeze_step;
  if (wanted == ONEBIT_FREEZE_AUTOMATIC)
    return settled(optimizer, step);
  if (optimizer->options.profile == ONEBIT_PROFILE_DEEPSPEED && wanted != ONEBIT_FREEZE_NEVER)
    wanted = wanted > 2 ? wanted - 1 : 1;
  return step == wanted;
}

/* The mean of the gradients, of all units, or of none: a negative status leaves everything but
 * scratch untouched. */
static onebit_status_t average_gradients(struct onebit_optimizer *optimizer,
                                         onebit_status_t status) {
  onebit_status_t result = ONEBIT_OK;
  for (size_t u = 0; u < optimizer->unit_count; u++) {
    struct ob_adam_unit *unit = &optimizer->units[u];
    struct ob_call call = {.source = {.inputs = unit->gradients},
                           .outputs = unit->means,
                           .agreed = ob_bits_of(optimizer->learning_rate),
                           .agreed_name = "learning_rate"};
    onebit_status_t one = ob_plan_start(unit->dense, status, &call);
    if (one == ONEBIT_OK)
      one = ob_plan_test(unit->dense, true);
    if (result == ONEBIT_OK) /* the ranks agree on each unit, so they agree on the first */
      result = one;
  }
  return result;
}

static onebit_status_t warmup_step(struct onebit_optimizer *optimizer, onebit_status_t status) {
  OB_TRY(average_gradients(optimizer, status));
  uint64_t step = optimizer->steps + 1;
  run_pass(optimizer, step, adam_body);
  if (freezes_after(optimizer, step)) {
    run_pass(optimizer, step, freeze_body);
    optimizer->frozen_at = step;
  }
  return ONEBIT_OK;
}

static onebit_status_t frozen_step(struct onebit_optimizer *optimizer, onebit_status_t status) {
  OB_TRY(average_gradients(optimizer, status));
  run_pass(optimizer, optimizer->steps + 1, frozen_body);
  return ONEBIT_OK;
}

/* Exchanges a unit's momentum; when there are several units nothing is applied until all are known
 * to be well. */
static onebit_status_t exchange(struct onebit_optimizer *optimizer, struct ob_adam_unit *unit,
                                onebit_status_t status) {
  struct ob_adam_factors factors = factors_of(optimizer, optimizer->steps + 1);
  unit->sink = (struct ob_adam_sink){.parameters = unit->parameters,
                                     .reciprocals = unit->variance,
                                     .learning_rates = unit->learning_rates,
                                     .weight_decays = unit->weight_decays,
                                     .momentum_factor = factors.momentum_factor};
  struct ob_call call = {.source = {.inputs = unit->gradients,
                                    .momentum = true,
                                    .beta1 = factors.beta1,
                                    .one_minus_beta1 = factors.one_minus_beta1},
                         .adam = &unit->sink,
                         .agreed = ob_bits_of(optimizer->learning_rate),
                         .agreed_name = "learning_rate",
                         .hold = optimizer->unit_count > 1};
  OB_TRY(ob_plan_start(unit->bits, status, &call));
  return ob_plan_test(unit->bits, true);
}

static onebit_status_t compressed_step(struct onebit_optimizer *optimizer, onebit_status_t status) {
  onebit_status_t result = ONEBIT_OK;
  for (size_t u = 0; u < optimizer->unit_count; u++) {
    onebit_status_t one = exchange(optimizer, &optimizer->units[u], status);
    if (result == ONEBIT_OK)
      result = one;
  }
  for (size_t u = 0; optimizer->unit_count > 1 && result == ONEBIT_OK && u < optimizer->unit_count;
       u++)
    ob_plan_apply(optimizer->units[u].bits);
  return result;
}

static void set_learning_rates(struct onebit_optimizer *optimizer, float learning_rate) {
  optimizer->learning_rate = learning_rate;
  for (size_t u = 0; u < optimizer->unit_count; u++) {
    struct ob_adam_unit *unit = &optimizer->units[u];
    for (size_t k = 0; k < unit->bits->layout.pieces; k++)
      unit->learning_rates[k] = learning_rate * unit->factors[k];
  }
}

onebit_status_t onebit_optimizer_step(onebit_optimizer_t optimizer, float learning_rate) {
  if (!optimizer)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "optimizer is NULL");
  onebit_status_t status = ONEBIT_OK;
  if (!(learning_rate >= 0) || isinf(learning_rate))
    status = ob_error(ONEBIT_ERROR_ARGUMENT, "learning_rate is %g, not a finite number from 0 on",
                      (double)learning_rate);
  set_learning_rates(optimizer, learning_rate);
  if (!optimizer->frozen_at)
    status = warmup_step(optimizer, status);
  else if (ob_adam_compresses(optimizer))
    status = compressed_step(optimizer, status);
  else
    status = frozen_step(optimizer, status);
  optimizer->steps += status == ONEBIT_OK;
  optimizer->skipped += status == ONEBIT_SKIPPED;
  return status;
}
