/* JSON as text. */
#include "base/json.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

const char *ob_json_number(char text[OB_JSON_NUMBER], double value) {
  if (!isfinite(value))
    return strcpy(text, "null");
  snprintf(text, OB_JSON_NUMBER, "%.9g", value);
  return text;
}

/* Writes the comma and the key that precede a value. */
static void put_key(struct ob_json *json, const char *key) {
  if (json->behind)
    fputs(json->spaced && key ? ", " : ",", json->file);
  if (key)
    fprintf(json->file, "\"%s\":%s", key, json->spaced ? " " : "");
  json->behind = true;
}

void ob_json_begin(struct ob_json *json, const char *key, char bracket) {
  put_key(json, key);
  fprintf(json->file, "%s%c", json->spaced && !key && json->depth > 0 ? "\n  " : "", bracket);
  json->depth++;
  json->behind = false;
}

void ob_json_end(struct ob_json *json, char bracket) {
  fputc(bracket, json->file);
  json->depth--;
  json->behind = true;
}

void ob_json_string(struct ob_json *json, const char *key, const char *text) {
  put_key(json, key);
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
  put_key(json, key);
  fputs(ob_json_number(text, value), json->file);
}

void ob_json_integer(struct ob_json *json, const char *key, uint64_t value) {
  put_key(json, key);
  fprintf(json->file, "%" PRIu64, value);
}

void ob_json_bool(struct ob_json *json, const char *key, bool value) {
  put_key(json, key);
  fputs(value ? "true" : "false", json->file);
}
