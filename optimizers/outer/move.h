/* An outer step that is moved: what move.c and move_align.c share. */
#ifndef OB_OPTIMIZERS_OUTER_MOVE_H
#define OB_OPTIMIZERS_OUTER_MOVE_H

#include "optimizers/moving.h"
#include "optimizers/outer/sites.h"

struct ob_rejoining {
  struct onebit_outer *outer;
  struct ob_moving ranks; /* its comm NULL: this rank is not among them */
  float *message;
};

/* Values from the source to all whose number, in the latest agreement, differs from its own. */
onebit_status_t ob_rejoining_pass_on(struct ob_rejoining *moving, float *values, size_t count);
/* Chooses the source; who differs from it gets consensus, outer momentum and counts. */
onebit_status_t ob_rejoining_align(struct ob_rejoining *moving);

#endif
