/* Checks the options of the outer step, and implements the functions that return its state. */
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/memory.h"
#include "compression/levels.h"
#include "onebit/statistics.h"
#include "optimizers/outer/outer.h"

/* The largest outer momentum that converges with two bits; with one bit no outer momentum converges
 * (docs/outer.md). */
#define MOMENTUM_OF_TWO_BITS 0.5

/* Returns the fewest bits with which a rule with that momentum converges. */
static int min_bits_for_rule(onebit_outer_rule_t rule, double momentum) {
  if (rule == ONEBIT_OUTER_MEAN)
    return 1;
  return rule == ONEBIT_OUTER_MOMENTUM && momentum <= MOMENTUM_OF_TWO_BITS ? 2 : 4;
}

/* The options on which all ranks must agree, and the device. */
/* clang-format off */
#define ROW(field, term, kind, fallback, max, type) \
  {#field, term, kind, offsetof(onebit_outer_options_t, field), \
   offsetof(onebit_outer_options_t, field), fallback, max, type}
#define COUNT(field, fallback)   ROW(field, #field, OB_OPTION_COUNT, fallback, 0, NULL)
#define REAL(field)              ROW(field, OB_TERM_DOUBLE #field, OB_OPTION_REAL, 0, 0, NULL)
#define CHOICE(field, max, type) ROW(field, #field, OB_OPTION_CHOICE, 0, max, type)
const struct ob_option ob_outer_options[OB_OUTER_OPTIONS] = {
    CHOICE(rule, ONEBIT_OUTER_NESTEROV, "onebit_outer_rule_t"),
    REAL(learning_rate),
    REAL(momentum),
    CHOICE(bits, 0, NULL),
    COUNT(fragments, 1),
    ROW(weighted, "weighted", OB_OPTION_FLAG, 0, 0, NULL),
    COUNT(local_steps, 30),
    COUNT(delay, 0),
    REAL(mixing),
    CHOICE(parameter_dtype, ONEBIT_FLOAT16, "onebit_dtype_t"),
    CHOICE(device, ONEBIT_DEVICE_CUDA, "onebit_device_t"),
};
/* clang-format on */

static onebit_status_t resolve_rule(onebit_outer_options_t *options) {
  bool nesterov = options->rule == ONEBIT_OUTER_NESTEROV;
  if (options->rule == ONEBIT_OUTER_MEAN && options->momentum != 0)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "momentum is %g, but rule is ONEBIT_OUTER_MEAN, which has no momentum",
                    options->momentum);
  options->learning_rate = ob_value_or_default(options->learning_rate, nesterov ? 0.7 : 1);
  OB_TRY(ob_check_positive("learning_rate", options->learning_rate));
  if (options->rule == ONEBIT_OUTER_MEAN)
    return ONEBIT_OK;
  options->momentum = ob_value_or_default(options->momentum, nesterov ? 0.9 : 0.5);
  return ob_check_fraction("momentum", options->momentum);
}

static onebit_status_t resolve_bits(onebit_outer_options_t *options) {
  int bits = options->bits ? options->bits : min_bits_for_rule(options->rule, options->momentum);
  if (!ob_width_is_known(bits) && bits != ONEBIT_OUTER_DENSE && bits != ONEBIT_OUTER_SPARSE)
    return ob_error(
        ONEBIT_ERROR_ARGUMENT,
        "bits is %d, not 1, 2, 4, 8, ONEBIT_OUTER_DENSE (%d) or ONEBIT_OUTER_SPARSE (%d)", bits,
        ONEBIT_OUTER_DENSE, ONEBIT_OUTER_SPARSE);
  options->bits = bits;
  return ONEBIT_OK;
}

static onebit_status_t resolve_times(onebit_outer_options_t *options) {
  if (options->fragments > options->local_steps)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "fragments is %zu, but local_steps is only %zu",
                    options->fragments, options->local_steps);
  if (options->delay >= options->local_steps)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "delay is %zu, not less than local_steps (%zu)",
                    options->delay, options->local_steps);
  options->mixing = ob_value_or_default(options->mixing, options->delay ? 0.5 : 1);
  if (!(options->mixing > 0 && options->mixing <= 1))
    return ob_error(ONEBIT_ERROR_ARGUMENT, "mixing is %g: it must be above 0 and at most 1",
                    options->mixing);
  return ONEBIT_OK;
}

onebit_status_t ob_outer_resolve(const onebit_outer_options_t *given,
                                 onebit_outer_options_t *options) {
  *options = (onebit_outer_options_t)ONEBIT_OUTER_OPTIONS_INIT;
  if (given)
    OB_TRY(ob_size_check("options", given, sizeof *given));
  if (given)
    *options = *given;
  OB_TRY(ob_options_read(ob_outer_options, OB_OUTER_OPTIONS, options, options));
  OB_TRY(resolve_rule(options));
  OB_TRY(resolve_bits(options));
  OB_TRY(resolve_times(options));
  if (options->device != ONEBIT_DEVICE_HOST && options->bits == ONEBIT_OUTER_SPARSE)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "bits is ONEBIT_OUTER_SPARSE, but device is not ONEBIT_DEVICE_HOST: only the "
                    "host makes sparse messages");
  return ONEBIT_OK;
}

onebit_status_t ob_outer_shape(const struct onebit_outer *outer, bool dense,
                               struct ob_plan_shape *shape) {
  const onebit_outer_options_t *options = &outer->options;
  onebit_plan_options_t plan = ONEBIT_PLAN_OPTIONS_INIT;
  dense = dense || options->bits == ONEBIT_OUTER_SPARSE; /* sparse messages are sent as words */
  plan.wire = dense ? ONEBIT_WIRE_DENSE : ONEBIT_WIRE_BITS;
  plan.scale = dense ? ONEBIT_SCALE_RMS : options->scale;
  plan.block_size = options->block_size;
  plan.chunk_size = options->chunk_size;
  plan.no_error_feedback = options->no_error_feedback;
  plan.threads = options->threads;
  plan.schedule = options->schedule;
  plan.bits = dense ? 0 : options->bits;
  plan.device = options->device;
  return ob_plan_resolve(&plan, shape);
}

/* --- Functions that return the state -----------------------------------------------------------*/

onebit_status_t onebit_outer_get_consensus(onebit_outer_t outer, size_t tensor, float *values) {
  OB_CALL_SCOPE_OF(outer, OB_HANDLE_OUTER);
  OB_TRY(ob_check_tensor(tensor, outer->tensor_count));
  if (!values && outer->tensors[tensor].count)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "values is NULL");
  const struct ob_outer_tensor *of = &outer->tensors[tensor];
  const float *consensus = outer->array[OB_OUTER_CONSENSUS];
  return ob_outer_copy(outer, values, consensus + of->first, of->count * sizeof *values);
}

static double sum_squares(const float *values, size_t count) {
  double sum = 0;
  for (size_t i = 0; i < count; i++)
    sum += (double)values[i] * (double)values[i];
  return sum;
}

/* Moves elements to their places, last one first, so that none is overwritten. */
onebit_status_t ob_outer_export_residual(const struct ob_fragment *fragment, enum ob_saved what,
                                         float *values) {
  const struct ob_outer_exchange *exchange = fragment->outer->exchange;
  size_t from = 0,
         end =
             fragment->count; /* values in the pieces before; end of the elements not yet placed */
  for (size_t k = 0; k < fragment->pieces; k++)
    from += exchange->extent(fragment, what, k).count;
  if (from)
    OB_TRY(exchange->export_residual(fragment, what, values));
  for (size_t k = fragment->pieces; k-- > 0;) {
    const struct ob_run run = exchange->extent(fragment, what, k);
    const size_t at = fragment->piece[k].at + run.offset, behind = at + run.count;
    from -= run.count;
    memmove(values + at, values + from, run.count * sizeof *values);
    memset(values + behind, 0, (end - behind) * sizeof *values);
    end = at;
  }
  memset(values, 0, end * sizeof *values);
  return ONEBIT_OK;
}

onebit_status_t ob_outer_import_residual(struct ob_fragment *fragment, enum ob_saved what,
                                         const float *values, float *scratch) {
  const struct ob_outer_exchange *exchange = fragment->outer->exchange;
  size_t count = 0;
  for (size_t k = 0; k < fragment->pieces; k++) {
    const struct ob_run run = exchange->extent(fragment, what, k);
    const float *from = values + fragment->piece[k].at + run.offset;
    memmove(scratch + count, from, run.count * sizeof *from);
    count += run.count;
  }
  return count ? exchange->import_residual(fragment, what, scratch) : ONEBIT_OK;
}

/* Adds the norm of the outer momentum and, unless an exchange is in flight, the norm of the
 * residual of values that this rank sends. */
static onebit_status_t info_add_norms(const struct ob_fragment *fragment, float *values,
                                      onebit_outer_info_t *info) {
  const struct onebit_outer *outer = fragment->outer;
  const size_t bytes = fragment->count * sizeof *values;
  if (fragment->momentum) {
    OB_TRY(ob_outer_copy(outer, values, fragment->momentum, bytes));
    info->momentum_norm += sum_squares(values, fragment->count);
  }
  if (fragment->stage != OB_FRAGMENT_IDLE || outer->detached)
    return ONEBIT_OK;
  OB_TRY(ob_outer_export_residual(fragment, OB_SAVED_WORKER, values));
  info->residual_norm += sum_squares(values, fragment->count);
  return ONEBIT_OK;
}

/* Adds a fragment to the info, which has the squares of norms until all fragments are added. */
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
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for checking %zu elements",
                    fragment->count);
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
  const int wanted = min_bits_for_rule(info.rule, info.momentum);
  if (info.bits == ONEBIT_OUTER_SPARSE) /* its residual is many times the drift by design */
    return ONEBIT_OK;
  if (info.bits < wanted)
    return ob_error(ONEBIT_WARNING,
                    "bits is %d, which is too few for an outer momentum of %g, since momentum "
                    "amplifies residuals: set bits to %d, or rule to ONEBIT_OUTER_MEAN",
                    info.bits, info.momentum, wanted);
  if (info.drift_norm > 0 && info.residual_norm > ONEBIT_RESIDUAL_RATIO_LIMIT * info.drift_norm)
    return ob_error(ONEBIT_WARNING,
                    "the residual is %.3g times the mean drift, so bits, which is %d, is too few: "
                    "set it higher",
                    info.residual_norm / info.drift_norm, info.bits);
  return ONEBIT_OK;
}
