/*
 * Tests the outer step between sites, with fragments and a delay. It must follow the formulas.
 * Drifts and rounds are sent while the sites train. Late, lost or saved sites must continue as they
 * do without a delay.
 */
#include "tests/support_outer.h"

enum { PARTS = SITES_TENSORS, STEPS = 6 * SITES_H + 1 }; /* each fragment ends with a tensor */

/* --- The formulas ------------------------------------------------------------------------------*/

static void train_site(struct place *place, int site, onebit_comm_t comm, onebit_comm_t between) {
  float p[SITES_ALL] = {0};
  onebit_outer_t outer = sites_make(comm, between, p, &place->options, FOR_EVER, 0);
  for (int step = 1; outer && step <= STEPS; step++) {
    sites_train(p, site, 0.05f);
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
  }
  CHECK_STATUS(onebit_outer_synchronize(outer), ONEBIT_OK);
  CHECK(outer_info(outer).in_flight == 0, "%d in flight", outer_info(outer).in_flight);
  const onebit_sites_info_t info = sites_of(outer);
  CHECK(info.sites == place->sites && info.site == site && !info.late && !info.left_out &&
            !info.caught_up,
        "%d sites, this is %d; %ju late, %ju left out", info.sites, info.site, (uintmax_t)info.late,
        (uintmax_t)info.left_out);
  for (size_t i = 0; i < SITES_ALL; i++)
    if (!CHECK(fabsf(p[i] - place->plain[i]) <= 4e-5f, "p[%zu] is %.9g, not %.9g", i, (double)p[i],
               (double)place->plain[i]))
      break;
  sites_end(place, site, comm, outer);
}

static void check_formulas(size_t delay, int sites, int ranks) {
  const onebit_outer_rule_t rule = (onebit_outer_rule_t)((sites + ranks) % 3);
  struct place *place = place_create(sites, ranks, sites_options(rule, ONEBIT_OUTER_DENSE));
  place->options.fragments = PARTS;
  place->options.delay = delay;
  place->options.mixing = ranks == 2 ? 0.5 : 1;
  check_case("%d sites of %d ranks, delay %zu, rule %d", sites, ranks, delay, (int)rule);
  struct outer_formulas *f = formulas_of(&place->options, place->sites, SITES_ALL, true);
  f->options.learning_rate = rule == ONEBIT_OUTER_NESTEROV ? 0.7 : 1;
  f->options.momentum = rule == ONEBIT_OUTER_NESTEROV ? 0.9 : 0.5;
  for (size_t step = 1; step <= STEPS; step++)
    formulas_step(f, step);
  formulas_synchronize(f);
  memcpy(place->plain, f->p[0], sizeof place->plain);
  on_sites(place, train_site);
  sites_agree(place);
  free(f);
  free(place);
}

Test(outer_sites_delay, follows_the_formulas) {
  for (int sites = 1; sites <= 4; sites++)
    for (int ranks = 1; ranks <= 3; ranks++)
      for (size_t delay = 0; delay < SITES_H; delay++)
        check_formulas(delay, sites, ranks);
}

/* --- While they train --------------------------------------------------------------------------*/

/* Trains sites that make the same steps at the same time. With a delay of three steps, a round
 * arrives before it is applied. Drifts are sent in the first step of the delay. In the next step
 * they arrive, and rounds are sent. The step that applies a round may wait, but has nothing left to
 * send. */
static void train_in_step(onebit_comm_t comm, void *context) {
  onebit_outer_options_t options = sites_options(ONEBIT_OUTER_MEAN, 1);
  float p[SITES_ALL] = {0};
  uint64_t bytes[SITES_H] = {0};
  (void)context;
  options.delay = 3;
  onebit_outer_t outer = sites_make_alone(comm, p, &options, FOR_EVER, 0);
  for (int step = 1; outer && step < 2 * SITES_H; step++) {
    sites_train(p, onebit_comm_rank(comm), 0.05f);
    synchronize_ranks(comm);
    const uint64_t before = onebit_comm_bytes_sent(comm);
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
    bytes[step % SITES_H] = onebit_comm_bytes_sent(comm) - before;
    CHECK(outer_info(outer).in_flight == (step < SITES_H || step == 2 * SITES_H - 1 ? 0 : 3),
          "step %d: %d in flight", step, outer_info(outer).in_flight);
    CHECK(outer_info(outer).exchanges == (step < 2 * SITES_H - 1 ? 0 : 3), "step %d: applied",
          step);
    synchronize_ranks(comm);
  }
  CHECK(bytes[0] && bytes[0] + bytes[1] + bytes[2] == outer_info(outer).exchange_bytes,
        "%ju, %ju and %ju bytes, announced %ju", (uintmax_t)bytes[0], (uintmax_t)bytes[1],
        (uintmax_t)bytes[2], (uintmax_t)outer_info(outer).exchange_bytes);
  CHECK(bytes[3] == 0, "%ju bytes in the step that waits", (uintmax_t)bytes[3]);
  synchronize_ranks(comm);
  onebit_outer_destroy(outer);
}

Test(outer_sites_delay, an_exchange_travels_while_they_train) { on_ranks(3, train_in_step, NULL); }

/* --- Moved -------------------------------------------------------------------------------------*/

/* A run that is moved after every step, also with exchanges in flight, has the bits of a run that
 * is not moved, because the same sites send every drift again. */
static void train_and_move(struct place *place, int site, onebit_comm_t comm,
                           onebit_comm_t between) {
  float p[SITES_ALL] = {0}, q[SITES_ALL] = {0};
  onebit_outer_t still = sites_make(comm, between, p, &place->options, FOR_EVER, 0);
  onebit_outer_t moved = sites_make(comm, between, q, &place->options, FOR_EVER, 0);
  for (int step = 1; step <= STEPS; step++) {
    sites_train(p, site, 0.05f);
    sites_train(q, site, 0.05f);
    CHECK_STATUS(onebit_outer_step(still, 1 + site), ONEBIT_OK);
    CHECK_STATUS(onebit_outer_step(moved, 1 + site), ONEBIT_OK);
    if (!CHECK_BITS("the parameters", q, p, SITES_ALL, ONEBIT_FLOAT32))
      break;
    CHECK_STATUS(onebit_outer_move(moved, between), ONEBIT_OK);
  }
  onebit_outer_destroy(still);
  onebit_outer_destroy(moved);
}

Test(outer_sites_delay, a_move_sends_what_was_in_flight_again) {
  for (int k = 0; k < 4; k++) {
    struct place *place = place_create(2 + k % 2, 1 + k / 2,
                                       sites_options((onebit_outer_rule_t)(k % 3), k % 2 ? 1 : 4));
    place->options.fragments = 1 + (size_t)k % 3;
    place->options.delay = 1 + (size_t)k % 3;
    place->options.weighted = k == 3;
    check_case("delay %zu", place->options.delay);
    on_sites(place, train_and_move);
    free(place);
  }
}

/* --- Wrong -------------------------------------------------------------------------------------*/

/* The parameters of a site become NaN during the delay. In its next exchange this site returns to
 * the consensus. The other sites are not affected. */
static void train_wrongly(struct place *place, int site, onebit_comm_t comm,
                          onebit_comm_t between) {
  float p[SITES_ALL] = {0};
  int skipped = 0;
  onebit_outer_t outer = sites_make(comm, between, p, &place->options, FOR_EVER, 0);
  for (int step = 1; step <= STEPS; step++) {
    sites_train(p, site, 0.05f);
    if (site == 1 && step == SITES_H + 1)
      p[7] = NAN;
    const onebit_status_t status = onebit_outer_step(outer, 1);
    CHECK(status == ONEBIT_OK || (status == ONEBIT_SKIPPED && site == 1 && step == 2 * SITES_H),
          "step %d: %s", step, onebit_status_string(status));
    skipped += status == ONEBIT_SKIPPED;
  }
  CHECK_STATUS(onebit_outer_synchronize(outer), ONEBIT_OK);
  CHECK(skipped == (site == 1), "%d skipped", skipped);
  CHECK(sites_distance_to_mean_target(p, place->sites) < 20, "%g",
        sites_distance_to_mean_target(p, place->sites));
  sites_end(place, site, comm, outer);
}

Test(outer_sites_delay, what_is_no_number_goes_back_to_the_consensus) {
  struct place *place = place_create(2, 2, sites_options(ONEBIT_OUTER_MEAN, 1));
  place->options.delay = 2;
  on_sites(place, train_wrongly);
  sites_agree(place);
  free(place);
}
