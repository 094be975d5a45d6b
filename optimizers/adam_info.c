/* What an optimizer has to tell about itself. */
#include <math.h>

#include "base/error.h"
#include "optimizers/adam.h"

static double square_sum(const float *values, size_t count) {
  double sum = 0;
  for (size_t i = 0; i < count; i++)
    sum += (double)values[i] * (double)values[i];
  return sum;
}

/* The momentum that came with the last messages: every element of a block is +-scale. */
static double message_square_sum(const struct onebit_plan *plan) {
  double sum = 0;
  for (size_t source = 0; source < ob_plan_sources(plan); source++)
    for (size_t chunk = 0; chunk < plan->chunks; chunk++) {
      struct ob_message_shape shape = ob_plan_message(plan, source, chunk);
      struct ob_view view = ob_message_view(ob_plan_result(plan, false, source, chunk), &shape);
      size_t piece = 0;
      for (size_t b = 0; b < shape.blocks; b++) {
        double scale = (double)(shape.one_scale ? view.header->scale : view.scales[b]);
        struct ob_block block = ob_layout_block(&plan->layout, shape.first + b, &piece);
        sum += scale * scale * (double)block.valid;
      }
    }
  return sum;
}

static double error_square_sum(const struct onebit_plan *plan) {
  const struct ob_kept *kept = &plan->worker;
  double sum = 0;
  size_t piece = 0;
  size_t first, end;
  ob_plan_compressed(plan, &first, &end);
  for (size_t b = first; b < end; b++) {
    struct ob_block block = ob_layout_block(&plan->layout, b, &piece);
    const float *values = kept->values[kept->now] + block.word * OB_LANES;
    float scale = kept->scales[kept->now][kept->one_scale ? 0 : b];
    for (size_t i = 0; i < block.count; i++) {
      double error = (double)ob_kept_error(values[i], scale);
      sum += error * error;
    }
  }
  return sum;
}

/* As a kept value the momentum of a float array is stored times beta1 from the freeze on. */
static double array_square_sum(const struct onebit_optimizer *optimizer,
                               const struct onebit_plan *plan) {
  double sum = square_sum(plan->worker.values[plan->worker.now], plan->layout.words * OB_LANES);
  double beta1 = (double)(float)optimizer->options.beta1;
  return optimizer->frozen_at ? sum / (beta1 * beta1) : sum;
}

/* Until the first compressed step the momentum is still the array, and the kept error is
 * nothing. */
static void add_norms(const struct onebit_optimizer *optimizer, onebit_optimizer_info_t *info) {
  bool array = optimizer->steps == optimizer->frozen_at || !optimizer->frozen_at ||
               !ob_adam_compresses(optimizer);
  for (size_t u = 0; u < optimizer->unit_count; u++) {
    const struct onebit_plan *plan = optimizer->units[u].bits;
    info->momentum_norm += array ? array_square_sum(optimizer, plan) : message_square_sum(plan);
    info->error_norm += array ? 0 : error_square_sum(plan);
  }
  info->momentum_norm = sqrt(info->momentum_norm);
  info->error_norm = sqrt(info->error_norm);
}

onebit_status_t onebit_optimizer_get_info(onebit_optimizer_t optimizer,
                                          onebit_optimizer_info_t *info) {
  if (!optimizer || !info)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is NULL", optimizer ? "info" : "optimizer");
  if (info->size != sizeof *info)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "info->size is %zu, not %zu", info->size, sizeof *info);
  *info = (onebit_optimizer_info_t){
      .size = sizeof *info,
      .stage = optimizer->frozen_at ? ONEBIT_STAGE_COMPRESSED : ONEBIT_STAGE_WARMUP,
      .steps = optimizer->steps,
      .skipped = optimizer->skipped,
      .freeze_step = optimizer->frozen_at,
      .variance_ratio = optimizer->variance_ratio,
      .memory_bytes = optimizer->own_bytes,
  };
  for (size_t u = 0; u < optimizer->unit_count; u++) {
    const struct ob_adam_unit *unit = &optimizer->units[u];
    info->warmup_bytes += unit->dense->wire_bytes;
    info->compressed_bytes +=
        ob_adam_compresses(optimizer) ? unit->bits->wire_bytes : unit->dense->wire_bytes;
    info->memory_bytes += unit->bits->memory_bytes + unit->dense->memory_bytes;
  }
  add_norms(optimizer, info);
  return ONEBIT_OK;
}
