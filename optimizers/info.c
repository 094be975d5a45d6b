/* What an optimizer has to tell about itself. */
#include <math.h>

#include "base/error.h"
#include "optimizers/norms.h"

static onebit_status_t add_norms(const struct onebit_optimizer *optimizer,
                                 onebit_optimizer_info_t *info) {
  double momentum = 0, error = 0;
  for (size_t u = 0; u < optimizer->unit_count; u++) {
    const struct ob_unit *unit = &optimizer->units[u];
    OB_TRY(ob_add_momentum(optimizer, unit, ob_span_of_unit(unit, false), &momentum));
    OB_TRY(ob_add_error(optimizer, unit, ob_span_of_unit(unit, true), &error));
  }
  info->momentum_norm = sqrt(momentum);
  info->error_norm = sqrt(error);
  return ONEBIT_OK;
}

/* What steps send, and what the plans take. */
static void add_plans(const struct onebit_optimizer *optimizer, const struct ob_unit *unit,
                      onebit_optimizer_info_t *info) {
  const struct onebit_plan *back = unit->parameters_back;
  bool bits = ob_optimizer_compresses(optimizer) && !unit->uncompressed;
  info->warmup_bytes += unit->dense->wire_bytes + (back ? back->wire_bytes : 0);
  info->memory_bytes += unit->bits->memory_bytes + unit->dense->memory_bytes;
  info->memory_bytes += back ? back->memory_bytes : 0;
  if (unit->steps_back) {
    info->memory_bytes += unit->steps_back->memory_bytes;
    back = bits ? unit->steps_back : back;
  }
  info->compressed_bytes += bits ? unit->bits->wire_bytes : unit->dense->wire_bytes;
  info->compressed_bytes += back ? back->wire_bytes : 0;
}

onebit_status_t onebit_optimizer_get_info(onebit_optimizer_t optimizer,
                                          onebit_optimizer_info_t *info) {
  if (!optimizer || !info)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is NULL", optimizer ? "info" : "optimizer");
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
  if (optimizer->squares) {
    info->warmup_bytes = info->compressed_bytes = optimizer->squares->wire_bytes;
    info->memory_bytes += optimizer->squares->memory_bytes;
  }
  if (optimizer->method->sharded && ob_shards_sums(optimizer)) {
    info->warmup_bytes += ob_shards_sums(optimizer)->wire_bytes;
    info->memory_bytes += ob_shards_sums(optimizer)->memory_bytes;
  }
  for (size_t u = 0; u < optimizer->unit_count; u++)
    add_plans(optimizer, &optimizer->units[u], info);
  return add_norms(optimizer, info);
}
