/*
 * Reads JSON (RFC 8259) that a person has written: values in the order of the text, each with its
 * line. Errors name the line.
 */
#ifndef OB_BASE_JSON_READ_H
#define OB_BASE_JSON_READ_H

#include <stddef.h>

#include "onebit/status.h"

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
