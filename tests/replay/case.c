/* A recorded case: its arrays, and its text, of which every key is checked. */
#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/replay/replay.h"

#define REFUSE(file, format, ...)                                                                  \
  replay_fail(result, "%.300s/%s: " format, recorded->directory, file, __VA_ARGS__)

/* A file in memory, with a zero byte behind it; NULL after saying why. */
static char *read_file(const struct replay_case *recorded, const char *name, size_t *bytes,
                       struct replay_result *result) {
  char path[4096], *data = NULL;
  snprintf(path, sizeof path, "%s/%s", recorded->directory, name);
  FILE *file = fopen(path, "rb");
  long size = file && fseek(file, 0, SEEK_END) == 0 ? ftell(file) : -1;
  if (size >= 0 && (data = calloc((size_t)size + 1, 1))) {
    rewind(file);
    *bytes = fread(data, 1, (size_t)size, file);
  } else
    REFUSE(name, "%s", strerror(errno));
  if (file)
    fclose(file);
  return data;
}

static bool read_array(const struct replay_case *recorded, const char *name, size_t rows,
                       size_t columns, float **values, struct replay_result *result) {
  size_t bytes = 0, wanted = rows * columns * recorded->count * sizeof **values;
  *values = (float *)(void *)read_file(recorded, name, &bytes, result);
  return *values &&
         (bytes == wanted || REFUSE(name, "%zu bytes, not the %zu of %zu x %zu x %zu float32",
                                    bytes, wanted, rows, columns, recorded->count));
}

/* A line that cases of some kinds must have. low, high: of integers; high: how many reals. */
struct key {
  const char *name;
  enum { INTEGER, REALS, SHAPES, TEXT } type;
  unsigned kinds;
  size_t at, low, high;
};

enum { ALLREDUCE = 1, ADAM = 2, LAMB = 4, ZERO_ONE = 8, OPTIMIZER = 14, ALL = 15 };
enum { MAX_RANKS = 4096, MAX_COUNT = 1 << 24 /* products of these fit into a size_t */ };

#define AT(field) offsetof(struct replay_case, field)

static const struct key keys[] = {
    {"world", INTEGER, ALL, AT(world), 1, MAX_RANKS},
    {"steps", INTEGER, ALL, AT(steps), 1, MAX_COUNT},
    {"count", INTEGER, ALLREDUCE, AT(count), 1, MAX_COUNT},
    {"shapes", SHAPES, OPTIMIZER, AT(tensor_counts), 0, 0},
    {"lr", REALS, OPTIMIZER, AT(learning_rate), 0, 1},
    {"betas", REALS, OPTIMIZER, AT(betas), 0, 2},
    {"eps", REALS, OPTIMIZER, AT(epsilon), 0, 1},
    {"weight_decay", REALS, OPTIMIZER, AT(weight_decay), 0, 1},
    {"freeze_step", INTEGER, ADAM | LAMB, AT(freeze_step), 0, MAX_COUNT},
    {"max_coeff", REALS, LAMB, AT(max_coefficient), 0, 1},
    {"min_coeff", REALS, LAMB, AT(min_coefficient), 0, 1},
    {"coeff_beta", REALS, LAMB, AT(coefficient_beta), 0, 1},
    {"factor_max", REALS, LAMB, AT(max_factor), 0, 1},
    {"factor_min", REALS, LAMB, AT(min_factor), 0, 1},
    {"factor_threshold", REALS, LAMB, AT(factor_change), 0, 1},
    {"var_freeze_step", INTEGER, ZERO_ONE, AT(freeze_step), 0, MAX_COUNT},
    {"var_update_scaler", INTEGER, ZERO_ONE, AT(variance_update_scaler), 1, MAX_COUNT},
    {"local_step_scaler", INTEGER, ZERO_ONE, AT(local_step_scaler), 1, MAX_COUNT},
    {"local_step_clipper", INTEGER, ZERO_ONE, AT(local_step_clipper), 1, MAX_COUNT},
    {"params_ranks", INTEGER, OPTIMIZER, AT(params_ranks), 1, MAX_RANKS},
    {"dense_allreduce_before_step", TEXT, OPTIMIZER, AT(dense_steps), 0, 0},
};

/* The value of a key in the lines "key = value", which zero bytes end. */
static char *find_value(const struct replay_case *recorded, size_t bytes, const char *key) {
  const size_t length = strlen(key);
  for (char *line = recorded->text; line < recorded->text + bytes; line += strlen(line) + 1) {
    char *at = line + strspn(line, " ");
    if (strncmp(at, key, length) == 0 && *(at += length + strspn(at + length, " ")) == '=')
      return at + 1 + strspn(at + 1, " ");
  }
  return NULL;
}

static bool read_reals(const char *text, size_t count, double *values) {
  for (size_t i = 0; i < count; i++) {
    char *end;
    values[i] = strtod(text, &end);
    if (end == text || !isfinite(values[i]) || (*end && *end != ' '))
      return false;
    text = end;
  }
  return !*text;
}

/* Shapes with blanks between, such as "513 37x3 1". */
static bool read_shapes(const char *text, struct replay_case *recorded) {
  for (recorded->tensors = 0; *text; text += strspn(text, " ")) {
    size_t elements = 1;
    char *end = NULL;
    do {
      const char *digits = end ? end + 1 : text;
      elements *= strtoul(digits, &end, 10);
      if (end == digits || *digits < '0' || elements > MAX_COUNT)
        return false;
    } while (*end == 'x');
    if ((*end && *end != ' ') || recorded->tensors == REPLAY_TENSORS)
      return false;
    recorded->tensor_counts[recorded->tensors++] = elements;
    recorded->count += elements;
    text = end;
  }
  return true;
}

static bool read_value(struct replay_case *recorded, const struct key *key, const char *text) {
  void *field = (char *)recorded + key->at;
  double number;
  if (key->type == TEXT) /* a digit a step */
    return strlen(*(const char **)field = text) == recorded->steps;
  if (key->type == SHAPES)
    return read_shapes(text, recorded);
  if (key->type == REALS)
    return read_reals(text, key->high, field);
  const bool good = read_reals(text, 1, &number) && number == floor(number) &&
                    number >= (double)key->low && number <= (double)key->high;
  *(size_t *)field = good ? (size_t)number : 0;
  return good;
}

static bool parse(struct replay_case *recorded, size_t bytes, struct replay_result *result) {
  static const char *const kinds[REPLAY_KINDS] = {"allreduce", "adam", "lamb", "zoadam"};
  for (char *at = recorded->text; (at = strchr(at, '\n')); at++)
    *at = '\0';
  const char *text = find_value(recorded, bytes, "kind");
  while (text && recorded->kind < REPLAY_KINDS && strcmp(text, kinds[recorded->kind]) != 0)
    recorded->kind++;
  if (!text || recorded->kind == REPLAY_KINDS)
    return REFUSE("case.txt", "kind is %.60s", text ? text : "missing");
  for (const struct key *key = keys; key < keys + sizeof keys / sizeof keys[0]; key++)
    if (key->kinds & 1u << recorded->kind) {
      text = find_value(recorded, bytes, key->name);
      if (!text || !read_value(recorded, key, text))
        return REFUSE("case.txt", "%s is %.60s, out of its range or no such value", key->name,
                      text ? text : "missing");
    }
  return true;
}

bool replay_case_open(struct replay_case *recorded, const char *directory,
                      struct replay_result *result) {
  size_t bytes = 0;
  *recorded = (struct replay_case){.directory = directory, .params_ranks = 1};
  recorded->text = read_file(recorded, "case.txt", &bytes, result);
  if (!recorded->text || !parse(recorded, bytes, result))
    return false;
  const bool reduces = recorded->kind == REPLAY_ALLREDUCE;
  return read_array(recorded, reduces ? "in.f32" : "grads.f32", recorded->steps, recorded->world,
                    &recorded->input, result) &&
         read_array(recorded, reduces ? "out.f32" : "params.f32", recorded->steps,
                    recorded->params_ranks, &recorded->output, result) &&
         (reduces || read_array(recorded, "params0.f32", 1, 1, &recorded->start, result));
}

void replay_case_close(struct replay_case *recorded) {
  free(recorded->text);
  free(recorded->input);
  free(recorded->output);
  free(recorded->start);
}
