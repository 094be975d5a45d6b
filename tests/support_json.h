/* A checker of JSON: returns true if the whole text is one object (RFC 8259). */
#ifndef ONEBIT_TESTS_SUPPORT_JSON_H
#define ONEBIT_TESTS_SUPPORT_JSON_H

#include <stdbool.h>

bool json_is_valid(const char *text);

#endif
