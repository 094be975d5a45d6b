/*
 * Tests 0/1 Adam between two synchronisations, where ranks continue alone, each with parameters of
 * its own. Also tests errors in such steps. test_zero_one.c checks that all ranks have the same
 * parameters after each synchronisation.
 */
#include "base/hash.h"
#include "tests/support_zero_one.h"

#define MOST_RANKS 4
#define COUNT      3000

/* One rank's optimizer of two tensors. */
struct learner {
  float parameters[COUNT], gradients[COUNT];
  onebit_tensor_t tensors[2];
  onebit_optimizer_t optimizer;
};

static struct learner *begin_learning(onebit_comm_t comm,
                                      const onebit_zero_one_adam_options_t *options) {
  struct learner *learner = allocate(1, sizeof *learner);
  for (size_t i = 0; i < COUNT; i++)
    learner->parameters[i] = input_value(i, 50, 7);
  learner->tensors[0] =
      (onebit_tensor_t){learner->parameters, learner->gradients, 1000, 0.01f, 0, 0};
  learner->tensors[1] = (onebit_tensor_t){
      learner->parameters + 1000, learner->gradients + 1000, COUNT - 1000, 0, 0.5f, 0};
  CHECK_STATUS(onebit_zero_one_adam_create(comm, learner->tensors, 2, options, &learner->optimizer),
               ONEBIT_OK);
  return learner;
}

static void end_learning(struct learner *learner) {
  onebit_optimizer_destroy(learner->optimizer);
  free(learner);
}

/* The element that never has a gradient. */
#define STILL 7

static void find_gradients(struct learner *learner, int rank, int step) {
  for (size_t i = 0; i < COUNT; i++)
    learner->gradients[i] = i == STILL ? 0.0f : input_value(i, rank, step);
}

static onebit_status_t make_step(struct learner *learner, int rank, int step, float rate) {
  find_gradients(learner, rank, step);
  return onebit_optimizer_step(learner->optimizer, rate);
}

static uint64_t hash_parameters(const struct learner *learner) {
  return ob_hash(OB_HASH_START, learner->parameters, COUNT * sizeof *learner->parameters);
}

static uint64_t hashes[MOST_RANKS]; /* of the parameters after a synchronisation */

/* --- Local steps */

/* Returns options that freeze the variance after three steps and synchronise the ranks in every
 * fourth step. */
static onebit_zero_one_adam_options_t fourth_step_options(void) {
  onebit_zero_one_adam_options_t options = zero_one_options(3);
  options.local_step_scaler = 1;
  return options;
}

/* With fourth_step_options, the number of steps before the first local step, and of consecutive
 * local steps. */
#define BEFORE_LOCAL 8
#define LOCAL_STEPS  3

static struct learner *train_to_local_steps(onebit_comm_t comm, int rank,
                                            const onebit_zero_one_adam_options_t *options) {
  struct learner *learner = begin_learning(comm, options);
  for (int step = 0; step < BEFORE_LOCAL; step++)
    CHECK_STATUS(make_step(learner, rank, step, 1e-3f), ONEBIT_OK);
  CHECK(optimizer_info(learner->optimizer).synchronized, "the ranks are not synchronised");
  return learner;
}

/* Makes the synchronisation step that ends the local steps. */
static void end_local_steps(struct learner *learner, int rank) {
  CHECK_STATUS(make_step(learner, rank, 50, 1e-3f), ONEBIT_OK);
  CHECK(optimizer_info(learner->optimizer).synchronized, "the ranks are not synchronised");
  hashes[rank] = hash_parameters(learner);
}

static void check_synchronized(int ranks) {
  for (int r = 1; r < ranks; r++)
    cr_assert_eq(hashes[r], hashes[0], "rank %d has other parameters", r);
}

static pthread_barrier_t everyone;

/* The other ranks begin their local steps after rank 0 has made its own. */
static void let_rank_0_go_first(onebit_comm_t comm, void *context) {
  int rank = onebit_comm_rank(comm);
  struct learner *learner = train_to_local_steps(comm, rank, context);
  pthread_barrier_wait(&everyone);
  if (rank > 0)
    pthread_barrier_wait(&everyone);
  for (int step = 0; step < LOCAL_STEPS; step++) {
    CHECK_STATUS(make_step(learner, rank, 10 + step, 1e-3f), ONEBIT_OK);
    CHECK(!optimizer_info(learner->optimizer).synchronized, "still together in step %d", step);
  }
  if (rank == 0)
    pthread_barrier_wait(&everyone);
  end_local_steps(learner, rank);
  CHECK(optimizer_info(learner->optimizer).exchanges[2] >= LOCAL_STEPS, "only %llu local steps",
        (unsigned long long)optimizer_info(learner->optimizer).exchanges[2]);
  end_learning(learner);
}

Test(zero_one_alone, local_steps_need_nobody_else) {
  onebit_zero_one_adam_options_t options = fourth_step_options();
  pthread_barrier_init(&everyone, NULL, 3);
  on_ranks(3, let_rank_0_go_first, &options);
  pthread_barrier_destroy(&everyone);
  check_synchronized(3);
}

/* --- Gradients that are not finite */

static void spoil_gradients(struct learner *learner, int rank, int step, float value) {
  for (size_t i = 0; i < COUNT; i++)
    learner->gradients[i] = rank == 1 ? value : input_value(i, rank, step);
}

/* All gradients of rank 1 are NaN, first in local steps and then in a synchronisation step. */
static void lose_gradients(onebit_comm_t comm, void *context) {
  int rank = onebit_comm_rank(comm);
  struct learner *learner = train_to_local_steps(comm, rank, context);
  double scale, first;
  CHECK_STATUS(onebit_optimizer_get_loss_scale(learner->optimizer, &first), ONEBIT_OK);
  for (int step = 0; step < LOCAL_STEPS; step++) {
    uint64_t before = hash_parameters(learner);
    double momentum = optimizer_info(learner->optimizer).momentum_norm;
    bool lost = rank == 1 && step != 1;
    spoil_gradients(learner, rank, step, step == 1 ? 1.0f : step == 0 ? NAN : 1e30f);
    CHECK_STATUS(onebit_optimizer_step(learner->optimizer, 1e-3f),
                 lost ? ONEBIT_SKIPPED : ONEBIT_OK);
    if (lost)
      CHECK_WORDS("this rank only");
    bool same = hash_parameters(learner) == before &&
                !(optimizer_info(learner->optimizer).momentum_norm != momentum);
    CHECK(same == lost, "step %d: the parameters %s", step, same ? "stay" : "change");
    CHECK(optimizer_info(learner->optimizer).steps == (uint64_t)(BEFORE_LOCAL + 1 + step) &&
              optimizer_info(learner->optimizer).skipped == 0,
          "step %d is not counted as made", step);
  }
  CHECK_STATUS(onebit_optimizer_get_loss_scale(learner->optimizer, &scale), ONEBIT_OK);
  CHECK(scale == (rank == 1 && first > 1 ? first / 4 : first), "the scale is %g, and was %g", scale,
        first);
  uint64_t before = hash_parameters(learner);
  spoil_gradients(learner, rank, 20, NAN);
  CHECK_STATUS(onebit_optimizer_step(learner->optimizer, 1e-3f), ONEBIT_SKIPPED);
  /* This element must not move, whatever its gradient is. */
  find_gradients(learner, rank, 20);
  learner->gradients[STILL] = rank == 1 ? NAN : 0.0f;
  CHECK_STATUS(onebit_optimizer_step(learner->optimizer, 1e-3f), ONEBIT_SKIPPED);
  CHECK(hash_parameters(learner) == before && optimizer_info(learner->optimizer).skipped == 2 &&
            !optimizer_info(learner->optimizer).synchronized,
        "a synchronisation that is skipped changed something");
  end_local_steps(learner, rank);
  end_learning(learner);
}

/* Clipping also notices NaN in gradients. */
Test(zero_one_alone, gradients_of_nan) {
  onebit_zero_one_adam_options_t options = fourth_step_options();
  for (int k = 0; k < 4; k++) {
    const int size = k == 3 ? 2 : 3;
    options.common.clip_norm = k / 2;
    options.common.initial_loss_scale = k % 2 * 1024;
    on_ranks(size, lose_gradients, &options);
    check_synchronized(size);
  }
}

/* --- Clipping */

/* Makes steps whose gradients are not clipped. Then makes a local step with the same gradients
 * times `size`. */
static struct learner *train_to_local_step(onebit_comm_t comm,
                                           const onebit_zero_one_adam_options_t *options,
                                           float size) {
  struct learner *learner = begin_learning(comm, options);
  for (int step = 0; step <= BEFORE_LOCAL; step++) {
    for (size_t i = 0; i < COUNT; i++)
      learner->gradients[i] = input_value(i, 0, step) * (step == BEFORE_LOCAL ? size : 1.0f / 1024);
    CHECK_STATUS(onebit_optimizer_step(learner->optimizer, 1e-3f), ONEBIT_OK);
  }
  return learner;
}

/* A rank that clips its gradients to half of their norm must make the same steps as a rank whose
 * gradients are half as large. */
static void clip_alone(onebit_comm_t comm, void *context) {
  onebit_zero_one_adam_options_t options = fourth_step_options();
  (void)context;
  options.common.clip_norm = 1e6;
  struct learner *halved = train_to_local_step(comm, &options, 0.5f);
  options.common.clip_norm = optimizer_info(halved->optimizer).gradient_norm;
  struct learner *clipped = train_to_local_step(comm, &options, 1);
  CHECK(optimizer_info(clipped->optimizer).gradient_norm ==
            2 * optimizer_info(halved->optimizer).gradient_norm,
        "norms of %g and %g", optimizer_info(clipped->optimizer).gradient_norm,
        optimizer_info(halved->optimizer).gradient_norm);
  CHECK_BITS("parameters", clipped->parameters, halved->parameters, COUNT, ONEBIT_FLOAT32);
  end_learning(halved);
  end_learning(clipped);
}

Test(zero_one_alone, clips_by_its_own_norm) { on_ranks(1, clip_alone, NULL); }

/* --- Mistakes */

/* Makes a step in which rank 1 reports a tensor as ready twice. */
static onebit_status_t step_telling_twice(struct learner *learner, int rank) {
  CHECK_STATUS(onebit_optimizer_begin(learner->optimizer, 1e-3f), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_ready(learner->optimizer, 0), ONEBIT_OK);
  if (rank == 1)
    CHECK_STATUS(onebit_optimizer_ready(learner->optimizer, 0), ONEBIT_ERROR_ARGUMENT);
  return onebit_optimizer_step(learner->optimizer, 1e-3f);
}

/* Makes a mistake in a local step, of which the other ranks are not told. The rank with the mistake
 * counts the step, as the others do, but does not change its parameters. */
static void make_mistake(onebit_comm_t comm, void *context) {
  int rank = onebit_comm_rank(comm);
  struct learner *learner = train_to_local_steps(comm, rank, context);
  uint64_t before = hash_parameters(learner);
  CHECK_STATUS(step_telling_twice(learner, rank), rank == 1 ? ONEBIT_ERROR_ARGUMENT : ONEBIT_OK);
  CHECK((hash_parameters(learner) == before) == (rank == 1),
        "a mistake, and parameters that change");
  CHECK(optimizer_info(learner->optimizer).steps == BEFORE_LOCAL + 1, "the step is not counted");
  for (int step = 1; step < LOCAL_STEPS; step++)
    CHECK_STATUS(make_step(learner, rank, 10 + step, 1e-3f), ONEBIT_OK);
  end_local_steps(learner, rank);
  end_learning(learner);
}

Test(zero_one_alone, mistakes_are_told_and_the_step_counts) {
  onebit_zero_one_adam_options_t options = fourth_step_options();
  on_ranks(3, make_mistake, &options);
  check_synchronized(3);
}

/* If a tensor is exchanged uncompressed, its message reports the mistake to the other ranks. The
 * message is sent only at the end of the step, although the tensor is ready before, and no rank
 * makes the step. */
static void make_mistake_with_messages(onebit_comm_t comm, void *context) {
  int rank = onebit_comm_rank(comm);
  struct learner *learner = train_to_local_steps(comm, rank, context);
  uint64_t before = hash_parameters(learner);
  CHECK_STATUS(step_telling_twice(learner, rank),
               rank == 1 ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
  CHECK(hash_parameters(learner) == before, "a mistake, and parameters that change");
  CHECK(optimizer_info(learner->optimizer).steps == BEFORE_LOCAL, "the step is counted");
  end_learning(learner);
}

Test(zero_one_alone, mistakes_travel_with_uncompressed_tensors) {
  onebit_zero_one_adam_options_t options = fourth_step_options();
  options.common.dense_below = 1001; /* makes the first of the two tensors dense */
  on_ranks(3, make_mistake_with_messages, &options);
}

/* Learning rates that differ between ranks are noticed in the synchronisation step. */
static void pass_different_rates(onebit_comm_t comm, void *context) {
  static const float rates[] = {2e-3f, NAN, -1.0f};
  int rank = onebit_comm_rank(comm);
  for (size_t k = 0; k < sizeof rates / sizeof rates[0]; k++) {
    struct learner *learner = train_to_local_steps(comm, rank, context);
    for (int step = 0; step < LOCAL_STEPS; step++) {
      bool other = rank == 1 && step == 1;
      CHECK_STATUS(make_step(learner, rank, 10 + step, other ? rates[k] : 1e-3f),
                   other && k > 0 ? ONEBIT_ERROR_ARGUMENT : ONEBIT_OK);
      CHECK(optimizer_info(learner->optimizer).steps == (uint64_t)(BEFORE_LOCAL + 1 + step),
            "not counted");
    }
    uint64_t before = hash_parameters(learner);
    onebit_status_t status = make_step(learner, rank, 20, 1e-3f);
    CHECK(status == ONEBIT_ERROR_MISMATCH, "status %d: %s", (int)status, onebit_last_error());
    CHECK_WORDS("the sum of learning_rate since the last synchronisation");
    CHECK(hash_parameters(learner) == before, "parameters have changed");
    end_learning(learner);
  }
}

Test(zero_one_alone, rates_that_differ_are_found_at_the_synchronisation) {
  onebit_zero_one_adam_options_t options = fourth_step_options();
  on_ranks(2, pass_different_rates, &options);
}

static void destroy_in_open_step(onebit_comm_t comm, void *context) {
  struct learner *learner = train_to_local_steps(comm, onebit_comm_rank(comm), context);
  CHECK_STATUS(onebit_optimizer_begin(learner->optimizer, 1e-3f), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_ready(learner->optimizer, 1), ONEBIT_OK);
  end_learning(learner);
  synchronize_ranks(comm);
}

Test(zero_one_alone, destroyed_while_a_local_step_is_open) {
  onebit_zero_one_adam_options_t options = fourth_step_options();
  on_ranks(3, destroy_in_open_step, &options);
}

/* --- Rates of zero */

/* With a learning rate of 0 there is no movement from which a momentum could be computed. The
 * momentum is zero, and nothing is divided by zero. */
static void train_with_zero_rate(onebit_comm_t comm, void *context) {
  int rank = onebit_comm_rank(comm);
  struct learner *learner = train_to_local_steps(comm, rank, context);
  for (int step = 0; step <= LOCAL_STEPS; step++)
    CHECK_STATUS(make_step(learner, rank, 10 + step, 0), ONEBIT_OK);
  onebit_optimizer_info_t info = optimizer_info(learner->optimizer);
  CHECK(info.synchronized && info.momentum_norm == 0, "momentum of %g", info.momentum_norm);
  for (int step = 0; step < 9; step++)
    CHECK_STATUS(make_step(learner, rank, 20 + step, 1e-3f), ONEBIT_OK);
  for (size_t i = 0; i < COUNT; i++)
    CHECK(isfinite(learner->parameters[i]), "parameter %zu is %g", i,
          (double)learner->parameters[i]);
  end_learning(learner);
}

Test(zero_one_alone, rates_of_zero) {
  onebit_zero_one_adam_options_t options = fourth_step_options();
  on_ranks(2, train_with_zero_rate, &options);
}
