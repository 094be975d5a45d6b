/* JSON as text. Numbers are written and read with a decimal point, since calls set the C locale
 * (call_scope.h). */
#ifndef OB_BASE_JSON_H
#define OB_BASE_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "onebit/status.h"

/* --- Writing -----------------------------------------------------------------------------------*/

/* Bytes of the longest number, with its terminating zero. */
enum { OB_JSON_NUMBER = 32 };

/* Writes the value with 9 significant digits into `text`, or "null" if the value is not finite.
 * Returns `text`. */
const char *ob_json_number(char text[OB_JSON_NUMBER], double value);

/* A JSON value that is being written; initialise it as {.file = ...}. The functions write the
 * commas. Keys are written without escapes; the key is NULL for elements of an array and for the
 * outermost value. */
struct ob_json {
  FILE *file;
  bool spaced; /* for people: with spaces, and a line for each object of an array */
  bool behind; /* a value was written, so a comma precedes the next one */
  int depth;   /* the number of open objects and arrays */
};

/* Begin and end an object or array: `bracket` is '{' or '[', and at the end '}' or ']'. */
void ob_json_begin(struct ob_json *json, const char *key, char bracket);
void ob_json_end(struct ob_json *json, char bracket);

void ob_json_put_string(struct ob_json *json, const char *key, const char *text); /* NULL: null */
void ob_json_real(struct ob_json *json, const char *key, double value);
void ob_json_integer(struct ob_json *json, const char *key, uint64_t value);
void ob_json_bool(struct ob_json *json, const char *key, bool value);

/* --- Reading -----------------------------------------------------------------------------------*/

/* Reads JSON (RFC 8259) that a person has written. The values are in the order of the text, each
 * with its line number, which errors name. */
enum ob_json_kind {
  OB_JSON_NULL,
  OB_JSON_FALSE,
  OB_JSON_TRUE,
  OB_JSON_REAL, /* `text` has the number as written */
  OB_JSON_STRING,
  OB_JSON_ARRAY,
  OB_JSON_OBJECT
};

/* A value. Keys are unique within an object; an element of an array has the key NULL. */
struct ob_json_value {
  const char *key, *text; /* in the text that was read; arrays and objects: text is NULL */
  enum ob_json_kind kind;
  int parent; /* index of the array or object that contains it; -1: outermost */
  int line;
};

/* Parses `text`, which ends with a zero byte. Keys, strings and numbers of the values stay in
 * `text`. The first value is the outermost one. ONEBIT_ERROR_ARGUMENT: `text` is no JSON, or has
 * more than `capacity` values. */
onebit_status_t ob_json_read(const char *name, char *text, struct ob_json_value *values,
                             size_t capacity, size_t *count);

/* Returns "an object", "a number" ... */
const char *ob_json_kind_name(enum ob_json_kind kind);

#endif
