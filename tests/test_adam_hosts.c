/*
 * 1-bit Adam in the hierarchical schedule, beside what test_optimizers.c has: a step that is
 * skipped, or that one rank makes wrongly, changes nothing on any host.
 */
#include "tests/support_adam.h"
#include "tests/support_errors.h"

static struct adam_case case_of(const struct adam_tensors *tensors, size_t bucket_size,
                                enum adam_form form) {
  struct adam_case what = {.steps = 10,
                           .options = ONEBIT_ADAM_OPTIONS_INIT,
                           .tensors = tensors,
                           .form = form,
                           .still = true};
  what.options.common.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
  what.options.freeze_step = 4;
  what.options.common.bucket_size = bucket_size;
  return what;
}

/* The poison is on another rank, and in another bucket, each time. 1e30 and its host's mean are
 * finite and their squares are not: only the rank that compresses that part of the mean sees it. */
Test(adam_hosts, skipped_steps_change_nothing) {
  static const float poisons[] = {1.0f / 0.0f, 1e30f, -3e38f};
  static const size_t bucket_sizes[] = {0, 1, 1000};
  for (int rank = 0; rank < 6; rank++)
    for (size_t k = 0; k < 3; k++) {
      struct adam_case what = case_of(&adam_tensors_odd, bucket_sizes[(k + (size_t)rank) % 3],
                                      (enum adam_form)((rank + (int)k) % ADAM_FORMS));
      what.options.common.chunk_size = 2048;
      what.poison = poisons[k];
      what.poisoned_rank = rank;
      /* before the freeze there are no squares to overflow but the variance's */
      what.poisoned_from = poisons[k] == 1e30f ? 4 : 0;
      what.size = 6;
      what.hosts = 2 + rank % 2;
      adam_check(&what);
    }
}

/* Every rank of two hosts is the culprit once. */
static void everyone_once(rank_body *scenario) {
  for (int rank = 0; rank < 4; rank++) {
    struct culprit culprit = {.rank = rank, .schedule = ONEBIT_SCHEDULE_HIERARCHICAL};
    on_hosts(4, 2, scenario, &culprit);
  }
}

Test(adam_hosts, wrong_learning_rate_on_one_rank) {
  everyone_once(wrong_learning_rate_on_one_rank);
}
Test(adam_hosts, mistakes_in_an_open_step) { everyone_once(mistakes_in_an_open_step); }
Test(adam_hosts, destroyed_in_an_open_step) { everyone_once(destroyed_in_an_open_step); }

/* An allgather cannot average momentum, so the optimizer refuses it. */
static void ask_for_allgather(onebit_comm_t comm, void *context) {
  static float parameters[10], gradients[10]; /* no step is made */
  onebit_tensor_t tensor = {parameters, gradients, 10, 0, 0, 0};
  onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
  onebit_optimizer_t optimizer;
  (void)context;
  options.common.schedule = ONEBIT_SCHEDULE_ALLGATHER;
  CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, &options, &optimizer), ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS("ONEBIT_SCHEDULE_ALLGATHER");
  CHECK(optimizer == NULL, "an optimizer all the same");
  if (onebit_comm_rank(comm) == 0)
    options.common.schedule = ONEBIT_SCHEDULE_EXCHANGE;
  else
    options.common.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
  CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, &options, &optimizer), ONEBIT_ERROR_MISMATCH);
  CHECK_WORDS("schedule");
  meet(comm);
}

Test(adam_hosts, schedules_that_cannot_be_had) { on_hosts(4, 2, ask_for_allgather, NULL); }
