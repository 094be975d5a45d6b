/* Lists the functions that the public headers declare, for tests that must leave none out. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support_wrong_calls.h"

static char *text_of(const char *path) {
  FILE *file = fopen(path, "r");
  char *text = calloc(1 << 20, 1);
  if (file && text)
    text[fread(text, 1, (1 << 20) - 1, file)] = 0;
  if (file)
    fclose(file);
  return text;
}

/* Comments, and lines of the preprocessor, become blanks. */
static void keep_declarations(char *text) {
  for (char *at = text; (at = strstr(at, "/*")) != NULL;)
    for (const char *end = strstr(at, "*/") + 2; at < end;)
      *at++ = ' ';
  for (char *line = text; line; line = strchr(line, '\n')) {
    line += *line == '\n';
    for (; *line == '#'; line++)
      for (char *at = line; *at && (*at != '\n' || at[-1] == '\\'); at++)
        *at = ' ';
  }
}

static char *next_name(char *text) {
  char *one = strstr(text, "onebit_"), *other = strstr(text, "ONEBIT_");
  return !one || (other && other < one) ? other : one;
}

static bool is_part(char c) { return isalnum((unsigned char)c) || c == '_'; }

size_t wrong_check_header(const char *header) {
  char path[100], name[100];
  size_t found = 0;
  snprintf(path, sizeof path, "include/onebit/%s.h", header);
  char *text = text_of(path);
  keep_declarations(text);
  for (char *at = text; (at = next_name(at)) != NULL;) {
    size_t length = 0;
    while (is_part(at[length]))
      length++;
    if (at[length] == '(' && strncmp(at + length, "(void)", 6) != 0 && !is_part(at[-1])) {
      snprintf(name, sizeof name, "%.*s", (int)length, at);
      wrong_value("a wrong call of", name, wrong_covers(name), "");
      found++;
    }
    at += length;
  }
  free(text);
  return found;
}
