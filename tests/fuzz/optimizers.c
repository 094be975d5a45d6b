/* Creates the optimizers and outer steps into which the fuzzer loads checkpoints. */
#include "tests/fuzz/fuzz.h"

static onebit_status_t create_by_kind(int kind, onebit_comm_t comm, const onebit_tensor_t *tensors,
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

static onebit_status_t create_optimizer(struct fuzz_object *made, int kind, onebit_comm_t comm) {
  float *parameters = made->parameters.floats;
  const onebit_tensor_t tensors[] = {
      {parameters, made->gradients, 40, 0.01f, 0, 0},
      {NULL, NULL, 0, 0, 0, 0},
      {parameters + 40, made->gradients + 40, 64, 0, 0, 1},
      {parameters + 104, made->gradients + 104, FUZZ_ELEMENTS - 104, 0, 0, 0}};
  for (int i = 0; i < FUZZ_ELEMENTS; i++)
    parameters[i] = (float)(i % 7) - 3;
  return create_by_kind(kind, comm, tensors, sizeof tensors / sizeof tensors[0], &made->optimizer);
}

/* Returns options for rounds of 4 steps. Together, the kinds have every width and rule, and options
 * with fragments, delays and weights. */
static onebit_outer_options_t outer_options(int kind) {
  static const int widths[FUZZ_WIDTHS] = {1, 2, 4, 8, ONEBIT_OUTER_DENSE, ONEBIT_OUTER_SPARSE};
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

/* Creates the outer step of a site, which is the only site. Its rank 0 also has the communicator
 * between sites. */
static onebit_status_t create_site(onebit_comm_t site, const onebit_tensor_t *tensors, size_t count,
                                   const onebit_outer_options_t *options, onebit_outer_t *outer) {
  onebit_comm_t between = NULL;
  if (onebit_comm_rank(site) == 0)
    FUZZ_CHECK(onebit_comm_create_self(&between) == ONEBIT_OK);
  const onebit_status_t status =
      onebit_outer_create_sites(site, between, tensors, count, options, NULL, outer);
  onebit_comm_destroy(between);
  return status;
}

static onebit_status_t create_outer(struct fuzz_object *made, int kind, onebit_comm_t comm) {
  static const size_t counts[] = {40, 0, 64, FUZZ_ELEMENTS - 104};
  const onebit_outer_options_t options = outer_options(kind % FUZZ_WIDTHS);
  const size_t size = options.parameter_dtype == ONEBIT_FLOAT32 ? 4 : 2;
  onebit_tensor_t tensors[4] = {0};
  char *next = (char *)&made->parameters;
  made->dtype = options.parameter_dtype;
  for (int t = 0; t < 4; next += counts[t] * size, t++) {
    tensors[t].parameter = counts[t] ? next : NULL;
    tensors[t].count = counts[t];
    tensors[t].uncompressed = t == 2;
  }
  return kind < FUZZ_WIDTHS ? onebit_outer_create(comm, tensors, 4, &options, &made->outer)
                            : create_site(comm, tensors, 4, &options, &made->outer);
}

void fuzz_object_create(struct fuzz_object *made, int kind, onebit_comm_t comm) {
  *made = (struct fuzz_object){.dtype = ONEBIT_FLOAT32};
  FUZZ_CHECK((kind < FUZZ_OPTIMIZERS
                  ? create_optimizer(made, kind, comm)
                  : create_outer(made, kind - FUZZ_OPTIMIZERS, comm)) == ONEBIT_OK);
}

static onebit_status_t step_optimizer(struct fuzz_object *made, size_t step) {
  for (size_t i = 0; i < FUZZ_ELEMENTS; i++)
    made->gradients[i] = (float)((i + step) % 5) - 2;
  return onebit_optimizer_step(made->optimizer, 1e-3f);
}

static onebit_status_t step_outer(struct fuzz_object *made, size_t step) {
  for (size_t i = 0; i < FUZZ_ELEMENTS; i++)
    if (made->dtype == ONEBIT_FLOAT32)
      made->parameters.floats[i] += (float)((i + step) % 5) - 2;
    else
      made->parameters.halves[i] = (uint16_t)(0x3c00 + (i + step) % 5);
  return onebit_outer_step(made->outer, 1);
}

onebit_status_t fuzz_object_train(struct fuzz_object *made, size_t steps) {
  onebit_status_t status = ONEBIT_OK;
  for (size_t step = 0; step < steps && status == ONEBIT_OK; step++)
    status = made->optimizer ? step_optimizer(made, step) : step_outer(made, step);
  return status;
}

static onebit_status_t save_object(const struct fuzz_object *made, void *memory, size_t *bytes) {
  return made->optimizer ? onebit_optimizer_save(made->optimizer, memory, *bytes, bytes)
                         : onebit_outer_save(made->outer, memory, *bytes, bytes);
}

unsigned char *fuzz_object_save(const struct fuzz_object *made, size_t *bytes) {
  *bytes = 0;
  FUZZ_CHECK(save_object(made, NULL, bytes) == ONEBIT_OK);
  unsigned char *memory = fuzz_copy(NULL, 0, *bytes);
  FUZZ_CHECK(save_object(made, memory, bytes) == ONEBIT_OK);
  return memory;
}

onebit_status_t fuzz_object_load(struct fuzz_object *made, const void *const *parts,
                                 const size_t *bytes, int count) {
  return made->optimizer ? onebit_optimizer_load(made->optimizer, parts, bytes, count)
                         : onebit_outer_load(made->outer, parts, bytes, count);
}

void fuzz_object_destroy(struct fuzz_object *made) {
  onebit_optimizer_destroy(made->optimizer);
  onebit_outer_destroy(made->outer);
}
