/* Creates any optimizer from its row in the table of methods. It needs no Criterion, since
 * tests/gpu has none. */
#include "tests/support_optimizers.h"

#include <stdlib.h>
#include <string.h>

#include "optimizers/optimizer.h"

struct any_options any_options_of(const struct ob_method *method, const void *given) {
  struct any_options options = {.method = method};
  if (method->options_size > sizeof options.memory)
    abort();
  if (given)
    memcpy(options.memory, given, method->options_size);
  memcpy(options.memory, &method->options_size, sizeof(size_t));
  return options;
}

static const struct ob_option *find_option(const struct any_options *options, const char *name) {
  const struct ob_method *method = options->method;
  for (size_t k = 0; k < method->option_count; k++)
    if (strcmp(method->options[k].name, name) == 0)
      return &method->options[k];
  return NULL;
}

void any_set(struct any_options *options, const char *name, double value) {
  const struct ob_option *row = find_option(options, name);
  int number = (int)value;
  if (row && row->kind == OB_OPTION_COUNT)
    any_count(options, name, (size_t)value);
  else if (row && row->kind <= OB_OPTION_POSITIVE)
    memcpy(options->memory + row->from, &value, sizeof value);
  else if (row)
    memcpy(options->memory + row->from, &number, sizeof number);
}

void any_count(struct any_options *options, const char *name, size_t value) {
  const struct ob_option *row = find_option(options, name);
  if (row)
    memcpy(options->memory + row->from, &value, sizeof value);
}

onebit_optimizer_options_t *any_common(struct any_options *options) {
  return (onebit_optimizer_options_t *)(void *)(options->memory + options->method->common_at);
}

const onebit_optimizer_options_t *any_case_common(const struct any_case *what) {
  const void *common = (const char *)what->options + what->method->common_at;
  return common;
}

onebit_status_t any_create(const struct any_options *options, onebit_comm_t comm,
                           const onebit_tensor_t *tensors, size_t count,
                           onebit_optimizer_t *optimizer) {
  return ob_optimizer_create(comm, options->method, options->memory, tensors, count, optimizer);
}
