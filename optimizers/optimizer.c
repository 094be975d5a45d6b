/* Optimizers: made from their options, and given back. */
#include "optimizers/optimizer.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"

onebit_status_t ob_check_size(size_t size, size_t wanted, const char *start) {
  if (size != wanted)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "options->size is %zu, not %zu: start from %s", size,
                    wanted, start);
  return ONEBIT_OK;
}

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

double ob_given_or(double value, double fallback) { return value == 0 ? fallback : value; }

onebit_status_t ob_moments_resolve(struct ob_moments *moments, onebit_profile_t profile) {
  moments->beta1 = ob_given_or(moments->beta1, 0.9);
  moments->beta2 = ob_given_or(moments->beta2, 0.999);
  moments->epsilon = ob_given_or(moments->epsilon, 1e-8);
  moments->freeze_threshold = ob_given_or(moments->freeze_threshold, 0.96);
  OB_TRY(ob_check_fraction("beta1", moments->beta1));
  OB_TRY(ob_check_fraction("beta2", moments->beta2));
  OB_TRY(ob_check_fraction("freeze_threshold", moments->freeze_threshold));
  OB_TRY(ob_check_positive("epsilon", moments->epsilon));
  moments->no_bias_correction = moments->no_bias_correction || profile == ONEBIT_PROFILE_DEEPSPEED;
  return ONEBIT_OK;
}

static onebit_status_t check_dtype(const char *name, onebit_dtype_t dtype) {
  if (dtype != ONEBIT_FLOAT32 && dtype != ONEBIT_BFLOAT16 && dtype != ONEBIT_FLOAT16)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is %d, which is no onebit_dtype_t", name,
                    (int)dtype);
  return ONEBIT_OK;
}

static onebit_status_t check_loss_scale(const onebit_optimizer_options_t *options) {
  double first = options->initial_loss_scale, least = options->min_loss_scale;
  OB_TRY(ob_check_positive("min_loss_scale", least));
  if (first != 0 && !(first >= 1 && first >= least && first <= OB_MOST_LOSS_SCALE))
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "initial_loss_scale is %g, not from 1 and from min_loss_scale, %g, to 2^64",
                    first, least);
  return ONEBIT_OK;
}

static onebit_status_t resolve(const onebit_optimizer_options_t *given,
                               onebit_optimizer_options_t *options) {
  *options = *given;
  options->gradient_factor = ob_given_or(options->gradient_factor, 1);
  options->min_loss_scale = ob_given_or(options->min_loss_scale, 1);
  if (!options->loss_scale_interval)
    options->loss_scale_interval = 2000;
  OB_TRY(check_dtype("gradient_dtype", options->gradient_dtype));
  OB_TRY(check_dtype("parameter_dtype", options->parameter_dtype));
  OB_TRY(ob_check_positive("gradient_factor", options->gradient_factor));
  if (options->clip_norm != 0)
    OB_TRY(ob_check_positive("clip_norm", options->clip_norm));
  OB_TRY(check_loss_scale(options));
  if (options->bucket_size && options->profile == ONEBIT_PROFILE_DEEPSPEED)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "profile is ONEBIT_PROFILE_DEEPSPEED, bucket_size is %zu: what is compressed "
                    "together is decided there, leave it 0",
                    options->bucket_size);
  return ONEBIT_OK;
}

/* The plan options of a unit, checked as plans check them. */
static onebit_status_t resolve_plan(const onebit_optimizer_options_t *options,
                                    struct ob_plan_shape *shape) {
  onebit_plan_options_t plan = ONEBIT_PLAN_OPTIONS_INIT;
  plan.dtype = options->gradient_dtype;
  plan.profile = options->profile;
  plan.scale = options->scale;
  plan.block_size = options->block_size;
  plan.chunk_size = options->chunk_size;
  plan.schedule = options->schedule;
  plan.no_error_feedback = options->no_error_feedback;
  plan.threads = options->threads;
  plan.device = options->device;
  return ob_plan_resolve(&plan, shape);
}

static onebit_status_t check_number(const char *name, size_t tensor, float value) {
  if (!(value >= 0) || isinf(value))
    return ob_error(ONEBIT_ERROR_ARGUMENT, "tensors[%zu].%s is %g, not a finite number from 0 on",
                    tensor, name, (double)value);
  return ONEBIT_OK;
}

static onebit_status_t check_array(const struct ob_optimizer_place *place, const char *name,
                                   size_t tensor, const void *array, onebit_dtype_t dtype) {
  char full[64];
  if (!array)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "tensors[%zu].%s is NULL", tensor, name);
  if ((uintptr_t)array % ob_dtype_size(dtype))
    return ob_error(ONEBIT_ERROR_ARGUMENT, "tensors[%zu].%s is %p, not aligned to %s", tensor, name,
                    array, dtype == ONEBIT_FLOAT32 ? "float" : "2 bytes");
  snprintf(full, sizeof full, "tensors[%zu].%s", tensor, name);
  return place->check(full, array);
}

struct extent {
  uintptr_t first, end;
  size_t tensor;
};

static int by_address(const void *a, const void *b) {
  uintptr_t x = ((const struct extent *)a)->first, y = ((const struct extent *)b)->first;
  return (x > y) - (x < y);
}

static struct extent extent_of(const void *array, size_t count, onebit_dtype_t dtype,
                               size_t tensor) {
  uintptr_t first = (uintptr_t)array;
  return (struct extent){first, array ? first + count * ob_dtype_size(dtype) : first, tensor};
}

static onebit_status_t check_apart(const onebit_optimizer_options_t *options,
                                   const onebit_tensor_t *tensors, size_t count) {
  struct extent *extents = ob_allocate(2 * count, sizeof *extents);
  if (!extents)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory to look at %zu tensors", count);
  for (size_t k = 0; k < count; k++) {
    extents[2 * k] = extent_of(tensors[k].parameter, tensors[k].count, options->parameter_dtype, k);
    extents[2 * k + 1] =
        extent_of(tensors[k].gradient, tensors[k].count, options->gradient_dtype, k);
  }
  qsort(extents, 2 * count, sizeof *extents, by_address);
  onebit_status_t status = ONEBIT_OK;
  uintptr_t end = 0;
  for (size_t i = 0, last = 0; i < 2 * count && status == ONEBIT_OK; i++) {
    if (extents[i].end == extents[i].first)
      continue;
    if (extents[i].first < end)
      status = ob_error(ONEBIT_ERROR_ARGUMENT, "arrays of tensors[%zu] and tensors[%zu] overlap",
                        extents[last].tensor, extents[i].tensor);
    end = extents[i].end;
    last = i;
  }
  ob_release(extents);
  return status;
}

static onebit_status_t check_tensors(const struct onebit_optimizer *optimizer,
                                     const onebit_tensor_t *tensors, size_t count) {
  const onebit_optimizer_options_t *options = &optimizer->options;
  if (count && !tensors)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "tensors is NULL");
  size_t total = 0;
  for (size_t k = 0; k < count; k++) {
    if (tensors[k].count > SIZE_MAX / 64 - total)
      return ob_error(ONEBIT_ERROR_ARGUMENT, "tensors[%zu].count is %zu: too large to address", k,
                      tensors[k].count);
    total += tensors[k].count;
    if (tensors[k].count) {
      OB_TRY(check_array(optimizer->place, "parameter", k, tensors[k].parameter,
                         options->parameter_dtype));
      if (tensors[k].gradient)
        OB_TRY(check_array(optimizer->place, "gradient", k, tensors[k].gradient,
                           options->gradient_dtype));
    }
    OB_TRY(check_number("weight_decay", k, tensors[k].weight_decay));
    OB_TRY(check_number("learning_rate_factor", k, tensors[k].learning_rate_factor));
  }
  return check_apart(options, tensors, count);
}

void *ob_optimizer_take(onebit_optimizer_t optimizer, size_t count, size_t size) {
  optimizer->own_bytes += count * size;
  return ob_allocate(count, size);
}

/* A fingerprint of numbers that must be the same on all ranks (64-bit FNV-1a). */
static uint64_t fingerprint(uint64_t hash, const void *data, size_t bytes) {
  const unsigned char *byte = data;
  for (size_t i = 0; i < bytes; i++)
    hash = (hash ^ byte[i]) * 0x100000001b3u;
  return hash;
}

uint64_t ob_bits_of_double(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

/* What the tensors have that must be the same on all ranks. */
static void add_tensors(const onebit_tensor_t *tensors, size_t ntensors, uint64_t *counts,
                        uint64_t *constants) {
  for (size_t k = 0; k < ntensors; k++) {
    uint64_t count = tensors[k].count;
    unsigned char uncompressed = tensors[k].uncompressed != 0;
    *counts = fingerprint(*counts, &count, sizeof count);
    *constants = fingerprint(*constants, &tensors[k].weight_decay, sizeof(float));
    *constants = fingerprint(*constants, &tensors[k].learning_rate_factor, sizeof(float));
    *constants = fingerprint(*constants, &uncompressed, sizeof uncompressed);
  }
}

static onebit_status_t agree_on_options(const struct onebit_optimizer *optimizer,
                                        onebit_comm_t comm, onebit_status_t status,
                                        const onebit_tensor_t *tensors, size_t ntensors) {
  static const onebit_optimizer_options_t none;
  const onebit_optimizer_options_t *options = optimizer ? &optimizer->options : &none;
  uint64_t counts = 0xcbf29ce484222325u, constants = counts;
  if (status == ONEBIT_OK)
    add_tensors(tensors, ntensors, &counts, &constants);
  const struct ob_term terms[] = {
      {"ntensors", ntensors},
      {"the list of tensor counts (its fingerprint)", counts},
      {"a weight decay, learning rate factor or uncompressed (their fingerprint)", constants},
      {"profile", (uint64_t)options->profile},
      {"scale", (uint64_t)options->scale},
      {"block_size", options->block_size},
      {"chunk_size", options->chunk_size},
      {"schedule", (uint64_t)options->schedule},
      {"no_error_feedback", (uint64_t) !!options->no_error_feedback},
      {"bucket_size", options->bucket_size},
      {"gradient_dtype", (uint64_t)options->gradient_dtype},
      {"parameter_dtype", (uint64_t)options->parameter_dtype},
      {"gradient_factor (as bits)", ob_bits_of_double(options->gradient_factor)},
      {"clip_norm (as bits)", ob_bits_of_double(options->clip_norm)},
      {"initial_loss_scale (as bits)", ob_bits_of_double(options->initial_loss_scale)},
      {"loss_scale_interval", options->loss_scale_interval},
      {"min_loss_scale (as bits)", ob_bits_of_double(options->min_loss_scale)},
      {"dense_below", options->dense_below},
  };
  return ob_agree(comm, status, terms, sizeof terms / sizeof terms[0]);
}

static uint64_t name_of(const char *name) {
  return fingerprint(0xcbf29ce484222325u, name, strlen(name));
}

/* The kind of optimizer comes first: what follows depends on it. */
static onebit_status_t agree(const struct onebit_optimizer *optimizer, onebit_comm_t comm,
                             const struct ob_recipe *recipe, onebit_status_t status,
                             const onebit_tensor_t *tensors, size_t ntensors) {
  const struct ob_term kind = {"the kind of optimizer (its fingerprint)",
                               name_of(recipe->method->name)};
  OB_TRY(ob_agree(comm, status, &kind, 1));
  OB_TRY(agree_on_options(optimizer, comm, status, tensors, ntensors));
  return ob_agree(comm, status, recipe->terms, recipe->term_count);
}

static onebit_status_t choose_place(onebit_optimizer_t optimizer) {
  optimizer->place = &ob_optimizer_place_host;
  if (optimizer->options.device == ONEBIT_DEVICE_HOST)
    return ONEBIT_OK;
#ifdef ONEBIT_HAVE_CUDA
  optimizer->place = &ob_optimizer_place_cuda;
  optimizer->deferred = ob_executor_for(optimizer->comm, ONEBIT_DEVICE_CUDA)->deferred;
  return ONEBIT_OK;
#else
  return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                  "device is ONEBIT_DEVICE_CUDA: this library was built without CUDA");
#endif
}

/* Checks and allocates what this rank can alone. */
static onebit_status_t prepare(onebit_optimizer_t optimizer, const struct ob_recipe *recipe,
                               const onebit_tensor_t *tensors, size_t ntensors,
                               struct ob_plan_shape *shape, size_t **counts) {
  size_t ranks = (size_t)optimizer->comm->size;
  OB_TRY(recipe->status);
  OB_TRY(resolve(&recipe->common, &optimizer->options));
  OB_TRY(resolve_plan(&optimizer->options, shape));
  OB_TRY(choose_place(optimizer));
  OB_TRY(check_tensors(optimizer, tensors, ntensors));
  OB_TRY(ob_freeze_create(optimizer));
  OB_TRY(ob_units_group(optimizer, tensors, ntensors));
  optimizer->deferred &= optimizer->unit_count > 0; /* else no device counts steps */
  optimizer->loss_scale = ob_given_or(optimizer->options.initial_loss_scale, 1);
  *counts = ob_allocate(ntensors > 2 * ranks ? ntensors : 2 * ranks, sizeof **counts);
  if (!*counts)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for an optimizer of %zu tensors", ntensors);
  return ONEBIT_OK;
}

static onebit_optimizer_t begin(onebit_comm_t comm, const struct ob_recipe *recipe) {
  onebit_optimizer_t optimizer = ob_allocate(1, sizeof *optimizer);
  if (!optimizer) {
    ob_release(recipe->own);
    return NULL;
  }
  optimizer->comm = comm;
  optimizer->method = recipe->method;
  optimizer->moments = recipe->moments;
  optimizer->own = recipe->own;
  optimizer->own_bytes = sizeof *optimizer;
  return optimizer;
}

onebit_status_t ob_optimizer_create(onebit_comm_t comm, const struct ob_recipe *recipe,
                                    const onebit_tensor_t *tensors, size_t ntensors,
                                    onebit_optimizer_t *result) {
  if (result)
    *result = NULL;
  if (!comm) {
    ob_release(recipe->own);
    return ob_error(ONEBIT_ERROR_ARGUMENT, "comm is NULL");
  }
  struct ob_plan_shape shape;
  size_t *counts = NULL;
  onebit_status_t status;
  onebit_optimizer_t optimizer = begin(comm, recipe);
  if (!result)
    status = ob_error(ONEBIT_ERROR_ARGUMENT, "optimizer is NULL");
  else if (!optimizer)
    status = ob_error(ONEBIT_ERROR_MEMORY, "no memory for an optimizer");
  else
    status = prepare(optimizer, recipe, tensors, ntensors, &shape, &counts);
  status = agree(optimizer, comm, recipe, status, tensors, ntensors);
  if (status == ONEBIT_OK)
    status = ob_units_create(optimizer, tensors, &shape, counts);
  if (status == ONEBIT_OK)
    status = ob_weigh_create(optimizer);
  if (status == ONEBIT_OK && recipe->method->create)
    status = recipe->method->create(optimizer);
  ob_release(counts);
  if (status != ONEBIT_OK) {
    onebit_optimizer_destroy(optimizer);
    return status;
  }
  *result = optimizer;
  return ONEBIT_OK;
}

void onebit_optimizer_destroy(onebit_optimizer_t optimizer) {
  if (!optimizer)
    return;
  ob_optimizer_abandon(optimizer);
  ob_units_destroy(optimizer);
  ob_weigh_destroy(optimizer);
  if (optimizer->method->destroy)
    optimizer->method->destroy(optimizer);
  ob_release(optimizer->own);
  ob_release(optimizer->norms);
  ob_release(optimizer);
}

onebit_status_t onebit_optimizer_set_gradient(onebit_optimizer_t optimizer, size_t tensor,
                                              const void *gradient) {
  if (!optimizer)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "optimizer is NULL");
  if (optimizer->step.open)
    return ob_error(ONEBIT_ERROR_BUSY, "a step is open: onebit_optimizer_step ends it");
  if (tensor >= optimizer->tensor_count)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "tensor is %zu, and there are %zu", tensor,
                    optimizer->tensor_count);
  if (gradient)
    OB_TRY(check_array(optimizer->place, "gradient", tensor, gradient,
                       optimizer->options.gradient_dtype));
  OB_TRY(ob_optimizer_catch_up(optimizer));
  return ob_units_set_gradient(optimizer, tensor, gradient);
}
