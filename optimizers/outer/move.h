/* An outer step that is moved: what move.c and move_align.c share. */
#ifndef OB_OPTIMIZERS_OUTER_MOVE_H
#define OB_OPTIMIZERS_OUTER_MOVE_H

#include "optimizers/outer/sites.h"

struct ob_moving {
  struct onebit_outer *outer;
  onebit_comm_t comm;
  struct ob_batch *batch;
  float *message;
  uint64_t *noted; /* of each rank, in the latest agreement */
  int source, holders;
  bool holder;
};

/* Collective: everyone's number. */
onebit_status_t ob_moving_learn(struct ob_moving *moving, onebit_status_t status, uint64_t number);
/* Values from the source to all whose number differs from its own. */
onebit_status_t ob_moving_pass_on(struct ob_moving *moving, float *values, size_t count);
/* Chooses the source; who differs from it gets consensus, outer momentum and counts. */
onebit_status_t ob_moving_align(struct ob_moving *moving);

#endif
