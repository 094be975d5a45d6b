/*
 * The state of an outer step, as its checkpoints have it: a part of kind "outer"
 * (optimizers/checkpoint/checkpoint.h). Elements are numbered through all tensors; a fragment is
 * the elements from its first one on.
 */
#ifndef OB_OPTIMIZERS_OUTER_STATE_H
#define OB_OPTIMIZERS_OUTER_STATE_H

#include "optimizers/checkpoint/checkpoint.h"
#include "optimizers/outer/outer.h"

#define OB_OUTER_KIND "outer"
#define OB_SITES_KIND "outer-sites" /* a site's: its ranks save and load by themselves */

static inline const char *ob_outer_kind(const struct onebit_outer *outer) {
  return outer->sites ? OB_SITES_KIND : OB_OUTER_KIND;
}

/* Without sites an exchange is one of the first three; among sites the first, or OB_OUTER_SENT, a
 * drift that is sent again. */
enum ob_outer_state { OB_OUTER_IDLE, OB_OUTER_RECEIVED, OB_OUTER_SKIPPED, OB_OUTER_SENT };

/* The numbers of a part: this rank's. */
struct ob_fragment_numbers {
  uint64_t count, state, remaining; /* remaining: local steps until it is applied */
  uint64_t finite;
  double weight, sent_weight, squares;
  uint64_t keeps; /* whether the residual is in the parameters */
};

struct ob_outer_numbers {
  uint64_t steps, position, local_steps;
  struct ob_fragment_numbers fragment[];
};

/* Returns the number of these numbers, of 8 bytes. */
static inline size_t ob_outer_number_count(const struct onebit_outer *outer) {
  return (sizeof(struct ob_outer_numbers) +
          outer->options.fragments * sizeof(struct ob_fragment_numbers)) /
         sizeof(uint64_t);
}

/* Check that a part fits this outer step; and that its numbers fit, beside those of the first
 * part. */
onebit_status_t ob_outer_check_part(const struct ob_part *part, const struct onebit_outer *outer);
onebit_status_t ob_outer_check_numbers(const struct ob_part *part,
                                       const struct ob_outer_numbers *numbers,
                                       const struct onebit_outer *outer,
                                       const struct ob_outer_numbers *first);

/* Ends what is in flight, and applies nothing. Collective. Fails where an exchange has: but not
 * where all ranks skip it. */
onebit_status_t ob_outer_settle(struct onebit_outer *outer);

/* Returns this outer step's position in its round if another is at `position` of a round of `round`
 * steps: the same fragment is next, after the same part of the steps between it and the one
 * before. */
size_t ob_outer_position(const struct onebit_outer *outer, size_t position, size_t round);

/* Frees the plans and communicators of exchanges; residuals are held. May be called again.
 * Local. */
onebit_status_t ob_outer_detach(struct onebit_outer *outer);
/* onebit_outer_move. */
onebit_status_t ob_outer_rejoin(struct onebit_outer *outer, onebit_comm_t comm);

/* The same begun exchanges on all ranks, so that each can wait for its own. Collective. */
onebit_status_t ob_outer_agree_started(struct onebit_outer *outer, onebit_status_t status);

/* True if fragment->drift is a mean that is not applied yet. */
static inline bool ob_outer_received(const struct ob_fragment *fragment) {
  return fragment->stage == OB_FRAGMENT_ENDED && fragment->outcome.status == ONEBIT_OK;
}

#endif
