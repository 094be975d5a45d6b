/* What the gradients of a step count as: accumulation, loss scale, clipping. */
#include "base/error.h"
#include "optimizers/optimizer.h"

onebit_status_t ob_optimizer_weigh(struct onebit_optimizer *optimizer) {
  optimizer->step.gradient_factor =
      (float)(optimizer->options.gradient_factor / optimizer->loss_scale);
  return ONEBIT_OK;
}

void ob_optimizer_rescale(struct onebit_optimizer *optimizer, uint64_t made, uint64_t skipped) {
  (void)optimizer, (void)made, (void)skipped;
}

onebit_status_t onebit_optimizer_get_loss_scale(onebit_optimizer_t optimizer, double *scale) {
  if (!optimizer || !scale)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is NULL", optimizer ? "scale" : "optimizer");
  OB_TRY(ob_optimizer_catch_up(optimizer));
  *scale = optimizer->loss_scale;
  return ONEBIT_OK;
}
