/* Tests steps in buckets and in parts, their outcome, replicas that differ, and parameters that
 * must not move. */
#include "base/error.h"
#include "optimizers/optimizer.h"
#include "tests/support.h"
#include "tests/support_optimizers.h"

/*
 * Tests steps in buckets and in parts, in addition to test_optimizers.c. A bucket is sent when it
 * is ready. If buckets end with different statuses, the step must return the same one on all ranks.
 */

/* A bucket is sent when its last gradient is ready, and the last bucket when the step is made. */
static void check_departures(onebit_comm_t comm, void *context) {
  enum { EACH = 500, TENSORS = 6 }; /* two tensors per bucket */
  static const bool leaves[TENSORS] = {false, true, false, true, false, false};
  float parameters[TENSORS * EACH] = {0}, gradients[TENSORS * EACH];
  onebit_tensor_t tensors[TENSORS];
  onebit_optimizer_t optimizer = NULL;
  (void)context;
  onebit_adam_options_t options = {
      .size = sizeof options, .freeze_step = 2, .common.bucket_size = 2 * EACH};
  for (int t = 0; t < TENSORS; t++)
    tensors[t] = (onebit_tensor_t){parameters + t * EACH, gradients + t * EACH, EACH, 0, 0, 0};
  fill_input(gradients, ONEBIT_FLOAT32, TENSORS * EACH, onebit_comm_rank(comm), 0);
  CHECK_STATUS(onebit_adam_create(comm, tensors, TENSORS, &options, &optimizer), ONEBIT_OK);
  for (int step = 0; step < 4; step++) {
    CHECK_STATUS(onebit_optimizer_begin(optimizer, 0.1f), ONEBIT_OK);
    for (size_t k = 0; k < TENSORS; k++) {
      uint64_t before = onebit_comm_bytes_sent(comm);
      CHECK_STATUS(onebit_optimizer_ready(optimizer, TENSORS - 1 - k), ONEBIT_OK);
      CHECK(!leaves[k] || onebit_comm_bytes_sent(comm) > before, "step %d: nothing left with %zu",
            step, k);
    }
    uint64_t before = onebit_comm_bytes_sent(comm);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 0.1f), ONEBIT_OK);
    CHECK(onebit_comm_bytes_sent(comm) > before, "step %d: nothing left with the step", step);
  }
  onebit_optimizer_destroy(optimizer);
}

Test(buckets, leave_when_they_are_ready) {
  for (int size = 2; size <= 4; size++)
    on_ranks(size, check_departures, NULL);
}

/* An error in any bucket, or in the step itself, has priority over skips. Of several errors, all
 * ranks must return the first. */
Test(buckets, an_error_counts_more_than_a_skip) {
  static const onebit_status_t came[][2] = {
      {ONEBIT_SKIPPED, ONEBIT_ERROR_TRANSPORT},
      {ONEBIT_ERROR_TRANSPORT, ONEBIT_SKIPPED},
      {ONEBIT_ERROR_TRANSPORT, ONEBIT_ERROR_PEER},
  };
  float parameter = 0, gradient = 0;
  const onebit_tensor_t tensor = {.parameter = &parameter, .gradient = &gradient, .count = 1};
  onebit_optimizer_t optimizer = NULL;
  onebit_comm_t comm = self_comm();
  CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, NULL, &optimizer), ONEBIT_OK);
  for (size_t k = 0; k < 3; k++) {
    for (size_t i = 0; i < 2; i++)
      ob_optimizer_note(optimizer, ob_error(came[k][i], "number %zu", i));
    CHECK_STATUS(ob_optimizer_end_outcome(optimizer), ONEBIT_ERROR_TRANSPORT);
    CHECK_WORDS(k ? "number 0" : "number 1");
    CHECK_STATUS(ob_optimizer_end_outcome(optimizer), ONEBIT_OK);
  }
  onebit_optimizer_destroy(optimizer);
  onebit_comm_destroy(comm);
}

/* Tests that ranks whose parameters differ get an error that names the tensor. Ranks with equal
 * parameters continue. */

enum { TENSORS = 40, LARGE = 70001, ODD = 33 };

struct learner {
  float large[LARGE], small[TENSORS - 1][ODD], gradient[LARGE];
  onebit_optimizer_t optimizer;
};

static struct learner *create_learner(onebit_comm_t comm, onebit_dtype_t dtype) {
  struct learner *learner = allocate(1, sizeof *learner);
  onebit_tensor_t tensors[TENSORS] = {
      {.parameter = learner->large, .gradient = learner->gradient, .count = LARGE}};
  for (int t = 1; t < TENSORS; t++)
    tensors[t] = (onebit_tensor_t){.parameter = learner->small[t - 1], .count = ODD};
  onebit_adam_options_t options = {.size = sizeof options, .common.parameter_dtype = dtype};
  CHECK_STATUS(onebit_adam_create(comm, tensors, TENSORS, &options, &learner->optimizer),
               ONEBIT_OK);
  return learner;
}

static void destroy_learner(struct learner *learner) {
  onebit_optimizer_destroy(learner->optimizer);
  free(learner);
}

static void check_mismatch_message(onebit_status_t status, const char *words) {
  CHECK_STATUS(status, ONEBIT_ERROR_MISMATCH);
  CHECK(strstr(onebit_last_error(), words), "'%s', not of %s", onebit_last_error(), words);
}

static void compare_at_first_step(onebit_comm_t comm, void *context) {
  (void)context;
  struct learner *learner = create_learner(comm, ONEBIT_FLOAT32);
  if (onebit_comm_rank(comm) == 2)
    learner->small[37][ODD - 1] = 1e-30f;
  check_mismatch_message(onebit_optimizer_step(learner->optimizer, 0.1f), "tensors[38]");
  CHECK(strstr(onebit_last_error(), "rank 2"), "%s", onebit_last_error());
  learner->small[37][ODD - 1] = 0;
  CHECK_STATUS(onebit_optimizer_step(learner->optimizer, 0.1f), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_compare(learner->optimizer), ONEBIT_OK);
  destroy_learner(learner);
}

Test(compare, at_the_first_step) { on_ranks(3, compare_at_first_step, NULL); }

/* Compares parameters that differ in the middle of the large tensor, and in the last of an odd
 * number of 16-bit values. */
static void compare_when_asked(onebit_comm_t comm, void *context) {
  (void)context;
  struct learner *learner = create_learner(comm, ONEBIT_BFLOAT16);
  uint16_t *large = (uint16_t *)learner->large, *small = (uint16_t *)learner->small[0];
  for (int k = 0; k < 3; k++) {
    CHECK_STATUS(onebit_optimizer_compare(learner->optimizer), ONEBIT_OK);
    uint16_t *at = k == 0 ? &large[40000] : k == 1 ? &large[LARGE - 1] : &small[ODD - 1];
    *at ^= (uint16_t)onebit_comm_rank(comm);
    check_mismatch_message(onebit_optimizer_compare(learner->optimizer),
                           k < 2 ? "tensors[0]" : "tensors[1]");
    *at ^= (uint16_t)onebit_comm_rank(comm);
  }
  CHECK_STATUS(onebit_optimizer_step(learner->optimizer, 0.1f), ONEBIT_OK);
  destroy_learner(learner);
}

Test(compare, when_asked) { on_ranks(2, compare_when_asked, NULL); }

static void compare_at_interval(onebit_comm_t comm, void *context) {
  (void)context;
  struct learner *learner = create_learner(comm, ONEBIT_FLOAT32);
  CHECK_STATUS(onebit_optimizer_set_compare_interval(learner->optimizer, 3), ONEBIT_OK);
  for (int step = 1; step <= 3; step++)
    CHECK_STATUS(onebit_optimizer_step(learner->optimizer, 0.1f), ONEBIT_OK);
  learner->large[9] += (float)onebit_comm_rank(comm);
  /* the first step, and every third step after it, compares the parameters */
  check_mismatch_message(onebit_optimizer_step(learner->optimizer, 0.1f), "tensors[0]");
  CHECK_STATUS(onebit_optimizer_step(learner->optimizer, 0.1f), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_step(learner->optimizer, 0.1f), ONEBIT_OK);
  check_mismatch_message(onebit_optimizer_step(learner->optimizer, 0.1f), "tensors[0]");
  CHECK_STATUS(onebit_optimizer_set_compare_interval(learner->optimizer, 0), ONEBIT_OK);
  for (int step = 0; step < 4; step++)
    CHECK_STATUS(onebit_optimizer_step(learner->optimizer, 0.1f), ONEBIT_OK);
  /* rank 1 makes the step in parts, the other ranks make it in one call */
  CHECK_STATUS(onebit_optimizer_set_compare_interval(learner->optimizer, 1), ONEBIT_OK);
  if (onebit_comm_rank(comm) == 1) {
    CHECK_STATUS(onebit_optimizer_begin(learner->optimizer, 0.1f), ONEBIT_OK);
    CHECK_STATUS(onebit_optimizer_ready(learner->optimizer, 0), ONEBIT_OK);
  }
  check_mismatch_message(onebit_optimizer_step(learner->optimizer, 0.1f), "tensors[0]");
  destroy_learner(learner);
}

Test(compare, at_an_interval) { on_ranks(2, compare_at_interval, NULL); }

/* Tests that a parameter without gradients does not move, and does not jump when its first gradient
 * comes. */

enum { LATE = 4096 };

/* Every eighth element has no gradient in the first 40 steps, whatever the bits of its neighbours
 * are. Afterwards it gets gradients. Its steps must not be larger than those of other elements,
 * since no momentum has accumulated. */
static void give_late_gradients(onebit_comm_t comm, void *context) {
  int rank = onebit_comm_rank(comm);
  float *parameters = allocate(LATE, 4), *gradients = allocate(LATE, 4), *start;
  onebit_tensor_t tensor = {parameters, gradients, LATE, 0, 0, 0};
  onebit_optimizer_t optimizer;
  start = allocate(LATE, sizeof *start);
  fill_input(parameters, ONEBIT_FLOAT32, LATE, 50, 0);
  memcpy(start, parameters, LATE * sizeof *start);
  if (!CHECK_STATUS(onebit_zero_one_adam_create(comm, &tensor, 1, context, &optimizer), ONEBIT_OK))
    return;
  for (int step = 0; step < 60; step++) {
    for (size_t i = 0; i < LATE; i++)
      gradients[i] = i % 8 == 3 && step < 40 ? 0.0f : 1.0f + input_value(i, rank, step) / 16;
    CHECK_STATUS(onebit_optimizer_step(optimizer, 1e-3f), ONEBIT_OK);
    for (size_t i = 3; i < LATE && step < 40; i += 8)
      CHECK(parameters[i] == start[i], "step %d: element %zu moves", step, i);
  }
  for (size_t i = 3; i < LATE; i += 8)
    CHECK(fabsf(parameters[i] - start[i]) < 0.1f, "element %zu moves by %g", i,
          (double)(parameters[i] - start[i]));
  CHECK(parameters[0] != start[0], "nothing moves");
  onebit_optimizer_destroy(optimizer);
  free(start);
  free(parameters);
  free(gradients);
}

Test(still, elements_without_variance_stay_and_begin_without_a_jump) {
  onebit_zero_one_adam_options_t options = {.size = sizeof options,
                                            .variance_freeze_step = 1000,
                                            .variance_update_scaler = 2,
                                            .local_step_scaler = 3,
                                            .local_step_clipper = 4};
  on_ranks(3, give_late_gradients, &options); /* their first gradients come in the variance stage */
  options.variance_freeze_step = 20;
  on_ranks(3, give_late_gradients, &options); /* their first gradients come after the freeze: they
                                               * never move */
}

enum { STILL = 2048 * 3 };

/* The first blocks have gradients and the last block has none. In some steps no block has a
 * gradient. */
static void check_blocks_stay(onebit_comm_t comm, void *context) {
  static const size_t block_sizes[] = {0, 64};
  (void)context;
  for (size_t k = 0; k < 2; k++) {
    float *parameters = allocate(STILL, sizeof *parameters),
          *gradients = allocate(STILL, sizeof *gradients);
    onebit_tensor_t tensor = {parameters, gradients, STILL, 0, 0, 0};
    onebit_optimizer_t optimizer;
    onebit_lion_options_t options = {.size = sizeof options, .common.block_size = block_sizes[k]};
    if (!CHECK_STATUS(onebit_lion_create(comm, &tensor, 1, &options, &optimizer), ONEBIT_OK))
      break;
    for (int step = 0; step < 20; step++) {
      for (size_t i = 0; i < STILL * 2 / 3 && step >= 5; i++)
        gradients[i] = input_value(i, onebit_comm_rank(comm), step);
      CHECK_STATUS(onebit_optimizer_step(optimizer, 0.01f), ONEBIT_OK);
      bool moved = false, beyond = false;
      for (size_t i = 0; i < STILL; i++) {
        moved |= i < STILL * 2 / 3 && parameters[i] != 0;
        beyond |= i >= STILL * 2 / 3 && parameters[i] != 0;
      }
      CHECK(moved == (step >= 5), "step %d: blocks with gradients", step);
      CHECK(!beyond, "step %d: a block without gradients has moved", step);
    }
    onebit_optimizer_destroy(optimizer);
    free(parameters);
    free(gradients);
  }
}

Test(still, blocks_without_gradients_stay) {
  on_ranks(1, check_blocks_stay, NULL);
  on_ranks(3, check_blocks_stay, NULL);
}
