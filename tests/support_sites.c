#include "tests/support_sites.h"

void sites_train(float *p, int site, float rate) { plain_train_by(rate, p, SITES_ALL, site); }

double sites_distance(const float *p, int sites) { return plain_distance(p, SITES_ALL, sites); }

/* The last tensor stays uncompressed. */
void sites_list(onebit_tensor_t tensors[SITES_TENSORS], float *p) {
  for (size_t t = 0; t < SITES_TENSORS; t++)
    tensors[t] = (onebit_tensor_t){.parameter = p + t * SITES_EACH,
                                   .count = SITES_EACH,
                                   .uncompressed = t == SITES_TENSORS - 1};
}

onebit_outer_options_t sites_options(onebit_outer_rule_t rule, int bits) {
  onebit_outer_options_t options = {
      .size = sizeof options, .local_steps = SITES_H, .rule = rule, .bits = bits, .block_size = 64};
  return options;
}

onebit_outer_t sites_make(onebit_comm_t site, onebit_comm_t between, float *p,
                          const onebit_outer_options_t *options, double patience, int quorum) {
  onebit_tensor_t tensors[SITES_TENSORS];
  onebit_outer_t outer = NULL;
  onebit_sites_options_t sites = {.size = sizeof sites, .patience = patience, .quorum = quorum};
  sites_list(tensors, p);
  CHECK_STATUS(
      onebit_outer_create_sites(site, between, tensors, SITES_TENSORS, options, &sites, &outer),
      ONEBIT_OK);
  return outer;
}

onebit_outer_t sites_make_alone(onebit_comm_t between, float *p,
                                const onebit_outer_options_t *options, double patience,
                                int quorum) {
  onebit_comm_t self = self_comm();
  onebit_outer_t outer = sites_make(self, between, p, options, patience, quorum);
  onebit_comm_destroy(self);
  return outer;
}

onebit_sites_info_t sites_of(onebit_outer_t outer) {
  onebit_sites_info_t info = {.size = sizeof info};
  CHECK_STATUS(onebit_outer_get_sites(outer, &info), ONEBIT_OK);
  return info;
}

struct run {
  struct place *place;
  site_body *body;
};

static void run_rank(onebit_comm_t comm, void *context) {
  const struct run *run = context;
  struct place *place = run->place;
  const int number = onebit_comm_rank(comm), s = number / place->ranks, r = number % place->ranks;
  onebit_comm_t site = place->site[s][r], between = r == 0 ? place->between[s] : NULL;
  run->body(place, s, site, between);
  meet(comm); /* nobody's communicator is gone while others use it */
  onebit_comm_destroy(site);
  onebit_comm_destroy(r == 0 ? place->between[s] : NULL); /* which it may have taken */
}

void on_sites(struct place *place, site_body *body) {
  struct run run = {place, body};
  cr_assert_eq(onebit_comm_create_loopback(place->sites, place->between), ONEBIT_OK);
  for (int s = 0; s < place->sites; s++)
    cr_assert_eq(onebit_comm_create_loopback(place->ranks, place->site[s]), ONEBIT_OK);
  on_ranks(place->sites * place->ranks, run_rank, &run);
}

struct place *place_create(int sites, int ranks, onebit_outer_options_t options) {
  struct place *place = allocate(1, sizeof *place);
  place->sites = sites;
  place->ranks = ranks;
  place->options = options;
  return place;
}

void sites_end(struct place *place, int site, onebit_comm_t comm, onebit_outer_t outer) {
  place->checksum[site * place->ranks + onebit_comm_rank(comm)] = outer_info(outer).checksum;
  onebit_outer_destroy(outer);
}

void sites_agree(const struct place *place) {
  for (int k = 1; k < place->sites * place->ranks; k++)
    cr_expect_eq(place->checksum[k], place->checksum[0], "rank %d differs", k);
}
