/*
 * Outer steps for tests of saving, loading and moving, in which a rank's parameters change in the
 * same way in every run; and outer steps whose parameters are trained towards an optimum.
 */
#ifndef ONEBIT_TESTS_SUPPORT_OUTER_H
#define ONEBIT_TESTS_SUPPORT_OUTER_H

#include "tests/support_checkpoint.h"

enum { OUTER_ELEMENTS = 320 + 77 + 1 + 200 };

/* The parameters and the outer step of one rank. */
struct outer_trained {
  float p[OUTER_ELEMENTS];
  uint16_t half[OUTER_ELEMENTS];
  onebit_outer_options_t options;
  onebit_outer_t outer;
  int rank;
};

/* Returns options for rounds of 4 steps, with small blocks. */
onebit_outer_options_t outer_options(int bits, onebit_outer_rule_t rule);

/* Creates, collectively, an outer step of four tensors, one of them uncompressed. */
void outer_create(struct outer_trained *it, onebit_comm_t comm,
                  const onebit_outer_options_t *options);
/* outer_begin does the same in memory that it allocates. outer_end destroys the outer step and
 * frees that memory. */
struct outer_trained *outer_begin(onebit_comm_t comm, const onebit_outer_options_t *options);
void outer_end(struct outer_trained *it);
/* Creates an outer step like outer_create, but each rank is a site, which saves and loads its own
 * part. */
void outer_create_site(struct outer_trained *it, onebit_comm_t between,
                       const onebit_outer_options_t *options);
const void *outer_values(const struct outer_trained *it);

/* Makes step `number`. If `wrong` is true, step 7 fails on rank 1. */
onebit_status_t outer_train(struct outer_trained *it, int number, bool wrong);

/* Makes the steps with numbers `from` to `to`, which must succeed. */
void outer_train_to(struct outer_trained *it, int from, int to);

/* Save this rank's part to `parts`. outer_save and outer_save_all wait until all ranks have
 * saved. */
void outer_save_part(const struct outer_trained *it, struct saved_parts *parts);
void outer_save(struct outer_trained *it, onebit_comm_t comm, struct saved_parts *parts);
void outer_save_all(onebit_outer_t outer, onebit_comm_t comm, struct saved_parts *parts);
onebit_status_t outer_load(struct outer_trained *it, const struct saved_parts *parts);

/* Returns, for each element, the mean of the ranks' worker residuals plus the server residual. */
double *outer_mean_residual(const struct saved_parts *parts);

/* --- Outer steps that train to an optimum, of three float32 tensors
 * ----------------------------- */

enum { PLAIN_TENSORS = 3, PLAIN_EACH = 320, PLAIN_ALL = PLAIN_TENSORS * PLAIN_EACH };

/* plain_target returns an element of a rank's target (the optimum of its loss), the sum of a common
 * value and a value of the rank. plain_train_by makes a gradient step towards the target, and
 * plain_train does so with learning rate 0.05. */
float plain_target(int rank, size_t i);
void plain_train_by(float rate, float *parameters, size_t count, int rank);
void plain_train(float *parameters, size_t count, int rank);
/* Returns the distance of p from the mean of the ranks' targets, which is the optimum of the sum of
 * their losses. */
double plain_distance_to_mean_target(const float *p, size_t count, int ranks);

void plain_list(onebit_tensor_t tensors[PLAIN_TENSORS], float *parameters);
onebit_outer_t plain_make(onebit_comm_t comm, float parameters[PLAIN_ALL],
                          const onebit_outer_options_t *options);
void plain_consensus(onebit_outer_t outer, float values[PLAIN_ALL]);

/*
 * Sites over loopback, whose parameters are trained towards a different optimum on each site.
 */

enum {
  SITES_TENSORS = 3,
  SITES_EACH = 330,
  SITES_ALL = SITES_TENSORS * SITES_EACH,
  MAX_SITES = 8,
  SITES_H = 4
};

#define FOR_EVER 1000.0 /* patience in seconds, so long that no site is late */

/* sites_train makes a training step of a site. Its optimum is the sum of a common part and a part
 * of its own. sites_distance_to_mean_target returns the distance of p from the common optimum of
 * all sites. */
void sites_train(float *p, int site, float rate);
double sites_distance_to_mean_target(const float *p, int sites);

/* Lists the tensors. The last tensor stays uncompressed. */
void sites_list(onebit_tensor_t tensors[SITES_TENSORS], float *p);
onebit_outer_options_t sites_options(onebit_outer_rule_t rule, int bits);
onebit_outer_t sites_make(onebit_comm_t site, onebit_comm_t between, float *p,
                          const onebit_outer_options_t *options, double patience, int quorum);
/* Creates an outer step like sites_make, for a site of one rank. */
onebit_outer_t sites_make_alone(onebit_comm_t between, float *p,
                                const onebit_outer_options_t *options, double patience, int quorum);
onebit_sites_info_t sites_of(onebit_outer_t outer);

/* The sites of a test, with `ranks` ranks each, over loopback. */
struct place {
  int sites, ranks;
  onebit_outer_options_t options;
  onebit_comm_t site[MAX_SITES][MAX_SITES], between[MAX_SITES];
  float p[MAX_SITES][SITES_ALL], plain[SITES_ALL];
  uint32_t checksum[MAX_SITES * MAX_SITES];
  void *more; /* data that only the test uses */
};

typedef void site_body(struct place *place, int site, onebit_comm_t comm, onebit_comm_t between);

struct place *place_create(int sites, int ranks, onebit_outer_options_t options);
void on_sites(struct place *place, site_body *body);

/* sites_end stores the checksum of a rank's consensus (the common parameters) and destroys its
 * outer step. sites_agree checks that all ranks have the same checksum. */
void sites_end(struct place *place, int site, onebit_comm_t comm, onebit_outer_t outer);
void sites_agree(const struct place *place);

/* The formulas of onebit/outer.h, computed for all ranks or sites in float32. The parameters start
 * at zero and are trained as plain_train does. */
struct outer_formulas {
  onebit_outer_options_t options; /* defaults are not filled in */
  int ranks;
  size_t count;   /* elements */
  bool are_sites; /* sites: a site keeps the changes of its parameters since its drift was sent */
  float x[SITES_ALL], m[SITES_ALL], p[MAX_SITES][SITES_ALL], sent[MAX_SITES][SITES_ALL];
  bool in_flight[SITES_TENSORS]; /* by fragment */
};

/* Creates a struct outer_formulas, which the caller frees. */
struct outer_formulas *formulas_of(const onebit_outer_options_t *options, int ranks, size_t count,
                                   bool are_sites);
/* Trains all ranks for one step, and makes outer step number `step`. The first step is 1. */
void formulas_step(struct outer_formulas *f, size_t step);
/* Completes the exchanges in flight, and makes an exchange without a delay. */
void formulas_synchronize(struct outer_formulas *f);

/* Trains ranks, or sites of one rank each, with a decreasing learning rate. Returns the distance of
 * the result from the common optimum, which must be the same on all ranks. Checks that only
 * exchanges send bytes, and as many as the outer step's info says. */
double outer_distance_after(const onebit_outer_options_t *options, int ranks, size_t steps,
                            bool are_sites);

#endif
