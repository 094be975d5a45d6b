/* Reads a tuning file, whose contents are not trusted, and estimates the gain of compression. */
#define _POSIX_C_SOURCE 200809L
#include "collectives/cost/tuning.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/knobs.h"
#include "collectives/cost/cost.h"
#include "compression/codec.h"

/* The limits of a file: the longest line has a key and the name of a host; a file has one line for
 * each host and some more. */
#define LINE_CAPACITY 512
#define MAX_LINES     100000

static const char heading[] = "onebit tuning ";

/* --- Words */

/* Sets the default costs, and writes the reason to `source`. */
static enum ob_tuning_state refuse_tuning(struct ob_costs *costs, const struct ob_tuning_here *here,
                                          enum ob_tuning_state state, const char *path,
                                          const char *why) {
  ob_costs_default(here->codec, costs);
  snprintf(costs->source, sizeof costs->source, "defaults: %.100s %.140s", path, why);
  return state;
}

/* --- Numbers */

bool ob_tuning_number(const char *text, double *value) {
  char *end;
  if (strspn(text, "0123456789.eE+-") != strlen(text) || !strchr("0123456789.", *text))
    return false;
  *value = strtod(text, &end);
  return end > text && !*end && isfinite(*value);
}

/* --- Lines */

struct reader {
  const struct ob_tuning_here *here;
  struct ob_costs costs;
  struct ob_tuning_origin origin;
  char codec[OB_TUNING_TEXT_CAPACITY];
  bool seen[OB_TUNING_KEYS];
  size_t hosts, line;
  bool here_listed;
  char wrong[OB_TUNING_WRONG_CAPACITY]; /* the line's fault, or "" */
};

/* Reads a line without its end. Returns false at the end of the file. A line that is too long, or
 * contains a zero byte, is an error. */
static bool read_next_line(struct reader *reader, FILE *file, char line[LINE_CAPACITY]) {
  size_t length = 0;
  int c = getc(file);
  if (c == EOF)
    return false;
  for (; c != EOF && c != '\n'; c = getc(file)) {
    if (c == '\0' || length == LINE_CAPACITY - 1) {
      snprintf(reader->wrong, sizeof reader->wrong, "is too long, or has a zero byte");
      break;
    }
    line[length++] = (char)c;
  }
  while (length && strchr(" \t\r", line[length - 1]))
    length--;
  line[length] = '\0';
  if (++reader->line > MAX_LINES)
    snprintf(reader->wrong, sizeof reader->wrong,
             "is one more than the %d lines that a file may have", MAX_LINES);
  return true;
}

static void read_text_value(struct reader *reader, char text[OB_TUNING_TEXT_CAPACITY],
                            const char *key, const char *value) {
  if (*text)
    snprintf(reader->wrong, sizeof reader->wrong, "repeats the key %.40s", key);
  snprintf(text, OB_TUNING_TEXT_CAPACITY, "%.*s", OB_TUNING_TEXT_CAPACITY - 1, value);
}

/* Parses the number of a key. A comment may follow a number; names and texts may contain a #. */
static void read_number_value(struct reader *reader, size_t k, char *text) {
  const struct ob_tuning_key *key = &ob_tuning_keys[k];
  text[strcspn(text, " \t#")] = '\0';
  double value;
  if (reader->seen[k])
    snprintf(reader->wrong, sizeof reader->wrong, "repeats the key %s", key->name);
  else if (!ob_tuning_number(text, &value))
    snprintf(reader->wrong, sizeof reader->wrong, "%s is '%.40s', not a number", key->name, text);
  else if (value < key->low || value > key->high)
    snprintf(reader->wrong, sizeof reader->wrong, "%s is %.40s, not %g to %g", key->name, text,
             key->low, key->high);
  else
    memcpy((char *)&reader->costs + key->offset, &value, sizeof value);
  reader->seen[k] = true;
}

static void read_host_name(struct reader *reader, const char *name) {
  reader->hosts++;
  reader->here_listed |= reader->here->host && strcmp(name, reader->here->host) == 0;
}

static void read_key_value(struct reader *reader, const char *key, char *value) {
  if (strcmp(key, "host") == 0)
    read_host_name(reader, value);
  else if (strcmp(key, "date") == 0)
    read_text_value(reader, reader->origin.date, key, value);
  else if (strcmp(key, "mpi") == 0)
    read_text_value(reader, reader->origin.mpi, key, value);
  else if (strcmp(key, "codec") == 0)
    read_text_value(reader, reader->codec, key, value);
  else if (strcmp(key, "correction") == 0)
    ob_tuning_read_correction(&reader->costs.measured, value, reader->wrong);
  else if (strcmp(key, "chunk") == 0)
    ob_tuning_read_chunk(&reader->costs.measured, value, reader->wrong);
  else {
    size_t k = 0;
    while (k < OB_TUNING_KEYS && strcmp(key, ob_tuning_keys[k].name) != 0)
      k++;
    if (k == OB_TUNING_KEYS)
      snprintf(reader->wrong, sizeof reader->wrong, "has an unknown key, '%.40s'", key);
    else
      read_number_value(reader, k, value);
  }
}

static void parse_tuning_line(struct reader *reader, char *line) {
  line += strspn(line, " \t");
  char *value = line + strcspn(line, " \t");
  if (*line == '#' || !*line)
    return;
  if (*value)
    *value++ = '\0';
  value += strspn(value, " \t");
  if (!*value)
    snprintf(reader->wrong, sizeof reader->wrong, "has no value for '%.40s'", line);
  else
    read_key_value(reader, line, value);
}

/* --- Files */

static enum ob_tuning_state check_heading(struct reader *reader, const char *line) {
  double version;
  if (strncmp(line, heading, sizeof heading - 1) != 0 ||
      !ob_tuning_number(line + sizeof heading - 1, &version)) {
    snprintf(reader->wrong, sizeof reader->wrong, "does not say '%s%d'", heading,
             OB_TUNING_VERSION);
    return OB_TUNING_DAMAGED;
  }
  if (version > OB_TUNING_VERSION)
    return OB_TUNING_NEWER;
  return OB_TUNING_READ;
}

static void check_complete(struct reader *reader) {
  const char *missing = !*reader->codec ? "codec" : reader->hosts == 0 ? "host" : NULL;
  for (size_t k = 0; !missing && k < OB_TUNING_KEYS; k++)
    missing = reader->seen[k] ? NULL : ob_tuning_keys[k].name;
  if (missing && !*reader->wrong)
    snprintf(reader->wrong, sizeof reader->wrong, "is the last line, and the key %s is missing",
             missing);
}

/* Reads the whole file into the reader. */
static enum ob_tuning_state read_tuning_lines(struct reader *reader, FILE *file) {
  char line[LINE_CAPACITY];
  enum ob_tuning_state state = OB_TUNING_READ;
  while (state == OB_TUNING_READ && !*reader->wrong && read_next_line(reader, file, line)) {
    if (*reader->wrong)
      break;
    if (reader->line == 1)
      state = check_heading(reader, line);
    else
      parse_tuning_line(reader, line);
  }
  if (state == OB_TUNING_READ)
    check_complete(reader);
  return *reader->wrong ? OB_TUNING_DAMAGED : state;
}

static enum ob_tuning_state accept_costs(struct reader *reader, const char *path,
                                         struct ob_costs *costs) {
  const struct ob_tuning_here *here = reader->here;
  char why[256];
  if (here->host && !reader->here_listed) {
    snprintf(why, sizeof why, "was measured on other hosts, not on %.80s: run onebit-tune here",
             here->host);
    return refuse_tuning(costs, here, OB_TUNING_STALE, path, why);
  }
  if (here->codec && strcmp(reader->codec, here->codec) != 0) {
    snprintf(why, sizeof why, "was measured with codec %.20s, but this host uses codec %.20s",
             reader->codec, here->codec);
    return refuse_tuning(costs, here, OB_TUNING_STALE, path, why);
  }
  *costs = reader->costs;
  snprintf(costs->codec, sizeof costs->codec, "%.*s", OB_COST_CODEC_CAPACITY - 1, reader->codec);
  snprintf(costs->source, sizeof costs->source, "%.120s of %.40s, %g host%s", path,
           *reader->origin.date ? reader->origin.date : "an unknown day", costs->hosts,
           costs->hosts > 1 ? "s" : "");
  return OB_TUNING_READ;
}

enum ob_tuning_state ob_tuning_parse(FILE *file, const char *path,
                                     const struct ob_tuning_here *here, struct ob_costs *costs,
                                     struct ob_tuning_origin *origin) {
  struct reader reader = {.here = here};
  char why[256];
  memset(&reader.costs, 0, sizeof reader.costs); /* the padding too */
  enum ob_tuning_state state = read_tuning_lines(&reader, file);
  if (origin)
    *origin = reader.origin;
  if (state == OB_TUNING_DAMAGED) {
    snprintf(why, sizeof why, "is damaged: line %zu %s", reader.line, reader.wrong);
    return refuse_tuning(costs, here, state, path, why);
  }
  if (state == OB_TUNING_NEWER) {
    snprintf(why, sizeof why, "has a format newer than version %d", OB_TUNING_VERSION);
    return refuse_tuning(costs, here, state, path, why);
  }
  return accept_costs(&reader, path, costs);
}

enum ob_tuning_state ob_tuning_read(const char *path, const struct ob_tuning_here *here,
                                    struct ob_costs *costs, struct ob_tuning_origin *origin) {
  char why[256], reason[OB_INPUT_REASON];
  struct ob_input input;
  int code = ob_input_open(&input, AT_FDCWD, path);
  FILE *file = code == 0 ? fdopen(input.number, "rb") : NULL;
  if (!file) {
    snprintf(why, sizeof why, "cannot be read: %s", ob_input_reason(code ? code : errno, reason));
    if (code == ENOENT)
      snprintf(why, sizeof why, "does not exist");
    ob_input_close(&input);
    return refuse_tuning(costs, here, OB_TUNING_MISSING, path, why);
  }
  enum ob_tuning_state state = ob_tuning_parse(file, path, here, costs, origin);
  fclose(file);
  return state;
}

bool ob_tuning_path(char path[OB_TUNING_PATH_CAPACITY]) {
  const char *named = ob_knob_text(OB_KNOB_TUNING);
  const char *config = getenv("XDG_CONFIG_HOME"), *home = getenv("HOME");
  int length;
  if (named && strcmp(named, "none") == 0)
    return false;
  if (named)
    length = snprintf(path, OB_TUNING_PATH_CAPACITY, "%s", named);
  else if (config && *config)
    length = snprintf(path, OB_TUNING_PATH_CAPACITY, "%s/onebit/tuning", config);
  else if (home && *home)
    length = snprintf(path, OB_TUNING_PATH_CAPACITY, "%s/.config/onebit/tuning", home);
  else
    return false;
  return length > 0 && length < OB_TUNING_PATH_CAPACITY;
}

enum ob_tuning_state ob_tuning_find(struct ob_costs *costs) {
  char path[OB_TUNING_PATH_CAPACITY], host[OB_TUNING_NAME_CAPACITY] = "";
  const struct ob_codec *codec;
  struct ob_tuning_here here = {.host = host};
  gethostname(host, sizeof host - 1);
  here.codec = ob_codec_choose(&codec) == ONEBIT_OK ? codec->name : NULL;
  if (ob_tuning_path(path))
    return ob_tuning_read(path, &here, costs, NULL);
  const char *named = ob_knob_text(OB_KNOB_TUNING);
  return refuse_tuning(costs, &here, OB_TUNING_OFF, named ? "ONEBIT_TUNING" : "HOME",
                       named ? "names no file" : "is not set");
}

double ob_cost_part(int hosts, int ranks, size_t elements, size_t element_bytes, int bits) {
  struct ob_costs costs;
  struct ob_cost_choice choice;
  const struct ob_cost_task task = {.operation = ONEBIT_ALLREDUCE,
                                    .elements = elements,
                                    .wire = ONEBIT_WIRE_BITS,
                                    .bits = bits,
                                    .hosts = hosts,
                                    .ranks_per_host = ranks / hosts,
                                    .ranks = ranks,
                                    .max_ranks = ranks / hosts};
  ob_tuning_find(&costs);
  double dense = ob_cost_mpi_seconds(&costs, &task, element_bytes);
  ob_cost_choose(&costs, &task, &choice);
  return dense > 0 ? choice.seconds / dense : 1;
}
