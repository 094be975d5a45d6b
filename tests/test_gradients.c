/* Tests gradient factors, and gradient clipping. */
#include "tests/support_adam.h"
#include "tests/support_errors.h"

/*
 * Tests mixed precision and accumulated gradients, in addition to test_optimizers.c.
 * gradient_factor turns a sum over micro-batches into their mean. float32 master values keep digits
 * that 16-bit types would lose.
 */

static void step_pair(struct adam_pair *pair) {
  for (int k = 0; k < 2; k++)
    CHECK_STATUS(onebit_optimizer_step(pair->optimizer[k], 0.01f), ONEBIT_OK);
  CHECK_BITS("parameters", pair->parameter[0], pair->parameter[1], PAIR_COUNT, ONEBIT_FLOAT32);
}

/* With gradient_factor = 1 / k, a sum over k micro-batches counts as their mean. If k is a power of
 * two, and float32 adds the numbers exactly, both give the same bits. */
static void accumulated_on_rank(onebit_comm_t comm, void *context) {
  onebit_adam_options_t options[2] = {ONEBIT_ADAM_OPTIONS_INIT, ONEBIT_ADAM_OPTIONS_INIT};
  const struct adam_case *what = context;
  const int batches = (int)what->multiple;
  int rank = onebit_comm_rank(comm);
  options[0] = options[1] = what->options;
  options[1].common.gradient_factor = 1.0 / batches;
  struct adam_pair *pair = pair_make(comm, options);
  for (int step = 0; step < 8; step++) {
    check_case("step %d of %d micro-batches, profile %d", step, batches,
               (int)what->options.common.profile);
    for (int i = 0; i < PAIR_COUNT; i++) {
      float sum = 0.0f;
      for (int b = 0; b < batches; b++)
        sum += roundf(256.0f * input_value((size_t)i, rank, step * 64 + b)) / 256.0f;
      pair->gradient[0][i] = sum / (float)batches;
      pair->gradient[1][i] = sum;
    }
    step_pair(pair);
  }
  pair_free(pair);
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

/* Steps that bfloat16 would round away add up in the master values. Creating an optimizer writes no
 * parameter. */
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
  oracle_store(parameter, 5, ONEBIT_BFLOAT16, 3.0f); /* a change by the caller */
  for (int step = 0; step < 10; step++) { /* each step is too small to change a rounded value */
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

/* Master values take 4 bytes per parameter, and no other memory grows. */
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

/*
 * Tests clipping by the norm of all ranks' gradients, in addition to test_optimizers.c. The norm is
 * the one that the header defines. If it is not finite, all ranks skip the step. Clipping sends one
 * small message to each rank.
 */

static struct adam_case clipping_case(double clip_norm) {
  struct adam_case what = {.steps = 12,
                           .options = ONEBIT_ADAM_OPTIONS_INIT,
                           .tensors = &adam_tensors_odd,
                           .still = true};
  what.options.freeze_step = 5;
  what.options.common.clip_norm = clip_norm;
  return what;
}

/* A limit for clipping. The gradient norms of some steps are below it, and those of others are
 * above it. */
#define MIDDLE 195.0

Test(clipping, clips_some_steps_of_a_run) {
  struct adam_case what = clipping_case(MIDDLE);
  what.size = 3;
  struct adam_run run = adam_prepare(&what);
  int clipped = 0;
  for (int step = 0; step < what.steps; step++)
    clipped += run.moments[step].gradient_norm > MIDDLE;
  cr_assert(clipped > 2 && clipped < what.steps - 2, "%d of %d steps are clipped", clipped,
            what.steps);
  adam_release(&run);
}

/* The norm equals the formula of the public header, computed in double. */
Test(clipping, the_norm_is_what_it_says) {
  struct adam_case what = clipping_case(1.0);
  what.size = 3;
  struct adam_run run = adam_prepare(&what);
  float *gradient = allocate(run.total, sizeof *gradient);
  for (int step = 0; step < what.steps; step++) {
    double mean = 0.0;
    for (int r = 0; r < what.size; r++) {
      adam_gradient(&what, gradient, run.total, r, step);
      for (size_t i = 0; i < run.total; i++)
        mean += (double)gradient[i] * (double)gradient[i] / what.size;
    }
    double norm = run.moments[step].gradient_norm;
    CHECK(fabs(norm - sqrt(mean)) < 1e-6 * norm, "step %d: %g, not %g", step, norm, sqrt(mean));
  }
  free(gradient);
  adam_release(&run);
}

/* If the norm never reaches the limit, no bit changes. */
Test(clipping, of_a_norm_that_is_not_reached_is_no_clipping) {
  for (int size = 1; size <= 4; size++) {
    struct adam_case plain = clipping_case(0.0), clipped = clipping_case(1e6);
    plain.size = clipped.size = size;
    struct adam_run run = adam_prepare(&clipped), without = adam_prepare(&plain);
    for (int step = 0; step < plain.steps; step++)
      CHECK_BITS("the oracle's parameters", run.moments[step].parameters,
                 without.moments[step].parameters, run.total, ONEBIT_FLOAT32);
    on_ranks(size, adam_on_rank, &run);
    adam_release(&run);
    adam_release(&without);
  }
}

/* --- Steps that are skipped */

/* Values that must make all ranks skip the step. The square of -1e22 is not finite. The square of
 * 1e11 is finite, but norms of 2^32 and more count as not finite. */
static const float poisons[] = {NAN, INFINITY, -1e22f, 1e11f};

Test(clipping, skips_what_has_no_norm) {
  static const int sizes[] = {1, 2, 3, 4, 7};
  for (size_t p = 0; p < sizeof sizes / sizeof sizes[0]; p++)
    for (int k = 0; k < 4 && test_wanted(p); k++)
      for (int profile = 0; profile <= 1; profile++) {
        struct adam_case what = clipping_case(MIDDLE);
        what.size = sizes[p];
        what.poison = poisons[k];
        what.poisoned_rank = k % what.size;
        what.form = (enum adam_form)((k + profile) % ADAM_FORMS);
        what.options.common.bucket_size = !profile && k % 2 ? 1000 : 0;
        what.options.common.profile = (onebit_profile_t)profile;
        what.options.common.initial_loss_scale = 2; /* the loss scale falls to 1 and rises again */
        what.options.common.loss_scale_interval = 1;
        adam_check(&what);
      }
}

/* A finite norm below 2^32 is only clipped. Without clipping, only larger gradients have squares
 * that overflow. */
struct large {
  int rank;
  float value;
  onebit_status_t wanted;
};

static void large_on_rank(onebit_comm_t comm, void *context) {
  const struct large *large = context;
  float parameter[100] = {0}, gradient[100] = {1.0f}, before[100];
  onebit_tensor_t tensor = {parameter, gradient, 100, 0, 0, 0};
  onebit_optimizer_t optimizer = NULL;
  char words[32];
  onebit_adam_options_t options = {.size = sizeof options, .freeze_step = 2, .common.clip_norm = 1};
  CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, &options, &optimizer), ONEBIT_OK);
  for (int step = 0; step < 4; step++) {
    check_case("%g on rank %d, step %d", (double)large->value, large->rank, step);
    memcpy(before, parameter, sizeof before);
    gradient[step] = onebit_comm_rank(comm) == large->rank ? large->value : 1.0f;
    CHECK_STATUS(onebit_optimizer_step(optimizer, 0.1f), large->wanted);
    gradient[step] = 1.0f;
    if (large->wanted != ONEBIT_SKIPPED)
      continue;
    snprintf(words, sizeof words, "rank %d ", large->rank);
    CHECK_WORDS(words);
    CHECK_BITS("parameters", parameter, before, 100, ONEBIT_FLOAT32);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 0.1f), ONEBIT_OK);
  }
  const onebit_optimizer_info_t info = optimizer_info(optimizer);
  CHECK(info.skipped == (large->wanted == ONEBIT_SKIPPED ? 4 : 0), "skipped %llu",
        (unsigned long long)info.skipped);
  CHECK(info.steps == 4, "%llu steps", (unsigned long long)info.steps);
  onebit_optimizer_destroy(optimizer);
}

Test(clipping, norms_up_to_a_limit) {
  static const struct {
    float value;
    onebit_status_t wanted;
  } values[] = {{4e9f, ONEBIT_OK}, {NAN, ONEBIT_SKIPPED}, {3e38f, ONEBIT_SKIPPED}};
  for (int size = 1; size <= 4; size++)
    for (size_t k = 0; k < 3; k++)
      for (int rank = 0; rank < size; rank++) {
        struct large large = {rank, values[k].value, values[k].wanted};
        on_ranks(size, large_on_rank, &large);
      }
}

/* --- The bytes that clipping adds; test_statistics.c tests the other bytes that are sent. */

static void bytes_on_rank(onebit_comm_t comm, void *context) {
  float parameter[100] = {0}, gradient[100] = {1.0f};
  onebit_tensor_t tensor = {parameter, gradient, 100, 0, 0, 0};
  onebit_optimizer_info_t info[2];
  (void)context;
  for (int clips = 0; clips <= 1; clips++) {
    onebit_optimizer_t optimizer = NULL;
    onebit_adam_options_t options = {
        .size = sizeof options, .freeze_step = 1, .common.clip_norm = clips};
    CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, &options, &optimizer), ONEBIT_OK);
    info[clips] = optimizer_info(optimizer);
    onebit_optimizer_destroy(optimizer);
  }
  /* Clipping sends one message to each other rank: a header and 32 float32 elements. Messages that
   * are passed on in rounds are padded to whole cache lines. */
  uint64_t others = (uint64_t)onebit_comm_size(comm) - 1, message = 40 + 32 * sizeof(float);
  uint64_t more = info[1].compressed_bytes - info[0].compressed_bytes;
  CHECK(more >= others * message && more <= others * (message + 64), "%llu bytes more",
        (unsigned long long)more);
}

Test(clipping, sends_one_small_message_to_each) {
  for (int size = 1; size <= 4; size++)
    on_ranks(size, bytes_on_rank, NULL);
}
