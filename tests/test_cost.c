/* The cost model: what must hold whatever the numbers are. */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "collectives/cost.h"

TestSuite(cost, .timeout = 60);

static struct ob_costs some_costs(void) {
  struct ob_costs costs;
  ob_costs_default("avx2", &costs);
  return costs;
}

static struct ob_cost_task some_task(size_t elements, int hosts, int ranks_per_host) {
  return (struct ob_cost_task){
      .elements = elements, .hosts = hosts, .ranks_per_host = ranks_per_host};
}

static const onebit_schedule_t schedules[] = {ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_SCHEDULE_ALLGATHER,
                                              ONEBIT_SCHEDULE_HIERARCHICAL};

/* Calls f(costs, task, schedule, wire) for all that is possible on several clusters. */
static void everywhere(void (*f)(const struct ob_costs *, struct ob_cost_task, onebit_schedule_t,
                                 onebit_wire_t)) {
  static const int clusters[][2] = {{1, 1}, {1, 4}, {2, 1}, {4, 1}, {4, 2}, {16, 8}, {1000, 8}};
  struct ob_costs costs = some_costs();
  costs.oversubscribed = 1e-3;
  for (size_t k = 0; k < sizeof clusters / sizeof clusters[0]; k++)
    for (int s = 0; s < 3; s++)
      for (int wire = 0; wire < 2; wire++) {
        struct ob_cost_task task = some_task(1 << 20, clusters[k][0], clusters[k][1]);
        if (ob_cost_possible(&task, schedules[s], (onebit_wire_t)wire))
          f(&costs, task, schedules[s], (onebit_wire_t)wire);
      }
}

static void check_more_elements(const struct ob_costs *costs, struct ob_cost_task task,
                                onebit_schedule_t schedule, onebit_wire_t wire) {
  double before = 0;
  for (size_t elements = 0; elements <= (size_t)1 << 30; elements = 2 * elements + 1) {
    task.elements = elements;
    double seconds = ob_cost_seconds(costs, &task, schedule, wire, 65536);
    cr_assert(isfinite(seconds) && seconds > 0, "%zu elements: %g s", elements, seconds);
    cr_assert_geq(seconds, before, "%s wire %d, %d x %d: %zu elements are faster than half",
                  ob_cost_schedule_name(schedule), (int)wire, task.hosts, task.ranks_per_host,
                  elements);
    before = seconds;
  }
}
Test(cost, more_elements_are_never_faster) { everywhere(check_more_elements); }

static void check_better_links(const struct ob_costs *costs, struct ob_cost_task task,
                               onebit_schedule_t schedule, onebit_wire_t wire) {
  struct ob_costs better = *costs;
  double before = ob_cost_seconds(costs, &task, schedule, wire, 65536);
  double dense = ob_cost_mpi_seconds(costs, &task, 4);
  better.between.bandwidth *= 2;
  cr_assert_leq(ob_cost_seconds(&better, &task, schedule, wire, 65536), before);
  cr_assert_leq(ob_cost_mpi_seconds(&better, &task, 4), dense);
  better.between.latency /= 2;
  better.inside.bandwidth *= 2;
  better.compress /= 2;
  cr_assert_leq(ob_cost_seconds(&better, &task, schedule, wire, 65536), before);
  better = *costs;
  better.cores_shared = 0.5;
  cr_assert_geq(ob_cost_seconds(&better, &task, schedule, wire, 65536), before);
}
Test(cost, better_machines_are_never_slower) { everywhere(check_better_links); }

static void check_choice(const struct ob_costs *costs, struct ob_cost_task task,
                         onebit_schedule_t schedule, onebit_wire_t wire) {
  struct ob_cost_choice choice;
  task.dense_allowed = true;
  ob_cost_choose(costs, &task, &choice);
  cr_assert(ob_cost_possible(&task, choice.schedule, choice.wire));
  cr_assert_eq(choice.seconds,
               ob_cost_seconds(costs, &task, choice.schedule, choice.wire, choice.chunk));
  cr_assert_leq(choice.seconds, ob_cost_seconds(costs, &task, schedule, wire, 65536),
                "%s is better than what was chosen:\n%s", ob_cost_schedule_name(schedule),
                choice.words);
  cr_assert(strstr(choice.words, ob_cost_schedule_name(schedule)), "%s", choice.words);
  cr_assert(strstr(choice.words, costs->source), "%s", choice.words);
}
Test(cost, chooses_the_fastest_and_says_why) { everywhere(check_choice); }

Test(cost, chooses_what_small_and_large_messages_want) {
  struct ob_costs costs = some_costs();
  struct ob_cost_task task = some_task(16, 16, 8);
  struct ob_cost_choice choice;
  ob_cost_choose(&costs, &task, &choice);
  cr_expect_eq(choice.schedule, ONEBIT_SCHEDULE_HIERARCHICAL, "%s", choice.words);
  task.ranks_per_host = 1;
  task.hosts = 2;
  ob_cost_choose(&costs, &task, &choice);
  cr_expect_eq(choice.schedule, ONEBIT_SCHEDULE_ALLGATHER, "%s", choice.words);
  task = some_task((size_t)100 << 20, 16, 8);
  ob_cost_choose(&costs, &task, &choice);
  cr_expect_eq(choice.schedule, ONEBIT_SCHEDULE_HIERARCHICAL, "%s", choice.words);
  task.ranks_per_host = 1;
  ob_cost_choose(&costs, &task, &choice);
  cr_expect_eq(choice.schedule, ONEBIT_SCHEDULE_EXCHANGE, "%s", choice.words);
}

Test(cost, keeps_to_what_the_task_allows) {
  struct ob_costs costs = some_costs();
  struct ob_cost_task task = some_task(1 << 22, 4, 1);
  struct ob_cost_choice choice;
  task.schedule = ONEBIT_SCHEDULE_ALLGATHER;
  task.chunk = 4096;
  ob_cost_choose(&costs, &task, &choice);
  cr_expect(choice.schedule == ONEBIT_SCHEDULE_ALLGATHER && choice.chunk == 4096);
  cr_expect_eq(choice.wire, ONEBIT_WIRE_BITS);
  task.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
  ob_cost_choose(&costs, &task, &choice);
  cr_expect_eq(choice.schedule, ONEBIT_SCHEDULE_EXCHANGE, "it is not possible with a rank a host");
  task = (struct ob_cost_task){
      .elements = 1 << 22, .wire = ONEBIT_WIRE_DENSE, .hosts = 3, .ranks = 7, .most_ranks = 4};
  ob_cost_choose(&costs, &task, &choice);
  cr_expect_eq(choice.wire, ONEBIT_WIRE_DENSE);
}

Test(cost, other_operations_have_one_schedule) {
  struct ob_costs costs = some_costs();
  struct ob_cost_choice choice;
  for (int operation = ONEBIT_ALLGATHER; operation <= ONEBIT_REDUCE_SCATTER; operation++) {
    struct ob_cost_task task = some_task(1 << 22, 4, 2);
    task.operation = (onebit_operation_t)operation;
    ob_cost_choose(&costs, &task, &choice);
    cr_expect_eq(choice.schedule, ONEBIT_SCHEDULE_EXCHANGE, "%s", choice.words);
    cr_expect_gt(choice.seconds, 0);
  }
}

/* The formulas of docs and brief: bytes out of a host. */
Test(cost, counts_the_bytes_of_a_host) {
  struct ob_cost_task task = some_task(1 << 20, 4, 2);
  double bits = (double)(1 << 20) / 8 * (1 + 1.0 / 64);
  double exchange = ob_cost_host_bytes(&task, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_BITS);
  double gather = ob_cost_host_bytes(&task, ONEBIT_SCHEDULE_ALLGATHER, ONEBIT_WIRE_BITS);
  double levels = ob_cost_host_bytes(&task, ONEBIT_SCHEDULE_HIERARCHICAL, ONEBIT_WIRE_BITS);
  cr_expect_float_eq(exchange, 2 * 2 * 6.0 / 8 * bits, 1);
  cr_expect_float_eq(gather, 2 * 6 * bits, 1);
  cr_expect_float_eq(levels, 2 * 3.0 / 4 * bits, 1);
}

Test(cost, one_scale_costs_the_overlap) {
  struct ob_costs costs = some_costs();
  struct ob_cost_task blocks = some_task(1 << 24, 4, 1), buffer = blocks;
  buffer.block = ONEBIT_BLOCK_BUFFER;
  cr_expect_gt(
      ob_cost_seconds(&costs, &buffer, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_BITS, 65536),
      1.1 * ob_cost_seconds(&costs, &blocks, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_BITS, 65536));
}

Test(cost, defaults_are_for_every_codec) {
  struct ob_costs a, b;
  ob_costs_default("abacus", &a);
  ob_costs_default(NULL, &b);
  cr_expect(memcmp(&a, &b, sizeof a) == 0);
  ob_costs_default("avx512", &b);
  cr_expect_lt(b.compress, a.compress);
}
