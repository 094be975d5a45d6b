/* The residual, exported, imported and reset: a plan that goes on from another's exported error
 * goes on to the bit. */
#include "tests/support_collectives.h"

/* One blocking call with the input of a step, compared with the oracle's result of that step. */
static void call_and_check(const struct collective_run *run, onebit_plan_t plan, int rank,
                           int input_step, int result_step) {
  const struct collective_case *what = &run->what;
  onebit_operation_t operation = what->options.operation;
  onebit_dtype_t dtype = what->options.dtype;
  size_t sent = send_count(operation, what->count, what->size);
  size_t received = receive_count(operation, what->count, what->size);
  size_t begin = operation == ONEBIT_REDUCE_SCATTER ? (size_t)rank * what->count : 0;
  void *send = allocate(sent, dtype_size(dtype)), *receive = allocate(received, dtype_size(dtype));
  fill_input(send, dtype, sent, rank, input_step);
  CHECK_STATUS(call_collective(operation, send, receive, plan), ONEBIT_OK);
  CHECK_BITS("recvbuf", receive, (char *)run->results[result_step] + begin * dtype_size(dtype),
             received, dtype);
  free(send);
  free(receive);
}

#define MOVE_AT 3 /* of the steps of a case, when the error moves to a new plan */

static onebit_plan_t create(onebit_comm_t comm, const struct collective_case *what) {
  onebit_plan_t plan = NULL;
  CHECK_STATUS(onebit_plan_create(comm, what->count, &what->options, &plan), ONEBIT_OK);
  return plan;
}

/* The first steps with one plan, the rest with another that has already been used for something
 * else. */
static void move_error(onebit_comm_t comm, void *context) {
  const struct collective_run *run = context;
  const struct collective_case *what = &run->what;
  int rank = onebit_comm_rank(comm);
  check_case("%s of %zu %s on %d ranks, block %zd", operation_name(what->options.operation),
             what->count, dtype_name(what->options.dtype), what->size,
             (ptrdiff_t)what->options.block_size);
  onebit_plan_t first = create(comm, what), second = create(comm, what);
  call_and_check(run, second, rank, 0, 0); /* leaves some other error there */
  for (int step = 0; step < MOVE_AT; step++)
    call_and_check(run, first, rank, step, step);
  struct kept_errors errors = export_errors(first);
  CHECK_STATUS(onebit_plan_import_residual(second, errors.worker, errors.server), ONEBIT_OK);
  struct kept_errors again = export_errors(second);
  CHECK_BITS("worker residual", again.worker, errors.worker, errors.worker_count, ONEBIT_FLOAT32);
  CHECK_BITS("server residual", again.server, errors.server, errors.server_count, ONEBIT_FLOAT32);
  CHECK_STATUS(onebit_plan_destroy(first), ONEBIT_OK);
  for (int step = MOVE_AT; step < what->steps; step++)
    call_and_check(run, second, rank, step, step);
  check_errors(second, run->oracle, rank);
  free_errors(&again);
  free_errors(&errors);
  CHECK_STATUS(onebit_plan_destroy(second), ONEBIT_OK);
}

/* After a reset a plan is as new. */
static void reset_residual(onebit_comm_t comm, void *context) {
  const struct collective_run *run = context;
  const struct collective_case *what = &run->what;
  int rank = onebit_comm_rank(comm);
  check_case("reset of %s, %zu on %d ranks", operation_name(what->options.operation), what->count,
             what->size);
  onebit_plan_t plan = create(comm, what);
  call_and_check(run, plan, rank, 0, 0);
  CHECK_STATUS(onebit_plan_reset_residual(plan), ONEBIT_OK);
  struct kept_errors errors = export_errors(plan);
  for (size_t i = 0; i < errors.worker_count; i++)
    CHECK(errors.worker[i] == 0.0f, "worker residual %zu is %g", i, (double)errors.worker[i]);
  for (size_t i = 0; i < errors.server_count; i++)
    CHECK(errors.server[i] == 0.0f, "server residual %zu is %g", i, (double)errors.server[i]);
  free_errors(&errors);
  for (int step = 0; step < what->steps; step++)
    call_and_check(run, plan, rank, step, step);
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
}

/* Parts can be left out, and what is not finite is refused and changes nothing, wherever it stands.
 */
static void import_parts(onebit_comm_t comm, void *context) {
  const struct collective_run *run = context;
  const struct collective_case *what = &run->what;
  int rank = onebit_comm_rank(comm);
  check_case("parts of %s, %zu on %d ranks", operation_name(what->options.operation), what->count,
             what->size);
  onebit_plan_t plan = create(comm, what);
  call_and_check(run, plan, rank, 0, 0);
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
    call_and_check(run, plan, rank, step, step);
  check_errors(plan, run->oracle, rank);
  free_errors(&errors);
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
}

static void walk(rank_body *body) {
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
    struct collective_run run = collective_prepare(&what);
    on_ranks(what.size, body, &run);
    collective_release(&run);
  }
}

/* The parts that ranks keep in the other schedules; of 33 elements some keep none. */
static void walk_schedules(rank_body *body) {
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
    struct collective_run run = collective_prepare(&what);
    on_hosts(what.size, what.hosts, body, &run);
    collective_release(&run);
  }
}

Test(errors_kept, move_in_other_schedules) { walk_schedules(move_error); }
Test(errors_kept, reset_in_other_schedules) { walk_schedules(reset_residual); }

Test(errors_kept, move_to_another_plan) { walk(move_error); }
Test(errors_kept, reset) { walk(reset_residual); }
Test(errors_kept, parts_and_bad_values) { walk(import_parts); }

Test(errors_kept, move_in_profile_deepspeed) {
  for (int size = 1; size <= 4; size++) {
    struct collective_case what = {
        .size = size, .steps = 6, .count = 1003, .options = ONEBIT_PLAN_OPTIONS_INIT};
    what.options.profile = ONEBIT_PROFILE_DEEPSPEED;
    struct collective_run run = collective_prepare(&what);
    on_ranks(size, move_error, &run);
    collective_release(&run);
  }
}
