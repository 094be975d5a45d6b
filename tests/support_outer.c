/* Outer steps that are saved, loaded and moved, and sites that train. */
#include "tests/support_outer.h"

enum { TENSORS = 4 };

static const size_t counts[TENSORS] = {320, 77, 1, 200};

onebit_outer_options_t outer_options(int bits, onebit_outer_rule_t rule) {
  onebit_outer_options_t options = ONEBIT_OUTER_OPTIONS_INIT;
  options.local_steps = 4;
  options.bits = bits;
  options.rule = rule;
  options.block_size = 64;
  options.threads = 1;
  return options;
}

static bool is_half(const struct outer_trained *it) {
  return it->options.parameter_dtype != ONEBIT_FLOAT32;
}

const void *outer_values(const struct outer_trained *it) {
  return is_half(it) ? (const void *)it->half : it->p;
}

onebit_status_t outer_train(struct outer_trained *it, int number, bool wrong) {
  if (is_half(it))
    fill_input(it->half, it->options.parameter_dtype, OUTER_ELEMENTS, it->rank, number);
  for (size_t i = 0; i < OUTER_ELEMENTS && !is_half(it); i++) {
    const float target =
        uniform_value(i) + uniform_value(1000003 + (uint64_t)it->rank * 7919 + (uint64_t)number);
    it->p[i] -= 0.1f * (it->p[i] - target);
  }
  if (wrong && number == 7 && it->rank == 1)
    it->p[400] = NAN;
  return onebit_outer_step(it->outer, 1 + it->rank + number % 2);
}

static void list_tensors(struct outer_trained *it, onebit_comm_t comm,
                         const onebit_outer_options_t *options, onebit_tensor_t *tensors) {
  *it = (struct outer_trained){.options = *options, .rank = onebit_comm_rank(comm)};
  size_t first = 0;
  for (size_t t = 0; t < TENSORS; first += counts[t], t++)
    tensors[t] = (onebit_tensor_t){.parameter = is_half(it) ? (void *)(it->half + first)
                                                            : (void *)(it->p + first),
                                   .count = counts[t],
                                   .uncompressed = t == 1};
}

void outer_create(struct outer_trained *it, onebit_comm_t comm,
                  const onebit_outer_options_t *options) {
  onebit_tensor_t tensors[TENSORS];
  list_tensors(it, comm, options, tensors);
  CHECK_STATUS(onebit_outer_create(comm, tensors, TENSORS, options, &it->outer), ONEBIT_OK);
}

struct outer_trained *outer_begin(onebit_comm_t comm, const onebit_outer_options_t *options) {
  struct outer_trained *it = allocate(1, sizeof *it);
  outer_create(it, comm, options);
  return it;
}

void outer_end(struct outer_trained *it) {
  onebit_outer_destroy(it->outer);
  free(it);
}

void outer_train_to(struct outer_trained *it, int from, int to) {
  for (int number = from; number <= to; number++)
    CHECK_STATUS(outer_train(it, number, false), ONEBIT_OK);
}

void outer_create_site(struct outer_trained *it, onebit_comm_t between,
                       const onebit_outer_options_t *options) {
  const onebit_sites_options_t sites = {.size = sizeof sites, .patience = 1000};
  onebit_tensor_t tensors[TENSORS];
  list_tensors(it, between, options, tensors);
  onebit_comm_t alone = self_comm();
  CHECK_STATUS(
      onebit_outer_create_sites(alone, between, tensors, TENSORS, options, &sites, &it->outer),
      ONEBIT_OK);
  onebit_comm_destroy(alone);
}

void outer_save_part(const struct outer_trained *it, struct saved_parts *parts) {
  const int k = it->rank;
  CHECK_STATUS(onebit_outer_save(it->outer, NULL, 0, &parts->bytes[k]), ONEBIT_OK);
  free(parts->memory[k]);
  parts->memory[k] = allocate(1, parts->bytes[k]);
  CHECK_STATUS(onebit_outer_save(it->outer, parts->memory[k], parts->bytes[k], &parts->bytes[k]),
               ONEBIT_OK);
}

void outer_save(struct outer_trained *it, onebit_comm_t comm, struct saved_parts *parts) {
  outer_save_part(it, parts);
  if (it->rank == 0)
    parts->count = onebit_comm_size(comm);
  synchronize_ranks(comm);
}

onebit_status_t outer_load(struct outer_trained *it, const struct saved_parts *parts) {
  return onebit_outer_load(it->outer, (const void *const *)parts->memory, parts->bytes,
                           parts->count);
}

double *outer_mean_residual(const struct saved_parts *parts) {
  double *mean = parts_mean(parts, SECTION_WORKER);
  float *server = parts_values(parts, SECTION_SERVER);
  for (size_t i = 0; i < OUTER_ELEMENTS; i++)
    mean[i] = (isnan(mean[i]) ? 0 : mean[i]) + (isnan(server[i]) ? 0 : (double)server[i]);
  free(server);
  return mean;
}

/* --- To an optimum -----------------------------------------------------------------------------*/

float plain_target(int rank, size_t i) {
  return uniform_value(i) + uniform_value(1000003 + (uint64_t)rank * 7919 + i);
}

void plain_train_by(float rate, float *parameters, size_t count, int rank) {
  for (size_t i = 0; i < count; i++)
    parameters[i] -= rate * (parameters[i] - plain_target(rank, i));
}

double plain_distance_to_mean_target(const float *p, size_t count, int ranks) {
  double sum = 0;
  for (size_t i = 0; i < count; i++) {
    double mean = 0;
    for (int r = 0; r < ranks; r++)
      mean += (double)plain_target(r, i) / ranks;
    sum += ((double)p[i] - mean) * ((double)p[i] - mean);
  }
  return sqrt(sum);
}

void plain_train(float *parameters, size_t count, int rank) {
  plain_train_by(0.05f, parameters, count, rank);
}

void plain_list(onebit_tensor_t tensors[PLAIN_TENSORS], float *parameters) {
  for (size_t t = 0; t < PLAIN_TENSORS; t++)
    tensors[t] = (onebit_tensor_t){.parameter = parameters + t * PLAIN_EACH, .count = PLAIN_EACH};
}

onebit_outer_t plain_make(onebit_comm_t comm, float parameters[PLAIN_ALL],
                          const onebit_outer_options_t *options) {
  onebit_tensor_t tensors[PLAIN_TENSORS];
  onebit_outer_t outer = NULL;
  plain_list(tensors, parameters);
  CHECK_STATUS(onebit_outer_create(comm, tensors, PLAIN_TENSORS, options, &outer), ONEBIT_OK);
  return outer;
}

void plain_consensus(onebit_outer_t outer, float values[PLAIN_ALL]) {
  for (size_t t = 0; t < PLAIN_TENSORS; t++)
    CHECK_STATUS(onebit_outer_get_consensus(outer, t, values + t * PLAIN_EACH), ONEBIT_OK);
}

/* ---- Sites ---- */

void sites_train(float *p, int site, float rate) { plain_train_by(rate, p, SITES_ALL, site); }

double sites_distance_to_mean_target(const float *p, int sites) {
  return plain_distance_to_mean_target(p, SITES_ALL, sites);
}

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
  synchronize_ranks(comm); /* no rank frees a communicator that others still use */
  onebit_comm_destroy(site);
  onebit_comm_destroy(r == 0 ? place->between[s] : NULL); /* NULL if the body has destroyed it */
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
