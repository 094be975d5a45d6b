/* Messages among sites, and the arithmetic of a round. */
#include <string.h>

#include "base/error.h"
#include "base/hash.h"
#include "base/memory.h"
#include "optimizers/outer/sites.h"

#define MAGIC 0x5342314fu /* the bytes "O1BS" */

/* A piece is at least so long, however few bytes a round has. */
#define MIN_BYTES 4096

/* --- A shard -----------------------------------------------------------------------------------*/

static bool is_dense(const struct ob_fragment *fragment, const struct ob_outer_piece *piece) {
  return fragment->outer->options.bits == ONEBIT_OUTER_DENSE || piece->uncompressed;
}

static onebit_status_t no_memory(const struct ob_sites *sites) {
  return ob_error(ONEBIT_ERROR_MEMORY, "no memory for an outer step of %zu parameters",
                  sites->outer->count);
}

static onebit_status_t list_pieces(struct ob_shard *shard, struct ob_sites *sites) {
  const struct ob_fragment *fragment = shard->fragment;
  for (int p = 0; p < OB_SITE_PARTS; p++) {
    struct ob_site_part *part = &shard->part[p];
    part->dense = p == OB_SITE_DENSE;
    part->counts = ob_outer_allocate(sites->outer, fragment->pieces, sizeof *part->counts);
    part->aheads = ob_outer_allocate(sites->outer, fragment->pieces, sizeof *part->aheads);
    part->means = ob_outer_allocate(sites->outer, fragment->pieces, sizeof *part->means);
    if (!part->counts || !part->aheads || !part->means)
      return no_memory(sites);
  }
  for (size_t k = 0; k < fragment->pieces; k++) {
    const struct ob_outer_piece *piece = &fragment->piece[k];
    struct ob_site_part *part = &shard->part[is_dense(fragment, piece)];
    part->counts[part->pieces] = piece->count;
    part->aheads[part->pieces] = sites->ahead + piece->at;
    part->means[part->pieces++] = sites->mean + piece->at;
  }
  return ONEBIT_OK;
}

/* No residual: zeros, and scratch, of as many words and blocks as the longest shard has. */
static onebit_status_t make_longer(struct ob_sites *sites, const struct ob_layout *layout) {
  struct ob_residual *none = &sites->none;
  sites->outer->own_bytes -= none->memory ? ob_residual_bytes(none) : 0;
  ob_residual_destroy(none);
  OB_TRY(ob_residual_create(none, layout, 0, layout->blocks, false, false, &ob_memory_host));
  sites->outer->own_bytes += ob_residual_bytes(none);
  return ONEBIT_OK;
}

static onebit_status_t create_part(struct ob_site_part *part, struct ob_sites *sites, bool is_own) {
  struct ob_plan_shape shape;
  const size_t streams = is_own ? (size_t)sites->count : 1;
  const bool dense = part->dense || sites->outer->options.bits == ONEBIT_OUTER_DENSE;
  OB_TRY(ob_outer_shape(sites->outer, dense, &shape));
  OB_TRY(ob_layout_create(&part->layout, shape.block, part->pieces, part->counts, NULL));
  part->shape = (struct ob_message_shape){.blocks = part->layout.blocks,
                                          .words = part->layout.words,
                                          .dense = part->dense,
                                          .width = part->dense ? 1 : (unsigned)shape.options.bits};
  part->work = (struct ob_work){.codec = sites->outer->codec,
                                .layout = &part->layout,
                                .rule = shape.options.scale,
                                .dtype = ONEBIT_FLOAT32,
                                .output_dtype = ONEBIT_FLOAT32,
                                .max_width = part->shape.width,
                                .threads = shape.options.threads};
  OB_TRY(ob_work_create(&part->work, streams, streams));
  if (part->dense)
    return ONEBIT_OK;
  if (part->layout.words > sites->none.words)
    OB_TRY(make_longer(sites, &part->layout));
  if (!is_own)
    return ONEBIT_OK;
  OB_TRY(ob_residual_create(&part->server, &part->layout, 0, part->layout.blocks, false, false,
                            &ob_memory_host));
  sites->outer->own_bytes += ob_residual_bytes(&part->server);
  return ONEBIT_OK;
}

onebit_status_t ob_shard_create(struct ob_shard *shard, struct ob_sites *sites) {
  const bool is_own = (int)shard->fragment->number == sites->own && sites->between;
  shard->bytes = sizeof(struct ob_site_header);
  OB_TRY(list_pieces(shard, sites));
  for (int p = 0; p < OB_SITE_PARTS; p++) {
    struct ob_site_part *part = &shard->part[p];
    OB_TRY(create_part(part, sites, is_own));
    part->at = shard->bytes;
    if (part->pieces)
      shard->bytes += (ob_message_bytes(&part->shape) + 7) / 8 * 8; /* headers have 64-bit fields */
  }
  shard->bytes = shard->bytes > MIN_BYTES ? shard->bytes : MIN_BYTES;
  return ONEBIT_OK;
}

void ob_shard_destroy(struct ob_shard *shard) {
  for (int p = 0; p < OB_SITE_PARTS; p++) {
    struct ob_site_part *part = &shard->part[p];
    ob_work_destroy(&part->work);
    ob_residual_destroy(&part->server);
    ob_layout_destroy(&part->layout);
    ob_release(part->counts);
    ob_release(part->aheads);
    ob_release(part->means);
  }
}

/* --- Messages ----------------------------------------------------------------------------------*/

static uint64_t check_of(const unsigned char *message) {
  const struct ob_site_header *header = (const void *)message;
  uint64_t hash = ob_hash(OB_HASH_START, header, offsetof(struct ob_site_header, check));
  if (header->kind == OB_SITE_PIECE)
    hash = ob_hash(hash, header + 1, header->count * sizeof(float));
  return hash;
}

void ob_site_seal(unsigned char *message) {
  struct ob_site_header *header = (void *)message;
  header->magic = MAGIC;
  header->check = check_of(message);
}

static bool is_sound(const unsigned char *message, size_t bytes) {
  const struct ob_site_header *header = (const void *)message;
  if (bytes < sizeof *header || header->magic != MAGIC ||
      (header->kind == OB_SITE_PIECE && header->count > (bytes - sizeof *header) / sizeof(float)))
    return false;
  return header->check == check_of(message);
}

onebit_status_t ob_site_check(const unsigned char *message, size_t bytes, enum ob_site_kind kind,
                              const struct ob_shard *shard) {
  const struct ob_site_header *header = (const void *)message;
  const struct ob_fragment *fragment = shard->fragment;
  if (!is_sound(message, bytes))
    return ob_error(ONEBIT_ERROR_MESSAGE, "%zu bytes are no message of the outer step", bytes);
  const bool allowed =
      header->kind == kind || (kind == OB_SITE_PIECE && header->kind == OB_SITE_ROUND);
  if (!allowed || header->shard != fragment->number)
    return ob_error(ONEBIT_ERROR_MESSAGE, "a message of kind %d about shard %u, not %d about %zu",
                    header->kind, (unsigned)header->shard, (int)kind, fragment->number);
  const size_t values = fragment->count * (fragment->momentum ? 2 : 1);
  if (header->kind == OB_SITE_PIECE &&
      (header->first > values || header->count > values - header->first))
    return ob_error(ONEBIT_ERROR_MESSAGE, "%u values from %ju on, of %zu", (unsigned)header->count,
                    (uintmax_t)header->first, values);
  if (header->kind != OB_SITE_PIECE && bytes != shard->bytes)
    return ob_error(ONEBIT_ERROR_MESSAGE, "%zu bytes, not %zu", bytes, shard->bytes);
  return ONEBIT_OK;
}

static struct ob_message_call call_of(const struct ob_site_part *part,
                                      const struct ob_site_header *header) {
  return (struct ob_message_call){.kind = header->kind == OB_SITE_DRIFT ? OB_MESSAGE_WORKER
                                                                        : OB_MESSAGE_SERVER,
                                  .sequence = (uint32_t)header->number,
                                  .elements = part->layout.elements};
}

static void seal_part(const struct ob_site_part *part, unsigned char *message) {
  const struct ob_message_call call = call_of(part, (const void *)message);
  const uint16_t flags = (uint16_t)ob_payload_flags(part->dense, false, part->shape.width);
  *(struct ob_header *)(void *)(message + part->at) = ob_header_make(&part->shape, &call, flags, 0);
  ob_message_seal(message + part->at, &part->shape, part->work.codec);
}

onebit_status_t ob_shard_check_parts(struct ob_shard *shard, const unsigned char *message) {
  const struct ob_site_header *header = (const void *)message;
  for (int p = 0; p < OB_SITE_PARTS && !(header->flags & OB_SITE_EMPTY); p++) {
    const struct ob_site_part *part = &shard->part[p];
    const struct ob_message_call call = call_of(part, header);
    if (part->pieces)
      OB_TRY(ob_message_check(message + part->at, ob_message_bytes(&part->shape), &part->shape,
                              &call, part->work.codec));
  }
  return ONEBIT_OK;
}

/* --- What of this site is not in the consensus -------------------------------------------------*/

static void decode(struct ob_shard *shard, const unsigned char *message) {
  for (int p = 0; p < OB_SITE_PARTS; p++) {
    struct ob_site_part *part = &shard->part[p];
    struct ob_view in = ob_message_view((void *)(uintptr_t)(message + part->at), &part->shape);
    if (part->pieces && part->dense)
      ob_convert_blocks(&part->work, &in, &part->shape, (void *const *)part->means);
    else if (part->pieces)
      ob_store_blocks(&part->work, &in, &part->shape, (void *const *)part->means);
  }
}

/* To sites->ahead: what it was when the parameters were set, and the local steps since. */
static bool find_ahead(struct ob_fragment *fragment, struct ob_sites *sites) {
  float *left = fragment->drift;
  memcpy(sites->ahead, left, fragment->count * sizeof *left);
  fragment->drift = sites->ahead;
  const bool finite = ob_fragment_drift(fragment);
  fragment->drift = left;
  for (size_t i = 0; i < fragment->count; i++)
    sites->ahead[i] += left[i];
  return finite;
}

/* The same, less what of it is in the round: what of the drift was left by compression stays. */
static void find_left(struct ob_shard *shard, struct ob_sites *sites, bool included) {
  const struct ob_site_header *sent = (const void *)shard->drift;
  find_ahead(shard->fragment, sites);
  if (!included || sent->flags & OB_SITE_EMPTY)
    return;
  decode(shard, shard->drift);
  for (size_t i = 0; i < shard->fragment->count; i++)
    sites->ahead[i] -= sites->mean[i];
}

/* The parameters become the consensus less these. */
static void restart(struct ob_fragment *fragment, const float *ahead) {
  memcpy(fragment->drift, ahead, fragment->count * sizeof *ahead);
  fragment->keeps = true;
  ob_fragment_set(fragment, 1);
}

/* --- A drift, and the mean of drifts -----------------------------------------------------------*/

static bool took_all(struct ob_shard *shard) {
  bool finite = true;
  for (int p = 0; p < OB_SITE_PARTS; p++)
    finite &= !atomic_exchange(&shard->part[p].work.not_finite, false);
  return finite;
}

/* From sites->ahead. */
static void compress(struct ob_shard *shard, struct ob_sites *sites) {
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
      seal_part(part, shard->drift);
  }
}

/* Parameters that were set without what is left are set with it, before it is sent. */
bool ob_shard_compress(struct ob_shard *shard, struct ob_sites *sites, unsigned flags) {
  struct ob_fragment *fragment = shard->fragment;
  struct ob_site_header *header = (void *)shard->drift;
  const double weight = sites->outer->options.weighted ? fragment->sent_weight : 1;
  const bool finite = find_ahead(fragment, sites);
  *header = (struct ob_site_header){.kind = OB_SITE_DRIFT,
                                    .flags = (uint16_t)flags,
                                    .shard = (uint32_t)fragment->number,
                                    .number = shard->number,
                                    .first = (shard->sent_steps << 16) /
                                             sites->outer->options.local_steps};
  memcpy(&header->newest, &weight, sizeof weight);
  if (!finite)
    memset(sites->ahead, 0, fragment->count * sizeof *sites->ahead);
  if (!finite || !fragment->keeps)
    restart(fragment, sites->ahead);
  if (finite)
    compress(shard, sites);
  if (!finite || !took_all(shard))
    header->flags |= OB_SITE_EMPTY;
  if (sites->outer->options.no_error_feedback && !(header->flags & OB_SITE_EMPTY)) {
    decode(shard, shard->drift);
    restart(fragment, sites->mean);
  }
  ob_site_seal(shard->drift);
  return finite;
}

/* What a peer adds to the mean: its drift; nothing, where its final one is in and the others go on;
 * NULL where it does not count. */
static unsigned char *added_by(const struct ob_sites *sites, int peer) {
  const struct ob_site_peer *of = &sites->peers[peer];
  const struct ob_site_header *header = (const void *)of->drift;
  if (of->here)
    return header->flags & OB_SITE_EMPTY ? NULL : of->drift;
  return sites->finals >> peer & 1 ? sites->zeros : NULL;
}

double ob_site_weight(const struct ob_site_peer *peer) {
  const struct ob_site_header *header = (const void *)peer->drift;
  double weight;
  memcpy(&weight, &header->newest, sizeof weight);
  return weight;
}

/* A message times a factor: of zeros it stays. */
static void multiply(const struct ob_site_part *part, unsigned char *message, float factor) {
  const struct ob_view view = ob_message_view(message + part->at, &part->shape);
  float *values = part->dense ? view.values : view.scales;
  const size_t count = part->dense ? part->shape.words * OB_LANES : ob_message_scales(&part->shape);
  for (size_t i = 0; i < count; i++)
    values[i] *= factor;
}

/* So that their mean is that with weights; where these are all zero, nothing. */
static void apply_weights(struct ob_shard *shard, struct ob_sites *sites) {
  double sum = 0, streams = 0;
  for (int s = 0; s < sites->count; s++)
    if (added_by(sites, s)) {
      sum += ob_site_weight(&sites->peers[s]);
      streams++;
    }
  for (int s = 0; s < sites->count; s++) {
    const struct ob_site_peer *peer = &sites->peers[s];
    const double factor = sum > 0 ? ob_site_weight(peer) * streams / sum : 0;
    for (int p = 0; p < OB_SITE_PARTS && added_by(sites, s) == peer->drift; p++)
      if (shard->part[p].pieces)
        multiply(&shard->part[p], peer->drift, (float)factor);
  }
}

bool ob_shard_reduce(struct ob_shard *shard, struct ob_sites *sites, unsigned char *message) {
  size_t streams = 0;
  if (sites->outer->options.weighted)
    apply_weights(shard, sites);
  for (int p = 0; p < OB_SITE_PARTS; p++) {
    struct ob_site_part *part = &shard->part[p];
    struct ob_view out = ob_message_view(message + part->at, &part->shape);
    streams = 0;
    for (int s = 0; s < sites->count; s++)
      if (added_by(sites, s))
        sites->views[streams++] = ob_message_view(added_by(sites, s) + part->at, &part->shape);
    if (!part->pieces || streams == 0)
      continue;
    part->work.streams = streams;
    if (part->dense)
      ob_mean_blocks(&part->work, sites->views, streams, 1, &part->shape, &out);
    else
      ob_reduce_blocks(&part->work, sites->views, &part->server, &part->shape, &out, NULL);
    seal_part(part, message);
  }
  if (!took_all(shard) || streams == 0)
    return false;
  struct ob_residual *residual = &shard->part[OB_SITE_COMPRESSED].server;
  if (shard->part[OB_SITE_COMPRESSED].pieces)
    ob_residual_commit(residual);
  if (shard->part[OB_SITE_COMPRESSED].pieces && sites->outer->options.no_error_feedback)
    ob_residual_forget(residual); /* which cannot fail in memory of the host */
  return true;
}

/* --- Applied -----------------------------------------------------------------------------------*/

static onebit_status_t check_consensus(const struct ob_fragment *fragment, uint32_t wanted) {
  const uint32_t own = ob_fragment_checksum(fragment);
  if (own == wanted)
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_MISMATCH,
                  "the consensus (its checksum) differs between sites: here it is %08x, at site "
                  "%zu %08x",
                  (unsigned)own, fragment->number, (unsigned)wanted);
}

/* A mean of drifts that are longer than a round, after an absence. Outer momentum is made for
 * drifts that answer to the consensus of a round ago: what exceeds a round is averaged, without
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

static void note_round(struct ob_shard *shard, const struct ob_site_header *header, bool included) {
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
    return ob_error(ONEBIT_ERROR_MESSAGE, "site %zu sent round %ju, expected %ju", fragment->number,
                    (uintmax_t)header->number, (uintmax_t)shard->round + 1);
  OB_TRY(check_consensus(fragment, header->consensus));
  OB_TRY(ob_shard_check_parts(shard, message));
  find_left(shard, sites, included);
  if (!(header->flags & OB_SITE_EMPTY)) {
    decode(shard, message);
    average_excess(fragment, sites->mean, header->first);
    fragment->drift = sites->mean;
    ob_fragment_update(fragment);
    fragment->drift = left;
  }
  ob_fragment_set_ahead(fragment, sites->ahead, 0, fragment->count);
  note_round(shard, header, included);
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
    find_left(shard, sites, included);
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
  note_round(shard, header, included);
  sites->caught_up++;
  return check_consensus(fragment, header->consensus);
}

onebit_status_t ob_shard_apply(struct ob_shard *shard, struct ob_sites *sites,
                               const unsigned char *message) {
  const struct ob_site_header *header = (const void *)message;
  if (header->kind == OB_SITE_PIECE)
    return apply_piece(shard, sites, header);
  return apply_round(shard, sites, message);
}
