/* Creates a shard, and checks and seals its messages between sites. */

#include "base/error.h"
#include "base/hash.h"
#include "base/memory.h"
#include "optimizers/outer/sites.h"

#define MAGIC 0x5342314fu /* the bytes "O1BS" */

/* The shortest buffer of a message: a piece of a snapshot fills the buffer, even if rounds are
 * shorter. */
#define MIN_BYTES 4096

/* --- A shard -----------------------------------------------------------------------------------*/

static onebit_status_t list_pieces(struct ob_shard *shard, struct ob_sites *sites) {
  const struct ob_fragment *fragment = shard->fragment;
  for (int p = 0; p < OB_SITE_PARTS; p++) {
    struct ob_site_part *part = &shard->part[p];
    part->dense = p == OB_SITE_DENSE;
    part->counts = ob_outer_allocate(sites->outer, fragment->pieces, sizeof *part->counts);
    part->aheads = ob_outer_allocate(sites->outer, fragment->pieces, sizeof *part->aheads);
    part->means = ob_outer_allocate(sites->outer, fragment->pieces, sizeof *part->means);
    if (!part->counts || !part->aheads || !part->means)
      return ob_outer_no_memory(sites->outer);
  }
  for (size_t k = 0; k < fragment->pieces; k++) {
    const struct ob_outer_piece *piece = &fragment->piece[k];
    struct ob_site_part *part = &shard->part[ob_outer_is_dense(sites->outer, piece)];
    part->counts[part->pieces] = piece->count;
    part->aheads[part->pieces] = sites->ahead + piece->at;
    part->means[part->pieces++] = sites->mean + piece->at;
  }
  return ONEBIT_OK;
}

/* Makes a residual of zeros, and scratch, with as many words and blocks as the longest shard
 * has. */
static onebit_status_t grow_zero_residual(struct ob_sites *sites, const struct ob_layout *layout) {
  struct ob_residual *none = &sites->none;
  sites->outer->own_bytes -= none->memory ? ob_residual_bytes(none) : 0;
  ob_residual_destroy(none);
  OB_TRY(ob_residual_create(none, layout, 0, layout->blocks, false, false, 2, &ob_memory_host));
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
    OB_TRY(grow_zero_residual(sites, &part->layout));
  if (!is_own)
    return ONEBIT_OK;
  OB_TRY(ob_residual_create(&part->server, &part->layout, 0, part->layout.blocks, false, false, 2,
                            &ob_memory_host));
  sites->outer->own_bytes += ob_residual_bytes(&part->server);
  return ONEBIT_OK;
}

onebit_status_t ob_shard_create(struct ob_shard *shard, struct ob_sites *sites) {
  const bool is_own = ob_shard_is_own(shard) && sites->between;
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

static uint64_t hash_message(const unsigned char *message) {
  const struct ob_site_header *header = (const void *)message;
  uint64_t hash = ob_hash(OB_HASH_START, header, offsetof(struct ob_site_header, check));
  if (header->kind == OB_SITE_PIECE)
    hash = ob_hash(hash, header + 1, header->count * sizeof(float));
  return hash;
}

void ob_site_seal(unsigned char *message) {
  struct ob_site_header *header = (void *)message;
  header->magic = MAGIC;
  header->check = hash_message(message);
}

static bool is_sound_message(const unsigned char *message, size_t bytes) {
  const struct ob_site_header *header = (const void *)message;
  if (bytes < sizeof *header || header->magic != MAGIC ||
      (header->kind == OB_SITE_PIECE && header->count > (bytes - sizeof *header) / sizeof(float)))
    return false;
  return header->check == hash_message(message);
}

onebit_status_t ob_site_check(const unsigned char *message, size_t bytes, enum ob_site_kind kind,
                              const struct ob_shard *shard) {
  const struct ob_site_header *header = (const void *)message;
  const struct ob_fragment *fragment = shard->fragment;
  if (!is_sound_message(message, bytes))
    return ob_error(ONEBIT_ERROR_MESSAGE,
                    "the %zu bytes received are not a message of an outer step", bytes);
  const bool allowed =
      header->kind == kind || (kind == OB_SITE_PIECE && header->kind == OB_SITE_ROUND);
  if (!allowed || header->shard != fragment->number)
    return ob_error(
        ONEBIT_ERROR_MESSAGE,
        "received a message of kind %d about shard %u, expected kind %d about shard %zu",
        header->kind, (unsigned)header->shard, (int)kind, fragment->number);
  const size_t values = fragment->count * (fragment->momentum ? 2 : 1);
  if (header->kind == OB_SITE_PIECE &&
      (header->first > values || header->count > values - header->first))
    return ob_error(
        ONEBIT_ERROR_MESSAGE,
        "the message has %u values from index %ju on, but the shard has only %zu values",
        (unsigned)header->count, (uintmax_t)header->first, values);
  if (header->kind != OB_SITE_PIECE && bytes != shard->bytes)
    return ob_error(ONEBIT_ERROR_MESSAGE, "the message has %zu bytes, expected %zu", bytes,
                    shard->bytes);
  return ONEBIT_OK;
}

static struct ob_message_call make_message_call(const struct ob_site_part *part,
                                                const struct ob_site_header *header) {
  return (struct ob_message_call){.kind = header->kind == OB_SITE_DRIFT ? OB_MESSAGE_WORKER
                                                                        : OB_MESSAGE_SERVER,
                                  .sequence = (uint32_t)header->number,
                                  .elements = part->layout.elements};
}

void ob_shard_seal_part(const struct ob_site_part *part, unsigned char *message) {
  const struct ob_message_call call = make_message_call(part, (const void *)message);
  const uint16_t flags = (uint16_t)ob_payload_flags(part->dense, false, part->shape.width);
  *(struct ob_header *)(void *)(message + part->at) = ob_header_make(&part->shape, &call, flags, 0);
  ob_message_seal(message + part->at, &part->shape, part->work.codec);
}

onebit_status_t ob_shard_check_parts(struct ob_shard *shard, const unsigned char *message) {
  const struct ob_site_header *header = (const void *)message;
  for (int p = 0; p < OB_SITE_PARTS && !(header->flags & OB_SITE_EMPTY); p++) {
    const struct ob_site_part *part = &shard->part[p];
    const struct ob_message_call call = make_message_call(part, header);
    if (part->pieces)
      OB_TRY(ob_message_check(message + part->at, ob_message_bytes(&part->shape), &part->shape,
                              &call, part->work.codec));
  }
  return ONEBIT_OK;
}
