/* Options, as rows of a table, and the file of ONEBIT_CONFIG that stands in for zeros. */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/error.h"
#include "base/log.h"
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

double ob_given_or(double value, double fallback) { return value == 0 ? fallback : value; }

static onebit_status_t put_double(const struct ob_option *row, double value, char *to) {
  value = ob_given_or(value, row->fallback);
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
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is %d, which is no %s", row->name, value, row->type);
  return ONEBIT_OK;
}

static onebit_status_t put_count(const struct ob_option *row, size_t value, char *to) {
  value = value ? value : (size_t)row->fallback;
  memcpy(to + row->to, &value, sizeof value);
  return ONEBIT_OK;
}

/* The caller's value, or the file's where that is zero, or the default. */
static onebit_status_t read_row(const struct ob_option *row, const char *from,
                                const struct ob_option_file *file, char *to) {
  double real = 0;
  size_t count = 0;
  int number = 0;
  if (from && row->kind <= OB_OPTION_POSITIVE)
    memcpy(&real, from + row->from, sizeof real);
  else if (from && row->kind == OB_OPTION_COUNT)
    memcpy(&count, from + row->from, sizeof count);
  else if (from)
    memcpy(&number, from + row->from, sizeof number);
  bool given = real != 0 || count || number; /* a not-a-number counts as given */
  const struct ob_json_value *value = given ? NULL : ob_option_in_file(file, row);
  if (value) {
    OB_TRY(ob_option_number(file, row, value, &real));
    count = row->kind == OB_OPTION_COUNT ? (size_t)real : 0;
    number = row->kind > OB_OPTION_COUNT ? (int)real : 0;
  }
  onebit_status_t status = row->kind <= OB_OPTION_POSITIVE ? put_double(row, real, to)
                           : row->kind == OB_OPTION_COUNT  ? put_count(row, count, to)
                                                           : put_int(row, number, to);
  if (value && status != ONEBIT_OK)
    return ob_error(status, "%s: %s", ob_config_origin(value), onebit_last_error());
  return status;
}

onebit_status_t ob_options_read(const struct ob_option *rows, size_t count, const void *from,
                                const struct ob_option_file *file, void *to) {
  for (const struct ob_option *row = rows; row < rows + count; row++)
    OB_TRY(read_row(row, from, file, to));
  return ONEBIT_OK;
}

void ob_options_terms(const struct ob_option *rows, size_t count, const void *to,
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
  {#field, #field " (as bits)", OB_OPTION_POSITIVE, AT(field), AT(field), fallback, 0, NULL}
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
    {"initial_loss_scale", "initial_loss_scale (as bits)", OB_OPTION_REAL, AT(initial_loss_scale),
     AT(initial_loss_scale), 0, 0, NULL},
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

size_t ob_method_number(const char *name) {
#define NAMED(name) #name,
  static const char *const names[] = {OB_METHODS(NAMED)};
  size_t number = 0;
  while (number < OB_METHOD_COUNT && strcmp(names[number], name) != 0)
    number++;
  return number;
}

/* --- The file ----------------------------------------------------------------------------------*/

/* DeepSpeed's names, where they are others. */
static const struct {
  const char *theirs, *ours;
} options[] =
    {
        {"betas", "beta1"},
        {"betas", "beta2"},
        {"eps", "epsilon"},
        {"max_coeff", "max_coefficient"},
        {"min_coeff", "min_coefficient"},
        {"coeff_beta", "coefficient_beta"},
        {"factor_max", "max_factor"},
        {"factor_min", "min_factor"},
        {"factor_threshold", "factor_change"},
        {"var_freeze_step", "variance_freeze_step"},
        {"var_update_scaler", "variance_update_scaler"},
},
  types[] = {{"OneBitAdam", "adam"}, {"OneBitLamb", "lamb"}, {"ZeroOneAdam", "zero_one_adam"}};

static bool is_name_of(const char *key, const char *option) {
  bool same = strcmp(key, option) == 0;
  for (size_t i = 0; i < sizeof options / sizeof options[0] && !same; i++)
    same = strcmp(key, options[i].theirs) == 0 && strcmp(option, options[i].ours) == 0;
  return same;
}

static bool is_option(const struct ob_option *rows, size_t count, const char *key) {
  for (size_t k = 0; k < count; k++)
    if (is_name_of(key, rows[k].name))
      return true;
  return false;
}

static onebit_status_t check_params(const struct ob_option_file *file,
                                    const struct ob_method *method) {
  const struct ob_json_value *value = NULL;
  while ((value = ob_config_next(file->params, value)))
    if (!is_option(method->options, method->option_count, value->key) &&
        !is_option(ob_common_options, OB_COMMON_OPTIONS, value->key) &&
        !ob_config_without_effect(value->key, true))
      return ob_error(ONEBIT_ERROR_ARGUMENT, "%s: unknown key, %s has no such option",
                      ob_config_origin(value), file->type->text);
  return ONEBIT_OK;
}

static onebit_status_t find_type(struct ob_option_file *file) {
  const char *name = file->type->text;
  if (file->type->kind != OB_JSON_STRING)
    return ob_config_wrong(file->type, "not a text");
  for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
    if (strcasecmp(name, types[i].theirs) == 0) {
      file->deepspeeds = true;
      name = types[i].ours;
    }
  file->method = name;
  if (ob_method_number(name) == OB_METHOD_COUNT)
    return ob_config_wrong(file->type,
                           "not OneBitAdam, OneBitLamb or ZeroOneAdam, nor the name of an "
                           "optimizer as onebit_optimizer_info_t has it");
  return ONEBIT_OK;
}

onebit_status_t ob_option_file_open(struct ob_option_file *file) {
  *file = (struct ob_option_file){0};
  OB_TRY(ob_config_check());
  const struct ob_json_value *section = ob_config_find(NULL, "optimizer"), *value = NULL;
  if (!section || section->kind == OB_JSON_NULL)
    return ONEBIT_OK;
  while ((value = ob_config_next(section, value)))
    if (strcmp(value->key, "type") == 0)
      file->type = value;
    else if (strcmp(value->key, "params") == 0 && value->kind == OB_JSON_OBJECT)
      file->params = value;
    else if (strcmp(value->key, "legacy_fusion") != 0)
      return ob_config_wrong(value, "and section optimizer has a text type and an object params");
  if (!file->type)
    return ob_config_wrong(section, "without a type");
  return find_type(file);
}

onebit_status_t ob_option_file_for(const struct ob_method *method, struct ob_option_file *file) {
  OB_TRY(ob_option_file_open(file));
  if (file->method && strcmp(file->method, method->name) == 0)
    return file->params ? check_params(file, method) : ONEBIT_OK;
  *file = (struct ob_option_file){0};
  return ONEBIT_OK;
}

const struct ob_json_value *ob_option_in_file(const struct ob_option_file *file,
                                              const struct ob_option *row) {
  const struct ob_json_value *value = NULL;
  while (file->params && (value = ob_config_next(file->params, value)))
    if (is_name_of(value->key, row->name) && value->kind != OB_JSON_NULL)
      return value;
  if (strcmp(row->name, "clip_norm") == 0)
    value = ob_config_find(NULL, "gradient_clipping");
  return value && value->kind != OB_JSON_NULL ? value : NULL;
}

/* DeepSpeed's freeze_step counts a first call that makes no step, which only its profile has. */
static double count_as_here(const struct ob_option *row, const struct ob_option_file *file,
                            double number) {
  bool counts = file->deepspeeds && strcmp(row->name, "freeze_step") == 0;
  return counts && !file->deepspeed_profile && number > 1 ? number - 1 : number;
}

onebit_status_t ob_option_number(const struct ob_option_file *file, const struct ob_option *row,
                                 const struct ob_json_value *value, double *number) {
  const struct ob_json_value *given = value;
  if (given->kind == OB_JSON_ARRAY && strncmp(row->name, "beta", 4) == 0) {
    const struct ob_json_value *first = ob_config_next(value, NULL);
    const struct ob_json_value *second = first ? ob_config_next(value, first) : NULL;
    if (!second || ob_config_next(value, second))
      return ob_config_wrong(value, "not of two numbers");
    given = strcmp(row->name, "beta1") == 0 ? first : second;
  }
  bool truth =
      row->kind == OB_OPTION_FLAG && (given->kind == OB_JSON_FALSE || given->kind == OB_JSON_TRUE);
  if (given->kind != OB_JSON_REAL && !truth)
    return ob_config_wrong(value,
                           row->kind == OB_OPTION_FLAG ? "neither true nor false" : "not a number");
  *number = truth ? given->kind == OB_JSON_TRUE : strtod(given->text, NULL);
  /* A double does not hold larger integers exactly. */
  double max = row->kind == OB_OPTION_COUNT ? 0x1p53 : 0x1p31 - 1;
  if (row->kind > OB_OPTION_POSITIVE &&
      !(*number >= 0 && *number <= max && *number == floor(*number)))
    return ob_config_wrong(value, "not a whole number from 0 on");
  *number = count_as_here(row, file, *number);
  return ONEBIT_OK;
}

void ob_option_file_warn(const struct ob_method *method, int rank) {
  static atomic_flag warned = ATOMIC_FLAG_INIT;
  struct ob_option_file file;
  const struct ob_json_value *value = NULL;
  if (ob_option_file_open(&file) != ONEBIT_OK || !file.type || atomic_flag_test_and_set(&warned))
    return;
  const bool applies = strcmp(file.method, method->name) == 0;
  if (!applies)
    ob_log(OB_LOG_WARN, rank,
           "%s is %s, and the program makes %s: section optimizer is without effect",
           ob_config_origin(file.type), file.type->text, method->name);
  while (applies && file.params && (value = ob_config_next(file.params, value))) {
    const char *why = ob_config_without_effect(value->key, true);
    if (why)
      ob_log(OB_LOG_WARN, rank, "%s is without effect: %s", ob_config_origin(value), why);
  }
}
