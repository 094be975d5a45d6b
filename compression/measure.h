/*
 * Measures what quantising does to a block: the norms by which a plan finds that its messages have
 * too few bits, or more than they need (collectives/ladder.h).
 */
#ifndef OB_COMPRESSION_MEASURE_H
#define OB_COMPRESSION_MEASURE_H

#include "compression/codec.h"

/* Sums of squares. */
struct ob_norms {
  double input;    /* what was added to the residual */
  double residual; /* what is left now */
  double value;    /* the compensated values, input and residual before */
  double lower;    /* what half as many bits would leave of those */
};

/* One block, after it was quantised. The arrays have whole groups. */
struct ob_measure_run {
  size_t count;
  unsigned width;      /* bits an element */
  const float *values; /* compensated */
  float scale;         /* in one bit: the scale they were sent with */
  const float *error;  /* in more bits: the new residual */
  const float *before; /* the residual before: lazy, with before_scale, or if that is 0 plain */
  float before_scale;
  onebit_scale_t rule;
  float *scratch; /* of more than one bit: ob_measure_scratch floats */
};

size_t ob_measure_scratch(size_t block);

struct ob_norms ob_measure(const struct ob_measure_run *run, const struct ob_codec *codec);

#endif
