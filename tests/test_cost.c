/* Tests properties of the cost model that hold for any measured costs. */
#include "base/process.h"
#include "collectives/cost/model.h"
#include "collectives/cost/tuning.h"
#include "tests/support.h"

static struct ob_costs make_costs(void) {
  struct ob_costs costs;
  ob_costs_default("avx2", &costs);
  return costs;
}

static struct ob_cost_task make_task(size_t elements, int hosts, int ranks_per_host) {
  return (struct ob_cost_task){
      .elements = elements, .hosts = hosts, .ranks_per_host = ranks_per_host};
}

static const onebit_schedule_t schedules[] = {ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_SCHEDULE_ALLGATHER,
                                              ONEBIT_SCHEDULE_HIERARCHICAL};

/* Calls f(costs, task, schedule, wire) for all possible schedules and wire formats on several
 * clusters. */
static void for_each_cluster(void (*f)(const struct ob_costs *, struct ob_cost_task,
                                       onebit_schedule_t, onebit_wire_t)) {
  static const int clusters[][2] = {{1, 1}, {1, 4}, {2, 1}, {4, 1}, {4, 2}, {16, 8}, {1000, 8}};
  struct ob_costs costs = make_costs();
  costs.oversubscribed = 1e-3;
  for (size_t k = 0; k < sizeof clusters / sizeof clusters[0]; k++)
    for (int s = 0; s < 3; s++)
      for (int wire = 0; wire < 2; wire++) {
        struct ob_cost_task task = make_task(1 << 20, clusters[k][0], clusters[k][1]);
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
Test(cost, more_elements_are_never_faster) { for_each_cluster(check_more_elements); }

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
Test(cost, better_machines_are_never_slower) { for_each_cluster(check_better_links); }

static void check_choice(const struct ob_costs *costs, struct ob_cost_task task,
                         onebit_schedule_t schedule, onebit_wire_t wire) {
  struct ob_cost_choice choice;
  task.dense_allowed = true;
  ob_cost_choose(costs, &task, &choice);
  cr_assert(ob_cost_possible(&task, choice.schedule, choice.wire));
  cr_assert_eq(choice.seconds,
               ob_cost_seconds(costs, &task, choice.schedule, choice.wire, choice.chunk));
  /* The choice may be 2 % slower, because chunk sizes within 2 % count as equally good. */
  cr_assert_leq(0.98 * choice.seconds, ob_cost_seconds(costs, &task, schedule, wire, 65536),
                "%s is better than what was chosen:\n%s", ob_cost_schedule_name(schedule),
                choice.text);
  cr_assert(strstr(choice.text, ob_cost_schedule_name(schedule)), "%s", choice.text);
  cr_assert(strstr(choice.text, costs->source), "%s", choice.text);
}
Test(cost, chooses_the_fastest_and_says_why) { for_each_cluster(check_choice); }

Test(cost, chooses_what_small_and_large_messages_want) {
  struct ob_costs costs = make_costs();
  struct ob_cost_task task = make_task(16, 16, 8);
  struct ob_cost_choice choice;
  ob_cost_choose(&costs, &task, &choice);
  cr_expect_eq(choice.schedule, ONEBIT_SCHEDULE_HIERARCHICAL, "%s", choice.text);
  task.ranks_per_host = 1;
  task.hosts = 2;
  ob_cost_choose(&costs, &task, &choice);
  cr_expect_eq(choice.schedule, ONEBIT_SCHEDULE_ALLGATHER, "%s", choice.text);
  task = make_task((size_t)100 << 20, 16, 8);
  ob_cost_choose(&costs, &task, &choice);
  cr_expect_eq(choice.schedule, ONEBIT_SCHEDULE_HIERARCHICAL, "%s", choice.text);
  task.ranks_per_host = 1;
  ob_cost_choose(&costs, &task, &choice);
  cr_expect_eq(choice.schedule, ONEBIT_SCHEDULE_EXCHANGE, "%s", choice.text);
}

Test(cost, keeps_to_what_the_task_allows) {
  struct ob_costs costs = make_costs();
  struct ob_cost_task task = make_task(1 << 22, 4, 1);
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
      .elements = 1 << 22, .wire = ONEBIT_WIRE_DENSE, .hosts = 3, .ranks = 7, .max_ranks = 4};
  ob_cost_choose(&costs, &task, &choice);
  cr_expect_eq(choice.wire, ONEBIT_WIRE_DENSE);
}

Test(cost, other_operations_have_one_schedule) {
  struct ob_costs costs = make_costs();
  struct ob_cost_choice choice;
  for (int operation = ONEBIT_ALLGATHER; operation <= ONEBIT_REDUCE_SCATTER; operation++) {
    struct ob_cost_task task = make_task(1 << 22, 4, 2);
    task.operation = (onebit_operation_t)operation;
    ob_cost_choose(&costs, &task, &choice);
    cr_expect_eq(choice.schedule, ONEBIT_SCHEDULE_EXCHANGE, "%s", choice.text);
    cr_expect_gt(choice.seconds, 0);
  }
}

/* Compares the bytes that leave a host with the documented formulas. */
Test(cost, counts_the_bytes_of_a_host) {
  struct ob_cost_task task = make_task(1 << 20, 4, 2);
  double bits = (double)(1 << 20) / 8 * (1 + 1.0 / 64);
  double exchange = ob_cost_host_bytes(&task, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_BITS);
  double gather = ob_cost_host_bytes(&task, ONEBIT_SCHEDULE_ALLGATHER, ONEBIT_WIRE_BITS);
  double levels = ob_cost_host_bytes(&task, ONEBIT_SCHEDULE_HIERARCHICAL, ONEBIT_WIRE_BITS);
  cr_expect_float_eq(exchange, 2 * 2 * 6.0 / 8 * bits, 1);
  cr_expect_float_eq(gather, 2 * 6 * bits, 1);
  cr_expect_float_eq(levels, 2 * 3.0 / 4 * bits, 1);
}

/* With 8 bits per element, the elements take 8 times the bytes, and the scales take the same. A
 * message of the same length holds an eighth of the elements. */
Test(cost, more_bits_are_longer_messages) {
  struct ob_costs costs = make_costs();
  struct ob_cost_task one = make_task(1 << 24, 4, 1), eight = one;
  struct ob_cost_choice few, many;
  eight.bits = 8;
  double ratio = ob_cost_host_bytes(&eight, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_BITS) /
                 ob_cost_host_bytes(&one, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_BITS);
  cr_expect_float_eq(ratio, (8 + 1.0 / 64) / (1 + 1.0 / 64), 1e-3);
  ob_cost_choose(&costs, &one, &few);
  ob_cost_choose(&costs, &eight, &many);
  cr_expect_eq(few.chunk / 8, many.chunk);
  cr_expect_gt(many.seconds, 4 * few.seconds);
  cr_expect(strstr(few.text, "one bit") && strstr(many.text, "8 bits"), "%s%s", few.text,
            many.text);
}

Test(cost, one_scale_costs_the_overlap) {
  struct ob_costs costs = make_costs();
  struct ob_cost_task blocks = make_task(1 << 24, 4, 1), buffer = blocks;
  buffer.block = ONEBIT_BLOCK_BUFFER;
  cr_expect_gt(
      ob_cost_seconds(&costs, &buffer, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_BITS, 65536),
      1.1 * ob_cost_seconds(&costs, &blocks, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_BITS, 65536));
}

/* --- Measured costs */

enum { EXCHANGE_BITS = 0, ALLGATHER_BITS = 1, EXCHANGE_DENSE = 3 };

static struct ob_costs make_corrected_costs(void) {
  struct ob_costs costs = make_costs();
  costs.hosts = 4;
  costs.ranks_per_host = 2;
  ob_cost_add_point(&costs.measured.factor[EXCHANGE_BITS], 1024, 1);
  ob_cost_add_point(&costs.measured.factor[EXCHANGE_BITS], 4096, 3);
  ob_cost_add_point(&costs.measured.factor[EXCHANGE_BITS], 65536, 0.5);
  ob_cost_add_point(&costs.measured.chunk, 4194304, 65536);
  ob_cost_add_point(&costs.measured.chunk, 67108864, 262144);
  return costs;
}

Test(cost, factors_are_linear_in_the_logarithm_of_the_size) {
  static const struct {
    size_t bytes;
    double factor;
  } cases[] = {{4, 1},        {1024, 1},     {2048, 2},    {1536, 1.5},
               {4096, 3},     {16384, 1.75}, {65536, 0.5}, {(size_t)1 << 40, 0.5},
               {8192, 2.375}, {0, 1}};
  struct ob_costs costs = make_corrected_costs();
  bool measured;
  for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
    struct ob_cost_task task = make_task(cases[k].bytes / 4, 4, 2);
    double factor = ob_cost_factor(&costs, &task, EXCHANGE_BITS, &measured);
    cr_expect(measured);
    cr_expect_eq(factor, cases[k].factor, "%zu bytes: %g", cases[k].bytes, factor);
    cr_expect_eq(ob_cost_factor(&costs, &task, ALLGATHER_BITS, &measured), 1);
    cr_expect(!measured);
  }
}

Test(cost, the_choice_follows_what_was_measured) {
  struct ob_costs costs = make_corrected_costs();
  struct ob_cost_task task = make_task(1024, 4, 2);
  struct ob_cost_choice choice;
  task.schedule = ONEBIT_SCHEDULE_EXCHANGE;
  double model = ob_cost_seconds(&costs, &task, task.schedule, ONEBIT_WIRE_BITS, 131072);
  ob_cost_choose(&costs, &task, &choice);
  cr_expect_float_eq(choice.seconds / model, 3, 1e-12, "%s", choice.text);
  cr_expect(strstr(choice.text, "us, as measured\n"), "%s", choice.text);
  cr_expect(!strstr(choice.text, "by the model"), "%s", choice.text);
  task.schedule = ONEBIT_SCHEDULE_AUTOMATIC;
  for (size_t k = 1; k < OB_COST_CANDIDATES; k++)
    ob_cost_add_point(&costs.measured.factor[k], 4096, 20);
  costs.measured.factor[EXCHANGE_BITS].point[1].value = 0.05;
  ob_cost_choose(&costs, &task, &choice);
  cr_expect_eq(choice.schedule, ONEBIT_SCHEDULE_EXCHANGE, "%s", choice.text);
  costs.measured.factor[EXCHANGE_BITS].point[1].value = 20;
  costs.measured.factor[ALLGATHER_BITS].point[0].value = 0.05;
  ob_cost_choose(&costs, &task, &choice);
  cr_expect_eq(choice.schedule, ONEBIT_SCHEDULE_ALLGATHER, "%s", choice.text);
}

/* Measured costs do not apply to another number of hosts or ranks per host, hosts with unequal
 * numbers of ranks, a single scale or another operation. */
Test(cost, measured_is_of_the_same_hosts_and_calls_only) {
  struct ob_costs costs = make_corrected_costs();
  struct ob_cost_task others[] = {make_task(1 << 24, 2, 4), make_task(1 << 24, 4, 1),
                                  make_task(1 << 24, 4, 0), make_task(1 << 24, 4, 2),
                                  make_task(1 << 24, 4, 2)};
  others[2].ranks = 8;
  others[3].block = ONEBIT_BLOCK_BUFFER;
  others[4].operation = ONEBIT_ALLGATHER;
  for (size_t k = 0; k < sizeof others / sizeof others[0]; k++) {
    bool measured;
    struct ob_cost_choice choice;
    cr_expect_eq(ob_cost_factor(&costs, &others[k], EXCHANGE_BITS, &measured), 1, "case %zu", k);
    cr_expect(!measured, "case %zu", k);
    cr_expect_eq(ob_cost_measured_chunk(&costs, &others[k], EXCHANGE_BITS), 0, "case %zu", k);
    ob_cost_choose(&costs, &others[k], &choice);
    cr_expect(!strstr(choice.text, "as measured"), "%s", choice.text);
  }
}

Test(cost, messages_are_those_of_the_nearest_size) {
  struct ob_costs costs = make_corrected_costs();
  struct ob_cost_task task = make_task((size_t)1 << 20, 4, 2);
  struct ob_cost_choice choice;
  task.schedule = ONEBIT_SCHEDULE_EXCHANGE;
  cr_expect_eq(ob_cost_measured_chunk(&costs, &task, ALLGATHER_BITS), 0);
  static const size_t mebi[] = {1, 2, 4, 15, 16, 64, 4096}, chunk[] = {0, 1, 1, 1, 4, 4, 4};
  for (size_t k = 0; k < sizeof mebi / sizeof mebi[0]; k++) {
    task.elements = mebi[k] << 18;
    cr_expect_eq(ob_cost_measured_chunk(&costs, &task, EXCHANGE_BITS), chunk[k] * 65536, "%zu MiB",
                 mebi[k]);
    ob_cost_choose(&costs, &task, &choice);
    cr_expect(chunk[k] == 0 || choice.chunk == chunk[k] * 65536, "%s", choice.text);
  }
  task.bits = 8; /* the same number of bytes holds fewer elements */
  ob_cost_choose(&costs, &task, &choice);
  cr_expect_eq(choice.chunk, 4 * 65536 / 8, "%s", choice.text);
  task.chunk = 4096;
  ob_cost_choose(&costs, &task, &choice);
  cr_expect_eq(choice.chunk, 4096, "what is asked for goes first");
}

/* Compression rounds values, so exact sums are chosen if they are at most 3 % slower. */
Test(cost, exact_sums_are_worth_three_per_cent) {
  struct ob_costs costs = make_costs();
  struct ob_cost_task task = make_task((size_t)1 << 22, 2, 1);
  struct ob_cost_choice bits, dense, choice;
  costs.hosts = 2;
  costs.ranks_per_host = 1;
  task.schedule = ONEBIT_SCHEDULE_EXCHANGE;
  ob_cost_choose(&costs, &task, &bits);
  task.wire = ONEBIT_WIRE_DENSE;
  ob_cost_choose(&costs, &task, &dense);
  task.wire = ONEBIT_WIRE_BITS;
  task.dense_allowed = true;
  for (int percent = 101; percent <= 105; percent++) {
    struct ob_costs corrected = costs;
    ob_cost_add_point(&corrected.measured.factor[EXCHANGE_DENSE], 4096,
                      percent / 100.0 * bits.seconds / dense.seconds);
    ob_cost_choose(&corrected, &task, &choice);
    cr_expect_eq(choice.wire, percent < 103 ? ONEBIT_WIRE_DENSE : ONEBIT_WIRE_BITS, "%d: %s",
                 percent, choice.text);
  }
}

/* If all other costs are zero, the cost is that of reducing each rank's elements once, in any
 * schedule. */
Test(cost, reducing_counts_every_rank) {
  struct ob_costs none = make_costs();
  none.between.bandwidth = none.inside.bandwidth = 1e30;
  struct ob_costs some = none;
  some.reduce_stream += 1e-9;
  double more[2];
  for (int k = 0; k < 2; k++) {
    struct ob_cost_task task = make_task((size_t)1 << 26, k ? 16 : 2, 1);
    more[k] = ob_cost_seconds(&some, &task, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_BITS, 65536) -
              ob_cost_seconds(&none, &task, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_BITS, 65536);
  }
  cr_expect_float_eq(more[1] / more[0], 1, 0.01, "%g and %g s", more[0], more[1]);
}

Test(cost, curves_ascend_and_are_bounded) {
  struct ob_cost_curve curve = {.count = 0};
  for (int k = 0; k < OB_COST_POINTS; k++) {
    cr_expect(ob_cost_add_point(&curve, 4 + k, 1));
    cr_expect(!ob_cost_add_point(&curve, 4 + k, 1));
  }
  cr_expect(!ob_cost_add_point(&curve, 1e6, 1));
}

/* An allgather of four ranks in rounds has the latency of two messages instead of one, but each
 * rank handles two messages instead of three. */
Test(cost, small_allgathers_of_four_ranks_go_in_rounds) {
  struct ob_costs costs = make_costs();
  struct ob_cost_task task = make_task(1024, 4, 1), gather = task;
  gather.operation = ONEBIT_ALLGATHER;
  costs.between.message = costs.compress = costs.apply = costs.reduce_stream = 0;
  double rounds =
      ob_cost_seconds(&costs, &task, ONEBIT_SCHEDULE_ALLGATHER, ONEBIT_WIRE_BITS, 65536);
  double once = ob_cost_seconds(&costs, &gather, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_BITS, 65536);
  cr_expect_float_eq(rounds - once, costs.between.latency, 1e-9);
  costs.between.message = 1;
  rounds = ob_cost_seconds(&costs, &task, ONEBIT_SCHEDULE_ALLGATHER, ONEBIT_WIRE_BITS, 65536);
  once = ob_cost_seconds(&costs, &gather, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_BITS, 65536);
  cr_expect_float_eq(once - rounds, 2 * (3 - 2), 1e-3);
}

/* Computing the mean of all ranks' messages takes as long as writing the mean or as reading the
 * messages, whichever is longer. */
Test(cost, a_mean_costs_writing_or_reading) {
  struct ob_cost_task task = make_task(1 << 20, 4, 1);
  struct ob_costs costs = make_costs(), none = costs;
  none.apply = none.reduce_stream = 0;
  double before = ob_cost_seconds(&none, &task, ONEBIT_SCHEDULE_ALLGATHER, ONEBIT_WIRE_BITS, 65536);
  for (int reading = 0; reading < 2; reading++) {
    costs.apply = reading ? 1e-9 : 3e-9;
    costs.reduce_stream = 0.5e-9;
    double seconds =
        ob_cost_seconds(&costs, &task, ONEBIT_SCHEDULE_ALLGATHER, ONEBIT_WIRE_BITS, 65536);
    cr_expect_float_eq(seconds - before, (1 << 20) * (reading ? 4 * 0.5e-9 : 3e-9), 1e-9);
  }
}

/* On one host a wait costs as much as a few messages, and as much as even more messages if ranks
 * share cores.  */
Test(cost, on_one_host_a_few_ranks_send_at_once) {
  static const struct {
    int hosts, ranks;
    double cores;
    bool rounds;
  } cases[] = {{1, 2, 0, false}, {1, 4, 0, false}, {1, 8, 0, false},  {1, 16, 0, true},
               {2, 2, 0, false}, {2, 4, 0, true},  {4, 4, 0, true},   {1, 64, 0, true},
               {1, 4, 2, false}, {1, 8, 2, false}, {1, 16, 2, false}, {1, 64, 2, true}};
  struct ob_costs costs = make_costs();
  for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
    struct ob_cost_task task = {.elements = 16, .hosts = cases[k].hosts, .ranks = cases[k].ranks};
    task.max_ranks = task.ranks / task.hosts;
    costs.cores_per_host = cases[k].cores;
    costs.oversubscribed = cases[k].cores > 0 ? 2e-6 : 0;
    cr_expect_eq(ob_cost_rounds_pay(&costs, &task), cases[k].rounds, "case %zu", k);
  }
}

Test(cost, hosts_of_one_machine_share_its_cores) {
  struct ob_costs costs = make_costs(), measured = costs;
  struct ob_cost_task task = make_task(8192, 16, 1);
  ob_costs_of_one_machine(&costs);
  cr_expect_eq(costs.cores_shared, ob_machine_processors());
  cr_expect(strstr(costs.source, "; all hosts share "), "%s", costs.source);
  costs.cores_shared = 1; /* independent of the number of cores of this machine */
  cr_expect_gt(
      ob_cost_seconds(&costs, &task, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_BITS, 65536),
      4 * ob_cost_seconds(&measured, &task, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_BITS, 65536));
  measured.hosts = 16;
  costs = measured;
  ob_costs_of_one_machine(&costs);
  cr_expect(memcmp(&costs, &measured, sizeof costs) == 0);
  costs.hosts = 0;
  memset(costs.source, 'x', sizeof costs.source - 1);
  ob_costs_of_one_machine(&costs);
  cr_expect_eq(strlen(costs.source), sizeof costs.source - 1);
}

Test(cost, defaults_are_for_every_codec) {
  struct ob_costs a, b;
  ob_costs_default("abacus", &a);
  ob_costs_default(NULL, &b);
  cr_expect(memcmp(&a, &b, sizeof a) == 0);
  ob_costs_default("avx512", &b);
  cr_expect_lt(b.compress, a.compress);
}

/* Over gigabit Ethernet, a call in 8 bits, with a quarter of the bytes, takes less than half the
 * time of a dense call, and a call in one bit takes even less. */
Test(cost, a_part_of_the_time_is_what_compressing_takes) {
  double eight = ob_cost_part(4, 4, 1 << 20, sizeof(float), 8);
  double one = ob_cost_part(4, 4, 1 << 20, sizeof(float), 1);
  cr_expect(eight > 0.1 && eight < 0.5 && one < eight, "%g, %g", eight, one);
  cr_expect_lt(ob_cost_part(4, 4, 1 << 20, sizeof(double), 8), eight);
  cr_expect_gt(ob_cost_part(1, 2, 64, sizeof(float), 8), 0);
}
