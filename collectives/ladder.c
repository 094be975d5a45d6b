/* Moving a plan between widths. */
#include "collectives/ladder.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/handles.h"
#include "base/log.h"
#include "base/memory.h"
#include "collectives/plan_private.h"
#include "compression/levels.h"

_Static_assert(OB_LADDER_WINDOW == OB_MEASURE_EVERY, "each block is measured once in a window");

/* Up above this ratio of residual to input, and down where it is not, and can not become, above
 * that: docs/ladder.md has what they were chosen on. */
#define CLIMB_RATIO   4.0
#define DESCEND_RATIO 3.0

/* What waits in a residual of the old width comes out in the first calls of the new one. */
#define SETTLING_WINDOWS 2

/* Windows that all ranks could have done with less: twice as many after every climb, since that is
 * how often a width that is too small was tried. */
#define MIN_PATIENCE 4
#define MAX_PATIENCE 64

static bool is_used(const struct ob_ladder *ladder) { return ladder->max > ladder->min; }

size_t ob_ladder_max_bytes(const struct onebit_plan *plan, size_t messages, size_t bytes) {
  return is_used(&plan->state->ladder) ? messages * plan->state->ladder.max_stride : bytes;
}

/* In the text that says what the plan decided: its last line. */
static void tell(struct onebit_plan *plan) {
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
  tell(plan);
}

/* --- Memory ------------------------------------------------------------------------------------*/

static struct ob_norms *allocate(struct onebit_plan *plan, const struct ob_residual *residual) {
  plan->memory_bytes += residual->blocks * sizeof(struct ob_norms);
  return ob_allocate(residual->blocks, sizeof(struct ob_norms));
}

onebit_status_t ob_ladder_create(struct onebit_plan *plan) {
  const onebit_plan_options_t *options = &plan->options;
  plan->state->ladder = (struct ob_ladder){.min = (unsigned)options->bits,
                                           .max = (unsigned)options->max_bits,
                                           .measured_width = (unsigned)options->bits,
                                           .state = {.patience = MIN_PATIENCE}};
  if (options->wire == ONEBIT_WIRE_DENSE)
    plan->state->ladder.max = plan->state->ladder.min;
  if (!is_used(&plan->state->ladder))
    return ONEBIT_OK;
  if (plan->executor != &ob_executor_host)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "device is ONEBIT_DEVICE_CUDA, bits is %d, max_bits is %d: that is for memory "
                    "of the host",
                    options->bits, options->max_bits);
  plan->state->ladder.elements = ob_residual_elements(&plan->state->worker, &plan->geometry.layout);
  plan->state->ladder.max_stride = plan->geometry.stride;
  set_width(plan, plan->state->ladder.min);
  plan->state->worker.norms = allocate(plan, &plan->state->worker);
  /* Of a server that keeps no error there is nothing to measure. */
  const bool serves_error = plan->state->server.serving.rule == OB_SERVE_MEAN;
  plan->state->server.norms = serves_error ? allocate(plan, &plan->state->server) : NULL;
  if (plan->state->worker.norms && (plan->state->server.norms || !serves_error))
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_MEMORY, "no memory for the norms of %zu blocks",
                  plan->state->worker.blocks);
}

void ob_ladder_destroy(const struct onebit_plan *plan) {
  ob_release(plan->state->worker.norms);
  ob_release(plan->state->server.norms);
}

/* --- A call ------------------------------------------------------------------------------------*/

void ob_ladder_begin(const struct onebit_plan *plan) {
  struct ob_ladder *ladder = &plan->state->ladder;
  ladder->heard = (unsigned)ladder->state.wish;
  ladder->max_rms = ladder->rms;
  plan->state->worker.phase = plan->state->server.phase =
      (size_t)(ladder->state.calls % OB_LADDER_WINDOW);
}

void ob_ladder_hear(struct ob_ladder *ladder, unsigned flags, float rms) {
  ladder->heard |= flags & OB_LADDER_FLAGS;
  if (is_used(ladder) && rms > ladder->max_rms)
    ladder->max_rms = rms;
}

static void add(struct ob_norms *sum, const struct ob_norms *norms) {
  sum->input += norms->input;
  sum->residual += norms->residual;
  sum->value += norms->value;
  sum->lower += norms->lower;
}

static void add_measured(const struct ob_residual *residual, struct ob_norms *sum) {
  for (size_t b = residual->phase; residual->norms && b < residual->blocks; b += OB_LADDER_WINDOW)
    add(sum, &residual->norms[b]);
}

static double ratio_of(const struct ob_norms *norms) {
  return norms->input > 0 ? sqrt(norms->residual / norms->input) : 0;
}

/* The largest that the ratio can become with half as many bits: where quantising leaves the part q
 * of a value's norm, |e'| = q |x + e| <= q (|x| + |e|). From q = 1 on it grows without end. */
static double bound_below(const struct ob_norms *norms) {
  const double part = norms->value > 0 ? sqrt(norms->lower / norms->value) : 0;
  return part < 1 ? part / (1 - part) : INFINITY;
}

/* A window is over: what this rank tells in the next call. */
static void make_wish(const struct onebit_plan *plan) {
  struct ob_ladder *ladder = &plan->state->ladder;
  struct ob_norms *server = &ladder->state.server, *worker = &ladder->state.worker;
  const double below = fmax(bound_below(worker), bound_below(server));
  ladder->state.ratio = fmax(ratio_of(worker), ratio_of(server));
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

static void move(const struct onebit_plan *plan, unsigned width) {
  struct ob_ladder *ladder = &plan->state->ladder;
  ob_log(OB_LOG_INFO, plan->comm->rank, "plan %" PRIu64 ": from %u to %u bits, residual ratio %.3g",
         plan->number, plan->geometry.width, width, ladder->state.ratio);
  ladder->state.moves++;
  ladder->state.calm = 0;
  ladder->state.settling = SETTLING_WINDOWS;
  ladder->width = width;
}

void ob_ladder_end(struct onebit_plan *plan) {
  if (is_used(&plan->state->ladder) && plan->state->ladder.width != plan->geometry.width)
    set_width(plan, plan->state->ladder.width);
}

void ob_ladder_fix(struct onebit_plan *plan, unsigned width) {
  plan->state->ladder.fixed = true;
  if (width != plan->geometry.width)
    move(plan, width);
  ob_ladder_end(plan);
}

/* The same on all ranks: of what all have heard, and of what that has led to. */
static void decide(const struct onebit_plan *plan) {
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
    move(plan, 2 * width);
  } else if (ladder->state.calm >= ladder->state.patience && width > ladder->min) {
    ladder->state.descended = true;
    move(plan, width / 2);
  }
}

void ob_ladder_commit(const struct onebit_plan *plan) {
  struct ob_ladder *ladder = &plan->state->ladder;
  if (!is_used(ladder))
    return;
  add_measured(&plan->state->worker, &ladder->state.worker);
  add_measured(&plan->state->server, &ladder->state.server);
  if (ladder->state.voting)
    decide(plan);
  ladder->state.voting = false;
  ladder->state.wish = 0;
  ladder->rms = 0;
  if (++ladder->state.calls % OB_LADDER_WINDOW == 0)
    make_wish(plan);
}

/* --- Widths ------------------------------------------------------------------------------------*/

unsigned ob_ladder_width_of(const struct ob_ladder *ladder, unsigned flags, unsigned width) {
  return is_used(ladder) ? ob_flags_width(flags) : width;
}

void ob_ladder_reset(struct onebit_plan *plan) {
  struct ob_ladder *ladder = &plan->state->ladder;
  if (!is_used(ladder))
    return;
  *ladder = (struct ob_ladder){.min = ladder->min,
                               .max = ladder->max,
                               .measured_width = ladder->min,
                               .elements = ladder->elements,
                               .max_stride = ladder->max_stride,
                               .state = {.patience = MIN_PATIENCE}};
  set_width(plan, ladder->min);
}

/* --- Checkpoints -------------------------------------------------------------------------------*/

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

void ob_ladder_restore(struct onebit_plan *plan, const struct ob_ladder_state *state) {
  if (!is_used(&plan->state->ladder))
    return;
  plan->state->ladder.state = *state;
  set_width(plan, ob_ladder_width_in(plan, state->width));
}

onebit_status_t onebit_plan_set_bits(onebit_plan_t plan, int bits) {
  OB_CALL_SCOPE;
  OB_TRY(ob_handle_check(plan, OB_HANDLE_PLAN, "plan"));
  const struct ob_ladder *ladder = &plan->state->ladder;
  if (plan->state->in_flight)
    return ob_error(ONEBIT_ERROR_BUSY, "the plan has a request in flight");
  if (!ob_width_is_known(bits) || (unsigned)bits < ladder->min || (unsigned)bits > ladder->max)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "bits is %d, and the plan has %u to %u", bits,
                    ladder->min, ladder->max);
  if ((unsigned)bits != plan->geometry.width)
    set_width(plan, (unsigned)bits);
  return ONEBIT_OK;
}
