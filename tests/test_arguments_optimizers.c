/*
 * Tests the options of every optimizer: each option with a wrong value, and each with a different
 * value on one rank. Also tests that steps allocate no memory. support_wrong_optimizers.c tests
 * wrong handles.
 */
#include "base/memory.h"
#include "optimizers/optimizer.h"
#include "tests/support.h"
#include "tests/support_optimizers.h"

#define COUNT 700

/* Creates an optimizer of three tensors, one of them empty. All ranks use the same arrays, so only
 * a job with a single rank may make steps. */
static onebit_status_t create_optimizer(onebit_comm_t comm, const struct any_case *what,
                                        onebit_optimizer_t *optimizer) {
  static float parameter[COUNT], gradient[COUNT];
  onebit_tensor_t tensors[] = {{parameter, gradient, 300, 0.01f, 0, 0},
                               {NULL, NULL, 0, 0, 0, 0},
                               {parameter + 300, gradient + 300, COUNT - 300, 0, 0, 0}};
  fill_input(gradient, ONEBIT_FLOAT32, COUNT, 0, 0);
  return ob_optimizer_create(comm, what->method, what->options, tensors, 3, optimizer);
}

static void check_refused(onebit_comm_t comm, const struct any_case *what, onebit_status_t wanted,
                          const char *words) {
  onebit_optimizer_t optimizer = (onebit_optimizer_t)(void *)what;
  CHECK_STATUS(create_optimizer(comm, what, &optimizer), wanted);
  CHECK_WORDS(words);
  CHECK(optimizer == NULL, "a failed creation left an optimizer");
}

#define DEEPSPEED .common.profile = ONEBIT_PROFILE_DEEPSPEED
#define GATHERS   .common.schedule = ONEBIT_SCHEDULE_ALLGATHER
static const struct {
  struct any_case what;
  const char *name, *value;
} wrong_options[] = {
    {{ANY(adam, .beta1 = 1)}, "beta1", "1"},
    {{ANY(adam, .beta1 = -0.5)}, "beta1", "-0.5"},
    {{ANY(adam, .beta1 = NAN)}, "beta1", "nan"},
    {{ANY(adam, .beta2 = 1.5)}, "beta2", "1.5"},
    {{ANY(adam, .beta2 = -1)}, "beta2", "-1"},
    {{ANY(adam, .beta2 = NAN)}, "beta2", "nan"},
    {{ANY(adam, .epsilon = -1)}, "epsilon", "-1"},
    {{ANY(adam, .epsilon = INFINITY)}, "epsilon", "inf"},
    {{ANY(adam, .epsilon = NAN)}, "epsilon", "nan"},
    {{ANY(adam, .freeze_threshold = 1)}, "freeze_threshold", "1"},
    {{ANY(adam, .freeze_threshold = -0.1)}, "freeze_threshold", "-0.1"},
    {{ANY(adam, .freeze_threshold = NAN)}, "freeze_threshold", "nan"},
    {{ANY(adam, .common.profile = (onebit_profile_t)2)}, "profile", "2"},
    {{ANY(adam, .common.scale = (onebit_scale_t)5)}, "scale", "5"},
    {{ANY(adam, .common.block_size = 40)}, "block_size", "40"},
    {{ANY(adam, .common.chunk_size = 100)}, "chunk_size", "100"},
    {{ANY(adam, .common.threads = -4)}, "threads", "-4"},
    {{ANY(adam, DEEPSPEED, .common.bucket_size = 7)}, "bucket_size", "7"},
    {{ANY(adam, GATHERS, .common.block_size = ONEBIT_BLOCK_BUFFER)}, "schedule", "block_size"},
    {{ANY(adam, GATHERS, .common.max_bits = 4)}, "schedule", "max_bits"},
    {{ANY(adam, .common.gradient_dtype = (onebit_dtype_t)3)}, "gradient_dtype", "3"},
    {{ANY(adam, .common.parameter_dtype = (onebit_dtype_t)77)}, "parameter_dtype", "77"},
    {{ANY(adam, .common.gradient_factor = -1)}, "gradient_factor", "-1"},
    {{ANY(adam, .common.gradient_factor = INFINITY)}, "gradient_factor", "inf"},
    {{ANY(adam, .common.gradient_factor = NAN)}, "gradient_factor", "nan"},
    {{ANY(adam, .common.gradient_factor = 1e60)}, "gradient_factor", "1e+60"}, /* infinite as a
                                                                                * float */
    {{ANY(adam, .common.gradient_factor = 1e-60)}, "gradient_factor", "1e-60"},
    {{ANY(adam, .common.clip_norm = -0.5)}, "clip_norm", "-0.5"},
    {{ANY(adam, .common.clip_norm = NAN)}, "clip_norm", "nan"},
    {{ANY(adam, .common.clip_norm = INFINITY)}, "clip_norm", "inf"},
    {{ANY(adam, .common.initial_loss_scale = 0.5)}, "initial_loss_scale", "0.5"},
    {{ANY(adam, .common.initial_loss_scale = -8)}, "initial_loss_scale", "-8"},
    {{ANY(adam, .common.initial_loss_scale = NAN)}, "initial_loss_scale", "nan"},
    {{ANY(adam, .common.initial_loss_scale = 1e20)}, "initial_loss_scale", "1e+20"}, /* > 2^64 */
    {{ANY(adam, .common.initial_loss_scale = 16, .common.min_loss_scale = 32)},
     "min_loss_scale",
     "32"},
    {{ANY(adam, .common.min_loss_scale = -1)}, "min_loss_scale", "-1"},
    {{ANY(adam, .common.min_loss_scale = NAN)}, "min_loss_scale", "nan"},
    {{ANY(adam, DEEPSPEED, .common.scale = ONEBIT_SCALE_MEAN_ABSOLUTE)}, "profile", "scale"},

    {{ANY(lamb, .beta1 = 1)}, "beta1", "1"},
    {{ANY(lamb, .beta2 = -1)}, "beta2", "-1"},
    {{ANY(lamb, .epsilon = NAN)}, "epsilon", "nan"},
    {{ANY(lamb, .freeze_threshold = 1)}, "freeze_threshold", "1"},
    {{ANY(lamb, .max_coefficient = -10)}, "max_coefficient", "-10"},
    {{ANY(lamb, .max_coefficient = NAN)}, "max_coefficient", "nan"},
    {{ANY(lamb, .max_coefficient = INFINITY)}, "max_coefficient", "inf"},
    {{ANY(lamb, .min_coefficient = -0.01)}, "min_coefficient", "-0.01"},
    {{ANY(lamb, .min_coefficient = 11)}, "min_coefficient", "11"},
    {{ANY(lamb, .max_coefficient = 0.001)}, "max_coefficient", "0.001"},
    {{ANY(lamb, .coefficient_beta = 1)}, "coefficient_beta", "1"},
    {{ANY(lamb, .coefficient_beta = -0.9)}, "coefficient_beta", "-0.9"},
    {{ANY(lamb, .max_factor = -4)}, "max_factor", "-4"},
    {{ANY(lamb, .min_factor = NAN)}, "min_factor", "nan"},
    {{ANY(lamb, .min_factor = 5)}, "min_factor", "5"},
    {{ANY(lamb, .max_factor = 0.4)}, "max_factor", "0.4"},
    {{ANY(lamb, .factor_change = 1)}, "factor_change", "1"},
    {{ANY(lamb, .factor_change = 1.5)}, "factor_change", "1.5"},
    {{ANY(lamb, .factor_change = -0.1)}, "factor_change", "-0.1"},
    {{ANY(lamb, .factor_change = NAN)}, "factor_change", "nan"},
    {{ANY(lamb, DEEPSPEED, .common.bucket_size = 7)}, "bucket_size", "7"},

    {{ANY(efficient_adam, .beta1 = 1)}, "beta1 is 1", ""},
    {{ANY(efficient_adam, .beta2 = -1)}, "beta2 is -1", ""},
    {{ANY(efficient_adam, .epsilon = NAN)}, "epsilon is nan", ""},
    {{ANY(efficient_adam, .gain = -2)}, "gain is -2", ""},
    {{ANY(efficient_adam, .trust_ratio = 1, .min_ratio = -1)}, "min_ratio is -1", ""},
    {{ANY(efficient_adam, .trust_ratio = 1, .max_ratio = NAN)}, "max_ratio is nan", ""},
    {{ANY(efficient_adam, .trust_ratio = 1, .min_ratio = 3, .max_ratio = 2)},
     "min_ratio is 3, more than max_ratio, which is 2",
     ""},
    {{ANY(efficient_adam, .common.device = (onebit_device_t)4)}, "device is 4", ""},
    {{ANY(efficient_adam, .common.gradient_dtype = (onebit_dtype_t)8)}, "dtype is 8", ""},
    {{ANY(efficient_adam, .common.parameter_dtype = (onebit_dtype_t)-1)}, "dtype is -1", ""},
    {{ANY(efficient_adam, .common.min_loss_scale = INFINITY)}, "min_loss_scale is inf", ""},
    {{ANY(efficient_adam, .common.warmup_bits = 2)}, "warmup_bits is 2", ""},
    {{ANY(efficient_adam, .common.warmup_bits = -8)}, "warmup_bits is -8", ""},
    {{ANY(efficient_adam, .common.max_bits = -1)}, "max_bits is -1", ""},
    {{ANY(efficient_adam, .common.residual_copies = 3)}, "residual_copies is 3", ""},
    {{ANY(efficient_adam, .common.residual_copies = 1, .common.bits = 2)},
     "residual_copies=1 needs max_bits=1, but max_bits is 2",
     ""},

    {{ANY(zero_one_adam, .beta1 = 1)}, "beta1", "1"},
    {{ANY(zero_one_adam, .beta1 = NAN)}, "beta1", "nan"},
    {{ANY(zero_one_adam, .beta2 = -1)}, "beta2", "-1"},
    {{ANY(zero_one_adam, .epsilon = INFINITY)}, "epsilon", "inf"},
    {{ANY(zero_one_adam, DEEPSPEED, .common.bucket_size = 7)}, "bucket_size", "7"},

    {{ANY(momentum, .momentum = 1)}, "momentum", "1"},
    {{ANY(momentum, .momentum = -0.5)}, "momentum", "-0.5"},
    {{ANY(momentum, .momentum = NAN)}, "momentum", "nan"},

    {{ANY(lion, .beta1 = 1)}, "beta1", "1"},
    {{ANY(lion, .beta2 = -0.5)}, "beta2", "-0.5"},
    {{ANY(lion, .beta3 = NAN)}, "beta3", "nan"},
    {{ANY(lion, .epsilon = -1)}, "epsilon", "-1"},
    {{ANY(lion, GATHERS)}, "schedule", "servers have momentum"},
};

Test(arguments_optimizers, options) {
  onebit_comm_t comm = self_comm();
  for (size_t k = 0; k < sizeof wrong_options / sizeof wrong_options[0]; k++) {
    check_case("%s, wrong %s", wrong_options[k].what.method->name, wrong_options[k].name);
    check_refused(comm, &wrong_options[k].what, ONEBIT_ERROR_ARGUMENT, wrong_options[k].name);
    CHECK_WORDS(wrong_options[k].value);
  }
  onebit_comm_destroy(comm);
}

#define UNSUPPORTED ONEBIT_ERROR_UNSUPPORTED
#define ARGUMENT    ONEBIT_ERROR_ARGUMENT
#define STEPS       .shards = ONEBIT_SHARDS_STEP
static const struct {
  struct any_case what;
  onebit_status_t status;
  const char *words;
} wrong_together[] = {
    {{ANY(momentum, DEEPSPEED)}, UNSUPPORTED, "DEEPSPEED"},
    {{ANY(lion, DEEPSPEED)}, UNSUPPORTED, "DEEPSPEED"},
    {{ANY(efficient_adam, DEEPSPEED)}, UNSUPPORTED, "ONEBIT_PROFILE_DEEPSPEED"},

    {{ANY(adam, STEPS, .common.parameter_dtype = ONEBIT_FLOAT16)}, ARGUMENT, "parameter_dtype"},
    {{ANY(adam, STEPS, .exchange = ONEBIT_ADAM_EXCHANGE_STEP)}, ARGUMENT, "exchange"},
    {{ANY(adam, STEPS, GATHERS)}, ARGUMENT, "schedule"},
    {{ANY(adam, .shards = ONEBIT_SHARDS_PARAMETERS, DEEPSPEED)}, UNSUPPORTED, "DEEPSPEED"},
    {{ANY(adam, STEPS, .common.schedule = ONEBIT_SCHEDULE_HIERARCHICAL)},
     UNSUPPORTED,
     "HIERARCHICAL"},
    {{ANY(adam, STEPS, .common.device = ONEBIT_DEVICE_CUDA)}, UNSUPPORTED, "device"},
    {{ANY(adam, .shards = (onebit_shards_t)3)}, ARGUMENT, "shards is 3"},

    {{ANY(adam, STEPS, .common.warmup_bits = 8)}, UNSUPPORTED, "without shards"},
    {{ANY(zero_one_adam, .common.warmup_bits = 8)}, UNSUPPORTED, "warmup_bits is 8"},
    {{ANY(efficient_adam, .warmup_steps = ONEBIT_WARMUP_NONE, .common.warmup_bits = 8)},
     UNSUPPORTED,
     "warmup_bits is 8"},
    {{ANY(lion, .common.warmup_bits = 8)}, UNSUPPORTED, "warmup_bits is 8"},
    {{ANY(lamb, .common.warmup_bits = 8, DEEPSPEED)},
     ARGUMENT,
     "warmup_bits is 8: the profile has a dense warm-up"},

    {{ANY(adam, .common.bits = 3)}, ARGUMENT, "bits is 3, not 1, 2, 4 or 8"},
    {{ANY(lion, .common.bits = 4, .common.max_bits = 2)},
     ARGUMENT,
     "max_bits is 2, less than bits, 4"},
    {{ANY(lamb, .common.max_bits = 8, DEEPSPEED)}, ARGUMENT, "max_bits is 8"},
    {{ANY(momentum, .common.max_bits = 8, .common.no_error_feedback = 1)},
     ARGUMENT,
     "no_error_feedback is set"},
    {{ANY(adam, STEPS, .common.max_bits = 8)},
     UNSUPPORTED,
     "max_bits is 8: more than one bit is not possible with shards"},
    {{ANY(efficient_adam, .common.bits = 2, .trust_ratio = 1)},
     UNSUPPORTED,
     "bits is 2, max_bits is 2: more than one bit is not possible with trust_ratio"},

    {{ANY(lamb, .common.residual_copies = 1)}, UNSUPPORTED, "residual_copies is 1, which is not"},
    {{ANY(adam, STEPS, .common.residual_copies = 1)},
     UNSUPPORTED,
     "residual_copies is 1, which is not"},
};

static void check_refused_together(onebit_comm_t comm, void *context) {
  (void)context;
  for (size_t k = 0; k < sizeof wrong_together / sizeof wrong_together[0]; k++) {
    check_case("refused row %zu", k);
    check_refused(comm, &wrong_together[k].what, wrong_together[k].status, wrong_together[k].words);
  }
  synchronize_ranks(comm);
}

/* Each rank chooses its device alone, so the options of the other ranks stay valid. */
static void check_refused_on_last_rank(onebit_comm_t comm, void *context) {
  const struct any_case device = {ANY(adam, STEPS, .common.device = ONEBIT_DEVICE_CUDA)},
                        sound = {ANY(adam, STEPS)};
  const int last = onebit_comm_size(comm) - 1;
  (void)context;
  if (onebit_comm_rank(comm) == last)
    check_refused(comm, &device, UNSUPPORTED, "device");
  else
    check_refused(comm, &sound, ONEBIT_ERROR_PEER, "rank");
}

Test(arguments_optimizers, options_that_do_not_go_together) {
  for (int size = 1; size <= 3; size++) {
    on_ranks(size, check_refused_together, NULL);
    on_ranks(size, check_refused_on_last_rank, NULL);
  }
}

/* Only Efficient-Adam accepts tensors that are marked ONEBIT_TABLE. */
Test(arguments_optimizers, tables) {
  onebit_comm_t comm = self_comm();
  float parameter[2] = {0};
  const onebit_tensor_t table = {parameter, NULL, 2, 0, 0, ONEBIT_TABLE};
  for (size_t k = 0; ob_methods[k]; k++) {
    onebit_optimizer_t optimizer;
    const bool has = ob_methods[k] == &ob_method_efficient_adam;
    check_case("%s", ob_methods[k]->name);
    CHECK_STATUS(ob_optimizer_create(comm, ob_methods[k], NULL, &table, 1, &optimizer),
                 has ? ONEBIT_OK : ONEBIT_ERROR_UNSUPPORTED);
    if (!has)
      CHECK_WORDS("tensors[0].uncompressed is ONEBIT_TABLE");
    onebit_optimizer_destroy(optimizer);
  }
  onebit_comm_destroy(comm);
  checks_must_hold();
}

/* Methods with trust ratios allocate numbers for each tensor. With SIZE_MAX tensors this must
 * fail. */
Test(arguments_optimizers, too_many_tensors) {
  onebit_comm_t comm = self_comm();
  onebit_optimizer_t optimizer;
  for (size_t k = 0; ob_methods[k]; k++)
    if (ob_methods[k]->lamb) {
      CHECK_STATUS(ob_optimizer_create(comm, ob_methods[k], NULL, NULL, SIZE_MAX, &optimizer),
                   ONEBIT_ERROR_MEMORY);
      CHECK_WORDS("tensors");
    }
  onebit_comm_destroy(comm);
}

/* --- One rank passes a different option, or creates a different optimizer. All ranks must get an
 * error that names the option. */

static void check_disagreement(onebit_comm_t comm, int culprit, const struct any_case *its,
                               const struct any_case *others, const char *name) {
  check_case("rank %d has another %s of %s", culprit, name, others->method->name);
  check_refused(comm, onebit_comm_rank(comm) == culprit ? its : others, ONEBIT_ERROR_MISMATCH,
                name);
}

/* Makes ranks disagree on each option of a method in turn. Each value alone is valid. */
static void check_each_option(onebit_comm_t comm, int culprit, const struct ob_method *method) {
  for (size_t k = 0; k < method->option_count; k++) {
    const char *name = method->options[k].name;
    struct any_options here = any_options_of(method, NULL), there = here;
    /* shards = 1 has no effect on a single rank; min_ratio and max_ratio have one only with
     * trust_ratio */
    bool ratio = strcmp(name, "min_ratio") == 0 || strcmp(name, "max_ratio") == 0;
    any_set(&here, "trust_ratio", ratio);
    any_set(&there, "trust_ratio", ratio);
    any_set(&there, name, method->options[k].kind <= OB_OPTION_POSITIVE ? 0.55 : 1);
    if (strcmp(name, "trust_ratio") == 0)
      name = "kind of optimizer";
    check_disagreement(comm, culprit, &(struct any_case){method, there.memory},
                       &(struct any_case){method, here.memory}, name);
  }
}

static const struct any_case deepspeed[] = {
    {ANY(adam, DEEPSPEED)}, {ANY(lamb, DEEPSPEED)}, {ANY(zero_one_adam, DEEPSPEED)}};

static void check_all_methods(onebit_comm_t comm, void *context) {
  const int culprit = *(const int *)context;
  for (size_t k = 0; ob_methods[k]; k++) {
    const struct any_case others = {ob_methods[k], NULL};
    check_each_option(comm, culprit, ob_methods[k]);
    check_disagreement(comm, culprit, &(struct any_case){ob_methods[k ? 0 : 1], NULL}, &others,
                       "kind of optimizer");
  }
  for (size_t k = 0; k < sizeof deepspeed / sizeof deepspeed[0]; k++)
    check_disagreement(comm, culprit, &deepspeed[k], &(struct any_case){deepspeed[k].method, NULL},
                       "profile");
  synchronize_ranks(comm);
}

Test(arguments_optimizers, other_options_on_one_rank) {
  for (int rank = 0; rank < 3; rank++)
    on_ranks(3, check_all_methods, &rank);
}

/* --- Steps allocate no memory in any stage; test_memory.c tests the creation of optimizers. */

static void step_without_memory(onebit_comm_t comm, const struct any_case *what) {
  onebit_optimizer_t optimizer = NULL;
  CHECK_STATUS(create_optimizer(comm, what, &optimizer), ONEBIT_OK);
  for (int step = 0; step < 40; step++) {
    ob_memory_fail_at(1);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 1e-3f), ONEBIT_OK);
    ob_memory_fail_at(0);
  }
  onebit_optimizer_destroy(optimizer);
}

Test(arguments_optimizers, without_memory) {
  onebit_comm_t comm = self_comm();
  for (size_t k = 0; ob_methods[k]; k++)
    for (int form = 0; form < (ob_methods[k]->not_deepspeeds ? 2 : 3); form++) {
      struct any_options options = any_options_of(ob_methods[k], NULL);
      any_count(&options, "freeze_step", 3);
      any_count(&options, "variance_freeze_step", 10);
      any_count(&options, "variance_update_scaler", 2);
      any_count(&options, "local_step_scaler", 3);
      any_common(&options)->block_size = form == 1 ? ONEBIT_BLOCK_BUFFER : 0;
      any_common(&options)->profile = form == 2 ? ONEBIT_PROFILE_DEEPSPEED : ONEBIT_PROFILE_DEFAULT;
      const struct any_case what = {ob_methods[k], options.memory};
      step_without_memory(comm, &what);
    }
  onebit_comm_destroy(comm);
}
