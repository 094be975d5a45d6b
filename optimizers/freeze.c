/* Decides when the warm-up ends: after a given number of steps, or when the variance has settled;
 * but not while the variance lags behind the gradients. Counts the steps that were made. */
#include <math.h>

#include "base/error.h"
#include "base/log.h"
#include "optimizers/state.h"

/* The number of steps over which the variance must have settled: 1 / (1 - beta2), rounded up. 1e-6
 * is subtracted so that rounding of a quotient such as 1 / (1 - 0.999) does not add a step. */
static size_t freeze_window(double beta2) { return (size_t)ceil(1 / (1 - beta2) - 1e-6); }

static bool freeze_is_automatic(const struct onebit_optimizer *optimizer) {
  return optimizer->moments.freeze_step == ONEBIT_FREEZE_AUTOMATIC;
}

bool ob_optimizer_divides_gradients(const struct onebit_optimizer *optimizer) {
  return optimizer->method->divides && !ob_optimizer_is_frozen(optimizer);
}

static onebit_status_t create_chunks(struct onebit_optimizer *optimizer) {
  optimizer->chunks = ob_optimizer_allocate(optimizer, 2 * OB_CHUNK, sizeof(float));
  return optimizer->chunks
             ? ONEBIT_OK
             : ob_error(ONEBIT_ERROR_MEMORY, "out of memory for %d moments", 2 * OB_CHUNK);
}

onebit_status_t ob_freeze_create(struct onebit_optimizer *optimizer) {
  optimizer->began_frozen = optimizer->moments.no_warmup;
  if (optimizer->method->divides && !optimizer->began_frozen)
    return create_chunks(optimizer);
  if (!freeze_is_automatic(optimizer))
    return ONEBIT_OK;
  optimizer->window = freeze_window(optimizer->moments.beta2);
  optimizer->norms = ob_optimizer_allocate(optimizer, optimizer->window, sizeof(double));
  if (!optimizer->norms)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for %zu norms", optimizer->window);
  return ONEBIT_OK;
}

/* Returns one step less in profile deepspeed, since DeepSpeed counts its first call, which makes no
 * step. */
size_t ob_freeze_last_step(const struct onebit_optimizer *optimizer) {
  size_t wanted = optimizer->moments.freeze_step;
  if (optimizer->options.profile == ONEBIT_PROFILE_DEEPSPEED && wanted != ONEBIT_FREEZE_NEVER)
    wanted = wanted > 2 ? wanted - 1 : 1;
  return wanted;
}

onebit_status_t ob_freeze_sum_variances(struct onebit_optimizer *optimizer, double *sum) {
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

/* Computes the norm of the variance after the latest step, with its bias correction. */
static onebit_status_t compute_variance_norm(struct onebit_optimizer *optimizer, double *norm) {
  double root = (double)ob_make_factors(optimizer, optimizer->steps).adam.variance_factor;
  if (optimizer->method->variance)
    *norm = optimizer->method->variance(optimizer);
  else
    OB_TRY(ob_freeze_sum_variances(optimizer, norm));
  *norm *= root * root;
  return ONEBIT_OK;
}

/* Records the variance's norm. Sets *yes if the variance has settled: if its norm changed by less
 * than the threshold in the last `window` steps. */
static onebit_status_t check_settled(struct onebit_optimizer *optimizer, bool *yes) {
  double norm, threshold = optimizer->moments.freeze_threshold;
  OB_TRY(compute_variance_norm(optimizer, &norm));
  double *slot = &optimizer->norms[optimizer->steps % optimizer->window], before = *slot;
  *slot = norm;
  *yes = false;
  if (optimizer->steps <= optimizer->window)
    return ONEBIT_OK;
  optimizer->variance_ratio = norm > 0 ? before / norm : 0;
  *yes = optimizer->variance_ratio >= threshold && optimizer->variance_ratio <= 1 / threshold;
  return ONEBIT_OK;
}

/* Computes the sum of the squares of the momentum. */
static onebit_status_t compute_momentum_power(struct onebit_optimizer *optimizer, double *power) {
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    OB_TRY(ob_bucket_run_pass(optimizer, &optimizer->buckets[u], OB_PASS_POWER, optimizer->steps));
  return ob_freeze_sum_variances(optimizer, power);
}

static size_t count_elements(const struct onebit_optimizer *optimizer) {
  size_t elements = 0;
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    elements += ob_plan_layout(optimizer->buckets[u].bits)->elements;
  return elements;
}

/* Returns true if the variance is checked for lagging. It is not checked for divided gradients,
 * whose warm-up counts steps with gradients; with sharded state, since a rank does not know the
 * sums of other shards; for 0/1 Adam, whose schedule decides; in profile deepspeed, as in
 * DeepSpeed; and without elements. */
static bool variance_can_lag(const struct onebit_optimizer *optimizer) {
  const struct ob_method *method = optimizer->method;
  return count_elements(optimizer) && method->momentum && method->arrays & OB_MASK(OB_VARIANCE) &&
         !method->divides && !method->sharded &&
         optimizer->options.profile != ONEBIT_PROFILE_DEEPSPEED;
}

/* Sets *yes if the variance lags behind the gradients of the latest steps, which make up the
 * momentum: the mean square of the momentum is more than four times the mean of the variance. The
 * gradients have then just begun, or grown, and a variance frozen now would stay wrong. */
static onebit_status_t check_lag(struct onebit_optimizer *optimizer, bool *yes) {
  double variance, power;
  *yes = false;
  if (!variance_can_lag(optimizer))
    return ONEBIT_OK;
  OB_TRY(compute_variance_norm(optimizer, &variance));
  OB_TRY(compute_momentum_power(optimizer, &power));
  double factor = (double)ob_make_factors(optimizer, optimizer->steps).adam.momentum_factor;
  *yes = !(variance > 0) || power * factor * factor > 4 * variance;
  return ONEBIT_OK;
}

uint64_t ob_freeze_latest_step(const struct onebit_optimizer *optimizer) {
  if (!freeze_is_automatic(optimizer))
    return ob_freeze_last_step(optimizer);
  return ONEBIT_FREEZE_LATEST * (uint64_t)optimizer->window;
}

bool ob_freeze_is_late(const struct onebit_optimizer *optimizer) {
  const uint64_t latest = ob_freeze_latest_step(optimizer);
  if (!variance_can_lag(optimizer) || ob_optimizer_is_frozen(optimizer) ||
      optimizer->steps < latest)
    return false;
  return optimizer->steps - latest >= freeze_window(optimizer->moments.beta2);
}

/* Sets *due if the latest step is the last of the warm-up. It may be later than the planned last
 * step, because the variance lagged or a checkpoint was loaded. */
static onebit_status_t check_freeze_due(struct onebit_optimizer *optimizer, bool *due) {
  *due = false;
  if (ob_optimizer_is_frozen(optimizer))
    return ONEBIT_OK;
  if (freeze_is_automatic(optimizer))
    OB_TRY(check_settled(optimizer, due));
  *due |= optimizer->steps >= ob_freeze_latest_step(optimizer);
  bool behind = false;
  if (*due)
    OB_TRY(check_lag(optimizer, &behind));
  *due &= !behind;
  return ONEBIT_OK;
}

enum ob_exchange ob_optimizer_exchange(const struct onebit_optimizer *optimizer) {
  if (optimizer->method->exchange)
    return optimizer->method->exchange(optimizer);
  return ob_optimizer_is_frozen(optimizer) && ob_optimizer_compresses(optimizer)
             ? OB_EXCHANGE_BITS
             : OB_EXCHANGE_DENSE;
}

/* --- Steps that were made ----------------------------------------------------------------------*/

bool ob_optimizer_sends_nothing(const struct onebit_optimizer *optimizer) {
  if (optimizer->step.exchange != OB_EXCHANGE_NONE)
    return false;
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    if (optimizer->buckets[u].uncompressed)
      return false;
  return true;
}

onebit_status_t ob_optimizer_end_outcome(onebit_optimizer_t optimizer) {
  onebit_status_t status = ob_outcome_status(&optimizer->outcome);
  optimizer->outcome.status = ONEBIT_OK;
  return status;
}

/* Changes the loss scale after steps. The order of several steps is not known: if one was skipped,
 * it counts as the last one. */
void ob_optimizer_adjust_loss_scale(struct onebit_optimizer *optimizer, uint64_t made,
                                    uint64_t skipped) {
  const onebit_optimizer_options_t *options = &optimizer->options;
  if (options->initial_loss_scale == 0)
    return;
  optimizer->good_steps = skipped ? 0 : optimizer->good_steps + made;
  if (skipped)
    optimizer->loss_scale = fmax(optimizer->loss_scale / 2, options->min_loss_scale);
  if (optimizer->good_steps < options->loss_scale_interval)
    return;
  optimizer->good_steps = 0;
  if (optimizer->loss_scale * 2 <= OB_MAX_LOSS_SCALE)
    optimizer->loss_scale *= 2;
}

bool ob_optimizer_must_catch_up(const struct onebit_optimizer *optimizer) {
  if (optimizer->method->exchange || ob_optimizer_divides_gradients(optimizer))
    return optimizer->unknown > 0;
  return optimizer->unknown && !ob_optimizer_is_frozen(optimizer) &&
         (optimizer->moments.freeze_step == ONEBIT_FREEZE_AUTOMATIC ||
          optimizer->steps >= ob_freeze_last_step(optimizer));
}

onebit_status_t ob_freeze_forget_residuals(struct onebit_optimizer *optimizer,
                                           struct ob_bucket *bucket) {
  (void)optimizer;
  return ob_plan_return_residual(bucket->dense);
}

static onebit_status_t advance_stage(struct onebit_optimizer *optimizer) {
  bool due = false;
  if (optimizer->method->advance)
    return optimizer->method->advance(optimizer);
  if (optimizer->method->freeze)
    OB_TRY(check_freeze_due(optimizer, &due));
  if (!due)
    return ONEBIT_OK;
  OB_TRY(optimizer->method->freeze(optimizer));
  optimizer->frozen_at = optimizer->steps;
  return ONEBIT_OK;
}

onebit_status_t ob_optimizer_advance(onebit_optimizer_t optimizer) {
  const uint64_t before = optimizer->frozen_at;
  OB_TRY(advance_stage(optimizer));
  if (optimizer->frozen_at == before)
    return ONEBIT_OK;
  ob_log(OB_LOG_INFO, optimizer->comm->rank, "%s: frozen after step %llu", optimizer->method->name,
         (unsigned long long)optimizer->frozen_at);
  OB_TRY(ob_buckets_for_each(optimizer, ob_freeze_forget_residuals));
  return ob_buckets_fit_arrays(optimizer, false);
}

/* Returns true if only this rank skipped the latest step, which all ranks count. */
static bool is_skipped_alone(const struct onebit_optimizer *optimizer) {
  return optimizer->unknown && optimizer->step.outcome.status == ONEBIT_SKIPPED;
}

/* Learns from the device how many steps it has made and skipped since the host last knew, and
 * counts them. All of these steps had the same form of exchange. */
static onebit_status_t learn_step_counts(onebit_optimizer_t optimizer) {
  uint64_t known = optimizer->steps - optimizer->unknown, skipped = optimizer->skipped;
  uint64_t alone = is_skipped_alone(optimizer);
  optimizer->executor->counts(optimizer, &optimizer->steps, &optimizer->skipped);
  optimizer->skipped += optimizer->skipped_by_norm;
  uint64_t made = optimizer->steps - known;
  if (made < optimizer->unknown)
    optimizer->exchanges[optimizer->step.exchange] -= optimizer->unknown - made;
  optimizer->unknown = 0;
  if (!optimizer->step.open) /* the step has ended, and its stream may not exist any more */
    optimizer->step.on_stream = false;
  ob_optimizer_adjust_loss_scale(optimizer, made - alone, optimizer->skipped - skipped + alone);
  if (optimizer->steps == known)
    return ONEBIT_OK;
  OB_TRY(ob_optimizer_advance(optimizer));
  return optimizer->executor->finish(optimizer);
}

/* Asks the device even if the host knows of no unfinished step: a replayed CUDA graph makes steps
 * that the host did not call. */
onebit_status_t ob_optimizer_catch_up(onebit_optimizer_t optimizer) {
  OB_TRY(ob_optimizer_check_held(optimizer));
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    onebit_plan_t plans[] = {optimizer->buckets[u].dense, optimizer->buckets[u].bits};
    for (size_t k = 0; k < 2; k++) {
      onebit_status_t status = ob_optimizer_note(optimizer, ob_plan_settle(plans[k]));
      if (ob_plan_is_broken(plans[k]))
        return status;
    }
  }
  if (optimizer->executor->wait)
    OB_TRY(ob_optimizer_note(optimizer, optimizer->executor->wait(optimizer)));
  return optimizer->deferred ? learn_step_counts(optimizer) : ONEBIT_OK;
}

onebit_status_t ob_optimizer_check_idle(const struct onebit_optimizer *optimizer) {
  if (optimizer->step.open)
    return ob_error(ONEBIT_ERROR_BUSY, "a step is open: onebit_optimizer_step ends it");
  return ONEBIT_OK;
}

onebit_status_t ob_optimizer_reach_idle(onebit_optimizer_t optimizer) {
  OB_TRY(ob_optimizer_check_idle(optimizer));
  return ob_optimizer_catch_up(optimizer);
}
