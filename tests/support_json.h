/* A checker of JSON: whether a text is one object, all of it and nothing else (RFC 8259). */
#ifndef ONEBIT_TESTS_SUPPORT_JSON_H
#define ONEBIT_TESTS_SUPPORT_JSON_H

#include <stdbool.h>

bool json_is_valid(const char *text);

#endif
