/*
 * Tests that checkpoints in memory lose nothing. An optimizer that is saved after any step,
 * destroyed, created again and loaded must continue with the bits of the uninterrupted run. Saved
 * again right after the load, it must give the bytes that it has loaded.
 */
#include "collectives/plan_private.h"
#include "optimizers/optimizer.h"
#include "tests/support_checkpoint.h"
#include "tests/support_statistics.h"

enum { MOST_STEPS = 32 };

/* The state after each step of an uninterrupted run. */
struct history {
  const struct checkpoint_case *what;
  struct saved_parts parts[MOST_STEPS];
  unsigned char *parameters[MOST_STEPS]; /* of all ranks */
  struct saved_parts whole;              /* at the end; rank 0's part has its complete state */
  bool made;
};

static size_t parameter_bytes(const struct checkpoint_case *what) {
  return TRAINEE_ELEMENTS * dtype_size(what->common.parameter_dtype);
}

static unsigned char *parameters_at(struct history *history, int step, int rank) {
  return history->parameters[step] + (size_t)rank * parameter_bytes(history->what);
}

static void check_parameters(struct history *history, const struct trainee *trainee, int step) {
  check_case("%s, step %d", history->what->name, step);
  CHECK_BITS("parameters", trainee->parameters, parameters_at(history, step, trainee->rank),
             TRAINEE_ELEMENTS, history->what->common.parameter_dtype);
}

/* Checks that saving the optimizer now gives exactly its rank's part. */
static void check_part(struct trainee *trainee, const struct saved_parts *parts) {
  size_t bytes = 0, wanted = parts->bytes[trainee->rank];
  void *memory = optimizer_part(trainee->optimizer, &bytes);
  CHECK(bytes == wanted && memcmp(memory, parts->memory[trainee->rank], wanted) == 0,
        "the part differs, %zu bytes, not %zu", bytes, wanted);
  free(memory);
}

/* Loads the state after `step` steps. Compares it, and the states after a few more steps, with
 * those of the uninterrupted run. */
static void check_resumed(struct trainee *trainee, struct history *history, int step) {
  int end = step + 4 < history->what->steps ? step + 4 : history->what->steps;
  check_case("%s, loaded at step %d", history->what->name, step);
  CHECK_STATUS(trainee_load(trainee, &history->parts[step]), ONEBIT_OK);
  check_parameters(history, trainee, step);
  check_part(trainee, &history->parts[step]);
  for (int next = step; next < end; next++) {
    trainee_step(trainee, next);
    check_parameters(history, trainee, next + 1);
  }
  check_part(trainee, &history->parts[end]);
}

static void keep_state(struct history *history, struct trainee *trainee, onebit_comm_t comm,
                       int step) {
  trainee_save(trainee, comm, &history->parts[step]);
  memcpy(parameters_at(history, step, trainee->rank), trainee->parameters,
         parameter_bytes(history->what));
}

/* Checks a part in which rank 0 has saved its complete state instead of only its share. Loading the
 * parts must give the same state. */
static void check_whole_part(struct trainee *trainee, struct history *history, onebit_comm_t comm) {
  struct saved_parts *whole = &history->whole;
  trainee_save(trainee, comm, whole);
  if (trainee->rank == 0) {
    size_t *bytes = &whole->bytes[0];
    CHECK_STATUS(onebit_optimizer_save_whole(trainee->optimizer, NULL, 0, bytes), ONEBIT_OK);
    CHECK(*bytes >= history->parts[history->what->steps].bytes[0], "%zu bytes are the whole",
          *bytes);
    free(whole->memory[0]);
    whole->memory[0] = allocate(1, *bytes);
    CHECK_STATUS(onebit_optimizer_save_whole(trainee->optimizer, whole->memory[0], *bytes, bytes),
                 ONEBIT_OK);
  }
  struct trainee other = trainee_create(comm, history->what, 1);
  CHECK_STATUS(trainee_load(&other, whole), ONEBIT_OK);
  check_part(&other, &history->parts[history->what->steps]);
  trainee_destroy(&other);
}

/* Runs a case to the end. Then loads the state of each step into a new optimizer, and into the old
 * one, which thus returns to earlier steps. */
static void check_every_step(onebit_comm_t comm, void *context) {
  struct history *history = context;
  const struct checkpoint_case *what = history->what;
  check_case("%s", what->name);
  struct trainee trainee = trainee_create(comm, what, 0);
  if (!trainee.optimizer) {
    trainee_destroy(&trainee);
    return;
  }
  keep_state(history, &trainee, comm, 0);
  for (int step = 0; step < what->steps; step++) {
    trainee_step(&trainee, step);
    keep_state(history, &trainee, comm, step + 1);
  }
  check_whole_part(&trainee, history, comm);
  for (int step = 0; step <= what->steps; step++) {
    struct trainee other = trainee_create(comm, what, 1);
    check_resumed(&other, history, step);
    trainee_destroy(&other);
    check_resumed(&trainee, history, step * 7 % (what->steps + 1));
  }
  if (trainee.rank == 0)
    history->made = true;
  trainee_destroy(&trainee);
}

static void check_exact(const struct checkpoint_case *what) {
  struct history history = {.what = what};
  for (int step = 0; step <= what->steps; step++)
    history.parameters[step] = allocate((size_t)what->size, parameter_bytes(what));
  on_hosts(what->size, what->hosts ? what->hosts : 1, check_every_step, &history);
  if (!history.made)
    cr_log_warn("not here yet: %s", what->name);
  free_parts(&history.whole);
  for (int step = 0; step <= what->steps; step++) {
    free_parts(&history.parts[step]);
    free(history.parameters[step]);
  }
}

Test(checkpoint, every_optimizer_goes_on_exactly) {
  for (const struct ob_method *const *method = ob_methods; *method; method++) {
    size_t cases = 0;
    for (size_t k = 0; k < checkpoint_cases_count; k++) {
      if (checkpoint_cases[k].method != *method)
        continue;
      cases++;
      if (test_wanted(k))
        check_exact(&checkpoint_cases[k]);
    }
    cr_assert(cases, "there is no case of %s", (*method)->name);
  }
}

/* --- Residuals after loading */

/* An optimizer without error feedback discards a loaded residual. Other optimizers must note that a
 * loaded residual is large, because a server that adds to it may overflow. */
Test(checkpoint, residuals_of_others_are_forgotten_or_large) {
  static float residual[SUBJECT_TOTAL], loaded[SUBJECT_TOTAL];
  struct subject_alone *saved = alone_create(0);
  size_t bytes = 0;
  for (size_t i = 0; i < SUBJECT_TOTAL; i++)
    residual[i] = i == 7 ? 0x1p33f : 1;
  alone_step(saved, 3);
  CHECK_STATUS(onebit_plan_import_residual(alone_plan(saved), residual, residual), ONEBIT_OK);
  void *part = optimizer_part(saved->optimizer, &bytes);
  for (int k = 0; k < 2; k++) {
    struct subject_alone *other = alone_create(k);
    const struct onebit_plan *plan = alone_plan(other);
    alone_step(other, 3);
    CHECK(!plan->state->server_large, "it is large before");
    CHECK_STATUS(onebit_optimizer_load(other->optimizer, (const void *const *)&part, &bytes, 1),
                 ONEBIT_OK);
    CHECK_STATUS(onebit_plan_export_residual(alone_plan(other), NULL, loaded), ONEBIT_OK);
    for (size_t i = 0; i < plan_info(alone_plan(other)).server_residual_count; i++)
      CHECK(loaded[i] == (k ? 0 : residual[i]), "element %zu: %g", i, (double)loaded[i]);
    CHECK(plan->state->server_large == !k, "a large residual is not known to be");
    alone_destroy(other);
  }
  free(part);
  alone_destroy(saved);
}
