/* JSON as text. Numbers have the point of the locale in which calls compute (call_scope.h). */
#ifndef OB_BASE_JSON_H
#define OB_BASE_JSON_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

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

#endif
