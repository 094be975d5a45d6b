/* Replayed values against recorded ones. */
#include "tools/replay/compare.h"

#include <math.h>
#include <stdio.h>

static const struct tolerance {
  double relative, absolute;
  uint64_t values_per_exception;
  const char *allowed; /* how far an exception may go */
} tolerances[] = {
    /* of all optimizers that of 1-bit Adam */
    [REPLAY_ALLREDUCE] = {1e-5, 0, 10000, "differ in more than the sign"},
    [REPLAY_ADAM] = {1e-5, 1e-6, 1000, "differ by more than a few update lengths"},
};

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

static void note(struct replay_tally *tally, size_t step, size_t index, float got, float recorded,
                 bool wild) {
  if (tally->exceptions++ == 0) {
    tally->first_step = step;
    tally->first_index = index;
    tally->first_got = got;
    tally->first_recorded = recorded;
  }
  tally->wild += wild;
}

void replay_compare_results(struct replay_tally *tally, size_t step, const float *got,
                            const float *recorded, size_t count) {
  const struct tolerance *tolerance = &tolerances[REPLAY_ALLREDUCE];
  tally->values += count;
  for (size_t i = 0; i < count; i++) {
    double far = distance(tolerance, (double)got[i], (double)recorded[i]);
    tally->worst = fmax(tally->worst, far);
    if (far > tolerance->relative)
      note(tally, step, i, got[i], recorded[i],
           distance(tolerance, -(double)got[i], (double)recorded[i]) > tolerance->relative);
  }
}

void replay_compare_parameters(struct replay_tally *tally, size_t step, const float *got,
                               const float *recorded, const float *length, size_t count) {
  const struct tolerance *tolerance = &tolerances[REPLAY_ADAM];
  tally->values += count;
  for (size_t i = 0; i < count; i++) {
    double far = distance(tolerance, (double)got[i], (double)recorded[i]);
    tally->worst = fmax(tally->worst, far);
    if (far > tolerance->relative)
      note(tally, step, i, got[i], recorded[i],
           !(fabs((double)got[i] - (double)recorded[i]) <= UPDATE_LENGTHS * (double)length[i]));
  }
}

void replay_lengthen(float *length, const float *recorded_before, const float *recorded,
                     const float *got_before, const float *got, size_t count) {
  for (size_t i = 0; i < count; i++) {
    float update = fminf(fabsf(recorded[i] - recorded_before[i]), fabsf(got[i] - got_before[i]));
    length[i] = fmaxf(length[i], update);
  }
}

void replay_tally_add(struct replay_tally *sum, const struct replay_tally *more) {
  if (sum->exceptions == 0) {
    sum->first_step = more->first_step;
    sum->first_index = more->first_index;
    sum->first_got = more->first_got;
    sum->first_recorded = more->first_recorded;
  }
  sum->values += more->values;
  sum->exceptions += more->exceptions;
  sum->wild += more->wild;
  sum->worst = fmax(sum->worst, more->worst);
}

bool replay_within_allowance(enum replay_kind kind, const struct replay_tally *tally,
                             char words[REPLAY_WORDS]) {
  const struct tolerance *tolerance =
      &tolerances[kind == REPLAY_ALLREDUCE ? REPLAY_ALLREDUCE : REPLAY_ADAM];
  uint64_t allowed = tally->values / tolerance->values_per_exception;
  if (tally->exceptions <= allowed && tally->wild == 0)
    return true;
  snprintf(words, REPLAY_WORDS,
           "%llu exceptions, %llu are allowed; %llu %s; the first: step %llu, value %llu is %.9g, "
           "recorded %.9g",
           (unsigned long long)tally->exceptions, (unsigned long long)allowed,
           (unsigned long long)tally->wild, tolerance->allowed,
           (unsigned long long)tally->first_step, (unsigned long long)tally->first_index,
           (double)tally->first_got, (double)tally->first_recorded);
  return false;
}
