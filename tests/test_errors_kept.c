/* Tests exporting, importing and resetting the residual. A plan that imports the residual of
 * another plan must give the same bits as the other plan would. */
#include "tests/support_collectives.h"

#define MOVE_AT 3 /* the step before which the residual moves to a new plan */

/* Makes the first steps with one plan. The rest is made with another, already used plan, which
 * imports the first plan's residual. */
static void move_error(onebit_comm_t comm, void *context) {
  const struct collective_run *run = context;
  const struct collective_case *what = &run->what;
  struct rank_plan first, second;
  check_case("%s of %zu %s on %d ranks, block %zd", operation_name(what->options.operation),
             what->count, dtype_name(what->options.dtype), what->size,
             (ptrdiff_t)what->options.block_size);
  rank_plan_create(&first, comm, run);
  rank_plan_create(&second, comm, run);
  rank_plan_call(&second, 0); /* leaves another residual in the second plan */
  for (int step = 0; step < MOVE_AT; step++)
    rank_plan_call(&first, step);
  struct kept_errors errors = export_errors(first.plan);
  CHECK_STATUS(onebit_plan_import_residual(second.plan, errors.worker, errors.server), ONEBIT_OK);
  check_unchanged_errors(second.plan, &errors);
  rank_plan_free(&first);
  for (int step = MOVE_AT; step < what->steps; step++)
    rank_plan_call(&second, step);
  free_errors(&errors);
  rank_plan_finish(&second);
}

/* After a reset a plan behaves like a new one. */
static void reset_residual(onebit_comm_t comm, void *context) {
  const struct collective_run *run = context;
  const struct collective_case *what = &run->what;
  struct rank_plan rank_plan;
  check_case("reset of %s, %zu on %d ranks", operation_name(what->options.operation), what->count,
             what->size);
  rank_plan_create(&rank_plan, comm, run);
  rank_plan_call(&rank_plan, 0);
  CHECK_STATUS(onebit_plan_reset_residual(rank_plan.plan), ONEBIT_OK);
  struct kept_errors errors = export_errors(rank_plan.plan);
  for (size_t i = 0; i < errors.worker_count; i++)
    CHECK(errors.worker[i] == 0.0f, "worker residual %zu is %g", i, (double)errors.worker[i]);
  for (size_t i = 0; i < errors.server_count; i++)
    CHECK(errors.server[i] == 0.0f, "server residual %zu is %g", i, (double)errors.server[i]);
  free_errors(&errors);
  for (int step = 0; step < what->steps; step++)
    rank_plan_call(&rank_plan, step);
  rank_plan_free(&rank_plan);
}

/* Imports only some parts of the residual. Values that are not finite are refused in any part, and
 * change nothing. */
static void import_parts(onebit_comm_t comm, void *context) {
  const struct collective_run *run = context;
  const struct collective_case *what = &run->what;
  struct rank_plan rank_plan;
  check_case("parts of %s, %zu on %d ranks", operation_name(what->options.operation), what->count,
             what->size);
  rank_plan_create(&rank_plan, comm, run);
  onebit_plan_t plan = rank_plan.plan;
  rank_plan_call(&rank_plan, 0);
  struct kept_errors errors = export_errors(plan);
  CHECK_STATUS(onebit_plan_export_residual(plan, NULL, NULL), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_import_residual(plan, NULL, NULL), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_import_residual(plan, errors.worker, NULL), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_import_residual(plan, NULL, errors.server), ONEBIT_OK);
  for (int k = 0; k < 3; k++) {
    float bad = (float[]){NAN, INFINITY, -INFINITY}[k];
    float *worker = allocate(errors.worker_count, sizeof(float));
    float *server = allocate(errors.server_count, sizeof(float));
    worker[k * (int)(errors.worker_count - 1) / 2] = bad;
    CHECK_STATUS(onebit_plan_import_residual(plan, worker, errors.server), ONEBIT_ERROR_ARGUMENT);
    CHECK_WORDS("worker");
    if (errors.server_count) {
      server[k * (int)(errors.server_count - 1) / 2] = bad;
      CHECK_STATUS(onebit_plan_import_residual(plan, errors.worker, server), ONEBIT_ERROR_ARGUMENT);
      CHECK_WORDS("server");
    }
    free(worker);
    free(server);
  }
  for (int step = 1; step < what->steps; step++)
    rank_plan_call(&rank_plan, step);
  free_errors(&errors);
  rank_plan_finish(&rank_plan);
}

static void run_cases(rank_body *body) {
  static const size_t counts[] = {1, 33, 5000};
  static const int sizes[] = {1, 2, 3, 5};
  for (int k = 0; k < 3 * 3 * 4; k++) {
    if (!test_wanted((size_t)k))
      continue;
    struct collective_case what = {.size = sizes[k % 4],
                                   .steps = 6,
                                   .count = counts[k / 4 % 3],
                                   .options = ONEBIT_PLAN_OPTIONS_INIT};
    what.options.operation = (onebit_operation_t)(k / 12);
    what.options.dtype = (onebit_dtype_t)(k % 3);
    what.options.block_size = (size_t[]){32, 0, 256, ONEBIT_BLOCK_BUFFER, 64}[k % 5];
    collective_check(&what, body);
  }
}

/* Tests schedules other than the exchange, in which each rank has other parts of the residual. Of
 * 33 elements, some ranks have none. */
static void run_schedules(rank_body *body) {
  static const size_t counts[] = {33, 5000};
  static const int splits[][2] = {{4, 2}, {6, 3}, {3, 1}};
  for (int k = 0; k < 2 * 2 * 3; k++) {
    struct collective_case what = {.size = splits[k % 3][0],
                                   .hosts = splits[k % 3][1],
                                   .steps = 6,
                                   .count = counts[k / 3 % 2],
                                   .options = ONEBIT_PLAN_OPTIONS_INIT};
    what.options.schedule = k < 6 ? ONEBIT_SCHEDULE_ALLGATHER : ONEBIT_SCHEDULE_HIERARCHICAL;
    what.options.dtype = (onebit_dtype_t)(k % 3);
    what.options.block_size = what.options.chunk_size = 32;
    collective_check(&what, body);
  }
}

Test(errors_kept, move_in_other_schedules) { run_schedules(move_error); }
Test(errors_kept, reset_in_other_schedules) { run_schedules(reset_residual); }

Test(errors_kept, move_to_another_plan) { run_cases(move_error); }
Test(errors_kept, reset) { run_cases(reset_residual); }
Test(errors_kept, parts_and_bad_values) { run_cases(import_parts); }

Test(errors_kept, move_in_profile_deepspeed) {
  for (int size = 1; size <= 4; size++) {
    struct collective_case what = {
        .size = size, .steps = 6, .count = 1003, .options = ONEBIT_PLAN_OPTIONS_INIT};
    what.options.profile = ONEBIT_PROFILE_DEEPSPEED;
    collective_check(&what, move_error);
  }
}
