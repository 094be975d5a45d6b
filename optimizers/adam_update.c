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

static void run_pass(struct onebit_optimizer *optimizer, uint64_t step,
                     void (*body)(void *context, size_t first, size_t end, int thread)) {
  for (size_t u = 0; u < optimizer->unit_count; u++) {
    struct ob_adam_unit *unit = &optimizer->units[u];
    struct pass pass = {unit, ob_adam_factors_of(optimizer, step),
                        optimizer->options.profile != ONEBIT_PROFILE_DEEPSPEED};
    ob_parallel(unit->bits->work.threads, 0, unit->bits->layout.blocks, body, &pass);
  }
}

/* Remembers the variance's norm, and says whether it has settled: whether it changed by less than
 * the threshold in the last `window` steps. */
static bool settled(struct onebit_optimizer *optimizer, uint64_t step) {
  double norm = 0, root = (double)ob_adam_factors_of(optimizer, step).variance_factor;
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

static void apply_momentum(struct onebit_optimizer *optimizer) {
  for (size_t u = 0; optimizer->unit_count > 1 && u < optimizer->unit_count; u++)
    ob_plan_apply(optimizer->units[u].bits); /* of one unit the exchange was not held */
}

void ob_adam_update(struct onebit_optimizer *optimizer) {
  uint64_t step = optimizer->steps + 1;
  if (optimizer->frozen_at && ob_adam_compresses(optimizer)) {
    apply_momentum(optimizer);
  } else if (optimizer->frozen_at) {
    run_pass(optimizer, step, frozen_body);
  } else {
    run_pass(optimizer, step, adam_body);
    if (freezes_after(optimizer, step)) {
      run_pass(optimizer, step, freeze_body);
      optimizer->frozen_at = step;
    }
  }
}
