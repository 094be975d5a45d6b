/*
 * A problem to descend on: a sum of squares that every rank has other minima of, with the same
 * curvature for all. The ranks disagree by more than they agree, so their gradients do not vanish
 * at the common optimum.
 */
#ifndef ONEBIT_TESTS_SUPPORT_DESCENT_H
#define ONEBIT_TESTS_SUPPORT_DESCENT_H

#include <stddef.h>

enum { RANKS = 4, UNKNOWNS = 1500 };

/* The gradient of a rank's sum by unknown i, where that is w. */
float descent_slope(float w, int rank, size_t i);

/* The mean loss above its minimum: sum of curvature / 2 (w - mean target)^2. */
double descent_excess(const float w[UNKNOWNS]);

/* The excess of all ranks, which must have come to the same bits. */
double descent_agreed(const double excess[RANKS]);

#endif
