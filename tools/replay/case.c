/* A recorded case: its text, read strictly, since a case that is damaged must not run as another;
 * and its files. */
#define _POSIX_C_SOURCE 200809L /* AT_FDCWD */
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "tools/replay/replay.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "recorded arrays are little-endian and are read as they are");

/* A case that is being opened. */
struct opening {
  struct replay_case *recorded;
  size_t line_count;
  struct line {
    const char *key, *value;
    size_t number; /* in the file, from 1 on */
  } lines[128];    /* several times the lines that any kind of case has */
  char *error;
};

__attribute__((format(printf, 4, 5))) static bool refuse(const struct replay_case *recorded,
                                                         char error[REPLAY_ERROR], const char *file,
                                                         const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int used = snprintf(error, REPLAY_ERROR, "%.300s/%s: ", recorded->directory, file);
  vsnprintf(error + used, REPLAY_ERROR - (size_t)used, format, arguments);
  va_end(arguments);
  return false;
}

#define REFUSE(opening, ...) refuse((opening)->recorded, (opening)->error, "case.txt", __VA_ARGS__)

/* --- Files -------------------------------------------------------------------------------------*/

static bool open_file(const struct replay_case *recorded, const char *name, struct ob_input *file,
                      char error[REPLAY_ERROR]) {
  char path[4096],
      reason[OB_INPUT_REASON]; /* no longer path exists; one that is cut is not found */
  snprintf(path, sizeof path, "%s/%s", recorded->directory, name);
  int code = ob_input_open(file, AT_FDCWD, path);
  return code == 0 || refuse(recorded, error, name, "%s", ob_input_reason(code, reason));
}

/* An array has rows x columns x depth values. */
enum extent { ONE, STEPS, WORLD, RANKS, COUNT, PADDED, SHARE };

static const struct array {
  bool allreduce; /* or an optimizer */
  enum replay_file file;
  const char *name;
  enum extent rows, columns, depth;
} arrays[] = {{true, REPLAY_INPUT, "in.f32", STEPS, WORLD, COUNT},
              {true, REPLAY_OUTPUT, "out.f32", STEPS, ONE, COUNT},
              {true, REPLAY_WORKER_ERROR, "worker_error.f32", WORLD, ONE, PADDED},
              {true, REPLAY_SERVER_ERROR, "server_error.f32", WORLD, ONE, SHARE},
              {false, REPLAY_INPUT, "grads.f32", STEPS, WORLD, COUNT},
              {false, REPLAY_OUTPUT, "params.f32", STEPS, RANKS, COUNT},
              {false, REPLAY_START, "params0.f32", ONE, ONE, COUNT},
              {false, REPLAY_MOMENTUM, "exp_avg.f32", ONE, ONE, COUNT},
              {false, REPLAY_VARIANCE, "exp_avg_sq.f32", ONE, ONE, COUNT}};
enum { ARRAYS = sizeof arrays / sizeof arrays[0] };

static bool open_array(struct replay_case *recorded, const struct array *array, char *error) {
  const size_t of[] = {[ONE] = 1,
                       [STEPS] = recorded->steps,
                       [WORLD] = recorded->world,
                       [RANKS] = recorded->params_ranks,
                       [COUNT] = recorded->count,
                       [PADDED] = recorded->padded,
                       [SHARE] = recorded->padded / recorded->world};
  size_t rows = of[array->rows], columns = of[array->columns], depth = of[array->depth];
  size_t wanted;
  struct ob_input *file = &recorded->files[array->file];
  if (__builtin_mul_overflow(rows, columns, &wanted) ||
      __builtin_mul_overflow(wanted, depth * sizeof(float), &wanted))
    return refuse(recorded, error, array->name,
                  "%zu x %zu x %zu values are more than a file can have", rows, columns, depth);
  if (!open_file(recorded, array->name, file, error))
    return false;
  if (file->bytes != wanted)
    return refuse(recorded, error, array->name,
                  "%" PRIu64 " bytes, not the %zu of %zu x %zu x %zu float32", file->bytes, wanted,
                  rows, columns, depth);
  return true;
}

static bool belongs(const struct replay_case *recorded, const struct array *array) {
  return array->allreduce == (recorded->kind == REPLAY_ALLREDUCE);
}

bool replay_case_read(const struct replay_case *recorded, enum replay_file file, size_t first,
                      size_t count, float *values, char error[REPLAY_ERROR]) {
  int code =
      ob_input_read(&recorded->files[file], first * sizeof *values, values, count * sizeof *values);
  char reason[OB_INPUT_REASON];
  if (code == 0)
    return true;
  const struct array *array = arrays;
  while (array->file != file || !belongs(recorded, array))
    array++;
  memset(values, 0, count * sizeof *values);
  return refuse(recorded, error, array->name, "%s", ob_input_reason(code, reason));
}

/* --- The lines of case.txt ---------------------------------------------------------------------*/

/* Loopback's largest group; and what only keeps products of sizes within a size_t and an off_t. */
#define MAX_RANKS 4096
#define MAX_STEPS (1 << 24)
#define MAX_COUNT ((size_t)1 << 40)
#define MAX_TEXT  ((size_t)1 << 20)

/* Reads case.txt into memory. */
static bool read_text(struct opening *opening, const struct ob_input *file) {
  struct replay_case *recorded = opening->recorded;
  char reason[OB_INPUT_REASON];
  if (file->bytes > MAX_TEXT)
    return REFUSE(opening, "%" PRIu64 " bytes are too many", file->bytes);
  if (!(recorded->text = calloc((size_t)file->bytes + 1, 1)))
    return REFUSE(opening, "no memory for it");
  int code = ob_input_read(file, 0, recorded->text, (size_t)file->bytes);
  if (code != 0)
    return REFUSE(opening, "%s", ob_input_reason(code, reason));
  return strlen(recorded->text) == file->bytes ||
         REFUSE(opening, "not a text: it holds a zero byte");
}

static bool load_text(struct opening *opening) {
  struct ob_input file;
  bool good =
      open_file(opening->recorded, "case.txt", &file, opening->error) && read_text(opening, &file);
  ob_input_close(&file);
  return good;
}

/* Without blanks at both ends. */
static char *trimmed(char *line) {
  while (isspace((unsigned char)*line))
    line++;
  char *end = line + strlen(line);
  while (end > line && isspace((unsigned char)end[-1]))
    end--;
  *end = '\0';
  return line;
}

static const struct line *find(const struct opening *opening, const char *key) {
  for (const struct line *line = opening->lines; line < opening->lines + opening->line_count;
       line++)
    if (strcmp(line->key, key) == 0)
      return line;
  return NULL;
}

static bool add_line(struct opening *opening, char *text, size_t number) {
  struct line *line = &opening->lines[opening->line_count];
  char *equals = strchr(text, '=');
  if (opening->line_count == sizeof opening->lines / sizeof opening->lines[0])
    return REFUSE(opening, "line %zu: more lines than any case has", number);
  if (!equals)
    return REFUSE(opening, "line %zu: \"%.60s\" is not \"key = value\"", number, text);
  *equals = '\0';
  *line = (struct line){trimmed(text), trimmed(equals + 1), number};
  if (!*line->key || !*line->value)
    return REFUSE(opening, "line %zu: \"%.60s = %.60s\" is not \"key = value\"", number, line->key,
                  line->value);
  const struct line *before = find(opening, line->key);
  if (before)
    return REFUSE(opening, "line %zu: %.60s was given in line %zu", number, line->key,
                  before->number);
  opening->line_count++;
  return true;
}

/* In place: keys and values point into the text. */
static bool cut_lines(struct opening *opening) {
  char *text = opening->recorded->text;
  for (size_t number = 1; text; number++) {
    char *next = strchr(text, '\n');
    if (next)
      *next++ = '\0';
    char *line = trimmed(text);
    if (*line && !add_line(opening, line, number))
      return false;
    text = next;
  }
  return true;
}

/* --- Values ------------------------------------------------------------------------------------*/

/* A line that a case must have. high: of integers; of reals, how many. */
struct key {
  const char *name;
  bool (*set)(struct opening *opening, const struct key *key, const char *text, void *field);
  unsigned kinds; /* of cases */
  size_t at, low, high;
};

/* An integer that begins at *at, which moves behind it. */
static bool read_integer(const char **at, size_t *value) {
  if (!isdigit((unsigned char)**at)) /* strtoull takes blanks and signs */
    return false;
  char *end;
  errno = 0;
  unsigned long long number = strtoull(*at, &end, 10);
  *at = end;
  *value = (size_t)number;
  return errno == 0 && number <= SIZE_MAX;
}

static bool ends(const char *at) { return !*at || isspace((unsigned char)*at); }

static bool set_integer(struct opening *opening, const struct key *key, const char *text,
                        void *field) {
  size_t *value = field;
  const char *at = text;
  if (read_integer(&at, value) && !*at && *value >= key->low && *value <= key->high)
    return true;
  return REFUSE(opening, "%s is %.60s, not a whole number from %zu to %zu", key->name, text,
                key->low, key->high);
}

/* Finite numbers with blanks between. */
static bool set_reals(struct opening *opening, const struct key *key, const char *text,
                      void *field) {
  double *values = field;
  const char *at = text;
  bool good = true;
  for (size_t i = 0; good && i < key->high; i++) {
    char *end;
    values[i] = strtod(at, &end);
    good = end != at && isfinite(values[i]) && ends(end);
    at = end;
  }
  if (good && !*at)
    return true;
  return REFUSE(opening, "%s is %.60s, not %zu finite number%s", key->name, text, key->high,
                key->high == 1 ? "" : "s");
}

/* A shape, such as 37x3, that begins at *at, which moves behind it. */
static bool read_shape(const char **at, size_t *elements) {
  size_t factor;
  if (!read_integer(at, elements))
    return false;
  while (**at == 'x') {
    ++*at;
    if (!read_integer(at, &factor) || __builtin_mul_overflow(*elements, factor, elements))
      return false;
  }
  return ends(*at);
}

/* Shapes with blanks between, such as "513 37x3 1". */
static bool set_shapes(struct opening *opening, const struct key *key, const char *at,
                       void *field) {
  struct replay_case *recorded = field;
  recorded->tensor_counts = calloc(strlen(at) / 2 + 1, sizeof(size_t)); /* a shape and its blank */
  if (!recorded->tensor_counts)
    return REFUSE(opening, "no memory for %s", key->name);
  for (size_t *count = &recorded->tensors; *at; ++*count) {
    const char *shape = at;
    if (!read_shape(&at, &recorded->tensor_counts[*count]))
      return REFUSE(opening, "%s: shape %zu, \"%.*s\", is not numbers with x between", key->name,
                    *count + 1, (int)strcspn(shape, " \t"), shape);
    at += strspn(at, " \t");
  }
  return true;
}

static bool set_text(struct opening *opening, const struct key *key, const char *text,
                     void *field) {
  (void)opening, (void)key;
  *(const char **)field = text;
  return true;
}

enum { ALLREDUCE = 1, ADAM = 2, LAMB = 4, ZERO_ONE = 8, OPTIMIZER = 14, ALL = 15 };

#define AT(field) offsetof(struct replay_case, field)

static const struct key keys[] = {
    {"world", set_integer, ALL, AT(world), 1, MAX_RANKS},
    {"steps", set_integer, ALL, AT(steps), 1, MAX_STEPS},
    {"count", set_integer, ALLREDUCE, AT(count), 1, MAX_COUNT},
    {"padded", set_integer, ALLREDUCE, AT(padded), 1, MAX_COUNT},
    {"shapes", set_shapes, OPTIMIZER, 0, 0, 0},
    {"total", set_integer, OPTIMIZER, AT(count), 1, MAX_COUNT},
    {"lr", set_reals, OPTIMIZER, AT(learning_rate), 0, 1},
    {"betas", set_reals, OPTIMIZER, AT(betas), 0, 2},
    {"eps", set_reals, OPTIMIZER, AT(epsilon), 0, 1},
    {"weight_decay", set_reals, OPTIMIZER, AT(weight_decay), 0, 1},
    {"freeze_step", set_integer, ADAM | LAMB, AT(freeze_step), 0, MAX_COUNT},
    {"max_coeff", set_reals, LAMB, AT(max_coefficient), 0, 1},
    {"min_coeff", set_reals, LAMB, AT(min_coefficient), 0, 1},
    {"coeff_beta", set_reals, LAMB, AT(coefficient_beta), 0, 1},
    {"factor_max", set_reals, LAMB, AT(max_factor), 0, 1},
    {"factor_min", set_reals, LAMB, AT(min_factor), 0, 1},
    {"factor_threshold", set_reals, LAMB, AT(factor_change), 0, 1},
    {"var_freeze_step", set_integer, ZERO_ONE, AT(freeze_step), 0, MAX_COUNT},
    /* To DeepSpeed a scaler of 0 means "never". No case was recorded with it. */
    {"var_update_scaler", set_integer, ZERO_ONE, AT(variance_update_scaler), 1, MAX_COUNT},
    {"local_step_scaler", set_integer, ZERO_ONE, AT(local_step_scaler), 1, MAX_COUNT},
    {"local_step_clipper", set_integer, ZERO_ONE, AT(local_step_clipper), 1, MAX_COUNT},
    {"params_ranks", set_integer, OPTIMIZER, AT(params_ranks), 1, MAX_RANKS},
    {"dense_allreduce_before_step", set_text, OPTIMIZER, AT(dense_steps), 0, 0},
};

static bool read_value(struct opening *opening, const struct key *key) {
  const struct line *line = find(opening, key->name);
  return line ? key->set(opening, key, line->value, (char *)opening->recorded + key->at)
              : REFUSE(opening, "there is no line \"%s = ...\"", key->name);
}

static bool read_kind(struct opening *opening) {
  static const char *const kinds[REPLAY_KINDS] = {"allreduce", "adam", "lamb", "zoadam"};
  const struct line *line = find(opening, "kind");
  if (!line)
    return REFUSE(opening, "there is no line \"kind = ...\"");
  for (enum replay_kind kind = 0; kind < REPLAY_KINDS; kind++)
    if (strcmp(line->value, kinds[kind]) == 0) {
      opening->recorded->kind = kind;
      return true;
    }
  return REFUSE(opening, "kind is %.60s, not allreduce, adam, lamb or zoadam", line->value);
}

/* --- What must fit together --------------------------------------------------------------------*/

static bool check_allreduce(struct opening *opening) {
  const struct replay_case *recorded = opening->recorded;
  if (recorded->padded < recorded->count)
    return REFUSE(opening, "padded is %zu, less than count, %zu", recorded->padded,
                  recorded->count);
  if (recorded->padded % recorded->world != 0)
    return REFUSE(opening, "padded is %zu, not a multiple of world, %zu", recorded->padded,
                  recorded->world);
  return true;
}

static bool check_optimizer(struct opening *opening) {
  const struct replay_case *recorded = opening->recorded;
  const char *digits = recorded->dense_steps;
  size_t sum = 0;
  for (size_t t = 0; t < recorded->tensors; t++)
    if (__builtin_add_overflow(sum, recorded->tensor_counts[t], &sum))
      sum = SIZE_MAX;
  if (sum != recorded->count)
    return REFUSE(opening, "total is %zu, and the shapes have %zu elements", recorded->count, sum);
  /* The library takes zero for "the default", and reports what else is out of range. */
  if (recorded->betas[0] == 0 || recorded->betas[1] == 0 || recorded->epsilon == 0)
    return REFUSE(opening, "betas are %g %g, eps is %g: none of them can be 0", recorded->betas[0],
                  recorded->betas[1], recorded->epsilon);
  if (recorded->params_ranks != 1 && recorded->params_ranks != recorded->world)
    return REFUSE(opening, "params_ranks is %zu, not 1 or world, %zu", recorded->params_ranks,
                  recorded->world);
  if (strspn(digits, "01") != strlen(digits) || strlen(digits) != recorded->steps)
    return REFUSE(opening,
                  "dense_allreduce_before_step is %.60s, not a 0 or 1 for each of %zu steps",
                  digits, recorded->steps);
  return true;
}

bool replay_case_parse(struct replay_case *recorded, char error[REPLAY_ERROR]) {
  struct opening opening = {.recorded = recorded, .error = error};
  recorded->fingerprint = ob_hash(OB_HASH_START, recorded->text, strlen(recorded->text));
  bool good = cut_lines(&opening) && read_kind(&opening);
  for (size_t k = 0; good && k < sizeof keys / sizeof keys[0]; k++)
    good = !(keys[k].kinds & 1u << recorded->kind) || read_value(&opening, &keys[k]);
  if (!good)
    return false;
  return recorded->kind == REPLAY_ALLREDUCE ? check_allreduce(&opening) : check_optimizer(&opening);
}

bool replay_case_open(struct replay_case *recorded, const char *directory,
                      char error[REPLAY_ERROR]) {
  struct opening opening = {.recorded = recorded, .error = error};
  *recorded = (struct replay_case){.directory = directory};
  for (size_t i = 0; i < REPLAY_FILES; i++)
    recorded->files[i].number = -1;
  bool good = load_text(&opening) && replay_case_parse(recorded, error);
  for (size_t k = 0; good && k < ARRAYS; k++)
    good = !belongs(recorded, &arrays[k]) || open_array(recorded, &arrays[k], error);
  return good;
}

void replay_case_close(struct replay_case *recorded) {
  for (size_t i = 0; i < REPLAY_FILES; i++)
    ob_input_close(&recorded->files[i]);
  free(recorded->tensor_counts);
  free(recorded->text);
}
