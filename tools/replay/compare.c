/* Replayed values against recorded ones. */
#include <math.h>
#include <stdio.h>

#include "tools/replay/replay.h"

static const struct tolerance {
  double relative, absolute;
  uint64_t values_per_exception;
  const char *allowed; /* how far an exception may go */
} of_results = {1e-5, 0, 10000, "differ in more than the sign"},
  of_parameters = {1e-5, 1e-6, 1000, "differ by more than a few update lengths"};

/* "A few": a sign that falls on the other side moves a parameter by two lengths, and it may do so
 * twice before the error that it leaves is fed back. */
#define UPDATE_LENGTHS 4.0

/* In units of the recorded value, or of what the absolute tolerance makes of it. */
static double distance(const struct tolerance *tolerance, double got, double recorded) {
  double difference = fabs(got - recorded);
  if (difference == 0)
    return 0;
  double relative = difference / (fabs(recorded) + tolerance->absolute / tolerance->relative);
  return isnan(relative) ? INFINITY : relative;
}

void replay_compare(struct replay_tally *tally, size_t step, const float *got,
                    const float *recorded, const float *length, size_t count) {
  const struct tolerance *tolerance = length ? &of_parameters : &of_results;
  tally->values += count;
  for (size_t i = 0; i < count; i++) {
    double value = (double)got[i], wanted = (double)recorded[i];
    double far = distance(tolerance, value, wanted);
    tally->worst = fmax(tally->worst, far);
    if (far <= tolerance->relative)
      continue;
    if (tally->exceptions++ == 0) {
      tally->first_step = step;
      tally->first_index = i;
      tally->first_got = got[i];
      tally->first_recorded = recorded[i];
    }
    bool wild = length ? !(fabs(value - wanted) <= UPDATE_LENGTHS * (double)length[i])
                       : distance(tolerance, -value, wanted) > tolerance->relative;
    tally->wild += wild;
  }
}

void replay_tally_add(struct replay_tally *sum, const struct replay_tally *more) {
  struct replay_tally total = sum->exceptions ? *sum : *more; /* which has the first exception */
  total.values = sum->values + more->values;
  total.exceptions = sum->exceptions + more->exceptions;
  total.wild = sum->wild + more->wild;
  total.worst = fmax(sum->worst, more->worst);
  *sum = total;
}

bool replay_allowed(enum replay_kind kind, const struct replay_tally *tally,
                    char error[REPLAY_ERROR]) {
  const struct tolerance *tolerance = kind == REPLAY_ALLREDUCE ? &of_results : &of_parameters;
  uint64_t allowed = tally->values / tolerance->values_per_exception;
  if (tally->exceptions <= allowed && tally->wild == 0)
    return true;
  snprintf(error, REPLAY_ERROR,
           "%llu exceptions, %llu are allowed; %llu %s; the first: step %llu, value %llu is %.9g, "
           "recorded %.9g",
           (unsigned long long)tally->exceptions, (unsigned long long)allowed,
           (unsigned long long)tally->wild, tolerance->allowed,
           (unsigned long long)tally->first_step, (unsigned long long)tally->first_index,
           (double)tally->first_got, (double)tally->first_recorded);
  return false;
}
