/*
 * Sites that train on loopback, each towards its own optimum, and functions that make them.
 */
#ifndef ONEBIT_TESTS_SUPPORT_SITES_H
#define ONEBIT_TESTS_SUPPORT_SITES_H

#include "tests/support_outer.h"

enum {
  SITES_TENSORS = 3,
  SITES_EACH = 330,
  SITES_ALL = SITES_TENSORS * SITES_EACH,
  MAX_SITES = 8,
  SITES_H = 4
};

#define FOR_EVER 1000.0 /* seconds of patience: all sites are in time */

/* sites_train makes a step of a site's training towards an optimum that is partly its own and
 * partly common; sites_distance returns the distance from the common one. */
void sites_train(float *p, int site, float rate);
double sites_distance(const float *p, int sites);

/* The last tensor stays uncompressed. */
void sites_list(onebit_tensor_t tensors[SITES_TENSORS], float *p);
onebit_outer_options_t sites_options(onebit_outer_rule_t rule, int bits);
onebit_outer_t sites_make(onebit_comm_t site, onebit_comm_t between, float *p,
                          const onebit_outer_options_t *options, double patience, int quorum);
/* The same of a site of one rank. */
onebit_outer_t sites_make_alone(onebit_comm_t between, float *p,
                                const onebit_outer_options_t *options, double patience, int quorum);
onebit_sites_info_t sites_of(onebit_outer_t outer);

/* The sites of a test, of `ranks` ranks each, on loopback. */
struct place {
  int sites, ranks;
  onebit_outer_options_t options;
  onebit_comm_t site[MAX_SITES][MAX_SITES], between[MAX_SITES];
  float p[MAX_SITES][SITES_ALL], plain[SITES_ALL];
  uint32_t checksum[MAX_SITES * MAX_SITES];
  void *more; /* the test's own */
};

typedef void site_body(struct place *place, int site, onebit_comm_t comm, onebit_comm_t between);

struct place *place_create(int sites, int ranks, onebit_outer_options_t options);
void on_sites(struct place *place, site_body *body);

/* Notes the checksum of a rank's consensus and destroys its outer step; sites_agree expects that of
 * all ranks to be one. */
void sites_end(struct place *place, int site, onebit_comm_t comm, onebit_outer_t outer);
void sites_agree(const struct place *place);

#endif
