/* The outer step among sites: creating, describing and destroying it. */
#include <math.h>
#include <string.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/memory.h"
#include "optimizers/outer/sites.h"

#define DEFAULT_PATIENCE 10.0

/* --- Memory and messages -----------------------------------------------------------------------*/

static void *sites_allocate_array(struct ob_sites *sites, size_t count, size_t size, bool *failed) {
  void *memory = ob_outer_allocate(sites->outer, count, size);
  *failed |= !memory;
  return memory;
}

static onebit_status_t sites_no_memory(const struct ob_sites *sites) {
  return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for an outer step of %d sites", sites->count);
}

static onebit_status_t create_shard(struct ob_site_group *group, struct ob_fragment *fragment) {
  struct ob_sites *sites = group->sites;
  const struct onebit_outer *outer = sites->outer;
  const size_t round = outer->options.local_steps;
  bool failed = false;
  struct ob_shard *shard = sites_allocate_array(sites, 1, sizeof *shard, &failed);
  fragment->state = shard;
  if (failed)
    return sites_no_memory(sites);
  shard->fragment = fragment;
  shard->group = group;
  shard->sent_at = outer->steps - (outer->position + round - fragment->begin_step) % round;
  OB_TRY(ob_shard_create(shard, sites));
  shard->drift = sites_allocate_array(sites, shard->bytes, 1, &failed);
  if (shard->bytes > sites->bytes)
    sites->bytes = shard->bytes;
  return failed ? sites_no_memory(sites) : ONEBIT_OK;
}

static onebit_status_t create_messages(struct ob_site_group *group) {
  struct ob_sites *sites = group->sites;
  const size_t own_bytes = ob_shard_of(group, sites->own)->bytes;
  bool failed = false;
  for (int s = 0; s < sites->count && !failed; s++) {
    struct ob_shard *shard = ob_shard_of(group, s);
    struct ob_site_peer *peer = &group->peers[s];
    peer->drift = sites_allocate_array(sites, own_bytes, 1, &failed);
    if (s == sites->own)
      continue;
    shard->result = sites_allocate_array(sites, shard->bytes, 1, &failed);
    peer->out = sites_allocate_array(sites, own_bytes, 1, &failed);
    OB_TRY(ob_batch_create(sites->between, 1, &shard->send));
    OB_TRY(ob_batch_create(sites->between, 1, &shard->receive));
    OB_TRY(ob_batch_create(sites->between, 1, &peer->send));
    OB_TRY(ob_batch_create(sites->between, 1, &peer->receive));
  }
  return failed ? sites_no_memory(sites) : ONEBIT_OK;
}

/* Returns how many rounds a server keeps: together they have as many bytes as a snapshot. A site
 * that missed more rounds is sent a snapshot. */
static size_t history_depth(const struct ob_sites *sites) {
  const onebit_outer_options_t *options = &sites->outer->options;
  const size_t rounds = (size_t)(32 / options->bits) * (options->rule == ONEBIT_OUTER_MEAN ? 1 : 2);
  return rounds > 2 ? rounds : 2;
}

static onebit_status_t create_server(struct ob_site_group *group) {
  struct ob_sites *sites = group->sites;
  const struct ob_shard *own = ob_shard_of(group, sites->own);
  const size_t arrays = own->fragment->momentum ? 2 : 1;
  bool failed = false;
  group->snapshot_of = -1;
  group->peers = sites_allocate_array(sites, (size_t)sites->count, sizeof *group->peers, &failed);
  group->zeros = sites_allocate_array(sites, own->bytes, 1, &failed);
  group->history = sites_allocate_array(sites, sites->depth, own->bytes, &failed);
  group->snapshot =
      sites_allocate_array(sites, own->fragment->count, arrays * sizeof(float), &failed);
  return failed ? sites_no_memory(sites) : create_messages(group);
}

static onebit_status_t create_group(struct ob_sites *sites, size_t number) {
  struct ob_site_group *group = &sites->groups[number];
  const size_t count = (size_t)sites->count;
  *group = (struct ob_site_group){.sites = sites, .first = number * count};
  for (size_t s = 0; s < count; s++)
    OB_TRY(create_shard(group, &sites->outer->fragments[group->first + s]));
  return sites->between ? create_server(group) : ONEBIT_OK;
}

/* Allocates this rank's state. Local. */
static onebit_status_t sites_allocate(struct ob_sites *sites) {
  const size_t groups = sites->outer->groups, longest = sites->outer->longest;
  bool failed = false;
  sites->depth = history_depth(sites);
  sites->mean = sites_allocate_array(sites, longest, sizeof(float), &failed);
  sites->ahead = sites_allocate_array(sites, longest, sizeof(float), &failed);
  sites->views = sites_allocate_array(sites, (size_t)sites->count, sizeof *sites->views, &failed);
  sites->groups = sites_allocate_array(sites, groups, sizeof *sites->groups, &failed);
  if (failed)
    return sites_no_memory(sites);
  for (size_t g = 0; g < groups; g++)
    OB_TRY(create_group(sites, g));
  sites->command = sites_allocate_array(sites, sites->bytes, 1, &failed);
  if (failed)
    return sites_no_memory(sites);
  return sites->site->size > 1
             ? ob_batch_create(sites->site, (size_t)sites->site->size - 1, &sites->command_batch)
             : ONEBIT_OK;
}

/* --- Creation ----------------------------------------------------------------------------------*/

/* The quorum is at most the number of sites, which may be smaller after a move. */
static void choose_quorum(struct ob_sites *sites) {
  const int asked = sites->asked ? sites->asked : sites->count / 2 + 1;
  sites->quorum = asked < sites->count ? asked : sites->count;
}

static onebit_status_t sites_resolve(const onebit_sites_options_t *given, struct ob_sites *sites) {
  onebit_sites_options_t options = ONEBIT_SITES_OPTIONS_INIT;
  if (given)
    OB_TRY(ob_size_check("sites", given, sizeof *given));
  if (given)
    options = *given;
  if (!(options.patience >= 0 && isfinite(options.patience)))
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "sites->patience is %g seconds: it must be finite and at least 0",
                    options.patience);
  if (options.quorum < 0 || options.quorum > sites->count)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "sites->quorum is %d, not from 1 to %d (the number of sites)", options.quorum,
                    sites->count);
  sites->patience = options.patience > 0 ? options.patience : DEFAULT_PATIENCE;
  sites->asked = options.quorum;
  choose_quorum(sites);
  return ONEBIT_OK;
}

static onebit_status_t sites_check_options(const onebit_outer_options_t *options) {
  const char *name = options->bits == ONEBIT_OUTER_SPARSE         ? "ONEBIT_OUTER_SPARSE"
                     : options->block_size == ONEBIT_BLOCK_BUFFER ? "ONEBIT_BLOCK_BUFFER"
                     : options->device != ONEBIT_DEVICE_HOST      ? "a device"
                                                                  : NULL;
  if (!name)
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_UNSUPPORTED, "%s is not supported with sites", name);
}

onebit_status_t ob_sites_resolve(struct onebit_outer *outer, const onebit_sites_options_t *given) {
  OB_TRY(sites_resolve(given, outer->sites));
  OB_TRY(sites_check_options(&outer->options));
  if (outer->options.fragments > UINT32_MAX / OB_SITES_MAX)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED, "fragments is %zu, more than %d",
                    outer->options.fragments, (int)(UINT32_MAX / OB_SITES_MAX));
  outer->options.fragments *= (size_t)outer->sites->count;
  return ONEBIT_OK;
}

/* Finds this site's number and the number of sites, which rank 0 sends to the other ranks.
 * Collective over the site. */
static onebit_status_t find_sites(struct ob_sites *sites, onebit_status_t status) {
  const onebit_comm_t between = sites->between;
  const uint64_t note =
      between ? (uint64_t)between->size << 32 | (uint64_t)between->rank : UINT64_C(1) << 32;
  if (status == ONEBIT_OK && !between != (sites->site->rank != 0))
    status = ob_error(ONEBIT_ERROR_ARGUMENT,
                      "between is %s on rank %d of a site: rank 0 of the site must pass a "
                      "communicator, and its other ranks NULL",
                      between ? "not NULL" : "NULL", sites->site->rank);
  if (status == ONEBIT_OK && between && between->size > OB_SITES_MAX)
    status = ob_error(ONEBIT_ERROR_ARGUMENT,
                      "between has %d ranks, but an outer step has at most %d sites", between->size,
                      OB_SITES_MAX);
  status = ob_agree_noting(sites->site, status, NULL, 0, note);
  sites->count = (int)(ob_agree_note(sites->site, 0) >> 32);
  sites->own = (int)(ob_agree_note(sites->site, 0) & 0xffffffff);
  return status;
}

static struct ob_sites *sites_create(struct onebit_outer *outer, onebit_comm_t between) {
  outer->sites = ob_outer_allocate(outer, 1, sizeof *outer->sites);
  if (!outer->sites)
    return NULL;
  outer->sites->outer = outer;
  outer->sites->site = outer->comm;
  outer->sites->between = between ? ob_comm_add_user(between) : NULL;
  outer->sites->count = 1;
  outer->exchange = &ob_outer_sites;
  return outer->sites;
}

onebit_status_t ob_sites_find(struct onebit_outer *outer, onebit_comm_t site, onebit_comm_t between,
                              onebit_status_t status) {
  if (status == ONEBIT_OK && !sites_create(outer, between))
    status = ob_error(ONEBIT_ERROR_MEMORY, "out of memory for an outer step");
  struct ob_sites none = {.site = site, .between = between};
  return find_sites(status == ONEBIT_OK ? outer->sites : &none, status);
}

/* Agrees first in each site, then between sites, and tells each site the result. */
onebit_status_t ob_sites_agree(onebit_comm_t site, onebit_comm_t between, onebit_status_t status,
                               const struct ob_term *terms, size_t count) {
  status = ob_agree(site, status, terms, count);
  if (between)
    status = ob_agree(between, status, terms, count);
  return ob_agree(site, status, NULL, 0);
}

onebit_status_t ob_sites_regroup(struct onebit_outer *outer, onebit_comm_t between,
                                 onebit_status_t status) {
  struct ob_sites *sites = outer->sites;
  onebit_comm_t before = sites->between;
  sites->between = between ? ob_comm_add_user(between) : NULL;
  if (before)
    ob_comm_remove_user(before);
  OB_TRY(find_sites(sites, status));
  choose_quorum(sites);
  return ob_outer_recut(outer, outer->groups * (size_t)sites->count);
}

/* Chooses two tags for each group: one for drifts, and one for the messages of servers, which
 * arrive independently of drifts. Collective between the sites. */
static onebit_status_t choose_tags(struct ob_sites *sites) {
  for (size_t g = 0; sites->between && g < sites->outer->groups; g++) {
    sites->groups[g].drift_tag = ob_comm_tag(sites->between);
    OB_TRY(ob_agree(sites->between, ONEBIT_OK, NULL, 0));
    sites->groups[g].result_tag = ob_comm_tag(sites->between);
    OB_TRY(ob_agree(sites->between, ONEBIT_OK, NULL, 0));
  }
  return ONEBIT_OK;
}

static onebit_status_t begin_receives(struct ob_site_group *group) {
  struct ob_sites *sites = group->sites;
  for (int s = 0; sites->between && s < sites->count; s++) {
    struct ob_shard *shard = ob_shard_of(group, s);
    if (s == sites->own)
      continue;
    OB_TRY(ob_sites_await(group, s));
    OB_TRY(ob_site_receive(shard->receive, shard->result, shard->bytes, s, group->result_tag));
  }
  return ONEBIT_OK;
}

onebit_status_t ob_sites_build(struct onebit_outer *outer) {
  struct ob_sites *sites = outer->sites;
  const onebit_comm_t site = sites->site, between = sites->between;
  const uint64_t before = outer->own_bytes;
  const struct ob_term own[] = {{"quorum", (uint64_t)sites->quorum},
                                {"patience, in microseconds", (uint64_t)(sites->patience * 1e6)}};
  const onebit_status_t status = sites_allocate(sites);
  sites->built_bytes = outer->own_bytes - before;
  OB_TRY(ob_sites_agree(site, between, status, own, 2));
  sites->command_tag = ob_comm_tag(site);
  OB_TRY(ob_sites_agree(site, between, choose_tags(sites), NULL, 0));
  for (size_t g = 0; g < outer->groups; g++)
    OB_TRY(begin_receives(&sites->groups[g]));
  return ONEBIT_OK;
}

/* --- The exchange's row, and information -------------------------------------------------------*/

/* Cancels a batch that is in flight; if it cannot be cancelled, its memory is kept. */
static void destroy_batch(struct ob_batch *batch, unsigned char *memory) {
  if (ob_batch_destroy(batch))
    ob_release(memory);
  else
    ob_memory_keep(memory);
}

static void sites_destroy_shard(struct ob_fragment *fragment) {
  struct ob_shard *shard = fragment->state;
  if (shard->in_flight && fragment->stage == OB_FRAGMENT_IDLE)
    fragment->weight += fragment->sent_weight; /* its weight counts in the next drift */
  destroy_batch(shard->send, shard->drift);
  destroy_batch(shard->receive, shard->result);
  ob_shard_destroy(shard);
  ob_release(shard);
  fragment->state = NULL;
}

static void sites_info_cost(const struct ob_fragment *fragment, uint64_t *wire, uint64_t *memory) {
  const struct ob_sites *sites = fragment->outer->sites;
  const struct ob_shard *shard = fragment->state;
  const uint64_t others = (uint64_t)sites->count - 1;
  *memory = 0; /* it is in own_bytes */
  *wire = !sites->between ? 0 : shard->bytes * (ob_shard_is_own(shard) ? others : 1);
}

/* The worker's residual has all changes of this site that are not in the consensus. While the outer
 * step is detached, both residuals are in the held arrays. */
static struct ob_run sites_info_extent(const struct ob_fragment *fragment, enum ob_saved what,
                                       size_t k) {
  const struct ob_shard *shard = fragment->state;
  const bool dense = ob_outer_is_dense(fragment->outer, &fragment->piece[k]);
  const bool serves = fragment->outer->sites->between && shard && ob_shard_is_own(shard);
  const bool has = !shard || what == OB_SAVED_WORKER || (serves && !dense);
  return (struct ob_run){k, 0, has ? fragment->piece[k].count : 0};
}

static float *held_residual(const struct ob_fragment *fragment, enum ob_saved what) {
  if (!fragment->state)
    return fragment->held[what == OB_SAVED_SERVER];
  return what == OB_SAVED_WORKER ? fragment->drift : NULL;
}

static onebit_status_t sites_info_export_residual(const struct ob_fragment *fragment,
                                                  enum ob_saved what, float *values) {
  const struct ob_shard *shard = fragment->state;
  const float *held = held_residual(fragment, what);
  if (!held)
    return ob_residual_export(&shard->part[OB_SITE_COMPRESSED].server,
                              &shard->part[OB_SITE_COMPRESSED].layout, values);
  memmove(values, held, fragment->count * sizeof *values);
  return ONEBIT_OK;
}

static onebit_status_t sites_info_import_residual(struct ob_fragment *fragment, enum ob_saved what,
                                                  const float *values) {
  struct ob_shard *shard = fragment->state;
  float *held = held_residual(fragment, what);
  if (!held)
    return ob_residual_import(&shard->part[OB_SITE_COMPRESSED].server,
                              &shard->part[OB_SITE_COMPRESSED].layout, values);
  memmove(held, values, fragment->count * sizeof *values);
  return ONEBIT_OK;
}

/* Does nothing: fragment->drift is the residual already. */
static onebit_status_t sites_info_keep(struct ob_fragment *fragment) {
  (void)fragment;
  return ONEBIT_OK;
}

const struct ob_outer_exchange ob_outer_sites = {.name = "sites",
                                                 .destroy = sites_destroy_shard,
                                                 .cost = sites_info_cost,
                                                 .keep = sites_info_keep,
                                                 .extent = sites_info_extent,
                                                 .export_residual = sites_info_export_residual,
                                                 .import_residual = sites_info_import_residual};

onebit_status_t onebit_outer_get_sites(onebit_outer_t outer, onebit_sites_info_t *info) {
  OB_CALL_SCOPE_OF(outer, OB_HANDLE_OUTER);
  OB_TRY(ob_size_check("info", info, sizeof *info));
  const struct ob_sites *sites = outer->sites;
  if (!sites)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "outer was not made by onebit_outer_create_sites");
  uint64_t rounds = 0;
  for (size_t g = 0; sites->groups && g < outer->groups; g++)
    rounds += ob_shard_of(&sites->groups[g], sites->own)->round;
  *info = (onebit_sites_info_t){.size = sizeof *info,
                                .sites = sites->count,
                                .site = sites->own,
                                .quorum = sites->quorum,
                                .patience = sites->patience,
                                .late = sites->late,
                                .rounds = rounds,
                                .left_out = sites->left_out,
                                .caught_up = sites->caught_up};
  return ONEBIT_OK;
}

/* --- Destruction -------------------------------------------------------------------------------*/

static void destroy_server(struct ob_site_group *group) {
  for (int s = 0; group->peers && s < group->sites->count; s++) {
    destroy_batch(group->peers[s].receive, group->peers[s].drift);
    destroy_batch(group->peers[s].send, group->peers[s].out);
  }
  ob_release(group->peers);
  ob_release(group->zeros);
  ob_release(group->history);
  ob_release(group->snapshot);
}

void ob_sites_detach(struct onebit_outer *outer) {
  struct ob_sites *sites = outer->sites;
  for (size_t g = 0; sites->groups && g < outer->groups; g++)
    destroy_server(&sites->groups[g]);
  destroy_batch(sites->command_batch, sites->command);
  ob_release(sites->groups);
  ob_release(sites->views);
  ob_release(sites->mean);
  ob_release(sites->ahead);
  ob_residual_destroy(&sites->none);
  outer->own_bytes -= sites->built_bytes;
  *sites = (struct ob_sites){.outer = outer,
                             .site = sites->site,
                             .between = sites->between,
                             .count = sites->count,
                             .own = sites->own,
                             .asked = sites->asked,
                             .quorum = sites->quorum,
                             .patience = sites->patience,
                             .left_out = sites->left_out,
                             .caught_up = sites->caught_up};
}

void ob_sites_destroy(struct onebit_outer *outer) {
  if (!outer->sites)
    return;
  ob_sites_detach(outer);
  if (outer->sites->between)
    ob_comm_remove_user(outer->sites->between);
  ob_release(outer->sites);
  outer->sites = NULL;
}
