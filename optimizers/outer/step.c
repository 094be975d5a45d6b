/*
 * Begins exchanges and applies them. Every rank begins each fragment's exchanges in the same order,
 * whatever the timing of its local steps, and a rank with an error sends its status. So no rank
 * waits for an exchange that another rank does not begin.
 */
#include <string.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/memory.h"
#include "compression/codec.h"
#include "compression/numerics.h"
#include "optimizers/outer/element.h"
#include "optimizers/outer/outer.h"
#include "optimizers/outer/sites.h"

/* --- The passes over a fragment, once in local_steps steps (element.h) -------------------------*/

#define FIXED __attribute__((always_inline)) static inline

static const void *piece_parameters(const struct ob_fragment *fragment,
                                    const struct ob_outer_piece *piece) {
  const struct onebit_outer *outer = fragment->outer;
  size_t bytes = piece->first * ob_dtype_size(outer->options.parameter_dtype);
  return (const char *)outer->tensors[piece->tensor].parameter + bytes;
}

void ob_fragment_read(struct ob_fragment *fragment) {
  for (size_t k = 0; k < fragment->pieces; k++) {
    const struct ob_outer_piece *piece = &fragment->piece[k];
    const void *parameters = piece_parameters(fragment, piece);
    for (size_t i = 0; i < piece->count; i++)
      fragment->consensus[piece->at + i] =
          ob_load(parameters, i, fragment->outer->options.parameter_dtype);
  }
}

/* --- Before the exchange -----------------------------------------------------------------------*/

/* Computes drifts, and returns whether all can be sent. Called with a constant dtype, so that the
 * compiler generates a loop for this dtype. */
FIXED bool compute_drifts(const float *restrict consensus, const void *restrict parameter,
                          onebit_dtype_t dtype, float *restrict drift, size_t count) {
  unsigned wrong = 0;
  for (size_t i = 0; i < count; i++) {
    const float d = ob_outer_drift(consensus[i], drift[i], ob_load(parameter, i, dtype), dtype);
    drift[i] = d;
    wrong |= !ob_outer_can_send(d);
  }
  return !wrong;
}

bool ob_fragment_drift(struct ob_fragment *fragment) {
  const onebit_dtype_t dtype = fragment->outer->options.parameter_dtype;
  bool sound = true;
  if (!fragment->keeps)
    memset(fragment->drift, 0, fragment->count * sizeof(float));
  for (size_t k = 0; k < fragment->pieces; k++) {
    const struct ob_outer_piece *piece = &fragment->piece[k];
    const float *consensus = fragment->consensus + piece->at;
    const void *parameters = piece_parameters(fragment, piece);
    float *drift = fragment->drift + piece->at;
    if (dtype == ONEBIT_FLOAT32)
      sound &= compute_drifts(consensus, parameters, ONEBIT_FLOAT32, drift, piece->count);
    else
      sound &= compute_drifts(consensus, parameters, dtype, drift, piece->count);
  }
  return sound;
}

uint32_t ob_fragment_checksum(const struct ob_fragment *fragment) {
  return fragment->outer->codec->checksum(fragment->consensus, fragment->count);
}

/* --- After the exchange ------------------------------------------------------------------------*/

/* Updates at most OB_OUTER_RUN elements; returns the sum of squares of their drifts. */
FIXED double update_run(float *restrict x, float *restrict m, const float *restrict d,
                        onebit_outer_rule_t rule, float rate, float decay, size_t count) {
  double lanes[OB_LANES] = {0};
  float none;
  for (size_t i = 0; i < count; i++) {
    x[i] -=
        rate * ob_outer_apply_rule(rule, rule == ONEBIT_OUTER_MEAN ? &none : &m[i], d[i], decay);
    lanes[i % OB_LANES] += (double)d[i] * (double)d[i];
  }
  for (int width = OB_LANES / 2; width > 0; width /= 2)
    for (int k = 0; k < width; k++)
      lanes[k] += lanes[k + width];
  return lanes[0];
}

FIXED void update_with_rule(struct ob_fragment *fragment, onebit_outer_rule_t rule) {
  const struct onebit_outer *outer = fragment->outer;
  const float rate = (float)outer->options.learning_rate, decay = (float)outer->options.momentum;
  size_t runs = 0;
  for (size_t i = 0; i < fragment->count; i += OB_OUTER_RUN) {
    const size_t left = fragment->count - i, count = left < OB_OUTER_RUN ? left : OB_OUTER_RUN;
    float *momentum = rule == ONEBIT_OUTER_MEAN ? NULL : fragment->momentum + i;
    outer->sums[runs++] = update_run(fragment->consensus + i, momentum, fragment->drift + i, rule,
                                     rate, decay, count);
  }
  fragment->drift_squares = ob_add_sums(outer->sums, runs);
}

void ob_fragment_update(struct ob_fragment *fragment) {
  const onebit_outer_rule_t rule = fragment->outer->options.rule;
  if (rule == ONEBIT_OUTER_MEAN)
    update_with_rule(fragment, ONEBIT_OUTER_MEAN);
  else if (rule == ONEBIT_OUTER_MOMENTUM)
    update_with_rule(fragment, ONEBIT_OUTER_MOMENTUM);
  else
    update_with_rule(fragment, ONEBIT_OUTER_NESTEROV);
}

static void set_piece_parameters(const float *consensus, const float *left, void *parameters,
                                 onebit_dtype_t dtype, float mixing, size_t count) {
  for (size_t i = 0; i < count; i++) {
    const float x = left ? consensus[i] - left[i] : consensus[i];
    const float p = mixing < 1 ? ob_load(parameters, i, dtype) : 0;
    ob_store(parameters, i, dtype, ob_outer_mix(p, x, mixing));
  }
}

void ob_fragment_set_parameters(const struct ob_fragment *fragment, double mixing) {
  const onebit_dtype_t dtype = fragment->outer->options.parameter_dtype;
  for (size_t k = 0; k < fragment->pieces; k++) {
    const struct ob_outer_piece *piece = &fragment->piece[k];
    const float *left = fragment->keeps ? fragment->drift + piece->at : NULL;
    set_piece_parameters(fragment->consensus + piece->at, left,
                         (void *)(uintptr_t)piece_parameters(fragment, piece), dtype, (float)mixing,
                         piece->count);
  }
}

void ob_fragment_shift(const struct ob_fragment *fragment, const float *by) {
  const onebit_dtype_t dtype = fragment->outer->options.parameter_dtype;
  for (size_t k = 0; k < fragment->pieces; k++) {
    const struct ob_outer_piece *piece = &fragment->piece[k];
    void *parameters = (void *)(uintptr_t)piece_parameters(fragment, piece);
    for (size_t i = 0; i < piece->count; i++)
      if (by[piece->at + i] != 0)
        ob_store(parameters, i, dtype, ob_load(parameters, i, dtype) - by[piece->at + i]);
  }
}

void ob_fragment_set_ahead(struct ob_fragment *fragment, const float *ahead, size_t first,
                           size_t count) {
  const onebit_dtype_t dtype = fragment->outer->options.parameter_dtype;
  const float mixing = (float)fragment->outer->options.mixing;
  memcpy(fragment->drift + first, ahead + first, count * sizeof *ahead);
  for (size_t k = 0; k < fragment->pieces; k++) {
    const struct ob_outer_piece *piece = &fragment->piece[k];
    void *parameters = (void *)(uintptr_t)piece_parameters(fragment, piece);
    const size_t end =
        first + count < piece->at + piece->count ? first + count : piece->at + piece->count;
    const size_t begin = first > piece->at ? first : piece->at;
    for (size_t i = begin; i < end; i++) {
      const float before = ob_load(parameters, i - piece->at, dtype);
      const float p = fragment->consensus[i] - ahead[i];
      ob_store(parameters, i - piece->at, dtype,
               mixing < 1 ? (1 - mixing) * before + mixing * p : p);
    }
  }
}

/* --- The host's row ----------------------------------------------------------------------------*/

static onebit_status_t outer_update_drift(struct ob_fragment *fragment) {
  fragment->finite = ob_fragment_drift(fragment);
  fragment->checksum = ob_fragment_checksum(fragment);
  return ONEBIT_OK;
}

static onebit_status_t outer_update_checksum(const struct ob_fragment *fragment, uint32_t *sum) {
  *sum = ob_fragment_checksum(fragment);
  return ONEBIT_OK;
}

static onebit_status_t outer_update(struct ob_fragment *fragment) {
  ob_fragment_update(fragment);
  return ONEBIT_OK;
}

static onebit_status_t outer_update_set(const struct ob_fragment *fragment, double mixing) {
  ob_fragment_set_parameters(fragment, mixing);
  return ONEBIT_OK;
}

const struct ob_outer_executor ob_outer_executor_host = {.memory = &ob_memory_host,
                                                         .drift = outer_update_drift,
                                                         .checksum = outer_update_checksum,
                                                         .update = outer_update,
                                                         .set = outer_update_set};

/* --- One fragment ------------------------------------------------------------------------------*/

static void outer_step_end(struct ob_fragment *fragment, onebit_status_t status) {
  fragment->stage = OB_FRAGMENT_ENDED;
  fragment->outcome.status = ONEBIT_OK;
  ob_outcome_add(&fragment->outcome, status);
}

static void outer_step_send(struct ob_fragment *fragment, onebit_status_t status) {
  status = fragment->outer->exchange->begin(fragment, status);
  if (status == ONEBIT_OK)
    fragment->stage = OB_FRAGMENT_SENDING;
  else
    outer_step_end(fragment, status);
}

static onebit_status_t send_weight(struct ob_fragment *fragment, onebit_status_t status) {
  onebit_plan_t plan = fragment->weigh;
  fragment->weights[0] = (float)fragment->sent_weight;
  if (status == ONEBIT_OK)
    status = ob_outer_copy(fragment->outer, fragment->weights_there[0], &fragment->weights[0],
                           sizeof(float));
  const struct ob_call call =
      ob_plan_call(plan, fragment->weights_there[0], fragment->weights_there[1]);
  return ob_plan_start(plan, status, &call);
}

static void outer_step_begin(struct ob_fragment *fragment, onebit_status_t status) {
  struct onebit_outer *outer = fragment->outer;
  const onebit_status_t made = outer->executor->drift(fragment);
  if (status == ONEBIT_OK)
    status = made;
  fragment->sent_weight = fragment->weight;
  fragment->weight = 0;
  fragment->factor = 1;
  fragment->apply_step = outer->steps + outer->options.delay;
  outer->started++;
  if (!fragment->weigh) {
    outer_step_send(fragment, status);
    return;
  }
  status = send_weight(fragment, status);
  if (status == ONEBIT_OK)
    fragment->stage = OB_FRAGMENT_WEIGHING;
  else
    outer_step_end(fragment, status);
}

/* Called when the weights have arrived. If no rank has made a step, nothing has drifted, and all
 * ranks know that. */
static void outer_step_weigh(struct ob_fragment *fragment) {
  const struct onebit_outer *outer = fragment->outer;
  const onebit_status_t status =
      ob_outer_copy(outer, &fragment->weights[1], fragment->weights_there[1], sizeof(float));
  const float own = fragment->weights[0], mean = fragment->weights[1];
  if (status != ONEBIT_OK || mean > 0) {
    fragment->factor = status == ONEBIT_OK ? own / mean : 1;
    outer_step_send(fragment, status);
  } else {
    outer_step_end(fragment,
                   ob_outer_clear(outer, fragment->drift, fragment->count * sizeof(float)));
  }
}

static void advance_exchange(struct ob_fragment *fragment, bool wait) {
  if (fragment->stage == OB_FRAGMENT_WEIGHING) {
    onebit_status_t status = ob_plan_test(fragment->weigh, wait);
    if (status == ONEBIT_OK)
      outer_step_weigh(fragment);
    else if (status != ONEBIT_IN_PROGRESS)
      outer_step_end(fragment, status);
  }
  if (fragment->stage == OB_FRAGMENT_SENDING) {
    onebit_status_t status = fragment->outer->exchange->test(fragment, wait);
    if (status != ONEBIT_IN_PROGRESS)
      outer_step_end(fragment, status);
  }
}

void ob_fragment_wait(struct ob_fragment *fragment) {
  if (fragment->stage != OB_FRAGMENT_IDLE && !fragment->outer->sites)
    advance_exchange(fragment, true);
}

static onebit_status_t keep_residual(struct ob_fragment *fragment) {
  return fragment->keeps ? fragment->outer->exchange->keep(fragment) : ONEBIT_OK;
}

/* Keeps a finite drift that was not applied, so that it counts in the next exchange. */
static onebit_status_t keep_unapplied_drift(struct ob_fragment *fragment) {
  OB_TRY(keep_residual(fragment));
  if (fragment->finite) {
    fragment->weight += fragment->sent_weight;
    return ONEBIT_OK;
  }
  fragment->weight = 0;
  return fragment->outer->executor->set(fragment, 1);
}

/* Applies an exchange. With mixing, the parameters keep a part of their whole drift. */
static onebit_status_t outer_step_apply(struct ob_fragment *fragment, double mixing, bool keeps) {
  struct onebit_outer *outer = fragment->outer;
  ob_fragment_wait(fragment);
  fragment->stage = OB_FRAGMENT_IDLE;
  if (fragment->outcome.status != ONEBIT_OK) {
    outer->skipped += fragment->outcome.status == ONEBIT_SKIPPED;
    OB_TRY(keep_unapplied_drift(fragment));
    return ob_outcome_status(&fragment->outcome);
  }
  outer->exchanges++;
  OB_TRY(outer->executor->update(fragment));
  fragment->keeps = keeps && mixing >= 1 && outer->exchange->keep;
  OB_TRY(keep_residual(fragment));
  return outer->executor->set(fragment, mixing);
}

void ob_fragment_abandon(struct ob_fragment *fragment) {
  if (fragment->stage == OB_FRAGMENT_IDLE || fragment->outer->sites)
    return;
  if (fragment->stage != OB_FRAGMENT_ENDED) {
    ob_plan_abandon(fragment->weigh);
    fragment->outer->exchange->abandon(fragment);
    outer_step_end(fragment,
                   ob_error(ONEBIT_ERROR_TRANSPORT, "onebit_outer_move has ended this exchange"));
  }
  (void)outer_step_apply(fragment, fragment->outer->options.mixing, true);
}

/* --- The calls ---------------------------------------------------------------------------------*/

onebit_status_t ob_outer_check_attached(const struct onebit_outer *outer) {
  if (outer->stopped)
    return ob_error(ONEBIT_ERROR_TRANSPORT,
                    "the outer step has stopped, since an exchange of its sites or a move has "
                    "failed: call onebit_outer_move");
  return ONEBIT_OK;
}

static onebit_status_t check_weight(const struct onebit_outer *outer, double weight) {
  if (outer->options.weighted && !(weight >= 0 && weight <= 1e30))
    return ob_error(ONEBIT_ERROR_ARGUMENT, "weight is %g, not from 0 to 1e30", weight);
  return ONEBIT_OK;
}

/* Applies a fragment's previous exchange before the next one begins. Delays are shorter than
 * rounds; but a delay from a checkpoint may be that of a longer round. */
onebit_status_t onebit_outer_step(onebit_outer_t outer, double weight) {
  OB_CALL_SCOPE_OF(outer, OB_HANDLE_OUTER);
  OB_TRY(ob_outer_check_attached(outer));
  const onebit_outer_options_t *options = &outer->options;
  struct ob_outcome outcome = {.status = ONEBIT_OK};
  const onebit_status_t status = check_weight(outer, weight);
  ob_outcome_add(&outcome, status);
  outer->steps++;
  outer->position = outer->position % options->local_steps + 1;
  for (size_t f = 0; f < options->fragments; f++)
    outer->fragments[f].weight += options->weighted && status == ONEBIT_OK ? weight : 0;
  if (outer->sites)
    ob_outcome_add(&outcome, ob_sites_step(outer->sites));
  for (size_t f = 0; !outer->sites && f < options->fragments; f++) {
    struct ob_fragment *fragment = &outer->fragments[f];
    const bool due = outer->position == fragment->begin_step;
    advance_exchange(fragment, false);
    if (fragment->stage != OB_FRAGMENT_IDLE && (due || fragment->apply_step <= outer->steps))
      ob_outcome_add(&outcome, outer_step_apply(fragment, options->mixing, true));
    if (due)
      outer_step_begin(fragment, status);
    if (fragment->stage != OB_FRAGMENT_IDLE && fragment->apply_step <= outer->steps)
      ob_outcome_add(&outcome, outer_step_apply(fragment, options->mixing, true));
  }
  return ob_outcome_status(&outcome);
}

onebit_status_t onebit_outer_synchronize(onebit_outer_t outer) {
  OB_CALL_SCOPE_OF(outer, OB_HANDLE_OUTER);
  OB_TRY(ob_outer_check_attached(outer));
  if (outer->sites)
    return ob_sites_synchronize(outer->sites);
  struct ob_outcome outcome = {.status = ONEBIT_OK};
  for (size_t f = 0; f < outer->options.fragments; f++)
    if (outer->fragments[f].stage != OB_FRAGMENT_IDLE)
      ob_outcome_add(&outcome, outer_step_apply(&outer->fragments[f], outer->options.mixing, true));
  for (size_t f = 0; f < outer->options.fragments; f++)
    outer_step_begin(&outer->fragments[f], ONEBIT_OK);
  for (size_t f = 0; f < outer->options.fragments; f++)
    ob_outcome_add(&outcome, outer_step_apply(&outer->fragments[f], 1, false));
  return ob_outcome_status(&outcome);
}
