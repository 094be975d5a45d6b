/*
 * When an exchange begins, and when it is applied. Every rank begins each fragment's exchanges in
 * the same order, however its local steps fall, and a rank that is not well takes part with its
 * status: so nobody waits for one that does not come.
 */

#include "base/call_scope.h"
#include "base/error.h"
#include "optimizers/outer/sites.h"

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

/* The weights are here. Where nobody has made a step nothing has drifted, and all know. */
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

static void move_on(struct ob_fragment *fragment, bool wait) {
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
    move_on(fragment, true);
}

static onebit_status_t keep_residual(struct ob_fragment *fragment) {
  return fragment->keeps ? fragment->outer->exchange->keep(fragment) : ONEBIT_OK;
}

/* Keeps a drift that was not applied, so that it counts in the next exchange, unless it is of no
 * use. */
static onebit_status_t outer_step_keep(struct ob_fragment *fragment) {
  OB_TRY(keep_residual(fragment));
  if (fragment->finite) {
    fragment->weight += fragment->sent_weight;
    return ONEBIT_OK;
  }
  fragment->weight = 0;
  return fragment->outer->executor->set(fragment, 1);
}

/* Applies the consensus. With mixing, the parameters have a part of their whole drift in them
 * already. */
static onebit_status_t outer_step_apply(struct ob_fragment *fragment, double mixing, bool keeps) {
  struct onebit_outer *outer = fragment->outer;
  ob_fragment_wait(fragment);
  fragment->stage = OB_FRAGMENT_IDLE;
  if (fragment->outcome.status != ONEBIT_OK) {
    outer->skipped += fragment->outcome.status == ONEBIT_SKIPPED;
    OB_TRY(outer_step_keep(fragment));
    return ob_outcome_tell(&fragment->outcome);
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
                   ob_error(ONEBIT_ERROR_TRANSPORT, "the outer step was moved meanwhile"));
  }
  (void)outer_step_apply(fragment, fragment->outer->options.mixing, true);
}

/* --- All of them -------------------------------------------------------------------------------*/

onebit_status_t ob_outer_check_attached(const struct onebit_outer *outer) {
  if (outer->stopped)
    return ob_error(ONEBIT_ERROR_TRANSPORT,
                    "the outer step has stopped, since an exchange of its sites or a move has "
                    "failed: call onebit_outer_move");
  return ONEBIT_OK;
}

static onebit_status_t check_weight(const struct onebit_outer *outer, double weight) {
  if (outer->options.weighted && !(weight >= 0 && weight <= 1e30))
    return ob_error(ONEBIT_ERROR_ARGUMENT, "weight is %g, not a number from 0 to 1e30", weight);
  return ONEBIT_OK;
}

/* Before a fragment that is due begins, its exchange before is applied. Delays are shorter than
 * rounds; but one that came from a checkpoint may have had a longer round. */
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
    move_on(fragment, false);
    if (fragment->stage != OB_FRAGMENT_IDLE && (due || fragment->apply_step <= outer->steps))
      ob_outcome_add(&outcome, outer_step_apply(fragment, options->mixing, true));
    if (due)
      outer_step_begin(fragment, status);
    if (fragment->stage != OB_FRAGMENT_IDLE && fragment->apply_step <= outer->steps)
      ob_outcome_add(&outcome, outer_step_apply(fragment, options->mixing, true));
  }
  return ob_outcome_tell(&outcome);
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
  return ob_outcome_tell(&outcome);
}
