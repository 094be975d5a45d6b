/*
 * Drifts exchanged by plans: one of the compressed elements of a fragment, and one in float32 of
 * those that stay uncompressed. Both, or none, are applied.
 */
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "collectives/agree.h"
#include "optimizers/outer/outer.h"

/* A plan and the pieces that it is of; plan NULL: none are. */
struct part {
  onebit_plan_t plan;
  size_t pieces, *counts;
  float **values; /* in fragment->drift */
  bool in_flight;
  onebit_status_t status;
};

enum { COMPRESSED, DENSE, PARTS };

struct plans {
  struct part part[PARTS];
};

static struct plans *plans_of(const struct ob_fragment *fragment) { return fragment->state; }

static int part_of(const struct ob_fragment *fragment, const struct ob_outer_piece *piece) {
  const bool all = fragment->outer->options.bits == ONEBIT_OUTER_DENSE;
  return all || piece->uncompressed ? DENSE : COMPRESSED;
}

static onebit_status_t allocate(struct ob_fragment *fragment) {
  struct onebit_outer *outer = fragment->outer;
  struct plans *plans = ob_outer_allocate(outer, 1, sizeof *plans);
  fragment->state = plans;
  for (int p = 0; plans && p < PARTS; p++) {
    struct part *part = &plans->part[p];
    part->counts = ob_outer_allocate(outer, fragment->pieces, sizeof *part->counts);
    part->values = ob_outer_allocate(outer, fragment->pieces, sizeof *part->values);
    if (!part->counts || !part->values)
      plans = NULL;
  }
  if (!plans)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for an outer step of %zu parameters",
                    outer->count);
  for (size_t k = 0; k < fragment->pieces; k++) {
    const struct ob_outer_piece *piece = &fragment->piece[k];
    struct part *part = &plans->part[part_of(fragment, piece)];
    part->counts[part->pieces] = piece->count;
    part->values[part->pieces++] = fragment->drift + piece->at;
  }
  return ONEBIT_OK;
}

static onebit_status_t create_plan(struct ob_fragment *fragment, int p) {
  struct part *part = &plans_of(fragment)->part[p];
  struct ob_plan_shape shape;
  size_t count = 0;
  for (size_t k = 0; k < part->pieces; k++)
    count += part->counts[k];
  onebit_status_t status = ob_outer_shape(fragment->outer, p == DENSE, &shape);
  shape.pieces = part->pieces;
  shape.counts = part->counts;
  shape.valid = NULL;
  shape.segment_a_piece = false;
  shape.refused = &fragment->outer->refused;
  return ob_plan_create(fragment->outer->comm, status, &shape, count, &part->plan);
}

static onebit_status_t create(struct ob_fragment *fragment) {
  OB_TRY(ob_agree(fragment->outer->comm, allocate(fragment), NULL, 0));
  for (int p = 0; p < PARTS; p++)
    if (plans_of(fragment)->part[p].pieces)
      OB_TRY(create_plan(fragment, p));
  return ONEBIT_OK;
}

static void destroy(struct ob_fragment *fragment) {
  struct plans *plans = plans_of(fragment);
  for (int p = 0; plans && p < PARTS; p++) {
    onebit_plan_destroy(plans->part[p].plan);
    ob_release(plans->part[p].counts);
    ob_release(plans->part[p].values);
  }
  ob_release(plans);
  fragment->state = NULL;
}

/* --- An exchange -------------------------------------------------------------------------------*/

/* Held: nothing is applied before both are known to be well. */
static struct ob_call call_of(const struct ob_fragment *fragment, const struct part *part) {
  return (struct ob_call){.source = {.inputs = (const void *const *)part->values,
                                     .factor = fragment->factor,
                                     .weight = 1},
                          .outputs = (void *const *)part->values,
                          .agreed = fragment->checksum,
                          .agreed_name = "the consensus (its checksum)",
                          .agreed_whole = true,
                          .hold = true};
}

/* What began is ended by test, also where another part could not begin. */
static onebit_status_t begin(struct ob_fragment *fragment, onebit_status_t status) {
  struct plans *plans = plans_of(fragment);
  bool any = false;
  for (int p = 0; p < PARTS; p++) {
    struct part *part = &plans->part[p];
    part->status = ONEBIT_OK;
    if (!part->plan)
      continue;
    const struct ob_call call = call_of(fragment, part);
    part->status = ob_plan_start(part->plan, status, &call);
    part->in_flight = part->status == ONEBIT_OK;
    any |= part->in_flight;
    if (status == ONEBIT_OK)
      status = part->status;
  }
  return any ? ONEBIT_OK : status;
}

static onebit_status_t worse_of(onebit_status_t a, onebit_status_t b) {
  return a == ONEBIT_OK || (a == ONEBIT_SKIPPED && b != ONEBIT_OK) ? b : a;
}

static onebit_status_t test(struct ob_fragment *fragment, bool wait) {
  struct plans *plans = plans_of(fragment);
  onebit_status_t status = ONEBIT_OK;
  for (int p = 0; p < PARTS; p++) {
    struct part *part = &plans->part[p];
    if (!part->in_flight)
      continue;
    part->status = ob_plan_test(part->plan, wait);
    if (part->status == ONEBIT_IN_PROGRESS)
      return ONEBIT_IN_PROGRESS;
    part->in_flight = false;
  }
  for (int p = 0; p < PARTS; p++) {
    status = worse_of(status, plans->part[p].status);
    if (status != ONEBIT_OK && status == plans->part[p].status && plans->part[p].plan)
      ob_error(status, "%s", plans->part[p].plan->error);
  }
  for (int p = 0; status == ONEBIT_OK && p < PARTS; p++)
    if (plans->part[p].plan)
      ob_plan_apply(plans->part[p].plan);
  return status;
}

static void abandon(struct ob_fragment *fragment) {
  for (int p = 0; p < PARTS; p++) {
    ob_plan_abandon(plans_of(fragment)->part[p].plan);
    plans_of(fragment)->part[p].in_flight = false;
  }
}

static void cost(const struct ob_fragment *fragment, uint64_t *wire, uint64_t *memory) {
  const struct plans *plans = plans_of(fragment);
  *wire = *memory = 0;
  for (int p = 0; p < PARTS; p++)
    if (plans->part[p].plan) {
      *wire += plans->part[p].plan->wire_bytes;
      *memory += plans->part[p].plan->memory_bytes;
    }
}

/* --- Residuals ---------------------------------------------------------------------------------*/

/* A plan that is faster in float32 has none. */
static size_t runs_of(const struct ob_fragment *fragment, enum ob_saved what,
                      struct ob_outer_run *runs) {
  const struct part *part = &plans_of(fragment)->part[COMPRESSED];
  size_t count = 0;
  if (!part->plan || part->plan->options.wire == ONEBIT_WIRE_DENSE ||
      fragment->outer->options.no_error_feedback)
    return 0;
  const struct ob_layout *layout = &part->plan->geometry.layout;
  const struct ob_residual *residual =
      what == OB_SAVED_SERVER ? &part->plan->server : &part->plan->worker;
  for (size_t k = 0; k < part->pieces; k++) {
    const size_t first = ob_offset_in(layout, k, residual->first);
    const size_t end = ob_offset_in(layout, k, residual->first + residual->blocks);
    if (end > first)
      runs[count++] =
          (struct ob_outer_run){(size_t)(part->values[k] - fragment->drift) + first, end - first};
  }
  return count;
}

static onebit_status_t export_residual(const struct ob_fragment *fragment, enum ob_saved what,
                                       float *values) {
  const struct onebit_plan *plan = plans_of(fragment)->part[COMPRESSED].plan;
  return ob_residual_export(what == OB_SAVED_SERVER ? &plan->server : &plan->worker,
                            &plan->geometry.layout, values);
}

static onebit_status_t import_residual(struct ob_fragment *fragment, enum ob_saved what,
                                       const float *values) {
  onebit_plan_t plan = plans_of(fragment)->part[COMPRESSED].plan;
  const bool server = what == OB_SAVED_SERVER;
  return onebit_plan_import_residual(plan, server ? NULL : values, server ? values : NULL);
}

const struct ob_outer_exchange ob_outer_plans = {.name = "plans",
                                                 .create = create,
                                                 .destroy = destroy,
                                                 .begin = begin,
                                                 .test = test,
                                                 .abandon = abandon,
                                                 .cost = cost,
                                                 .keeps = true,
                                                 .runs = runs_of,
                                                 .export_residual = export_residual,
                                                 .import_residual = import_residual};
