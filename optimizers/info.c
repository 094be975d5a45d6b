/* What an optimizer has to tell about itself. */
#include <math.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/handles.h"
#include "optimizers/norms.h"

static onebit_status_t add_norms(const struct onebit_optimizer *optimizer,
                                 onebit_optimizer_info_t *info) {
  double momentum = 0, error = 0;
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    const struct ob_bucket *bucket = &optimizer->buckets[u];
    OB_TRY(ob_add_squares(optimizer, bucket, OB_NORM_MOMENTUM, ob_span_of_bucket(bucket, false),
                          &momentum));
    OB_TRY(ob_add_squares(optimizer, bucket, OB_NORM_RESIDUAL, ob_span_of_bucket(bucket, true),
                          &error));
  }
  info->momentum_norm = sqrt(momentum);
  info->residual_norm = sqrt(error);
  return ONEBIT_OK;
}

/* What a bucket's steps send, and its plans take. */
static void add_bucket(const struct onebit_optimizer *optimizer, const struct ob_bucket *bucket,
                       onebit_optimizer_info_t *info) {
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

/* Means of the elements that are compressed. */
static void add_bits(const struct onebit_optimizer *optimizer, onebit_optimizer_info_t *info) {
  double elements = 0, bits = 0;
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    const struct onebit_plan *plan = optimizer->buckets[u].bits;
    if (optimizer->buckets[u].uncompressed)
      continue;
    elements += (double)ob_plan_layout(plan)->elements;
    bits += (double)ob_plan_layout(plan)->elements * ob_plan_geometry(plan)->width;
    info->moves += ob_ladder_keep(plan).moves;
  }
  info->bits = elements > 0 ? bits / elements : 0;
}

static void add_bytes(const struct onebit_optimizer *optimizer, onebit_optimizer_info_t *info) {
  const struct onebit_plan *sums =
      optimizer->method->sums ? optimizer->method->sums(optimizer) : NULL;
  info->warmup_bytes = ob_plan_wire_bytes(optimizer->squares) + ob_plan_wire_bytes(sums);
  info->compressed_bytes = ob_plan_wire_bytes(optimizer->squares);
  info->memory_bytes += ob_plan_memory_bytes(optimizer->squares) + ob_plan_memory_bytes(sums);
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    add_bucket(optimizer, &optimizer->buckets[u], info);
}

onebit_status_t onebit_optimizer_get_info(onebit_optimizer_t optimizer,
                                          onebit_optimizer_info_t *info) {
  OB_CALL_SCOPE;
  OB_TRY(ob_handle_check(optimizer, OB_HANDLE_OPTIMIZER, "optimizer"));
  if (!info)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "info is NULL");
  if (info->size != sizeof *info)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "info->size is %zu, not %zu", info->size, sizeof *info);
  OB_TRY(ob_optimizer_catch_up(optimizer));
  *info = (onebit_optimizer_info_t){
      .size = sizeof *info,
      .stage = ob_optimizer_is_frozen(optimizer) ? ONEBIT_STAGE_COMPRESSED : ONEBIT_STAGE_WARMUP,
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
  add_bytes(optimizer, info);
  add_bits(optimizer, info);
  return add_norms(optimizer, info);
}
