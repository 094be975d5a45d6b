/* Returns information about an optimizer to its user: configuration, norms of the state,
 * statistics, and warnings. */
#include <math.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/memory.h"
#include "onebit/statistics.h"
#include "optimizers/state.h"

/* --- Norms of the state in a part of a bucket, as sums of squares. Each norm reads the state once;
 * in device memory, a part at a time. */

/* The blocks first .. end - 1 of a bucket's layout, with their padding or without. */
struct span {
  size_t first, end;
  bool padding;
};

enum norm {
  NORM_PARAMETERS, /* the parameters, or their master values */
  NORM_MOMENTUM,   /* the part that is equal on all ranks, or the value exchanged in its place */
  NORM_RESIDUAL,   /* the residual of this rank's messages */
  NORM_SIGNAL      /* the latest compressed exchange, in elements with a residual on this rank */
};

/* Returns the span of all blocks of a bucket. */
static struct span bucket_span(const struct ob_bucket *bucket, bool padding) {
  return (struct span){0, ob_plan_layout(bucket->bits)->blocks, padding};
}

static struct span tensor_span(const struct onebit_optimizer *optimizer, size_t tensor) {
  const struct ob_tensor *of = &optimizer->tensors[tensor];
  return (struct span){of->first_block, of->end_block, false};
}

/* The state of a loop over the runs of a section. */
struct norm_walk {
  const struct onebit_optimizer *optimizer;
  struct ob_section section, variance;
  struct span span;
  struct ob_reader reader;
  float *values;  /* two times OB_CHUNK */
  double divisor; /* the divisor of stored values */
  double squares;
  size_t beyond;
};

/* Returns the part of a run that is not padding, or the whole run if the walk's span counts padding
 * too. A piece without a tensor is all padding; other pieces may end with padding. */
static struct ob_run unpadded_run(const struct norm_walk *walk, const struct ob_run *run) {
  const struct ob_bucket *bucket = walk->section.bucket;
  bool none = bucket->tensor_of[run->piece] == walk->optimizer->tensor_count;
  size_t valid = none ? 0 : ob_plan_layout(bucket->bits)->piece[run->piece].valid;
  size_t left = run->offset < valid ? valid - run->offset : 0;
  bool all = walk->span.padding || left > run->count;
  return (struct ob_run){run->piece, run->offset, all ? run->count : left};
}

/* Returns the factor of the piece's momentum in messages, or 1 for padding. */
static float momentum_scaling(const struct norm_walk *walk, const struct ob_run *run) {
  const struct ob_bucket *bucket = walk->section.bucket;
  bool travels = walk->section.content >= OB_CONTENT_RESIDUAL;
  return travels && bucket->scalings[run->piece] != 0 ? bucket->scalings[run->piece] : 1;
}

static onebit_status_t add_run_squares(struct norm_walk *walk, const struct ob_run *all) {
  const struct ob_run run = unpadded_run(walk, all);
  double divisor = walk->divisor * (double)momentum_scaling(walk, all), sum = 0;
  if (run.count)
    OB_TRY(ob_section_read(&walk->reader, &walk->section, &run, walk->values));
  for (size_t i = 0; i < run.count; i++)
    sum += (double)walk->values[i] * (double)walk->values[i];
  walk->squares += sum / (divisor * divisor);
  return ONEBIT_OK;
}

/* Counts the elements whose step is larger than ONEBIT_STEP_BOUND. The exchanged values are the
 * steps, or they are the momentum; then the variance's array has the reciprocals of the
 * denominators. */
static onebit_status_t count_run_beyond(struct norm_walk *walk, const struct ob_run *all) {
  const struct ob_run run = unpadded_run(walk, all);
  const struct onebit_optimizer *optimizer = walk->optimizer;
  const bool step = optimizer->moments.exchange == ONEBIT_ADAM_EXCHANGE_STEP;
  float *more = walk->values + OB_CHUNK;
  const float factor = ob_make_factors(optimizer, optimizer->steps).adam.momentum_factor;
  if (run.count)
    OB_TRY(ob_section_read(&walk->reader, &walk->section, &run, walk->values));
  if (run.count && !step)
    OB_TRY(ob_section_read(&walk->reader, &walk->variance, &run, more));
  for (size_t i = 0; i < run.count; i++) {
    float size = fabsf(walk->values[i]) / momentum_scaling(walk, all) * factor;
    walk->beyond += (step ? size : more[i] * size) > ONEBIT_STEP_BOUND;
  }
  return ONEBIT_OK;
}

/* Calls `body` for the runs of the span's blocks that the section has. */
static onebit_status_t norms_walk_runs(struct norm_walk *walk,
                                       onebit_status_t (*body)(struct norm_walk *walk,
                                                               const struct ob_run *run)) {
  size_t first = walk->span.first, end = walk->span.end;
  first = first > walk->section.first ? first : walk->section.first;
  end = end < walk->section.end ? end : walk->section.end;
  if (first >= end)
    return ONEBIT_OK;
  onebit_status_t status = ob_reader_create(&walk->reader, walk->optimizer);
  walk->values = ob_allocate(2 * OB_CHUNK, sizeof *walk->values);
  if (status == ONEBIT_OK && !walk->values)
    status = ob_error(ONEBIT_ERROR_MEMORY, "out of memory for reading the state");
  const struct ob_layout *layout = ob_plan_layout(walk->section.plan);
  for (struct ob_run run = {0}; status == ONEBIT_OK && ob_find_next_run(layout, first, end, &run);)
    status = body(walk, &run);
  ob_reader_destroy(&walk->reader);
  ob_release(walk->values);
  return status;
}

/* Adds the squares of a norm. From the freeze until the first compressed step the momentum is
 * stored times beta1. If only servers know the mean, the signal is the message that this rank has
 * sent. */
static onebit_status_t norms_add_squares(const struct onebit_optimizer *optimizer,
                                         const struct ob_bucket *bucket, enum norm norm,
                                         struct span span, double *squares) {
  static const enum ob_saved sections[] = {OB_SAVED_PARAMETERS, OB_SAVED_MOMENTUM, OB_SAVED_WORKER,
                                           OB_SAVED_WORKER};
  const struct ob_method *method = optimizer->method;
  enum ob_stage stage = ob_stage_of(optimizer);
  if (norm >= NORM_RESIDUAL && method->momentum && stage != OB_STAGE_SENT)
    return ONEBIT_OK; /* the array of the residual has the momentum */
  struct norm_walk walk = {.optimizer = optimizer,
                           .section = ob_section_of(bucket, stage, sections[norm]),
                           .span = span,
                           .divisor = 1};
  if (norm == NORM_SIGNAL)
    walk.section.content = method->sharded || method->serve_rule != OB_SERVE_MEAN
                               ? OB_CONTENT_SENT
                               : OB_CONTENT_MESSAGES;
  if (norm == NORM_MOMENTUM && method->momentum && !bucket->uncompressed &&
      stage == OB_STAGE_FROZEN)
    walk.divisor = (double)(float)optimizer->moments.beta1;
  OB_TRY(norms_walk_runs(&walk, add_run_squares));
  *squares += walk.squares;
  return ONEBIT_OK;
}

/* Counts the elements whose latest step exceeded ONEBIT_STEP_BOUND and was therefore bounded: for
 * 1-bit Adam and LAMB with compressed steps, else 0. */
static onebit_status_t norms_count_bounded(const struct onebit_optimizer *optimizer,
                                           const struct ob_bucket *bucket, struct span span,
                                           size_t *beyond) {
  enum ob_stage stage = ob_stage_of(optimizer);
  *beyond = 0;
  if (stage != OB_STAGE_SENT || bucket->uncompressed || !bucket->arrays[OB_VARIANCE] ||
      isinf(ob_step_bound(optimizer)))
    return ONEBIT_OK;
  struct norm_walk walk = {.optimizer = optimizer,
                           .section = ob_section_of(bucket, stage, OB_SAVED_MOMENTUM),
                           .variance = ob_section_of(bucket, stage, OB_SAVED_VARIANCE),
                           .span = span};
  OB_TRY(norms_walk_runs(&walk, count_run_beyond));
  *beyond = walk.beyond;
  return ONEBIT_OK;
}

/* --- Form and cost */

static onebit_status_t statistics_add_norms(const struct onebit_optimizer *optimizer,
                                            onebit_optimizer_info_t *info) {
  double momentum = 0, error = 0;
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    const struct ob_bucket *bucket = &optimizer->buckets[u];
    OB_TRY(
        norms_add_squares(optimizer, bucket, NORM_MOMENTUM, bucket_span(bucket, false), &momentum));
    OB_TRY(norms_add_squares(optimizer, bucket, NORM_RESIDUAL, bucket_span(bucket, true), &error));
  }
  info->momentum_norm = sqrt(momentum);
  info->residual_norm = sqrt(error);
  return ONEBIT_OK;
}

/* Adds the bytes that a bucket's steps send, and the memory of its plans. */
static void add_bucket_bytes(const struct onebit_optimizer *optimizer,
                             const struct ob_bucket *bucket, onebit_optimizer_info_t *info) {
  const struct onebit_plan *back =
      bucket->steps_back ? bucket->steps_back : bucket->parameters_back;
  bool compressed = ob_optimizer_compresses(optimizer) && !bucket->uncompressed;
  uint64_t dense = ob_plan_wire_bytes(bucket->dense) + ob_plan_wire_bytes(bucket->parameters_back);
  info->warmup_bytes += dense;
  info->compressed_bytes +=
      compressed ? ob_plan_wire_bytes(bucket->bits) + ob_plan_wire_bytes(back) : dense;
  info->memory_bytes += ob_plan_memory_bytes(bucket->bits) + ob_plan_memory_bytes(bucket->dense) +
                        ob_plan_memory_bytes(bucket->steps_back) +
                        ob_plan_memory_bytes(bucket->parameters_back);
}

/* Sets the mean number of bits of the compressed elements, and counts changes of widths. */
static void add_mean_bits(const struct onebit_optimizer *optimizer, onebit_optimizer_info_t *info) {
  double elements = 0, bits = 0;
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    const struct onebit_plan *plan = optimizer->buckets[u].bits;
    if (optimizer->buckets[u].uncompressed)
      continue;
    elements += (double)ob_plan_layout(plan)->elements;
    bits += (double)ob_plan_layout(plan)->elements * ob_plan_geometry(plan)->width;
    info->moves += ob_ladder_get_state(plan).moves;
  }
  info->bits = elements > 0 ? bits / elements : 0;
}

static void statistics_add_bytes(const struct onebit_optimizer *optimizer,
                                 onebit_optimizer_info_t *info) {
  const struct onebit_plan *sums =
      optimizer->method->sums ? optimizer->method->sums(optimizer) : NULL;
  info->warmup_bytes = ob_plan_wire_bytes(optimizer->squares) + ob_plan_wire_bytes(sums);
  info->compressed_bytes = ob_plan_wire_bytes(optimizer->squares);
  info->memory_bytes += ob_plan_memory_bytes(optimizer->squares) + ob_plan_memory_bytes(sums);
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    add_bucket_bytes(optimizer, &optimizer->buckets[u], info);
}

static onebit_stage_t stage_of(const struct onebit_optimizer *optimizer) {
  return ob_optimizer_is_frozen(optimizer) ? ONEBIT_STAGE_COMPRESSED : ONEBIT_STAGE_WARMUP;
}

onebit_status_t onebit_optimizer_get_stage(onebit_optimizer_t optimizer, onebit_stage_t *stage,
                                           uint64_t *steps) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  if (!stage || !steps)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is NULL", stage ? "steps" : "stage");
  OB_TRY(ob_optimizer_catch_up(optimizer));
  *stage = stage_of(optimizer);
  *steps = optimizer->steps;
  return ONEBIT_OK;
}

onebit_status_t onebit_optimizer_get_info(onebit_optimizer_t optimizer,
                                          onebit_optimizer_info_t *info) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  OB_TRY(ob_size_check("info", info, sizeof *info));
  OB_TRY(ob_optimizer_catch_up(optimizer));
  *info = (onebit_optimizer_info_t){
      .size = sizeof *info,
      .stage = stage_of(optimizer),
      .steps = optimizer->steps,
      .skipped = optimizer->skipped,
      .freeze_step = optimizer->frozen_at,
      .variance_ratio = optimizer->variance_ratio,
      .memory_bytes = optimizer->own_bytes,
      .name = optimizer->method->name,
      .loss_scale = optimizer->loss_scale,
      .gradient_norm = optimizer->gradient_norm,
      .synchronized = !(optimizer->method->apart && optimizer->method->apart(optimizer)),
      .exchanges = {optimizer->exchanges[0], optimizer->exchanges[1], optimizer->exchanges[2]},
  };
  statistics_add_bytes(optimizer, info);
  add_mean_bits(optimizer, info);
  return statistics_add_norms(optimizer, info);
}

/* --- Statistics. They read the state only between steps, since messages change it while a step is
 * open. */

/* Returns the ratio of two norms from their squares; 0 if both are zero. */
static double norm_ratio(double error, double signal) {
  return error > 0 ? sqrt(error / signal) : 0;
}

static onebit_status_t compute_residual_ratio(const struct onebit_optimizer *optimizer,
                                              double *ratio) {
  double error = 0, signal = 0;
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    const struct ob_bucket *bucket = &optimizer->buckets[u];
    OB_TRY(norms_add_squares(optimizer, bucket, NORM_RESIDUAL, bucket_span(bucket, false), &error));
    OB_TRY(norms_add_squares(optimizer, bucket, NORM_SIGNAL, bucket_span(bucket, false), &signal));
  }
  *ratio = norm_ratio(error, signal);
  return ONEBIT_OK;
}

onebit_status_t onebit_optimizer_get_statistics(onebit_optimizer_t optimizer,
                                                onebit_optimizer_statistics_t *statistics) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  OB_TRY(ob_optimizer_check_idle(optimizer));
  OB_TRY(ob_size_check("statistics", statistics, sizeof *statistics));
  onebit_optimizer_info_t info = {.size = sizeof info};
  double ratio;
  OB_TRY(onebit_optimizer_get_info(optimizer, &info));
  OB_TRY(compute_residual_ratio(optimizer, &ratio));
  *statistics = (onebit_optimizer_statistics_t){.size = sizeof *statistics,
                                                .info = info,
                                                .residual_ratio = ratio,
                                                .dense_bytes = optimizer->sent[OB_EXCHANGE_DENSE],
                                                .bits_bytes = optimizer->sent[OB_EXCHANGE_BITS],
                                                .seconds = optimizer->times.all,
                                                .compress_seconds = optimizer->times.compress,
                                                .network_seconds = optimizer->times.network,
                                                .update_seconds = optimizer->times.update};
  return ONEBIT_OK;
}

static onebit_status_t compute_tensor_ratio(const struct onebit_optimizer *optimizer, size_t tensor,
                                            double *error, double *ratio) {
  const struct ob_bucket *bucket = &optimizer->buckets[optimizer->tensors[tensor].bucket];
  struct span span = tensor_span(optimizer, tensor);
  double squares = 0, signal = 0;
  OB_TRY(norms_add_squares(optimizer, bucket, NORM_RESIDUAL, span, &squares));
  OB_TRY(norms_add_squares(optimizer, bucket, NORM_SIGNAL, span, &signal));
  *error = sqrt(squares);
  *ratio = norm_ratio(squares, signal);
  return ONEBIT_OK;
}

onebit_status_t onebit_optimizer_get_tensor_statistics(onebit_optimizer_t optimizer, size_t tensor,
                                                       onebit_tensor_statistics_t *statistics) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  OB_TRY(ob_optimizer_check_idle(optimizer));
  OB_TRY(ob_size_check("statistics", statistics, sizeof *statistics));
  OB_TRY(ob_check_tensor(tensor, optimizer->tensor_count));
  OB_TRY(ob_optimizer_catch_up(optimizer));
  const struct ob_bucket *bucket = &optimizer->buckets[optimizer->tensors[tensor].bucket];
  onebit_tensor_statistics_t found = {.size = sizeof found,
                                      .count = optimizer->tensors[tensor].count,
                                      .uncompressed = bucket->uncompressed};
  if (!bucket->uncompressed) {
    found.bits = (int)ob_plan_geometry(bucket->bits)->width;
    found.moves = ob_ladder_get_state(bucket->bits).moves;
  }
  double parameters = 0, momentum = 0;
  struct span span = tensor_span(optimizer, tensor);
  OB_TRY(norms_add_squares(optimizer, bucket, NORM_PARAMETERS, span, &parameters));
  OB_TRY(norms_add_squares(optimizer, bucket, NORM_MOMENTUM, span, &momentum));
  OB_TRY(compute_tensor_ratio(optimizer, tensor, &found.residual_norm, &found.residual_ratio));
  found.parameter_norm = sqrt(parameters);
  found.momentum_norm = sqrt(momentum);
  if (optimizer->method->add_statistics)
    OB_TRY(optimizer->method->add_statistics(optimizer, tensor, &found));
  *statistics = found;
  return ONEBIT_OK;
}

/* --- Warnings */

/* The result of a check so far: the worst tensor and its value. */
struct finding {
  size_t tensor;
  double value;
};

static void update_worst(struct finding *worst, size_t tensor, double value) {
  if (value > worst->value)
    *worst = (struct finding){tensor, value};
}

static onebit_status_t find_worst(const struct onebit_optimizer *optimizer, struct finding *error,
                                  struct finding *bounded) {
  double norm, ratio;
  size_t beyond;
  for (size_t t = 0; t < optimizer->tensor_count; t++) {
    const struct ob_tensor *tensor = &optimizer->tensors[t];
    OB_TRY(compute_tensor_ratio(optimizer, t, &norm, &ratio));
    update_worst(error, t, ratio);
    OB_TRY(norms_count_bounded(optimizer, &optimizer->buckets[tensor->bucket],
                               tensor_span(optimizer, t), &beyond));
    update_worst(bounded, t, tensor->count ? (double)beyond / (double)tensor->count : 0);
  }
  return ONEBIT_OK;
}

static bool statistics_sends_step(const struct onebit_optimizer *optimizer) {
  return optimizer->moments.exchange == ONEBIT_ADAM_EXCHANGE_STEP;
}

static onebit_status_t warn_of_error(const struct onebit_optimizer *optimizer,
                                     const struct finding *worst) {
  bool step = statistics_sends_step(optimizer) || optimizer->method->moments;
  return ob_error(
      ONEBIT_WARNING,
      "tensor %zu (%zu elements): its residual is %.3g times its %s, which is too large for one "
      "bit: try a smaller block_size, uncompressed = 1 for this tensor%s%s",
      worst->tensor, optimizer->tensors[worst->tensor].count, worst->value,
      step ? "step" : "signal",
      optimizer->moments.no_warmup || optimizer->method->divides ? "" : ", a later freeze",
      step ? "" : ", or 1-bit Adam with exchange ONEBIT_ADAM_EXCHANGE_STEP");
}

static onebit_status_t warn_of_bound(const struct onebit_optimizer *optimizer,
                                     const struct finding *worst) {
  return ob_error(
      ONEBIT_WARNING,
      "tensor %zu (%zu elements): the steps of %.3g %% of its elements are limited to %g times the "
      "learning rate, because its frozen variance is too small for the exchanged values: try "
      "uncompressed = 1 for this tensor, a later freeze%s",
      worst->tensor, optimizer->tensors[worst->tensor].count, 100 * worst->value,
      (double)ONEBIT_STEP_BOUND,
      statistics_sends_step(optimizer) ? ""
                                       : ", or 1-bit Adam with exchange ONEBIT_ADAM_EXCHANGE_STEP");
}

static onebit_status_t warn_of_warmup(const struct onebit_optimizer *optimizer) {
  return ob_error(ONEBIT_WARNING,
                  "the warm-up still goes on after step %llu, %llu steps after the freeze was due: "
                  "the variance is not steady, since gradients began late or still grow",
                  (unsigned long long)optimizer->steps,
                  (unsigned long long)(optimizer->steps - ob_freeze_latest_step(optimizer)));
}

onebit_status_t onebit_optimizer_check(onebit_optimizer_t optimizer, size_t *tensor) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  OB_TRY(ob_optimizer_reach_idle(optimizer));
  struct finding error = {0, 0}, bounded = {0, 0};
  OB_TRY(find_worst(optimizer, &error, &bounded));
  bool of_error = error.value >= ONEBIT_RESIDUAL_RATIO_LIMIT;
  if (of_error || bounded.value >= ONEBIT_BOUNDED_LIMIT) {
    if (tensor)
      *tensor = of_error ? error.tensor : bounded.tensor;
    return of_error ? warn_of_error(optimizer, &error) : warn_of_bound(optimizer, &bounded);
  }
  if (!ob_freeze_is_late(optimizer))
    return ONEBIT_OK;
  if (tensor)
    *tensor = optimizer->tensor_count;
  return warn_of_warmup(optimizer);
}
