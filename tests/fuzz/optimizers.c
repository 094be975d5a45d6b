/* Optimizers whose checkpoints are read. */
#include "tests/fuzz/optimizers.h"

static onebit_status_t create(int kind, onebit_comm_t comm, const onebit_tensor_t *tensors,
                              size_t count, onebit_optimizer_t *optimizer) {
  onebit_optimizer_options_t common = ONEBIT_OPTIMIZER_OPTIONS_INIT;
  onebit_adam_options_t adam = ONEBIT_ADAM_OPTIONS_INIT;
  onebit_lamb_options_t lamb = ONEBIT_LAMB_OPTIONS_INIT;
  onebit_zero_one_adam_options_t zero_one = ONEBIT_ZERO_ONE_ADAM_OPTIONS_INIT;
  common.block_size = 32;
  adam.common = lamb.common = zero_one.common = common;
  adam.freeze_step = lamb.freeze_step = zero_one.variance_freeze_step = 2;
  zero_one.local_step_scaler = 2;
  switch (kind) {
  case 0:
    return onebit_adam_create(comm, tensors, count, &adam, optimizer);
  case 1:
    return onebit_lamb_create(comm, tensors, count, &lamb, optimizer);
  case 2:
    return onebit_zero_one_adam_create(comm, tensors, count, &zero_one, optimizer);
  case 3:
    return onebit_lion_create(comm, tensors, count, NULL, optimizer);
  case 4:
    return onebit_momentum_create(comm, tensors, count, NULL, optimizer);
  case 5:
    return onebit_efficient_adam_create(comm, tensors, count, NULL, optimizer);
  case 6:
    adam.common.initial_loss_scale = 1024;
    adam.shards = ONEBIT_SHARDS_STEP;
    return onebit_adam_create(comm, tensors, count, &adam, optimizer);
  default:
    adam.common.profile = ONEBIT_PROFILE_DEEPSPEED;
    adam.common.block_size = 0;
    return onebit_adam_create(comm, tensors, count, &adam, optimizer);
  }
}

onebit_status_t fuzz_optimizer_create(struct fuzz_optimizer *made, int kind, onebit_comm_t comm) {
  const onebit_tensor_t tensors[] = {
      {made->parameters, made->gradients, 40, 0.01f, 0, 0},
      {NULL, NULL, 0, 0, 0, 0},
      {made->parameters + 40, made->gradients + 40, 64, 0, 0, 1},
      {made->parameters + 104, made->gradients + 104, FUZZ_ELEMENTS - 104, 0, 0, 0}};
  for (int i = 0; i < FUZZ_ELEMENTS; i++)
    made->parameters[i] = (float)(i % 7) - 3;
  return create(kind, comm, tensors, sizeof tensors / sizeof tensors[0], &made->optimizer);
}

onebit_status_t fuzz_optimizer_train(struct fuzz_optimizer *made, int steps) {
  onebit_status_t status = ONEBIT_OK;
  for (int step = 0; step < steps && status == ONEBIT_OK; step++) {
    for (int i = 0; i < FUZZ_ELEMENTS; i++)
      made->gradients[i] = (float)((i + step) % 5) - 2;
    status = onebit_optimizer_step(made->optimizer, 1e-3f);
  }
  return status;
}
