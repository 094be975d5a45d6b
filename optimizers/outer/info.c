/* The outer step: asked. */
#include <math.h>
#include <string.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/memory.h"
#include "onebit/statistics.h"
#include "optimizers/outer/outer.h"

onebit_status_t onebit_outer_get_consensus(onebit_outer_t outer, size_t tensor, float *values) {
  OB_CALL_SCOPE_OF(outer, OB_HANDLE_OUTER);
  if (tensor >= outer->tensor_count)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "tensor is %zu, and there are %zu", tensor,
                    outer->tensor_count);
  if (!values && outer->tensors[tensor].count)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "values is NULL");
  const struct ob_outer_tensor *of = &outer->tensors[tensor];
  const float *consensus = outer->array[OB_OUTER_CONSENSUS];
  return ob_outer_copy(outer, values, consensus + of->first, of->count * sizeof *values);
}

static double squares_of(const float *values, size_t count) {
  double sum = 0;
  for (size_t i = 0; i < count; i++)
    sum += (double)values[i] * (double)values[i];
  return sum;
}

/* Moves elements to their places, from the last one on, so that none is overwritten. */
onebit_status_t ob_outer_export_residual(const struct ob_fragment *fragment, enum ob_saved what,
                                         float *values) {
  const struct ob_outer_exchange *exchange = fragment->outer->exchange;
  struct ob_outer_run *runs = fragment->outer->runs;
  const size_t number = exchange->runs(fragment, what, runs);
  size_t from = 0, end = fragment->count; /* of the runs before; of the elements not yet placed */
  for (size_t k = 0; k < number; k++)
    from += runs[k].count;
  if (from)
    OB_TRY(exchange->export_residual(fragment, what, values));
  for (size_t k = number; k-- > 0; end = runs[k].at) {
    const size_t behind = runs[k].at + runs[k].count;
    from -= runs[k].count;
    memmove(values + runs[k].at, values + from, runs[k].count * sizeof *values);
    memset(values + behind, 0, (end - behind) * sizeof *values);
  }
  memset(values, 0, end * sizeof *values);
  return ONEBIT_OK;
}

/* The residual of what this rank sends, unless it travels; and the outer momentum. */
static onebit_status_t info_add_norms(const struct ob_fragment *fragment, float *values,
                                      onebit_outer_info_t *info) {
  const struct onebit_outer *outer = fragment->outer;
  const size_t bytes = fragment->count * sizeof *values;
  if (fragment->momentum) {
    OB_TRY(ob_outer_copy(outer, values, fragment->momentum, bytes));
    info->momentum_norm += squares_of(values, fragment->count);
  }
  if (fragment->stage != OB_FRAGMENT_IDLE || outer->detached)
    return ONEBIT_OK;
  OB_TRY(ob_outer_export_residual(fragment, OB_SAVED_WORKER, values));
  info->residual_norm += squares_of(values, fragment->count);
  return ONEBIT_OK;
}

/* Adds to the info; its norms are squares so far. */
static onebit_status_t add_fragment(const struct onebit_outer *outer,
                                    const struct ob_fragment *fragment, onebit_outer_info_t *info) {
  uint64_t wire = 0, memory = 0;
  if (!outer->detached)
    outer->exchange->cost(fragment, &wire, &memory);
  info->exchange_bytes += wire + ob_plan_wire_bytes(fragment->weigh);
  info->memory_bytes += memory + ob_plan_memory_bytes(fragment->weigh);
  info->drift_norm += fragment->drift_squares;
  uint32_t sum;
  OB_TRY(outer->executor->checksum(fragment, &sum));
  info->checksum = (uint32_t)ob_hash(info->checksum, &sum, sizeof sum);
  info->in_flight += fragment->stage != OB_FRAGMENT_IDLE;
  float *values = ob_allocate(fragment->count, sizeof *values);
  if (!values)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory to look at %zu elements", fragment->count);
  const onebit_status_t status = info_add_norms(fragment, values, info);
  ob_release(values);
  return status;
}

onebit_status_t onebit_outer_get_info(onebit_outer_t outer, onebit_outer_info_t *info) {
  OB_CALL_SCOPE_OF(outer, OB_HANDLE_OUTER);
  OB_TRY(ob_size_check("info", info, sizeof *info));
  const onebit_outer_options_t *options = &outer->options;
  *info = (onebit_outer_info_t){.size = sizeof *info,
                                .local_steps = options->local_steps,
                                .rule = options->rule,
                                .learning_rate = options->learning_rate,
                                .momentum = options->momentum,
                                .mixing = options->mixing,
                                .bits = options->bits,
                                .fragments = options->fragments,
                                .delay = options->delay,
                                .steps = outer->steps,
                                .exchanges = outer->exchanges,
                                .skipped = outer->skipped,
                                .memory_bytes = outer->own_bytes};
  for (size_t f = 0; f < options->fragments; f++)
    OB_TRY(add_fragment(outer, &outer->fragments[f], info));
  info->drift_norm = sqrt(info->drift_norm);
  info->residual_norm = sqrt(info->residual_norm);
  info->momentum_norm = sqrt(info->momentum_norm);
  return ONEBIT_OK;
}

onebit_status_t onebit_outer_check(onebit_outer_t outer) {
  OB_CALL_SCOPE;
  onebit_outer_info_t info = {.size = sizeof info};
  OB_TRY(onebit_outer_get_info(outer, &info));
  const int wanted = ob_outer_bits_for(info.rule, info.momentum);
  if (info.bits == ONEBIT_OUTER_SPARSE) /* its residual is many times the drift by design */
    return ONEBIT_OK;
  if (info.bits < wanted)
    return ob_error(ONEBIT_WARNING,
                    "bits is %d, and the outer momentum %g amplifies what so few bits delay: set "
                    "bits to %d, or rule to ONEBIT_OUTER_MEAN",
                    info.bits, info.momentum, wanted);
  if (info.drift_norm > 0 && info.residual_norm > ONEBIT_RESIDUAL_RATIO_LIMIT * info.drift_norm)
    return ob_error(ONEBIT_WARNING,
                    "the residual is %.3g times the mean drift: %d bits are too few for it, set "
                    "bits to more",
                    info.residual_norm / info.drift_norm, info.bits);
  return ONEBIT_OK;
}
