/* The model of a step of training: the computation, and the exchange that hides behind it. */
#ifndef OB_COLLECTIVES_COST_STEP_H
#define OB_COLLECTIVES_COST_STEP_H

/* The part of the computation that an exchange can hide behind (backward is two thirds), and the
 * part of the exchange that cannot be hidden (the last of 25 buckets). */
#define OB_STEP_HIDING  (2.0 / 3)
#define OB_STEP_EXPOSED (1.0 / 25)

/* The least speed-up that is worth the rounding to bits, and that is worth a change to a dense
 * exchange, which costs no rounding. */
#define OB_STEP_WORTH       1.05
#define OB_STEP_WORTH_DENSE 1.02

/* The seconds of an exchange that a step waits for, where it overlaps. */
static inline double ob_step_waiting(double exchange, double compute) {
  const double behind = exchange - OB_STEP_HIDING * compute, exposed = OB_STEP_EXPOSED * exchange;
  return behind > exposed ? behind : exposed;
}

#endif
