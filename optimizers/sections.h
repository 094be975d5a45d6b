/*
 * The named sections of an optimizer's state. There is one list of them, and one function that says
 * where a bucket has its part of a section: saving, loading, norms and statistics read the same.
 */
#ifndef OB_OPTIMIZERS_SECTIONS_H
#define OB_OPTIMIZERS_SECTIONS_H

#include "optimizers/optimizer.h"

/* What a section is of: the numbers of the checkpoints' format. */
enum ob_saved {
  OB_SAVED_NORMS = 1,  /* of the automatic freeze, double */
  OB_SAVED_NUMBERS,    /* the method's own, 8 bytes each; all others are floats */
  OB_SAVED_PARAMETERS, /* master values, where parameters are not float32 */
  OB_SAVED_MOMENTUM,
  OB_SAVED_VARIANCE,
  OB_SAVED_FRESH,
  OB_SAVED_ANCHOR,
  OB_SAVED_MOVED,
  OB_SAVED_WORKER,  /* residual of what this rank sends */
  OB_SAVED_SERVER,  /* and of what it sends as the server of its shard */
  OB_SAVED_MOMENTS, /* of each rank's own gradients */
  /* Of outer steps (optimizers/outer/save.c): */
  OB_SAVED_CONSENSUS,
  OB_SAVED_OUTER_MOMENTUM,
  OB_SAVED_DRIFT, /* the mean drift that is not applied yet */
  /* Of an optimizer again, whose buckets move between widths: struct ob_ladder_state of each
   * tensor's bucket, 8 bytes each */
  OB_SAVED_LADDERS,
  OB_SAVED_END
};

/* What the momentum of tensors that are compressed is. */
enum ob_stage {
  OB_STAGE_WARMUP, /* the momentum */
  OB_STAGE_FROZEN, /* times beta1, where residuals will be */
  OB_STAGE_SENT    /* the last message; and there are residuals */
};

/* A row of the list. */
struct ob_saved_row {
  const char *name;
  size_t size;    /* bytes of one number in a checkpoint */
  bool own;       /* it is each rank's own; other ranks than those that saved begin with the mean */
  bool own_apart; /* likewise while ranks differ (ob_method.apart) */
  bool may_lack;  /* elements that nobody has are zeros; of the rest somebody must have each */
  bool finite;    /* messages and residuals are made of it */
};

extern const struct ob_saved_row ob_saved_rows[OB_SAVED_END];

/* What is no elements, but numbers. */
static inline bool ob_saved_numbers(uint32_t what) {
  return what <= OB_SAVED_NUMBERS || what == OB_SAVED_LADDERS;
}

/* The stage that the optimizer is in, and whether the method has that section in that stage. */
enum ob_stage ob_stage_of(const struct onebit_optimizer *optimizer);
bool ob_has_section(const struct onebit_optimizer *optimizer, enum ob_stage stage,
                    enum ob_saved what);

/* In what form numbers are stored. */
enum ob_content {
  OB_CONTENT_FLOATS,
  OB_CONTENT_PIECES,   /* floats, those of a piece where the bucket's parameters are */
  OB_CONTENT_BFLOATS,  /* bfloat16 */
  OB_CONTENT_RESIDUAL, /* compensated values: what their scales leave out of them */
  OB_CONTENT_SENT,     /* the same, and what was sent of them: signs times scales */
  OB_CONTENT_MESSAGES  /* the latest messages that have come: signs times scales */
};

/* A bucket's part of a section, on this rank: blocks first .. end - 1 of the bucket's layout. */
struct ob_section {
  enum ob_saved what;
  enum ob_content content;
  const struct ob_bucket *bucket;
  struct onebit_plan *plan; /* whose layout, residuals and messages these are */
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

/* `count` <= OB_CHUNK elements of a piece, from `offset` on. */
struct ob_run {
  size_t piece, offset, count;
};

/* Where block number `block` begins in a piece: 0 where that is before it, its count where behind
 * it. */
size_t ob_offset_in(const struct ob_layout *layout, size_t piece, size_t block);

/* Calls `body` on the elements of the blocks first .. end - 1, in their order, until it fails. */
typedef onebit_status_t ob_run_body(void *context, const struct ob_run *run);
onebit_status_t ob_each_run(const struct ob_layout *layout, size_t first, size_t end,
                            ob_run_body *body, void *context);

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

/* The interval of `bounds`, count + 1 of them, that has this block: messages, shards. */
size_t ob_interval_of(const size_t *bounds, size_t stride, size_t count, size_t block);

#endif
