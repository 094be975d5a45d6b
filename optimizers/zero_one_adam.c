/* 0/1 Adam. */
#include "onebit/zero_one_adam.h"

#include "base/error.h"
#include "optimizers/optimizer.h"

onebit_status_t onebit_zero_one_adam_create(onebit_comm_t comm, const onebit_tensor_t *tensors,
                                            size_t ntensors,
                                            const onebit_zero_one_adam_options_t *options,
                                            onebit_optimizer_t *optimizer) {
  (void)comm, (void)tensors, (void)ntensors, (void)options;
  *optimizer = NULL;
  return ob_error(ONEBIT_ERROR_UNSUPPORTED, "not built yet");
}
