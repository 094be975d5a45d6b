/* Norms of sections of an optimizer's state. */
#include "optimizers/norms.h"

#include <math.h>

#include "base/error.h"
#include "base/memory.h"

struct ob_span ob_span_of_bucket(const struct ob_bucket *bucket, bool padding) {
  return (struct ob_span){0, ob_plan_layout(bucket->bits)->blocks, padding};
}

struct ob_span ob_span_of_tensor(const struct onebit_optimizer *optimizer, size_t tensor) {
  const struct ob_tensor *of = &optimizer->tensors[tensor];
  return (struct ob_span){of->first_block, of->end_block, false};
}

/* A walk over sections of one bucket. */
struct look {
  const struct onebit_optimizer *optimizer;
  struct ob_section section, variance;
  struct ob_span span;
  struct ob_reader reader;
  float *values;  /* two times OB_CHUNK */
  double divisor; /* of what is stored */
  double squares;
  size_t beyond;
};

/* Returns the elements of a run that count. A piece of no tensor is padding; so may be the end of
 * others. */
static struct ob_run counted_run(const struct look *look, const struct ob_run *run) {
  const struct ob_bucket *bucket = look->section.bucket;
  bool none = bucket->tensor_of[run->piece] == look->optimizer->tensor_count;
  size_t valid = none ? 0 : ob_plan_layout(bucket->bits)->piece[run->piece].valid;
  size_t left = run->offset < valid ? valid - run->offset : 0;
  bool all = look->span.padding || left > run->count;
  return (struct ob_run){run->piece, run->offset, all ? run->count : left};
}

/* Returns the factor of the piece's momentum in messages. Padding has none. */
static float scaling_of(const struct look *look, const struct ob_run *run) {
  const struct ob_bucket *bucket = look->section.bucket;
  bool travels = look->section.content >= OB_CONTENT_RESIDUAL;
  return travels && bucket->scalings[run->piece] != 0 ? bucket->scalings[run->piece] : 1;
}

static onebit_status_t add_squares(struct look *look, const struct ob_run *all) {
  const struct ob_run run = counted_run(look, all);
  double divisor = look->divisor * (double)scaling_of(look, all), sum = 0;
  if (run.count)
    OB_TRY(ob_section_read(&look->reader, &look->section, &run, look->values));
  for (size_t i = 0; i < run.count; i++)
    sum += (double)look->values[i] * (double)look->values[i];
  look->squares += sum / (divisor * divisor);
  return ONEBIT_OK;
}

/* Elements that make a step of more than ONEBIT_STEP_BOUND: what is exchanged is the step, or the
 * momentum, and then the variance is the reciprocals of the denominators. */
static onebit_status_t add_beyond(struct look *look, const struct ob_run *all) {
  const struct ob_run run = counted_run(look, all);
  const struct onebit_optimizer *optimizer = look->optimizer;
  const bool step = optimizer->moments.exchange == ONEBIT_ADAM_EXCHANGE_STEP;
  float *more = look->values + OB_CHUNK;
  const float factor = ob_factors_of(optimizer, optimizer->steps).adam.momentum_factor;
  if (run.count)
    OB_TRY(ob_section_read(&look->reader, &look->section, &run, look->values));
  if (run.count && !step)
    OB_TRY(ob_section_read(&look->reader, &look->variance, &run, more));
  for (size_t i = 0; i < run.count; i++) {
    float size = fabsf(look->values[i]) / scaling_of(look, all) * factor;
    look->beyond += (step ? size : more[i] * size) > ONEBIT_STEP_BOUND;
  }
  return ONEBIT_OK;
}

/* At the blocks of the span that the section has. */
static onebit_status_t norms_look_at(struct look *look,
                                     onebit_status_t (*body)(struct look *look,
                                                             const struct ob_run *run)) {
  size_t first = look->span.first, end = look->span.end;
  first = first > look->section.first ? first : look->section.first;
  end = end < look->section.end ? end : look->section.end;
  if (first >= end)
    return ONEBIT_OK;
  onebit_status_t status = ob_reader_create(&look->reader, look->optimizer);
  look->values = ob_allocate(2 * OB_CHUNK, sizeof *look->values);
  if (status == ONEBIT_OK && !look->values)
    status = ob_error(ONEBIT_ERROR_MEMORY, "no memory to read the state");
  const struct ob_layout *layout = ob_plan_layout(look->section.plan);
  for (struct ob_run run = {0}; status == ONEBIT_OK && ob_next_run(layout, first, end, &run);)
    status = body(look, &run);
  ob_reader_destroy(&look->reader);
  ob_release(look->values);
  return status;
}

/* Adds squares. As a compensated value the momentum is stored times beta1 from the freeze on. If
 * only the servers know the mean, the signal is this rank's own message. */
onebit_status_t ob_add_squares(const struct onebit_optimizer *optimizer,
                               const struct ob_bucket *bucket, enum ob_norm norm,
                               struct ob_span span, double *squares) {
  static const enum ob_saved sections[] = {OB_SAVED_PARAMETERS, OB_SAVED_MOMENTUM, OB_SAVED_WORKER,
                                           OB_SAVED_WORKER};
  const struct ob_method *method = optimizer->method;
  enum ob_stage stage = ob_stage_of(optimizer);
  if (norm >= OB_NORM_RESIDUAL && method->momentum && stage != OB_STAGE_SENT)
    return ONEBIT_OK; /* the future residual is the momentum */
  struct look look = {.optimizer = optimizer,
                      .section = ob_section_of(bucket, stage, sections[norm]),
                      .span = span,
                      .divisor = 1};
  if (norm == OB_NORM_SIGNAL)
    look.section.content = method->sharded || method->serve_rule != OB_SERVE_MEAN
                               ? OB_CONTENT_SENT
                               : OB_CONTENT_MESSAGES;
  if (norm == OB_NORM_MOMENTUM && method->momentum && !bucket->uncompressed &&
      stage == OB_STAGE_FROZEN)
    look.divisor = (double)(float)optimizer->moments.beta1;
  OB_TRY(norms_look_at(&look, add_squares));
  *squares += look.squares;
  return ONEBIT_OK;
}

onebit_status_t ob_count_bounded(const struct onebit_optimizer *optimizer,
                                 const struct ob_bucket *bucket, struct ob_span span,
                                 size_t *beyond) {
  enum ob_stage stage = ob_stage_of(optimizer);
  *beyond = 0;
  if (stage != OB_STAGE_SENT || bucket->uncompressed || !bucket->arrays[OB_VARIANCE] ||
      isinf(ob_step_bound(optimizer)))
    return ONEBIT_OK;
  struct look look = {.optimizer = optimizer,
                      .section = ob_section_of(bucket, stage, OB_SAVED_MOMENTUM),
                      .variance = ob_section_of(bucket, stage, OB_SAVED_VARIANCE),
                      .span = span};
  OB_TRY(norms_look_at(&look, add_beyond));
  *beyond = look.beyond;
  return ONEBIT_OK;
}
