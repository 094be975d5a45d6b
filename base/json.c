/* Writes and reads JSON. */
#include "base/json.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

/* --- Writing -----------------------------------------------------------------------------------*/

const char *ob_json_number(char text[OB_JSON_NUMBER], double value) {
  if (!isfinite(value))
    return strcpy(text, "null");
  snprintf(text, OB_JSON_NUMBER, "%.9g", value);
  return text;
}

/* Writes the comma and the key that precede a value. */
static void json_put_key(struct ob_json *json, const char *key) {
  if (json->behind)
    fputs(json->spaced && key ? ", " : ",", json->file);
  if (key)
    fprintf(json->file, "\"%s\":%s", key, json->spaced ? " " : "");
  json->behind = true;
}

void ob_json_begin(struct ob_json *json, const char *key, char bracket) {
  json_put_key(json, key);
  fprintf(json->file, "%s%c", json->spaced && !key && json->depth > 0 ? "\n  " : "", bracket);
  json->depth++;
  json->behind = false;
}

void ob_json_end(struct ob_json *json, char bracket) {
  fputc(bracket, json->file);
  json->depth--;
  json->behind = true;
}

void ob_json_put_string(struct ob_json *json, const char *key, const char *text) {
  json_put_key(json, key);
  if (!text) {
    fputs("null", json->file);
    return;
  }
  fputc('"', json->file);
  for (const unsigned char *c = (const unsigned char *)text; *c; c++)
    if (*c < ' ')
      fprintf(json->file, "\\u%04x", *c);
    else
      fprintf(json->file, *c == '"' || *c == '\\' ? "\\%c" : "%c", *c);
  fputc('"', json->file);
}

void ob_json_real(struct ob_json *json, const char *key, double value) {
  char text[OB_JSON_NUMBER];
  json_put_key(json, key);
  fputs(ob_json_number(text, value), json->file);
}

void ob_json_integer(struct ob_json *json, const char *key, uint64_t value) {
  json_put_key(json, key);
  fprintf(json->file, "%" PRIu64, value);
}

void ob_json_bool(struct ob_json *json, const char *key, bool value) {
  json_put_key(json, key);
  fputs(value ? "true" : "false", json->file);
}

/* --- Reading -----------------------------------------------------------------------------------*/

/* The limits of what is read. Decoded strings overwrite the input, since they are never longer than
 * encoded ones. A double needs only 17 digits. */
enum { MAX_DEPTH = 32, MAX_NUMBER = 60 };

struct reader {
  const char *name;
  const char *read;
  char *write;
  struct ob_json_value *values;
  size_t count, capacity;
  int line, depth;
};

const char *ob_json_kind_name(enum ob_json_kind kind) {
  static const char *const names[] = {"null",     "false",    "true",     "a number",
                                      "a string", "an array", "an object"};
  return names[kind];
}

static onebit_status_t json_unexpected_error(const struct reader *reader, const char *expected) {
  const char found[] = {'\'', *reader->read, '\'', '\0'};
  const bool printable = *reader->read > ' ' && *reader->read <= '~';
  return ob_error(ONEBIT_ERROR_ARGUMENT, "%s:%d: expected %s, not %s", reader->name, reader->line,
                  expected,
                  printable       ? found
                  : *reader->read ? "an unprintable or non-ASCII character"
                                  : "the end of the file");
}

static void skip_blanks(struct reader *reader) {
  for (; *reader->read && strchr(" \t\r\n", *reader->read); reader->read++)
    reader->line += *reader->read == '\n';
}

static bool skip_character(struct reader *reader, char wanted) {
  skip_blanks(reader);
  if (*reader->read != wanted)
    return false;
  reader->read++;
  return true;
}

/* --- Texts and numbers */

/* Converts \uXXXX to UTF-8. Refuses half of a surrogate pair, and \u0000, which would end the
 * text. */
static bool read_unicode(struct reader *reader) {
  char digits[5] = "", *end;
  strncpy(digits, reader->read, 4);
  unsigned long code = strtoul(digits, &end, 16);
  if (strspn(digits, "0123456789abcdefABCDEF") != 4 || code == 0 || code >> 11 == 0x1b)
    return false;
  reader->read += 4;
  if (code >= 0x800)
    *reader->write++ = (char)(0xe0 | code >> 12);
  if (code >= 0x80)
    *reader->write++ = (char)(code >= 0x800 ? 0x80 | (code >> 6 & 0x3f) : 0xc0 | code >> 6);
  *reader->write++ = (char)(code >= 0x80 ? 0x80 | (code & 0x3f) : code);
  return true;
}

static onebit_status_t read_escape(struct reader *reader) {
  static const char letters[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
  const char *found = *reader->read ? strchr(letters, *reader->read) : NULL;
  if (!found && *reader->read != 'u')
    return json_unexpected_error(reader, "one of \"\\/bfnrtu after \\");
  reader->read++;
  if (found)
    *reader->write++ = meanings[found - letters];
  else if (!read_unicode(reader))
    return json_unexpected_error(reader, "the four hexadecimal digits of one character after \\u");
  return ONEBIT_OK;
}

static onebit_status_t read_string(struct reader *reader, const char **text) {
  if (!skip_character(reader, '"'))
    return json_unexpected_error(reader, "a string in \"\"");
  *text = reader->write;
  while (*reader->read != '"') {
    if ((unsigned char)*reader->read < ' ')
      return json_unexpected_error(reader, "\" at the end of a string");
    if (*reader->read != '\\')
      *reader->write++ = *reader->read++;
    else if (reader->read++)
      OB_TRY(read_escape(reader));
  }
  reader->read++;
  *reader->write++ = '\0';
  return ONEBIT_OK;
}

static bool json_copy_digits(struct reader *reader) {
  const char *from = reader->read;
  while (*reader->read >= '0' && *reader->read <= '9')
    *reader->write++ = *reader->read++;
  return reader->read > from;
}

static bool json_copy_one_of(struct reader *reader, const char *characters) {
  bool found = *reader->read && strchr(characters, *reader->read);
  if (found)
    *reader->write++ = *reader->read++;
  return found;
}

static onebit_status_t json_read_number(struct reader *reader, const char **text) {
  *text = reader->write;
  json_copy_one_of(reader, "-");
  bool good = *reader->read == '0' ? json_copy_one_of(reader, "0") : json_copy_digits(reader);
  if (good && json_copy_one_of(reader, "."))
    good = json_copy_digits(reader);
  if (good && json_copy_one_of(reader, "eE")) {
    json_copy_one_of(reader, "+-");
    good = json_copy_digits(reader);
  }
  if (!good)
    return json_unexpected_error(reader, "a value");
  if (reader->write - *text > MAX_NUMBER)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s:%d: %.20s...: a number of more than %d characters",
                    reader->name, reader->line, *text, MAX_NUMBER);
  *reader->write++ = '\0';
  return ONEBIT_OK;
}

/* --- Values */

static onebit_status_t json_read_value(struct reader *reader, const char *key, int parent);

static onebit_status_t json_read_key(struct reader *reader, int object, const char **key) {
  OB_TRY(read_string(reader, key));
  for (size_t k = (size_t)object + 1; k < reader->count; k++)
    if (reader->values[k].parent == object && strcmp(reader->values[k].key, *key) == 0)
      return ob_error(ONEBIT_ERROR_ARGUMENT, "%s:%d: key %.60s was already given in line %d",
                      reader->name, reader->line, *key, reader->values[k].line);
  return skip_character(reader, ':') ? ONEBIT_OK : json_unexpected_error(reader, "':'");
}

static onebit_status_t read_members(struct reader *reader, int parent, char end) {
  const char *key = NULL;
  if (++reader->depth > MAX_DEPTH)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s:%d: more than %d nested arrays and objects",
                    reader->name, reader->line, MAX_DEPTH);
  reader->read++;
  if (!skip_character(reader, end)) {
    do {
      if (end == '}')
        OB_TRY(json_read_key(reader, parent, &key));
      OB_TRY(json_read_value(reader, key, parent));
    } while (skip_character(reader, ','));
    if (!skip_character(reader, end))
      return json_unexpected_error(reader, end == '}' ? "',' or '}'" : "',' or ']'");
  }
  reader->depth--;
  return ONEBIT_OK;
}

static onebit_status_t json_read_literal(struct reader *reader, enum ob_json_kind *kind) {
  for (*kind = OB_JSON_NULL; *kind <= OB_JSON_TRUE; ++*kind) {
    const char *word = ob_json_kind_name(*kind);
    if (strncmp(reader->read, word, strlen(word)) == 0) {
      reader->read += strlen(word);
      return ONEBIT_OK;
    }
  }
  return json_unexpected_error(reader, "a value");
}

static onebit_status_t json_read_value(struct reader *reader, const char *key, int parent) {
  skip_blanks(reader);
  if (reader->count == reader->capacity)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s:%d: more than %zu values", reader->name,
                    reader->line, reader->capacity);
  const int number = (int)reader->count++;
  struct ob_json_value *value = &reader->values[number];
  *value = (struct ob_json_value){.key = key, .parent = parent, .line = reader->line};
  switch (*reader->read) {
  case '{':
    value->kind = OB_JSON_OBJECT;
    return read_members(reader, number, '}');
  case '[':
    value->kind = OB_JSON_ARRAY;
    return read_members(reader, number, ']');
  case '"':
    value->kind = OB_JSON_STRING;
    return read_string(reader, &value->text);
  default:
    if (!*reader->read || !strchr("-0123456789", *reader->read))
      return json_read_literal(reader, &value->kind);
    value->kind = OB_JSON_REAL;
    return json_read_number(reader, &value->text);
  }
}

onebit_status_t ob_json_read(const char *name, char *text, struct ob_json_value *values,
                             size_t capacity, size_t *count) {
  struct reader reader = {
      .name = name, .read = text, .write = text, .values = values, .capacity = capacity, .line = 1};
  skip_blanks(&reader);
  /* The outermost value must be an object: the zero byte that ends an outermost number could
   * overwrite a character that is not read yet. */
  if (*reader.read != '{')
    return json_unexpected_error(&reader, "'{'");
  OB_TRY(json_read_value(&reader, NULL, -1));
  skip_blanks(&reader);
  *count = reader.count;
  return *reader.read ? json_unexpected_error(&reader, "nothing after the last '}'") : ONEBIT_OK;
}
