/*
 * Merges the parts of several ranks into one, over a communicator: merge.c and merge_pieces.c.
 *
 * Every rank sends the others the number of its steps and the list of its sections. The lowest rank
 * with the most steps is the source. Ranks that are behind by few steps have state of the same run,
 * and are holders; the others are joiners, whose state is ignored. Every rank allocates a part with
 * complete sections for the source's stage, fills in its own state, and processes the part piece by
 * piece. For each piece the ranks exchange hashes, so that only pieces that differ are sent.
 */
#ifndef OB_OPTIMIZERS_CHECKPOINT_MERGE_H
#define OB_OPTIMIZERS_CHECKPOINT_MERGE_H

#include "optimizers/checkpoint/checkpoint.h"
#include "optimizers/moving.h"

enum { OB_MERGE_WINDOW = 64 }; /* pieces whose hashes are sent together */

/* A cache: the latest mean variances that were computed. */
struct ob_merge_variance {
  size_t tensor;
  float mean, of_all[2]; /* of_all: means over all tensors, of variances and of reciprocals */
  bool known, known_of_all[2];
};

struct ob_merge {
  struct onebit_optimizer *optimizer;
  struct ob_moving moving;
  struct ob_state state;
  struct ob_saving saving; /* this rank's part, unless optimizer->held has it */
  struct ob_part *ranks;   /* the headers and sections of all ranks */
  unsigned char *fronts;   /* memory of these headers and sections */
  size_t *starts;          /* offsets of the ranks' fronts in `fronts` */
  size_t *windows;         /* offsets of the ranks' hashes in `hashes` */
  uint64_t *elements;      /* the number of each tensor's first element, and of all elements */
  struct ob_part *merged;
  uint64_t *hashes; /* OB_MERGE_WINDOW per rank; 0: the rank does not have the piece */
  float *received;  /* OB_CHUNK per rank */
  double *sums;     /* OB_CHUNK */
  struct ob_merge_variance variance;
  struct ob_outcome outcome; /* errors of reading this rank's part */
};

/* A piece of a section: at most OB_CHUNK consecutive numbers. */
struct ob_merge_piece {
  const struct ob_part_section *section;
  uint64_t first;
  size_t count;
};

/* ob_merge_at returns the address of a piece's numbers in the merged part, ob_merge_hash the hash
 * of these numbers, which is never 0. */
void *ob_merge_at(const struct ob_merge *merge, const struct ob_merge_piece *piece);
uint64_t ob_merge_hash(const struct ob_merge *merge, const struct ob_merge_piece *piece);

/* Returns the tensor that has an element. */
size_t ob_merge_tensor(const struct ob_merge *merge, uint64_t element);

/* Sends piece number `slot` of the window, whose hashes are known, to the ranks that do not have
 * the piece. */
onebit_status_t ob_merge_distribute(struct ob_merge *merge, const struct ob_merge_piece *piece,
                                    size_t slot);

/* Sets a default for the values of a piece that no rank has saved. All other pieces of the section
 * are complete. */
onebit_status_t ob_merge_replace(struct ob_merge *merge, const struct ob_merge_piece *piece);

#endif
