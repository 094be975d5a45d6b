/* JSON as text. Numbers have the point of the locale in which calls compute (call_scope.h). */
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

/* Writes 9 significant digits of the value into `text`; "null" for a value that is not finite.
 * Returns `text`. */
const char *ob_json_number(char text[OB_JSON_NUMBER], double value);

/* A JSON value that is being written: starts as {.file = ...}. The writer puts the commas. Keys are
 * written as they are; NULL is for elements of an array, and for the outermost value. */
struct ob_json {
  FILE *file;
  bool spaced; /* for people: spaces, and a line for each object of an array */
  bool behind; /* another value, from which a comma divides the next one */
  int depth;   /* of the open objects and arrays */
};

/* `bracket` is '{' or '[', and at the end '}' or ']'. */
void ob_json_begin(struct ob_json *json, const char *key, char bracket);
void ob_json_end(struct ob_json *json, char bracket);

void ob_json_string(struct ob_json *json, const char *key, const char *text); /* NULL: null */
void ob_json_real(struct ob_json *json, const char *key, double value);
void ob_json_integer(struct ob_json *json, const char *key, uint64_t value);
void ob_json_bool(struct ob_json *json, const char *key, bool value);

/* --- Reading -----------------------------------------------------------------------------------*/

/* Reads JSON (RFC 8259) that a person has written: values in the order of the text, each with its
 * line. Errors name the line. */
enum ob_json_kind {
  OB_JSON_NULL,
  OB_JSON_FALSE,
  OB_JSON_TRUE,
  OB_JSON_REAL, /* as it is written: `text` */
  OB_JSON_STRING,
  OB_JSON_ARRAY,
  OB_JSON_OBJECT
};

/* A value of an object has a key, which no other value of the object has; one of an array has
 * NULL. */
struct ob_json_value {
  const char *key, *text; /* in the memory that was read; of an array or object text is NULL */
  enum ob_json_kind kind;
  int parent; /* the place of the array or object that it is in; -1: of none */
  int line;
};

/* Reads `text`, which ends with a zero byte, and leaves keys, strings and numbers in it. The first
 * value is the outermost one. ONEBIT_ERROR_ARGUMENT: no JSON, or more than `capacity` values. */
onebit_status_t ob_json_read(const char *name, char *text, struct ob_json_value *values,
                             size_t capacity, size_t *count);

/* "an object", "a number" ... */
const char *ob_json_kind_name(enum ob_json_kind kind);

#endif
