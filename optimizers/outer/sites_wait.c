/*
 * Implements the waits of a site's rank 0. Rank 0 receives messages for as long as waiting is
 * useful, and forwards them to the other ranks of its site one by one, so that all apply them in
 * the same order. In the steps between exchanges it moves messages that are under way, and does not
 * wait.
 */
#include <stdio.h>

#include "base/error.h"
#include "base/process.h"
#include "collectives/watch.h"
#include "optimizers/outer/sites.h"

/* The longest time, in seconds, that a test of one message waits while others are expected, too. */
#define SLICE_SECONDS 0.002

/* --- A message ---------------------------------------------------------------------------------*/

onebit_status_t ob_site_send(struct ob_batch *batch, unsigned char *data, size_t bytes, int peer,
                             int tag) {
  batch->receives = 0;
  batch->sends = 1;
  batch->send[0] = (struct ob_endpoint){data, bytes, peer};
  return ob_comm_begin(batch, tag);
}

onebit_status_t ob_site_receive(struct ob_batch *batch, unsigned char *data, size_t bytes, int peer,
                                int tag) {
  batch->sends = 0;
  batch->receives = 1;
  batch->receive[0] = (struct ob_endpoint){data, bytes, peer};
  return ob_comm_begin(batch, tag);
}

onebit_status_t ob_site_test(struct ob_batch *batch, double seconds, bool *complete) {
  onebit_status_t status = batch->comm->transport->test(batch, seconds);
  *complete = status == ONEBIT_OK;
  return status == ONEBIT_IN_PROGRESS ? ONEBIT_OK : status;
}

/* --- Messages from rank 0 to the other ranks of its site ---------------------------------------*/

static onebit_status_t send_to_site(struct ob_sites *sites, unsigned char *message, size_t bytes) {
  struct ob_batch *batch = sites->command_batch;
  if (sites->site->size == 1)
    return ONEBIT_OK;
  batch->receives = batch->sends = 0;
  for (int rank = 1; rank < sites->site->size; rank++)
    batch->send[batch->sends++] = (struct ob_endpoint){message, bytes, rank};
  OB_TRY(ob_comm_begin(batch, sites->command_tag));
  return ob_watch_batch(batch, "outer step: rank 0's message to the other ranks of its site");
}

static onebit_status_t send_end_command(struct ob_sites *sites, onebit_status_t status) {
  struct ob_site_header *header = (void *)sites->command;
  *header = (struct ob_site_header){.kind = OB_SITE_END, .status = status, .sites = sites->late};
  ob_site_seal(sites->command);
  return send_to_site(sites, sites->command, sizeof *header);
}

/* Follows rank 0's commands on the other ranks. */
static onebit_status_t follow_commands(struct ob_sites *sites) {
  const struct ob_site_header *header = (const void *)sites->command;
  const struct ob_batch *batch = sites->command_batch;
  for (;;) {
    OB_TRY(
        ob_site_receive(sites->command_batch, sites->command, sites->bytes, 0, sites->command_tag));
    OB_TRY(ob_watch_batch(sites->command_batch, "outer step: the message from rank 0 of the site"));
    if (batch->receive[0].bytes == sizeof *header && header->kind == OB_SITE_END)
      break;
    if (batch->receive[0].bytes < sizeof *header ||
        header->shard >= (uint32_t)sites->outer->options.fragments)
      return ob_error(ONEBIT_ERROR_MESSAGE,
                      "rank 0 of the site sent %zu bytes that are not a message of an outer step",
                      batch->receive[0].bytes);
    struct ob_shard *shard = sites->outer->fragments[header->shard].state;
    OB_TRY(ob_site_check(sites->command, batch->receive[0].bytes, OB_SITE_PIECE, shard));
    OB_TRY(ob_shard_apply(shard, sites, sites->command));
  }
  sites->late = header->sites;
  if (header->status == ONEBIT_OK)
    return ONEBIT_OK;
  sites->outer->stopped = true;
  return ob_error(ONEBIT_ERROR_PEER, "rank 0 of the site failed with %s: read its error message",
                  onebit_status_string((onebit_status_t)header->status));
}

/* --- Messages that rank 0 receives -------------------------------------------------------------*/

static onebit_status_t receive_result(struct ob_shard *shard, double seconds) {
  if (shard->here)
    return ONEBIT_OK;
  OB_TRY(ob_site_test(shard->receive, seconds, &shard->here));
  if (!shard->here)
    return ONEBIT_OK;
  shard->arrived = ob_seconds();
  const size_t bytes = shard->receive->receive[0].bytes;
  if (ob_site_check(shard->result, bytes, OB_SITE_PIECE, shard) == ONEBIT_OK)
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_MESSAGE, "from site %d: %.200s", ob_shard_server(shard),
                  onebit_last_error());
}

/* Advances a group's messages without waiting. `all`: the call is for the messages of all groups.
 * It then leaves out the messages of sites that have ended the synchronisation, since those sites
 * may be gone. */
static onebit_status_t move_group_messages(struct ob_site_group *group, bool all) {
  const struct ob_sites *sites = group->sites;
  const bool ended = all && ob_shard_of(group, sites->own)->ended;
  OB_TRY(ob_comm_health(sites->between));
  for (int s = 0; s < sites->count; s++) {
    if (s == sites->own)
      continue;
    if (!all || !ob_shard_of(group, s)->ended)
      OB_TRY(receive_result(ob_shard_of(group, s), 0));
    if (!ended && !(group->finals >> s & 1))
      OB_TRY(ob_sites_receive(group, s, 0));
  }
  return ob_sites_move_sends(group);
}

/* Closes one round, if it may be closed, after drifts were sent. */
static onebit_status_t serve_round(struct ob_site_group *group, bool all, bool late) {
  const bool done = all ? ob_shard_of(group, group->sites->own)->ended : group->closed;
  return done || !ob_sites_may_close(group, all, late) ? ONEBIT_OK : ob_sites_close(group);
}

static onebit_status_t apply_message(struct ob_shard *shard, unsigned char *message, size_t bytes) {
  struct ob_sites *sites = shard->group->sites;
  OB_TRY(send_to_site(sites, message, bytes));
  OB_TRY(ob_shard_apply(shard, sites, message));
  if (shard->newest < shard->round)
    shard->newest = shard->round;
  return ONEBIT_OK;
}

/* Applies the results that have arrived. With `all` these are results of a synchronisation;
 * messages that a site sends after the synchronisation are left for later. */
static onebit_status_t apply_results(struct ob_site_group *group, bool all) {
  struct ob_sites *sites = group->sites;
  struct ob_shard *own = ob_shard_of(group, sites->own);
  unsigned char *closed = ob_sites_find_closed(group);
  if (closed)
    OB_TRY(apply_message(own, closed, own->bytes));
  for (int s = 0; s < sites->count; s++) {
    struct ob_shard *shard = ob_shard_of(group, s);
    const struct ob_site_header *header = (const void *)shard->result;
    if (s == sites->own || !shard->here || (all && shard->ended))
      continue;
    shard->newest = header->newest;
    OB_TRY(apply_message(shard, shard->result, shard->receive->receive[0].bytes));
    shard->here = false;
    OB_TRY(ob_site_receive(shard->receive, shard->result, shard->bytes, s, group->result_tag));
  }
  return ONEBIT_OK;
}

/* --- The length of a wait ----------------------------------------------------------------------*/

/* The exchange of the group `only` or, if that is NULL, the end of a synchronisation of all
 * groups. */
struct exchange {
  struct ob_site_group *only;
  double start;
  struct ob_watch watch;
  uint64_t moved; /* the rounds applied so far, to notice progress */
};

static bool is_settled(const struct ob_shard *shard) {
  return !shard->in_flight && shard->round >= shard->newest;
}

/* Returns true if the shard's next round is still awaited. A server may itself wait as long as the
 * patience for other sites, so this wait lasts twice as long, and longer while messages arrive. */
static bool awaits_shard(const struct ob_sites *sites, const struct ob_shard *shard, double start,
                         double now) {
  if (is_settled(shard))
    return false;
  return (!(sites->late_rounds >> ob_shard_server(shard) & 1) &&
          now < start + 2 * sites->patience) ||
         (shard->arrived >= start && now < shard->arrived + sites->patience);
}

/* Returns true if a drift of that site is still needed. */
static bool awaits_drift(const struct ob_site_group *group, int site) {
  return !group->peers[site].here && !(group->sites->late_drifts >> site & 1) &&
         !(group->finals >> site & 1);
}

static bool server_waits(const struct ob_site_group *group, double start, double now) {
  if (group->closed || now >= start + group->sites->patience)
    return false;
  for (int s = 0; s < group->sites->count; s++)
    if (awaits_drift(group, s))
      return true;
  return false;
}

/* Returns true if some shard needs this site's final drift. */
static bool wants_drift(const struct ob_sites *sites) {
  for (size_t f = 0; f < sites->outer->options.fragments; f++) {
    const struct ob_shard *shard = sites->outer->fragments[f].state;
    if (!shard->in_flight && !shard->final)
      return true;
  }
  return false;
}

/* Returns true if all final drifts have arrived, or this site's final drifts are requested. */
static bool is_synchronised(const struct ob_sites *sites) {
  if (wants_drift(sites))
    return true;
  for (size_t g = 0; g < sites->outer->groups; g++)
    if (!ob_sites_are_flushed(&sites->groups[g]))
      return false;
  return ob_sites_have_ended(sites);
}

static bool must_wait_longer(const struct ob_sites *sites, const struct exchange *exchange) {
  const struct ob_site_group *group = exchange->only;
  const double now = ob_seconds();
  if (!group)
    return !is_synchronised(sites);
  if (server_waits(group, exchange->start, now))
    return true;
  for (int s = 0; s < sites->count; s++)
    if (s != sites->own && awaits_shard(sites, ob_shard_of(group, s), exchange->start, now))
      return true;
  return false;
}

static void sites_wait_describe(const void *waiter, struct ob_wait *wait) {
  const struct ob_sites *sites = waiter;
  snprintf(wait->what, sizeof wait->what, "outer step: synchronisation of %d sites", sites->count);
  for (size_t f = sites->outer->options.fragments; f-- > 0;) {
    const struct ob_shard *shard = sites->outer->fragments[f].state;
    if (!ob_shard_is_own(shard) && !shard->ended)
      wait->peer = ob_shard_server(shard);
  }
}

/* Waits for the first message that the group needs, or in a synchronisation for one to be sent, for
 * SLICE_SECONDS at most. *waited: there is such a message. */
static onebit_status_t wait_for_message(struct ob_site_group *group, bool all, bool *waited) {
  const bool ended = all && ob_shard_of(group, group->sites->own)->ended;
  *waited = true;
  for (int s = 0; s < group->sites->count; s++) {
    struct ob_shard *shard = ob_shard_of(group, s);
    const struct ob_site_peer *peer = &group->peers[s];
    bool complete;
    if (s == group->sites->own)
      continue;
    if (!shard->here && !(all ? shard->ended : is_settled(shard)))
      return receive_result(shard, SLICE_SECONDS);
    if (!ended && awaits_drift(group, s))
      return ob_sites_receive(group, s, SLICE_SECONDS);
    if (all && peer->sending)
      return ob_site_test(peer->send, SLICE_SECONDS, &complete);
  }
  *waited = false;
  return ONEBIT_OK;
}

static onebit_status_t wait_for_first(struct ob_sites *sites, struct ob_site_group *only) {
  bool waited = false;
  if (only)
    return wait_for_message(only, false, &waited);
  for (size_t g = 0; g < sites->outer->groups && !waited; g++)
    OB_TRY(wait_for_message(&sites->groups[g], true, &waited));
  return ONEBIT_OK;
}

/* Marks the sites that were late: rank 0 does not wait for them again. */
static void mark_late_sites(struct ob_site_group *group) {
  struct ob_sites *sites = group->sites;
  for (int s = 0; s < sites->count; s++) {
    const uint64_t bit = UINT64_C(1) << s;
    if (s == sites->own)
      continue;
    const struct ob_shard *shard = ob_shard_of(group, s);
    if (is_settled(shard) && shard->arrived > sites->late_since)
      sites->late_rounds &= ~bit;
    if (!is_settled(shard) && !(sites->late_rounds & bit)) {
      sites->late_rounds |= bit;
      sites->late_since = ob_seconds();
    }
    if (!group->closed && awaits_drift(group, s))
      sites->late_drifts |= bit;
  }
  sites->late = sites->late_rounds | sites->late_drifts;
}

static onebit_status_t watch_progress(struct ob_sites *sites, struct exchange *exchange) {
  uint64_t moved = 0;
  for (size_t f = 0; f < sites->outer->options.fragments; f++)
    moved += ((const struct ob_shard *)sites->outer->fragments[f].state)->round;
  if (moved != exchange->moved)
    exchange->watch = (struct ob_watch){0};
  exchange->moved = moved;
  return exchange->only
             ? ONEBIT_OK
             : ob_watch_look(&exchange->watch, sites->between, 0, sites_wait_describe, sites);
}

/* Moves the messages of all groups; results are applied only in groups that are waited for. */
static onebit_status_t move_all_groups(struct ob_sites *sites, const struct exchange *exchange) {
  const struct ob_site_group *only = exchange ? exchange->only : NULL;
  const bool all = exchange && !only;
  for (size_t g = 0; g < sites->outer->groups; g++) {
    struct ob_site_group *group = &sites->groups[g];
    const bool waited = all || group == only;
    if (!waited && !group->in_flight) {
      OB_TRY(ob_sites_move_sends(group));
      continue;
    }
    OB_TRY(move_group_messages(group, all));
    OB_TRY(serve_round(group, all, waited && ob_seconds() >= exchange->start + sites->patience));
    if (waited)
      OB_TRY(apply_results(group, all));
  }
  return ONEBIT_OK;
}

static onebit_status_t lead_exchange(struct ob_sites *sites, struct ob_site_group *only) {
  struct exchange exchange = {.only = only, .start = ob_seconds()};
  for (;;) {
    OB_TRY(move_all_groups(sites, &exchange));
    if (!must_wait_longer(sites, &exchange))
      break;
    OB_TRY(wait_for_first(sites, only));
    OB_TRY(watch_progress(sites, &exchange));
  }
  for (size_t g = 0; g < sites->outer->groups; g++) /* sends the rounds that were just closed */
    OB_TRY(ob_sites_move_sends(&sites->groups[g]));
  if (only)
    mark_late_sites(only);
  return ONEBIT_OK;
}

/* --- An exchange -------------------------------------------------------------------------------*/

/* Stops the outer step after a failure: the state of ranks may differ, so no further call is
 * possible. */
static onebit_status_t stop_outer_step(struct ob_sites *sites, onebit_comm_t comm,
                                       onebit_status_t status) {
  struct ob_outcome outcome = {.status = ONEBIT_OK};
  ob_outcome_add(&outcome, status);
  sites->outer->stopped = true;
  ob_comm_give_up(comm, outcome.error);
  return ob_outcome_status(&outcome);
}

void ob_sites_fail(struct ob_sites *sites, onebit_status_t status) {
  if (status == ONEBIT_OK || sites->failed.status != ONEBIT_OK)
    return;
  ob_outcome_add(&sites->failed, status);
  ob_comm_give_up(sites->between, sites->failed.error);
}

void ob_sites_move(struct ob_sites *sites) {
  if (sites->between && sites->failed.status == ONEBIT_OK)
    ob_sites_fail(sites, move_all_groups(sites, NULL));
}

/* Runs the exchange between sites. If it fails, all ranks of a site get the error. */
onebit_status_t ob_sites_exchange(struct ob_sites *sites, struct ob_site_group *only) {
  onebit_status_t status;
  if (!sites->between) {
    status = follow_commands(sites);
    return status == ONEBIT_OK || sites->outer->stopped
               ? status
               : stop_outer_step(sites, sites->site, status);
  }
  if (sites->failed.status == ONEBIT_OK)
    ob_sites_fail(sites, lead_exchange(sites, only));
  sites->outer->stopped = sites->failed.status != ONEBIT_OK;
  if (sites->site->size > 1) {
    status = send_end_command(sites, sites->failed.status);
    if (status != ONEBIT_OK)
      return stop_outer_step(sites, sites->site, status);
  }
  return ob_outcome_status(&sites->failed);
}
