/* Measures the norms of a block. Sums are in lanes, as those of scales are, so that any compiler's
 * vectors give the same. */
#include "compression/measure.h"

#include <math.h>

#include "compression/levels.h"

struct lanes {
  float input[OB_LANES], residual[OB_LANES], value[OB_LANES], magnitude[OB_LANES];
};

static inline void measure_add(const struct ob_measure_run *run, size_t at, size_t lane,
                               struct lanes *lanes) {
  const float value = run->values[at];
  const float input = value - ob_residual_of(run->before[at], run->before_scale);
  const float left = run->error ? run->error[at] : ob_residual_of(value, run->scale);
  lanes->input[lane] += input * input;
  lanes->residual[lane] += left * left;
  lanes->value[lane] += value * value;
  lanes->magnitude[lane] += ob_magnitude(value, ONEBIT_SCALE_MEAN_ABSOLUTE);
}

static void add_block(const struct ob_measure_run *run, struct lanes *lanes) {
  const size_t whole = run->count / OB_LANES * OB_LANES;
  for (size_t at = 0; at < whole; at += OB_LANES)
    for (size_t i = 0; i < OB_LANES; i++)
      measure_add(run, at + i, i, lanes);
  for (size_t i = 0; whole + i < run->count; i++)
    measure_add(run, whole + i, i, lanes);
}

static double measure_sum(const float *lanes) {
  double sum = 0;
  for (size_t i = 0; i < OB_LANES; i++)
    sum += (double)lanes[i];
  return sum;
}

static float square_of(const float *values, size_t count) {
  float squares[OB_LANES] = {0};
  for (size_t at = 0; at < count; at += OB_LANES)
    for (size_t i = 0; i < OB_LANES; i++)
      squares[i] += values[at + i] * values[at + i];
  return (float)measure_sum(squares);
}

/* The scratch takes the error and the fields that quantising writes; nothing reads the fields. */
size_t ob_measure_scratch(size_t block) { return block + block / OB_LANES * OB_MAX_WIDTH; }

/* The sum of squares that levels of `width` bits would leave of the values. */
static double left_by_levels(const struct ob_measure_run *run, unsigned width, double value,
                             const struct ob_codec *codec) {
  const float largest = codec->largest(run->values, run->count);
  const struct ob_quantise_run lower = {
      .count = run->count,
      .width = width,
      .values = run->values,
      .scale = ob_level_scale((float)value, run->count, largest, run->rule, width),
      .residual_out = run->scratch,
      .fields =
          (uint32_t *)(void *)(run->scratch + (run->count + OB_LANES - 1) / OB_LANES * OB_LANES),
  };
  codec->quantise(&lower);
  return (double)square_of(run->scratch, run->count);
}

/* Sum of (|c| - s)^2, s being their root mean square. */
static double left_by_signs(size_t count, double value, double magnitude) {
  return 2 * (value - sqrt(value / (double)count) * magnitude);
}

struct ob_norms ob_measure(const struct ob_measure_run *run, const struct ob_codec *codec) {
  struct lanes lanes = {{0}, {0}, {0}, {0}};
  add_block(run, &lanes);
  struct ob_norms norms = {measure_sum(lanes.input), measure_sum(lanes.residual),
                           measure_sum(lanes.value), 0};
  if (run->width > 2)
    norms.lower = left_by_levels(run, run->width / 2, norms.value, codec);
  else if (run->width == 2)
    norms.lower = left_by_signs(run->count, norms.value, measure_sum(lanes.magnitude));
  return norms;
}
