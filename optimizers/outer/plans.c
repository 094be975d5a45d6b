/*
 * Exchanges drifts by plans: one for the compressed elements of a fragment, and one in float32 for
 * those that stay uncompressed. Either both are applied or none.
 */

#include "base/error.h"
#include "base/memory.h"
#include "collectives/communicator.h"
#include "optimizers/outer/outer.h"

/* A plan and its pieces. The plan is NULL if there are no pieces. */
struct part {
  onebit_plan_t plan;
  size_t pieces, *counts;
  float **values; /* addresses in fragment->drift */
  float **there;  /* on a device: a copy of these pointers in its memory */
  bool in_flight;
  struct ob_outcome outcome; /* the outcome of its call */
};

enum { COMPRESSED, DENSE, PARTS };

struct plans {
  struct part part[PARTS];
  /* deferred: the host learns how calls end only when it asks. put: all steps of the latest calls
   * are on the stream of the first plan. couple: memory of the device by which two plans are
   * coupled. */
  bool deferred, put;
  void *couple;
};

static struct plans *fragment_plans(const struct ob_fragment *fragment) { return fragment->state; }

static onebit_status_t plans_allocate(struct ob_fragment *fragment) {
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
    return ob_outer_no_memory(outer);
  for (size_t k = 0; k < fragment->pieces; k++) {
    struct ob_outer_piece *piece = &fragment->piece[k];
    struct part *part = &plans->part[ob_outer_is_dense(outer, piece) ? DENSE : COMPRESSED];
    piece->in_plan = part->pieces;
    part->counts[part->pieces] = piece->count;
    part->values[part->pieces++] = fragment->drift + piece->at;
  }
  return ONEBIT_OK;
}

/* Copies the pointers to the device, and allocates memory by which two plans are coupled. */
static onebit_status_t copy_pointers(struct ob_fragment *fragment) {
  const struct onebit_outer *outer = fragment->outer;
  const struct ob_memory *memory = outer->executor->memory;
  struct plans *plans = fragment_plans(fragment);
  plans->couple = memory->allocate(PARTS, sizeof(void *));
  for (int p = 0; p < PARTS; p++) {
    struct part *part = &plans->part[p];
    part->there = memory->allocate(part->pieces, sizeof *part->there);
    if (!part->there || !plans->couple)
      return ob_error(ONEBIT_ERROR_MEMORY, "out of device memory for an outer step");
    OB_TRY(ob_outer_copy(outer, part->there, part->values, part->pieces * sizeof *part->there));
  }
  return ONEBIT_OK;
}

static onebit_status_t plans_create_plan(struct ob_fragment *fragment, int p) {
  struct part *part = &fragment_plans(fragment)->part[p];
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

static onebit_status_t plans_create(struct ob_fragment *fragment) {
  const struct onebit_outer *outer = fragment->outer;
  onebit_status_t status = plans_allocate(fragment);
  if (status == ONEBIT_OK && outer->options.device != ONEBIT_DEVICE_HOST)
    status = copy_pointers(fragment);
  OB_TRY(ob_agree(outer->comm, status, NULL, 0));
  for (int p = 0; p < PARTS; p++) {
    struct part *part = &fragment_plans(fragment)->part[p];
    if (!part->pieces)
      continue;
    OB_TRY(plans_create_plan(fragment, p));
    fragment_plans(fragment)->deferred =
        ob_executor_for(outer->comm, outer->options.device)->deferred;
  }
  return ONEBIT_OK;
}

static void plans_destroy(struct ob_fragment *fragment) {
  const struct ob_memory *memory = fragment->outer->executor->memory;
  struct plans *plans = fragment_plans(fragment);
  for (int p = 0; plans && p < PARTS; p++) {
    onebit_plan_destroy(plans->part[p].plan);
    ob_release(plans->part[p].counts);
    ob_release(plans->part[p].values);
    memory->release(plans->part[p].there);
  }
  if (plans)
    memory->release(plans->couple);
  ob_release(plans);
  fragment->state = NULL;
}

/* --- An exchange -------------------------------------------------------------------------------*/

/* Returns a call that is held: its results are applied once the calls of both plans have
 * succeeded. */
static struct ob_call make_plans_call(const struct ob_fragment *fragment, const struct part *part) {
  const struct plans *plans = fragment_plans(fragment);
  const struct onebit_plan *first = plans->part[COMPRESSED].plan;
  struct ob_call call = {.source = {.inputs = (const void *const *)part->values,
                                    .factor = fragment->factor,
                                    .weight = 1},
                         .outputs = (void *const *)part->values,
                         .device_inputs = (void *const *)part->there,
                         .device_outputs = (void *const *)part->there,
                         .agreed = fragment->checksum,
                         .agreed_name = "the consensus (its checksum)",
                         .agreed_whole = true,
                         .on_stream = plans->deferred,
                         .hold = true};
  if (plans->deferred)
    call.stream = fragment->outer->executor->stream_of(first ? first : part->plan);
  return call;
}

static bool is_coupled(const struct plans *plans) {
  return plans->deferred && plans->part[COMPRESSED].plan && plans->part[DENSE].plan;
}

static onebit_status_t plans_couple(const struct ob_fragment *fragment) {
  const struct plans *plans = fragment_plans(fragment);
  const struct onebit_plan *const both[] = {plans->part[COMPRESSED].plan, plans->part[DENSE].plan};
  return fragment->outer->executor->couple(both, plans->couple);
}

/* Begins an exchange. The row's `test` ends the calls that have begun, even if the call of the
 * other part could not begin. */
static onebit_status_t plans_begin(struct ob_fragment *fragment, onebit_status_t status) {
  struct plans *plans = fragment_plans(fragment);
  bool any = false;
  plans->put = false;
  if (status == ONEBIT_OK && is_coupled(plans))
    status = plans_couple(fragment);
  for (int p = 0; p < PARTS; p++) {
    struct part *part = &plans->part[p];
    part->outcome.status = ONEBIT_OK;
    if (!part->plan)
      continue;
    const struct ob_call call = make_plans_call(fragment, part);
    const onebit_status_t started = ob_plan_start(part->plan, status, &call);
    part->in_flight = ob_outcome_add(&part->outcome, started) == ONEBIT_OK;
    any |= part->in_flight;
    if (status == ONEBIT_OK)
      status = started;
  }
  return any ? ONEBIT_OK : status;
}

/* Applies the results on the stream, after the steps on it that decide whether results are
 * applied. */
static onebit_status_t plans_apply_on_stream(struct ob_fragment *fragment) {
  struct plans *plans = fragment_plans(fragment);
  onebit_status_t status = ONEBIT_OK;
  if (is_coupled(plans))
    status = fragment->outer->executor->join(plans->part[COMPRESSED].plan, plans->couple);
  for (int p = 0; p < PARTS; p++)
    if (plans->part[p].plan && plans->part[p].outcome.status == ONEBIT_OK)
      ob_plan_apply(plans->part[p].plan);
  plans->put = true;
  return status;
}

/* Stores the outcome of both calls once the host knows it. */
static onebit_status_t plans_settle(struct ob_fragment *fragment, bool wait) {
  struct plans *plans = fragment_plans(fragment);
  if (!plans->put)
    OB_TRY(plans_apply_on_stream(fragment));
  for (int p = 0; p < PARTS; p++) {
    struct part *part = &plans->part[p];
    if (part->plan && !ob_steps_are_settled(part->plan, wait))
      return ONEBIT_IN_PROGRESS;
  }
  for (int p = 0; p < PARTS; p++) {
    struct part *part = &plans->part[p];
    if (part->plan && part->outcome.status == ONEBIT_OK)
      ob_outcome_add(&part->outcome, ob_plan_settle(part->plan));
  }
  return ONEBIT_OK;
}

/* Applies the results once the host knows how the calls have ended. The device's work on them is
 * then complete. */
static onebit_status_t plans_apply(struct plans *plans) {
  for (int p = 0; p < PARTS; p++)
    if (plans->part[p].plan)
      OB_TRY(ob_plan_apply(plans->part[p].plan));
  return ONEBIT_OK;
}

static onebit_status_t plans_test(struct ob_fragment *fragment, bool wait) {
  struct plans *plans = fragment_plans(fragment);
  struct ob_outcome worst = {.status = ONEBIT_OK};
  for (int p = 0; p < PARTS; p++) {
    struct part *part = &plans->part[p];
    if (!part->in_flight)
      continue;
    const onebit_status_t status = ob_plan_test(part->plan, wait);
    if (status == ONEBIT_IN_PROGRESS)
      return status;
    ob_outcome_add(&part->outcome, status);
    part->in_flight = false;
  }
  if (plans->deferred)
    OB_TRY(plans_settle(fragment, wait));
  for (int p = 0; p < PARTS; p++)
    ob_outcome_add(&worst, ob_outcome_status(&plans->part[p].outcome));
  OB_TRY(ob_outcome_status(&worst));
  return plans->deferred ? ONEBIT_OK : plans_apply(plans);
}

static void plans_abandon(struct ob_fragment *fragment) {
  for (int p = 0; p < PARTS; p++) {
    ob_plan_abandon(fragment_plans(fragment)->part[p].plan);
    fragment_plans(fragment)->part[p].in_flight = false;
  }
}

static void plans_cost(const struct ob_fragment *fragment, uint64_t *wire, uint64_t *memory) {
  const struct plans *plans = fragment_plans(fragment);
  *wire = *memory = 0;
  for (int p = 0; p < PARTS; p++)
    if (plans->part[p].plan) {
      *wire += ob_plan_wire_bytes(plans->part[p].plan);
      *memory += ob_plan_memory_bytes(plans->part[p].plan);
    }
}

/* --- Residuals ---------------------------------------------------------------------------------*/

static const struct ob_residual *plans_residual(const struct ob_fragment *fragment,
                                                enum ob_saved what) {
  return ob_plan_residual(fragment_plans(fragment)->part[COMPRESSED].plan, what == OB_SAVED_SERVER);
}

/* Returns true if the fragment has a residual. It has none if its plan sends float32 because that
 * is faster. */
static bool plans_has_residual(const struct ob_fragment *fragment) {
  const struct onebit_plan *plan = fragment_plans(fragment)->part[COMPRESSED].plan;
  return plan && ob_plan_is_compressed(plan) && !fragment->outer->options.no_error_feedback;
}

static struct ob_run plans_extent(const struct ob_fragment *fragment, enum ob_saved what,
                                  size_t k) {
  const struct ob_outer_piece *piece = &fragment->piece[k];
  if (!plans_has_residual(fragment) || ob_outer_is_dense(fragment->outer, piece))
    return (struct ob_run){0};
  const struct ob_residual *residual = plans_residual(fragment, what);
  const struct ob_layout *layout = ob_plan_layout(fragment_plans(fragment)->part[COMPRESSED].plan);
  const size_t first = ob_block_offset_in_piece(layout, piece->in_plan, residual->first);
  const size_t end =
      ob_block_offset_in_piece(layout, piece->in_plan, residual->first + residual->blocks);
  return (struct ob_run){k, first, end > first ? end - first : 0};
}

static onebit_status_t plans_export_residual(const struct ob_fragment *fragment, enum ob_saved what,
                                             float *values) {
  return ob_residual_export(plans_residual(fragment, what),
                            ob_plan_layout(fragment_plans(fragment)->part[COMPRESSED].plan),
                            values);
}

static onebit_status_t plans_import_residual(struct ob_fragment *fragment, enum ob_saved what,
                                             const float *values) {
  onebit_plan_t plan = fragment_plans(fragment)->part[COMPRESSED].plan;
  const bool server = what == OB_SAVED_SERVER;
  return onebit_plan_import_residual(plan, server ? NULL : values, server ? values : NULL);
}

static onebit_status_t plans_keep(struct ob_fragment *fragment) {
  const struct onebit_outer *outer = fragment->outer;
  const struct part *part = &fragment_plans(fragment)->part[COMPRESSED];
  if (outer->options.device == ONEBIT_DEVICE_HOST)
    return ob_outer_export_residual(fragment, OB_SAVED_WORKER, fragment->drift);
  OB_TRY(ob_outer_clear(outer, fragment->drift, fragment->count * sizeof(float)));
  if (!plans_has_residual(fragment) || !plans_residual(fragment, OB_SAVED_WORKER)->blocks)
    return ONEBIT_OK;
  return outer->executor->export_worker(part->plan, (void *const *)part->there);
}

const struct ob_outer_exchange ob_outer_plans = {.name = "plans",
                                                 .create = plans_create,
                                                 .destroy = plans_destroy,
                                                 .begin = plans_begin,
                                                 .test = plans_test,
                                                 .abandon = plans_abandon,
                                                 .cost = plans_cost,
                                                 .keep = plans_keep,
                                                 .extent = plans_extent,
                                                 .export_residual = plans_export_residual,
                                                 .import_residual = plans_import_residual};
