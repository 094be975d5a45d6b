/* Tests all schedules but ONEBIT_SCHEDULE_EXCHANGE: many calls in a row through small windows of
 * shared memory, some with wrong arguments, and what onebit_plan_info reports. */
#include <sched.h>

#include "tests/support_collectives.h"

enum { COUNT = 1003, CALLS = 200 };

/* Delays a rank in some of its calls, which differ by rank. */
static void delay_rank(int rank, int step) {
  for (int turn = (rank * 7 + step) % 11 == 0 ? 300 : 0; turn > 0; turn--)
    sched_yield();
}

/* Makes a call in which one rank has a NaN, or has no buffer. */
static void make_bad_call(onebit_plan_t plan, float *send, int rank, int size, int step) {
  float receive[COUNT];
  int culprit = step % size;
  bool wrong = step % 2 == 0;
  fill_pattern(receive, sizeof receive);
  fill_input(send, ONEBIT_FLOAT32, COUNT, rank, step + 1000);
  if (rank == culprit && !wrong)
    send[(size_t)step * 37 % COUNT] = NAN;
  onebit_status_t status = onebit_allreduce(rank == culprit && wrong ? NULL : send, receive, plan);
  CHECK_STATUS(status, !wrong            ? ONEBIT_SKIPPED
                       : rank == culprit ? ONEBIT_ERROR_ARGUMENT
                                         : ONEBIT_ERROR_PEER);
  CHECK(pattern_holds(receive, sizeof receive), "a bad call changed recvbuf");
}

static void call_many_times(onebit_comm_t comm, void *context) {
  const struct collective_run *run = context;
  const int rank = onebit_comm_rank(comm), size = onebit_comm_size(comm);
  struct rank_plan rank_plan;
  if (!rank_plan_create(&rank_plan, comm, run))
    return;
  for (int step = 0; step < CALLS; step++) {
    check_case("call %d, schedule %d, wire %d, %d ranks, %d hosts", step,
               (int)run->what.options.schedule, (int)run->what.options.wire, size, run->what.hosts);
    if (step % 5 >= 3)
      make_bad_call(rank_plan.plan, (float *)(void *)rank_plan.send, rank, size, step);
    delay_rank(rank, step);
    rank_plan_call(&rank_plan, step);
  }
  rank_plan_finish(&rank_plan);
}

/* Makes many calls. With chunk_size 0 there is one message, and therefore one slot. Otherwise there
 * are more chunks than a window has slots. */
static void check_many_calls(onebit_schedule_t schedule) {
  static const int splits[][2] = {{4, 2}, {6, 3}, {6, 2}, {3, 1}};
  for (size_t k = 0; k < 4 * sizeof splits / sizeof splits[0]; k++) {
    struct collective_case what = {.size = splits[k / 4][0],
                                   .hosts = splits[k / 4][1],
                                   .steps = CALLS,
                                   .count = COUNT,
                                   .options = ONEBIT_PLAN_OPTIONS_INIT};
    what.options.schedule = schedule;
    what.options.block_size = 32;
    what.options.chunk_size = k % 2 ? 32 : 0;
    what.options.wire = k % 4 < 2 ? ONEBIT_WIRE_BITS : ONEBIT_WIRE_DENSE;
    if (!test_wanted(k))
      continue;
    collective_check(&what, call_many_times);
  }
}

Test(schedules, many_calls_by_allgather) { check_many_calls(ONEBIT_SCHEDULE_ALLGATHER); }
Test(schedules, many_calls_by_hosts) { check_many_calls(ONEBIT_SCHEDULE_HIERARCHICAL); }

/* --- The explanations of plans -----------------------------------------------------------------*/

static onebit_plan_t make_plan(onebit_comm_t comm, onebit_schedule_t schedule, onebit_wire_t wire) {
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  onebit_plan_t plan = NULL;
  options.schedule = schedule;
  options.wire = wire;
  options.block_size = 32;
  options.chunk_size = 64;
  check_case("schedule %d, wire %d", (int)schedule, (int)wire);
  CHECK_STATUS(onebit_plan_create(comm, COUNT, &options, &plan), ONEBIT_OK);
  return plan;
}

/* Checks which parts of the residuals a rank has, with four ranks on two hosts. There are 32 words,
 * and a share has eight. */
static void check_places(const onebit_plan_info_t *info, int rank) {
  size_t place = (size_t)rank % 2, host = (size_t)rank / 2, share = 2 * place + host;
  bool hosts = info->schedule == ONEBIT_SCHEDULE_HIERARCHICAL;
  bool gathers = info->schedule == ONEBIT_SCHEDULE_ALLGATHER;
  size_t first = hosts ? 512 * place : 0, end = hosts && place == 0 ? 512 : COUNT;
  size_t served = 256 * (hosts ? share : (size_t)rank);
  CHECK(info->worker_residual_start == first && info->worker_residual_count == end - first,
        "worker residual of %zu from %zu on", info->worker_residual_count,
        info->worker_residual_start);
  if (gathers)
    CHECK(info->server_residual_count == 0, "server residual of %zu", info->server_residual_count);
  else
    CHECK(info->server_residual_start == served &&
              info->server_residual_count == (served == 768 ? COUNT - 768 : 256),
          "server residual of %zu from %zu on", info->server_residual_count,
          info->server_residual_start);
}

/* The explanation's last line must tell which schedule was chosen, even for choices that the cost
 * model does not cover. */
static void check_explanation_of(onebit_plan_t plan, onebit_schedule_t schedule) {
  static const char *const names[] = {"", "exchange", "allgather", "hierarchical"};
  const char *words = onebit_plan_explain(plan);
  char wanted[32];
  snprintf(wanted, sizeof wanted, "chosen: %s,", names[schedule]);
  CHECK(strstr(words, wanted) != NULL, "the words \"%s\" do not say %s", words, wanted);
  CHECK(words == onebit_plan_explain(plan), "the words have moved");
}

static void check_plan_info(onebit_comm_t comm, void *context) {
  (void)context;
  for (int k = 0; k < 6; k++) {
    onebit_schedule_t schedule = (onebit_schedule_t)(ONEBIT_SCHEDULE_EXCHANGE + k % 3);
    onebit_wire_t wire = k < 3 ? ONEBIT_WIRE_BITS : ONEBIT_WIRE_DENSE;
    onebit_plan_t plan = make_plan(comm, schedule, wire);
    onebit_plan_info_t info = plan_info(plan);
    CHECK(info.schedule == schedule && info.wire == wire, "schedule %d, wire %d",
          (int)info.schedule, (int)info.wire);
    CHECK(info.hosts == 2 && info.ranks_per_host == 2, "%d hosts with %d ranks", info.hosts,
          info.ranks_per_host);
    CHECK(strcmp(info.transport, "loopback") == 0 && info.codec && info.codec[0],
          "transport %s, codec %s", info.transport, info.codec);
    /* dense messages are cut as if blocks had the default size, which is longer than the buffer */
    CHECK(info.chunk_size == (wire == ONEBIT_WIRE_BITS ? 64 : 1024), "chunks of %zu",
          info.chunk_size);
    if (wire == ONEBIT_WIRE_BITS)
      check_places(&info, onebit_comm_rank(comm));
    else
      CHECK(info.worker_residual_count == 0 && info.server_residual_count == 0,
            "a dense plan's errors");
    float values[COUNT] = {0};
    uint64_t before = onebit_comm_bytes_sent(comm);
    CHECK_STATUS(onebit_allreduce(values, values, plan), ONEBIT_OK);
    uint64_t sent = onebit_comm_bytes_sent(comm) - before;
    CHECK(sent == info.wire_bytes, "%llu bytes sent, %llu announced", (unsigned long long)sent,
          (unsigned long long)info.wire_bytes);
    check_explanation_of(plan, schedule);
    CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
  }
}

Test(schedules, plans_tell_what_they_decided) { on_hosts(4, 2, check_plan_info, NULL); }

/* Ranks that are threads use the exchange, whatever their hosts are. */
static void check_default_schedule(onebit_comm_t comm, void *context) {
  const int *each = context;
  onebit_plan_t plan = make_plan(comm, ONEBIT_SCHEDULE_AUTOMATIC, ONEBIT_WIRE_BITS);
  onebit_plan_info_t info = plan_info(plan);
  CHECK(info.schedule == ONEBIT_SCHEDULE_EXCHANGE, "schedule %d", (int)info.schedule);
  CHECK(info.wire == ONEBIT_WIRE_BITS, "wire %d", (int)info.wire);
  CHECK(info.hosts == 2 && info.ranks_per_host == *each, "%d hosts with %d ranks", info.hosts,
        info.ranks_per_host);
  check_explanation_of(plan, ONEBIT_SCHEDULE_EXCHANGE);
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
}

/* A hierarchical schedule with one host, or with one rank per host, is used if it is requested. The
 * explanation tells this. */
static void create_flat_hierarchy(onebit_comm_t comm, void *context) {
  const int *hosts = context;
  onebit_plan_t plan = make_plan(comm, ONEBIT_SCHEDULE_HIERARCHICAL, ONEBIT_WIRE_BITS);
  onebit_plan_info_t info = plan_info(plan);
  CHECK(info.schedule == ONEBIT_SCHEDULE_HIERARCHICAL && info.hosts == *hosts,
        "schedule %d, %d hosts", (int)info.schedule, info.hosts);
  check_explanation_of(plan, ONEBIT_SCHEDULE_HIERARCHICAL);
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
}

Test(schedules, hierarchies_of_one_level) {
  for (int hosts = 1; hosts <= 3; hosts += 2)
    on_hosts(3, hosts, create_flat_hierarchy, &hosts);
}

Test(schedules, ranks_that_are_threads_exchange) {
  on_hosts(4, 2, check_default_schedule, &(int){2});
  on_hosts(5, 2, check_default_schedule, &(int){0});
}

Test(schedules, nothing_has_no_reasons) {
  const char *words = onebit_plan_explain(NULL);
  cr_assert(words != NULL && words[0] == '\0');
}
