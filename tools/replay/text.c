/* The text of a recorded case, read strictly: a case that is damaged must not run as another. */
#include "tools/replay/text.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool refuse(struct replay_text *text, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static bool refuse(struct replay_text *text, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text->words, sizeof text->words, format, arguments);
  va_end(arguments);
  return false;
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

static const struct replay_line *find(const struct replay_text *text, const char *key) {
  for (size_t i = 0; i < text->count; i++)
    if (strcmp(text->lines[i].key, key) == 0)
      return &text->lines[i];
  return NULL;
}

static bool add_line(struct replay_text *text, char *line, size_t number) {
  if (text->count == sizeof text->lines / sizeof text->lines[0])
    return refuse(text, "line %zu: more lines than any case has", number);
  char *equals = strchr(line, '=');
  if (!equals)
    return refuse(text, "line %zu: \"%.60s\" is not \"key = value\"", number, line);
  *equals = '\0';
  struct replay_line one = {trimmed(line), trimmed(equals + 1), number};
  if (!*one.key || !*one.value)
    return refuse(text, "line %zu: \"%.60s = %.60s\" is not \"key = value\"", number, one.key,
                  one.value);
  const struct replay_line *before = find(text, one.key);
  if (before)
    return refuse(text, "line %zu: %.60s was given in line %zu", number, one.key, before->number);
  text->lines[text->count++] = one;
  return true;
}

bool replay_text_cut(struct replay_text *text, char *memory) {
  text->count = 0;
  for (size_t number = 1; memory; number++) {
    char *next = strchr(memory, '\n');
    if (next)
      *next++ = '\0';
    char *line = trimmed(memory);
    if (*line && !add_line(text, line, number))
      return false;
    memory = next;
  }
  return true;
}

bool replay_text_string(struct replay_text *text, const char *key, const char **value) {
  const struct replay_line *line = find(text, key);
  *value = line ? line->value : NULL;
  return line || refuse(text, "there is no line \"%s = ...\"", key);
}

/* A whole number that begins at *at, which moves behind it. */
static bool take_whole(const char **at, size_t *value) {
  if (!isdigit((unsigned char)**at)) /* strtoull takes blanks and signs */
    return false;
  char *end;
  errno = 0;
  unsigned long long number = strtoull(*at, &end, 10);
  *at = end;
  *value = (size_t)number;
  return errno == 0 && number <= SIZE_MAX;
}

bool replay_text_whole(struct replay_text *text, const char *key, size_t least, size_t most,
                       size_t *value) {
  const char *given;
  if (!replay_text_string(text, key, &given))
    return false;
  const char *at = given;
  if (take_whole(&at, value) && !*at && *value >= least && *value <= most)
    return true;
  return refuse(text, "%s is %.60s, not a whole number from %zu to %zu", key, given, least, most);
}

static bool ends(const char *at) { return !*at || isspace((unsigned char)*at); }

bool replay_text_reals(struct replay_text *text, const char *key, size_t count, double *values) {
  const char *given;
  if (!replay_text_string(text, key, &given))
    return false;
  const char *at = given;
  bool good = true;
  for (size_t i = 0; good && i < count; i++) {
    char *end;
    values[i] = strtod(at, &end);
    good = end != at && isfinite(values[i]) && ends(end);
    at = end;
  }
  if (good && !*at)
    return true;
  return refuse(text, "%s is %.60s, not %zu finite number%s", key, given, count,
                count == 1 ? "" : "s");
}

/* A shape, such as 37x3, that begins at *at, which moves behind it. */
static bool take_shape(const char **at, size_t *elements) {
  size_t factor;
  if (!take_whole(at, elements))
    return false;
  while (**at == 'x') {
    ++*at;
    if (!take_whole(at, &factor) || __builtin_mul_overflow(*elements, factor, elements))
      return false;
  }
  return ends(*at);
}

bool replay_text_shapes(struct replay_text *text, const char *key, size_t **counts, size_t *count) {
  const char *at;
  *counts = NULL;
  if (!replay_text_string(text, key, &at))
    return false;
  *counts =
      calloc(strlen(at) / 2 + 1, sizeof **counts); /* with its blank a shape takes two bytes */
  if (!*counts)
    return refuse(text, "no memory for %s", key);
  for (*count = 0; *at; ++*count) {
    const char *shape = at;
    if (!take_shape(&at, &(*counts)[*count]))
      return refuse(text, "%s: shape %zu, \"%.*s\", is not numbers with x between", key, *count + 1,
                    (int)strcspn(shape, " \t"), shape);
    at += strspn(at, " \t");
  }
  return true;
}
