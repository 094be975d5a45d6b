/* Numbers as JSON has them. */
#include "base/json.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

void ob_json_set_point(char *number) {
  char *to = number;
  for (const char *c = number; *c; c++)
    if (strchr("0123456789+-e", *c))
      *to++ = *c;
    else if (to > number && to[-1] != '.')
      *to++ = '.';
  *to = '\0';
}

const char *ob_json_number(char text[OB_JSON_NUMBER], double value) {
  if (!isfinite(value))
    return strcpy(text, "null");
  snprintf(text, OB_JSON_NUMBER, "%.9g", value);
  ob_json_set_point(text);
  return text;
}
