/* Creates, trains, saves and loads outer steps, and trains sites. */
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

static void save_rank(onebit_outer_t outer, int k, struct saved_parts *parts) {
  CHECK_STATUS(onebit_outer_save(outer, NULL, 0, &parts->bytes[k]), ONEBIT_OK);
  free(parts->memory[k]);
  parts->memory[k] = allocate(1, parts->bytes[k]);
  CHECK_STATUS(onebit_outer_save(outer, parts->memory[k], parts->bytes[k], &parts->bytes[k]),
               ONEBIT_OK);
}

void outer_save_part(const struct outer_trained *it, struct saved_parts *parts) {
  save_rank(it->outer, it->rank, parts);
}

static void save_and_wait(onebit_outer_t outer, int k, onebit_comm_t comm,
                          struct saved_parts *parts) {
  save_rank(outer, k, parts);
  if (k == 0)
    parts->count = onebit_comm_size(comm);
  synchronize_ranks(comm);
}

void outer_save(struct outer_trained *it, onebit_comm_t comm, struct saved_parts *parts) {
  save_and_wait(it->outer, it->rank, comm, parts);
}

void outer_save_all(onebit_outer_t outer, onebit_comm_t comm, struct saved_parts *parts) {
  save_and_wait(outer, onebit_comm_rank(comm), comm, parts);
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

/* --- Training to an optimum
 * -------------------------------------------------------------------- */

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

/* Lists the tensors of a site. The last tensor stays uncompressed. */
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
  onebit_comm_destroy(r == 0 ? place->between[s] : NULL); /* is NULL if the body has destroyed it */
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

/* ---- The formulas ---- */

struct outer_formulas *formulas_of(const onebit_outer_options_t *options, int ranks, size_t count,
                                   bool are_sites) {
  struct outer_formulas *f = allocate(1, sizeof *f);
  f->options = *options;
  f->ranks = ranks;
  f->count = count;
  f->are_sites = are_sites;
  return f;
}

static size_t fragment_end(const struct outer_formulas *f, size_t k) {
  return k * f->count / f->options.fragments;
}

static void formulas_begin(struct outer_formulas *f, size_t k) {
  f->in_flight[k] = true;
  for (size_t i = fragment_end(f, k); i < fragment_end(f, k + 1); i++)
    for (int r = 0; r < f->ranks; r++)
      f->sent[r][i] = f->x[i] - f->p[r][i];
}

static float formulas_update(struct outer_formulas *f, size_t i) {
  const float b = (float)f->options.momentum;
  float d = 0;
  for (int r = 0; r < f->ranks; r++)
    d += f->sent[r][i] / (float)f->ranks;
  f->m[i] = b * f->m[i] + d;
  return f->options.rule == ONEBIT_OUTER_MEAN       ? d
         : f->options.rule == ONEBIT_OUTER_MOMENTUM ? f->m[i]
                                                    : d + b * f->m[i];
}

static void formulas_end(struct outer_formulas *f, size_t k, float mixing) {
  const size_t end = f->in_flight[k] ? fragment_end(f, k + 1) : 0;
  for (size_t i = fragment_end(f, k); i < end; i++) {
    const float before = f->x[i];
    f->x[i] -= (float)f->options.learning_rate * formulas_update(f, i);
    for (int r = 0; r < f->ranks; r++) {
      const float own = f->are_sites ? before - f->p[r][i] - f->sent[r][i] : 0;
      f->p[r][i] = (1 - mixing) * f->p[r][i] + mixing * (f->x[i] - own);
    }
  }
  f->in_flight[k] = false;
}

void formulas_step(struct outer_formulas *f, size_t step) {
  const size_t h = f->options.local_steps, delay = f->options.delay;
  for (int r = 0; r < f->ranks; r++)
    plain_train(f->p[r], f->count, r);
  for (size_t k = 0; k < f->options.fragments; k++) {
    const size_t due = h * (k + 1) / f->options.fragments;
    if (step >= due && (step - due) % h == 0)
      formulas_begin(f, k);
    if (step >= due + delay && (step - due - delay) % h == 0)
      formulas_end(f, k, (float)f->options.mixing);
  }
}

void formulas_synchronize(struct outer_formulas *f) {
  for (size_t k = 0; k < f->options.fragments; k++)
    formulas_end(f, k, (float)f->options.mixing);
  for (size_t k = 0; k < f->options.fragments; k++) {
    formulas_begin(f, k);
    formulas_end(f, k, 1);
  }
}

/* ---- A training at a falling rate ---- */

enum { MOST_RANKS = 16 };

struct descent {
  onebit_outer_options_t options;
  size_t steps;
  bool are_sites;
  double distance[MOST_RANKS];
  uint32_t checksum[MOST_RANKS];
};

static void descend(onebit_comm_t comm, void *context) {
  struct descent *descent = context;
  const onebit_outer_options_t *options = &descent->options;
  const int rank = onebit_comm_rank(comm);
  const size_t count = descent->are_sites ? SITES_ALL : PLAIN_ALL;
  float p[SITES_ALL] = {0};
  onebit_outer_t outer = descent->are_sites ? sites_make_alone(comm, p, options, FOR_EVER, 0)
                                            : plain_make(comm, p, options);
  for (size_t step = 1; outer && step <= descent->steps; step++) {
    const uint64_t before = onebit_comm_bytes_sent(comm);
    plain_train_by(0.02f / (1 + (float)step / 40), p, count, rank);
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
    const uint64_t sent = onebit_comm_bytes_sent(comm) - before;
    const uint64_t told = step % options->local_steps ? 0 : outer_info(outer).exchange_bytes;
    CHECK(sent == told, "step %zu sent %ju bytes, announced %ju", step, (uintmax_t)sent,
          (uintmax_t)told);
  }
  CHECK_STATUS(onebit_outer_synchronize(outer), ONEBIT_OK);
  const onebit_outer_info_t info = outer_info(outer);
  CHECK(info.steps == descent->steps && !info.skipped && !info.in_flight, "counts");
  descent->distance[rank] = plain_distance_to_mean_target(p, count, onebit_comm_size(comm));
  descent->checksum[rank] = info.checksum;
  onebit_outer_destroy(outer);
}

double outer_distance_after(const onebit_outer_options_t *options, int ranks, size_t steps,
                            bool are_sites) {
  struct descent descent = {.options = *options, .steps = steps, .are_sites = are_sites};
  on_ranks(ranks, descend, &descent);
  for (int r = 1; r < ranks; r++)
    cr_expect(descent.checksum[r] == descent.checksum[0] &&
                  descent.distance[r] == descent.distance[0],
              "rank %d differs", r);
  return descent.distance[0];
}
