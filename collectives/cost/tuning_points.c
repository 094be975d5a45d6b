/* Points of a tuning file: what was measured of whole calls, a line each. */
#include "collectives/cost/tuning_points.h"

#include <string.h>

#include "collectives/cost/tuning.h"

/* Buffers and messages from one element to more than any memory holds, and an int of elements. */
#define BYTES_LEAST 4.0
#define BYTES_MOST  1e15
#define CHUNK_LEAST 32.0
#define CHUNK_MOST  2147483647.0

/* --- Reading */

static const char *wire_word(onebit_wire_t wire) {
  return wire == ONEBIT_WIRE_DENSE ? "float32" : "bits";
}

/* Cuts exactly so many words from a text, at its spaces; a comment ends it. */
static bool split(char *text, char *words[], size_t count) {
  text[strcspn(text, "#")] = '\0';
  for (size_t k = 0; k < count; k++) {
    text += strspn(text, " \t");
    words[k] = text;
    text += strcspn(text, " \t");
    if (text == words[k])
      return false;
    if (*text)
      *text++ = '\0';
  }
  return text[strspn(text, " \t")] == '\0';
}

static bool take_number(const char *name, const char *text, double low, double high, double *value,
                        char wrong[OB_TUNING_WRONG_ROOM]) {
  if (!ob_tuning_number(text, value))
    snprintf(wrong, OB_TUNING_WRONG_ROOM, "%s is '%.40s', not a number", name, text);
  else if (*value < low || *value > high)
    snprintf(wrong, OB_TUNING_WRONG_ROOM, "%s is %.40s, not %g to %g", name, text, low, high);
  else
    return true;
  return false;
}

static void add(struct ob_cost_curve *curve, double bytes, double value,
                char wrong[OB_TUNING_WRONG_ROOM]) {
  if (curve->count == OB_COST_POINTS)
    snprintf(wrong, OB_TUNING_WRONG_ROOM, "is one too many: %d are read", OB_COST_POINTS);
  else if (!ob_cost_add_point(curve, bytes, value))
    snprintf(wrong, OB_TUNING_WRONG_ROOM, "is of %.0f bytes, no more than the one before", bytes);
}

/* OB_COST_CANDIDATES: none. */
static size_t candidate_of(const char *schedule, const char *wire) {
  size_t k = 0;
  while (k < OB_COST_CANDIDATES &&
         (strcmp(schedule, ob_cost_schedule_name(ob_cost_candidates[k].schedule)) != 0 ||
          strcmp(wire, wire_word(ob_cost_candidates[k].wire)) != 0))
    k++;
  return k;
}

void ob_tuning_take_correction(struct ob_cost_measured *measured, char *text,
                               char wrong[OB_TUNING_WRONG_ROOM]) {
  char *words[4];
  double bytes, factor;
  if (!split(text, words, 4)) {
    snprintf(wrong, OB_TUNING_WRONG_ROOM, "is not 'correction SCHEDULE WIRE BYTES FACTOR'");
    return;
  }
  size_t k = candidate_of(words[0], words[1]);
  if (k == OB_COST_CANDIDATES)
    snprintf(wrong, OB_TUNING_WRONG_ROOM, "corrects '%.40s %.40s', which does not exist", words[0],
             words[1]);
  else if (take_number("size", words[2], BYTES_LEAST, BYTES_MOST, &bytes, wrong) &&
           take_number("factor", words[3], OB_COST_FACTOR_LEAST, OB_COST_FACTOR_MOST, &factor,
                       wrong))
    add(&measured->factor[k], bytes, factor, wrong);
}

void ob_tuning_take_chunk(struct ob_cost_measured *measured, char *text,
                          char wrong[OB_TUNING_WRONG_ROOM]) {
  char *words[2];
  double bytes, elements;
  if (!split(text, words, 2))
    snprintf(wrong, OB_TUNING_WRONG_ROOM, "is not 'chunk BYTES ELEMENTS'");
  else if (take_number("size", words[0], BYTES_LEAST, BYTES_MOST, &bytes, wrong) &&
           take_number("chunk", words[1], CHUNK_LEAST, CHUNK_MOST, &elements, wrong))
    add(&measured->chunk, bytes, elements, wrong);
}

/* --- Writing */

/* Whole numbers have no point, which would be the locale's. */
static void write_factors(FILE *file, const struct ob_cost_candidate *candidate,
                          const struct ob_cost_curve *curve) {
  for (size_t i = 0; i < (size_t)curve->count; i++) {
    int thousandths = (int)(1000 * curve->point[i].value + 0.5);
    fprintf(file, "correction %s %s %.0f %d.%03d\n", ob_cost_schedule_name(candidate->schedule),
            wire_word(candidate->wire), curve->point[i].bytes, thousandths / 1000,
            thousandths % 1000);
  }
}

void ob_tuning_write_points(FILE *file, const struct ob_cost_measured *measured) {
  fprintf(file, "# Of these hosts and ranks only: measured/model, and the fastest messages.\n");
  for (size_t k = 0; k < OB_COST_CANDIDATES; k++)
    write_factors(file, &ob_cost_candidates[k], &measured->factor[k]);
  for (size_t i = 0; i < (size_t)measured->chunk.count; i++)
    fprintf(file, "chunk %.0f %.0f\n", measured->chunk.point[i].bytes,
            measured->chunk.point[i].value);
}
