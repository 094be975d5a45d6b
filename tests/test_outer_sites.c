/*
 * Tests the outer step between sites. If all sites are in time, it must equal the outer step
 * between single ranks, in float32 and compressed, for any number of ranks per site. A late site is
 * left out of a round and catches up later, and nothing that it has trained is lost.
 */
#include <sched.h>
#include <stdatomic.h>

#include "tests/support_outer.h"

/* Trains the same model with one rank for each site, and without sites. */
static void train_plainly(onebit_comm_t comm, void *context) {
  struct place *place = context;
  const int rank = onebit_comm_rank(comm);
  float p[SITES_ALL] = {0};
  onebit_tensor_t tensors[SITES_TENSORS];
  onebit_outer_t outer = NULL;
  sites_list(tensors, p);
  CHECK_STATUS(onebit_outer_create(comm, tensors, SITES_TENSORS, &place->options, &outer),
               ONEBIT_OK);
  for (int step = 0; outer && step < 5 * SITES_H; step++) {
    sites_train(p, rank, 0.05f);
    CHECK_STATUS(onebit_outer_step(outer, 1 + rank), ONEBIT_OK);
  }
  CHECK_STATUS(onebit_outer_synchronize(outer), ONEBIT_OK);
  if (rank == 0)
    memcpy(place->plain, p, sizeof p);
  onebit_outer_destroy(outer);
}

static void train_at_sites(struct place *place, int site, onebit_comm_t comm,
                           onebit_comm_t between) {
  float p[SITES_ALL] = {0};
  onebit_outer_t outer = sites_make(comm, between, p, &place->options, FOR_EVER, 0);
  for (int step = 1; outer && step <= 5 * SITES_H; step++) {
    const uint64_t before = between ? onebit_comm_bytes_sent(between) : 0;
    sites_train(p, site, 0.05f);
    CHECK_STATUS(onebit_outer_step(outer, 1 + site), ONEBIT_OK);
    if (place->options.fragments > 1)
      continue;
    if (between && step % SITES_H != 0)
      CHECK(onebit_comm_bytes_sent(between) == before, "step %d sent something", step);
    else if (between)
      CHECK(onebit_comm_bytes_sent(between) - before == outer_info(outer).exchange_bytes,
            "%ju bytes, announced %ju", (uintmax_t)(onebit_comm_bytes_sent(between) - before),
            (uintmax_t)outer_info(outer).exchange_bytes);
  }
  CHECK_STATUS(onebit_outer_synchronize(outer), ONEBIT_OK);
  for (size_t i = 0; i < SITES_ALL; i++)
    if (!CHECK(fabsf(p[i] - place->plain[i]) <= 2e-5f, "p[%zu] is %.9g, not %.9g", i, (double)p[i],
               (double)place->plain[i]))
      break;
  const onebit_sites_info_t info = sites_of(outer);
  CHECK(info.sites == place->sites && info.site == site && !info.late && !info.left_out &&
            !info.caught_up && info.rounds == 6 * place->options.fragments,
        "%d sites, this is %d; %ju late, %ju left out, %ju rounds", info.sites, info.site,
        (uintmax_t)info.late, (uintmax_t)info.left_out, (uintmax_t)info.rounds);
  sites_end(place, site, comm, outer);
}

static void check_equals_single_ranks(int sites, int ranks, onebit_outer_rule_t rule) {
  struct place *place = place_create(sites, ranks, sites_options(rule, ONEBIT_OUTER_DENSE));
  check_case("%d sites of %d ranks, rule %d", sites, ranks, (int)rule);
  place->options.weighted = sites % 2 == 0;
  place->options.mixing = ranks == 2 ? 0.5 : 1;
  place->options.fragments = 1 + (size_t)(sites + ranks) / 3 % SITES_H;
  on_ranks(sites, train_plainly, place);
  on_sites(place, train_at_sites);
  sites_agree(place);
  free(place);
}

Test(outer_sites, in_float32_equals_single_ranks) {
  for (int sites = 1; sites <= 4; sites++)
    for (int ranks = 1; ranks <= 3; ranks++)
      check_equals_single_ranks(sites, ranks, (onebit_outer_rule_t)((sites + ranks) % 3));
}

/* --- Compressed --------------------------------------------------------------------------------*/

static double distance_after(onebit_outer_rule_t rule, int bits, int no_error_feedback, int sites) {
  onebit_outer_options_t options = sites_options(rule, bits);
  options.no_error_feedback = no_error_feedback;
  return outer_distance_after(&options, sites, 600, true);
}

Test(outer_sites, every_width_comes_to_the_optimum) {
  static const int widths[] = {1, 2, 4, 8};
  const double control = distance_after(ONEBIT_OUTER_MEAN, 1, 1, 3);
  const double dense = distance_after(ONEBIT_OUTER_MEAN, ONEBIT_OUTER_DENSE, 0, 3);
  for (size_t w = 0; w < 4; w++) {
    const double distance = distance_after(ONEBIT_OUTER_MEAN, widths[w], 0, 3) - dense;
    cr_log_info("%d bits: %g more than dense, control %g", widths[w], distance, control - dense);
    cr_expect_lt(distance, 0.3 * (control - dense), "%d bits: %g, control %g", widths[w], distance,
                 control);
  }
}

/* Each site drifts by values of its own, which are the same in each step, whatever the other sites
 * do. Later rounds send the residuals of sites and servers, so the final error must be at most the
 * drift of a few rounds. */
static void drift_apart(onebit_comm_t comm, void *context) {
  const onebit_outer_options_t *options = context;
  const int rank = onebit_comm_rank(comm), sites = onebit_comm_size(comm);
  enum { ROUNDS = 40 };
  float p[SITES_ALL] = {0};
  double error = 0, size = 0;
  onebit_outer_t outer = sites_make_alone(comm, p, options, FOR_EVER, 0);
  for (int step = 0; outer && step < ROUNDS * SITES_H; step++) {
    for (size_t i = 0; i < SITES_ALL; i++)
      p[i] -= uniform_value((uint64_t)rank * SITES_ALL + i);
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
  }
  CHECK_STATUS(onebit_outer_synchronize(outer), ONEBIT_OK);
  for (size_t i = 0; i < SITES_ALL; i++) {
    double round = 0;
    for (int s = 0; s < sites; s++)
      round += SITES_H * (double)uniform_value((uint64_t)s * SITES_ALL + i) / sites;
    error += (p[i] + ROUNDS * round) * (p[i] + ROUNDS * round);
    size += round * round;
  }

  CHECK(sqrt(error / size) < 3, "%g rounds", sqrt(error / size));
  onebit_outer_destroy(outer);
}

Test(outer_sites, what_is_held_back_comes_later) {
  onebit_outer_options_t options = sites_options(ONEBIT_OUTER_MEAN, 1);
  on_ranks(3, drift_apart, &options);
  options.fragments = 2;
  options.delay = 3;
  options.mixing = 1;
  on_ranks(3, drift_apart, &options);
}

/* --- Sites of unequal speed --------------------------------------------------------------------*/

/* Site s makes s + 1 times as many steps as site 0. Each step has a drift of the site's own. */
static void train_unequally(onebit_comm_t comm, void *context) {
  const onebit_outer_options_t *given = context;
  const int rank = onebit_comm_rank(comm), sites = onebit_comm_size(comm);
  onebit_outer_options_t options = *given;
  float p[SITES_ALL] = {0}, wanted = 0;
  options.local_steps *= (size_t)rank + 1;
  onebit_outer_t outer = sites_make_alone(comm, p, &options, FOR_EVER, 0);
  for (size_t step = 0; step < 3 * options.local_steps; step++) {
    for (size_t i = 0; i < SITES_ALL; i++)
      p[i] -= (float)(rank - 2);
    CHECK_STATUS(onebit_outer_step(outer, 0.5), ONEBIT_OK);
  }
  CHECK_STATUS(onebit_outer_step(outer, -1), ONEBIT_ERROR_ARGUMENT);
  CHECK_STATUS(onebit_outer_synchronize(outer), ONEBIT_OK);
  for (int s = 0; s < sites; s++) /* s + 1 steps of weight s + 1; weights add up to sites (sites +
                                   * 1) / 2 */
    wanted -=
        3.0f * SITES_H * (float)((s + 1) * (s + 1) * (s - 2)) * 2 / (float)(sites * (sites + 1));
  CHECK(fabsf(p[0] - wanted) < 1e-3f && fabsf(p[SITES_ALL - 1] - wanted) < 1e-3f, "%g, not %g",
        (double)p[0], (double)wanted);
  CHECK(sites_of(outer).rounds == 4, "%ju rounds", (uintmax_t)sites_of(outer).rounds);
  onebit_outer_destroy(outer);
}

Test(outer_sites, weights_are_of_local_steps) {
  for (int bits = 1; bits <= ONEBIT_OUTER_DENSE; bits *= 32) {
    onebit_outer_options_t options = sites_options(ONEBIT_OUTER_MEAN, bits);
    options.weighted = 1;
    for (int sites = 1; sites <= 4; sites++)
      on_ranks(sites, train_unequally, &options);
  }
}

/* --- Late --------------------------------------------------------------------------------------*/

enum { LATE_STEPS = 24 * SITES_H };

struct lateness {
  onebit_outer_options_t options;
  int quorum, sites;
  bool constant; /* the drift is constant, so that the sum of all drifts is known */
  atomic_int steps[MAX_SITES];
  double distance[MAX_SITES];
  uint32_t checksum[MAX_SITES];
  uint64_t left_out[MAX_SITES], caught_up[MAX_SITES];
};

/* In the middle of the run the last site makes no step until the others have made many steps. With
 * a quorum that needs the last site, the others make as many as they can. */
static void wait_for_others(struct lateness *lateness, int site, int step) {
  if (site != lateness->sites - 1 || step != 3 * SITES_H - 1)
    return;
  while (atomic_load(&lateness->steps[0]) < 16 * SITES_H ||
         atomic_load(&lateness->steps[1]) < 16 * SITES_H)
    sched_yield();
}

static void train_late(onebit_comm_t comm, void *context) {
  struct lateness *lateness = context;
  const int site = onebit_comm_rank(comm);
  float p[SITES_ALL] = {0};
  onebit_outer_t outer = sites_make_alone(comm, p, &lateness->options, 0.02, lateness->quorum);
  for (int step = 1; outer && step <= LATE_STEPS; step++) {
    wait_for_others(lateness, site, step);
    if (lateness->constant)
      for (size_t i = 0; i < SITES_ALL; i++)
        p[i] -= (float)(site + 1);
    else
      sites_train(p, site, 0.05f);
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
    atomic_fetch_add(&lateness->steps[site], 1);
  }
  CHECK_STATUS(onebit_outer_synchronize(outer), ONEBIT_OK);
  for (size_t i = 0; lateness->constant && i < SITES_ALL; i++)
    if (!CHECK(p[i] == -2.5f * LATE_STEPS, "p[%zu] is %g; %ju rounds", i, (double)p[i],
               (uintmax_t)sites_of(outer).rounds))
      break;
  lateness->distance[site] = sites_distance_to_mean_target(p, lateness->sites);
  lateness->checksum[site] = outer_info(outer).checksum;
  lateness->left_out[site] = sites_of(outer).left_out;
  lateness->caught_up[site] = sites_of(outer).caught_up;
  onebit_outer_destroy(outer);
}

static void run_late(struct lateness *lateness) {
  lateness->sites = 4;
  check_case("delay %zu", lateness->options.delay);
  on_ranks(4, train_late, lateness);
  for (int s = 1; s < 4; s++)
    cr_expect(lateness->checksum[s] == lateness->checksum[0] &&
                  lateness->distance[s] == lateness->distance[0],
              "site %d differs", s);
}

Test(outer_sites, a_late_site_is_left_out_and_caught_up) {
  for (int bits = 1; bits <= ONEBIT_OUTER_DENSE; bits *= 32) {
    struct lateness lateness = {.options = sites_options(ONEBIT_OUTER_MEAN, bits)};
    lateness.options.delay = bits == 1 ? 0 : 2;
    lateness.options.mixing = 1;
    run_late(&lateness);
    cr_log_info("%d bits: %ju of 25 rounds without some site, %ju shards came whole, %g from the "
                "optimum",
                bits, (uintmax_t)lateness.left_out[0], (uintmax_t)lateness.caught_up[3],
                lateness.distance[0]);
    cr_expect_geq(lateness.left_out[0], 10);
    cr_expect_eq(lateness.left_out[3], 0, "what the late site serves waits for it");
  }
}

/* With a quorum of all sites every drift is part of exactly one round, and every round includes all
 * sites. */
Test(outer_sites, nothing_is_lost) {
  for (size_t delay = 0; delay < SITES_H; delay += 3) {
    struct lateness lateness = {.options = sites_options(ONEBIT_OUTER_MEAN, ONEBIT_OUTER_DENSE),
                                .quorum = 4,
                                .constant = true};
    lateness.options.delay = delay;
    lateness.options.fragments = 1 + delay;
    lateness.options.mixing = 1;
    run_late(&lateness);
    cr_expect_eq(lateness.left_out[0], 0);
  }
}
