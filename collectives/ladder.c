/* Changes the width (bits per element) of plans: by the ladder, which measures the residual; by a
 * function that sets or restores a width; and for several plans by a budget of bytes. */
#include "collectives/ladder.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/log.h"
#include "base/memory.h"
#include "collectives/plan_private.h"
#include "compression/levels.h"

_Static_assert(OB_LADDER_WINDOW == OB_MEASURE_EVERY, "each block is measured once in a window");

/* A plan doubles its bits if the ratio of residual to input is above CLIMB_RATIO. It halves them if
 * the ratio would stay below DESCEND_RATIO with half the bits. docs/ladder.md explains the choice
 * of both. */
#define CLIMB_RATIO   4.0
#define DESCEND_RATIO 3.0

/* The number of windows after a change of width in which the residual of the old width decays. */
#define SETTLING_WINDOWS 2

/* The largest value of `patience` (ob_ladder_state), in windows: each increase of the width after a
 * decrease doubles it. */
#define MAX_PATIENCE 64

/* --- A call ------------------------------------------------------------------------------------*/

void ob_ladder_begin(const struct onebit_plan *plan) {
  struct ob_ladder *ladder = &plan->state->ladder;
  ladder->flags = (unsigned)ladder->state.wish;
  ladder->max_rms = ladder->rms;
  plan->state->worker.phase = plan->state->server.phase =
      (size_t)(ladder->state.calls % OB_LADDER_WINDOW);
}

static void add_norms(struct ob_norms *sum, const struct ob_norms *norms) {
  sum->input += norms->input;
  sum->residual += norms->residual;
  sum->value += norms->value;
  sum->lower += norms->lower;
}

static void add_measured_norms(const struct ob_residual *residual, struct ob_norms *sum) {
  for (size_t b = residual->phase; residual->norms && b < residual->blocks; b += OB_LADDER_WINDOW)
    add_norms(sum, &residual->norms[b]);
}

static double ladder_ratio_of(const struct ob_norms *norms) {
  return norms->input > 0 ? sqrt(norms->residual / norms->input) : 0;
}

/* Returns an upper bound of the ratio of residual to input with half as many bits. If quantising
 * leaves the part q of a value's norm, |e'| = q |x + e| <= q (|x| + |e|), so the ratio stays below
 * q / (1 - q). From q = 1 on the residual grows without bound. */
static double max_ratio_in_half_width(const struct ob_norms *norms) {
  const double part = norms->value > 0 ? sqrt(norms->lower / norms->value) : 0;
  return part < 1 ? part / (1 - part) : INFINITY;
}

/* Sets, at the end of a window, the width that this rank asks for in the next call. */
static void set_ladder_wish(const struct onebit_plan *plan) {
  struct ob_ladder *ladder = &plan->state->ladder;
  struct ob_norms *server = &ladder->state.server, *worker = &ladder->state.worker;
  const double below = fmax(max_ratio_in_half_width(worker), max_ratio_in_half_width(server));
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

static void change_ladder_width(const struct onebit_plan *plan, unsigned width) {
  struct ob_ladder *ladder = &plan->state->ladder;
  ob_log(OB_LOG_INFO, plan->comm->rank, "plan %" PRIu64 ": from %u to %u bits, residual ratio %.3g",
         plan->number, plan->geometry.width, width, ladder->state.ratio);
  ladder->state.moves++;
  ladder->state.calm = 0;
  ladder->state.settling = SETTLING_WINDOWS;
  ladder->width = width;
}

/* Decides the width from the flags of all ranks and from the earlier changes of width. Both are the
 * same on all ranks. */
static void decide_ladder_width(const struct onebit_plan *plan) {
  struct ob_ladder *ladder = &plan->state->ladder;
  const unsigned width = plan->geometry.width;
  ladder->agreed_rms = ladder->max_rms;
  ladder->measured_width = width;
  if (ladder->fixed || (ladder->state.settling && ladder->state.settling--))
    return;
  ladder->state.calm = ladder->flags ? 0 : ladder->state.calm + 1;
  if (ladder->flags & OB_FLAG_CLIMB && width < ladder->max) {
    if (ladder->state.descended && ladder->state.patience < MAX_PATIENCE)
      ladder->state.patience *= 2;
    change_ladder_width(plan, 2 * width);
  } else if (ladder->state.calm >= ladder->state.patience && width > ladder->min) {
    ladder->state.descended = true;
    change_ladder_width(plan, width / 2);
  }
}

void ob_ladder_commit(const struct onebit_plan *plan) {
  struct ob_ladder *ladder = &plan->state->ladder;
  add_measured_norms(&plan->state->worker, &ladder->state.worker);
  add_measured_norms(&plan->state->server, &ladder->state.server);
  if (ladder->state.voting)
    decide_ladder_width(plan);
  ladder->state.voting = false;
  ladder->state.wish = 0;
  ladder->rms = 0;
  if (++ladder->state.calls % OB_LADDER_WINDOW == 0)
    set_ladder_wish(plan);
}

/* --- Widths ------------------------------------------------------------------------------------*/

unsigned ob_ladder_width_in(const struct onebit_plan *plan, uint64_t width) {
  const struct ob_ladder *ladder = &plan->state->ladder;
  unsigned known = ladder->min;
  while (known < ladder->max && known < width)
    known *= 2;
  return known;
}

struct ob_ladder_state ob_ladder_get_state(const struct onebit_plan *plan) {
  struct ob_ladder_state state = plan->state->ladder.state;
  state.width = plan->geometry.width;
  state.last_width = plan->state->last_width;
  return state;
}

/* --- The width that is set or restored, and widths by a budget of bytes ------------------------*/

/* Writes the last line of the plan's explanation, which is about its width. */
static void write_widths_text(struct onebit_plan *plan) {
  const struct ob_ladder *ladder = &plan->state->ladder;
  char *text = plan->choice.text, *line = strstr(text, "bits per element: ");
  if (!line)
    line = text + strlen(text);
  snprintf(line, sizeof plan->choice.text - (size_t)(line - text),
           "bits per element: %u now, %u to %u, changes: %" PRIu64 "\n", plan->geometry.width,
           ladder->min, ladder->max, ladder->state.moves);
}

static void set_width(struct onebit_plan *plan, unsigned width) {
  plan->state->ladder.width = width;
  ob_schedule_set_width(plan, width);
  write_widths_text(plan);
}

/* --- Memory ------------------------------------------------------------------------------------*/

static struct ob_norms *allocate_norms(struct onebit_plan *plan,
                                       const struct ob_residual *residual) {
  plan->memory_bytes += residual->blocks * sizeof(struct ob_norms);
  return ob_allocate(residual->blocks, sizeof(struct ob_norms));
}

onebit_status_t ob_ladder_create(struct onebit_plan *plan) {
  const onebit_plan_options_t *options = &plan->options;
  plan->state->ladder = (struct ob_ladder){.min = (unsigned)options->bits,
                                           .max = (unsigned)options->max_bits,
                                           .measured_width = (unsigned)options->bits,
                                           .state = {.patience = OB_LADDER_PATIENCE}};
  if (options->wire == ONEBIT_WIRE_DENSE)
    plan->state->ladder.max = plan->state->ladder.min;
  if (!ob_ladder_is_used(&plan->state->ladder))
    return ONEBIT_OK;
  if (plan->executor != &ob_executor_host)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "device is ONEBIT_DEVICE_CUDA, bits is %d and max_bits is %d, but the bits of "
                    "a plan change only in host memory: set max_bits to %d for a device",
                    options->bits, options->max_bits, options->bits);
  plan->state->ladder.elements = ob_residual_elements(&plan->state->worker, &plan->geometry.layout);
  plan->state->ladder.max_stride = plan->geometry.stride;
  set_width(plan, plan->state->ladder.min);
  plan->state->worker.norms = allocate_norms(plan, &plan->state->worker);
  /* A server whose state is not a residual has nothing to measure. */
  const bool serves_error = plan->state->server.serving.rule == OB_SERVE_MEAN;
  plan->state->server.norms = serves_error ? allocate_norms(plan, &plan->state->server) : NULL;
  if (plan->state->worker.norms && (plan->state->server.norms || !serves_error))
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for the norms of %zu blocks",
                  plan->state->worker.blocks);
}

void ob_ladder_destroy(const struct onebit_plan *plan) {
  ob_release(plan->state->worker.norms);
  ob_release(plan->state->server.norms);
}

/* --- Another width -----------------------------------------------------------------------------*/

void ob_ladder_apply_width(struct onebit_plan *plan) {
  if (plan->state->ladder.width != plan->geometry.width)
    set_width(plan, plan->state->ladder.width);
}

void ob_ladder_reset(struct onebit_plan *plan) {
  struct ob_ladder *ladder = &plan->state->ladder;
  if (!ob_ladder_is_used(ladder))
    return;
  *ladder = (struct ob_ladder){.min = ladder->min,
                               .max = ladder->max,
                               .measured_width = ladder->min,
                               .elements = ladder->elements,
                               .max_stride = ladder->max_stride,
                               .state = {.patience = OB_LADDER_PATIENCE}};
  set_width(plan, ladder->min);
}

void ob_ladder_restore(struct onebit_plan *plan, const struct ob_ladder_state *state) {
  if (!ob_ladder_is_used(&plan->state->ladder))
    return;
  plan->state->ladder.state = *state;
  set_width(plan, ob_ladder_width_in(plan, state->width));
}

onebit_status_t onebit_plan_set_bits(onebit_plan_t plan, int bits) {
  OB_CALL_SCOPE_OF(plan, OB_HANDLE_PLAN);
  const struct ob_ladder *ladder = &plan->state->ladder;
  OB_TRY(ob_plan_check_idle(plan));
  if (!ob_width_is_known(bits) || (unsigned)bits < ladder->min || (unsigned)bits > ladder->max)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "bits is %d, not a width from the plan's bits, %u, to its max_bits, %u", bits,
                    ladder->min, ladder->max);
  if ((unsigned)bits != plan->geometry.width)
    set_width(plan, (unsigned)bits);
  return ONEBIT_OK;
}

/* --- A budget ----------------------------------------------------------------------------------*/

/* Returns the ratio of residual to input at this width, for normally distributed input
 * (docs/ladder.md). The residual at another width is estimated from this ratio. */
static double residual_ratio_of_width(unsigned width) {
  return width == 1 ? 0.81 : width == 2 ? 0.37 : width == 4 ? 0.13 : 0.03;
}

/* Estimates the largest residual of all ranks at another width, as the square of its norm. */
static double estimate_residual(const struct onebit_plan *plan, unsigned width) {
  const double rms = (double)plan->state->ladder.agreed_rms * residual_ratio_of_width(width) /
                     residual_ratio_of_width(plan->state->ladder.measured_width);
  return rms * rms * (double)plan->geometry.layout.elements;
}

/* Returns the bytes of one message with all elements. */
static double count_message_bytes(const struct onebit_plan *plan, unsigned width) {
  const struct ob_layout *layout = &plan->geometry.layout;
  if (plan->options.wire == ONEBIT_WIRE_DENSE)
    return (double)layout->elements * sizeof(float);
  return (double)layout->words * width * sizeof(uint32_t) + (double)layout->blocks * sizeof(float);
}

static unsigned fitted_width(const struct onebit_plan *plan) {
  return plan->state->ladder.fitted ? plan->state->ladder.fitted : plan->geometry.width;
}

static double sum_message_bytes(const onebit_plan_t *plans, size_t count) {
  double bytes = 0;
  for (size_t i = 0; i < count; i++)
    bytes += count_message_bytes(plans[i], fitted_width(plans[i]));
  return bytes;
}

/* Returns the plan whose residual decreases most for each byte added when its bits are doubled,
 * among the plans for which the rest of the budget suffices; NULL: none. */
static struct onebit_plan *find_best_plan(const onebit_plan_t *plans, size_t count, double left) {
  struct onebit_plan *best = NULL;
  double best_fall = 0;
  for (size_t i = 0; i < count; i++) {
    const unsigned width = fitted_width(plans[i]);
    const double bytes =
        count_message_bytes(plans[i], 2 * width) - count_message_bytes(plans[i], width);
    const double falls =
        estimate_residual(plans[i], width) - estimate_residual(plans[i], 2 * width);
    if (width >= plans[i]->state->ladder.max || bytes > left || !(falls > best_fall * bytes))
      continue;
    best = plans[i];
    best_fall = falls / bytes;
  }
  return best;
}

static onebit_status_t check_budget(const onebit_plan_t *plans, size_t count, double budget) {
  if (!plans && count)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "plans is NULL");
  if (!(budget > 0 && budget <= 1))
    return ob_error(ONEBIT_ERROR_ARGUMENT, "budget is %g: it must be above 0 and at most 1",
                    budget);
  for (size_t i = 0; i < count; i++) {
    OB_TRY(ob_handle_check(plans[i], OB_HANDLE_PLAN, "plans"));
    if (plans[i]->state->in_flight)
      return ob_error(ONEBIT_ERROR_BUSY, "plans[%zu] has a request in flight", i);
  }
  return ONEBIT_OK;
}

/* Sets the widths of the plans from their next calls on. Their ladders no longer change them. */
static void apply_fitted_widths(const onebit_plan_t *plans, size_t count) {
  for (size_t i = 0; i < count; i++) {
    struct ob_ladder *ladder = &plans[i]->state->ladder;
    if (ob_ladder_is_used(ladder)) {
      ladder->fixed = true;
      if (ladder->fitted != plans[i]->geometry.width)
        change_ladder_width(plans[i], ladder->fitted);
      ob_ladder_apply_width(plans[i]);
    }
    ladder->fitted = 0;
  }
}

onebit_status_t onebit_plan_fit_budget(const onebit_plan_t *plans, size_t count, double budget) {
  OB_CALL_SCOPE;
  OB_TRY(check_budget(plans, count, budget));
  double dense = 0;
  for (size_t i = 0; i < count; i++) {
    dense += (double)plans[i]->geometry.layout.elements * sizeof(float);
    plans[i]->state->ladder.fitted = plans[i]->state->ladder.min;
  }
  const double fewest = sum_message_bytes(plans, count);
  onebit_status_t status = ONEBIT_OK;
  if (fewest > budget * dense)
    status =
        ob_error(ONEBIT_ERROR_ARGUMENT,
                 "budget is %g, but even the fewest bits of the plans take %g of float32's bytes",
                 budget, fewest / dense);
  for (double left = budget * dense - fewest; status == ONEBIT_OK;) {
    struct onebit_plan *best = find_best_plan(plans, count, left);
    if (!best)
      break;
    left -= count_message_bytes(best, 2 * fitted_width(best)) -
            count_message_bytes(best, fitted_width(best));
    best->state->ladder.fitted *= 2;
  }
  apply_fitted_widths(plans, count);
  return status;
}
