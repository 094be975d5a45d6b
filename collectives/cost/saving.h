/* What compressing would save a program that does not, for those who know no plans: the
 * drop-ins. */
#ifndef OB_COLLECTIVES_COST_SAVING_H
#define OB_COLLECTIVES_COST_SAVING_H

#include <stddef.h>

/* Of the time of MPI_Allreduce of so many elements the part that a compressed one takes, by the
 * cost model with what was tuned here, or its defaults: 0.25 is a quarter. More than 1: it takes
 * longer. hosts: of the ranks, evenly. */
double ob_cost_part(int hosts, int ranks, size_t elements, size_t element_bytes, int bits);

#endif
