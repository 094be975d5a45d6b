/* A checker of JSON, after the grammar of RFC 8259. Each function goes on behind what it knows, or
 * gives NULL. */
#include "tests/support.h"

#include <ctype.h>
#include <string.h>

static const char *value(const char *at);

static const char *word(const char *at, const char *wanted) {
  size_t length = strlen(wanted);
  return at && strncmp(at, wanted, length) == 0 ? at + length : NULL;
}

static const char *string(const char *at) {
  at = word(at, "\"");
  while (at && *at && *at != '"') {
    if ((unsigned char)*at < ' ')
      return NULL;
    at += *at == '\\' ? 2 : 1; /* what follows a backslash is not looked at */
  }
  return word(at, "\"");
}

static const char *digits(const char *at) {
  if (!at || !isdigit((unsigned char)*at))
    return NULL;
  while (isdigit((unsigned char)*at))
    at++;
  return at;
}

static const char *number(const char *at) {
  at += *at == '-';
  at = *at == '0' ? at + 1 : digits(at);
  if (at && *at == '.')
    at = digits(at + 1);
  if (at && (*at == 'e' || *at == 'E')) {
    at++;
    at = digits(at + (*at == '-' || *at == '+'));
  }
  return at;
}

/* Elements between brackets; in an object each has a name. */
static const char *list(const char *at, bool named, char end) {
  at++;
  if (*at == end)
    return at + 1;
  for (;;) {
    if (named)
      at = word(string(at), ":");
    at = at ? value(at) : NULL;
    if (!at || *at == end)
      return at ? at + 1 : NULL;
    if (*at++ != ',')
      return NULL;
  }
}

static const char *value(const char *at) {
  switch (*at) {
  case '{':
    return list(at, true, '}');
  case '[':
    return list(at, false, ']');
  case '"':
    return string(at);
  case 't':
    return word(at, "true");
  case 'f':
    return word(at, "false");
  case 'n':
    return word(at, "null");
  default:
    return number(at);
  }
}

bool json_is_valid(const char *text) {
  const char *end = *text == '{' ? value(text) : NULL;
  return end && *end == 0;
}
