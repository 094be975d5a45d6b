/*
 * Sends a site's own drifts and, on its rank 0, the rounds of the shards that the site serves. A
 * group's drifts are sent in one step of local_steps, and the resulting rounds are applied `delay`
 * steps later, by all ranks of the site together.
 */
#include <string.h>

#include "base/error.h"
#include "optimizers/outer/sites.h"

/* --- The shard of a group that a site serves, on its rank 0 ------------------------------------*/

#define MAX_WEIGHT 1e300 /* as in checkpoints */

static uint64_t site_bit(int site) { return UINT64_C(1) << site; }

static uint64_t all_site_bits(const struct ob_site_group *group) {
  return site_bit(group->sites->count - 1) | (site_bit(group->sites->count - 1) - 1);
}

static struct ob_shard *served_shard(const struct ob_site_group *group) {
  return ob_shard_of(group, group->sites->own);
}

/* --- Drifts that arrive ------------------------------------------------------------------------*/

onebit_status_t ob_sites_await(struct ob_site_group *group, int peer) {
  struct ob_site_peer *of = &group->peers[peer];
  return ob_site_receive(of->receive, of->drift, served_shard(group)->bytes, peer,
                         group->drift_tag);
}

static onebit_status_t check_drift(struct ob_site_group *group, int peer) {
  struct ob_site_peer *of = &group->peers[peer];
  const struct ob_site_header *header = (const void *)of->drift;
  OB_TRY(
      ob_site_check(of->drift, of->receive->receive[0].bytes, OB_SITE_DRIFT, served_shard(group)));
  if (header->number != of->number + 1)
    return ob_error(ONEBIT_ERROR_MESSAGE, "a drift has number %ju, expected %ju",
                    (uintmax_t)header->number, (uintmax_t)of->number + 1);
  if (!(ob_site_weight(of) >= 0 && ob_site_weight(of) <= MAX_WEIGHT))
    return ob_error(ONEBIT_ERROR_MESSAGE, "a drift has the weight %g, which is not valid",
                    ob_site_weight(of));
  return ob_shard_check_parts(served_shard(group), of->drift);
}

onebit_status_t ob_sites_receive(struct ob_site_group *group, int peer, double seconds) {
  struct ob_site_peer *of = &group->peers[peer];
  if (of->here)
    return ONEBIT_OK;
  OB_TRY(ob_site_test(of->receive, seconds, &of->here));
  if (!of->here)
    return ONEBIT_OK;
  if (check_drift(group, peer) != ONEBIT_OK)
    return ob_error(ONEBIT_ERROR_MESSAGE, "from site %d: %.200s", peer, onebit_last_error());
  of->number++;
  group->sites->late_drifts &= ~site_bit(peer);
  return ONEBIT_OK;
}

/* --- Rounds that are sent ----------------------------------------------------------------------*/

static unsigned char *round_message(const struct ob_site_group *group, uint64_t round) {
  return group->history + round % group->sites->depth * served_shard(group)->bytes;
}

static size_t snapshot_values(const struct ob_site_group *group) {
  const struct ob_fragment *fragment = served_shard(group)->fragment;
  return fragment->count * (fragment->momentum ? 2 : 1);
}

/* Copies the state that this site has applied: with a delay, one round less than the site has
 * closed. */
static void copy_snapshot(struct ob_site_group *group, int peer) {
  const struct ob_fragment *fragment = served_shard(group)->fragment;
  memcpy(group->snapshot, fragment->consensus, fragment->count * sizeof(float));
  if (fragment->momentum)
    memcpy(group->snapshot + fragment->count, fragment->momentum, fragment->count * sizeof(float));
  group->snapshot_round = served_shard(group)->round;
  group->snapshot_sum = ob_fragment_checksum(fragment);
  group->snapshot_of = peer;
  group->peers[peer].sent_values = 0;
}

static onebit_status_t sites_serve_send(struct ob_site_group *group, int peer, size_t bytes) {
  struct ob_site_peer *of = &group->peers[peer];
  ob_site_seal(of->out);
  of->sending = true;
  return ob_site_send(of->send, of->out, bytes, peer, group->result_tag);
}

static onebit_status_t send_piece(struct ob_site_group *group, int peer) {
  struct ob_site_peer *of = &group->peers[peer];
  struct ob_site_header *header = (void *)of->out;
  const size_t all = snapshot_values(group), left = all - of->sent_values;
  const size_t fit = (served_shard(group)->bytes - sizeof *header) / sizeof(float);
  const size_t count = left < fit ? left : fit;
  const bool included = of->included_in > of->sent && of->included_in <= group->snapshot_round;
  *header = (struct ob_site_header){.kind = OB_SITE_PIECE,
                                    .shard = (uint32_t)served_shard(group)->fragment->number,
                                    .number = group->snapshot_round,
                                    .newest = group->round,
                                    .sites = included ? site_bit(peer) : 0,
                                    .first = of->sent_values,
                                    .count = (uint32_t)count,
                                    .consensus = group->snapshot_sum};
  memcpy(header + 1, group->snapshot + of->sent_values, count * sizeof(float));
  of->sent_values += count;
  if (of->sent_values == all) {
    header->flags = OB_SITE_LAST;
    if (group->ended_in > of->sent && group->ended_in <= group->snapshot_round)
      header->flags |= OB_SITE_ENDED;
    of->sent = group->snapshot_round;
    group->snapshot_of = -1;
  }
  return sites_serve_send(group, peer, sizeof *header + count * sizeof(float));
}

static onebit_status_t send_round(struct ob_site_group *group, int peer) {
  struct ob_site_peer *of = &group->peers[peer];
  struct ob_site_header *header = (void *)of->out;
  memcpy(of->out, round_message(group, of->sent + 1), served_shard(group)->bytes);
  header->newest = group->round;
  of->sent++;
  return sites_serve_send(group, peer, served_shard(group)->bytes);
}

/* A site that is far behind waits until it is its turn to get the snapshot. */
static onebit_status_t send_next(struct ob_site_group *group, int peer) {
  const struct ob_site_peer *of = &group->peers[peer];
  if (of->sending || of->sent == group->round)
    return ONEBIT_OK;
  if (group->snapshot_of != peer && group->round - of->sent <= group->sites->depth)
    return send_round(group, peer);
  if (group->snapshot_of < 0)
    copy_snapshot(group, peer);
  return group->snapshot_of == peer ? send_piece(group, peer) : ONEBIT_OK;
}

/* Clears *sending if the message has left. */
static onebit_status_t test_send(struct ob_batch *batch, bool *sending) {
  bool sent = true;
  if (*sending)
    OB_TRY(ob_site_test(batch, 0, &sent));
  *sending = !sent;
  return ONEBIT_OK;
}

onebit_status_t ob_sites_move_sends(struct ob_site_group *group) {
  for (int s = 0; s < group->sites->count; s++) {
    struct ob_shard *shard = ob_shard_of(group, s);
    struct ob_site_peer *peer = &group->peers[s];
    if (s == group->sites->own)
      continue;
    OB_TRY(test_send(shard->send, &shard->sending));
    OB_TRY(test_send(peer->send, &peer->sending));
    OB_TRY(send_next(group, s));
  }
  return ONEBIT_OK;
}

bool ob_sites_are_flushed(const struct ob_site_group *group) {
  for (int peer = 0; peer < group->sites->count; peer++)
    if (peer != group->sites->own &&
        (group->peers[peer].sending || group->peers[peer].sent != group->round))
      return false;
  return true;
}

/* --- Rounds ------------------------------------------------------------------------------------*/

static uint64_t arrived_site_bits(const struct ob_site_group *group) {
  uint64_t here = 0;
  for (int s = 0; s < group->sites->count; s++)
    here |= group->peers[s].here ? site_bit(s) : 0;
  return here;
}

bool ob_sites_may_close(const struct ob_site_group *group, bool all, bool late) {
  const uint64_t here = arrived_site_bits(group) | group->finals;
  if (all || here == all_site_bits(group))
    return here == all_site_bits(group);
  if (!(here & site_bit(group->sites->own)) || __builtin_popcountll(here) < group->sites->quorum)
    return false;
  return late || (here | group->sites->late_drifts) == all_site_bits(group);
}

static uint64_t mean_drift_rounds(const struct ob_site_group *group) {
  uint64_t sum = 0, drifts = 0;
  for (int s = 0; s < group->sites->count; s++) {
    const struct ob_site_header *drift = (const void *)group->peers[s].drift;
    if (!group->peers[s].here || drift->flags & OB_SITE_EMPTY)
      continue;
    sum += drift->first;
    drifts++;
  }
  return drifts ? sum / drifts : 0;
}

/* Notes which drifts the round includes, and begins to receive the next ones. */
static onebit_status_t include_drifts(struct ob_site_group *group, struct ob_site_header *header) {
  for (int s = 0; s < group->sites->count; s++) {
    struct ob_site_peer *of = &group->peers[s];
    const struct ob_site_header *drift = (const void *)of->drift;
    if (!of->here)
      continue;
    header->sites |= site_bit(s);
    if (drift->flags & OB_SITE_FINAL)
      group->finals |= site_bit(s);
    of->included_in = header->number;
    of->here = false;
    if (s != group->sites->own)
      OB_TRY(ob_sites_await(group, s));
  }
  if (group->finals == all_site_bits(group)) {
    group->finals = 0;
    group->ended_in = header->number;
    header->flags |= OB_SITE_ENDED;
  }
  return ONEBIT_OK;
}

unsigned char *ob_sites_find_closed(const struct ob_site_group *group) {
  const uint64_t next = served_shard(group)->round + 1;
  return next <= group->round ? round_message(group, next) : NULL;
}

onebit_status_t ob_sites_close(struct ob_site_group *group) {
  struct ob_shard *shard = served_shard(group);
  unsigned char *round = round_message(group, group->round + 1);
  struct ob_site_header *header = (void *)round;
  *header = (struct ob_site_header){.kind = OB_SITE_ROUND,
                                    .shard = (uint32_t)served_shard(group)->fragment->number,
                                    .number = group->round + 1,
                                    .newest = group->round + 1,
                                    .first = mean_drift_rounds(group),
                                    .consensus = ob_fragment_checksum(shard->fragment)};
  group->sites->left_out += (arrived_site_bits(group) | group->finals) != all_site_bits(group);
  if (!ob_shard_reduce(shard, group, round))
    header->flags = OB_SITE_EMPTY;
  OB_TRY(include_drifts(group, header));
  ob_site_seal(round);
  group->round++;
  group->closed = true;
  return ONEBIT_OK;
}

/* --- When drifts are sent, and rounds applied --------------------------------------------------*/

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

/* Sets the number of local steps in a drift; a drift that is sent again counts as one round. */
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

static onebit_status_t report_skipped(struct ob_sites *sites, bool skipped) {
  sites->outer->skipped += skipped;
  if (!skipped)
    return ONEBIT_OK;
  return ob_error(ONEBIT_SKIPPED, "the drift of this site is not finite: the site's parameters are "
                                  "reset to the consensus");
}

/* Makes a group's step. If an exchange is still under way, after loading a checkpoint of another
 * round, it ends first. */
static onebit_status_t make_group_step(struct ob_site_group *group, bool *skipped) {
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
    OB_TRY(make_group_step(&sites->groups[g], &skipped));
  ob_sites_move(sites);
  return report_skipped(sites, skipped);
}

bool ob_sites_have_ended(const struct ob_sites *sites) {
  for (size_t f = 0; f < sites->outer->options.fragments; f++)
    if (!((const struct ob_shard *)sites->outer->fragments[f].state)->ended)
      return false;
  return true;
}

onebit_status_t ob_sites_synchronize(struct ob_sites *sites) {
  struct onebit_outer *outer = sites->outer;
  bool skipped = false;
  while (!ob_sites_have_ended(sites)) {
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
    ob_fragment_set_parameters(fragment, 1);
  }
  for (size_t g = 0; g < outer->groups; g++)
    sites->groups[g].in_flight = false;
  sites->late = sites->late_rounds = sites->late_drifts = 0;
  return report_skipped(sites, skipped);
}
