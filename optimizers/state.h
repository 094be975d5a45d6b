/*
 * The state of an object, which is an optimizer or an outer step. It is a list of rows: named
 * arrays, and lists of numbers. An object declares which rows it has and where their elements are
 * on this rank (struct ob_state). Code that saves, merges or measures state is a loop over the
 * rows. One function, ob_section_of, returns the place of a bucket's part of a row, for saving,
 * loading, norms and statistics.
 */
#ifndef OB_OPTIMIZERS_STATE_H
#define OB_OPTIMIZERS_STATE_H

#include "optimizers/optimizer.h"

/* The rows. Checkpoints store these numbers. */
enum ob_saved {
  OB_SAVED_NORMS = 1,  /* the norms of the automatic freeze, double */
  OB_SAVED_NUMBERS,    /* the object's numbers, 8 bytes each; other rows are floats */
  OB_SAVED_PARAMETERS, /* master values, where parameters are not float32 */
  OB_SAVED_MOMENTUM,
  OB_SAVED_VARIANCE,
  OB_SAVED_FRESH,
  OB_SAVED_ANCHOR,
  OB_SAVED_MOVED,
  OB_SAVED_WORKER,  /* residual of the messages that this rank sends */
  OB_SAVED_SERVER,  /* residual of its messages as the server of its shard */
  OB_SAVED_MOMENTS, /* moments of each rank's own gradients */
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
  bool own;       /* each rank has its own; ranks that saved none begin with the mean */
  bool own_apart; /* each rank has its own while parameters differ (ob_part_header.apart) */
  /* True: elements that no rank has saved are zeros. False: some rank must have saved each
   * element. */
  bool may_lack;
  bool finite; /* its numbers must be finite: they enter messages and residuals */
  /* stages: the stages in which an optimizer has the row, as bits 1 << enum ob_stage; 0 if only
   * outer steps have it. slot: the slot of the buckets' arrays, where OB_MOMENTUM may also stand
   * for other memory; in rows of outer steps the array (enum ob_outer_array). */
  unsigned stages;
  int slot;
};

extern const struct ob_saved_row ob_saved_rows[OB_SAVED_END];

/* Returns true if each rank has its own row; `apart` says whether ranks differ. */
static inline bool ob_saved_is_own(enum ob_saved what, bool apart) {
  return ob_saved_rows[what].own || (ob_saved_rows[what].own_apart && apart);
}

/* Returns true if the row has a few numbers of the whole optimizer, such as norms, instead of a
 * value for each element. */
static inline bool ob_saved_is_numbers(uint32_t what) {
  return what <= OB_SAVED_NUMBERS || what == OB_SAVED_LADDERS;
}

/* Elements are numbered across all tensors; the padding of tensors has numbers of its own. */
enum ob_space { OB_ELEMENTS, OB_PADDING, OB_SPACES };

/* The elements of a piece of a bucket or fragment: first those of tensors, then the padding, each
 * with consecutive numbers of its space. */
struct ob_stretch {
  uint64_t first[OB_SPACES];
  size_t count[OB_SPACES], bucket, piece;
};

/* `count` elements of a piece, from `offset` on. */
struct ob_run {
  size_t piece, offset, count;
};

/* checkpoint/checkpoint.h */
struct ob_part_tensor;
struct ob_saving;

/* An object's declaration of its state. */
struct ob_state {
  void *object;
  onebit_comm_t comm;
  const char *kind, *noun; /* its name in checkpoints, and in their error messages */
  uint64_t steps;
  size_t tensors;
  /* Fills in the part's header from the object, and makes scratch to read it. */
  onebit_status_t (*describe)(struct ob_saving *saving);
  void (*list_tensors)(const void *object, struct ob_part_tensor *rows);
  /* Returns the number of stretches, in the order of their memory, and lists them in `all` unless
   * that is NULL. Padding has no numbers in this list. */
  size_t (*list_stretches)(const void *object, struct ob_stretch *all);
  /* Returns true if the object has the row, as `saving` describes it. */
  bool (*has)(const struct ob_saving *saving, enum ob_saved what);
  /* Returns the address of number i of a row of numbers. */
  const void *(*number)(void *object, enum ob_saved what, uint64_t i);
  /* extent returns the elements of a stretch that this rank saves. in_shards returns true if ranks
   * save their own shards of the row, and false if each saves a part of a row that is equal on all;
   * NULL: never. */
  struct ob_run (*extent)(const struct ob_saving *saving, enum ob_saved what,
                          const struct ob_stretch *stretch);
  bool (*in_shards)(const struct ob_saving *saving, enum ob_saved what);
  /* Reads the elements of a run as floats. */
  onebit_status_t (*read)(struct ob_saving *saving, enum ob_saved what, size_t bucket,
                          const struct ob_run *run, float *values);
};

/* --- An optimizer's rows */

/* The meaning of the momentum of compressed tensors. */
enum ob_stage {
  OB_STAGE_WARMUP, /* the momentum */
  OB_STAGE_FROZEN, /* the momentum times beta1, in the place of the residual */
  OB_STAGE_SENT    /* the last message; there are residuals too */
};

/* ob_stage_of returns the stage of the optimizer; ob_has_section returns true if the optimizer has
 * the section in that stage. */
enum ob_stage ob_stage_of(const struct onebit_optimizer *optimizer);
bool ob_has_section(const struct onebit_optimizer *optimizer, enum ob_stage stage,
                    enum ob_saved what);

/* The form in which numbers are stored. */
enum ob_content {
  OB_CONTENT_FLOATS,
  OB_CONTENT_PIECES,   /* floats in the bucket's parameters, piece by piece */
  OB_CONTENT_BFLOATS,  /* bfloat16 */
  OB_CONTENT_RESIDUAL, /* compensated values, minus their decoded signs */
  OB_CONTENT_SENT,     /* the decoded signs of compensated values */
  OB_CONTENT_MESSAGES  /* the latest messages received: signs times scales */
};

/* A bucket's part of a section, on this rank: blocks first .. end - 1 of the bucket's layout. */
struct ob_section {
  enum ob_saved what;
  enum ob_content content;
  const struct ob_bucket *bucket;
  struct onebit_plan *plan; /* the plan that has this layout, these residuals and messages */
  size_t first, end;
  /* The array, in memory of the bucket's executor, and its first word; unused for messages and
   * pieces. */
  void *values;
  size_t first_word;
  const struct ob_residual *residual; /* has the scales */
};

struct ob_section ob_section_of(const struct ob_bucket *bucket, enum ob_stage stage,
                                enum ob_saved what);

/* --- Elements of a section */

enum { OB_CHUNK = 32768 }; /* elements at a time */

/* Returns the offset of block number `block` in a piece: 0 if the block is before the piece, the
 * piece's count if it is after the piece. */
size_t ob_block_offset_in_piece(const struct ob_layout *layout, size_t piece, size_t block);

/* Finds the next run of elements of the blocks first .. end - 1, in their order; the first one if
 * *run is zero. Returns false if there are no more. */
bool ob_find_next_run(const struct ob_layout *layout, size_t first, size_t end, struct ob_run *run);

/* Scratch of ob_section_read. */
struct ob_reader {
  float *scales;
  unsigned char *message; /* a copy of message `copied` of `plan`, if that is in device memory */
  const struct onebit_plan *plan;
  size_t copied;
};

/* `destroy` is safe after a failure. */
onebit_status_t ob_reader_create(struct ob_reader *reader,
                                 const struct onebit_optimizer *optimizer);
void ob_reader_destroy(struct ob_reader *reader);

/* ob_section_read reads the elements of a run as floats, whatever their memory and form;
 * ob_section_write writes them. Residuals are written as they are, not as compensated values.
 * `scratch` holds a chunk. Errors are those of copying. */
onebit_status_t ob_section_read(struct ob_reader *reader, const struct ob_section *section,
                                const struct ob_run *run, float *values);
onebit_status_t ob_section_write(const struct ob_section *section, const struct ob_run *run,
                                 const float *values, float *scratch);

/* Returns the index of the interval that contains the block: of messages, or of shards. `bounds`
 * has count + 1 entries, `stride` apart. */
size_t ob_find_interval(const size_t *bounds, size_t stride, size_t count, size_t block);

#endif
