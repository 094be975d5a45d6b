/* The width of a plan: set, restored, or that of the ladder; and the widths of several plans by a
 * budget of bytes. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/memory.h"
#include "collectives/plan_private.h"
#include "compression/levels.h"

/* Writes the last line of the text that explains the plan. */
static void widths_tell(struct onebit_plan *plan) {
  const struct ob_ladder *ladder = &plan->state->ladder;
  char *text = plan->choice.text, *line = strstr(text, "bits an element: ");
  if (!line)
    line = text + strlen(text);
  snprintf(line, sizeof plan->choice.text - (size_t)(line - text),
           "bits an element: %u now, %u to %u, changes: %" PRIu64 "\n", plan->geometry.width,
           ladder->min, ladder->max, ladder->state.moves);
}

static void set_width(struct onebit_plan *plan, unsigned width) {
  plan->state->ladder.width = width;
  ob_schedule_set_width(plan, width);
  widths_tell(plan);
}

/* --- Memory ------------------------------------------------------------------------------------*/

static struct ob_norms *widths_allocate(struct onebit_plan *plan,
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
                    "device is ONEBIT_DEVICE_CUDA, bits is %d, max_bits is %d: that is for memory "
                    "of the host",
                    options->bits, options->max_bits);
  plan->state->ladder.elements = ob_residual_elements(&plan->state->worker, &plan->geometry.layout);
  plan->state->ladder.max_stride = plan->geometry.stride;
  set_width(plan, plan->state->ladder.min);
  plan->state->worker.norms = widths_allocate(plan, &plan->state->worker);
  /* A server without a residual has nothing to measure. */
  const bool serves_error = plan->state->server.serving.rule == OB_SERVE_MEAN;
  plan->state->server.norms = serves_error ? widths_allocate(plan, &plan->state->server) : NULL;
  if (plan->state->worker.norms && (plan->state->server.norms || !serves_error))
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_MEMORY, "no memory for the norms of %zu blocks",
                  plan->state->worker.blocks);
}

void ob_ladder_destroy(const struct onebit_plan *plan) {
  ob_release(plan->state->worker.norms);
  ob_release(plan->state->server.norms);
}

/* --- Another width -----------------------------------------------------------------------------*/

void ob_ladder_end(struct onebit_plan *plan) {
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
  if (plan->state->in_flight)
    return ob_error(ONEBIT_ERROR_BUSY, "the plan has a request in flight");
  if (!ob_width_is_known(bits) || (unsigned)bits < ladder->min || (unsigned)bits > ladder->max)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "bits is %d, not a width of the plan, %u to %u", bits,
                    ladder->min, ladder->max);
  if ((unsigned)bits != plan->geometry.width)
    set_width(plan, (unsigned)bits);
  return ONEBIT_OK;
}

/* --- A budget ----------------------------------------------------------------------------------*/

/* The residual over the input in 1, 2, 4 and 8 bits, of normal numbers (docs/ladder.md): what a
 * residual would be in another width than its own, by these. */
static double residual_part(unsigned width) {
  return width == 1 ? 0.81 : width == 2 ? 0.37 : width == 4 ? 0.13 : 0.03;
}

/* Returns the largest residual of all ranks, as the square of its norm, in another width. */
static double residual_in(const struct onebit_plan *plan, unsigned width) {
  const double rms = (double)plan->state->ladder.agreed_rms * residual_part(width) /
                     residual_part(plan->state->ladder.measured_width);
  return rms * rms * (double)plan->geometry.layout.elements;
}

/* Returns the bytes of one message with all elements. */
static double bytes_in(const struct onebit_plan *plan, unsigned width) {
  const struct ob_layout *layout = &plan->geometry.layout;
  if (plan->options.wire == ONEBIT_WIRE_DENSE)
    return (double)layout->elements * sizeof(float);
  return (double)layout->words * width * sizeof(uint32_t) + (double)layout->blocks * sizeof(float);
}

static unsigned width_of(const struct onebit_plan *plan) {
  return plan->state->ladder.fitted ? plan->state->ladder.fitted : plan->geometry.width;
}

static double sum_of_bytes(const onebit_plan_t *plans, size_t count) {
  double bytes = 0;
  for (size_t i = 0; i < count; i++)
    bytes += bytes_in(plans[i], width_of(plans[i]));
  return bytes;
}

/* The plan whose residual falls most per byte when its bits are doubled, among those for which the
 * budget suffices. */
static struct onebit_plan *widths_find_best(const onebit_plan_t *plans, size_t count, double left) {
  struct onebit_plan *best = NULL;
  double best_fall = 0;
  for (size_t i = 0; i < count; i++) {
    const unsigned width = width_of(plans[i]);
    const double bytes = bytes_in(plans[i], 2 * width) - bytes_in(plans[i], width);
    const double falls = residual_in(plans[i], width) - residual_in(plans[i], 2 * width);
    if (width >= plans[i]->state->ladder.max || bytes > left || !(falls > best_fall * bytes))
      continue;
    best = plans[i];
    best_fall = falls / bytes;
  }
  return best;
}

static onebit_status_t widths_check(const onebit_plan_t *plans, size_t count, double budget) {
  if (!plans && count)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "plans is NULL");
  if (!(budget > 0 && budget <= 1))
    return ob_error(ONEBIT_ERROR_ARGUMENT, "budget is %g, not above 0 and up to 1", budget);
  for (size_t i = 0; i < count; i++) {
    OB_TRY(ob_handle_check(plans[i], OB_HANDLE_PLAN, "plans"));
    if (plans[i]->state->in_flight)
      return ob_error(ONEBIT_ERROR_BUSY, "plans[%zu] has a request in flight", i);
  }
  return ONEBIT_OK;
}

static void widths_begin(const onebit_plan_t *plans, size_t count) {
  for (size_t i = 0; i < count; i++)
    plans[i]->state->ladder.fitted = plans[i]->state->ladder.min;
}

static void widths_end(const onebit_plan_t *plans, size_t count) {
  for (size_t i = 0; i < count; i++) {
    struct ob_ladder *ladder = &plans[i]->state->ladder;
    if (ob_ladder_is_used(ladder)) {
      ob_ladder_fix(plans[i], ladder->fitted);
      ob_ladder_end(plans[i]);
    }
    ladder->fitted = 0;
  }
}

onebit_status_t onebit_plan_fit_budget(const onebit_plan_t *plans, size_t count, double budget) {
  OB_CALL_SCOPE;
  OB_TRY(widths_check(plans, count, budget));
  double dense = 0;
  for (size_t i = 0; i < count; i++)
    dense += (double)plans[i]->geometry.layout.elements * sizeof(float);
  widths_begin(plans, count);
  const double fewest = sum_of_bytes(plans, count);
  onebit_status_t status = ONEBIT_OK;
  if (fewest > budget * dense)
    status = ob_error(ONEBIT_ERROR_ARGUMENT,
                      "budget is %g, and the fewest bits of the plans take %g of float32", budget,
                      fewest / dense);
  for (double left = budget * dense - fewest; status == ONEBIT_OK;) {
    struct onebit_plan *best = widths_find_best(plans, count, left);
    if (!best)
      break;
    left -= bytes_in(best, 2 * width_of(best)) - bytes_in(best, width_of(best));
    best->state->ladder.fitted *= 2;
  }
  widths_end(plans, count);
  return status;
}
