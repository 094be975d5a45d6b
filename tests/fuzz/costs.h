/* The check that both fuzzers of cost models make. */
#ifndef ONEBIT_TESTS_FUZZ_COSTS_H
#define ONEBIT_TESTS_FUZZ_COSTS_H

#include <math.h>

#include "collectives/cost/cost.h"
#include "tests/fuzz/fuzz.h"

/* Chooses schedules by the costs, if possible for the measured numbers of hosts and ranks per host.
 * Checks that each choice has a finite predicted time and a chunk size. */
static inline void fuzz_choose(const struct ob_costs *costs) {
  static const size_t elements[] = {0, 1, 4097, 1 << 20, SIZE_MAX / 8};
  for (size_t i = 0; i < sizeof elements / sizeof elements[0]; i++) {
    bool few = costs->hosts < 1000 && costs->ranks_per_host < 1000;
    struct ob_cost_task task = {.elements = elements[i],
                                .hosts = few && costs->hosts >= 1 ? (int)costs->hosts : 2,
                                .ranks_per_host = few ? (int)costs->ranks_per_host : 3,
                                .dense_allowed = i % 2};
    task.ranks = task.hosts * (task.ranks_per_host ? task.ranks_per_host : 1);
    task.max_ranks = task.ranks_per_host ? task.ranks_per_host : 1;
    struct ob_cost_choice choice;
    ob_cost_choose(costs, &task, &choice);
    FUZZ_CHECK(isfinite(choice.seconds) && choice.seconds >= 0 && choice.chunk > 0);
  }
}

#endif
