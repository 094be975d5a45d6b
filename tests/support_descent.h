/*
 * An optimization problem: a sum of squares whose minima differ by rank, with the same curvature on
 * all. The ranks disagree by more than they agree, so their gradients do not vanish at the common
 * optimum.
 */
#ifndef ONEBIT_TESTS_SUPPORT_DESCENT_H
#define ONEBIT_TESTS_SUPPORT_DESCENT_H

#include <stddef.h>

enum { RANKS = 4, UNKNOWNS = 1500 };

/* The derivative of a rank's sum by unknown i at the value w. */
float descent_slope(float w, int rank, size_t i);

/* The mean loss above its minimum: sum of curvature / 2 (w - mean target)^2. */
double descent_excess(const float w[UNKNOWNS]);

/* The excess of all ranks, which must be equal to the bit. */
double descent_agreed(const double excess[RANKS]);

#endif
