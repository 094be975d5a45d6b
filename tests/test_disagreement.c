/* One rank is wrong, or wants something else: all learn of it, on ranks that are threads. */
#include "tests/support_errors.h"

/* Every rank of small groups is the culprit once. */
static void everyone_once(rank_body *scenario) {
  for (int size = 2; size <= 4; size++)
    for (int rank = 0; rank < size; rank++) {
      struct culprit culprit = {.rank = rank};
      on_ranks(size, scenario, &culprit);
    }
}

/* The same in the other schedules. */
static void everyone_once_on_hosts(rank_body *scenario, onebit_schedule_t schedule) {
  static const int splits[][2] = {{4, 2}, {6, 3}, {2, 1}};
  for (size_t k = 0; k < sizeof splits / sizeof splits[0]; k++)
    for (int rank = 0; rank < splits[k][0]; rank++) {
      struct culprit culprit = {.rank = rank, .schedule = schedule};
      on_hosts(splits[k][0], splits[k][1], scenario, &culprit);
    }
}

Test(disagreement, wrong_buffers_in_other_schedules) {
  everyone_once_on_hosts(wrong_buffers_on_one_rank, ONEBIT_SCHEDULE_ALLGATHER);
  everyone_once_on_hosts(wrong_buffers_on_one_rank, ONEBIT_SCHEDULE_HIERARCHICAL);
}

Test(disagreement, wrong_learning_rate_on_several_hosts) {
  everyone_once_on_hosts(wrong_learning_rate_on_one_rank, ONEBIT_SCHEDULE_HIERARCHICAL);
}

Test(disagreement, wrong_buffers_on_one_rank) { everyone_once(wrong_buffers_on_one_rank); }
Test(disagreement, wrong_operation_on_one_rank) { everyone_once(wrong_operation_on_one_rank); }
Test(disagreement, wrong_plan_on_one_rank) { everyone_once(wrong_plan_on_one_rank); }
Test(disagreement, wrong_tensors_on_one_rank) { everyone_once(wrong_tensors_on_one_rank); }
Test(disagreement, wrong_learning_rate_on_one_rank) {
  everyone_once(wrong_learning_rate_on_one_rank);
}
Test(disagreement, other_plan_on_one_rank) { everyone_once(other_plan_on_one_rank); }
Test(disagreement, other_adam_on_one_rank) { everyone_once(other_adam_on_one_rank); }
Test(disagreement, plan_here_and_optimizer_there) { everyone_once(plan_here_and_optimizer_there); }
Test(disagreement, other_threads_on_one_rank) { everyone_once(other_threads_on_one_rank); }
