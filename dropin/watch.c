/* What samples of a tensor's calls say. */
#include "dropin/watch.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"

struct ob_watch {
  unsigned calls;
  bool finite[OB_WATCH_CALLS];
  float rows[OB_WATCH_CALLS][OB_WATCH_ELEMENTS];
};

/* The bounds. docs/preload.md says on which streams they were chosen. */
#define MAX_ZEROS      0.75   /* of a sample's elements */
#define MAX_INTEGERS   0.9    /* of those that are not zero */
#define MAX_SIGN       0.9    /* of those that are not zero, with one sign */
#define MAX_MEAN       0.6    /* of a call, relative to its root mean square */
#define MAX_COSINE     0.98   /* of calls, however far apart */
#define MIN_COSINE     (-0.2) /* of calls one after the other */
#define MAX_STEADINESS 0.25   /* the cosine of two changes one after the other */
#define MAX_PREDICTED  0.98   /* of the squares */
#define MAX_TREND      4.0    /* of the last third's magnitude to the first's, or its reciprocal */
#define MAX_RANGE      64.0   /* of the largest call's to the smallest's */
#define MAX_RESIDUAL   4.0
#define MAX_RELATION   0.2

const char *ob_finding_text(enum ob_finding finding) {
  static const char *const texts[OB_FINDING_COUNT] = {
      [OB_FINDING_NONE] = "like a gradient",
      [OB_FINDING_UNFAITHFUL] = "one bit an element does not follow the values",
      [OB_FINDING_VARYING] = "magnitudes of calls differ too much",
      [OB_FINDING_SHRINKING] = "the values shrink",
      [OB_FINDING_GROWING] = "the values grow",
      [OB_FINDING_RELATED] = "equal calls of a step correlate, as those of a solver",
      [OB_FINDING_PREDICTED] = "the values follow from those of the calls before",
      [OB_FINDING_ALTERNATING] = "a call goes against the one before it, as those of a solver",
      [OB_FINDING_REPEATED] = "values come back some calls later",
      [OB_FINDING_SMOOTH] = "the values hardly change, or steadily, from call to call",
      [OB_FINDING_ONE_SIGNED] = "the values have one sign",
      [OB_FINDING_INTEGER] = "the values are integers",
      [OB_FINDING_SPARSE] = "the values are mostly zero",
      [OB_FINDING_UNSEEN] = "too few finite values, or no memory to look at them",
  };
  return finding >= 0 && finding < OB_FINDING_COUNT ? texts[finding] : "unknown finding";
}

struct ob_watch *ob_watch_create(void) {
  return ob_allocate(1, sizeof(struct ob_watch));
}

void ob_watch_destroy(struct ob_watch *watch) { ob_release(watch); }

void ob_watch_add(struct ob_watch *watch, onebit_dtype_t dtype, const void *values, size_t count) {
  if (!watch || watch->calls == OB_WATCH_CALLS)
    return;
  const size_t size = ob_elements_size(dtype);
  float *row = watch->rows[watch->calls];
  bool all = true;
  memset(row, 0, sizeof watch->rows[0]);
  for (size_t run = 0; run < OB_WATCH_RUNS; run++) {
    size_t first = count / OB_WATCH_RUNS * run, behind = count - first;
    ob_elements_read(dtype, row + run * OB_WATCH_RUN, (const char *)values + first * size,
                     behind < OB_WATCH_RUN ? behind : OB_WATCH_RUN);
  }
  for (size_t i = 0; i < OB_WATCH_ELEMENTS; i++)
    all = all && isfinite(row[i]);
  watch->finite[watch->calls++] = all;
}

/* ---- Of all samples together ---- */

/* The rows that were finite, without the others between them. */
struct rows {
  unsigned count;
  const float *row[OB_WATCH_CALLS];
  double norm[OB_WATCH_CALLS];
};

static double dot(const float *a, const float *b) {
  double sum = 0;
  for (size_t i = 0; i < OB_WATCH_ELEMENTS; i++)
    sum += (double)a[i] * (double)b[i];
  return sum;
}

static struct rows rows_of(const struct ob_watch *watch, unsigned calls) {
  struct rows rows = {.count = 0};
  for (unsigned t = 0; t < watch->calls && t < calls; t++) {
    if (!watch->finite[t])
      continue;
    rows.row[rows.count] = watch->rows[t];
    rows.norm[rows.count++] = sqrt(dot(watch->rows[t], watch->rows[t]));
  }
  return rows;
}

struct tally {
  double elements, zeros, integers, positive, offset; /* offset: calls whose mean is large */
};

static void count_row(struct tally *tally, const float *row, double norm) {
  double sum = 0;
  for (size_t i = 0; i < OB_WATCH_ELEMENTS; i++) {
    tally->zeros += row[i] == 0;
    tally->integers += row[i] != 0 && rintf(row[i]) == row[i];
    tally->positive += row[i] > 0;
    sum += (double)row[i];
  }
  tally->elements += OB_WATCH_ELEMENTS;
  tally->offset += fabs(sum) > MAX_MEAN * norm * sqrt((double)OB_WATCH_ELEMENTS);
}

static enum ob_finding judge_values(const struct rows *rows) {
  struct tally tally = {0};
  for (unsigned t = 0; t < rows->count; t++)
    count_row(&tally, rows->row[t], rows->norm[t]);
  double others = tally.elements - tally.zeros;
  if (tally.zeros > MAX_ZEROS * tally.elements)
    return OB_FINDING_SPARSE;
  if (tally.integers > MAX_INTEGERS * others)
    return OB_FINDING_INTEGER;
  if (tally.positive > MAX_SIGN * others || tally.positive < (1 - MAX_SIGN) * others ||
      tally.offset > rows->count / 2.0)
    return OB_FINDING_ONE_SIGNED;
  return OB_FINDING_NONE;
}

/* ---- From call to call ---- */

static int by_size(const void *one, const void *other) {
  double a = *(const double *)one, b = *(const double *)other;
  return (a > b) - (a < b);
}

static double median(double *values, unsigned count) {
  qsort(values, count, sizeof *values, by_size);
  return count ? (values[(count - 1) / 2] + values[count / 2]) / 2 : 0;
}

/* Of two that do not differ from zero: as if they were one. */
static double cosine(double product, double one, double other) {
  return one > 0 && other > 0 ? product / (one * other) : 1;
}

static double cosine_at(const struct rows *rows, unsigned stride) {
  double cosines[OB_WATCH_CALLS];
  unsigned count = 0;
  for (unsigned t = stride; t < rows->count; t++, count++)
    cosines[count] =
        cosine(dot(rows->row[t], rows->row[t - stride]), rows->norm[t], rows->norm[t - stride]);
  return median(cosines, count);
}

/* Near -1/2 where the calls are a mean and noise, and near 0 where they are a momentum; positive
 * where they move steadily. */
static double steadiness(const struct rows *rows, unsigned stride) {
  double cosines[OB_WATCH_CALLS];
  unsigned count = 0;
  for (unsigned t = 2 * stride; t < rows->count; t++, count++) {
    const float *a = rows->row[t], *b = rows->row[t - stride], *c = rows->row[t - 2 * stride];
    double later = 0, earlier = 0, both = 0;
    for (size_t i = 0; i < OB_WATCH_ELEMENTS; i++) {
      double x = (double)a[i] - (double)b[i], y = (double)b[i] - (double)c[i];
      later += x * x;
      earlier += y * y;
      both += x * y;
    }
    cosines[count] = cosine(both, sqrt(later), sqrt(earlier));
  }
  return median(cosines, count);
}

/* An element, and what it may follow from: it and its neighbours in the two calls before. */
enum { CAUSES = 6 };

static void add_products(double sums[CAUSES + 1][CAUSES + 1], const struct rows *rows, unsigned t,
                         size_t i) {
  const float *a = rows->row[t - 1] + i, *b = rows->row[t - 2] + i;
  const double terms[CAUSES + 1] = {(double)a[-1],          (double)a[0], (double)a[1],
                                    (double)b[-1],          (double)b[0], (double)b[1],
                                    (double)rows->row[t][i]};
  for (int j = 0; j <= CAUSES; j++)
    for (int k = 0; k <= CAUSES; k++)
      sums[j][k] += terms[j] * terms[k];
}

/* The part of the squares that the best linear combination explains: what is left of them in the
 * last place when the others have been eliminated is what it does not. */
static double predicted(const struct rows *rows) {
  double sums[CAUSES + 1][CAUSES + 1] = {{0}}, whole, largest = 0;
  for (unsigned t = 2; t < rows->count; t++)
    for (size_t i = 1; i + 1 < OB_WATCH_ELEMENTS; i++)
      if (i % OB_WATCH_RUN != 0 && (i + 1) % OB_WATCH_RUN != 0)
        add_products(sums, rows, t, i);
  whole = sums[CAUSES][CAUSES];
  for (int j = 0; j < CAUSES; j++)
    largest = fmax(largest, sums[j][j]);
  for (int j = 0; j < CAUSES; j++) {
    if (sums[j][j] <= 1e-9 * largest) /* it is a combination of those before */
      continue;
    for (int row = j + 1; row <= CAUSES; row++) {
      double factor = sums[row][j] / sums[j][j];
      for (int k = j; k <= CAUSES; k++)
        sums[row][k] -= factor * sums[j][k];
    }
  }
  return whole > 0 ? 1 - sums[CAUSES][CAUSES] / whole : 1;
}

static enum ob_finding judge_changes(const struct rows *rows) {
  for (unsigned stride = 1; stride <= rows->count / 4; stride++) {
    bool steady = steadiness(rows, stride) > MAX_STEADINESS;
    if (steady || fabs(cosine_at(rows, stride)) > MAX_COSINE)
      return stride == 1 ? OB_FINDING_SMOOTH : OB_FINDING_REPEATED;
  }
  if (cosine_at(rows, 1) < MIN_COSINE)
    return OB_FINDING_ALTERNATING;
  return predicted(rows) > MAX_PREDICTED ? OB_FINDING_PREDICTED : OB_FINDING_NONE;
}

/* ---- Magnitudes ---- */

static enum ob_finding judge_magnitudes(const struct rows *rows) {
  double norms[OB_WATCH_CALLS];
  unsigned third = rows->count / 3;
  memcpy(norms, rows->norm, sizeof norms);
  double last = median(norms + rows->count - third, third), first = median(norms, third);
  memcpy(norms, rows->norm, sizeof norms);
  qsort(norms, rows->count, sizeof *norms, by_size);
  if (last > MAX_TREND * first)
    return OB_FINDING_GROWING;
  if (first > MAX_TREND * last)
    return OB_FINDING_SHRINKING;
  return norms[rows->count - 1] > MAX_RANGE * norms[0] ? OB_FINDING_VARYING : OB_FINDING_NONE;
}

/* ---- Beside a compression ---- */

/* One run of neighbours through one bit, a scale and error feedback. */
static void compress_run(const float *values, float *residual) {
  double squares = 0;
  for (size_t i = 0; i < OB_WATCH_RUN; i++) {
    residual[i] += values[i];
    squares += (double)residual[i] * (double)residual[i];
  }
  float scale = (float)sqrt(squares / OB_WATCH_RUN);
  for (size_t i = 0; i < OB_WATCH_RUN; i++)
    residual[i] -= copysignf(scale, residual[i]);
}

/* The residual is what running sums of the values and of their compressed forms differ by. */
static enum ob_finding judge_residual(const struct rows *rows) {
  float residual[OB_WATCH_ELEMENTS] = {0};
  double norms[OB_WATCH_CALLS];
  for (unsigned t = 0; t < rows->count; t++)
    for (size_t run = 0; run < OB_WATCH_RUNS; run++)
      compress_run(rows->row[t] + run * OB_WATCH_RUN, residual + run * OB_WATCH_RUN);
  memcpy(norms, rows->norm, sizeof norms);
  return sqrt(dot(residual, residual)) > MAX_RESIDUAL * median(norms, rows->count)
             ? OB_FINDING_UNFAITHFUL
             : OB_FINDING_NONE;
}

/* ---- The whole ---- */

enum ob_finding ob_watch_judge(const struct ob_watch *watch, unsigned calls) {
  struct rows rows = {.count = 0};
  if (watch)
    rows = rows_of(watch, calls);
  if (rows.count < 4 || rows.count < calls * 3 / 4)
    return OB_FINDING_UNSEEN;
  enum ob_finding finding = judge_values(&rows);
  if (finding == OB_FINDING_NONE)
    finding = judge_changes(&rows);
  if (finding == OB_FINDING_NONE)
    finding = judge_magnitudes(&rows);
  return finding == OB_FINDING_NONE ? judge_residual(&rows) : finding;
}

bool ob_watch_related(const struct ob_watch *one, const struct ob_watch *other) {
  double cosines[OB_WATCH_CALLS];
  unsigned count = 0;
  if (!one || !other)
    return false;
  for (unsigned t = 0; t < one->calls && t < other->calls; t++) {
    const float *a = one->rows[t], *b = other->rows[t];
    if (one->finite[t] && other->finite[t])
      cosines[count++] = fabs(cosine(dot(a, b), sqrt(dot(a, a)), sqrt(dot(b, b))));
  }
  return count >= 4 && median(cosines, count) > MAX_RELATION;
}
