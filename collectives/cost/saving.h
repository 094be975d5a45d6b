/* The time that compressing would save a program that does not compress, for callers without plans:
 * the drop-ins. */
#ifndef OB_COLLECTIVES_COST_SAVING_H
#define OB_COLLECTIVES_COST_SAVING_H

#include <stddef.h>

/* The time of a compressed allreduce of so many elements, as a part of MPI_Allreduce's, by the cost
 * model with the tuning here, or its defaults: 0.25 is a quarter. More than 1: it takes longer.
 * hosts: of the ranks, evenly. */
double ob_cost_part(int hosts, int ranks, size_t elements, size_t element_bytes, int bits);

#endif
