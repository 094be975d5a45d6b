/* Creates optimizers from their options, and destroys them. */
#include "optimizers/optimizer.h"

#include <stdatomic.h>
#include <string.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/memory.h"
#include "optimizers/state.h"

/* --- Options -----------------------------------------------------------------------------------*/

/* Reads the options, and sets the values that follow from them. */
static onebit_status_t read_options(struct ob_recipe *recipe, const void *options,
                                    size_t ntensors) {
  const struct ob_method *method = recipe->asked;
  size_t size = method->options_size;
  if (options)
    memcpy(&size, options, sizeof size);
  if (size != method->options_size)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "options->size is %zu, not %zu: start from %s", size,
                    method->options_size, method->options_init);
  if (options)
    memcpy(&recipe->common, (const char *)options + method->common_at, sizeof recipe->common);
  OB_TRY(ob_options_read(ob_common_options, OB_COMMON_OPTIONS, &recipe->common, &recipe->common));
  bool deepspeed = recipe->common.profile == ONEBIT_PROFILE_DEEPSPEED;
  OB_TRY(ob_options_read(method->options, method->option_count, options, &recipe->moments));
  if (deepspeed && method->not_deepspeeds)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "profile is ONEBIT_PROFILE_DEEPSPEED, but DeepSpeed has no %s",
                    method->not_deepspeeds);
  recipe->moments.no_bias_correction |= deepspeed;
  return method->resolve ? method->resolve(recipe, ntensors) : ONEBIT_OK;
}

/* Sets the plan options of a bucket, and checks them as plans do. */
static onebit_status_t resolve_plan_options(const onebit_optimizer_options_t *options,
                                            struct ob_plan_shape *shape) {
  onebit_plan_options_t plan = ONEBIT_PLAN_OPTIONS_INIT;
  plan.dtype = options->gradient_dtype;
  plan.profile = options->profile;
  plan.scale = options->scale;
  plan.block_size = options->block_size;
  plan.chunk_size = options->chunk_size;
  plan.schedule = options->schedule;
  plan.no_error_feedback = options->no_error_feedback;
  plan.bits = options->bits;
  plan.max_bits = options->max_bits;
  plan.residual_copies = options->residual_copies;
  plan.threads = options->threads;
  plan.device = options->device;
  return ob_plan_resolve(&plan, shape);
}

/* Hashes the tensors' properties that must be the same on all ranks. */
static void hash_tensors(const onebit_tensor_t *tensors, size_t ntensors, uint64_t *counts,
                         uint64_t *constants) {
  for (size_t k = 0; k < ntensors; k++) {
    uint64_t count = tensors[k].count;
    bool table = tensors[k].uncompressed == ONEBIT_TABLE;
    unsigned char uncompressed = table ? 2 : tensors[k].uncompressed != 0;
    *counts = ob_hash(*counts, &count, sizeof count);
    *constants = ob_hash(*constants, &tensors[k].weight_decay, sizeof(float));
    *constants = ob_hash(*constants, &tensors[k].learning_rate_factor, sizeof(float));
    *constants = ob_hash(*constants, &uncompressed, sizeof uncompressed);
  }
}

static onebit_status_t agree_on_options(const struct onebit_optimizer *optimizer,
                                        onebit_comm_t comm, onebit_status_t status,
                                        const onebit_tensor_t *tensors, size_t ntensors) {
  static const onebit_optimizer_options_t none;
  uint64_t counts = OB_HASH_START, constants = counts;
  if (status == ONEBIT_OK)
    hash_tensors(tensors, ntensors, &counts, &constants);
  struct ob_term terms[3 + OB_COMMON_OPTIONS] = {
      {"ntensors", ntensors},
      {"the list of tensor counts (shown as a hash)", counts},
      {"weight_decay, learning_rate_factor or uncompressed of tensors (shown as a hash)",
       constants},
  };
  ob_options_list_terms(ob_common_options, OB_COMMON_OPTIONS,
                        optimizer ? &optimizer->options : &none, terms + 3);
  return ob_agree(comm, status, terms, 3 + OB_COMMON_OPTIONS);
}

static uint64_t hash_name(const char *name) { return ob_hash(OB_HASH_START, name, strlen(name)); }

/* Ranks first agree on the kind of optimizer and the profile, then on its options, which depend on
 * kind and profile. */
static onebit_status_t agree_on_terms(const struct onebit_optimizer *optimizer, onebit_comm_t comm,
                                      const struct ob_recipe *recipe, onebit_status_t status,
                                      const onebit_tensor_t *tensors, size_t ntensors) {
  const struct ob_term kind[] = {
      {"the kind of optimizer (shown as a hash)", hash_name(recipe->method->name)},
      {"profile", (uint64_t)recipe->common.profile}};
  OB_TRY(ob_agree(comm, status, kind, 2));
  struct ob_term terms[OB_TERMS];
  size_t count = recipe->asked->option_count;
  ob_options_list_terms(recipe->asked->options, count, &recipe->moments, terms);
  OB_TRY(ob_agree(comm, status, terms, count));
  return agree_on_options(optimizer, comm, status, tensors, ntensors);
}

onebit_status_t ob_optimizer_agree(onebit_optimizer_t optimizer, onebit_comm_t comm,
                                   onebit_status_t status) {
  struct ob_recipe recipe = {
      .asked = optimizer->asked, .method = optimizer->method, .moments = optimizer->moments};
  recipe.moments.beta1 = optimizer->beta1;
  return agree_on_terms(optimizer, comm, &recipe, status, optimizer->list, optimizer->list_count);
}

static onebit_status_t choose_executor(onebit_optimizer_t optimizer) {
  optimizer->executor = &ob_optimizer_executor_host;
  if (optimizer->options.device == ONEBIT_DEVICE_HOST)
    return ONEBIT_OK;
#ifdef ONEBIT_HAVE_CUDA
  optimizer->executor = &ob_optimizer_executor_cuda;
  optimizer->deferred = ob_executor_for(optimizer->comm, ONEBIT_DEVICE_CUDA)->deferred;
  return ONEBIT_OK;
#else
  return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                  "device is ONEBIT_DEVICE_CUDA, but this library was built without CUDA");
#endif
}

static onebit_status_t copy_tensors(onebit_optimizer_t optimizer, const onebit_tensor_t *tensors,
                                    size_t count) {
  optimizer->list = ob_optimizer_allocate(optimizer, count, sizeof *optimizer->list);
  optimizer->hashes = ob_optimizer_allocate(optimizer, count, sizeof *optimizer->hashes);
  if (optimizer->options.max_bits > optimizer->options.bits)
    optimizer->ladders = ob_optimizer_allocate(optimizer, count, sizeof *optimizer->ladders);
  if (!optimizer->list || !optimizer->hashes ||
      (!optimizer->ladders && optimizer->options.max_bits > optimizer->options.bits))
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for an optimizer of %zu tensors", count);
  if (count)
    memcpy(optimizer->list, tensors, count * sizeof *tensors);
  for (size_t k = 0; k < count; k++)
    if (optimizer->list[k].learning_rate_factor == 0)
      optimizer->list[k].learning_rate_factor = 1;
  optimizer->list_count = count;
  return ONEBIT_OK;
}

/* Makes the checks and allocations that need no other rank. */
static onebit_status_t check_and_allocate(onebit_optimizer_t optimizer,
                                          const struct ob_recipe *recipe,
                                          const onebit_tensor_t *tensors, size_t ntensors) {
  struct ob_plan_shape shape;
  OB_TRY(recipe->status);
  optimizer->options = recipe->common;
  OB_TRY(ob_check_common(&optimizer->options));
  OB_TRY(resolve_plan_options(&optimizer->options, &shape));
  optimizer->options.bits = shape.options.bits;
  optimizer->options.max_bits = shape.options.max_bits;
  optimizer->options.residual_copies = shape.options.residual_copies;
  OB_TRY(ob_check_recipe(recipe, shape.options.bits, shape.options.max_bits));
  OB_TRY(choose_executor(optimizer));
  OB_TRY(ob_check_tensors(optimizer, tensors, ntensors));
  OB_TRY(copy_tensors(optimizer, tensors, ntensors));
  OB_TRY(ob_freeze_create(optimizer));
  optimizer->loss_scale = ob_value_or_default(optimizer->options.initial_loss_scale, 1);
  return ob_metrics_open(optimizer);
}

/* --- Settings that depend on the communicator */

/* Returns the schedule. After a move, hosts may have different numbers of ranks, and then no
 * hierarchical schedule is possible. */
static onebit_schedule_t choose_schedule(const struct onebit_optimizer *optimizer) {
  const struct ob_hosts *hosts = &optimizer->comm->hosts;
  bool possible = hosts->count > 1 && hosts->each > 1;
  if (optimizer->held && optimizer->options.schedule == ONEBIT_SCHEDULE_HIERARCHICAL && !possible)
    return ONEBIT_SCHEDULE_AUTOMATIC;
  return optimizer->options.schedule;
}

/* Groups the tensors into buckets, and allocates *counts, which is scratch for creating them. */
static onebit_status_t group_tensors(onebit_optimizer_t optimizer, struct ob_plan_shape *shape,
                                     size_t **counts) {
  size_t count = optimizer->list_count, ranks = (size_t)optimizer->comm->size;
  onebit_optimizer_options_t options = optimizer->options;
  options.schedule = choose_schedule(optimizer);
  OB_TRY(resolve_plan_options(&options, shape));
  OB_TRY(choose_executor(optimizer));
  OB_TRY(ob_buckets_group(optimizer, optimizer->list, count));
  optimizer->deferred &= optimizer->bucket_count > 0; /* without buckets no device counts steps */
  *counts = ob_allocate(count > 2 * ranks ? count : 2 * ranks, sizeof **counts);
  if (!*counts)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for an optimizer of %zu tensors", count);
  return ONEBIT_OK;
}

onebit_status_t ob_optimizer_build(onebit_optimizer_t optimizer, onebit_status_t status) {
  struct ob_plan_shape shape;
  size_t *counts = NULL;
  optimizer->constant_bytes = optimizer->own_bytes;
  if (status == ONEBIT_OK)
    status = group_tensors(optimizer, &shape, &counts);
  status = ob_agree(optimizer->comm, status, NULL, 0);
  if (status == ONEBIT_OK)
    status = ob_buckets_create(optimizer, optimizer->list, &shape, counts);
  if (status == ONEBIT_OK)
    status = ob_clipping_create(optimizer);
  if (status == ONEBIT_OK && optimizer->method->create)
    status = optimizer->method->create(optimizer);
  ob_release(counts);
  return status;
}

/* Ends a call in flight without waiting for messages. It waits for the call's work on a stream, and
 * ignores the call's outcome. */
static void abandon_plan(const struct onebit_optimizer *optimizer, onebit_plan_t plan) {
  if (!plan)
    return;
  ob_plan_abandon(plan);
  if (!optimizer->deferred)
    (void)ob_plan_settle(plan);
}

void ob_optimizer_abandon_plans(onebit_optimizer_t optimizer) {
  const struct ob_method *method = optimizer->method;
  abandon_plan(optimizer, optimizer->squares);
  abandon_plan(optimizer, method->sums && optimizer->own ? method->sums(optimizer) : NULL);
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    abandon_plan(optimizer, optimizer->buckets[u].bits);
    abandon_plan(optimizer, optimizer->buckets[u].dense);
    abandon_plan(optimizer, optimizer->buckets[u].steps_back);
    abandon_plan(optimizer, optimizer->buckets[u].parameters_back);
  }
  optimizer->step.open = false;
}

void ob_optimizer_strip(onebit_optimizer_t optimizer) {
  ob_optimizer_abandon_plans(optimizer);
  ob_buckets_destroy(optimizer);
  ob_clipping_destroy(optimizer);
  if (optimizer->method->destroy) {
    optimizer->method->destroy(optimizer);
    ob_release(optimizer->own);
    optimizer->own = NULL;
  }
  optimizer->own_bytes = optimizer->constant_bytes;
}

static onebit_optimizer_t allocate_optimizer(onebit_comm_t comm, const struct ob_recipe *recipe) {
  onebit_optimizer_t optimizer = ob_handle_create(OB_HANDLE_OPTIMIZER, sizeof *optimizer);
  if (!optimizer) {
    ob_release(recipe->own);
    return NULL;
  }
  optimizer->comm = ob_comm_add_user(comm);
  optimizer->method = recipe->method;
  optimizer->asked = recipe->asked;
  optimizer->moments = recipe->moments;
  optimizer->beta1 = recipe->moments.beta1;
  optimizer->own = recipe->own;
  optimizer->own_bytes = sizeof *optimizer;
  return optimizer;
}

/* Returns true for the dense form of an optimizer: its warm-up has no end, or all tensors are
 * uncompressed. */
static bool optimizer_is_dense_form(const struct onebit_optimizer *optimizer) {
  const struct ob_moments *moments = &optimizer->moments;
  return (moments->freeze_step == ONEBIT_FREEZE_NEVER && !moments->no_warmup) ||
         optimizer->options.dense_below == SIZE_MAX;
}

/* Warns once for each kind of optimizer in a process. */
static void warn_not_recommended(const struct onebit_optimizer *optimizer) {
  static atomic_uint told;
  const struct ob_method *method = optimizer->method;
  const unsigned kind = 1u << ob_method_index(optimizer->asked->name);
  if (!method->recommended || optimizer->options.profile != ONEBIT_PROFILE_DEFAULT ||
      optimizer_is_dense_form(optimizer) || optimizer->comm->rank != 0 ||
      atomic_fetch_or(&told, kind) & kind)
    return;
  ob_log(OB_LOG_WARN, 0,
         "%s is not recommended%s: with default options its final loss is more than 1 %% above "
         "that of its dense form. Use %s",
         method->name, method->not_where ? method->not_where : "", method->recommended);
}

onebit_status_t ob_optimizer_create(onebit_comm_t comm, const struct ob_method *method,
                                    const void *options, const onebit_tensor_t *tensors,
                                    size_t ntensors, onebit_optimizer_t *result) {
  struct ob_recipe from = {.asked = method, .method = method, .moments = method->initial},
                   *recipe = &from;
  from.status = read_options(recipe, options, ntensors);
  if (result)
    *result = NULL;
  onebit_status_t status = ob_handle_check(comm, OB_HANDLE_COMM, "comm");
  if (status != ONEBIT_OK) {
    ob_release(recipe->own);
    return status;
  }
  onebit_optimizer_t optimizer = allocate_optimizer(comm, recipe);
  if (!result)
    status = ob_error(ONEBIT_ERROR_ARGUMENT, "optimizer is NULL");
  else if (!optimizer)
    status = ob_error(ONEBIT_ERROR_MEMORY, "out of memory for an optimizer");
  else
    status = check_and_allocate(optimizer, recipe, tensors, ntensors);
  status = agree_on_terms(optimizer, comm, recipe, status, tensors, ntensors);
  if (status == ONEBIT_OK)
    status = ob_optimizer_build(optimizer, status);
  if (status != ONEBIT_OK) {
    onebit_optimizer_destroy(optimizer);
    return status;
  }
  warn_not_recommended(optimizer);
  *result = optimizer;
  return ONEBIT_OK;
}

void onebit_optimizer_destroy(onebit_optimizer_t optimizer) {
  OB_CALL_SCOPE;
  if (!optimizer || ob_handle_check(optimizer, OB_HANDLE_OPTIMIZER, "optimizer") != ONEBIT_OK)
    return;
  ob_handle_retire(optimizer);
  ob_optimizer_abandon(optimizer);
  ob_optimizer_strip(optimizer);
  ob_metrics_close(optimizer);
  ob_part_release(optimizer->held);
  ob_release(optimizer->own);
  ob_release(optimizer->list);
  ob_release(optimizer->norms);
  ob_release(optimizer->chunks);
  ob_release(optimizer->hashes);
  ob_release(optimizer->ladders);
  if (optimizer->latest)
    ob_comm_remove_user(optimizer->latest);
  ob_comm_remove_user(optimizer->comm);
  ob_handle_release(optimizer);
}

onebit_status_t onebit_optimizer_set_gradient(onebit_optimizer_t optimizer, size_t tensor,
                                              const void *gradient) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  OB_TRY(ob_optimizer_check_idle(optimizer));
  OB_TRY(ob_check_tensor(tensor, optimizer->tensor_count));
  if (gradient)
    OB_TRY(ob_check_array(optimizer->executor, "gradient", tensor, gradient,
                          optimizer->options.gradient_dtype));
  OB_TRY(ob_optimizer_check_held(optimizer));
  optimizer->list[tensor].gradient = gradient;
  return ob_buckets_set_gradient(optimizer, tensor, gradient);
}
