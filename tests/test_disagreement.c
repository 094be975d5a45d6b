/* One rank is wrong, or asks for something else: all ranks get an error. Ranks are threads. */
#include "tests/support_errors.h"

/* Every rank of groups of `smallest` to 4 is the culprit once. */
static void everyone_once(rank_body *scenario, struct culprit culprit, int smallest) {
  for (int size = smallest; size <= 4; size++)
    for (culprit.rank = 0; culprit.rank < size; culprit.rank++)
      if (!culprit.shards || test_wanted((size_t)size - 1))
        on_ranks(size, scenario, &culprit);
}

/* The same in the other schedules. */
static void everyone_once_on_hosts(rank_body *scenario, struct culprit culprit) {
  static const int splits[][2] = {{4, 2}, {6, 3}, {2, 1}};
  for (size_t k = 0; k < sizeof splits / sizeof splits[0]; k++)
    for (culprit.rank = 0; culprit.rank < splits[k][0]; culprit.rank++)
      on_hosts(splits[k][0], splits[k][1], scenario, &culprit);
}

#define EVERYONE_ONCE(scenario)                                                                    \
  Test(disagreement, scenario) { everyone_once(scenario, (struct culprit){0}, 2); }
EVERYONE_ONCE(wrong_buffers_on_one_rank)
EVERYONE_ONCE(wrong_operation_on_one_rank)
EVERYONE_ONCE(wrong_plan_on_one_rank)
EVERYONE_ONCE(wrong_tensors_on_one_rank)
EVERYONE_ONCE(other_plan_on_one_rank)
EVERYONE_ONCE(other_adam_on_one_rank)
EVERYONE_ONCE(plan_here_and_optimizer_there)
EVERYONE_ONCE(other_threads_on_one_rank)

Test(disagreement, wrong_buffers_in_other_schedules) {
  everyone_once_on_hosts(wrong_buffers_on_one_rank,
                         (struct culprit){.schedule = ONEBIT_SCHEDULE_ALLGATHER});
  everyone_once_on_hosts(wrong_buffers_on_one_rank,
                         (struct culprit){.schedule = ONEBIT_SCHEDULE_HIERARCHICAL});
}

/* --- Steps of an optimizer: also clipped, where there is one exchange more, and in shards. */

static const struct culprit steps[] = {{.rank = 0},
                                       {.clip_norm = 1.5},
                                       {.shards = ONEBIT_SHARDS_STEP},
                                       {.shards = ONEBIT_SHARDS_PARAMETERS}};

static void in_all_steps(rank_body *scenario, int smallest) {
  for (size_t k = 0; k < sizeof steps / sizeof steps[0]; k++)
    everyone_once(scenario, steps[k], smallest);
  for (size_t k = 0; k < 2; k++) {
    struct culprit culprit = steps[k];
    culprit.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
    everyone_once_on_hosts(scenario, culprit);
  }
}

Test(disagreement, wrong_learning_rate_on_one_rank) {
  in_all_steps(wrong_learning_rate_on_one_rank, 2);
}
Test(disagreement, mistakes_in_an_open_step) { in_all_steps(mistakes_in_an_open_step, 1); }
Test(disagreement, destroyed_in_an_open_step) { in_all_steps(destroyed_in_an_open_step, 1); }
