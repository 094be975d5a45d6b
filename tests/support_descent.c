/* The problem of support_descent.h. */
#include "tests/support_descent.h"

#include "tests/support.h"

static float curvature(size_t i) { return 0.55f + 0.45f * uniform_value(i); }
static float target(int rank, size_t i) {
  return uniform_value(10000 + i) + 3.0f * uniform_value(20000 + (size_t)rank * 10000 + i);
}

float descent_slope(float w, int rank, size_t i) { return curvature(i) * (w - target(rank, i)); }

double descent_excess(const float w[UNKNOWNS]) {
  double sum = 0.0;
  for (size_t i = 0; i < UNKNOWNS; i++) {
    double best = 0.0;
    for (int r = 0; r < RANKS; r++)
      best += (double)target(r, i) / RANKS;
    sum += 0.5 * (double)curvature(i) * ((double)w[i] - best) * ((double)w[i] - best);
  }
  return sum;
}

double descent_agreed(const double excess[RANKS]) {
  for (int r = 1; r < RANKS; r++)
    cr_assert(memcmp(&excess[r], &excess[0], sizeof excess[0]) == 0,
              "ranks have come to different losses");
  return excess[0];
}
