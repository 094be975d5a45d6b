/* Reads and writes the lines of a tuning file: keys with their numbers, and points, which are
 * measurements of whole calls. The bounds of numbers are wider than any machine needs: they only
 * exclude values that break the model's arithmetic. */
#include "collectives/cost/tuning.h"

#include <string.h>

#define AT(field) offsetof(struct ob_costs, field)

/* clang-format off */
const struct ob_tuning_key ob_tuning_keys[OB_TUNING_KEYS] = {
  {"hosts", AT(hosts), 1, 1e6, "hosts measured"},
  {"ranks-per-host", AT(ranks_per_host), 0, 1e5, "ranks on each; 0: not the same on all"},
  {"cores-per-host", AT(cores_per_host), 0, 1e5, "cores; 0: as many as ranks"},
  {"cores-shared", AT(cores_shared), 0, 1e5, "cores that all hosts share; 0: none"},
  {"between.latency", AT(between.latency), 0, 10, "seconds of latency, one way"},
  {"between.bandwidth", AT(between.bandwidth), 1, 1e13, "bytes/s of a host, each way"},
  {"between.message", AT(between.message), 0, 1, "seconds of a core per message"},
  {"between.byte", AT(between.byte), 0, 1e-3, "seconds of a core per byte"},
  {"inside.latency", AT(inside.latency), 0, 10, "seconds of latency, one way"},
  {"inside.bandwidth", AT(inside.bandwidth), 1, 1e13, "bytes/s of a rank, each way"},
  {"inside.message", AT(inside.message), 0, 1, "seconds of a core per message"},
  {"inside.byte", AT(inside.byte), 0, 1e-3, "seconds of a core per byte"},
  {"compress", AT(compress), 0, 1e-3, "seconds of a core per element"},
  {"reduce", AT(reduce), 0, 1e-3, "seconds of a core per element"},
  {"reduce-stream", AT(reduce_stream), 0, 1e-3, "seconds of a core per element and stream"},
  {"apply", AT(apply), 0, 1e-3, "seconds of a core per element"},
  {"load", AT(load), 0, 1e-3, "seconds of a core per dense element"},
  {"add", AT(add), 0, 1e-3, "seconds of a core per dense element and stream"},
  {"convert", AT(convert), 0, 1e-3, "seconds of a core per dense element"},
  {"call", AT(call), 0, 10, "seconds per call"},
  {"exchange-efficiency", AT(exchange_efficiency), 0.01, 2, "fitted: part of the bandwidth"},
  {"codec-factor", AT(codec_factor), 0.1, 100, "fitted: codec time in an exchange over time alone"},
  {"unhidden", AT(unhidden), 0, 1, "fitted: part of the smaller of wire and cores not hidden"},
  {"mpi.call", AT(mpi_call), 0, 10, "fitted: seconds per MPI_Allreduce"},
  {"mpi.round", AT(mpi_round), 0, 10, "fitted: seconds per round of an MPI_Allreduce"},
  {"mpi.efficiency", AT(mpi_efficiency), 0.01, 2, "fitted: part of the bandwidth"},
  {"mpi.byte", AT(mpi_byte), 0, 1e-3, "fitted: seconds of a core per byte"},
  {"oversubscribed", AT(oversubscribed), 0, 10, "fitted: seconds that a wait takes longer"},
  {"residual", AT(residual), 0, 100,
   "error of the fit: root mean square of log(predicted/measured)"},
};
/* clang-format on */

/* --- Points: measurements of whole calls, one in each line -------------------------------------*/

/* Bounds of points: sizes of buffers and messages range from one element to more than any memory
 * holds, and the elements of a chunk are an int. */
#define MIN_BYTES 4.0
#define MAX_BYTES 1e15
#define MIN_CHUNK 32.0
#define MAX_CHUNK 2147483647.0

/* --- Reading */

static const char *wire_word(onebit_wire_t wire) {
  return wire == ONEBIT_WIRE_DENSE ? "float32" : "bits";
}

/* Cuts a text at spaces into fields, and fails unless it has exactly `count`; a comment ends the
 * text. */
static bool tuning_points_split(char *text, char *field[], size_t count) {
  text[strcspn(text, "#")] = '\0';
  for (size_t k = 0; k < count; k++) {
    text += strspn(text, " \t");
    field[k] = text;
    text += strcspn(text, " \t");
    if (text == field[k])
      return false;
    if (*text)
      *text++ = '\0';
  }
  return text[strspn(text, " \t")] == '\0';
}

static bool tuning_points_read_number(const char *name, const char *text, double low, double high,
                                      double *value, char wrong[OB_TUNING_WRONG_CAPACITY]) {
  if (!ob_tuning_number(text, value))
    snprintf(wrong, OB_TUNING_WRONG_CAPACITY, "%s is '%.40s', not a number", name, text);
  else if (*value < low || *value > high)
    snprintf(wrong, OB_TUNING_WRONG_CAPACITY, "%s is %.40s, not %g to %g", name, text, low, high);
  else
    return true;
  return false;
}

static void tuning_points_add(struct ob_cost_curve *curve, double bytes, double value,
                              char wrong[OB_TUNING_WRONG_CAPACITY]) {
  if (curve->count == OB_COST_POINTS)
    snprintf(wrong, OB_TUNING_WRONG_CAPACITY, "is one more than the %d points that are read",
             OB_COST_POINTS);
  else if (!ob_cost_add_point(curve, bytes, value))
    snprintf(wrong, OB_TUNING_WRONG_CAPACITY,
             "is for %.0f bytes, which is not more than in the line before", bytes);
}

/* Returns the index of the candidate; OB_COST_CANDIDATES if the name is unknown. */
static size_t candidate_of(const char *schedule, const char *wire) {
  size_t k = 0;
  while (k < OB_COST_CANDIDATES &&
         (strcmp(schedule, ob_cost_schedule_name(ob_cost_candidates[k].schedule)) != 0 ||
          strcmp(wire, wire_word(ob_cost_candidates[k].wire)) != 0))
    k++;
  return k;
}

void ob_tuning_read_correction(struct ob_cost_measured *measured, char *text,
                               char wrong[OB_TUNING_WRONG_CAPACITY]) {
  char *field[4];
  double bytes, factor;
  if (!tuning_points_split(text, field, 4)) {
    snprintf(wrong, OB_TUNING_WRONG_CAPACITY, "is not 'correction SCHEDULE WIRE BYTES FACTOR'");
    return;
  }
  size_t k = candidate_of(field[0], field[1]);
  if (k == OB_COST_CANDIDATES)
    snprintf(wrong, OB_TUNING_WRONG_CAPACITY,
             "corrects '%.40s %.40s', which is not a schedule with its wire", field[0], field[1]);
  else if (tuning_points_read_number("size", field[2], MIN_BYTES, MAX_BYTES, &bytes, wrong) &&
           tuning_points_read_number("factor", field[3], OB_COST_MIN_FACTOR, OB_COST_MAX_FACTOR,
                                     &factor, wrong))
    tuning_points_add(&measured->factor[k], bytes, factor, wrong);
}

void ob_tuning_read_chunk(struct ob_cost_measured *measured, char *text,
                          char wrong[OB_TUNING_WRONG_CAPACITY]) {
  char *field[2];
  double bytes, elements;
  if (!tuning_points_split(text, field, 2))
    snprintf(wrong, OB_TUNING_WRONG_CAPACITY, "is not 'chunk BYTES ELEMENTS'");
  else if (tuning_points_read_number("size", field[0], MIN_BYTES, MAX_BYTES, &bytes, wrong) &&
           tuning_points_read_number("chunk", field[1], MIN_CHUNK, MAX_CHUNK, &elements, wrong))
    tuning_points_add(&measured->chunk, bytes, elements, wrong);
}

/* --- Writing */

static void write_factors(FILE *file, const struct ob_cost_candidate *candidate,
                          const struct ob_cost_curve *curve) {
  for (size_t i = 0; i < (size_t)curve->count; i++) {
    int thousandths = (int)(1000 * curve->point[i].value + 0.5);
    fprintf(file, "correction %s %s %.0f %d.%03d\n", ob_cost_schedule_name(candidate->schedule),
            wire_word(candidate->wire), curve->point[i].bytes, thousandths / 1000,
            thousandths % 1000);
  }
}

static void tuning_write_points(FILE *file, const struct ob_cost_measured *measured) {
  fprintf(file, "# For these hosts and ranks only: measured time over the model's, and the fastest "
                "message sizes.\n");
  for (size_t k = 0; k < OB_COST_CANDIDATES; k++)
    write_factors(file, &ob_cost_candidates[k], &measured->factor[k]);
  for (size_t i = 0; i < (size_t)measured->chunk.count; i++)
    fprintf(file, "chunk %.0f %.0f\n", measured->chunk.point[i].bytes,
            measured->chunk.point[i].value);
}

bool ob_tuning_write(FILE *file, const struct ob_costs *costs,
                     const struct ob_tuning_origin *origin) {
  fprintf(file, "onebit tuning %d\n", OB_TUNING_VERSION);
  fprintf(file, "# Written by onebit-tune. ONEBIT_TUNING=FILE makes onebit read another file, "
                "ONEBIT_TUNING=none no file.\n");
  fprintf(file, "date %s\nmpi %s\ncodec %s\n", origin->date, origin->mpi, costs->codec);
  for (size_t k = 0; k < origin->host_count; k++)
    fprintf(file, "host %s\n", origin->hosts[k]);
  for (size_t k = 0; k < OB_TUNING_KEYS; k++) {
    double value;
    memcpy(&value, (const char *)costs + ob_tuning_keys[k].offset, sizeof value);
    fprintf(file, "%s %.8e # %s\n", ob_tuning_keys[k].name, value, ob_tuning_keys[k].meaning);
  }
  tuning_write_points(file, &costs->measured);
  return fflush(file) == 0 && !ferror(file);
}
