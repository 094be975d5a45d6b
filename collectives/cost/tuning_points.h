/* The lines of a tuning file that are of whole calls: correction and chunk. */
#ifndef OB_COLLECTIVES_TUNING_POINTS_H
#define OB_COLLECTIVES_TUNING_POINTS_H

#include <stdio.h>

#include "collectives/cost/cost.h"

#define OB_TUNING_WRONG_CAPACITY 160

/* Parse the text after the key, and overwrite it; `wrong` gets the fault. */
void ob_tuning_read_correction(struct ob_cost_measured *measured, char *text,
                               char wrong[OB_TUNING_WRONG_CAPACITY]);
void ob_tuning_read_chunk(struct ob_cost_measured *measured, char *text,
                          char wrong[OB_TUNING_WRONG_CAPACITY]);

void ob_tuning_write_points(FILE *file, const struct ob_cost_measured *measured);

#endif
