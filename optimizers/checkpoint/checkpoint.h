/*
 * Checkpoints, inside. docs/checkpoints.md is the format, this is the code of it:
 *
 *   map.c                  which element lies where in the optimizer
 *   state.c                what there is to save
 *   read.c                 what the optimizer has of some elements, as floats
 *   part.c                 a part: its header and its list of sections, made and checked
 *   save.c                 an optimizer to a part
 *   parts.c                what the parts of all ranks have of some elements
 *   restore.c, messages.c  and that into an optimizer; its momentum and residuals
 *   load.c                 parts to an optimizer
 *   manifest.c, files.c, system.c    all that in a directory
 *
 * Everything is told in elements: of all tensors, one after the other in the order of their list.
 * What fills tensors up in profile deepspeed has numbers of its own.
 */
#ifndef OB_OPTIMIZERS_CHECKPOINT_H
#define OB_OPTIMIZERS_CHECKPOINT_H

#include "optimizers/optimizer.h"

/* --- The format */

#define OB_PART_MAGIC   "O1BC\r\n\x1a\n" /* as in PNG: shows what has passed for text */
#define OB_PART_VERSION 1
#define OB_PART_ORDER   0x01020304u

enum ob_space { OB_ELEMENTS, OB_PADDING, OB_SPACES };

/* What a section has: the numbers of the format. */
enum ob_saved {
  OB_SAVED_NORMS = 1,  /* of the automatic freeze, double */
  OB_SAVED_NUMBERS,    /* the method's own, 8 bytes each; all others are floats */
  OB_SAVED_PARAMETERS, /* master values, where parameters are not float32 */
  OB_SAVED_MOMENTUM,
  OB_SAVED_VARIANCE,
  OB_SAVED_FRESH,
  OB_SAVED_ANCHOR,
  OB_SAVED_MOVED,
  OB_SAVED_WORKER,
  OB_SAVED_SERVER,
  OB_SAVED_MOMENTS, /* of each rank's own gradients */
  OB_SAVED_END
};

/* What the momentum of tensors that are compressed is. */
enum ob_stage {
  OB_STAGE_WARMUP, /* the momentum */
  OB_STAGE_FROZEN, /* times beta1, as a kept value */
  OB_STAGE_SENT    /* the last message; and there are residuals */
};

/* What is sent of it. */
enum ob_form { OB_FORM_MOMENTUM, OB_FORM_STEP };

/* A part begins with this; all of it in multiples of 8 bytes. */
struct ob_part_header {
  unsigned char magic[8];
  uint32_t version, order;
  uint64_t bytes;    /* of the part */
  uint64_t front;    /* bytes before the first section */
  uint64_t checksum; /* of these, with zero here */
  /* From here to `rank` the same in all parts of a checkpoint. */
  char kind[16];
  uint32_t library, profile;
  uint32_t ranks, hosts; /* hosts: of a hierarchical schedule; 0: of no such */
  uint32_t stage, form;
  uint32_t shards, apart;
  uint64_t tensors, elements, padding;
  uint64_t steps, frozen_at, exchanges[3];
  double variance_ratio;
  uint64_t window, numbers; /* how many norms and numbers of the method's own */
  /* From here on this rank's. */
  uint32_t rank, host, place, reserved;
  uint64_t skipped, good_steps;
  double loss_scale; /* 0 without loss scaling */
  double gradient_norm;
  uint64_t sections;
};

struct ob_part_tensor {
  uint64_t count, uncompressed;
};

struct ob_part_section {
  uint32_t what, space;
  uint64_t first, count; /* elements, or what it is the numbers of */
  uint64_t offset;       /* in the part: where the one before ends */
  uint64_t checksum;
};

/* A checksum of 64-bit words, four of them side by side. As each word passes through nothing but
 * what can be undone, no change within one word goes unseen. */
struct ob_checksum {
  uint64_t lanes[4], words;
};

struct ob_checksum ob_checksum_begin(void);
void ob_checksum_add(struct ob_checksum *sum, const void *data, size_t bytes); /* times 8 */
uint64_t ob_checksum_end(const struct ob_checksum *sum);

/* Bytes of one, and of a section of so many, filled up with zeros. */
size_t ob_saved_size(enum ob_saved what);
uint64_t ob_section_bytes(enum ob_saved what, uint64_t count);
const char *ob_saved_name(enum ob_saved what);

/* --- Where elements lie (map.c) */

/* Elements that lie together in a piece of a unit. */
struct ob_stretch {
  uint64_t first;
  size_t count, unit, piece, offset;
};

/* Of a piece: its first `real` elements are those from `element` on, the rest is padding. */
struct ob_piece_map {
  uint64_t element, padding;
  size_t real;
};

struct ob_map {
  struct ob_stretch *stretches[OB_SPACES]; /* in the order of the elements */
  size_t count[OB_SPACES];
  uint64_t total[OB_SPACES];
  struct ob_piece_map *pieces, **of_unit;
};

onebit_status_t ob_map_create(struct ob_map *map, const struct onebit_optimizer *optimizer);
void ob_map_destroy(struct ob_map *map);

/* The stretch that has this element. */
const struct ob_stretch *ob_map_find(const struct ob_map *map, enum ob_space space,
                                     uint64_t element);

/* --- What there is (state.c) */

/* As a checkpoint has it. */
enum ob_stage ob_checkpoint_stage(const struct onebit_optimizer *optimizer);
enum ob_form ob_checkpoint_form(const struct onebit_optimizer *optimizer);

/* Whether the method has this in that stage. If not, there is no section of it. */
bool ob_checkpoint_has(const struct onebit_optimizer *optimizer, enum ob_stage stage,
                       enum ob_saved what);

/* Whether it is each rank's own; else all have it alike. */
bool ob_saved_is_own(enum ob_saved what, bool apart);

/* Whether the server of a shard, and nobody else, has the momentum of its elements. Of uncompressed
 * buckets it is saved by shards too. */
bool ob_saved_by_servers(const struct ob_unit *unit, enum ob_saved what);

/* Which blocks of the unit's layout this rank has that of: all, or a share. */
void ob_saved_blocks(const struct ob_unit *unit, enum ob_saved what, size_t *first, size_t *end);

/* Where a block begins in a piece: 0 where that is before it, its count where behind it. */
size_t ob_offset_in(const struct ob_layout *layout, size_t piece, size_t block);

/* Element `offset` of a piece in the array that has it, if any has. Parameters are the caller's
 * where there are no master values. */
float *ob_saved_at(const struct ob_unit *unit, enum ob_saved what, size_t piece, size_t offset);

/* The kept moments of element `offset` and those that follow it in a piece; NULL where that is
 * something else. */
uint16_t *ob_saved_moments(const struct ob_unit *unit, enum ob_saved what, size_t piece,
                           size_t offset);

/* The errors of the share that this rank serves. */
struct ob_kept *ob_saved_server(const struct ob_unit *unit);

bool ob_checkpoint_apart(const struct onebit_optimizer *optimizer);
size_t ob_checkpoint_hosts(const struct onebit_optimizer *optimizer); /* as in the header */

/* The method's own numbers: the list; how many in all; where one of them is. */
size_t ob_checkpoint_numbers(struct onebit_optimizer *optimizer,
                             struct ob_numbers list[OB_NUMBERS_AT_MOST]);
uint64_t ob_checkpoint_count_numbers(struct onebit_optimizer *optimizer);
void *ob_number_at(const struct ob_numbers *numbers, size_t i);

/* --- Out of an optimizer (read.c) */

enum { OB_CHUNK = 32768 }; /* elements at a time */

struct ob_reader {
  const struct onebit_optimizer *optimizer;
  const struct ob_map *map;
  float *scales;
  unsigned char *message; /* a copy of this one, where messages are in memory of a device: */
  const struct onebit_plan *plan;
  size_t copied;
};

onebit_status_t ob_reader_create(struct ob_reader *reader, const struct onebit_optimizer *optimizer,
                                 const struct ob_map *map);
void ob_reader_destroy(struct ob_reader *reader);

/* `count` <= OB_CHUNK elements of arrays, errors or momentum. */
onebit_status_t ob_read(struct ob_reader *reader, enum ob_saved what, enum ob_space space,
                        uint64_t first, size_t count, float *values);

/* --- A part (part.c) */

struct ob_part {
  int number;
  const unsigned char *memory;
  struct ob_part_header header;
  const unsigned char *tensors; /* rows of struct ob_part_tensor, perhaps misaligned */
  struct ob_part_section *sections;
  bool *sound; /* of each section: its checksum is right */
};

/* ONEBIT_ERROR_CHECKPOINT, with the part's number before the words. */
onebit_status_t ob_part_error(const struct ob_part *part, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Checks all but what is in the sections. */
onebit_status_t ob_part_open(struct ob_part *part, int number, const void *memory, size_t bytes);
void ob_part_close(struct ob_part *part);
struct ob_part_tensor ob_part_tensor_of(const struct ob_part *part, uint64_t tensor);

/* The section that has this element, else the next one of that kind, else NULL. */
const struct ob_part_section *ob_part_from(const struct ob_part *part, enum ob_saved what,
                                           enum ob_space space, uint64_t element);

/* Fails unless the section is sound. Looks once. */
onebit_status_t ob_part_verify(struct ob_part *part, const struct ob_part_section *section);

/* `count` of what the section has, from number `first` on. */
void ob_part_copy(const struct ob_part *part, const struct ob_part_section *section, uint64_t first,
                  size_t count, void *values);

/* --- Saving (save.c) */

/* Where a part is written; from any offset on, all bytes once. */
struct ob_sink {
  onebit_status_t (*put)(void *context, uint64_t offset, const void *data, size_t bytes);
  void *context;
};

/* A part of this rank's, described: `header.bytes` is known. */
struct ob_saving {
  struct onebit_optimizer *optimizer;
  struct ob_map map;
  struct ob_part_header header;
  struct ob_part_section *sections;
};

onebit_status_t ob_saving_create(struct ob_saving *saving, onebit_optimizer_t optimizer);
void ob_saving_destroy(struct ob_saving *saving);

/* Writes it. Then header.checksum is known too. */
onebit_status_t ob_saving_write(struct ob_saving *saving, const struct ob_sink *sink);

/* Fails while a step is open. Waits for those on streams. */
onebit_status_t ob_checkpoint_idle(onebit_optimizer_t optimizer);

/* --- The parts of all ranks (parts.c) */

struct ob_parts {
  struct ob_part *list;
  int count;
  int own;           /* the part that this rank had, where the ranks are the same; else -1 */
  bool same_padding; /* what is known of padding is of use */
  int latest;        /* of what all have alike: the part that was found last */
  double *sums;      /* scratch for means: OB_CHUNK; */
  uint32_t *counts;
};

onebit_status_t ob_parts_open(struct ob_parts *parts, const void *const *memory,
                              const size_t *bytes, int count);
void ob_parts_close(struct ob_parts *parts);

/* Fails unless they fit together, and this optimizer. */
onebit_status_t ob_parts_check(struct ob_parts *parts, struct onebit_optimizer *optimizer,
                               const struct ob_map *map);

/* `count` <= OB_CHUNK elements; values NULL: only checks that they are there, and sound. Only that
 * can fail. */
onebit_status_t ob_parts_fetch(struct ob_parts *parts, enum ob_saved what, enum ob_space space,
                               uint64_t first, size_t count, float *values);

/* --- Loading */

/* From parts to the optimizer, twice: first dry, which looks at everything that is needed and
 * changes nothing; then nothing can fail but a device. */
struct ob_loading {
  struct onebit_optimizer *optimizer;
  struct ob_map map;
  struct ob_parts parts;
  bool dry;
  float *values, *more; /* scratch: OB_CHUNK */
  /* Of the unit with the most: a scale a block, or a share; a message. */
  float *scales;
  unsigned char *message;
};

/* Elements offset .. offset + count - 1 of a piece; what is not known of padding is 0. */
onebit_status_t ob_loading_fetch(struct ob_loading *loading, enum ob_saved what, size_t unit,
                                 size_t piece, size_t offset, size_t count, float *values);

/* Everything (restore.c). */
onebit_status_t ob_restore(struct ob_loading *loading);

/* Of a unit (messages.c): momentum that was sent becomes messages again; and the kept
 * errors, with what the messages could not say of it. */
onebit_status_t ob_restore_messages(struct ob_loading *loading, size_t unit);
onebit_status_t ob_restore_errors(struct ob_loading *loading, size_t unit, bool sent);

/* Collective. `status`: how this rank fares so far. */
onebit_status_t ob_checkpoint_load(onebit_optimizer_t optimizer, onebit_status_t status,
                                   const void *const *memory, const size_t *bytes, int count);

#endif
