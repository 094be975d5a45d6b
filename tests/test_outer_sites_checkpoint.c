/*
 * Tests checkpoints of sites. Sites that save and load must continue with the same bits. With
 * another number of sites, with a part that is older than the others' parts, or without a part,
 * they continue from the latest consensus. When a site is lost, the remaining sites also continue
 * from the latest consensus, and so does a site that joins.
 */
#include "tests/support_outer.h"

enum { STEPS = 5 * SITES_H + 2, MAX_RANKS = 3 };

struct story {
  int save_at, load_at;                   /* steps */
  int other;                              /* the site that loads a part saved at a different step */
  struct saved_parts saved[MAX_SITES][2]; /* by site and rank of the site */
  float p[MAX_SITES * MAX_RANKS][STEPS + 1][SITES_ALL];
  float consensus[MAX_SITES][SITES_ALL];
  uint64_t exchanges[MAX_SITES];
};

static onebit_status_t load_site(const struct saved_parts *saved, onebit_outer_t outer) {
  return onebit_outer_load(outer, (const void *const *)saved->memory, saved->bytes, saved->count);
}

static void free_story(struct story *story) {
  for (int s = 0; s < MAX_SITES; s++)
    for (int k = 0; k < 2; k++)
      free_parts(&story->saved[s][k]);
  free(story);
}

/* Makes a local step, whose weight differs by site and step. */
static void train_and_step(onebit_outer_t outer, float *p, int site, int number) {
  sites_train(p, site, 0.05f);
  CHECK_STATUS(onebit_outer_step(outer, 1 + site + number % 3), ONEBIT_OK);
}

static void get_consensus(onebit_outer_t outer, float *x) {
  for (size_t t = 0; t < SITES_TENSORS; t++)
    CHECK_STATUS(onebit_outer_get_consensus(outer, t, x + t * SITES_EACH), ONEBIT_OK);
}

/* --- The same number of sites ------------------------------------------------------------------*/

static void train_and_save(struct place *place, int site, onebit_comm_t comm,
                           onebit_comm_t between) {
  struct story *story = place->more;
  float p[SITES_ALL] = {0};
  onebit_outer_t outer = sites_make(comm, between, p, &place->options, FOR_EVER, 0);
  for (int number = 1; number <= STEPS; number++) {
    train_and_step(outer, p, site, number);
    memcpy(story->p[site * place->ranks + onebit_comm_rank(comm)][number], p, sizeof p);
    if (number == story->save_at)
      outer_save_all(outer, comm, &story->saved[site][0]);
    if (number == story->save_at + SITES_H)
      outer_save_all(outer, comm, &story->saved[site][1]);
    if (number == story->save_at && onebit_comm_rank(comm) == 0)
      get_consensus(outer, story->consensus[site]);
  }
  onebit_outer_destroy(outer);
}

static void load_and_train(struct place *place, int site, onebit_comm_t comm,
                           onebit_comm_t between) {
  struct story *story = place->more;
  float p[SITES_ALL] = {1, 2, 3};
  p[SITES_ALL - 1] = 4;
  onebit_outer_t outer = sites_make(comm, between, p, &place->options, FOR_EVER, 0);
  for (int number = 1; number < story->load_at; number++)
    train_and_step(outer, p, site, number);
  CHECK_STATUS(load_site(&story->saved[site][0], outer), ONEBIT_OK);
  CHECK(outer_info(outer).steps == (uint64_t)story->save_at, "%ju steps",
        (uintmax_t)outer_info(outer).steps);
  for (int number = story->save_at + 1; number <= STEPS; number++) {
    train_and_step(outer, p, site, number);
    if (!CHECK_BITS("the parameters", p,
                    story->p[site * place->ranks + onebit_comm_rank(comm)][number], SITES_ALL,
                    ONEBIT_FLOAT32))
      break;
  }
  onebit_outer_destroy(outer);
}

static struct place *create_place(onebit_outer_rule_t rule, int bits, int sites, int ranks) {
  struct place *place = place_create(sites, ranks, sites_options(rule, bits));
  place->more = allocate(1, sizeof(struct story));
  return place;
}

static void free_place(struct place *place) {
  free_story(place->more);
  free(place);
}

Test(outer_sites_checkpoint, goes_on_exactly) {
  static const int widths[] = {1, 4, ONEBIT_OUTER_DENSE};
  for (int k = 0; k < 10; k++) {
    struct place *place =
        create_place((onebit_outer_rule_t)(k % 3), widths[k % 3], 2 + k % 2, 1 + k / 4);
    struct story *story = place->more;
    place->options.weighted = k % 2;
    place->options.mixing = k == 4 ? 0.75 : 0;
    story->save_at = 2 * SITES_H - 1 + k % 3;
    story->load_at = 1 + k;
    if (k > 5) { /* an exchange is in flight at every step */
      place->options.delay = SITES_H - 1;
      place->options.fragments = 1 + (size_t)k % 4;
    }
    check_case("%d bits, saved after %d steps, delay %zu", widths[k % 3], story->save_at,
               place->options.delay);
    on_sites(place, train_and_save);
    on_sites(place, load_and_train);
    free_place(place);
  }
}

/* --- Other numbers of sites
 * -------------------------------------------------------------------- */

/* Loads on other numbers of sites and of ranks per site. Each site loads the part of some saved
 * site. */
static void load_elsewhere(struct place *place, int site, onebit_comm_t comm,
                           onebit_comm_t between) {
  struct story *story = place->more;
  const int of = story->other;
  float p[SITES_ALL] = {0}, x[SITES_ALL];
  onebit_outer_t outer = sites_make(comm, between, p, &place->options, FOR_EVER, 0);
  CHECK_STATUS(load_site(&story->saved[site % of][0], outer), ONEBIT_OK);
  get_consensus(outer, x);
  CHECK_BITS("the consensus", x, story->consensus[0], SITES_ALL, ONEBIT_FLOAT32);
  for (int number = 1; number <= 40 * SITES_H; number++) {
    sites_train(p, site, 0.5f / (float)(9 + number));
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
  }
  CHECK_STATUS(onebit_outer_synchronize(outer), ONEBIT_OK);
  CHECK(sites_distance_to_mean_target(p, place->sites) < 4, "%g from the optimum",
        sites_distance_to_mean_target(p, place->sites));
  sites_end(place, site, comm, outer);
}

Test(outer_sites_checkpoint, other_numbers_of_sites_load_it) {
  for (int sites = 1; sites <= 4; sites++) {
    struct place *place = create_place(ONEBIT_OUTER_MOMENTUM, 2, 3, 2);
    struct story *story = place->more;
    story->save_at = 3 * SITES_H + 1;
    story->other = 3;
    place->options.fragments = 1 + (size_t)sites % 3;
    place->options.delay = (size_t)sites % 3;
    check_case("%d sites", sites);
    on_sites(place, train_and_save);
    place->sites = sites;
    place->ranks = 1 + sites % 2;
    on_sites(place, load_elsewhere);
    sites_agree(place);
    free_place(place);
  }
}

/* Two sites load the part that one site has saved in the middle of a round. Each fragment must keep
 * its own number of local steps, even if its elements are then in other shards. */
static void load_mid_round(struct place *place, int site, onebit_comm_t comm,
                           onebit_comm_t between) {
  struct saved_parts saved = {0};
  float p[SITES_ALL] = {0};
  onebit_outer_t outer = sites_make(comm, comm, p, &place->options, FOR_EVER, 0);
  for (int number = 1; number <= 4; number++) {
    if (number == 4) { /* so far the second fragment has weight 3, and the first has weight 1 */
      outer_save_all(outer, comm, &saved);
      onebit_outer_destroy(outer);
      outer = sites_make(comm, between, p, &place->options, FOR_EVER, 0);
      CHECK_STATUS(load_site(&saved, outer), ONEBIT_OK);
    }
    for (size_t i = 0; i < SITES_ALL; i++)
      p[i] -= number == 4 && site == 1 ? 3 : 1;
    CHECK_STATUS(onebit_outer_step(outer, number == 4 && site == 1 ? 5 : 1), ONEBIT_OK);
  }
  CHECK(fabsf(p[SITES_ALL - 1] + (4 * 4 + 8 * 6) / 12.0f) < 1e-5f, "%g", (double)p[SITES_ALL - 1]);
  CHECK(p[0] == (site == 1 ? -6 : -4), "%g", (double)p[0]);
  onebit_outer_destroy(outer);
  free_parts(&saved);
}

Test(outer_sites_checkpoint, fragments_keep_their_weights) {
  struct place *place = create_place(ONEBIT_OUTER_MEAN, ONEBIT_OUTER_DENSE, 2, 1);
  place->options.fragments = 2;
  place->options.weighted = 1;
  on_sites(place, load_mid_round);
  free_place(place);
}

/* One site loads a part that is one round older than those of the others. It must start from the
 * consensus of the others. */
static void load_parts_of_unequal_rounds(struct place *place, int site, onebit_comm_t comm,
                                         onebit_comm_t between) {
  struct story *story = place->more;
  float p[SITES_ALL] = {0}, x[SITES_ALL];
  onebit_outer_t outer = sites_make(comm, between, p, &place->options, FOR_EVER, 0);
  CHECK_STATUS(load_site(&story->saved[site][site != story->other], outer), ONEBIT_OK);
  get_consensus(outer, x);
  if (site == story->other)
    CHECK_BITS("parameters", p, x, SITES_ALL, ONEBIT_FLOAT32);
  else
    CHECK_BITS("parameters", p,
               story->p[site * place->ranks + onebit_comm_rank(comm)][story->save_at + SITES_H],
               SITES_ALL, ONEBIT_FLOAT32);
  for (int number = 1; number <= 2 * SITES_H; number++)
    train_and_step(outer, p, site, number);
  CHECK_STATUS(onebit_outer_synchronize(outer), ONEBIT_OK);
  sites_end(place, site, comm, outer);
}

Test(outer_sites_checkpoint, of_unequal_rounds_the_latest_counts) {
  for (int other = 0; other < 3; other++) {
    struct place *place = create_place(ONEBIT_OUTER_NESTEROV, 4, 3, 2);
    struct story *story = place->more;
    story->save_at = SITES_H + 1;
    story->other = other;
    place->options.fragments = 1 + (size_t)other;
    on_sites(place, train_and_save);
    on_sites(place, load_parts_of_unequal_rounds);
    sites_agree(place);
    free_place(place);
  }
}

/* One site loads a damaged part. No site may change. */
static void load_damaged_part(struct place *place, int site, onebit_comm_t comm,
                              onebit_comm_t between) {
  struct story *story = place->more;
  struct saved_parts *saved = &story->saved[site][0];
  float p[SITES_ALL] = {0};
  onebit_outer_t outer = sites_make(comm, between, p, &place->options, FOR_EVER, 0);
  for (int number = 1; number <= STEPS; number++) {
    if (number == SITES_H + 2) {
      if (site == 1)
        ((unsigned char *)saved->memory[0])[saved->bytes[0] / 2] ^= 1;
      CHECK_STATUS(load_site(saved, outer),
                   site == 1 ? ONEBIT_ERROR_CHECKPOINT : ONEBIT_ERROR_PEER);
    }
    train_and_step(outer, p, site, number);
    if (!CHECK_BITS("the parameters", p, story->p[site][number], SITES_ALL, ONEBIT_FLOAT32))
      break;
  }
  onebit_outer_destroy(outer);
}

Test(outer_sites_checkpoint, what_is_damaged_changes_nothing) {
  struct place *place = create_place(ONEBIT_OUTER_MEAN, 1, 3, 1);
  struct story *story = place->more;
  story->save_at = 3;
  on_sites(place, train_and_save);
  on_sites(place, load_damaged_part);
  free_place(place);
}

/* --- A site that is lost and joins again
 * --------------------------------------------------------- */

struct loss {
  onebit_comm_t back[MAX_SITES], alone;
  float x[MAX_SITES][SITES_ALL];
};

static void synchronize_and_record(struct place *place, struct loss *loss, onebit_outer_t outer,
                                   int site, onebit_comm_t comm, float *p) {
  CHECK_STATUS(onebit_outer_synchronize(outer), ONEBIT_OK);
  if (onebit_comm_rank(comm) == 0)
    memcpy(loss->x[site], p, sizeof loss->x[site]);
  place->checksum[site * place->ranks + onebit_comm_rank(comm)] = outer_info(outer).checksum;
}

static void shrink_and_restart(struct place *place, int site, onebit_comm_t comm,
                               onebit_outer_t outer, float *p) {
  struct loss *loss = place->more;
  onebit_status_t status = ONEBIT_OK;
  onebit_comm_t survivors;
  for (int k = 0; status == ONEBIT_OK && k < 3 * SITES_H; k++) {
    sites_train(p, site, 0.02f);
    status = onebit_outer_step(outer, 1);
  }
  CHECK(status == ONEBIT_ERROR_TRANSPORT || status == ONEBIT_ERROR_PEER, "%s",
        onebit_status_string(status));
  CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_ERROR_TRANSPORT);
  CHECK_STATUS(onebit_outer_shrink(outer, &survivors), ONEBIT_OK);
  CHECK(sites_of(outer).sites == place->sites - 1, "%d sites", sites_of(outer).sites);
  for (int k = 0; k < 2 * SITES_H; k++) {
    sites_train(p, site, 0.02f);
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
  }
  CHECK_STATUS(onebit_outer_move(outer, onebit_comm_rank(comm) ? NULL : loss->back[site]),
               ONEBIT_OK);
  onebit_comm_destroy(survivors);
}

/* Starts the lost site again, with new processes. */
static onebit_outer_t restart_site(struct place *place, int site, onebit_comm_t comm,
                                   onebit_comm_t between, onebit_outer_t outer, float *p) {
  struct loss *loss = place->more;
  onebit_comm_t alone = NULL;
  float x[SITES_ALL];
  if (between)
    onebit_comm_abort(between);
  onebit_outer_destroy(outer);
  if (between) {
    onebit_comm_destroy(between);
    place->between[site] = NULL;
    CHECK_STATUS(onebit_comm_create_self(&alone), ONEBIT_OK);
  }
  memset(p, 0, SITES_ALL * sizeof *p);
  outer = sites_make(comm, alone, p, &place->options, FOR_EVER, 0);
  CHECK_STATUS(onebit_outer_move(outer, between ? loss->back[site] : NULL), ONEBIT_OK);
  get_consensus(outer, x);
  CHECK_BITS("parameters", p, x, SITES_ALL, ONEBIT_FLOAT32);
  onebit_comm_destroy(alone);
  return outer;
}

static void lose_last_site(struct place *place, int site, onebit_comm_t comm,
                           onebit_comm_t between) {
  struct loss *loss = place->more;
  float p[SITES_ALL] = {0};
  onebit_outer_t outer = sites_make(comm, between, p, &place->options, FOR_EVER, 0);
  const bool ends = site == place->sites - 1; /* the others may notice the loss in the third
                                               * exchange */
  for (int k = 0; k < 3 * SITES_H + (ends ? 1 : -1); k++) {
    sites_train(p, site, 0.02f);
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
  }
  if (ends)
    outer = restart_site(place, site, comm, between, outer, p);
  else
    shrink_and_restart(place, site, comm, outer, p);
  for (int k = 0; k < 60 * SITES_H; k++) {
    sites_train(p, site, 0.02f / (1 + (float)k / 40));
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
  }
  synchronize_and_record(place, loss, outer, site, comm, p);
  onebit_outer_destroy(outer);
}

Test(outer_sites_checkpoint, a_site_is_lost_and_comes_again) {
  for (int k = 0; k < 4; k++) {
    struct place *place =
        place_create(3 + k / 2, 1 + k % 2,
                     sites_options((onebit_outer_rule_t)(k % 3), k % 2 ? ONEBIT_OUTER_DENSE : 0));
    struct loss *loss = allocate(1, sizeof *loss);
    place->options.fragments = 1 + (size_t)k / 2;
    place->options.delay = k == 2;
    place->more = loss;
    CHECK_STATUS(onebit_comm_create_loopback(place->sites, loss->back), ONEBIT_OK);
    check_case("%d sites of %d", place->sites, place->ranks);
    on_sites(place, lose_last_site);
    cr_log_info("%g from the optimum", sites_distance_to_mean_target(loss->x[0], place->sites));
    cr_expect_lt(sites_distance_to_mean_target(loss->x[0], place->sites), 6);
    sites_agree(place);
    for (int s = 0; s < place->sites; s++)
      onebit_comm_destroy(loss->back[s]);
    free(loss);
    free(place);
  }
}
