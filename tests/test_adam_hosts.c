/*
 * 1-bit Adam in the hierarchical schedule equals the oracle's in every bit of every parameter after
 * every step, whatever the split of ranks over hosts, the bucket size and the form of the step; a
 * step that is skipped, or that one rank makes wrongly, changes nothing on any host.
 */
#include "tests/support_adam.h"
#include "tests/support_errors.h"

/* Ranks and hosts. The last two are a rank a host, and one host of them all. */
static const int splits[][2] = {{4, 2}, {6, 2}, {6, 3}, {8, 4}, {4, 4}, {4, 1}};
#define SPLITS (sizeof splits / sizeof splits[0])

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

static void check_split(struct adam_case what, size_t split) {
  what.size = splits[split][0];
  what.hosts = splits[split][1];
  struct adam_run run = adam_prepare(&what);
  on_hosts(what.size, what.hosts, adam_on_rank, &run);
  adam_release(&run);
}

static void check_splits(struct adam_case what) {
  for (size_t k = 0; k < SPLITS; k++)
    if (test_wanted(k))
      check_split(what, k);
}

Test(adam_hosts, several_tensors_of_odd_sizes) {
  check_splits(case_of(&adam_tensors_odd, 0, IN_ONE_CALL));
}

Test(adam_hosts, other_lists_of_tensors) {
  static const struct adam_tensors *const lists[] = {&adam_tensors_one, &adam_tensors_many_words,
                                                     &adam_tensors_tiny, &adam_tensors_none};
  for (size_t k = 0; k < sizeof lists / sizeof lists[0]; k++)
    check_splits(case_of(lists[k], k % 2, BACKWARD));
}

Test(adam_hosts, buckets_in_any_form) {
  static const size_t sizes[] = {1, 1000, 5200};
  for (int form = 0; form < ADAM_FORMS; form++)
    for (size_t b = 0; b < sizeof sizes / sizeof sizes[0]; b++)
      check_split(case_of(&adam_tensors_odd, sizes[b], (enum adam_form)form),
                  ((size_t)form + b) % SPLITS);
}

/* Small blocks and messages, so that windows of inputs wrap many times; the other scale. */
Test(adam_hosts, many_messages) {
  for (size_t bucket_size = 0; bucket_size <= 600; bucket_size += 600) {
    struct adam_case what = case_of(&adam_tensors_odd, bucket_size, SHUFFLED);
    what.options.common.scale = ONEBIT_SCALE_MEAN_ABSOLUTE;
    what.options.common.block_size = 64;
    what.options.common.chunk_size = 128;
    check_splits(what);
  }
}

Test(adam_hosts, without_error_feedback) {
  struct adam_case what = case_of(&adam_tensors_odd, 0, IN_ONE_CALL);
  what.options.common.no_error_feedback = 1;
  check_splits(what);
}

/* The variance is of the mean that the schedule takes, and so is the step of the freeze. */
Test(adam_hosts, automatic_freeze) {
  struct adam_case what = case_of(&adam_tensors_odd, 1000, BACKWARD);
  what.options.freeze_step = ONEBIT_FREEZE_AUTOMATIC;
  what.options.beta2 = 0.875;
  what.steps = 20;
  check_splits(what);
}

Test(adam_hosts, every_codec) {
  for (size_t c = 0; c < test_codecs_count; c++) {
    if (!use_codec(test_codecs[c]))
      continue;
    struct adam_case what = case_of(&adam_tensors_odd, 0, IN_ONE_CALL);
    what.options.common.threads = 1 + (int)c % 2;
    check_split(what, 1);
    check_split(what, 2);
  }
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
      check_split(what, 1 + (size_t)rank % 2);
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

/* What it would have to be for momentum cannot be had in an allgather. */
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
