/*
 * When a site sends its drifts, and when it applies rounds. A group's drifts are sent in one step
 * of local_steps, and the resulting rounds are applied `delay` steps later, by all ranks of the
 * site together.
 */
#include <string.h>

#include "base/error.h"
#include "optimizers/outer/sites.h"

static onebit_status_t send_drift(struct ob_shard *shard, struct ob_sites *sites) {
  const int server = ob_shard_server(shard);
  struct ob_site_group *group = shard->group;
  if (!sites->between)
    return ONEBIT_OK;
  if (server != sites->own) {
    shard->sending = true;
    return ob_site_send(shard->send, shard->drift, shard->bytes, server, group->drift_tag);
  }
  memcpy(group->peers[server].drift, shard->drift, shard->bytes);
  group->peers[server].here = true;
  group->peers[server].number++;
  return ONEBIT_OK;
}

/* Counts the steps of a drift; one that is sent again belongs to a round. */
static void count_steps(struct ob_shard *shard) {
  const struct onebit_outer *outer = shard->group->sites->outer;
  struct ob_fragment *fragment = shard->fragment;
  shard->sent_steps = outer->options.local_steps;
  if (fragment->stage == OB_FRAGMENT_SENDING)
    return;
  shard->sent_steps = outer->steps - shard->sent_at;
  shard->sent_at = outer->steps;
  fragment->sent_weight = fragment->weight;
  fragment->weight = 0;
}

/* Sends the drift of each shard whose last drift is in a round. If a drift is not finite, it is
 * dropped and this site goes back to the consensus. */
void ob_sites_begin(struct ob_site_group *group, unsigned flags, bool *skipped) {
  struct ob_sites *sites = group->sites;
  group->in_flight = true;
  group->closed = false;
  for (int s = 0; s < sites->count; s++) {
    struct ob_shard *shard = ob_shard_of(group, s);
    if (shard->in_flight || shard->final)
      continue;
    count_steps(shard);
    shard->in_flight = true;
    shard->final = flags & OB_SITE_FINAL;
    shard->number++;
    *skipped |= !ob_shard_compress(shard, sites, flags);
    if (sites->outer->options.delay)
      shard->fragment->stage = OB_FRAGMENT_SENDING;
    if (sites->failed.status == ONEBIT_OK)
      ob_sites_fail(sites, send_drift(shard, sites));
  }
}

/* Ends the group's exchange. Drifts that are in no round are not sent again: the next drifts
 * contain them. */
static onebit_status_t sites_step_end(struct ob_site_group *group) {
  group->in_flight = false;
  OB_TRY(ob_sites_exchange(group->sites, group));
  for (int s = 0; s < group->sites->count; s++)
    ob_shard_of(group, s)->fragment->stage = OB_FRAGMENT_IDLE;
  return ONEBIT_OK;
}

static onebit_status_t verdict(struct ob_sites *sites, bool skipped) {
  sites->outer->skipped += skipped;
  if (!skipped)
    return ONEBIT_OK;
  return ob_error(ONEBIT_SKIPPED, "the drift of this site is not finite: it has gone back to the "
                                  "consensus");
}

/* Makes a group's step. An exchange that is still under way, after a checkpoint of another round,
 * ends first. */
static onebit_status_t step(struct ob_site_group *group, bool *skipped) {
  const struct onebit_outer *outer = group->sites->outer;
  const size_t begin = outer->fragments[group->first].begin_step;
  const size_t apply = (begin + outer->options.delay - 1) % outer->options.local_steps + 1;
  if (group->in_flight && (outer->position == begin || outer->position == apply))
    OB_TRY(sites_step_end(group));
  if (outer->position != begin)
    return ONEBIT_OK;
  ob_sites_begin(group, 0, skipped);
  return apply == begin ? sites_step_end(group) : ONEBIT_OK;
}

onebit_status_t ob_sites_step(struct ob_sites *sites) {
  bool skipped = false;
  for (size_t g = 0; g < sites->outer->groups; g++)
    OB_TRY(step(&sites->groups[g], &skipped));
  ob_sites_move(sites);
  return verdict(sites, skipped);
}

static bool all_ended(const struct onebit_outer *outer) {
  for (size_t f = 0; f < outer->options.fragments; f++)
    if (!((const struct ob_shard *)outer->fragments[f].state)->ended)
      return false;
  return true;
}

onebit_status_t ob_sites_synchronize(struct ob_sites *sites) {
  struct onebit_outer *outer = sites->outer;
  bool skipped = false;
  while (!all_ended(outer)) {
    for (size_t g = 0; g < outer->groups; g++)
      ob_sites_begin(&sites->groups[g], OB_SITE_FINAL, &skipped);
    OB_TRY(ob_sites_exchange(sites, NULL));
  }
  for (size_t f = 0; f < outer->options.fragments; f++) {
    struct ob_fragment *fragment = &outer->fragments[f];
    struct ob_shard *shard = fragment->state;
    shard->final = shard->ended = false;
    fragment->keeps = false;
    fragment->stage = OB_FRAGMENT_IDLE;
    ob_fragment_set(fragment, 1);
  }
  for (size_t g = 0; g < outer->groups; g++)
    sites->groups[g].in_flight = false;
  sites->late = sites->late_rounds = sites->late_drifts = 0;
  return verdict(sites, skipped);
}
