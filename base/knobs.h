/*
 * The environment variables that the library reads, one row each. They are few on purpose: settings
 * of one plan are options of the plan. The file that ONEBIT_CONFIG names may set a variable that
 * the environment does not set (below).
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
  const char *fallback; /* the value when the variable is not set, in words */
  const char *meaning;
};

extern const struct ob_knob_row ob_knobs[OB_KNOB_COUNT];

/* Returns the text of a knob, from the environment, else from the file; NULL: neither sets it, or
 * it is empty. */
const char *ob_knob_text(enum ob_knob knob);

/* Return the name of a knob in messages, its variable or "FILE:LINE: KEY"; and the source of its
 * value: "environment", "default" or "FILE:LINE". Both texts are in the thread's memory. */
const char *ob_knob_label(enum ob_knob knob);
const char *ob_knob_origin(enum ob_knob knob);

/* Reads a knob that is a whole number into *value; `fallback` when it is not set. */
onebit_status_t ob_knob_number(enum ob_knob knob, int low, int high, int fallback, int *value);

/* The smallest number of bits with which a program's own Adam trains as well as with dense sums
 * (docs/scales.md). */
#define OB_SAFE_BITS 8

/* The default number of elements that share a scale, chosen by measurement (docs/scales.md). At
 * this size the scales add 1/64 to the bits. */
#define OB_DEFAULT_BLOCK 2048

/* The least and the most bits an element, each 1, 2, 4 or 8; 0 and 0: not set. */
struct ob_bits {
  int min, max;
};

/* Reads "4", "1..8" or "auto", which is 1..8. False: it is none of them. */
bool ob_bits_parse(const char *text, size_t length, struct ob_bits *bits);

/* Reads ONEBIT_BITS, the bits an element in sums for an optimizer that is not this library's;
 * `fallback` when it is not set. After an error they are -1. */
onebit_status_t ob_knob_bits(int fallback, struct ob_bits *bits);

/* Reads ONEBIT_BUDGET, the part of float32's bytes that tensors may send, such as 1/20 or 0.05; 0
 * when it is not set. */
onebit_status_t ob_knob_budget(double *budget);

/* Reads a knob that is a number of seconds, with decimals; 0 and `never` give INFINITY. */
onebit_status_t ob_knob_seconds(enum ob_knob knob, double fallback, double *value);

/* --- The file that ONEBIT_CONFIG names ---------------------------------------------------------*/

/* Checks the file: ONEBIT_OK if it is correct or there is none, ONEBIT_ERROR_FILE if it cannot be
 * read, ONEBIT_ERROR_ARGUMENT with a message that names file, line and key if it is wrong. A wrong
 * file has no values. */
onebit_status_t ob_config_check(void);

#endif
