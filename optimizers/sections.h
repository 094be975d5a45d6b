/*
 * The places of the rows of an optimizer's state (state.h). One function returns the place of a
 * bucket's part of a row: saving, loading, norms and statistics all use it.
 */
#ifndef OB_OPTIMIZERS_SECTIONS_H
#define OB_OPTIMIZERS_SECTIONS_H

#include "optimizers/optimizer.h"
#include "optimizers/state.h"

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

/* The interval of `bounds`, count + 1 of them, that has this block: messages, shards. */
size_t ob_interval_of(const size_t *bounds, size_t stride, size_t count, size_t block);

#endif
