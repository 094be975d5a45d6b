/* The shard that a site serves. On rank 0 of the site. */
#include <string.h>

#include "base/error.h"
#include "optimizers/outer/sites.h"

#define MAX_WEIGHT 1e300 /* as in checkpoints */

static uint64_t bit(int site) { return UINT64_C(1) << site; }

static uint64_t all_of(const struct ob_sites *sites) {
  return bit(sites->count - 1) | (bit(sites->count - 1) - 1);
}

static struct ob_shard *own_shard(const struct ob_sites *sites) {
  return ob_shard_of(sites, sites->own);
}

/* --- Drifts that come --------------------------------------------------------------------------*/

onebit_status_t ob_sites_await(struct ob_sites *sites, int peer) {
  struct ob_site_peer *of = &sites->peers[peer];
  return ob_site_receive(of->receive, of->drift, own_shard(sites)->bytes, peer, sites->drift_tag);
}

static onebit_status_t check_drift(struct ob_sites *sites, int peer) {
  struct ob_site_peer *of = &sites->peers[peer];
  const struct ob_site_header *header = (const void *)of->drift;
  OB_TRY(ob_site_check(of->drift, of->receive->receive[0].bytes, OB_SITE_DRIFT, own_shard(sites)));
  if (header->number != of->number + 1)
    return ob_error(ONEBIT_ERROR_MESSAGE, "drift %ju, expected %ju", (uintmax_t)header->number,
                    (uintmax_t)of->number + 1);
  if (!(ob_site_weight(of) >= 0 && ob_site_weight(of) <= MAX_WEIGHT))
    return ob_error(ONEBIT_ERROR_MESSAGE, "a drift's weight is %g", ob_site_weight(of));
  return ob_shard_check_parts(own_shard(sites), of->drift);
}

onebit_status_t ob_sites_receive(struct ob_sites *sites, int peer, double seconds) {
  struct ob_site_peer *of = &sites->peers[peer];
  if (of->here)
    return ONEBIT_OK;
  OB_TRY(ob_site_test(of->receive, seconds, &of->here));
  if (!of->here)
    return ONEBIT_OK;
  if (check_drift(sites, peer) != ONEBIT_OK)
    return ob_error(ONEBIT_ERROR_MESSAGE, "from site %d: %.200s", peer, onebit_last_error());
  of->number++;
  of->late = false;
  return ONEBIT_OK;
}

/* --- Rounds that go ----------------------------------------------------------------------------*/

static unsigned char *round_at(const struct ob_sites *sites, uint64_t round) {
  return sites->history + round % sites->depth * own_shard(sites)->bytes;
}

static size_t snapshot_values(const struct ob_sites *sites) {
  const struct ob_fragment *fragment = own_shard(sites)->fragment;
  return fragment->count * (fragment->momentum ? 2 : 1);
}

static void copy_snapshot(struct ob_sites *sites, int peer) {
  const struct ob_fragment *fragment = own_shard(sites)->fragment;
  memcpy(sites->snapshot, fragment->consensus, fragment->count * sizeof(float));
  if (fragment->momentum)
    memcpy(sites->snapshot + fragment->count, fragment->momentum, fragment->count * sizeof(float));
  sites->snapshot_round = sites->round;
  sites->snapshot_sum = ob_fragment_checksum(fragment);
  sites->snapshot_of = peer;
  sites->peers[peer].sent_values = 0;
}

static onebit_status_t send(struct ob_sites *sites, int peer, size_t bytes) {
  struct ob_site_peer *of = &sites->peers[peer];
  ob_site_seal(of->out);
  of->sending = true;
  return ob_site_send(of->send, of->out, bytes, peer, sites->result_tag);
}

static onebit_status_t send_piece(struct ob_sites *sites, int peer) {
  struct ob_site_peer *of = &sites->peers[peer];
  struct ob_site_header *header = (void *)of->out;
  const size_t all = snapshot_values(sites), left = all - of->sent_values;
  const size_t fit = (own_shard(sites)->bytes - sizeof *header) / sizeof(float);
  const size_t count = left < fit ? left : fit;
  const bool included = of->included_in > of->sent && of->included_in <= sites->snapshot_round;
  *header = (struct ob_site_header){.kind = OB_SITE_PIECE,
                                    .shard = (uint32_t)sites->own,
                                    .number = sites->snapshot_round,
                                    .newest = sites->round,
                                    .sites = included ? bit(peer) : 0,
                                    .first = of->sent_values,
                                    .count = (uint32_t)count,
                                    .consensus = sites->snapshot_sum};
  memcpy(header + 1, sites->snapshot + of->sent_values, count * sizeof(float));
  of->sent_values += count;
  if (of->sent_values == all) {
    header->flags = OB_SITE_LAST;
    if (sites->ended_in > of->sent && sites->ended_in <= sites->snapshot_round)
      header->flags |= OB_SITE_ENDED;
    of->sent = sites->snapshot_round;
    sites->snapshot_of = -1;
  }
  return send(sites, peer, sizeof *header + count * sizeof(float));
}

static onebit_status_t send_round(struct ob_sites *sites, int peer) {
  struct ob_site_peer *of = &sites->peers[peer];
  struct ob_site_header *header = (void *)of->out;
  memcpy(of->out, round_at(sites, of->sent + 1), own_shard(sites)->bytes);
  header->newest = sites->round;
  of->sent++;
  return send(sites, peer, own_shard(sites)->bytes);
}

/* A site that is far behind waits for its turn at the snapshot. */
static onebit_status_t send_next(struct ob_sites *sites, int peer) {
  const struct ob_site_peer *of = &sites->peers[peer];
  if (of->sending || of->sent == sites->round)
    return ONEBIT_OK;
  if (sites->snapshot_of != peer && sites->round - of->sent <= sites->depth)
    return send_round(sites, peer);
  if (sites->snapshot_of < 0)
    copy_snapshot(sites, peer);
  return sites->snapshot_of == peer ? send_piece(sites, peer) : ONEBIT_OK;
}

onebit_status_t ob_sites_move_sends(struct ob_sites *sites) {
  for (int peer = 0; peer < sites->count; peer++) {
    struct ob_site_peer *of = &sites->peers[peer];
    bool sent = true;
    if (peer == sites->own)
      continue;
    if (of->sending)
      OB_TRY(ob_site_test(of->send, 0, &sent));
    of->sending = !sent;
    OB_TRY(send_next(sites, peer));
  }
  return ONEBIT_OK;
}

bool ob_sites_flushed(const struct ob_sites *sites) {
  for (int peer = 0; peer < sites->count; peer++)
    if (peer != sites->own &&
        (sites->peers[peer].sending || sites->peers[peer].sent != sites->round))
      return false;
  return true;
}

/* --- Rounds ------------------------------------------------------------------------------------*/

static uint64_t sites_here(const struct ob_sites *sites) {
  uint64_t here = 0;
  for (int s = 0; s < sites->count; s++)
    here |= sites->peers[s].here ? bit(s) : 0;
  return here;
}

static uint64_t sites_late(const struct ob_sites *sites) {
  uint64_t late = 0;
  for (int s = 0; s < sites->count; s++)
    late |= sites->peers[s].late ? bit(s) : 0;
  return late;
}

bool ob_sites_may_close(const struct ob_sites *sites, bool all, bool late) {
  const uint64_t here = sites_here(sites) | sites->finals;
  if (all || here == all_of(sites))
    return here == all_of(sites);
  if (!(here & bit(sites->own)) || __builtin_popcountll(here) < sites->quorum)
    return false;
  return late || (here | sites_late(sites)) == all_of(sites);
}

static uint64_t mean_rounds(const struct ob_sites *sites) {
  uint64_t sum = 0, drifts = 0;
  for (int s = 0; s < sites->count; s++) {
    const struct ob_site_header *drift = (const void *)sites->peers[s].drift;
    if (!sites->peers[s].here || drift->flags & OB_SITE_EMPTY)
      continue;
    sum += drift->first;
    drifts++;
  }
  return drifts ? sum / drifts : 0;
}

/* What the round has of the sites' drifts, which are used up. */
static onebit_status_t use_drifts(struct ob_sites *sites, struct ob_site_header *header) {
  for (int s = 0; s < sites->count; s++) {
    struct ob_site_peer *of = &sites->peers[s];
    const struct ob_site_header *drift = (const void *)of->drift;
    if (!of->here)
      continue;
    header->sites |= bit(s);
    if (drift->flags & OB_SITE_FINAL)
      sites->finals |= bit(s);
    of->included_in = header->number;
    of->here = false;
    if (s != sites->own)
      OB_TRY(ob_sites_await(sites, s));
  }
  if (sites->finals == all_of(sites)) {
    sites->finals = 0;
    sites->ended_in = header->number;
    header->flags |= OB_SITE_ENDED;
  }
  return ONEBIT_OK;
}

onebit_status_t ob_sites_close(struct ob_sites *sites, unsigned char **message) {
  struct ob_shard *shard = own_shard(sites);
  unsigned char *round = round_at(sites, sites->round + 1);
  struct ob_site_header *header = (void *)round;
  *header = (struct ob_site_header){.kind = OB_SITE_ROUND,
                                    .shard = (uint32_t)sites->own,
                                    .number = sites->round + 1,
                                    .newest = sites->round + 1,
                                    .first = mean_rounds(sites),
                                    .consensus = ob_fragment_checksum(shard->fragment)};
  sites->left_out += (sites_here(sites) | sites->finals) != all_of(sites);
  if (!ob_shard_reduce(shard, sites, round))
    header->flags = OB_SITE_EMPTY;
  OB_TRY(use_drifts(sites, header));
  ob_site_seal(round);
  sites->round++;
  *message = round;
  return ONEBIT_OK;
}
