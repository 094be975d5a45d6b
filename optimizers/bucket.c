/* Allocates a bucket's arrays, and runs the passes over them of which the methods consist. */
#include <math.h>

#include "base/error.h"
#include "base/memory.h"
#include "optimizers/state.h"

/* --- Memory ------------------------------------------------------------------------------------*/

static void *bucket_allocate_from(onebit_optimizer_t optimizer, const struct ob_memory *memory,
                                  size_t count, size_t size) {
  optimizer->own_bytes += count * size;
  return memory->allocate(count, size);
}

static onebit_status_t bucket_memory_error(const struct ob_layout *layout) {
  return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for the state of %zu parameters",
                  layout->words * OB_LANES);
}

/* Returns true if the residual has no second copy, which otherwise holds the mean gradient of dense
 * steps. */
static bool lacks_scratch(const struct onebit_optimizer *optimizer,
                          const struct ob_bucket *bucket) {
  return optimizer->options.residual_copies == 1 && !bucket->uncompressed;
}

/* Returns the mask (OB_MASK) of the slots for which the bucket allocates arrays of its own. */
static unsigned own_array_slots(const struct onebit_optimizer *optimizer,
                                const struct ob_bucket *bucket) {
  return optimizer->method->arrays | (lacks_scratch(optimizer, bucket) ? OB_MASK(OB_SCRATCH) : 0);
}

static void point_to_means(const struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  float *const means = bucket->arrays[OB_SCRATCH];
  const struct ob_layout *layout = ob_plan_layout(bucket->bits);
  for (size_t k = 0; k < layout->pieces; k++)
    bucket->means[k] = means && !optimizer->method->sharded
                           ? means + layout->piece[k].first_word * OB_LANES
                           : NULL;
}

/* Returns true if the optimizer makes dense steps now, or may make them later. */
static bool has_dense_steps(const struct onebit_optimizer *optimizer) {
  return !ob_optimizer_is_frozen(optimizer) || !ob_optimizer_compresses(optimizer);
}

/* Returns true if only dense steps need the array. */
static bool is_only_for_dense_steps(const struct onebit_optimizer *optimizer,
                                    const struct ob_bucket *bucket, int slot) {
  if (slot == OB_SCRATCH)
    return lacks_scratch(optimizer, bucket) && !(optimizer->method->arrays & OB_MASK(slot));
  return slot == OB_VARIANCE && optimizer->method->divides && !bucket->uncompressed;
}

/* Allocates an array that only dense steps need if it is wanted, and else releases it. */
static onebit_status_t allocate_or_release_array(onebit_optimizer_t optimizer,
                                                 struct ob_bucket *bucket, int slot, bool wanted) {
  const struct ob_memory *memory = ob_plan_memory(bucket->bits);
  const size_t size = OB_LANES * sizeof(float);
  float **const array = &bucket->arrays[slot];
  if (!is_only_for_dense_steps(optimizer, bucket, slot) || wanted == !!*array)
    return ONEBIT_OK;
  if (wanted) {
    *array = bucket_allocate_from(optimizer, memory, bucket->words, size);
    if (!*array)
      return bucket_memory_error(ob_plan_layout(bucket->bits));
  } else {
    memory->release(*array);
    optimizer->own_bytes -= bucket->words * size;
    *array = NULL;
  }
  point_to_means(optimizer, bucket);
  return ONEBIT_OK;
}

onebit_status_t ob_buckets_fit_arrays(onebit_optimizer_t optimizer, bool warm) {
  const bool wanted = warm || has_dense_steps(optimizer);
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    OB_TRY(allocate_or_release_array(optimizer, &optimizer->buckets[u], OB_SCRATCH, wanted));
    OB_TRY(allocate_or_release_array(optimizer, &optimizer->buckets[u], OB_VARIANCE, wanted));
  }
  return ONEBIT_OK;
}

/* Allocates the arrays, with an element for each element of the layout, and the sums of passes. */
static onebit_status_t bucket_allocate_arrays(onebit_optimizer_t optimizer,
                                              struct ob_bucket *bucket) {
  const struct ob_layout *layout = ob_plan_layout(bucket->bits);
  const struct ob_memory *memory = ob_plan_memory(bucket->bits);
  const unsigned own = own_array_slots(optimizer, bucket);
  const size_t size = OB_LANES * sizeof(float);
  bool there = true;
  /* These pointers are set only here, and not where arrays are replaced, because a replacement
   * releases the memory of the slot. */
  bucket->arrays[OB_MOMENTUM] =
      own & OB_MASK(OB_MOMENTUM) ? NULL : ob_plan_residual(bucket->bits, false)->values[0];
  bucket->arrays[OB_SCRATCH] =
      own & OB_MASK(OB_SCRATCH) ? NULL : ob_plan_residual(bucket->bits, false)->values[1];
  for (int slot = 0; slot < OB_ARRAYS; slot++)
    if (own & OB_MASK(slot) &&
        (has_dense_steps(optimizer) || !is_only_for_dense_steps(optimizer, bucket, slot))) {
      bucket->arrays[slot] = bucket_allocate_from(optimizer, memory, bucket->words, size);
      there &= bucket->arrays[slot] != NULL;
    }
  if (optimizer->options.parameter_dtype != ONEBIT_FLOAT32) {
    bucket->masters = bucket_allocate_from(optimizer, memory, bucket->words, size);
    there &= bucket->masters != NULL;
  }
  for (int k = 0; k < OB_SUMS; k++) {
    bucket->sums[k] = bucket_allocate_from(optimizer, memory, layout->blocks, sizeof(double));
    there &= bucket->sums[k] != NULL;
  }
  return there ? ONEBIT_OK : bucket_memory_error(layout);
}

static void set_bucket_extent(const struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  const struct ob_layout *layout = ob_plan_layout(bucket->bits);
  size_t first = 0, end = layout->blocks;
  if (optimizer->method->sharded)
    ob_plan_segment(bucket->bits, &first, &end);
  bucket->first_block = first;
  bucket->blocks = end - first;
  bucket->first_word = ob_layout_word(layout, first);
  bucket->words = ob_layout_word(layout, end) - bucket->first_word;
}

/* The lists that have an entry for each piece. */
#define LISTS(row)                                                                                 \
  row(parameters) row(copies) row(gradients) row(means) row(factors) row(weight_decays)            \
      row(learning_rates) row(scalings) row(floors) row(tensor_of)

onebit_status_t ob_bucket_allocate(onebit_optimizer_t optimizer, struct ob_bucket *bucket) {
  const size_t pieces = ob_plan_layout(bucket->bits)->pieces;
  bool there = true;
  set_bucket_extent(optimizer, bucket);
#define ALLOCATE(name)                                                                             \
  bucket->name = ob_optimizer_allocate(optimizer, pieces, sizeof *bucket->name);                   \
  there &= bucket->name != NULL;
  LISTS(ALLOCATE)
  if (!there)
    return bucket_memory_error(ob_plan_layout(bucket->bits));
  OB_TRY(bucket_allocate_arrays(optimizer, bucket));
  point_to_means(optimizer, bucket);
  return ONEBIT_OK;
}

static void release_arrays(const struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  const struct ob_memory *memory = bucket->bits ? ob_plan_memory(bucket->bits) : NULL;
  for (int slot = 0; memory && slot < OB_ARRAYS; slot++)
    if (own_array_slots(optimizer, bucket) & OB_MASK(slot))
      memory->release(bucket->arrays[slot]);
  for (int k = 0; memory && k < OB_SUMS; k++)
    memory->release(bucket->sums[k]);
  if (memory)
    memory->release(bucket->masters);
}

void ob_bucket_release(const struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  release_arrays(optimizer, bucket);
#define RELEASE(name) ob_release((void *)bucket->name);
  LISTS(RELEASE)
}

/* --- Master values -----------------------------------------------------------------------------*/

/* Sets `count` master values from parameters, in memory of the bucket's arrays; a master value that
 * already rounds to its parameter stays. `buffer`, on the host, holds OB_CHUNK float32
 * values and as many of the parameters' type. */
static onebit_status_t convert_masters(const struct ob_memory *memory, onebit_dtype_t dtype,
                                       float *master, const uint16_t *parameter, size_t count,
                                       float *buffer) {
  uint16_t *given = (uint16_t *)(void *)(buffer + OB_CHUNK);
  OB_TRY(memory->copy(given, parameter, count * sizeof *given));
  OB_TRY(memory->copy(buffer, master, count * sizeof *buffer));
  for (size_t i = 0; i < count; i++) {
    const uint16_t before = given[i];
    ob_store(given, i, dtype, ob_bound(buffer[i], dtype));
    if (given[i] != before) {
      given[i] = before;
      buffer[i] = ob_load(given, i, dtype);
    }
  }
  return memory->copy(master, buffer, count * sizeof *buffer);
}

static onebit_status_t fill_masters(const struct onebit_optimizer *optimizer,
                                    struct ob_bucket *bucket, float *buffer) {
  const struct ob_layout *layout = ob_plan_layout(bucket->bits);
  const size_t first = bucket->first_block, end = first + bucket->blocks;
  for (struct ob_run run = {0}; ob_find_next_run(layout, first, end, &run);) {
    const struct ob_piece *piece = &layout->piece[run.piece];
    const uint16_t *parameters = bucket->copies[run.piece];
    const size_t left = run.offset < piece->valid ? piece->valid - run.offset : 0;
    const size_t word = piece->first_word - bucket->first_word;
    if (parameters)
      OB_TRY(convert_masters(ob_plan_memory(bucket->bits), optimizer->options.parameter_dtype,
                             bucket->masters + (word * OB_LANES + run.offset),
                             parameters + run.offset, left < run.count ? left : run.count, buffer));
  }
  return ONEBIT_OK;
}

/* Master values on a device are converted on the host, too, a part at a time, since this is
 * rare. */
onebit_status_t ob_bucket_make_masters(const struct onebit_optimizer *optimizer,
                                       struct ob_bucket *bucket) {
  float *buffer = ob_allocate(OB_CHUNK, sizeof(float) + sizeof(uint16_t));
  onebit_status_t status = buffer ? fill_masters(optimizer, bucket, buffer)
                                  : bucket_memory_error(ob_plan_layout(bucket->bits));
  ob_release(buffer);
  return status;
}

/* --- Passes ------------------------------------------------------------------------------------*/

struct ob_lion_factors ob_make_lion_factors(const struct onebit_optimizer *optimizer) {
  const struct ob_moments *moments = &optimizer->moments;
  return (struct ob_lion_factors){.beta1 = (float)moments->beta1,
                                  .one_minus_beta1 = (float)(1 - moments->beta1),
                                  .beta2 = (float)moments->server_beta,
                                  .one_minus_beta2 = (float)(1 - moments->server_beta)};
}

struct ob_pass_factors ob_make_factors(const struct onebit_optimizer *optimizer, uint64_t step) {
  const struct ob_moments *moments = &optimizer->moments;
  struct ob_pass_factors factors = {
      .adam = {.beta1 = (float)moments->beta1,
               .beta2 = (float)moments->beta2,
               .one_minus_beta1 = moments->no_dampening ? 1 : (float)(1 - moments->beta1),
               .one_minus_beta2 = (float)(1 - moments->beta2),
               .momentum_factor = 1,
               .variance_factor = 1,
               .epsilon = (float)moments->epsilon},
      .lion = ob_make_lion_factors(optimizer),
      .gradient_factor = optimizer->step.gradient_factor,
      .bound = INFINITY,
      .before = step > 1 ? (float)(1 / (1 - ob_power(moments->beta2, step - 1))) : 1,
      .keep_zero = optimizer->options.profile != ONEBIT_PROFILE_DEEPSPEED,
  };
  if (!moments->no_bias_correction) {
    factors.adam.momentum_factor = ob_adam_momentum_factor(moments->beta1, step);
    factors.adam.variance_factor = ob_adam_variance_factor(moments->beta2, step);
  }
  return factors;
}

float ob_step_bound(const struct onebit_optimizer *optimizer) {
  return optimizer->options.profile == ONEBIT_PROFILE_DEEPSPEED ? INFINITY : ONEBIT_STEP_BOUND;
}

struct ob_pass_sink ob_bucket_make_sink(const struct onebit_optimizer *optimizer,
                                        const struct ob_bucket *bucket, enum ob_pass_kind kind,
                                        uint64_t step) {
  const unsigned uses = ob_pass_reads(kind) | ob_pass_writes(kind);
  struct ob_pass_sink sink = {.kind = kind,
                              .first_word = bucket->first_word,
                              .parameters = bucket->parameters,
                              .copies = bucket->masters ? bucket->copies : NULL,
                              .gradients = bucket->gradients,
                              .copy_dtype = optimizer->options.parameter_dtype,
                              .gradient_dtype = optimizer->options.gradient_dtype,
                              .learning_rates = bucket->learning_rates,
                              .weight_decays = bucket->weight_decays,
                              .scalings = bucket->scalings,
                              .last_decay = (float)optimizer->moments.beta1,
                              .factors = ob_make_factors(optimizer, step),
                              .variances = bucket->sums[0],
                              .device = bucket->device};
  for (int slot = 0; slot < OB_ARRAYS; slot++)
    sink.arrays[slot] = uses & OB_MASK(slot) ? bucket->arrays[slot] : NULL;
  if (optimizer->method->sharded && uses & OB_MASK(OB_PARAMETER))
    sink.masters = bucket->masters;
  for (int k = 0; k < OB_SUMS; k++)
    sink.sums[k] = ob_pass_sums(kind) & OB_MASK(k) ? bucket->sums[k] : NULL;
  return sink;
}

onebit_status_t ob_bucket_run_pass(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                   enum ob_pass_kind kind, uint64_t step) {
  struct ob_pass_sink sink = ob_bucket_make_sink(optimizer, bucket, kind, step);
  return optimizer->executor->pass(optimizer, bucket, &sink);
}

onebit_status_t ob_buckets_run_pass(struct onebit_optimizer *optimizer, enum ob_pass_kind kind,
                                    uint64_t step) {
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    if (!optimizer->buckets[u].uncompressed)
      OB_TRY(ob_bucket_run_pass(optimizer, &optimizer->buckets[u], kind, step));
  return ONEBIT_OK;
}

onebit_status_t ob_buckets_for_each(struct onebit_optimizer *optimizer,
                                    onebit_status_t (*body)(struct onebit_optimizer *optimizer,
                                                            struct ob_bucket *bucket)) {
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    if (!optimizer->buckets[u].uncompressed)
      OB_TRY(body(optimizer, &optimizer->buckets[u]));
  return ONEBIT_OK;
}

/* Applies the buckets' results. A single bucket has applied its results already, unless only the
 * device knows how its exchange ended. */
onebit_status_t ob_buckets_apply(struct onebit_optimizer *optimizer) {
  struct ob_outcome outcome = {.status = ONEBIT_OK};
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    struct ob_bucket *bucket = &optimizer->buckets[u];
    enum ob_exchange exchange = ob_bucket_exchange(optimizer, bucket);
    onebit_plan_t plan = exchange == OB_EXCHANGE_BITS ? bucket->bits : bucket->dense;
    if (exchange != OB_EXCHANGE_NONE)
      ob_outcome_add(&outcome, ob_plan_apply(plan)); /* other streams may read its outputs */
  }
  return ob_outcome_status(&outcome);
}

/* With several buckets nothing is applied until all of them have succeeded. */
void ob_fill_momentum_call(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                           enum ob_pass_kind kind, struct ob_call *call) {
  bucket->sink = ob_bucket_make_sink(optimizer, bucket, kind, optimizer->steps + 1);
  const struct ob_pass_factors *factors = &bucket->sink.factors;
  call->source.momentum = true;
  call->source.decay = factors->adam.beta1;
  call->source.weight = factors->adam.one_minus_beta1;
  call->source.scalings = bucket->scalings;
  call->sink = &bucket->sink;
  call->hold = optimizer->bucket_count > 1;
}

void ob_fill_moments_call(const struct onebit_optimizer *optimizer, const struct ob_bucket *bucket,
                          uint64_t step, struct ob_call *call) {
  const struct ob_adam_factors *adam = &bucket->sink.factors.adam;
  call->source.moment_rule = OB_MOMENTS_SECOND;
  call->source.moment = (struct ob_moment_factors){
      .beta2 = adam->beta2, .one_minus_beta2 = adam->one_minus_beta2, .epsilon = adam->epsilon};
  ob_moment_set_factors(&call->source.moment, optimizer->moments.beta2,
                        (double)ob_plan_geometry(bucket->bits)->members, step);
}

/* --- In host memory ----------------------------------------------------------------------------*/

static onebit_status_t run_pass_on_host(struct onebit_optimizer *optimizer,
                                        struct ob_bucket *bucket, const struct ob_pass_sink *sink) {
  (void)optimizer;
  ob_pass_blocks(ob_plan_work(bucket->bits), NULL, NULL, NULL, sink);
  return ONEBIT_OK;
}

static onebit_status_t get_sum_on_host(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                       int which, size_t first, size_t end, double *sum) {
  (void)optimizer;
  *sum = ob_sums_total(which, bucket->sums[which] + first, end - first);
  return ONEBIT_OK;
}

static onebit_status_t check_host_array(const char *name, const void *array) {
  return ob_executor_check_host(NULL, name, array);
}

const struct ob_optimizer_executor ob_optimizer_executor_host = {
    .check = check_host_array, .pass = run_pass_on_host, .sum = get_sum_on_host};
