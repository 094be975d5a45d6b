/* Reads options as the rows of their table describe them. */
#include <math.h>
#include <string.h>

#include "base/error.h"
#include "optimizers/method.h"

_Static_assert(sizeof(onebit_dtype_t) == sizeof(int), "a choice is read as an int");

onebit_status_t ob_check_fraction(const char *name, double value) {
  if (!(value > 0 && value < 1))
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is %g, not between 0 and 1", name, value);
  return ONEBIT_OK;
}

onebit_status_t ob_check_positive(const char *name, double value) {
  if (!(value > 0) || isinf((float)value) || (float)value == 0)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is %g, not a positive float", name, value);
  return ONEBIT_OK;
}

onebit_status_t ob_check_order(const char *min_name, double min, const char *max_name, double max) {
  OB_TRY(ob_check_positive(min_name, min));
  OB_TRY(ob_check_positive(max_name, max));
  if (min > max)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is %g, more than %s, which is %g", min_name, min,
                    max_name, max);
  return ONEBIT_OK;
}

onebit_status_t ob_check_tensor(size_t tensor, size_t count) {
  if (tensor >= count)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "tensor is %zu, but the number of tensors is %zu",
                    tensor, count);
  return ONEBIT_OK;
}

double ob_value_or_default(double value, double fallback) { return value == 0 ? fallback : value; }

static onebit_status_t put_double(const struct ob_option *row, double value, char *to) {
  value = ob_value_or_default(value, row->fallback);
  memcpy(to + row->to, &value, sizeof value);
  if (row->kind == OB_OPTION_FRACTION)
    return ob_check_fraction(row->name, value);
  if (row->kind == OB_OPTION_POSITIVE && (value != 0 || row->fallback != 0))
    return ob_check_positive(row->name, value);
  return ONEBIT_OK;
}

static onebit_status_t put_int(const struct ob_option *row, int value, char *to) {
  if (row->kind == OB_OPTION_FLAG)
    value = value != 0;
  memcpy(to + row->to, &value, sizeof value);
  if (row->max && (value < 0 || value > row->max))
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is %d, which is not a value of %s", row->name, value,
                    row->type);
  return ONEBIT_OK;
}

static onebit_status_t put_count(const struct ob_option *row, size_t value, char *to) {
  value = value ? value : (size_t)row->fallback;
  memcpy(to + row->to, &value, sizeof value);
  return ONEBIT_OK;
}

/* Reads one option: the caller's value, or the default if that is zero. */
static onebit_status_t read_row(const struct ob_option *row, const char *from, char *to) {
  double real = 0;
  size_t count = 0;
  int number = 0;
  if (from && row->kind <= OB_OPTION_POSITIVE)
    memcpy(&real, from + row->from, sizeof real);
  else if (from && row->kind == OB_OPTION_COUNT)
    memcpy(&count, from + row->from, sizeof count);
  else if (from)
    memcpy(&number, from + row->from, sizeof number);
  return row->kind <= OB_OPTION_POSITIVE ? put_double(row, real, to)
         : row->kind == OB_OPTION_COUNT  ? put_count(row, count, to)
                                         : put_int(row, number, to);
}

onebit_status_t ob_options_read(const struct ob_option *rows, size_t count, const void *from,
                                void *to) {
  for (const struct ob_option *row = rows; row < rows + count; row++)
    OB_TRY(read_row(row, from, to));
  return ONEBIT_OK;
}

void ob_options_list_terms(const struct ob_option *rows, size_t count, const void *to,
                           struct ob_term *terms) {
  for (size_t k = 0; k < count; k++) {
    const char *at = (const char *)to + rows[k].to;
    uint64_t bits;
    size_t whole;
    int number;
    if (rows[k].kind <= OB_OPTION_POSITIVE) {
      memcpy(&bits, at, sizeof bits);
    } else if (rows[k].kind == OB_OPTION_COUNT) {
      memcpy(&whole, at, sizeof whole);
      bits = whole;
    } else {
      memcpy(&number, at, sizeof number);
      bits = (uint64_t)number;
    }
    terms[k] = (struct ob_term){rows[k].term, bits};
  }
}

/* The options of all optimizers, except threads and device. */
/* clang-format off */
#define AT(field) offsetof(onebit_optimizer_options_t, field)
#define WHOLE(kind, field, fallback) {#field, #field, kind, AT(field), AT(field), fallback, 0, NULL}
#define DOUBLE(field, fallback) \
  {#field, OB_TERM_DOUBLE #field, OB_OPTION_POSITIVE, AT(field), AT(field), fallback, 0, NULL}
#define DTYPE(field) \
  {#field, #field, OB_OPTION_CHOICE, AT(field), AT(field), 0, ONEBIT_FLOAT16, "onebit_dtype_t"}
const struct ob_option ob_common_options[] = {
    WHOLE(OB_OPTION_CHOICE, profile, 0),
    WHOLE(OB_OPTION_CHOICE, scale, 0),
    WHOLE(OB_OPTION_COUNT, block_size, 0),
    WHOLE(OB_OPTION_COUNT, chunk_size, 0),
    WHOLE(OB_OPTION_CHOICE, schedule, 0),
    WHOLE(OB_OPTION_FLAG, no_error_feedback, 0),
    WHOLE(OB_OPTION_COUNT, bucket_size, 0),
    DTYPE(gradient_dtype),
    DTYPE(parameter_dtype),
    DOUBLE(gradient_factor, 1),
    DOUBLE(clip_norm, 0),
    {"initial_loss_scale", OB_TERM_DOUBLE "initial_loss_scale", OB_OPTION_REAL,
     AT(initial_loss_scale), AT(initial_loss_scale), 0, 0, NULL},
    WHOLE(OB_OPTION_COUNT, loss_scale_interval, 2000),
    DOUBLE(min_loss_scale, 1),
    WHOLE(OB_OPTION_COUNT, dense_below, 0),
    WHOLE(OB_OPTION_CHOICE, warmup_bits, 0),
    WHOLE(OB_OPTION_CHOICE, bits, 0),
    WHOLE(OB_OPTION_CHOICE, max_bits, 0),
    WHOLE(OB_OPTION_CHOICE, residual_copies, 0),
};
/* clang-format on */
_Static_assert(sizeof ob_common_options / sizeof ob_common_options[0] == OB_COMMON_OPTIONS,
               "the number of rows");

size_t ob_method_index(const char *name) {
#define NAMED(name) #name,
  static const char *const names[] = {OB_METHODS(NAMED)};
  size_t number = 0;
  while (number < OB_METHOD_COUNT && strcmp(names[number], name) != 0)
    number++;
  return number;
}
