/* Creates and destroys an outer step. */
#include "onebit/outer.h"

#include <stdint.h>
#include <stdio.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/memory.h"
#include "collectives/communicator.h"
#include "optimizers/outer/sites.h"

/* --- Creation ----------------------------------------------------------------------------------*/

static onebit_status_t outer_check_finite(const struct ob_outer_tensor *tensor, size_t t,
                                          onebit_dtype_t dtype) {
  for (size_t i = 0; i < tensor->count; i++)
    if (!ob_is_finite(ob_load(tensor->parameter, i, dtype)))
      return ob_error(ONEBIT_ERROR_ARGUMENT, "tensors[%zu].parameter[%zu] is %g, not finite", t, i,
                      (double)ob_load(tensor->parameter, i, dtype));
  return ONEBIT_OK;
}

static onebit_status_t check_memory(const struct onebit_outer *outer, size_t t,
                                    const void *parameter) {
  char name[48];
  if (!outer->executor->check)
    return ONEBIT_OK;
  snprintf(name, sizeof name, "tensors[%zu].parameter", t);
  return outer->executor->check(outer, name, parameter);
}

static onebit_status_t outer_check_tensor(const struct onebit_outer *outer,
                                          const onebit_tensor_t *tensor, size_t t) {
  const onebit_dtype_t dtype = outer->options.parameter_dtype;
  const size_t before = outer->count;
  if (tensor->count > SIZE_MAX / 64 - before)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "tensors[%zu].count is %zu, which is too large to address", t, tensor->count);
  if (tensor->count && !tensor->parameter)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "tensors[%zu].parameter is NULL", t);
  if (tensor->count && (uintptr_t)tensor->parameter % ob_dtype_size(dtype))
    return ob_error(ONEBIT_ERROR_ARGUMENT, "tensors[%zu].parameter is %p, not aligned to %zu bytes",
                    t, tensor->parameter, ob_dtype_size(dtype));
  return tensor->count ? check_memory(outer, t, tensor->parameter) : ONEBIT_OK;
}

static onebit_status_t outer_choose_executor(struct onebit_outer *outer) {
  const onebit_device_t device = outer->options.device;
  outer->executor = device == ONEBIT_DEVICE_HOST ? &ob_outer_executor_host : NULL;
#ifdef ONEBIT_HAVE_CUDA
  if (device == ONEBIT_DEVICE_CUDA)
    outer->executor = &ob_outer_executor_cuda;
#endif
  if (!outer->executor)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "device is ONEBIT_DEVICE_CUDA, but this library was built without CUDA");
  return ONEBIT_OK;
}

static onebit_status_t keep_tensors(struct onebit_outer *outer, const onebit_tensor_t *tensors,
                                    size_t ntensors) {
  if (ntensors && !tensors)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "tensors is NULL");
  outer->tensors = ob_outer_allocate(outer, ntensors, sizeof *outer->tensors);
  if (!outer->tensors)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for an outer step of %zu tensors",
                    ntensors);
  for (size_t t = 0; t < ntensors; t++) {
    OB_TRY(outer_check_tensor(outer, &tensors[t], t));
    const size_t count = tensors[t].count;
    outer->tensors[t] = (struct ob_outer_tensor){
        .parameter = count ? tensors[t].parameter : NULL,
        .count = count,
        .first = outer->count,
        .uncompressed = (tensors[t].uncompressed && tensors[t].uncompressed != ONEBIT_TABLE) ||
                        count < outer->options.dense_below};
    outer->count += count;
  }
  outer->tensor_count = ntensors;
  return ONEBIT_OK;
}

/* Reads the first consensus from the parameters, on the host, and computes its checksums, which
 * ranks compare. */
static onebit_status_t read_parameters(struct onebit_outer *outer) {
  for (size_t t = 0; t < outer->tensor_count; t++)
    OB_TRY(outer_check_finite(&outer->tensors[t], t, outer->options.parameter_dtype));
  for (size_t f = 0; f < outer->options.fragments; f++) {
    struct ob_fragment *fragment = &outer->fragments[f];
    ob_fragment_read(fragment);
    fragment->checksum = ob_fragment_checksum(fragment);
  }
  return ONEBIT_OK;
}

/* Prepares this rank's outer step. Local. */
static onebit_status_t outer_prepare(struct onebit_outer *outer, const onebit_tensor_t *tensors,
                                     size_t ntensors, const onebit_outer_options_t *options,
                                     const onebit_sites_options_t *sites) {
  struct ob_plan_shape shape;
  OB_TRY(ob_outer_resolve(options, &outer->options));
  outer->groups = outer->options.fragments;
  if (outer->sites)
    OB_TRY(ob_sites_resolve(outer, sites));
  OB_TRY(ob_outer_shape(outer, outer->options.bits == ONEBIT_OUTER_DENSE, &shape));
  OB_TRY(ob_codec_choose(&outer->codec));
  OB_TRY(outer_choose_executor(outer));
  OB_TRY(keep_tensors(outer, tensors, ntensors));
  OB_TRY(ob_fragments_create(outer));
  if (outer->executor->create)
    OB_TRY(outer->executor->create(outer));
  OB_TRY(ob_outer_to_host(outer));
  const onebit_status_t status = read_parameters(outer), sent = ob_outer_from_host(outer, true);
  return status == ONEBIT_OK ? sent : status;
}

static uint64_t outer_hash_parameters(const struct onebit_outer *outer, onebit_status_t status) {
  uint64_t hash = OB_HASH_START;
  for (size_t f = 0; status == ONEBIT_OK && f < outer->options.fragments; f++)
    hash = ob_hash(hash, &outer->fragments[f].checksum, sizeof(uint32_t));
  return hash;
}

static uint64_t outer_hash_tensors(const struct onebit_outer *outer, onebit_status_t status) {
  uint64_t hash = OB_HASH_START;
  for (size_t t = 0; status == ONEBIT_OK && t < outer->tensor_count; t++) {
    const uint64_t row[] = {outer->tensors[t].count, outer->tensors[t].uncompressed};
    hash = ob_hash(hash, row, sizeof row);
  }
  return hash;
}

/* Checks that all ranks have the same options and tensors. `comm` has all ranks or, with `sites`,
 * the ranks of one site; `between` is then NULL except on rank 0 of the site. */
static onebit_status_t outer_agree(onebit_comm_t comm, struct onebit_outer *outer, bool sites,
                                   onebit_comm_t between, bool parameters, onebit_status_t status) {
  static const struct onebit_outer none;
  const struct onebit_outer *of = status == ONEBIT_OK ? outer : &none;
  onebit_outer_options_t options = of->options;
  struct ob_term terms[OB_OUTER_OPTIONS + 2] = {
      {"the kind of object (an outer step)", ob_hash(OB_HASH_START, "outer", 5)},
      {"the list of tensors (shown as a hash)", outer_hash_tensors(of, status)},
  };
  size_t count = OB_OUTER_OPTIONS - 1;
  options.fragments = of->groups;
  if (options.weighted)
    options.local_steps = options.delay = 0; /* ranks may differ */
  ob_options_list_terms(ob_outer_options, count, &options, terms + 2);
  count += 2;
  if (parameters)
    terms[count++] = (struct ob_term){"the parameters of all tensors (shown as a hash)",
                                      outer_hash_parameters(of, status)};
  if (sites)
    return ob_sites_agree(comm, between, status, terms, count);
  return ob_agree(comm, status, terms, count);
}

onebit_status_t ob_outer_agree(struct onebit_outer *outer, onebit_comm_t comm,
                               onebit_status_t status) {
  if (outer->sites)
    return outer_agree(outer->comm, outer, true, comm, false, status);
  return outer_agree(comm, outer, false, NULL, false, status);
}

/* Allocates weights, unless the outer step is moved and has them already. */
static onebit_status_t allocate_weights(struct ob_fragment *fragment) {
  for (int k = 0; k < 2; k++) {
    float **weight = &fragment->weights_there[k];
    if (!*weight)
      *weight = fragment->outer->executor->memory->allocate(1, sizeof **weight);
    if (!*weight)
      return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for an outer step");
  }
  return ONEBIT_OK;
}

static onebit_status_t create_weight_plan(struct ob_fragment *fragment) {
  struct onebit_outer *outer = fragment->outer;
  return ob_plan_create_numbers(outer->comm, allocate_weights(fragment), ONEBIT_ALLREDUCE,
                                outer->options.device, 1, &outer->refused, &fragment->weigh);
}

onebit_status_t ob_outer_build(struct onebit_outer *outer) {
  if (outer->sites)
    return ob_sites_build(outer);
  for (size_t f = 0; f < outer->options.fragments; f++) {
    OB_TRY(outer->exchange->create(&outer->fragments[f]));
    if (outer->options.weighted)
      OB_TRY(create_weight_plan(&outer->fragments[f]));
  }
  return ONEBIT_OK;
}

/* Returns NULL when out of memory. */
static struct onebit_outer *outer_create(onebit_comm_t comm) {
  struct onebit_outer *outer = ob_handle_create(OB_HANDLE_OUTER, sizeof *outer);
  if (!outer) {
    ob_error(ONEBIT_ERROR_MEMORY, "out of memory for an outer step");
    return NULL;
  }
  outer->comm = ob_comm_add_user(comm);
  outer->exchange = &ob_outer_plans;
  outer->own_bytes = sizeof *outer;
  return outer;
}

/* Creates an outer step. With `sites` it exchanges drifts between sites, and `comm` is this rank's
 * site. */
static onebit_status_t outer_make(onebit_comm_t comm, bool sites, onebit_comm_t between,
                                  const onebit_tensor_t *tensors, size_t ntensors,
                                  const onebit_outer_options_t *options,
                                  const onebit_sites_options_t *sites_options,
                                  onebit_outer_t *result) {
  if (result)
    *result = NULL;
  OB_TRY(ob_handle_check(comm, OB_HANDLE_COMM, sites ? "site" : "comm"));
  if (between)
    OB_TRY(ob_handle_check(between, OB_HANDLE_COMM, "between"));
  struct onebit_outer *outer = outer_create(comm);
  onebit_status_t status = outer ? ONEBIT_OK : ONEBIT_ERROR_MEMORY;
  if (sites)
    status = ob_sites_find(outer, comm, between, status);
  if (status == ONEBIT_OK)
    status = result ? outer_prepare(outer, tensors, ntensors, options, sites_options)
                    : ob_error(ONEBIT_ERROR_ARGUMENT, "outer is NULL");
  status = outer_agree(comm, outer, sites, between, true, status);
  if (status == ONEBIT_OK && outer->options.bits == ONEBIT_OUTER_SPARSE)
    outer->exchange = &ob_outer_sparse;
  if (status == ONEBIT_OK)
    status = ob_outer_build(outer);
  if (status == ONEBIT_OK)
    *result = outer;
  else
    onebit_outer_destroy(outer);
  return status;
}

onebit_status_t onebit_outer_create(onebit_comm_t comm, const onebit_tensor_t *tensors,
                                    size_t ntensors, const onebit_outer_options_t *options,
                                    onebit_outer_t *result) {
  OB_CALL_SCOPE;
  return outer_make(comm, false, NULL, tensors, ntensors, options, NULL, result);
}

onebit_status_t onebit_outer_create_sites(onebit_comm_t site, onebit_comm_t between,
                                          const onebit_tensor_t *tensors, size_t ntensors,
                                          const onebit_outer_options_t *options,
                                          const onebit_sites_options_t *sites,
                                          onebit_outer_t *result) {
  OB_CALL_SCOPE;
  return outer_make(site, true, between, tensors, ntensors, options, sites, result);
}

/* --- Destruction -------------------------------------------------------------------------------*/

void onebit_outer_destroy(onebit_outer_t outer) {
  OB_CALL_SCOPE;
  if (!outer || ob_handle_check(outer, OB_HANDLE_OUTER, "outer") != ONEBIT_OK)
    return;
  ob_handle_retire(outer);
  for (size_t f = 0; outer->fragments && f < outer->options.fragments; f++) {
    ob_fragment_wait(&outer->fragments[f]);
    if (outer->fragments[f].state)
      outer->exchange->destroy(&outer->fragments[f]);
    onebit_plan_destroy(outer->fragments[f].weigh);
  }
  ob_sites_destroy(outer);
  ob_fragments_destroy(outer);
  if (outer->device)
    outer->executor->destroy(outer);
  ob_release(outer->tensors);
  if (outer->latest)
    ob_comm_remove_user(outer->latest);
  ob_comm_remove_user(outer->comm);
  ob_handle_release(outer);
}
