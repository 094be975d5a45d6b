/*
 * The state of an object, which is an optimizer or an outer step. It is a list of rows: named
 * arrays, and lists of numbers. An object declares which rows it has and where their elements are
 * on this rank (struct ob_state); whatever saves, merges or measures state is a walk over the rows.
 * One function returns the place of a bucket's part of a row (ob_section_of): saving, loading,
 * norms and statistics all use it.
 */
#ifndef OB_OPTIMIZERS_STATE_H
#define OB_OPTIMIZERS_STATE_H

#include "optimizers/optimizer.h"

/* The rows: the numbers of the checkpoints' format. */
enum ob_saved {
  OB_SAVED_NORMS = 1,  /* of the automatic freeze, double */
  OB_SAVED_NUMBERS,    /* the object's own, 8 bytes each; all others are floats */
  OB_SAVED_PARAMETERS, /* master values, where parameters are not float32 */
  OB_SAVED_MOMENTUM,
  OB_SAVED_VARIANCE,
  OB_SAVED_FRESH,
  OB_SAVED_ANCHOR,
  OB_SAVED_MOVED,
  OB_SAVED_WORKER,  /* residual of what this rank sends */
  OB_SAVED_SERVER,  /* residual of its messages as the server of its shard */
  OB_SAVED_MOMENTS, /* of each rank's own gradients */
  /* The rows of outer steps: */
  OB_SAVED_CONSENSUS,
  OB_SAVED_OUTER_MOMENTUM,
  OB_SAVED_DRIFT, /* the mean drift that has not been applied yet */
  /* An optimizer's ladders, if its buckets change widths: struct ob_ladder_state of each tensor's
   * bucket, 8 bytes each */
  OB_SAVED_LADDERS,
  OB_SAVED_END
};

struct ob_saved_row {
  const char *name;
  size_t size;    /* bytes of one number in a checkpoint */
  bool own;       /* it is each rank's own; other ranks than those that saved begin with the mean */
  bool own_apart; /* likewise while ranks differ (ob_part_header.apart) */
  bool may_lack;  /* elements that no rank has are zeros; of the others some rank must have each */
  bool finite;    /* it takes part in messages and residuals */
  /* The stages in which an optimizer has the row, 1 << enum ob_stage each, and the slot of the
   * buckets' arrays that it is in; OB_MOMENTUM: in that or elsewhere. Rows of an outer step alone
   * have 0, and the array (enum ob_outer_array). */
  unsigned stages;
  int slot;
};

extern const struct ob_saved_row ob_saved_rows[OB_SAVED_END];

/* True if the row is each rank's own, if the ranks are `apart` or not. */
static inline bool ob_saved_own(enum ob_saved what, bool apart) {
  return ob_saved_rows[what].own || (ob_saved_rows[what].own_apart && apart);
}

/* True if the row has numbers in place of elements. */
static inline bool ob_saved_numbers(uint32_t what) {
  return what <= OB_SAVED_NUMBERS || what == OB_SAVED_LADDERS;
}

/* Elements are numbered across all tensors; the padding of tensors has numbers of its own. */
enum ob_space { OB_ELEMENTS, OB_PADDING, OB_SPACES };

/* Elements of a piece of a bucket or fragment. Those of each space are together, those of tensors
 * before the padding. */
struct ob_stretch {
  uint64_t first[OB_SPACES];
  size_t count[OB_SPACES], bucket, piece;
};

/* `count` elements of a piece, from `offset` on. */
struct ob_run {
  size_t piece, offset, count;
};

struct ob_part_tensor; /* checkpoint/checkpoint.h, and */
struct ob_saving;

/* An object's declaration of its state. */
struct ob_state {
  void *object;
  onebit_comm_t comm;
  const char *kind, *noun; /* in checkpoints, and what it is called in their errors */
  uint64_t steps;
  size_t tensors;
  /* Fills in what the header says of the object, and makes scratch to read it. */
  onebit_status_t (*describe)(struct ob_saving *saving);
  void (*list_tensors)(const void *object, struct ob_part_tensor *rows);
  /* Returns the number of stretches. Lists them unless `all` is NULL, in the order of their memory,
   * without the numbers of padding. */
  size_t (*list_stretches)(const void *object, struct ob_stretch *all);
  /* True if the object has the row, as `saving` describes it. */
  bool (*has)(const struct ob_saving *saving, enum ob_saved what);
  /* Returns the place of number i of a row of numbers. */
  const void *(*number)(void *object, enum ob_saved what, uint64_t i);
  /* The elements of a stretch that this rank saves; whether ranks save their shards of the row, and
   * not parts of what all have alike; NULL: never. */
  struct ob_run (*extent)(const struct ob_saving *saving, enum ob_saved what,
                          const struct ob_stretch *stretch);
  bool (*in_shards)(const struct ob_saving *saving, enum ob_saved what);
  /* The elements of a run as floats. */
  onebit_status_t (*read)(struct ob_saving *saving, enum ob_saved what, size_t bucket,
                          const struct ob_run *run, float *values);
};

/* --- An optimizer's rows */

/* The meaning of the momentum of compressed tensors. */
enum ob_stage {
  OB_STAGE_WARMUP, /* the momentum */
  OB_STAGE_FROZEN, /* times beta1, where residuals will be */
  OB_STAGE_SENT    /* the last message; and there are residuals */
};

/* The stage that the optimizer is in, and whether the method has that section in that stage. */
enum ob_stage ob_stage_of(const struct onebit_optimizer *optimizer);
bool ob_has_section(const struct onebit_optimizer *optimizer, enum ob_stage stage,
                    enum ob_saved what);

/* The form in which numbers are stored. */
enum ob_content {
  OB_CONTENT_FLOATS,
  OB_CONTENT_PIECES,   /* floats where the bucket's parameters are, piece by piece */
  OB_CONTENT_BFLOATS,  /* bfloat16 */
  OB_CONTENT_RESIDUAL, /* compensated values, minus what their scales represent */
  OB_CONTENT_SENT,     /* the same, plus what was sent of them: signs times scales */
  OB_CONTENT_MESSAGES  /* the latest messages that have come: signs times scales */
};

/* A bucket's part of a section, on this rank: blocks first .. end - 1 of the bucket's layout. */
struct ob_section {
  enum ob_saved what;
  enum ob_content content;
  const struct ob_bucket *bucket;
  struct onebit_plan *plan; /* the plan that has this layout, these residuals and messages */
  size_t first, end;
  /* Not of messages and pieces: the array, in memory of the bucket's executor; its first word. */
  void *values;
  size_t first_word;
  const struct ob_residual *residual; /* with the scales */
};

struct ob_section ob_section_of(const struct ob_bucket *bucket, enum ob_stage stage,
                                enum ob_saved what);

/* --- Elements of a section */

enum { OB_CHUNK = 32768 }; /* elements at a time */

/* Returns the offset of block number `block` in a piece: 0 if it is before the piece, the piece's
 * count if it is behind. */
size_t ob_offset_in(const struct ob_layout *layout, size_t piece, size_t block);

/* The next run of the elements of the blocks first .. end - 1, in their order; the first one where
 * *run is zero. False: there are no more. */
bool ob_next_run(const struct ob_layout *layout, size_t first, size_t end, struct ob_run *run);

/* Scratch of ob_section_read. */
struct ob_reader {
  float *scales;
  unsigned char *message; /* a copy of this one, where messages are in memory of a device: */
  const struct onebit_plan *plan;
  size_t copied;
};

/* `destroy` is safe after a failure. */
onebit_status_t ob_reader_create(struct ob_reader *reader,
                                 const struct onebit_optimizer *optimizer);
void ob_reader_destroy(struct ob_reader *reader);

/* The elements of a run as floats, wherever and in whatever form they are; errors are those of the
 * memory. Back: what a residual is stored as then has no scale; `scratch` has room for a chunk. */
onebit_status_t ob_section_read(struct ob_reader *reader, const struct ob_section *section,
                                const struct ob_run *run, float *values);
onebit_status_t ob_section_write(const struct ob_section *section, const struct ob_run *run,
                                 const float *values, float *scratch);

/* Returns the index of the interval of `bounds` (count + 1 of them) that contains this block:
 * messages, shards. */
size_t ob_interval_of(const size_t *bounds, size_t stride, size_t count, size_t block);

#endif
