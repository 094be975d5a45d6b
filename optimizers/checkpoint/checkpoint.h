/*
 * Functions that save, load and merge checkpoints, based on the rows of state (optimizers/state.h).
 * docs/checkpoints.md describes the format.
 *
 * Positions are numbers of elements, counted through all tensors in the order of their list. The
 * padding of tensors in profile deepspeed is counted apart.
 */
#ifndef OB_OPTIMIZERS_CHECKPOINT_H
#define OB_OPTIMIZERS_CHECKPOINT_H

#include "optimizers/checkpoint/directory.h"
#include "optimizers/state.h"

/* --- The format */

#define OB_PART_MAGIC   "O1BC\r\n\x1a\n" /* as in PNG: shows a transfer that changed line ends */
#define OB_PART_VERSION 2
#define OB_PART_ORDER   0x01020304u

/* The version of a part without sections that are newer than version 1. Most parts have this
 * version. */
#define OB_PART_VERSION_PLAIN 1

/* The form in which the momentum is sent. */
enum ob_form { OB_FORM_MOMENTUM, OB_FORM_STEP };

/* A part begins with this header. The sizes that the header states are multiples of 8 bytes. */
struct ob_part_header {
  unsigned char magic[8];
  uint32_t version, order;
  uint64_t bytes;    /* bytes of the part */
  uint64_t front;    /* bytes before the first section */
  uint64_t checksum; /* of the front, with zero in this field */
  /* The fields from here to `rank` are the same in all parts of a checkpoint. */
  char kind[16];
  uint32_t library, profile;
  uint32_t ranks, hosts; /* hosts: their number in a hierarchical schedule, or 0 */
  /* The first struct has the fields of an optimizer, the second one the fields of an outer step. */
  union {
    struct {
      uint32_t stage, form, shards;
    };
    struct {
      uint32_t weighted, momentum, fragments;
    };
  };
  uint32_t apart;
  uint64_t tensors, elements, padding;
  uint64_t steps, frozen_at, exchanges[3];
  double variance_ratio;
  uint64_t window, numbers; /* how many norms, and how many numbers of the method */
  /* The fields from here on describe this rank only. */
  uint32_t rank, host, local_rank, reserved;
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
  uint64_t first, count; /* its elements, or entries of a list of numbers */
  uint64_t offset;       /* in the part: the end of the section before it */
  uint64_t checksum;
};

/* A checksum of 64-bit words in four lanes. Every operation on a word is reversible, so any change
 * within one word changes the checksum. */
struct ob_checksum {
  uint64_t lanes[4], words;
};

struct ob_checksum ob_checksum_begin(void);
/* `bytes` is a multiple of 8. */
void ob_checksum_add(struct ob_checksum *sum, const void *data, size_t bytes);
uint64_t ob_checksum_end(const struct ob_checksum *sum);

/* ob_section_bytes returns the bytes of a section of `count` numbers, with its padding;
 * ob_section_limit returns the largest valid count. */
uint64_t ob_section_bytes(uint32_t what, uint64_t count);
uint64_t ob_section_limit(const struct ob_part_header *header, uint32_t what, uint32_t space);

/* --- Positions of elements (save.c) */

/* Elements of a section. */
struct ob_range {
  enum ob_saved what;
  enum ob_space space;
  uint64_t first;
  size_t count;
};

struct ob_map {
  struct ob_stretch *all;    /* in the order of buckets and pieces */
  struct ob_stretch *sorted; /* in the order of elements */
  size_t count;
  uint64_t total[OB_SPACES];
};

onebit_status_t ob_map_create(struct ob_map *map, const struct ob_state *state);
void ob_map_destroy(struct ob_map *map);

/* --- A part (part.c) */

/* The size of the buffer, on the stack, for reading numbers from a file. */
enum { OB_READ_AT_ONCE = 8192 };

/* The largest allowed front of a part, enough for some millions of sections. */
#define OB_MAX_FRONT ((uint64_t)256 << 20)

/* A part in memory or, if that is NULL, in a file. */
struct ob_part_source {
  const unsigned char *memory;
  const struct ob_stored *file;
  uint64_t bytes;
};

struct ob_part {
  int number;
  struct ob_part_source source;
  struct ob_part_header header;
  unsigned char *front; /* a copy of the front; the next two fields point into it */
  const struct ob_part_tensor *tensors;
  const struct ob_part_section *sections;
  bool *sound; /* for each section, true if its checksum was found right */
};

/* Reports ONEBIT_ERROR_CHECKPOINT, with the part's number before the message. */
onebit_status_t ob_part_error(const struct ob_part *part, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Opens a part, and checks everything but the content of its sections. */
onebit_status_t ob_part_open(struct ob_part *part, int number, const struct ob_part_source *source);
void ob_part_close(struct ob_part *part);

/* Returns this kind's section that has the element or, if there is none, the next section of the
 * kind, or NULL. */
const struct ob_part_section *ob_part_find_section(const struct ob_part *part, enum ob_saved what,
                                                   enum ob_space space, uint64_t element);

/* Fails unless the section's checksum and values are right. Checks each section once. */
onebit_status_t ob_part_verify(struct ob_part *part, const struct ob_part_section *section);

/* Finds the section of a row of numbers, and fails unless its checksum and count are right. */
onebit_status_t ob_part_find_numbers(struct ob_part *part, enum ob_saved what, uint64_t count,
                                     const struct ob_part_section **section);

/* Copies `count` elements of the section, from number `first` on. Only reading a file can fail. */
onebit_status_t ob_part_copy(const struct ob_part *part, const struct ob_part_section *section,
                             uint64_t first, size_t count, void *values);

/* --- Saving (save.c) */

/* The description of this rank's part, with its size in header.bytes. */
struct ob_saving {
  const struct ob_state *state;
  struct ob_map map;
  struct ob_part_header header;
  struct ob_part_tensor *tensors;
  struct ob_part_section *sections;
  bool whole;              /* all state of this rank, also state that is equal on all ranks */
  struct ob_reader reader; /* used by optimizers */
};

onebit_status_t ob_saving_create(struct ob_saving *saving, const struct ob_state *state,
                                 bool whole);
void ob_saving_destroy(struct ob_saving *saving);

/* Reads `count` <= OB_CHUNK numbers of a section, from number `first` on. */
onebit_status_t ob_saving_read(struct ob_saving *saving, const struct ob_part_section *section,
                               uint64_t first, size_t count, void *values);

/* The destination of a part; all bytes are written once, from any offset on. */
struct ob_sink {
  onebit_status_t (*put)(void *context, uint64_t offset, const void *data, size_t bytes);
  void *context;
};

/* Writes the part, and sets header.checksum. */
onebit_status_t ob_saving_write(struct ob_saving *saving, const struct ob_sink *sink);

/* Saves into the caller's memory or, if that is NULL, only returns the number of bytes needed. */
onebit_status_t ob_state_save(const struct ob_state *state, bool whole, void *memory,
                              size_t capacity, size_t *bytes);
/* Saves into a directory. Collective. `status`: this rank's status so far. */
onebit_status_t ob_state_save_files(const struct ob_state *state, onebit_status_t status,
                                    const char *directory);

/* --- An optimizer's state (optimizer.c) */

struct ob_state ob_optimizer_state(onebit_optimizer_t optimizer);

/* Return the values of the header's fields `form` and `hosts`. */
enum ob_form ob_checkpoint_form(const struct onebit_optimizer *optimizer);
size_t ob_checkpoint_hosts(const struct onebit_optimizer *optimizer);

/* Give access to the norms of the automatic freeze, or to the method's own numbers:
 * ob_checkpoint_numbers returns how many there are, ob_checkpoint_number the address of number i,
 * or NULL, and sets its range. */
uint64_t ob_checkpoint_numbers(struct onebit_optimizer *optimizer, enum ob_saved what);
void *ob_checkpoint_number(struct onebit_optimizer *optimizer, enum ob_saved what, uint64_t i,
                           struct ob_numbers *is);

/* --- The parts of all ranks (parts.c) */

struct ob_parts {
  struct ob_part *list;
  int count;
  int own;           /* the number of this rank's part, if as many ranks saved; else -1 */
  bool same_padding; /* the parts' padding can be used here */
  int latest;        /* the part that was last read for state that is equal on all ranks */
  /* NULL, or each part's weight in means of ranks' own arrays; the weights add up to the number of
   * parts. */
  const double *factors;
  /* Scratch for means, OB_CHUNK entries each: the sums, and how many values each sum has. */
  double *sums;
  uint32_t *counts;
};

/* The parts that a caller gives, either in memory or as files. */
struct ob_sources {
  const void *const *memory;
  const size_t *bytes;
  const struct ob_stored *files;
  int count;
};

/* Fails unless an optimizer with these options can load the state of the parts. */
onebit_status_t ob_parts_check(struct ob_parts *parts, struct onebit_optimizer *optimizer,
                               const struct ob_map *map);

/* Reads at most OB_CHUNK elements. If `values` is NULL, it only checks that the parts have these
 * elements, undamaged; after this check only reading a file can fail. */
onebit_status_t ob_parts_read(struct ob_parts *parts, const struct ob_range *range, float *values);

/* --- Loading (parts.c, files.c) */

/* The functions by which an object is loaded. */
struct ob_load {
  void *object;
  const struct ob_state *state;
  struct ob_term term; /* a further number that ranks must agree on; name NULL: none */
  /* Collective: extends the agreement to ranks that are not in comm. NULL: there are none. */
  onebit_status_t (*agreed)(void *object, onebit_status_t status);
  /* Called first with `dry`: it then reads everything that is needed, and changes nothing. The
   * parts belong to one checkpoint, of an object of this kind and these tensors. */
  onebit_status_t (*restore)(void *object, struct ob_parts *parts, bool dry);
  void (*close)(void *object); /* called in any case */
};

/* Load an object from parts. Collective. `status`: this rank's status so far. ob_state_load reads a
 * directory if `sources` is NULL. */
onebit_status_t ob_load_parts(const struct ob_load *load, onebit_status_t status,
                              const struct ob_sources *sources);
onebit_status_t ob_state_load(const struct ob_load *load, onebit_status_t status,
                              const struct ob_sources *sources, const char *directory);

/* Parts are loaded into an optimizer in two passes: the first one, `dry`, reads everything that is
 * needed and changes nothing; in the second only a device can fail, or a file that was changed
 * since. */
struct ob_loading {
  struct onebit_optimizer *optimizer;
  struct ob_map map;
  struct ob_parts *parts;
  struct ob_part *own;                /* the part that has this rank's numbers */
  bool dry, ladders;                  /* ladders: optimizer->ladders has the part's ladders */
  enum ob_stage stage;                /* the optimizer's stage, once it is loaded */
  size_t bucket;                      /* the bucket that is being restored */
  const struct ob_stretch *stretches; /* the stretches of this bucket */
  struct ob_reader reader;            /* its message is scratch, too */
  float *values, *more;               /* scratch: OB_CHUNK */
  float *scales; /* scratch for a bucket's scales: one for each block, or shard */
};

/* Reads elements of the bucket that is being restored. Padding that the parts do not have is 0. */
onebit_status_t ob_loading_read(struct ob_loading *loading, enum ob_saved what,
                                const struct ob_run *run, float *values);

/* ob_restore_messages converts momentum that had been sent when it was saved to messages again.
 * ob_add_rounding_error adds the rounding error of a run to its residual (messages.c). */
onebit_status_t ob_restore_messages(struct ob_loading *loading);
onebit_status_t ob_add_rounding_error(struct ob_loading *loading, const struct ob_run *run,
                                      float *residual);

/* Loads one part, which has everything that this rank needs, into an optimizer without residuals.
 * Local. */
onebit_status_t ob_checkpoint_restore(onebit_optimizer_t optimizer, struct ob_part *part);

/* --- Merging (merge.c) */

/* Collective: merges the states of comm's ranks into one part. State that must be equal on all
 * ranks is equal in the part; other state is this rank's own. The optimizer does not change. The
 * caller releases the part with ob_part_release. */
onebit_status_t ob_merge(onebit_optimizer_t optimizer, onebit_comm_t comm, struct ob_part **part);

#endif
