/* Measures a plan's residual, and moves the plan to another width. */
#include "collectives/ladder.h"

#include <inttypes.h>
#include <math.h>

#include "base/log.h"
#include "collectives/plan_private.h"

_Static_assert(OB_LADDER_WINDOW == OB_MEASURE_EVERY, "each block is measured once in a window");

/* A plan moves up above this ratio of residual to input, and down if at half the bits the ratio
 * would stay below the second one. docs/ladder.md has the choice of both. */
#define CLIMB_RATIO   4.0
#define DESCEND_RATIO 3.0

/* The windows in which a residual of the old width decays, after a change of width. */
#define SETTLING_WINDOWS 2

/* The number of times that OB_LADDER_PATIENCE is doubled. */
#define MAX_PATIENCE 64

/* --- A call ------------------------------------------------------------------------------------*/

void ob_ladder_begin(const struct onebit_plan *plan) {
  struct ob_ladder *ladder = &plan->state->ladder;
  ladder->heard = (unsigned)ladder->state.wish;
  ladder->max_rms = ladder->rms;
  plan->state->worker.phase = plan->state->server.phase =
      (size_t)(ladder->state.calls % OB_LADDER_WINDOW);
}

static void ladder_add(struct ob_norms *sum, const struct ob_norms *norms) {
  sum->input += norms->input;
  sum->residual += norms->residual;
  sum->value += norms->value;
  sum->lower += norms->lower;
}

static void add_measured(const struct ob_residual *residual, struct ob_norms *sum) {
  for (size_t b = residual->phase; residual->norms && b < residual->blocks; b += OB_LADDER_WINDOW)
    ladder_add(sum, &residual->norms[b]);
}

static double ladder_ratio_of(const struct ob_norms *norms) {
  return norms->input > 0 ? sqrt(norms->residual / norms->input) : 0;
}

/* The largest that the ratio can become with half as many bits: where quantising leaves the part q
 * of a value's norm, |e'| = q |x + e| <= q (|x| + |e|). From q = 1 on it grows without end. */
static double bound_below(const struct ob_norms *norms) {
  const double part = norms->value > 0 ? sqrt(norms->lower / norms->value) : 0;
  return part < 1 ? part / (1 - part) : INFINITY;
}

/* A window is over: decides what this rank asks for in the next call. */
static void make_wish(const struct onebit_plan *plan) {
  struct ob_ladder *ladder = &plan->state->ladder;
  struct ob_norms *server = &ladder->state.server, *worker = &ladder->state.worker;
  const double below = fmax(bound_below(worker), bound_below(server));
  ladder->state.ratio = fmax(ladder_ratio_of(worker), ladder_ratio_of(server));
  ladder->state.voting = true;
  ladder->state.wish = ladder->state.ratio > CLIMB_RATIO ? OB_FLAG_CLIMB : 0;
  if (below > DESCEND_RATIO || ladder->state.ratio > DESCEND_RATIO)
    ladder->state.wish |= OB_FLAG_STAY;
  const size_t elements = ladder->elements;
  ladder->rms = elements ? (float)sqrt(worker->residual / (double)elements) : 0;
  if (!ob_is_finite(ladder->rms))
    ladder->rms = 0;
  *worker = *server = (struct ob_norms){0};
}

static void ladder_move(const struct onebit_plan *plan, unsigned width) {
  struct ob_ladder *ladder = &plan->state->ladder;
  ob_log(OB_LOG_INFO, plan->comm->rank, "plan %" PRIu64 ": from %u to %u bits, residual ratio %.3g",
         plan->number, plan->geometry.width, width, ladder->state.ratio);
  ladder->state.moves++;
  ladder->state.calm = 0;
  ladder->state.settling = SETTLING_WINDOWS;
  ladder->width = width;
}

void ob_ladder_fix(const struct onebit_plan *plan, unsigned width) {
  plan->state->ladder.fixed = true;
  if (width != plan->geometry.width)
    ladder_move(plan, width);
}

/* Decides the width, the same on all ranks: from wishes that all ranks have received, and from the
 * widths that followed. */
static void ladder_decide(const struct onebit_plan *plan) {
  struct ob_ladder *ladder = &plan->state->ladder;
  const unsigned width = plan->geometry.width;
  ladder->agreed_rms = ladder->max_rms;
  ladder->measured_width = width;
  if (ladder->fixed || (ladder->state.settling && ladder->state.settling--))
    return;
  ladder->state.calm = ladder->heard ? 0 : ladder->state.calm + 1;
  if (ladder->heard & OB_FLAG_CLIMB && width < ladder->max) {
    if (ladder->state.descended && ladder->state.patience < MAX_PATIENCE)
      ladder->state.patience *= 2;
    ladder_move(plan, 2 * width);
  } else if (ladder->state.calm >= ladder->state.patience && width > ladder->min) {
    ladder->state.descended = true;
    ladder_move(plan, width / 2);
  }
}

void ob_ladder_commit(const struct onebit_plan *plan) {
  struct ob_ladder *ladder = &plan->state->ladder;
  add_measured(&plan->state->worker, &ladder->state.worker);
  add_measured(&plan->state->server, &ladder->state.server);
  if (ladder->state.voting)
    ladder_decide(plan);
  ladder->state.voting = false;
  ladder->state.wish = 0;
  ladder->rms = 0;
  if (++ladder->state.calls % OB_LADDER_WINDOW == 0)
    make_wish(plan);
}

/* --- Widths ------------------------------------------------------------------------------------*/

unsigned ob_ladder_width_in(const struct onebit_plan *plan, uint64_t width) {
  const struct ob_ladder *ladder = &plan->state->ladder;
  unsigned known = ladder->min;
  while (known < ladder->max && known < width)
    known *= 2;
  return known;
}

struct ob_ladder_state ob_ladder_keep(const struct onebit_plan *plan) {
  struct ob_ladder_state state = plan->state->ladder.state;
  state.width = plan->geometry.width;
  state.last_width = plan->state->last_width;
  return state;
}
