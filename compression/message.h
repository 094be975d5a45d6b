/*
 * The format of messages, as docs/wire-format.md specifies it.
 *
 *   header (40 bytes) | float32 scales, one per block or one for all | words of sign bits
 *   header (40 bytes) | float32 or 16-bit values, in a dense message
 *
 * A message has a range of blocks of a layout. Sender and receiver both know the layout; the header
 * has the numbers from which the receiver notices that the layouts differ.
 *
 * A layout defines the position of each element in a message and in the residuals.
 */
#ifndef OB_COMPRESSION_MESSAGE_H
#define OB_COMPRESSION_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "compression/numerics.h"
#include "onebit/status.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "messages are little-endian and are used in place: this processor is not"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* --- The layout of elements in blocks and words ------------------------------------------------*/

/*
 * A layout is a list of pieces (tensors, or the segments of a padded buffer). Each piece is cut
 * into blocks from its start; a block never spans two pieces. In the residuals and in messages each
 * block occupies whole words of 32 elements, so element i of a block lies at 32 * word + i. Only
 * the last block of a piece can be short.
 */
struct ob_piece {
  size_t count; /* elements */
  /* Elements in the caller's buffer. The other elements are padding, which is compressed as
   * zeros. */
  size_t valid;
  size_t first_block, first_word;
};

struct ob_layout {
  size_t block; /* elements of a full block, a multiple of 32 */
  size_t pieces;
  struct ob_piece *piece; /* pieces + 1 entries; the last one marks the end of the last piece */
  size_t blocks, words, elements;
};

/* A block, as ob_layout_block returns it. */
struct ob_block {
  size_t piece, offset; /* offset of its first element within the piece */
  size_t count, valid;
  size_t word;
};

/* Creates the layout of pieces of counts[k] elements. Of these, valid[k] elements are not padding;
 * valid NULL: all. After ONEBIT_ERROR_MEMORY the layout is safe to destroy. */
onebit_status_t ob_layout_create(struct ob_layout *layout, size_t block, size_t pieces,
                                 const size_t *counts, const size_t *valid);
void ob_layout_destroy(struct ob_layout *layout);

/* Returns the last nonempty piece that begins at or before this block. */
OB_INLINE size_t ob_layout_piece(const struct ob_layout *layout, size_t block) {
  size_t low = 0, high = layout->pieces;
  while (high - low > 1) {
    size_t middle = low + (high - low) / 2;
    if (layout->piece[middle].first_block <= block)
      low = middle;
    else
      high = middle;
  }
  return low;
}

/* Returns block number `block`. *piece is the piece where the search starts, and is updated: pass 0
 * at first, and the updated value for the next block. The function is inline because device code
 * calls it too. */
OB_INLINE struct ob_block ob_layout_block(const struct ob_layout *layout, size_t block,
                                          size_t *piece) {
  const struct ob_piece *at = &layout->piece[*piece];
  if (block < at[0].first_block || block >= at[1].first_block) {
    *piece = ob_layout_piece(layout, block);
    at = &layout->piece[*piece];
  }
  struct ob_block found;
  found.piece = *piece;
  found.offset = (block - at->first_block) * layout->block;
  size_t left = at->count - found.offset;
  size_t real = at->valid > found.offset ? at->valid - found.offset : 0;
  found.count = left < layout->block ? left : layout->block;
  found.valid = real < found.count ? real : found.count;
  found.word = at->first_word + found.offset / OB_LANES;
  return found;
}

struct ob_interval {
  size_t first, end;
};

/* Returns the words of a piece that lie in the interval `among`. */
OB_INLINE struct ob_interval ob_piece_interval(const struct ob_piece *piece,
                                               const struct ob_interval *among) {
  struct ob_interval found;
  found.first = piece[0].first_word > among->first ? piece[0].first_word : among->first;
  found.end = piece[1].first_word < among->end ? piece[1].first_word : among->end;
  return found;
}

/* Returns the number of a block's first word; if block == blocks, the number of words. */
OB_INLINE size_t ob_layout_word(const struct ob_layout *layout, size_t block) {
  if (block >= layout->blocks)
    return layout->words;
  size_t piece = 0;
  return ob_layout_block(layout, block, &piece).word;
}

/* Returns the number of elements before a block. */
size_t ob_layout_elements_before(const struct ob_layout *layout, size_t block);

/* Returns the first block that begins at this word or after it. */
size_t ob_layout_first_block_from(const struct ob_layout *layout, size_t word);

/* --- The checksum ------------------------------------------------------------------------------*/

/*
 * docs/wire-format.md specifies the checksum of a message, and the errors that it detects.
 *
 * The checksum has 64 lanes, so that vectors and warps can compute it from the words as they load
 * them. A run of the payload has 16 words for each lane. The checksum is the sum over all lanes of
 * all runs, in any order. Every step is a bijection of the word and of the lane's state, so a
 * change within one word always changes the checksum.
 */

/* The number of lanes, which is the number of words in a round; and the number of words in a
 * run. */
#define OB_CHECK_LANES 64
#define OB_CHECK_RUN   (16 * OB_CHECK_LANES)

#define OB_CHECK_SEED  0x9e3779b9u
#define OB_CHECK_WORD  0x85ebca6bu
#define OB_CHECK_WORD2 0xc2b2ae35u

/* Returns the initial state of a lane; lane l of run r has the number 64 r + l. */
OB_INLINE uint32_t ob_check_begin(uint32_t number) { return (number + 1) * OB_CHECK_SEED; }

/* Returns the state of the lane after a word. */
OB_INLINE uint32_t ob_check_word(uint32_t lane, uint32_t word) {
  lane = (lane ^ word) * OB_CHECK_WORD;
  return lane ^ lane >> 15;
}

/* Returns what the lane contributes to the checksum, by the last step of MurmurHash3. */
OB_INLINE uint32_t ob_check_end(uint32_t lane) {
  lane = (lane ^ lane >> 16) * OB_CHECK_WORD;
  lane = (lane ^ lane >> 13) * OB_CHECK_WORD2;
  return lane ^ lane >> 16;
}

/* --- The message -------------------------------------------------------------------------------*/

#define OB_MESSAGE_MAGIC   0x3142314fu /* the bytes "O1B1" */
#define OB_MESSAGE_VERSION 3

/* If all scales are below this number, no later step of a call can overflow. A value of a block is
 * at most sqrt(65536) times the block's RMS scale, or with one scale for a whole buffer sqrt(2^40)
 * times that scale. A server compresses a mean of scales plus its residual: this value stays below
 * 2^54, and the sum of 65536 squares below 2^124. A mean of absolute values is never squared. */
#define OB_LARGE_SCALE 0x1p32f

enum ob_message_kind { OB_MESSAGE_WORKER = 1, OB_MESSAGE_SERVER = 2 };

enum ob_message_flag {
  /* The sender found a value that is not finite, in this message or an earlier one of this call. */
  OB_FLAG_NOT_FINITE = 1,
  OB_FLAG_ERROR = 2, /* the sender cannot take part in this call; the payload means nothing */
  OB_FLAG_DENSE = 4, /* the payload is float32 values */
  /* A scale in the sender's message or residual is at least OB_LARGE_SCALE: sums may overflow. */
  OB_FLAG_LARGE = 8,
  /* With OB_FLAG_ERROR: the error is an argument that must be equal on all ranks, but is not. */
  OB_FLAG_MISMATCH = 16,
  OB_FLAG_HALF = 32,   /* with OB_FLAG_DENSE: the values have 16 bits, in the buffers' type */
  OB_FLAG_WIDTH = 64,  /* this bit and 128 are the binary logarithm of the width */
  OB_FLAG_CLIMB = 256, /* the sender asks for more bits (in plans with several widths) */
  OB_FLAG_STAY = 512   /* the sender needs at least as many bits (in the same plans) */
};

#define OB_LADDER_FLAGS (OB_FLAG_CLIMB | OB_FLAG_STAY)

struct ob_header {
  uint32_t magic;
  uint8_t version, kind;
  uint16_t flags;
  uint32_t sequence; /* number of the call among the plan's calls */
  float scale;       /* scale of the sender's buffer, or size of its residual (ladder.h), or 0 */
  uint64_t elements; /* elements of the whole call, with padding */
  uint64_t block;    /* the first block of the message */
  uint32_t agreed;   /* a number that must be the same on all ranks in this call, or 0 */
  uint32_t checksum; /* checksum of all other bytes of the message */
};

struct ob_codec;

/* The shape of a message, which sender and receiver both know. */
struct ob_message_shape {
  size_t first, blocks, words; /* first block; number of blocks; number of groups of 32 elements */
  bool one_scale, dense;
  bool half;      /* the message is dense and has 16-bit values */
  unsigned width; /* bits per element, if the message is not dense */
};

/* The parts of a message in memory. A dense message has its values, of 32 or 16 bits, in the
 * position of other messages' scales. */
struct ob_view {
  struct ob_header *header;
  float *scales;
  uint32_t *words;
  float *values;
  uint16_t *halves;
  unsigned width;
};

/* Return the sizes of a message's parts; they are inline because device code calls them too. */
OB_INLINE size_t ob_message_scales(const struct ob_message_shape *shape) {
  return shape->dense || shape->one_scale ? 0 : shape->blocks;
}

/* Returns the bytes of a message's payload for each word of the layout, which is a group of 32
 * elements. */
OB_INLINE size_t ob_message_word_bytes(const struct ob_message_shape *shape) {
  if (!shape->dense)
    return shape->width * sizeof(uint32_t);
  return OB_LANES * (shape->half ? sizeof(uint16_t) : sizeof(float));
}

OB_INLINE size_t ob_message_bytes(const struct ob_message_shape *shape) {
  size_t word = ob_message_word_bytes(shape);
  return sizeof(struct ob_header) + ob_message_scales(shape) * sizeof(float) + shape->words * word;
}

OB_INLINE struct ob_view ob_message_view(void *memory, const struct ob_message_shape *shape) {
  struct ob_view view;
  view.header = (struct ob_header *)memory;
  view.scales = (float *)(void *)(view.header + 1);
  view.words = (uint32_t *)(void *)(view.scales + ob_message_scales(shape));
  view.values = view.scales;
  view.halves = (uint16_t *)(void *)view.scales;
  view.width = shape->width;
  return view;
}

/* The call that a message belongs to, as sender and receiver know it. */
struct ob_message_call {
  enum ob_message_kind kind;
  uint32_t sequence;
  uint64_t elements;
  uint32_t agreed;
};

OB_INLINE struct ob_header ob_header_make(const struct ob_message_shape *shape,
                                          const struct ob_message_call *call, uint16_t flags,
                                          float scale) {
  struct ob_header header;
  header.magic = OB_MESSAGE_MAGIC;
  header.version = OB_MESSAGE_VERSION;
  header.kind = (uint8_t)call->kind;
  header.flags = flags;
  header.sequence = call->sequence;
  header.scale = scale;
  header.elements = call->elements;
  header.block = shape->first;
  header.agreed = call->agreed;
  header.checksum = 0;
  return header;
}

/* Returns what the header contributes to the checksum: one lane, over all words of the header
 * except the checksum. */
OB_INLINE uint32_t ob_header_sum(const struct ob_header *header) {
  const uint32_t words[] = {
      header->magic,
      header->version | (uint32_t)header->kind << 8 | (uint32_t)header->flags << 16,
      header->sequence,
      ob_bits_of(header->scale),
      (uint32_t)header->elements,
      (uint32_t)(header->elements >> 32),
      (uint32_t)header->block,
      (uint32_t)(header->block >> 32),
      header->agreed,
  };
  uint32_t lane = 0;
  for (int i = 0; i < 9; i++)
    lane = ob_check_word(lane, words[i]);
  return ob_check_end(lane);
}

/* Returns the number of words of the payload. */
OB_INLINE size_t ob_message_payload_count(const struct ob_message_shape *shape) {
  return (ob_message_bytes(shape) - sizeof(struct ob_header)) / sizeof(uint32_t);
}

OB_INLINE bool ob_scale_is_sound(float scale) { return ob_is_finite(scale) && scale >= 0; }

/* The flags that describe the payload. */
#define OB_PAYLOAD_FLAGS (OB_FLAG_DENSE | OB_FLAG_HALF | 3 * OB_FLAG_WIDTH)

OB_INLINE unsigned ob_payload_flags(bool dense, bool half, unsigned width) {
  if (dense)
    return (unsigned)OB_FLAG_DENSE | (half ? (unsigned)OB_FLAG_HALF : 0);
  return (width == 8 ? 3u : width / 2) * (unsigned)OB_FLAG_WIDTH;
}

/* Returns the number of bits per element of a message that is not dense. */
OB_INLINE unsigned ob_flags_width(unsigned flags) { return 1u << (flags / OB_FLAG_WIDTH & 3); }

/* The errors of a header, in the order of the checks; ob_header_check returns the first one. */
enum ob_header_fault {
  OB_HEADER_SOUND,
  OB_HEADER_MAGIC,
  OB_HEADER_VERSION,
  OB_HEADER_KIND,
  OB_HEADER_SEQUENCE,
  OB_HEADER_BLOCK,
  OB_HEADER_SCALE
};

OB_INLINE enum ob_header_fault ob_header_check(const struct ob_header *header,
                                               const struct ob_message_shape *shape,
                                               const struct ob_message_call *call) {
  if (header->magic != OB_MESSAGE_MAGIC)
    return OB_HEADER_MAGIC;
  if (header->version != OB_MESSAGE_VERSION)
    return OB_HEADER_VERSION;
  if (header->kind != call->kind || (header->flags & OB_PAYLOAD_FLAGS) !=
                                        ob_payload_flags(shape->dense, shape->half, shape->width))
    return OB_HEADER_KIND;
  if (header->sequence != call->sequence)
    return OB_HEADER_SEQUENCE;
  if (header->elements != call->elements || header->block != shape->first)
    return OB_HEADER_BLOCK;
  return ob_scale_is_sound(header->scale) ? OB_HEADER_SOUND : OB_HEADER_SCALE;
}

/* Returns true if a sender's header shows that ranks made the call with different arguments: a flag
 * reports it, or `agreed` differs from this rank's own number. If the sender has another error, its
 * `agreed` is meaningless. */
OB_INLINE bool ob_header_disagrees(unsigned flags, uint32_t agreed, uint32_t own) {
  return (flags & OB_FLAG_MISMATCH) || (!(flags & OB_FLAG_ERROR) && agreed != own);
}

/* Returns the status of a call, once all flags are known. `status` is this rank's own; `failed` is
 * the first rank that reported an error, and `not_finite` the first rank that reported a value that
 * is not finite, or -1. */
OB_INLINE onebit_status_t ob_call_verdict(onebit_status_t status, int failed, int not_finite) {
  if (status != ONEBIT_OK)
    return status;
  return failed >= 0 ? ONEBIT_ERROR_PEER : not_finite >= 0 ? ONEBIT_SKIPPED : ONEBIT_OK;
}

/* Writes a message's checksum; called when everything else is written. */
void ob_message_seal(void *memory, const struct ob_message_shape *shape,
                     const struct ob_codec *codec);

/* Fails unless the message, of `bytes` bytes, is the expected one and unchanged since it was
 * sealed. After success all scales are finite and not negative. The error message names the fault.
 * The flags about the sender's state are left to the caller. */
onebit_status_t ob_message_check(const void *memory, size_t bytes,
                                 const struct ob_message_shape *shape,
                                 const struct ob_message_call *call, const struct ob_codec *codec);

#ifdef __cplusplus
}
#endif
#endif
