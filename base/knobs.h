/*
 * The environment variables that the library reads, one row each. They are few on purpose: a
 * setting of a single plan is an option of that plan. The file that ONEBIT_CONFIG names may set a
 * variable that the environment does not set (below).
 */
#ifndef OB_BASE_KNOBS_H
#define OB_BASE_KNOBS_H

#include <stdbool.h>
#include <stddef.h>

#include "onebit/status.h"

enum ob_knob {
  OB_KNOB_CONFIG,
  OB_KNOB_CODEC,
  OB_KNOB_THREADS,
  OB_KNOB_TUNING,
  OB_KNOB_EXPLAIN,
  OB_KNOB_PROGRESS,
  OB_KNOB_TIMEOUT,
  OB_KNOB_JOB,
  OB_KNOB_GRADIENTS,
  OB_KNOB_RULES,
  OB_KNOB_REPORT,
  OB_KNOB_REQUIRE,
  OB_KNOB_EVERY_RANK,
  OB_KNOB_COMMAND,
  OB_KNOB_BITS,
  OB_KNOB_BUDGET,
  OB_KNOB_DEBUG,
  OB_KNOB_DEBUG_FILE,
  OB_KNOB_METRICS,
  OB_KNOB_METRICS_EVERY,
  OB_KNOB_COUNT
};

struct ob_knob_row {
  const char *name;
  const char *fallback; /* text for the value of a variable that is not set */
  const char *meaning;
};

extern const struct ob_knob_row ob_knobs[OB_KNOB_COUNT];

/* Returns the text of a knob, from the environment or else from the file; NULL: neither sets the
 * knob, or its value is empty. */
const char *ob_knob_text(enum ob_knob knob);

/* ob_knob_label returns the name of a knob in messages: its variable, or "FILE:LINE: KEY".
 * ob_knob_origin returns the source of its value: "environment", "default" or "FILE:LINE". Both
 * texts are in the thread's memory. */
const char *ob_knob_label(enum ob_knob knob);
const char *ob_knob_origin(enum ob_knob knob);

/* Reads a knob that is an integer from `low` to `high` into *value; *value is `fallback` if the
 * knob is not set. */
onebit_status_t ob_knob_number(enum ob_knob knob, int low, int high, int fallback, int *value);

/* The smallest number of bits with which a program's own Adam trains as well as with dense sums
 * (docs/scales.md). */
#define OB_SAFE_BITS 8

/* The default number of elements that share a scale, chosen by measurement (docs/scales.md). At
 * this size the scales add 1/64 bit per element. */
#define OB_DEFAULT_BLOCK 2048

/* The smallest and the largest number of bits per element, each 1, 2, 4 or 8; both 0: not set. */
struct ob_bits {
  int min, max;
};

/* Parses "4", "1..8" or "auto", which means 1..8. Returns false for any other text. */
bool ob_bits_parse(const char *text, size_t length, struct ob_bits *bits);

/* Reads ONEBIT_BITS, the bits per element of gradients that the program's own optimizer uses. *bits
 * is `fallback` if the variable is not set, and -1 after an error. */
onebit_status_t ob_knob_bits(int fallback, struct ob_bits *bits);

/* Reads ONEBIT_BUDGET, the bytes that tensors may send divided by the bytes of the same tensors in
 * float32, such as 1/20 or 0.05; 0 if the variable is not set. */
onebit_status_t ob_knob_budget(double *budget);

/* Reads a knob that is a number of seconds, which may have decimals; 0 and `never` give
 * INFINITY. */
onebit_status_t ob_knob_seconds(enum ob_knob knob, double fallback, double *value);

/* --- The file that ONEBIT_CONFIG names ---------------------------------------------------------*/

/* Checks the file. ONEBIT_OK: the file is correct, or none is named. ONEBIT_ERROR_FILE: it cannot
 * be read. ONEBIT_ERROR_ARGUMENT: it is wrong; the message names file, line and key. No value of a
 * wrong file is used. */
onebit_status_t ob_config_check(void);

#endif
