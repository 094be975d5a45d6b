/*
 * Mixed precision and what gradients count as: with gradients and parameters of any type 1-bit Adam
 * equals the oracle's in every bit, whatever the profile, buckets, form of the step, codec and
 * number of threads; gradients that are not there count as zeros; sums over micro-batches count as
 * their mean; tensors stay uncompressed where that is asked for.
 */
#include "tests/support_adam.h"

static struct adam_case case_of(onebit_dtype_t gradients, onebit_dtype_t parameters) {
  struct adam_case what = {.steps = 12,
                           .options = ONEBIT_ADAM_OPTIONS_INIT,
                           .tensors = &adam_tensors_odd,
                           .still = true};
  what.options.freeze_step = 5;
  what.options.common.gradient_dtype = gradients;
  what.options.common.parameter_dtype = parameters;
  return what;
}

Test(mixed, any_types_in_buckets) {
  for (int k = 0; k < 9; k++) {
    struct adam_case what = case_of((onebit_dtype_t)(k / 3), (onebit_dtype_t)(k % 3));
    what.options.common.bucket_size = 1000;
    what.form = (enum adam_form)(k % ADAM_FORMS);
    adam_check_on_groups(what);
  }
}

Test(mixed, any_types_on_several_hosts) {
  for (int k = 0; k < 9; k++) {
    struct adam_case what = case_of((onebit_dtype_t)(k / 3), (onebit_dtype_t)(k % 3));
    what.size = 4;
    what.hosts = 2;
    what.multiple = 3.0f; /* inside a host too gradients are weighed before they are added */
    what.options.common.gradient_factor = 1.0 / 3;
    what.options.common.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
    adam_check(&what);
  }
}

Test(mixed, every_codec_and_any_number_of_threads) {
  for (size_t c = 0; c < test_codecs_count; c++) {
    if (!use_codec(test_codecs[c]))
      continue;
    for (int threads = 1; threads <= 3; threads++) {
      struct adam_case what =
          case_of((onebit_dtype_t)(threads % 3), (onebit_dtype_t)((threads + (int)c) % 3));
      what.size = 3;
      what.options.common.threads = threads;
      what.options.common.gradient_factor = 0.3;
      adam_check(&what);
    }
  }
}

/* --- Tensors that stay uncompressed */

static void check_uncompressed(unsigned mask, size_t dense_below) {
  static const size_t bucket_sizes[] = {0, 1, 1000};
  for (int k = 0; k < 4; k++) {
    struct adam_case what = case_of((onebit_dtype_t)(k % 3), (onebit_dtype_t)((k + 1) % 3));
    what.form = (enum adam_form)((k + (int)mask) % ADAM_FORMS);
    what.uncompressed = mask;
    what.options.common.dense_below = dense_below;
    if (k < 3)
      what.options.common.bucket_size = bucket_sizes[k];
    else
      what.options.common.profile = ONEBIT_PROFILE_DEEPSPEED;
    adam_check_on_groups(what);
  }
}

Test(mixed, the_first_and_the_last_stay_uncompressed) { check_uncompressed(0x102, 0); }
Test(mixed, small_tensors_stay_uncompressed) { check_uncompressed(0, 101); }

/* A tensor of as many elements as dense_below is compressed: 100 in 100. */
Test(mixed, dense_below_is_below) { check_uncompressed(0x100, 100); }

/* A warm-up that never ends, and one whose end is found from all tensors' variance. */
Test(mixed, other_warm_ups_of_uncompressed_tensors) {
  struct adam_case what = case_of(ONEBIT_FLOAT16, ONEBIT_BFLOAT16);
  what.uncompressed = 0x2b;
  what.options.freeze_step = ONEBIT_FREEZE_NEVER;
  adam_check_on_groups(what);
  what.options.freeze_step = ONEBIT_FREEZE_AUTOMATIC;
  what.options.beta2 = 0.875;
  what.steps = 30;
  adam_check_on_groups(what);
}

/* --- Gradients that are somewhere else, or not there */

Test(mixed, gradients_move_and_are_absent) {
  static const size_t absent[] = {0, 1, 2, 5}; /* 1: there is none, ever */
  for (int k = 0; k < 12; k++) {
    struct adam_case what = case_of((onebit_dtype_t)(k % 3), (onebit_dtype_t)(k / 3 % 3));
    what.form = (enum adam_form)(k % ADAM_FORMS);
    what.absent = absent[k % 4];
    what.moving = k % 2 || !what.absent;
    what.uncompressed = k % 3 == 2 ? 0x2b : 0;
    what.options.common.bucket_size = k % 3 == 1 ? 1000 : 0;
    if (k / 4 == 2) {
      what.options.common.bucket_size = 0;
      what.options.common.profile = ONEBIT_PROFILE_DEEPSPEED;
    }
    adam_check_on_groups(what);
  }
}

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

/* Arrays of zeros on one side; on the other none, from the beginning or told later. */
static void zeros_on_rank(onebit_comm_t comm, void *context) {
  onebit_adam_options_t options[2] = {ONEBIT_ADAM_OPTIONS_INIT, ONEBIT_ADAM_OPTIONS_INIT};
  int rank = onebit_comm_rank(comm);
  const bool *all_ranks = context;
  options[0].freeze_step = options[1].freeze_step = 3;
  options[0].common.clip_norm = options[1].common.clip_norm = 0.5;
  struct pair *pair = make_pair(comm, options);
  for (int step = 0; step < 8; step++) {
    check_case("step %d, %s without a gradient", step, *all_ranks ? "all" : "one");
    for (int k = 0; k < 2; k++)
      fill_input(pair->gradient[k], ONEBIT_FLOAT32, COUNT, rank, step);
    for (size_t t = 0; t < TENSORS; t++) {
      bool none = (step + (int)t) % 3 == 0 && (*all_ranks || rank == step % 2);
      if (none)
        memset(pair->gradient[0] + t * EACH, 0, EACH * sizeof(float));
      CHECK_STATUS(onebit_optimizer_set_gradient(pair->optimizer[1], t,
                                                 none ? NULL : pair->gradient[1] + t * EACH),
                   ONEBIT_OK);
    }
    step_pair(pair);
  }
  free_pair(pair);
}

Test(mixed, no_gradient_is_an_array_of_zeros) {
  for (int size = 1; size <= 4; size++)
    for (int all = 0; all <= 1; all++)
      on_ranks(size, zeros_on_rank, &(bool){all});
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

/* Rates and decays of two groups, and a factor that no power of two is. */
Test(mixed, groups_of_tensors) {
  struct adam_case what = case_of(ONEBIT_BFLOAT16, ONEBIT_BFLOAT16);
  what.multiple = 3.0f;
  what.options.common.gradient_factor = 1.0 / 3;
  what.uncompressed = 0x10;
  adam_check_on_groups(what);
}

/* --- Master values */

/* Steps that bfloat16 would round away add up in the master values, and creation writes nothing. */
Test(mixed, small_steps_add_up) {
  enum { STEPS = 300 };
  onebit_comm_t comm;
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
  cr_assert_eq(onebit_comm_create_self(&comm), ONEBIT_OK);
  CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, &options, &optimizer), ONEBIT_OK);
  CHECK_BITS("parameters after creation", parameter, before, 64, ONEBIT_BFLOAT16);
  for (int step = 0; step < STEPS; step++)
    CHECK_STATUS(onebit_optimizer_step(optimizer, 1e-3f), ONEBIT_OK);
  for (size_t i = 0; i < 64; i++) { /* each step adds the rate */
    float now = oracle_load(parameter, i, ONEBIT_BFLOAT16);
    CHECK(fabsf(now - 1.3f) < 0.005f, "parameter %zu is %g", i, (double)now);
  }
  onebit_optimizer_destroy(optimizer);
  onebit_comm_destroy(comm);
}

/* Master values are 4 bytes a parameter, and nothing else grows. */
Test(mixed, memory_of_master_values) {
  enum { COUNT_OF_MEMORY = 1 << 16 };
  onebit_comm_t comm;
  float *parameter = allocate(COUNT_OF_MEMORY, sizeof(float));
  float *gradient = allocate(COUNT_OF_MEMORY, sizeof(float));
  uint64_t bytes[2];
  cr_assert_eq(onebit_comm_create_self(&comm), ONEBIT_OK);
  for (int k = 0; k < 2; k++) {
    onebit_tensor_t tensor = {parameter, gradient, COUNT_OF_MEMORY, 0, 0, 0};
    onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
    onebit_optimizer_info_t info = {.size = sizeof info};
    onebit_optimizer_t optimizer = NULL;
    options.common.gradient_dtype = k ? ONEBIT_FLOAT16 : ONEBIT_FLOAT32;
    options.common.parameter_dtype = options.common.gradient_dtype;
    CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, &options, &optimizer), ONEBIT_OK);
    CHECK_STATUS(onebit_optimizer_get_info(optimizer, &info), ONEBIT_OK);
    bytes[k] = info.memory_bytes;
    onebit_optimizer_destroy(optimizer);
  }
  CHECK(bytes[1] - bytes[0] == 4 * COUNT_OF_MEMORY, "%llu bytes more",
        (unsigned long long)(bytes[1] - bytes[0]));
  onebit_comm_destroy(comm);
  free(parameter);
  free(gradient);
}
