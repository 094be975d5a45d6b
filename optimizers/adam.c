/* 1-bit Adam: made from its options, and given back. */
#include "optimizers/adam.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "collectives/agree.h"

static onebit_status_t check_fraction(const char *name, double value) {
  if (!(value > 0 && value < 1))
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is %g, not between 0 and 1", name, value);
  return ONEBIT_OK;
}

static double given_or(double value, double fallback) { return value == 0 ? fallback : value; }

static onebit_status_t resolve(const onebit_adam_options_t *given, onebit_adam_options_t *options) {
  static const onebit_adam_options_t defaults = ONEBIT_ADAM_OPTIONS_INIT;
  *options = defaults;
  if (given && given->size != sizeof *given)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "options->size is %zu, not %zu: start from ONEBIT_ADAM_OPTIONS_INIT",
                    given->size, sizeof *given);
  if (given)
    *options = *given;
  options->beta1 = given_or(options->beta1, 0.9);
  options->beta2 = given_or(options->beta2, 0.999);
  options->epsilon = given_or(options->epsilon, 1e-8);
  options->freeze_threshold = given_or(options->freeze_threshold, 0.96);
  OB_TRY(check_fraction("beta1", options->beta1));
  OB_TRY(check_fraction("beta2", options->beta2));
  OB_TRY(check_fraction("freeze_threshold", options->freeze_threshold));
  if (!(options->epsilon > 0) || isinf(options->epsilon) || (float)options->epsilon == 0)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "epsilon is %g, not a positive float", options->epsilon);
  if (options->bucket_size && options->profile == ONEBIT_PROFILE_DEEPSPEED)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "profile is ONEBIT_PROFILE_DEEPSPEED, bucket_size is %zu: a bucket is a tensor "
                    "there, leave it 0",
                    options->bucket_size);
  options->no_bias_correction =
      options->no_bias_correction || options->profile == ONEBIT_PROFILE_DEEPSPEED;
  return ONEBIT_OK;
}

/* The plan options of a unit, checked as plans check them. */
static onebit_status_t resolve_plan(const onebit_adam_options_t *options,
                                    struct ob_plan_shape *shape) {
  onebit_plan_options_t plan = ONEBIT_PLAN_OPTIONS_INIT;
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

static onebit_status_t check_array(const struct ob_adam_place *place, const char *name,
                                   size_t tensor, const void *array) {
  char full[64];
  if (!array)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "tensors[%zu].%s is NULL", tensor, name);
  if ((uintptr_t)array % sizeof(float))
    return ob_error(ONEBIT_ERROR_ARGUMENT, "tensors[%zu].%s is %p, not aligned to float", tensor,
                    name, array);
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

static struct extent extent_of(const void *array, size_t count, size_t tensor) {
  uintptr_t first = (uintptr_t)array;
  return (struct extent){first, first + count * sizeof(float), tensor};
}

static onebit_status_t check_apart(const onebit_tensor_t *tensors, size_t count) {
  struct extent *extents = ob_allocate(2 * count, sizeof *extents);
  if (!extents)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory to look at %zu tensors", count);
  for (size_t k = 0; k < count; k++) {
    extents[2 * k] = extent_of(tensors[k].parameter, tensors[k].count, k);
    extents[2 * k + 1] = extent_of(tensors[k].gradient, tensors[k].count, k);
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

static onebit_status_t check_tensors(const struct ob_adam_place *place,
                                     const onebit_tensor_t *tensors, size_t count) {
  if (count && !tensors)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "tensors is NULL");
  size_t total = 0;
  for (size_t k = 0; k < count; k++) {
    if (tensors[k].count > SIZE_MAX / 64 - total)
      return ob_error(ONEBIT_ERROR_ARGUMENT, "tensors[%zu].count is %zu: too large to address", k,
                      tensors[k].count);
    total += tensors[k].count;
    if (tensors[k].count) {
      OB_TRY(check_array(place, "parameter", k, tensors[k].parameter));
      OB_TRY(check_array(place, "gradient", k, tensors[k].gradient));
    }
    OB_TRY(check_number("weight_decay", k, tensors[k].weight_decay));
    OB_TRY(check_number("learning_rate_factor", k, tensors[k].learning_rate_factor));
  }
  return check_apart(tensors, count);
}

bool ob_adam_compresses(const struct onebit_optimizer *optimizer) {
  return optimizer->options.profile != ONEBIT_PROFILE_DEEPSPEED || optimizer->comm->size > 1;
}

void *ob_adam_take(onebit_optimizer_t optimizer, size_t count, size_t size) {
  optimizer->own_bytes += count * size;
  return ob_allocate(count, size);
}

/* Steps that the variance is given to change in before it is called settled: 1 / (1 - beta2). The
 * small step back keeps a quotient that is whole but for rounding, such as 1 / (1 - 0.999), from
 * being rounded up to one more. */
static size_t freeze_window(double beta2) { return (size_t)ceil(1 / (1 - beta2) - 1e-6); }

static onebit_status_t allocate_norms(onebit_optimizer_t optimizer) {
  if (optimizer->options.freeze_step != ONEBIT_FREEZE_AUTOMATIC)
    return ONEBIT_OK;
  optimizer->window = freeze_window(optimizer->options.beta2);
  optimizer->norms = ob_adam_take(optimizer, optimizer->window, sizeof(double));
  if (!optimizer->norms)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for %zu norms", optimizer->window);
  return ONEBIT_OK;
}

/* A fingerprint of numbers that must be the same on all ranks (64-bit FNV-1a). */
static uint64_t fingerprint(uint64_t hash, const void *data, size_t bytes) {
  const unsigned char *byte = data;
  for (size_t i = 0; i < bytes; i++)
    hash = (hash ^ byte[i]) * 0x100000001b3u;
  return hash;
}

static uint64_t bits_of(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static onebit_status_t agree(onebit_optimizer_t optimizer, onebit_comm_t comm,
                             onebit_status_t status, const onebit_tensor_t *tensors,
                             size_t ntensors) {
  static const onebit_adam_options_t none;
  const onebit_adam_options_t *options = optimizer ? &optimizer->options : &none;
  uint64_t counts = 0xcbf29ce484222325u, constants = counts;
  for (size_t k = 0; status == ONEBIT_OK && k < ntensors; k++) {
    uint64_t count = tensors[k].count;
    counts = fingerprint(counts, &count, sizeof count);
    constants = fingerprint(constants, &tensors[k].weight_decay, sizeof(float));
    constants = fingerprint(constants, &tensors[k].learning_rate_factor, sizeof(float));
  }
  const struct ob_term terms[] = {
      {"ntensors", ntensors},
      {"the list of tensor counts (its fingerprint)", counts},
      {"a weight decay or learning rate factor (their fingerprint)", constants},
      {"beta1 (as bits)", bits_of(options->beta1)},
      {"beta2 (as bits)", bits_of(options->beta2)},
      {"epsilon (as bits)", bits_of(options->epsilon)},
      {"freeze_step", options->freeze_step},
      {"freeze_threshold (as bits)", bits_of(options->freeze_threshold)},
      {"no_bias_correction", (uint64_t)options->no_bias_correction},
      {"profile", (uint64_t)options->profile},
      {"scale", (uint64_t)options->scale},
      {"block_size", options->block_size},
      {"chunk_size", options->chunk_size},
      {"schedule", (uint64_t)options->schedule},
      {"no_error_feedback", (uint64_t) !!options->no_error_feedback},
      {"bucket_size", options->bucket_size},
  };
  return ob_agree(comm, status, terms, sizeof terms / sizeof terms[0]);
}

static onebit_status_t choose_place(onebit_optimizer_t optimizer) {
  optimizer->place = &ob_adam_place_host;
  if (optimizer->options.device == ONEBIT_DEVICE_HOST)
    return ONEBIT_OK;
#ifdef ONEBIT_HAVE_CUDA
  optimizer->place = &ob_adam_place_cuda;
  optimizer->deferred = ob_place_for(optimizer->comm, ONEBIT_DEVICE_CUDA)->deferred;
  return ONEBIT_OK;
#else
  return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                  "device is ONEBIT_DEVICE_CUDA: this library was built without CUDA");
#endif
}

/* Checks and allocates what this rank can alone. */
static onebit_status_t prepare(onebit_optimizer_t optimizer, const onebit_tensor_t *tensors,
                               size_t ntensors, const onebit_adam_options_t *options,
                               struct ob_plan_shape *shape, size_t **counts) {
  size_t ranks = (size_t)optimizer->comm->size;
  OB_TRY(resolve(options, &optimizer->options));
  OB_TRY(resolve_plan(&optimizer->options, shape));
  OB_TRY(choose_place(optimizer));
  OB_TRY(check_tensors(optimizer->place, tensors, ntensors));
  OB_TRY(allocate_norms(optimizer));
  OB_TRY(ob_adam_group(optimizer, tensors, ntensors));
  optimizer->deferred &= optimizer->unit_count > 0; /* else no device counts steps */
  *counts = ob_allocate(ntensors > 2 * ranks ? ntensors : 2 * ranks, sizeof **counts);
  if (!*counts)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for an optimizer of %zu tensors", ntensors);
  return ONEBIT_OK;
}

onebit_status_t onebit_adam_create(onebit_comm_t comm, const onebit_tensor_t *tensors,
                                   size_t ntensors, const onebit_adam_options_t *options,
                                   onebit_optimizer_t *result) {
  if (result)
    *result = NULL;
  if (!comm)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "comm is NULL");
  struct ob_plan_shape shape;
  size_t *counts = NULL;
  onebit_status_t status;
  onebit_optimizer_t optimizer = ob_allocate(1, sizeof *optimizer);
  if (!result) {
    status = ob_error(ONEBIT_ERROR_ARGUMENT, "optimizer is NULL");
  } else if (!optimizer) {
    status = ob_error(ONEBIT_ERROR_MEMORY, "no memory for an optimizer");
  } else {
    optimizer->comm = comm;
    optimizer->own_bytes = sizeof *optimizer;
    status = prepare(optimizer, tensors, ntensors, options, &shape, &counts);
  }
  status = agree(optimizer, comm, status, tensors, ntensors);
  if (status == ONEBIT_OK)
    status = ob_adam_create_units(optimizer, tensors, &shape, counts);
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
  ob_adam_abandon(optimizer);
  ob_adam_destroy_units(optimizer);
  ob_release(optimizer->norms);
  ob_release(optimizer);
}
