/* The memory of a bucket: what there is of each element, of each block and of each piece. */
#include "optimizers/bucket_memory.h"

#include "base/error.h"
#include "base/memory.h"

/* Elements that are converted to master values at a time. */
#define MASTERS_AT_ONCE ((size_t)65536)

static void *bucket_memory_allocate_from(onebit_optimizer_t optimizer,
                                         const struct ob_memory *memory, size_t count,
                                         size_t size) {
  optimizer->own_bytes += count * size;
  return memory->allocate(count, size);
}

static onebit_status_t bucket_memory_no_memory(const struct ob_layout *layout) {
  return ob_error(ONEBIT_ERROR_MEMORY, "no memory for the state of %zu parameters",
                  layout->words * OB_LANES);
}

/* True if the residual has no second copy that can hold the mean gradient of dense steps. */
static bool lacks_scratch(const struct onebit_optimizer *optimizer,
                          const struct ob_bucket *bucket) {
  return optimizer->options.residual_copies == 1 && !bucket->uncompressed;
}

/* The slots that are arrays of the bucket's own. */
static unsigned arrays_of(const struct onebit_optimizer *optimizer,
                          const struct ob_bucket *bucket) {
  return optimizer->method->arrays | (bucket->uncompressed ? optimizer->method->dense_arrays : 0) |
         (lacks_scratch(optimizer, bucket) ? OB_MASK(OB_SCRATCH) : 0);
}

static void point_to_means(const struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  float *const means = bucket->arrays[OB_SCRATCH];
  const struct ob_layout *layout = ob_plan_layout(bucket->bits);
  for (size_t k = 0; k < layout->pieces; k++)
    bucket->means[k] = means && !optimizer->method->sharded
                           ? means + layout->piece[k].first_word * OB_LANES
                           : NULL;
}

/* True if the optimizer makes dense steps now, or may make them later. */
static bool has_dense_steps(const struct onebit_optimizer *optimizer) {
  return !ob_optimizer_is_frozen(optimizer) || !ob_optimizer_compresses(optimizer);
}

/* True if only dense steps need the array. */
static bool is_for_dense_steps(const struct onebit_optimizer *optimizer,
                               const struct ob_bucket *bucket, int slot) {
  if (slot == OB_SCRATCH)
    return lacks_scratch(optimizer, bucket) && !(optimizer->method->arrays & OB_MASK(slot));
  return slot == OB_VARIANCE && optimizer->method->divides && !bucket->uncompressed;
}

static onebit_status_t fit_array(onebit_optimizer_t optimizer, struct ob_bucket *bucket, int slot,
                                 bool wanted) {
  const struct ob_memory *memory = ob_plan_memory(bucket->bits);
  const size_t size = OB_LANES * sizeof(float);
  float **const array = &bucket->arrays[slot];
  if (!is_for_dense_steps(optimizer, bucket, slot) || wanted == !!*array)
    return ONEBIT_OK;
  if (wanted) {
    *array = bucket_memory_allocate_from(optimizer, memory, bucket->words, size);
    if (!*array)
      return bucket_memory_no_memory(ob_plan_layout(bucket->bits));
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
    OB_TRY(fit_array(optimizer, &optimizer->buckets[u], OB_SCRATCH, wanted));
    OB_TRY(fit_array(optimizer, &optimizer->buckets[u], OB_VARIANCE, wanted));
  }
  return ONEBIT_OK;
}

/* The arrays that are as long as the layout, and the sums. */
static onebit_status_t bucket_memory_allocate_arrays(onebit_optimizer_t optimizer,
                                                     struct ob_bucket *bucket) {
  const struct ob_layout *layout = ob_plan_layout(bucket->bits);
  const struct ob_memory *memory = ob_plan_memory(bucket->bits);
  const unsigned own = arrays_of(optimizer, bucket);
  const size_t size = OB_LANES * sizeof(float);
  bool there = true;
  /* Not where they are replaced: what is there is released, whatever came in between. */
  bucket->arrays[OB_MOMENTUM] =
      own & OB_MASK(OB_MOMENTUM) ? NULL : ob_plan_residual(bucket->bits, false)->values[0];
  bucket->arrays[OB_SCRATCH] =
      own & OB_MASK(OB_SCRATCH) ? NULL : ob_plan_residual(bucket->bits, false)->values[1];
  for (int slot = 0; slot < OB_ARRAYS; slot++)
    if (own & OB_MASK(slot) &&
        (has_dense_steps(optimizer) || !is_for_dense_steps(optimizer, bucket, slot))) {
      bucket->arrays[slot] = bucket_memory_allocate_from(optimizer, memory, bucket->words, size);
      there &= bucket->arrays[slot] != NULL;
    }
  if (optimizer->options.parameter_dtype != ONEBIT_FLOAT32) {
    bucket->masters = bucket_memory_allocate_from(optimizer, memory, bucket->words, size);
    there &= bucket->masters != NULL;
  }
  for (int k = 0; k < OB_SUMS; k++) {
    bucket->sums[k] =
        bucket_memory_allocate_from(optimizer, memory, layout->blocks, sizeof(double));
    there &= bucket->sums[k] != NULL;
  }
  return there ? ONEBIT_OK : bucket_memory_no_memory(layout);
}

static void set_extent(const struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  const struct ob_layout *layout = ob_plan_layout(bucket->bits);
  size_t first = 0, end = layout->blocks;
  if (optimizer->method->sharded)
    ob_plan_segment(bucket->bits, &first, &end);
  bucket->first_block = first;
  bucket->blocks = end - first;
  bucket->first_word = ob_layout_word(layout, first);
  bucket->words = ob_layout_word(layout, end) - bucket->first_word;
}

/* The lists of what is known of each piece. */
#define LISTS(row)                                                                                 \
  row(parameters) row(copies) row(gradients) row(means) row(factors) row(weight_decays)            \
      row(learning_rates) row(scalings) row(floors) row(tensor_of)

onebit_status_t ob_bucket_allocate(onebit_optimizer_t optimizer, struct ob_bucket *bucket) {
  const size_t pieces = ob_plan_layout(bucket->bits)->pieces;
  bool there = true;
  set_extent(optimizer, bucket);
#define ALLOCATE(name)                                                                             \
  bucket->name = ob_optimizer_allocate(optimizer, pieces, sizeof *bucket->name);                   \
  there &= bucket->name != NULL;
  LISTS(ALLOCATE)
  if (!there)
    return bucket_memory_no_memory(ob_plan_layout(bucket->bits));
  OB_TRY(bucket_memory_allocate_arrays(optimizer, bucket));
  point_to_means(optimizer, bucket);
  return ONEBIT_OK;
}

static void release_arrays(const struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  const struct ob_memory *memory = bucket->bits ? ob_plan_memory(bucket->bits) : NULL;
  for (int slot = 0; memory && slot < OB_ARRAYS; slot++)
    if (arrays_of(optimizer, bucket) & OB_MASK(slot))
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

/* Master values of `count` elements that lie in the kind of memory that the bucket's arrays are in:
 * those that round to their parameter stay. `buffer` on the host is for MASTERS_AT_ONCE, as float32
 * and in the parameters' type. */
static onebit_status_t bucket_memory_convert(const struct ob_memory *memory, onebit_dtype_t dtype,
                                             float *master, const uint16_t *parameter, size_t count,
                                             float *buffer) {
  uint16_t *given = (uint16_t *)(void *)(buffer + MASTERS_AT_ONCE);
  for (size_t at = 0; at < count; at += MASTERS_AT_ONCE) {
    size_t some = count - at < MASTERS_AT_ONCE ? count - at : MASTERS_AT_ONCE;
    OB_TRY(memory->copy(given, parameter + at, some * sizeof *given));
    OB_TRY(memory->copy(buffer, master + at, some * sizeof *buffer));
    for (size_t i = 0; i < some; i++) {
      const uint16_t before = given[i];
      ob_store(given, i, dtype, ob_bound(buffer[i], dtype));
      if (given[i] != before) {
        given[i] = before;
        buffer[i] = ob_load(given, i, dtype);
      }
    }
    OB_TRY(memory->copy(master + at, buffer, some * sizeof *buffer));
  }
  return ONEBIT_OK;
}

/* Fills a piece with the values from which the bucket has its master values. */
static onebit_status_t fill_piece(const struct onebit_optimizer *optimizer,
                                  struct ob_bucket *bucket, size_t k, float *buffer) {
  const struct ob_layout *layout = ob_plan_layout(bucket->bits);
  const struct ob_piece *piece = &layout->piece[k];
  size_t first = bucket->first_block, last = first + bucket->blocks;
  first = piece->first_block > first ? piece->first_block : first;
  last = piece[1].first_block < last ? piece[1].first_block : last;
  if (!bucket->copies[k] || first >= last)
    return ONEBIT_OK;
  size_t begin = (first - piece->first_block) * layout->block;
  size_t end = (last - piece->first_block) * layout->block;
  size_t word = ob_layout_word(layout, first) - bucket->first_word;
  end = end < piece->valid ? end : piece->valid;
  return bucket_memory_convert(ob_plan_memory(bucket->bits), optimizer->options.parameter_dtype,
                               bucket->masters + word * OB_LANES,
                               (const uint16_t *)bucket->copies[k] + begin,
                               end > begin ? end - begin : 0, buffer);
}

static onebit_status_t fill_masters(const struct onebit_optimizer *optimizer,
                                    struct ob_bucket *bucket, float *buffer) {
  for (size_t k = 0; k < ob_plan_layout(bucket->bits)->pieces; k++)
    OB_TRY(fill_piece(optimizer, bucket, k, buffer));
  return ONEBIT_OK;
}

/* This is rare: the host converts for a device too, a part at a time. */
onebit_status_t ob_bucket_make_masters(const struct onebit_optimizer *optimizer,
                                       struct ob_bucket *bucket) {
  float *buffer = ob_allocate(MASTERS_AT_ONCE, sizeof(float) + sizeof(uint16_t));
  onebit_status_t status = buffer ? fill_masters(optimizer, bucket, buffer)
                                  : bucket_memory_no_memory(ob_plan_layout(bucket->bits));
  ob_release(buffer);
  return status;
}
