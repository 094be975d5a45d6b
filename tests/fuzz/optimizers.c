/* Optimizers and outer steps whose checkpoints are read. */
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

/* Rounds of 4 steps: every width and rule, fragments, delays and weights among them. */
static onebit_outer_options_t outer_options(int kind) {
  static const int widths[FUZZ_OUTER_STEPS] = {1, 2, 4, 8, ONEBIT_OUTER_DENSE, ONEBIT_OUTER_SPARSE};
  onebit_outer_options_t options = ONEBIT_OUTER_OPTIONS_INIT;
  options.local_steps = 4;
  options.block_size = 32;
  options.bits = widths[kind];
  options.rule = (onebit_outer_rule_t)(kind % 3);
  options.fragments = 1 + (size_t)kind % 2;
  options.delay = kind % 3 ? 1 : 0;
  options.weighted = kind > 2;
  options.parameter_dtype = kind == 3 ? ONEBIT_FLOAT16 : ONEBIT_FLOAT32;
  return options;
}

onebit_status_t fuzz_outer_create(struct fuzz_outer *made, int kind, onebit_comm_t comm) {
  static const size_t counts[] = {40, 0, 64, FUZZ_ELEMENTS - 104};
  const onebit_outer_options_t options = outer_options(kind);
  const size_t size = options.parameter_dtype == ONEBIT_FLOAT32 ? 4 : 2;
  onebit_tensor_t tensors[4] = {0};
  char *next = (char *)&made->parameters;
  *made = (struct fuzz_outer){.dtype = options.parameter_dtype};
  for (int t = 0; t < 4; next += counts[t] * size, t++) {
    tensors[t].parameter = counts[t] ? next : NULL;
    tensors[t].count = counts[t];
    tensors[t].uncompressed = t == 2;
  }
  return onebit_outer_create(comm, tensors, 4, &options, &made->outer);
}

onebit_status_t fuzz_outer_train(struct fuzz_outer *made, int steps) {
  onebit_status_t status = ONEBIT_OK;
  for (int step = 0; step < steps && status == ONEBIT_OK; step++) {
    for (size_t i = 0; i < FUZZ_ELEMENTS; i++)
      if (made->dtype == ONEBIT_FLOAT32)
        made->parameters.floats[i] += (float)((i + (size_t)step) % 5) - 2;
      else
        made->parameters.halves[i] = (uint16_t)(0x3c00 + (i + (size_t)step) % 5);
    status = onebit_outer_step(made->outer, 1);
  }
  return status;
}
