/*
 * Options, as rows of a table: what one is called, where it is in the caller's struct and where its
 * number goes, the default for which zero stands, and what it may be. Defaults, checks and what all
 * ranks must have given alike are walks over the rows.
 */
#ifndef OB_OPTIMIZERS_OPTIONS_H
#define OB_OPTIMIZERS_OPTIONS_H

#include <stddef.h>

#include "collectives/communicator.h"
#include "onebit/optimizer.h"

enum ob_option_kind {
  OB_OPTION_REAL,     /* double, checked by the method */
  OB_OPTION_FRACTION, /* double between 0 and 1 */
  OB_OPTION_POSITIVE, /* double that is positive as a float; 0 only without a default */
  OB_OPTION_COUNT,    /* size_t */
  OB_OPTION_FLAG,     /* int: zero or not */
  OB_OPTION_CHOICE    /* an enum, from 0 to `most`; most 0: checked where plans are made */
};

struct ob_option {
  const char *name, *term; /* the term says of a double that its bits are compared */
  enum ob_option_kind kind;
  size_t from, to; /* bytes: in the caller's struct, in struct ob_moments; the types are the same */
  double fallback;
  int max;
  const char *type; /* of a choice */
};

/* Rows of the struct OPTIONS, which the file that has them defines: its field, and where that goes
 * in struct ob_moments. */
/* clang-format off */
#define OB_DEVICES(field, to) offsetof(OPTIONS, field), offsetof(struct ob_moments, to)
#define OB_DOUBLE(kind, field, to, fallback) \
  {#field, #field " (as bits)", kind, OB_DEVICES(field, to), fallback, 0, NULL}
#define OB_REAL(field, to, fallback)     OB_DOUBLE(OB_OPTION_REAL, field, to, fallback)
#define OB_FRACTION(field, to, fallback) OB_DOUBLE(OB_OPTION_FRACTION, field, to, fallback)
#define OB_POSITIVE(field, to, fallback) OB_DOUBLE(OB_OPTION_POSITIVE, field, to, fallback)
#define OB_COUNT(field) {#field, #field, OB_OPTION_COUNT, OB_DEVICES(field, field), 0, 0, NULL}
#define OB_FLAG(field)  {#field, #field, OB_OPTION_FLAG, OB_DEVICES(field, field), 0, 0, NULL}
#define OB_CHOICE(field, max, type) \
  {#field, #field, OB_OPTION_CHOICE, OB_DEVICES(field, field), 0, max, type}

/* The rows that several optimizers have. */
#define OB_ADAM_OPTIONS \
  OB_FRACTION(beta1, beta1, 0.9), OB_FRACTION(beta2, beta2, 0.999), \
  OB_POSITIVE(epsilon, epsilon, 1e-8)
#define OB_FREEZE_OPTIONS \
  OB_COUNT(freeze_step), OB_FRACTION(freeze_threshold, freeze_threshold, 0.96), \
  OB_FLAG(no_bias_correction)
/* clang-format on */

/* From a struct, or NULL for all defaults; what is wrong is ONEBIT_ERROR_ARGUMENT with the option's
 * name and value. */
struct ob_option_file; /* config.h: what stands in for zeros before the defaults do */
onebit_status_t ob_options_read(const struct ob_option *rows, size_t count, const void *from,
                                const struct ob_option_file *file, void *to);
/* The options that all optimizers have, except threads and device. */
enum { OB_COMMON_OPTIONS = 19 };
extern const struct ob_option ob_common_options[];
/* The terms on which all ranks must agree. */
void ob_options_terms(const struct ob_option *rows, size_t count, const void *to,
                      struct ob_term *terms);

/* Single checks, and the default of a number. */
onebit_status_t ob_check_fraction(const char *name, double value);
onebit_status_t ob_check_positive(const char *name, double value);
/* Unless 0 < min <= max. */
onebit_status_t ob_check_order(const char *min_name, double min, const char *max_name, double max);
double ob_given_or(double value, double fallback);

#endif
