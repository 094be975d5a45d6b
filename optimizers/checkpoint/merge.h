/*
 * Parts of several ranks become one, over a communicator: what is in merge.c and merge_pieces.c.
 *
 * Every rank tells the others how many steps it has made and which sections it has. The one with
 * the most steps, of several the lowest, is the source; who is hardly behind has its state from the
 * same run, and is a holder; the others are joiners, whose own state counts for nothing. All make
 * memory for a part with every section that the source's stage has, whole, fill in what they have,
 * and go through it piece by piece. Of each piece they tell each other a hash, so that only what
 * differs travels.
 */
#ifndef OB_OPTIMIZERS_CHECKPOINT_MERGE_H
#define OB_OPTIMIZERS_CHECKPOINT_MERGE_H

#include "optimizers/checkpoint/checkpoint.h"
#include "optimizers/moving.h"

enum { OB_MERGE_WINDOW = 64 }; /* pieces whose hashes travel together */

/* A cache: the latest mean variances that were computed. */
struct ob_merge_variance {
  size_t tensor;
  float mean, of_all[2]; /* of_all: variances, reciprocals */
  bool known, known_of_all[2];
};

struct ob_merge {
  struct onebit_optimizer *optimizer;
  struct ob_moving moving;
  struct ob_state state;
  struct ob_saving saving; /* this rank's part, unless optimizer->held has it */
  struct ob_part *ranks;   /* the headers and sections of all */
  unsigned char *fronts;   /* in which `ranks` came */
  size_t *starts;          /* of each rank's there; */
  size_t *windows;         /* likewise in `hashes` */
  uint64_t *elements;      /* number of each tensor's first; and how many there are */
  struct ob_part *merged;
  uint64_t *hashes; /* OB_MERGE_WINDOW a rank; 0: it does not have the piece */
  float *received;  /* OB_CHUNK a rank */
  double *sums;     /* OB_CHUNK */
  struct ob_merge_variance variance;
  struct ob_outcome outcome; /* of reading this rank's part */
};

/* Numbers of a section, at most OB_CHUNK. */
struct ob_merge_piece {
  const struct ob_part_section *section;
  uint64_t first;
  size_t count;
};

/* Return the place of a piece's numbers in the merged part; and their hash, which is not 0. */
void *ob_merge_at(const struct ob_merge *merge, const struct ob_merge_piece *piece);
uint64_t ob_merge_hash(const struct ob_merge *merge, const struct ob_merge_piece *piece);

/* The tensor that has an element. */
size_t ob_merge_tensor(const struct ob_merge *merge, uint64_t element);

/* Sends piece number `slot` of the window, whose hashes are known, to the ranks that lack it. */
onebit_status_t ob_merge_settle(struct ob_merge *merge, const struct ob_merge_piece *piece,
                                size_t slot);

/* Replaces a piece that no rank has. All other pieces of the section are there. */
onebit_status_t ob_merge_replace(struct ob_merge *merge, const struct ob_merge_piece *piece);

#endif
