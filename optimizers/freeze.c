/* When the warm-up ends: after a given number of steps, or when the variance has settled; and not
 * while the variance lags behind the gradients. */
#include <math.h>

#include "base/error.h"
#include "optimizers/sections.h"

/* Steps that the variance is given to change in before it is called settled: 1 / (1 - beta2). The
 * small step back keeps a quotient that is whole but for rounding, such as 1 / (1 - 0.999), from
 * being rounded up to one more. */
static size_t freeze_window(double beta2) { return (size_t)ceil(1 / (1 - beta2) - 1e-6); }

static bool is_automatic(const struct onebit_optimizer *optimizer) {
  return optimizer->moments.freeze_step == ONEBIT_FREEZE_AUTOMATIC;
}

bool ob_optimizer_is_frozen(const struct onebit_optimizer *optimizer) {
  return optimizer->frozen_at || optimizer->began_frozen;
}

bool ob_optimizer_divides(const struct onebit_optimizer *optimizer) {
  return optimizer->method->divides && !ob_optimizer_is_frozen(optimizer);
}

static onebit_status_t create_chunks(struct onebit_optimizer *optimizer) {
  optimizer->chunks = ob_optimizer_allocate(optimizer, 2 * OB_CHUNK, sizeof(float));
  return optimizer->chunks
             ? ONEBIT_OK
             : ob_error(ONEBIT_ERROR_MEMORY, "no memory for %d moments", 2 * OB_CHUNK);
}

onebit_status_t ob_freeze_create(struct onebit_optimizer *optimizer) {
  optimizer->began_frozen = optimizer->moments.no_warmup;
  if (optimizer->method->divides && !optimizer->began_frozen)
    return create_chunks(optimizer);
  if (!is_automatic(optimizer))
    return ONEBIT_OK;
  optimizer->window = freeze_window(optimizer->moments.beta2);
  optimizer->norms = ob_optimizer_allocate(optimizer, optimizer->window, sizeof(double));
  if (!optimizer->norms)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for %zu norms", optimizer->window);
  return ONEBIT_OK;
}

/* DeepSpeed counts a first call that makes no step. */
size_t ob_freeze_last_step(const struct onebit_optimizer *optimizer) {
  size_t wanted = optimizer->moments.freeze_step;
  if (optimizer->options.profile == ONEBIT_PROFILE_DEEPSPEED && wanted != ONEBIT_FREEZE_NEVER)
    wanted = wanted > 2 ? wanted - 1 : 1;
  return wanted;
}

onebit_status_t ob_freeze_sum(struct onebit_optimizer *optimizer, double *sum) {
  double of_bucket;
  *sum = 0;
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    struct ob_bucket *bucket = &optimizer->buckets[u];
    size_t first = bucket->first_block, end = first + bucket->blocks;
    OB_TRY(optimizer->executor->sum(optimizer, bucket, 0, first, end, &of_bucket));
    *sum += of_bucket;
  }
  return ONEBIT_OK;
}

/* The variance's norm after the latest step, with its bias correction. */
static onebit_status_t variance_norm(struct onebit_optimizer *optimizer, double *norm) {
  double root = (double)ob_factors_of(optimizer, optimizer->steps).adam.variance_factor;
  if (optimizer->method->variance)
    *norm = optimizer->method->variance(optimizer);
  else
    OB_TRY(ob_freeze_sum(optimizer, norm));
  *norm *= root * root;
  return ONEBIT_OK;
}

/* Remembers the variance's norm, and says whether it has settled: whether it changed by less than
 * the threshold in the last `window` steps. */
static onebit_status_t settled(struct onebit_optimizer *optimizer, bool *yes) {
  double norm, threshold = optimizer->moments.freeze_threshold;
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

/* The sum of the squares of the momentum. */
static onebit_status_t momentum_power(struct onebit_optimizer *optimizer, double *power) {
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    OB_TRY(ob_bucket_pass(optimizer, &optimizer->buckets[u], OB_PASS_POWER, optimizer->steps));
  return ob_freeze_sum(optimizer, power);
}

static size_t elements_of(const struct onebit_optimizer *optimizer) {
  size_t elements = 0;
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    elements += ob_plan_layout(optimizer->buckets[u].bits)->elements;
  return elements;
}

/* Divided gradients are waited for otherwise. A share's sums say nothing of the others', 0/1 Adam's
 * freeze is by its schedule, and DeepSpeed does not look. Nor is there anything to look at without
 * elements. */
static bool can_lag(const struct onebit_optimizer *optimizer) {
  const struct ob_method *method = optimizer->method;
  return elements_of(optimizer) && method->momentum && method->arrays & OB_MASK(OB_VARIANCE) &&
         !method->divides && !method->sharded &&
         optimizer->options.profile != ONEBIT_PROFILE_DEEPSPEED;
}

/* Whether the variance lags behind the gradients of the latest steps, of which the momentum is
 * made: the mean square of the momentum is more than four times the mean of the variance. Then the
 * gradients have just begun, or grown, and frozen as it is the variance would be wrong for good. */
static onebit_status_t lags(struct onebit_optimizer *optimizer, bool *yes) {
  double variance, power;
  *yes = false;
  if (!can_lag(optimizer))
    return ONEBIT_OK;
  OB_TRY(variance_norm(optimizer, &variance));
  OB_TRY(momentum_power(optimizer, &power));
  double factor = (double)ob_factors_of(optimizer, optimizer->steps).adam.momentum_factor;
  *yes = !(variance > 0) || power * factor * factor > 4 * variance;
  return ONEBIT_OK;
}

uint64_t ob_freeze_latest_step(const struct onebit_optimizer *optimizer) {
  if (!is_automatic(optimizer))
    return ob_freeze_last_step(optimizer);
  return ONEBIT_FREEZE_LATEST * (uint64_t)optimizer->window;
}

bool ob_freeze_is_late(const struct onebit_optimizer *optimizer) {
  const uint64_t latest = ob_freeze_latest_step(optimizer);
  if (!can_lag(optimizer) || ob_optimizer_is_frozen(optimizer) || optimizer->steps < latest)
    return false;
  return optimizer->steps - latest >= freeze_window(optimizer->moments.beta2);
}

/* Beyond the last step: the variance lagged, or a checkpoint was loaded. */
onebit_status_t ob_freeze_is_due(struct onebit_optimizer *optimizer, bool *due) {
  *due = false;
  if (ob_optimizer_is_frozen(optimizer))
    return ONEBIT_OK;
  if (is_automatic(optimizer))
    OB_TRY(settled(optimizer, due));
  *due |= optimizer->steps >= ob_freeze_latest_step(optimizer);
  bool behind = false;
  if (*due)
    OB_TRY(lags(optimizer, &behind));
  *due &= !behind;
  return ONEBIT_OK;
}

enum ob_exchange ob_freeze_exchange(const struct onebit_optimizer *optimizer) {
  return ob_optimizer_is_frozen(optimizer) && ob_optimizer_compresses(optimizer)
             ? OB_EXCHANGE_BITS
             : OB_EXCHANGE_DENSE;
}
