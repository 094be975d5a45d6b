/*
 * Mixed precision and what gradients count as, beside what test_optimizers.c has: sums over
 * micro-batches count as their mean, and master values keep what types of 16 bits would lose.
 */
#include "tests/support_adam.h"

/* Two optimizers that differ in one thing of their gradients, whose parameters must not differ. */
enum { EACH = 1500, TENSORS = 3, COUNT = EACH * TENSORS };
struct pair {
  float parameter[2][COUNT], gradient[2][COUNT];
  onebit_optimizer_t optimizer[2];
};

static struct pair *make_pair(onebit_comm_t comm, const onebit_adam_options_t options[2]) {
  struct pair *pair = allocate(1, sizeof *pair);
  for (int k = 0; k < 2; k++) {
    onebit_tensor_t tensors[TENSORS];
    for (int t = 0; t < TENSORS; t++)
      tensors[t] = (onebit_tensor_t){
          pair->parameter[k] + t * EACH, pair->gradient[k] + t * EACH, EACH, 0.01f, 0, t == 0};
    fill_input(pair->parameter[k], ONEBIT_FLOAT32, COUNT, 99, 0);
    CHECK_STATUS(onebit_adam_create(comm, tensors, TENSORS, &options[k], &pair->optimizer[k]),
                 ONEBIT_OK);
  }
  return pair;
}

static void step_pair(struct pair *pair) {
  for (int k = 0; k < 2; k++)
    CHECK_STATUS(onebit_optimizer_step(pair->optimizer[k], 0.01f), ONEBIT_OK);
  CHECK_BITS("parameters", pair->parameter[0], pair->parameter[1], COUNT, ONEBIT_FLOAT32);
}

static void free_pair(struct pair *pair) {
  for (int k = 0; k < 2; k++)
    onebit_optimizer_destroy(pair->optimizer[k]);
  free(pair);
}

/* The sum over k micro-batches counts as their mean. With k a power of two, and numbers that
 * float32 adds exactly, it is that to the bit. */
static void accumulated_on_rank(onebit_comm_t comm, void *context) {
  onebit_adam_options_t options[2] = {ONEBIT_ADAM_OPTIONS_INIT, ONEBIT_ADAM_OPTIONS_INIT};
  const struct adam_case *what = context;
  const int batches = (int)what->multiple;
  int rank = onebit_comm_rank(comm);
  options[0] = options[1] = what->options;
  options[1].common.gradient_factor = 1.0 / batches;
  struct pair *pair = make_pair(comm, options);
  for (int step = 0; step < 8; step++) {
    check_case("step %d of %d micro-batches, profile %d", step, batches,
               (int)what->options.common.profile);
    for (int i = 0; i < COUNT; i++) {
      float sum = 0.0f;
      for (int b = 0; b < batches; b++)
        sum += roundf(256.0f * input_value((size_t)i, rank, step * 64 + b)) / 256.0f;
      pair->gradient[0][i] = sum / (float)batches;
      pair->gradient[1][i] = sum;
    }
    step_pair(pair);
  }
  free_pair(pair);
}

Test(mixed, micro_batches_add_up) {
  for (int size = 1; size <= 4; size++)
    for (int batches = 2; batches <= 32; batches *= 4)
      for (int profile = 0; profile <= 1; profile++) {
        struct adam_case what = {.options = ONEBIT_ADAM_OPTIONS_INIT, .multiple = (float)batches};
        what.options.freeze_step = 3;
        what.options.common.profile = (onebit_profile_t)profile;
        on_ranks(size, accumulated_on_rank, &what);
      }
}

/* --- Master values */

/* Steps that bfloat16 would round away add up in the master values, and creation writes nothing. */
Test(mixed, small_steps_add_up) {
  enum { STEPS = 300 };
  uint16_t parameter[64], before[64];
  float gradient[64];
  onebit_tensor_t tensor = {parameter, gradient, 64, 0, 0, 0};
  onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
  onebit_optimizer_t optimizer = NULL;
  options.freeze_step = ONEBIT_FREEZE_NEVER;
  options.common.parameter_dtype = ONEBIT_BFLOAT16;
  for (size_t i = 0; i < 64; i++) {
    oracle_store(parameter, i, ONEBIT_BFLOAT16, 1.0f);
    gradient[i] = -1.0f;
  }
  memcpy(before, parameter, sizeof before);
  onebit_comm_t comm = self_comm();
  CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, &options, &optimizer), ONEBIT_OK);
  CHECK_BITS("parameters after creation", parameter, before, 64, ONEBIT_BFLOAT16);
  for (int step = 0; step < STEPS; step++)
    CHECK_STATUS(onebit_optimizer_step(optimizer, 1e-3f), ONEBIT_OK);
  for (size_t i = 0; i < 64; i++) { /* each step adds the rate */
    float now = oracle_load(parameter, i, ONEBIT_BFLOAT16);
    CHECK(fabsf(now - 1.3f) < 0.005f, "parameter %zu is %g", i, (double)now);
  }
  oracle_store(parameter, 5, ONEBIT_BFLOAT16, 3.0f); /* by the caller */
  for (int step = 0; step < 10; step++) { /* each of which is too little for a rounded value */
    CHECK_STATUS(onebit_optimizer_take_parameters(optimizer), ONEBIT_OK);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 1e-3f), ONEBIT_OK);
  }
  for (size_t i = 0; i < 64; i++) {
    float now = oracle_load(parameter, i, ONEBIT_BFLOAT16), wanted = i == 5 ? 3.01f : 1.31f;
    CHECK(fabsf(now - wanted) < (i == 5 ? 0.009f : 0.005f), "parameter %zu is %g", i, (double)now);
  }
  onebit_optimizer_destroy(optimizer);
  onebit_comm_destroy(comm);
}

/* Master values are 4 bytes a parameter, and nothing else grows. */
Test(mixed, memory_of_master_values) {
  enum { COUNT_OF_MEMORY = 1 << 16 };
  float *parameter = allocate(COUNT_OF_MEMORY, sizeof(float));
  float *gradient = allocate(COUNT_OF_MEMORY, sizeof(float));
  uint64_t bytes[2];
  onebit_comm_t comm = self_comm();
  for (int k = 0; k < 2; k++) {
    onebit_tensor_t tensor = {parameter, gradient, COUNT_OF_MEMORY, 0, 0, 0};
    onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
    onebit_optimizer_t optimizer = NULL;
    options.common.gradient_dtype = k ? ONEBIT_FLOAT16 : ONEBIT_FLOAT32;
    options.common.parameter_dtype = options.common.gradient_dtype;
    CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, &options, &optimizer), ONEBIT_OK);
    const onebit_optimizer_info_t info = optimizer_info(optimizer);
    bytes[k] = info.memory_bytes;
    onebit_optimizer_destroy(optimizer);
  }
  CHECK(bytes[1] - bytes[0] == 4 * COUNT_OF_MEMORY, "%llu bytes more",
        (unsigned long long)(bytes[1] - bytes[0]));
  onebit_comm_destroy(comm);
  free(parameter);
  free(gradient);
}
