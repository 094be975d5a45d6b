/* The arithmetic of drifts and rounds among sites. */
#include <string.h>

#include "base/error.h"
#include "optimizers/outer/sites.h"

/* --- Changes of this site that are not in the consensus ----------------------------------------*/

static void sites_round_decode(struct ob_shard *shard, const unsigned char *message) {
  for (int p = 0; p < OB_SITE_PARTS; p++) {
    struct ob_site_part *part = &shard->part[p];
    struct ob_view in = ob_message_view((void *)(uintptr_t)(message + part->at), &part->shape);
    if (part->pieces && part->dense)
      ob_convert_blocks(&part->work, &in, &part->shape, (void *const *)part->means);
    else if (part->pieces)
      ob_store_blocks(&part->work, &in, &part->shape, (void *const *)part->means);
  }
}

/* Writes to sites->ahead the changes of this site that are not in the consensus: those at the time
 * when the parameters were last set, and the local steps since. Returns whether all changes can be
 * sent. */
static bool compute_ahead(struct ob_fragment *fragment, struct ob_sites *sites) {
  float *left = fragment->drift;
  memcpy(sites->ahead, left, fragment->count * sizeof *left);
  fragment->drift = sites->ahead;
  const bool finite = ob_fragment_drift(fragment);
  fragment->drift = left;
  for (size_t i = 0; i < fragment->count; i++)
    sites->ahead[i] += left[i];
  return finite;
}

/* Works as compute_ahead, but subtracts the drift that the round includes, as decoded from its
 * message: the rounding error of the message stays. */
static void compute_ahead_after_round(struct ob_shard *shard, struct ob_sites *sites,
                                      bool included) {
  const struct ob_site_header *sent = (const void *)shard->drift;
  compute_ahead(shard->fragment, sites);
  if (!included || sent->flags & OB_SITE_EMPTY)
    return;
  sites_round_decode(shard, shard->drift);
  for (size_t i = 0; i < shard->fragment->count; i++)
    sites->ahead[i] -= sites->mean[i];
}

/* Sets the parameters to the consensus minus these values. */
static void restart_from_consensus(struct ob_fragment *fragment, const float *ahead) {
  memcpy(fragment->drift, ahead, fragment->count * sizeof *ahead);
  fragment->keeps = true;
  ob_fragment_set_parameters(fragment, 1);
}

/* --- A drift, and the mean of drifts -----------------------------------------------------------*/

/* Clears the marks of values that were not finite. Returns whether all values were finite. */
static bool clear_not_finite(struct ob_shard *shard) {
  bool finite = true;
  for (int p = 0; p < OB_SITE_PARTS; p++)
    finite &= !atomic_exchange(&shard->part[p].work.not_finite, false);
  return finite;
}

/* Compresses sites->ahead. */
static void sites_round_compress(struct ob_shard *shard, struct ob_sites *sites) {
  for (int p = 0; p < OB_SITE_PARTS; p++) {
    struct ob_site_part *part = &shard->part[p];
    const struct ob_source source = {
        .inputs = (const void *const *)part->aheads, .factor = 1, .weight = 1};
    struct ob_view out = ob_message_view(shard->drift + part->at, &part->shape), none = {0};
    if (part->pieces && part->dense)
      ob_load_blocks(&part->work, &source, &part->shape, &out);
    else if (part->pieces)
      ob_compress_blocks(&part->work, &source, &sites->none, &part->shape, &none, &out, NULL);
    if (part->pieces)
      ob_shard_seal_part(part, shard->drift);
  }
}

/* Sets the parameters to the consensus minus the whole drift; until the message has arrived,
 * fragment->drift holds the values that are sent. */
static bool sites_round_find_drift(struct ob_shard *shard, struct ob_sites *sites) {
  struct ob_fragment *fragment = shard->fragment;
  if (fragment->stage == OB_FRAGMENT_SENDING) {
    memcpy(sites->ahead, fragment->drift, fragment->count * sizeof *sites->ahead);
    return fragment->finite;
  }
  fragment->finite = compute_ahead(fragment, sites);
  if (!fragment->finite)
    memset(sites->ahead, 0, fragment->count * sizeof *sites->ahead);
  restart_from_consensus(fragment, sites->ahead);
  return fragment->finite;
}

bool ob_shard_compress(struct ob_shard *shard, struct ob_sites *sites, unsigned flags) {
  struct ob_fragment *fragment = shard->fragment;
  struct ob_site_header *header = (void *)shard->drift;
  const double weight = sites->outer->options.weighted ? fragment->sent_weight : 1;
  const bool again = fragment->stage == OB_FRAGMENT_SENDING,
             finite = sites_round_find_drift(shard, sites);
  *header = (struct ob_site_header){.kind = OB_SITE_DRIFT,
                                    .flags = (uint16_t)flags,
                                    .shard = (uint32_t)fragment->number,
                                    .number = shard->number,
                                    .first = (shard->sent_steps << 16) /
                                             sites->outer->options.local_steps};
  memcpy(&header->newest, &weight, sizeof weight);
  if (finite)
    sites_round_compress(shard, sites);
  if (!finite || !clear_not_finite(shard))
    header->flags |= OB_SITE_EMPTY;
  if (sites->outer->options.no_error_feedback && !again && !(header->flags & OB_SITE_EMPTY)) {
    sites_round_decode(shard, shard->drift);
    restart_from_consensus(fragment, sites->mean);
  }
  ob_site_seal(shard->drift);
  return finite;
}

/* Returns the values that a peer adds to the mean: its drift; zeros if its final drift is included
 * already and other sites are not done; NULL if it does not count. */
static unsigned char *find_contribution(const struct ob_site_group *group, int peer) {
  const struct ob_site_peer *of = &group->peers[peer];
  const struct ob_site_header *header = (const void *)of->drift;
  if (of->here)
    return header->flags & OB_SITE_EMPTY ? NULL : of->drift;
  return group->finals >> peer & 1 ? group->zeros : NULL;
}

double ob_site_weight(const struct ob_site_peer *peer) {
  const struct ob_site_header *header = (const void *)peer->drift;
  double weight;
  memcpy(&weight, &header->newest, sizeof weight);
  return weight;
}

/* Multiplies a message by a factor; zeros stay zeros. */
static void multiply_message(const struct ob_site_part *part, unsigned char *message,
                             float factor) {
  const struct ob_view view = ob_message_view(message + part->at, &part->shape);
  float *values = part->dense ? view.values : view.scales;
  const size_t count = part->dense ? part->shape.words * OB_LANES : ob_message_scales(&part->shape);
  for (size_t i = 0; i < count; i++)
    values[i] *= factor;
}

/* Scales the drifts so that their mean is the weighted one; if all weights are zero, nothing is
 * scaled. */
static void apply_weights(struct ob_shard *shard, struct ob_site_group *group) {
  double sum = 0, streams = 0;
  for (int s = 0; s < group->sites->count; s++)
    if (find_contribution(group, s)) {
      sum += ob_site_weight(&group->peers[s]);
      streams++;
    }
  for (int s = 0; s < group->sites->count; s++) {
    const struct ob_site_peer *peer = &group->peers[s];
    const double factor = sum > 0 ? ob_site_weight(peer) * streams / sum : 0;
    for (int p = 0; p < OB_SITE_PARTS && find_contribution(group, s) == peer->drift; p++)
      if (shard->part[p].pieces)
        multiply_message(&shard->part[p], peer->drift, (float)factor);
  }
}

bool ob_shard_reduce(struct ob_shard *shard, struct ob_site_group *group, unsigned char *message) {
  const struct ob_sites *sites = group->sites;
  size_t streams = 0;
  if (sites->outer->options.weighted)
    apply_weights(shard, group);
  for (int p = 0; p < OB_SITE_PARTS; p++) {
    struct ob_site_part *part = &shard->part[p];
    struct ob_view out = ob_message_view(message + part->at, &part->shape);
    streams = 0;
    for (int s = 0; s < sites->count; s++)
      if (find_contribution(group, s))
        sites->views[streams++] =
            ob_message_view(find_contribution(group, s) + part->at, &part->shape);
    if (!part->pieces || streams == 0)
      continue;
    part->work.streams = streams;
    if (part->dense)
      ob_average_values(&part->work, sites->views, streams, 1, &part->shape, &out);
    else
      ob_reduce_blocks(&part->work, sites->views, &part->server, &part->shape, &out, NULL);
    ob_shard_seal_part(part, message);
  }
  return clear_not_finite(shard) && streams > 0;
}

/* --- Applied -----------------------------------------------------------------------------------*/

static onebit_status_t check_consensus(const struct ob_shard *shard, uint32_t wanted) {
  const uint32_t own = ob_fragment_checksum(shard->fragment);
  if (own == wanted)
    return ONEBIT_OK;
  return ob_error(
      ONEBIT_ERROR_MISMATCH,
      "the consensus (its checksum) differs between sites: here it is %08x, at site %d it is %08x",
      (unsigned)own, ob_shard_server(shard), (unsigned)wanted);
}

/* Handles a mean of drifts that cover more than one round, after an absence. Outer momentum assumes
 * drifts from the consensus of one round ago, so the excess over a round is applied without
 * momentum. */
static void average_excess(struct ob_fragment *fragment, float *mean, uint64_t rounds) {
  const float span = (float)rounds / 65536;
  if (fragment->outer->options.rule == ONEBIT_OUTER_MEAN || !(span > 1))
    return;
  const float part = 1 / span;
  for (size_t i = 0; i < fragment->count; i++) {
    fragment->consensus[i] -= (1 - part) * mean[i];
    mean[i] *= part;
  }
}

/* Commits the server's residual, which belongs to the rounds that it has applied. */
static void sites_round_commit_residual(struct ob_shard *shard, const struct ob_sites *sites) {
  struct ob_residual *residual = &shard->part[OB_SITE_COMPRESSED].server;
  if (!residual->memory || !shard->part[OB_SITE_COMPRESSED].pieces)
    return;
  ob_residual_commit(residual);
  if (sites->outer->options.no_error_feedback)
    ob_residual_forget(residual); /* never fails for a residual in host memory */
}

static void record_round(struct ob_shard *shard, const struct ob_site_header *header,
                         bool included) {
  shard->fragment->outer->exchanges += header->number - shard->round;
  shard->round = header->number;
  shard->in_flight &= !included;
  shard->ended |= (header->flags & OB_SITE_ENDED) != 0;
}

static onebit_status_t apply_round(struct ob_shard *shard, struct ob_sites *sites,
                                   const unsigned char *message) {
  struct ob_fragment *fragment = shard->fragment;
  const struct ob_site_header *header = (const void *)message;
  float *left = fragment->drift;
  const bool included = header->sites >> sites->own & 1;
  if (header->number != shard->round + 1)
    return ob_error(ONEBIT_ERROR_MESSAGE, "site %d sent round %ju, expected %ju",
                    ob_shard_server(shard), (uintmax_t)header->number, (uintmax_t)shard->round + 1);
  OB_TRY(check_consensus(shard, header->consensus));
  OB_TRY(ob_shard_check_parts(shard, message));
  compute_ahead_after_round(shard, sites, included);
  if (!(header->flags & OB_SITE_EMPTY)) {
    sites_round_decode(shard, message);
    average_excess(fragment, sites->mean, header->first);
    fragment->drift = sites->mean;
    ob_fragment_update(fragment);
    fragment->drift = left;
    sites_round_commit_residual(shard, sites);
  }
  ob_fragment_set_ahead(fragment, sites->ahead, 0, fragment->count);
  record_round(shard, header, included);
  return ONEBIT_OK;
}

static onebit_status_t apply_piece(struct ob_shard *shard, struct ob_sites *sites,
                                   const struct ob_site_header *header) {
  struct ob_fragment *fragment = shard->fragment;
  const float *values = (const void *)(header + 1);
  const bool included = header->sites >> sites->own & 1;
  const size_t end = header->first + header->count, count = fragment->count;
  const size_t x_end = end < count ? end : count;
  if (header->first < x_end) {
    const size_t x_count = x_end - header->first;
    compute_ahead_after_round(shard, sites, included);
    memcpy(fragment->consensus + header->first, values, x_count * sizeof *values);
    ob_fragment_set_ahead(fragment, sites->ahead, header->first, x_count);
  }
  if (end > count) {
    const size_t from = header->first > count ? header->first : count;
    memcpy(fragment->momentum + (from - count), values + (from - header->first),
           (end - from) * sizeof *values);
  }
  shard->torn = !(header->flags & OB_SITE_LAST);
  if (shard->torn)
    return ONEBIT_OK;
  record_round(shard, header, included);
  sites->caught_up++;
  return check_consensus(shard, header->consensus);
}

onebit_status_t ob_shard_apply(struct ob_shard *shard, struct ob_sites *sites,
                               const unsigned char *message) {
  const struct ob_site_header *header = (const void *)message;
  shard->fragment->stage = OB_FRAGMENT_IDLE; /* its drift changes */
  if (header->kind == OB_SITE_PIECE)
    return apply_piece(shard, sites, header);
  return apply_round(shard, sites, message);
}
