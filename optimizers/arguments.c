/* Checks an optimizer's options and tensors. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/error.h"
#include "base/memory.h"
#include "optimizers/optimizer.h"

/* --- Options -----------------------------------------------------------------------------------*/

static onebit_status_t check_loss_scale(const onebit_optimizer_options_t *options) {
  double first = options->initial_loss_scale, min = options->min_loss_scale;
  if (first != 0 && !(first >= 1 && first >= min && first <= OB_MAX_LOSS_SCALE))
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "initial_loss_scale is %g: it must be at least 1, at least min_loss_scale "
                    "(%g), and at most 2^64",
                    first, min);
  return ONEBIT_OK;
}

onebit_status_t ob_check_common(const onebit_optimizer_options_t *options) {
  OB_TRY(check_loss_scale(options));
  if (options->bucket_size && options->profile == ONEBIT_PROFILE_DEEPSPEED)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "profile is ONEBIT_PROFILE_DEEPSPEED, bucket_size is %zu: the profile decides "
                    "which tensors share a bucket, so leave bucket_size 0",
                    options->bucket_size);
  return ONEBIT_OK;
}

/* Refuses a compressed warm-up where it is not supported: in profile deepspeed the warm-up is
 * dense, optimizers with sharded state use plans of their own, and an optimizer whose variance is
 * never frozen (0/1 Adam) has no warm-up. */
static onebit_status_t check_warmup(const struct ob_recipe *recipe) {
  const struct ob_method *method = recipe->method;
  int bits = recipe->common.warmup_bits;
  if (bits == 0)
    return ONEBIT_OK;
  if (bits != 4 && bits != 8)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "warmup_bits is %d, not 0, 4 or 8", bits);
  if (recipe->common.profile == ONEBIT_PROFILE_DEEPSPEED)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "profile is ONEBIT_PROFILE_DEEPSPEED, warmup_bits is %d: the profile has a "
                    "dense warm-up, so leave warmup_bits 0",
                    bits);
  if (method->exchange || recipe->moments.no_warmup || method->plans)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "warmup_bits is %d: only the warm-ups of 1-bit Adam without shards, 1-bit "
                    "LAMB, momentum SGD and Efficient-Adam can be compressed",
                    bits);
  return ONEBIT_OK;
}

/* Refuses a single copy of the residuals if a call's input changes before the call ends: optimizers
 * with sharded state send arrays that they reuse, and 1-bit LAMB's first compressed step starts
 * from momentum stored in the residuals. */
static onebit_status_t arguments_check_copies(const struct ob_recipe *recipe) {
  const bool shards = recipe->method->plans, lamb = recipe->asked->lamb;
  if (recipe->common.residual_copies != 1 || !(shards || lamb))
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_UNSUPPORTED, "residual_copies is 1, which is not possible with %s",
                  shards ? "shards" : "1-bit LAMB");
}

/* Refuses more than one bit if the method needs signs: trust ratios compute a step's norm from the
 * signs. */
static onebit_status_t arguments_check_bits(const struct ob_recipe *recipe, int bits,
                                            int max_bits) {
  const struct ob_method *method = recipe->method;
  const bool shards = method->plans, ratios = method->moments && method->lamb;
  if (max_bits == 1)
    return ONEBIT_OK;
  if (shards || ratios)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "bits is %d, max_bits is %d: more than one bit is not possible with %s", bits,
                    max_bits, shards ? "shards" : "trust_ratio");
  if (recipe->common.device != ONEBIT_DEVICE_HOST)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "device is ONEBIT_DEVICE_CUDA, bits is %d, max_bits is %d: more than one bit "
                    "needs host memory; set both to 1 for a device",
                    bits, max_bits);
  return ONEBIT_OK;
}

onebit_status_t ob_check_recipe(const struct ob_recipe *recipe, int bits, int max_bits) {
  OB_TRY(check_warmup(recipe));
  OB_TRY(arguments_check_bits(recipe, bits, max_bits));
  return arguments_check_copies(recipe);
}

/* --- Tensors -----------------------------------------------------------------------------------*/

static onebit_status_t arguments_check_number(const char *name, size_t tensor, float value) {
  if (!(value >= 0) || isinf(value))
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "tensors[%zu].%s is %g: it must be finite and at least 0", tensor, name,
                    (double)value);
  return ONEBIT_OK;
}

onebit_status_t ob_check_array(const struct ob_optimizer_executor *executor, const char *name,
                               size_t tensor, const void *array, onebit_dtype_t dtype) {
  char full[64];
  if (!array)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "tensors[%zu].%s is NULL", tensor, name);
  if ((uintptr_t)array % ob_dtype_size(dtype))
    return ob_error(ONEBIT_ERROR_ARGUMENT, "tensors[%zu].%s is %p, not aligned to %s", tensor, name,
                    array, dtype == ONEBIT_FLOAT32 ? "float" : "2 bytes");
  snprintf(full, sizeof full, "tensors[%zu].%s", tensor, name);
  return executor->check(full, array);
}

struct extent {
  uintptr_t first, end;
  size_t tensor;
};

static int compare_addresses(const void *a, const void *b) {
  uintptr_t x = ((const struct extent *)a)->first, y = ((const struct extent *)b)->first;
  return (x > y) - (x < y);
}

static struct extent array_extent(const void *array, size_t count, onebit_dtype_t dtype,
                                  size_t tensor) {
  uintptr_t first = (uintptr_t)array;
  return (struct extent){first, array ? first + count * ob_dtype_size(dtype) : first, tensor};
}

static onebit_status_t check_no_overlap(const onebit_optimizer_options_t *options,
                                        const onebit_tensor_t *tensors, size_t count) {
  struct extent *extents = ob_allocate(2 * count, sizeof *extents);
  if (!extents)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for checking %zu tensors", count);
  for (size_t k = 0; k < count; k++) {
    extents[2 * k] =
        array_extent(tensors[k].parameter, tensors[k].count, options->parameter_dtype, k);
    extents[2 * k + 1] =
        array_extent(tensors[k].gradient, tensors[k].count, options->gradient_dtype, k);
  }
  qsort(extents, 2 * count, sizeof *extents, compare_addresses);
  onebit_status_t status = ONEBIT_OK;
  uintptr_t end = 0;
  for (size_t i = 0, last = 0; i < 2 * count && status == ONEBIT_OK; i++) {
    if (extents[i].end == extents[i].first)
      continue;
    if (extents[i].first < end)
      status =
          ob_error(ONEBIT_ERROR_ARGUMENT, "the arrays of tensors[%zu] and tensors[%zu] overlap",
                   extents[last].tensor, extents[i].tensor);
    end = extents[i].end;
    last = i;
  }
  ob_release(extents);
  return status;
}

onebit_status_t ob_check_tensors(const struct onebit_optimizer *optimizer,
                                 const onebit_tensor_t *tensors, size_t count) {
  const onebit_optimizer_options_t *options = &optimizer->options;
  if (count && !tensors)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "tensors is NULL");
  size_t total = 0;
  for (size_t k = 0; k < count; k++) {
    if (tensors[k].count > SIZE_MAX / 64 - total)
      return ob_error(ONEBIT_ERROR_ARGUMENT,
                      "tensors[%zu].count is %zu, which is too large to address", k,
                      tensors[k].count);
    total += tensors[k].count;
    if (tensors[k].count) {
      OB_TRY(ob_check_array(optimizer->executor, "parameter", k, tensors[k].parameter,
                            options->parameter_dtype));
      if (tensors[k].gradient)
        OB_TRY(ob_check_array(optimizer->executor, "gradient", k, tensors[k].gradient,
                              options->gradient_dtype));
    }
    OB_TRY(arguments_check_number("weight_decay", k, tensors[k].weight_decay));
    OB_TRY(arguments_check_number("learning_rate_factor", k, tensors[k].learning_rate_factor));
    if (tensors[k].uncompressed == ONEBIT_TABLE && !optimizer->method->divides)
      return ob_error(
          ONEBIT_ERROR_UNSUPPORTED,
          "tensors[%zu].uncompressed is ONEBIT_TABLE, which only Efficient-Adam supports", k);
  }
  return check_no_overlap(options, tensors, count);
}
