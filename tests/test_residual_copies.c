/*
 * Plans with one copy of the residual: calls that are made give the same bits as with two; one that
 * is skipped, or fails, leaves the residual as it was to two roundings, and where the input was not
 * finite to the bit.
 */
#include <criterion/criterion.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support_collectives.h"

TestSuite(residual_copies, .timeout = 120);

enum { STEPS = 3 };

/* What becomes of a bad call: rank 0 has a value that is not finite, or no receive buffer. */
enum bad { SKIPPED, FAILED, BAD_CALLS };

struct side {
  onebit_plan_t plan;
  void *send, *receive;
};

static void check_alike(const struct side sides[2], size_t received, onebit_dtype_t dtype) {
  struct kept_errors one = export_errors(sides[0].plan), two = export_errors(sides[1].plan);
  CHECK_BITS("result", sides[0].receive, sides[1].receive, received, dtype);
  CHECK_BITS("worker residual", one.worker, two.worker, one.worker_count, ONEBIT_FLOAT32);
  CHECK_BITS("server residual", one.server, two.server, one.server_count, ONEBIT_FLOAT32);
  free_errors(&one);
  free_errors(&two);
}

/* e' = fl(c - x) of c = fl(e + x), each to half a unit in the last place; padding has x = 0. */
static void check_undone(const struct kept_errors *before, const struct kept_errors *after,
                         const void *send, size_t sent, onebit_dtype_t dtype) {
  for (size_t i = 0; i < before->worker_count; i++) {
    const float x = i < sent ? oracle_load(send, i, dtype) : 0, e = before->worker[i];
    const float unit = isfinite(x) ? FLT_EPSILON * (fabsf(e) + fabsf(x)) : 0;
    if (!CHECK(fabsf(after->worker[i] - e) <= unit, "element %zu: %.9g before, %.9g after", i,
               (double)e, (double)after->worker[i]))
      break;
  }
}

static void call_badly(enum bad bad, const struct side *side, const struct collective_case *what,
                       int rank) {
  const onebit_operation_t operation = what->options.operation;
  const size_t sent = send_count(operation, what->count, what->size);
  void *receive = rank == 0 && bad == FAILED ? NULL : side->receive;
  fill_input(side->send, what->options.dtype, sent, rank, STEPS);
  if (rank == 0 && bad == SKIPPED)
    oracle_store(side->send, sent / 2, what->options.dtype, NAN);
  struct kept_errors before = export_errors(side->plan);
  CHECK_STATUS(call_collective(operation, side->send, receive, side->plan),
               bad == SKIPPED ? ONEBIT_SKIPPED
               : rank == 0    ? ONEBIT_ERROR_ARGUMENT
                              : ONEBIT_ERROR_PEER);
  struct kept_errors after = export_errors(side->plan);
  check_undone(&before, &after, side->send, sent, what->options.dtype);
  CHECK_BITS("server residual", after.server, before.server, before.server_count, ONEBIT_FLOAT32);
  free_errors(&before);
  free_errors(&after);
}

/* The plan of one copy is smaller by that, but for a byte a block and what comes with each copy. */
static void check_memory(const struct side sides[2]) {
  onebit_plan_info_t one = {.size = sizeof one}, two = {.size = sizeof two};
  CHECK_STATUS(onebit_plan_get_info(sides[0].plan, &one), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_get_info(sides[1].plan, &two), ONEBIT_OK);
  const uint64_t least = one.worker_residual_count * 4;
  CHECK(two.memory_bytes - one.memory_bytes >= least - least / 16, "%llu bytes, and %llu",
        (unsigned long long)one.memory_bytes, (unsigned long long)two.memory_bytes);
}

static void walk(onebit_comm_t comm, void *context) {
  struct collective_case what = *(const struct collective_case *)context;
  const onebit_operation_t operation = what.options.operation;
  const onebit_dtype_t dtype = what.options.dtype;
  const int rank = onebit_comm_rank(comm);
  const size_t sent = send_count(operation, what.count, what.size),
               received = receive_count(operation, what.count, what.size);
  struct side sides[2];
  for (int k = 0; k < 2; k++) {
    what.options.residual_copies = k + 1;
    sides[k] = (struct side){NULL, allocate(sent, dtype_size(dtype)),
                             allocate(received, dtype_size(dtype))};
    CHECK_STATUS(onebit_plan_create(comm, what.count, &what.options, &sides[k].plan), ONEBIT_OK);
  }
  check_memory(sides);
  for (int step = 0; step < STEPS; step++) {
    for (int k = 0; k < 2; k++) {
      fill_input(sides[k].send, dtype, sent, rank, step);
      CHECK_STATUS(call_collective(operation, sides[k].send, sides[k].receive, sides[k].plan),
                   ONEBIT_OK);
    }
    check_alike(sides, received, dtype);
  }
  for (int bad = 0; what.count && bad < BAD_CALLS; bad++)
    call_badly((enum bad)bad, &sides[0], &what, rank);
  fill_input(sides[0].send, dtype, sent, rank, STEPS);
  CHECK_STATUS(call_collective(operation, sides[0].send, sides[0].receive, sides[0].plan),
               ONEBIT_OK);
  for (int k = 0; k < 2; k++) {
    CHECK_STATUS(onebit_plan_destroy(sides[k].plan), ONEBIT_OK);
    free(sides[k].send);
    free(sides[k].receive);
  }
}

static void check_counts(struct collective_case what) {
  static const size_t counts[] = {0, 1, 33, 4500};
  for (size_t k = 0; k < 4; k++)
    for (what.size = 1; what.size <= 3; what.size += 2) {
      what.count = counts[k];
      what.options.dtype = (onebit_dtype_t)(k % 3);
      on_ranks(what.size, walk, &what);
    }
}

static struct collective_case with(onebit_operation_t operation, onebit_schedule_t schedule) {
  struct collective_case what = {.options = ONEBIT_PLAN_OPTIONS_INIT};
  what.options.operation = operation;
  what.options.schedule = schedule;
  return what;
}

Test(residual_copies, exchange) { check_counts(with(ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_EXCHANGE)); }

Test(residual_copies, messages_to_all) {
  check_counts(with(ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_ALLGATHER));
  check_counts(with(ONEBIT_ALLGATHER, ONEBIT_SCHEDULE_AUTOMATIC));
  check_counts(with(ONEBIT_REDUCE_SCATTER, ONEBIT_SCHEDULE_AUTOMATIC));
}

Test(residual_copies, one_scale) {
  struct collective_case what = with(ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_EXCHANGE);
  what.options.block_size = ONEBIT_BLOCK_BUFFER;
  check_counts(what);
  what.options = (onebit_plan_options_t)ONEBIT_PLAN_OPTIONS_INIT;
  what.options.profile = ONEBIT_PROFILE_DEEPSPEED;
  check_counts(what);
}

static void ask_on_hosts(onebit_comm_t comm, void *context) {
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  onebit_plan_t plan;
  (void)context;
  options.residual_copies = 1;
  options.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
  CHECK_STATUS(onebit_plan_create(comm, 100, &options, &plan), ONEBIT_ERROR_UNSUPPORTED);
  CHECK_WORDS("residual_copies");
}

Test(residual_copies, not_where_hosts_add_up) { on_hosts(4, 2, ask_on_hosts, NULL); }
