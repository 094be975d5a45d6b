/* Buckets: which tensors are exchanged together, and the memory of that. */
#include "base/error.h"
#include "base/memory.h"
#include "optimizers/fused.h"
#include "optimizers/optimizer.h"

/* Elements that are converted to master values at a time. */
#define MASTERS_AT_ONCE ((size_t)65536)

/* In profile deepspeed each tensor is compressed by itself, or all of them in one buffer. */
static bool separate(const struct onebit_optimizer *optimizer) {
  return optimizer->options.profile == ONEBIT_PROFILE_DEEPSPEED && !optimizer->method->fused;
}

static bool is_fused(const struct onebit_optimizer *optimizer, const struct ob_bucket *bucket) {
  return optimizer->options.profile == ONEBIT_PROFILE_DEEPSPEED && optimizer->method->fused &&
         !bucket->uncompressed;
}

bool ob_is_uncompressed(const struct onebit_optimizer *optimizer, const onebit_tensor_t *tensor) {
  return tensor->uncompressed || tensor->count < optimizer->options.dense_below;
}

/* A bucket is filled from the last tensor down, since backward passes come to that one first, and
 * is closed when it is large enough; but tensors without elements open no other one. Tensors that
 * stay uncompressed are in one of their own. Numbers the buckets from the last one on, and says how
 * many there are. */
static size_t fill_buckets(const struct onebit_optimizer *optimizer, const onebit_tensor_t *tensors,
                           size_t count) {
  size_t bucket_size = optimizer->options.bucket_size, bucket = 0, elements = 0, plain = 0;
  for (size_t t = count; t-- > 0;) {
    plain += ob_is_uncompressed(optimizer, &tensors[t]);
    if (ob_is_uncompressed(optimizer, &tensors[t]))
      continue;
    if (bucket_size && elements >= bucket_size && tensors[t].count) {
      bucket++;
      elements = 0;
    }
    elements += tensors[t].count;
    optimizer->tensors[t].bucket = bucket;
  }
  size_t buckets = plain < count || !plain ? bucket + 1 : 0;
  for (size_t t = 0; plain && t < count; t++)
    if (ob_is_uncompressed(optimizer, &tensors[t]))
      optimizer->tensors[t].bucket = buckets;
  return buckets + (plain > 0);
}

onebit_status_t ob_buckets_group(onebit_optimizer_t optimizer, const onebit_tensor_t *tensors,
                                 size_t count) {
  optimizer->tensors = ob_optimizer_allocate(optimizer, count, sizeof *optimizer->tensors);
  if (!optimizer->tensors)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for an optimizer of %zu tensors", count);
  size_t filled = fill_buckets(optimizer, tensors, count);
  size_t buckets = separate(optimizer) ? count : filled;
  optimizer->buckets = ob_optimizer_allocate(optimizer, buckets, sizeof *optimizer->buckets);
  if (!optimizer->buckets)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for an optimizer of %zu tensors", count);
  optimizer->tensor_count = count;
  optimizer->bucket_count = buckets;
  for (size_t t = 0; t < count; t++) {
    struct ob_tensor *tensor = &optimizer->tensors[t];
    tensor->first = t ? tensor[-1].first + tensor[-1].count : 0;
    tensor->count = tensors[t].count;
    tensor->bucket = separate(optimizer) ? t : filled - 1 - tensor->bucket;
    optimizer->buckets[tensor->bucket].filled += tensor->count > 0;
    optimizer->buckets[tensor->bucket].uncompressed = ob_is_uncompressed(optimizer, &tensors[t]);
  }
  return ONEBIT_OK;
}

static void *allocate_from(onebit_optimizer_t optimizer, const struct ob_memory *memory,
                           size_t count, size_t size) {
  optimizer->own_bytes += count * size;
  return memory->allocate(count, size);
}

static onebit_status_t no_memory(const struct ob_layout *layout) {
  return ob_error(ONEBIT_ERROR_MEMORY, "no memory for the state of %zu parameters",
                  layout->words * OB_LANES);
}

/* Whether the residual has no second copy for the mean gradient of dense steps to be in. */
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
  const struct ob_layout *layout = &bucket->bits->geometry.layout;
  for (size_t k = 0; k < layout->pieces; k++)
    bucket->means[k] = means && !optimizer->method->sharded
                           ? means + layout->piece[k].first_word * OB_LANES
                           : NULL;
}

/* Whether a method that has no such array always sends gradients dense now, or may come to. */
static bool wants_scratch(const struct onebit_optimizer *optimizer) {
  return optimizer->method->arrays & OB_MASK(OB_SCRATCH) || !ob_optimizer_is_frozen(optimizer) ||
         !ob_optimizer_compresses(optimizer);
}

static onebit_status_t fit_scratch(onebit_optimizer_t optimizer, struct ob_bucket *bucket,
                                   bool wanted) {
  const struct ob_memory *memory = bucket->bits->executor->residuals;
  const size_t size = OB_LANES * sizeof(float);
  float **const scratch = &bucket->arrays[OB_SCRATCH];
  if (!lacks_scratch(optimizer, bucket) || wanted == !!*scratch)
    return ONEBIT_OK;
  if (wanted) {
    *scratch = allocate_from(optimizer, memory, bucket->words, size);
    if (!*scratch)
      return no_memory(&bucket->bits->geometry.layout);
  } else {
    memory->release(*scratch);
    optimizer->own_bytes -= bucket->words * size;
    *scratch = NULL;
  }
  point_to_means(optimizer, bucket);
  return ONEBIT_OK;
}

onebit_status_t ob_buckets_fit_scratch(onebit_optimizer_t optimizer, bool warm) {
  const bool wanted = warm || wants_scratch(optimizer);
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    OB_TRY(fit_scratch(optimizer, &optimizer->buckets[u], wanted));
  return ONEBIT_OK;
}

/* The arrays that are as long as the layout, and the sums. */
static onebit_status_t allocate_arrays(onebit_optimizer_t optimizer, struct ob_bucket *bucket) {
  const struct ob_layout *layout = &bucket->bits->geometry.layout;
  const struct ob_memory *memory = bucket->bits->executor->residuals;
  const unsigned own = arrays_of(optimizer, bucket);
  const size_t size = OB_LANES * sizeof(float);
  /* Not where they are replaced: what is there is released, whatever came in between. */
  bucket->arrays[OB_MOMENTUM] = own & OB_MASK(OB_MOMENTUM) ? NULL : bucket->bits->worker.values[0];
  bucket->arrays[OB_SCRATCH] = own & OB_MASK(OB_SCRATCH) ? NULL : bucket->bits->worker.values[1];
  for (int slot = 0; slot < OB_ARRAYS; slot++)
    if (own & OB_MASK(slot) && (slot != OB_SCRATCH || wants_scratch(optimizer))) {
      bucket->arrays[slot] = allocate_from(optimizer, memory, bucket->words, size);
      if (!bucket->arrays[slot])
        return no_memory(layout);
    }
  if (optimizer->options.parameter_dtype != ONEBIT_FLOAT32) {
    bucket->masters = allocate_from(optimizer, memory, bucket->words, size);
    if (!bucket->masters)
      return no_memory(layout);
  }
  for (int k = 0; k < OB_SUMS; k++) {
    bucket->sums[k] = allocate_from(optimizer, memory, layout->blocks, sizeof(double));
    if (!bucket->sums[k])
      return no_memory(layout);
  }
  return ONEBIT_OK;
}

static void set_extent(const struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  const struct ob_layout *layout = &bucket->bits->geometry.layout;
  size_t first = 0, end = layout->blocks;
  if (optimizer->method->sharded)
    ob_plan_segment(bucket->bits, &first, &end);
  bucket->first_block = first;
  bucket->blocks = end - first;
  bucket->first_word = ob_layout_word(layout, first);
  bucket->words = ob_layout_word(layout, end) - bucket->first_word;
}

/* Everything of a bucket but its plans. */
static onebit_status_t allocate_bucket(onebit_optimizer_t optimizer, struct ob_bucket *bucket) {
  size_t pieces = bucket->bits->geometry.layout.pieces;
  set_extent(optimizer, bucket);
  bucket->parameters = ob_optimizer_allocate(optimizer, pieces, sizeof *bucket->parameters);
  bucket->copies = ob_optimizer_allocate(optimizer, pieces, sizeof *bucket->copies);
  bucket->gradients = ob_optimizer_allocate(optimizer, pieces, sizeof *bucket->gradients);
  bucket->means = ob_optimizer_allocate(optimizer, pieces, sizeof *bucket->means);
  bucket->factors = ob_optimizer_allocate(optimizer, pieces, sizeof(float));
  bucket->weight_decays = ob_optimizer_allocate(optimizer, pieces, sizeof(float));
  bucket->learning_rates = ob_optimizer_allocate(optimizer, pieces, sizeof(float));
  bucket->scalings = ob_optimizer_allocate(optimizer, pieces, sizeof(float));
  bucket->tensor_of = ob_optimizer_allocate(optimizer, pieces, sizeof *bucket->tensor_of);
  if (!bucket->parameters || !bucket->copies || !bucket->gradients || !bucket->means ||
      !bucket->factors || !bucket->weight_decays || !bucket->learning_rates || !bucket->scalings ||
      !bucket->tensor_of)
    return no_memory(&bucket->bits->geometry.layout);
  OB_TRY(allocate_arrays(optimizer, bucket));
  point_to_means(optimizer, bucket);
  return ONEBIT_OK;
}

/* --- Where pieces lie */

static const void *gradient_at(const struct onebit_optimizer *optimizer, const void *gradient,
                               size_t offset) {
  size_t bytes = offset * ob_dtype_size(optimizer->options.gradient_dtype);
  return gradient ? (const char *)gradient + bytes : NULL;
}

/* The arrays of a piece that is not all padding. Of a share's master values a piece has but a part:
 * passes know where they lie. */
static void locate_arrays(struct onebit_optimizer *optimizer, struct ob_bucket *bucket, size_t k,
                          const onebit_tensor_t *tensor, size_t offset) {
  size_t word = bucket->bits->geometry.layout.piece[k].first_word;
  char *caller =
      (char *)tensor->parameter + offset * ob_dtype_size(optimizer->options.parameter_dtype);
  bucket->gradients[k] = gradient_at(optimizer, tensor->gradient, offset);
  if (bucket->masters || optimizer->method->sharded)
    bucket->copies[k] = caller;
  if (bucket->masters) {
    bucket->parameters[k] = optimizer->method->sharded ? NULL : bucket->masters + word * OB_LANES;
  } else {
    bucket->parameters[k] = (float *)(void *)caller;
  }
}

/* Where piece k of the bucket lies: it begins `offset` elements into tensor t. */
static void locate_piece(struct onebit_optimizer *optimizer, struct ob_bucket *bucket, size_t k,
                         const onebit_tensor_t *tensors, size_t t, size_t offset) {
  const struct ob_piece *piece = &bucket->bits->geometry.layout.piece[k];
  const onebit_tensor_t *tensor = &tensors[t];
  if (piece->valid)
    locate_arrays(optimizer, bucket, k, tensor, offset);
  bucket->factors[k] = tensor->learning_rate_factor;
  bucket->weight_decays[k] = tensor->weight_decay;
  bucket->scalings[k] = 1;
  bucket->tensor_of[k] = t;
  if (offset == 0)
    optimizer->tensors[t].first_block = piece->first_block;
  optimizer->tensors[t].end_block = piece[1].first_block;
}

/* Padding that is no tensor's: its momentum stays as it is. */
static void locate_padding(struct onebit_optimizer *optimizer, struct ob_bucket *bucket, size_t k) {
  bucket->factors[k] = 1;
  bucket->tensor_of[k] = optimizer->tensor_count;
}

/* How far into its tensor a piece begins: pieces of a tensor follow each other. */
static size_t offset_of(const struct ob_bucket *bucket, size_t piece) {
  size_t offset = 0;
  for (size_t k = piece; k-- > 0 && bucket->tensor_of[k] == bucket->tensor_of[piece];)
    offset += bucket->bits->geometry.layout.piece[k].count;
  return offset;
}

onebit_status_t ob_buckets_set_gradient(onebit_optimizer_t optimizer, size_t tensor,
                                        const void *gradient) {
  struct ob_bucket *bucket = &optimizer->buckets[optimizer->tensors[tensor].bucket];
  for (size_t k = 0; k < bucket->bits->geometry.layout.pieces; k++) {
    if (bucket->tensor_of[k] != tensor || !bucket->bits->geometry.layout.piece[k].valid)
      continue;
    bucket->gradients[k] = gradient_at(optimizer, gradient, offset_of(bucket, k));
    OB_TRY(optimizer->executor->repoint(optimizer, bucket, k));
  }
  return ONEBIT_OK;
}

onebit_status_t ob_buckets_set_constants(onebit_optimizer_t optimizer, size_t tensor) {
  struct ob_bucket *bucket = &optimizer->buckets[optimizer->tensors[tensor].bucket];
  for (size_t k = 0; k < bucket->bits->geometry.layout.pieces; k++) {
    if (bucket->tensor_of[k] != tensor)
      continue;
    bucket->factors[k] = optimizer->list[tensor].learning_rate_factor;
    bucket->weight_decays[k] = optimizer->list[tensor].weight_decay;
    OB_TRY(optimizer->executor->reweigh(optimizer, bucket, k));
  }
  return ONEBIT_OK;
}

/* What servers do goes by the betas of now. */
void ob_buckets_set_serving(struct onebit_optimizer *optimizer) {
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    struct ob_bucket *bucket = &optimizer->buckets[u];
    bucket->bits->server.serving.lion = ob_lion_factors_of(optimizer);
    optimizer->executor->serve(bucket);
  }
}

/* Dense messages; or of a warm-up that is compressed, which has no momentum to send yet. */
static void set_dense(const struct onebit_optimizer *optimizer, const struct ob_bucket *bucket,
                      struct ob_plan_shape *dense) {
  int bits = bucket->uncompressed ? 0 : optimizer->options.warmup_bits;
  dense->windowed = !bits;
  dense->one_scale = dense->segment_a_piece = false;
  dense->segment_pieces = NULL;
  dense->options.wire = bits ? ONEBIT_WIRE_BITS : ONEBIT_WIRE_DENSE;
  dense->options.bits = dense->options.max_bits = bits ? bits : 1;
  dense->options.residual_copies = 2;
  dense->options.scale = ONEBIT_SCALE_RMS;
  dense->options.profile = ONEBIT_PROFILE_DEFAULT;
}

/* The plans of a bucket: collective. `status` is how this rank fares so far. Messages that are
 * dense have other elements of the pieces. */
static onebit_status_t create_plans(onebit_optimizer_t optimizer, struct ob_bucket *bucket,
                                    onebit_status_t status, const struct ob_plan_shape *shape,
                                    const size_t *dense_counts, size_t count) {
  const struct ob_method *method = optimizer->method;
  struct ob_plan_shape bits = *shape, dense = *shape;
  /* Of what is uncompressed all of the residuals are momentum and mean gradient, in one piece. */
  bits.momentum = method->momentum || (method->serve_rule && bucket->uncompressed);
  bits.moments = method->moments && !bucket->uncompressed;
  if (bucket->uncompressed)
    bits.options.bits = bits.options.max_bits = 1, bits.options.residual_copies = 2;
  bits.serving =
      (struct ob_serving){.rule = method->serve_rule, .lion = ob_lion_factors_of(optimizer)};
  bits.refused = dense.refused = &optimizer->refused;
  dense.counts = dense_counts;
  bits.from_servers = true;
  set_dense(optimizer, bucket, &dense);
  bits.output_dtype = dense.output_dtype = ONEBIT_FLOAT32; /* momentum, mean gradient */
  if (method->plans) {
    OB_TRY(method->plans(optimizer, bucket, &bits, &dense, count));
  } else {
    OB_TRY(ob_plan_create(optimizer->comm, status, &bits, count, &bucket->bits));
    OB_TRY(ob_plan_create(optimizer->comm, ONEBIT_OK, &dense, count, &bucket->dense));
  }
  bucket->bits->clocked = bucket->dense->clocked = true;
  return ob_agree(optimizer->comm, allocate_bucket(optimizer, bucket), NULL, 0);
}

/* Master values of `count` elements that lie in the kind of memory that the bucket's arrays are in;
 * `room` on the host is for MASTERS_AT_ONCE, in their type and then as float32. */
static onebit_status_t convert(const struct ob_memory *memory, onebit_dtype_t dtype, float *master,
                               const uint16_t *parameter, size_t count, float *buffer) {
  uint16_t *given = (uint16_t *)(void *)(buffer + MASTERS_AT_ONCE);
  for (size_t at = 0; at < count; at += MASTERS_AT_ONCE) {
    size_t some = count - at < MASTERS_AT_ONCE ? count - at : MASTERS_AT_ONCE;
    OB_TRY(memory->copy(given, parameter + at, some * sizeof *given));
    for (size_t i = 0; i < some; i++)
      buffer[i] = ob_load(given, i, dtype);
    OB_TRY(memory->copy(master + at, buffer, some * sizeof *buffer));
  }
  return ONEBIT_OK;
}

/* Of a piece, what the bucket has master values of. */
static onebit_status_t fill_piece(const struct onebit_optimizer *optimizer,
                                  struct ob_bucket *bucket, size_t k, float *buffer) {
  const struct ob_layout *layout = &bucket->bits->geometry.layout;
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
  return convert(bucket->bits->executor->residuals, optimizer->options.parameter_dtype,
                 bucket->masters + word * OB_LANES, (const uint16_t *)bucket->copies[k] + begin,
                 end > begin ? end - begin : 0, buffer);
}

static onebit_status_t fill_masters(const struct onebit_optimizer *optimizer,
                                    struct ob_bucket *bucket, float *buffer) {
  for (size_t k = 0; k < bucket->bits->geometry.layout.pieces; k++)
    OB_TRY(fill_piece(optimizer, bucket, k, buffer));
  return ONEBIT_OK;
}

/* This happens once: the host converts for a device too, a part at a time. */
static onebit_status_t make_masters(const struct onebit_optimizer *optimizer,
                                    struct ob_bucket *bucket) {
  float *buffer = ob_allocate(MASTERS_AT_ONCE, sizeof(float) + sizeof(uint16_t));
  onebit_status_t status =
      buffer ? fill_masters(optimizer, bucket, buffer) : no_memory(&bucket->bits->geometry.layout);
  ob_release(buffer);
  return status;
}

/* What is left once the bucket's pieces are placed: collective. */
static onebit_status_t complete(onebit_optimizer_t optimizer, struct ob_bucket *bucket) {
  onebit_status_t status = bucket->masters ? make_masters(optimizer, bucket) : ONEBIT_OK;
  if (status == ONEBIT_OK)
    status = optimizer->executor->create(optimizer, bucket);
  return ob_agree(optimizer->comm, status, NULL, 0);
}

/* A bucket, or the tensors that stay uncompressed. */
static onebit_status_t create_bucket(onebit_optimizer_t optimizer, size_t u,
                                     const onebit_tensor_t *tensors, struct ob_plan_shape *shape,
                                     size_t *counts) {
  struct ob_bucket *bucket = &optimizer->buckets[u];
  size_t total = 0, pieces = 0;
  for (size_t t = 0; t < optimizer->tensor_count; t++)
    if (optimizer->tensors[t].bucket == u)
      total += counts[pieces++] = tensors[t].count;
  shape->pieces = pieces;
  shape->counts = counts;
  OB_TRY(create_plans(optimizer, bucket, ONEBIT_OK, shape, counts, total));
  for (size_t t = 0, k = 0; t < optimizer->tensor_count; t++)
    if (optimizer->tensors[t].bucket == u)
      locate_piece(optimizer, bucket, k++, tensors, t, 0);
  return complete(optimizer, bucket);
}

/* A tensor, padded and cut as profile deepspeed has it. */
static onebit_status_t create_padded(onebit_optimizer_t optimizer, size_t t,
                                     const onebit_tensor_t *tensors, struct ob_plan_shape *shape,
                                     size_t *counts) {
  struct ob_bucket *bucket = &optimizer->buckets[t];
  size_t ranks = (size_t)optimizer->comm->size;
  ob_plan_cut(shape, ranks, tensors[t].count, counts, counts + ranks);
  OB_TRY(create_plans(optimizer, bucket, ONEBIT_OK, shape, counts, tensors[t].count));
  for (size_t k = 0; k < shape->pieces; k++)
    locate_piece(optimizer, bucket, k, tensors, t, k * counts[0]);
  return complete(optimizer, bucket);
}

static void locate_fused(onebit_optimizer_t optimizer, struct ob_bucket *bucket,
                         const onebit_tensor_t *tensors, const struct ob_fused *cut) {
  for (size_t k = 0; k < cut->pieces; k++)
    if (cut->real[k])
      locate_piece(optimizer, bucket, k, tensors, cut->tensor[k], cut->offset[k]);
    else
      locate_padding(optimizer, bucket, k);
}

/* All tensors in one buffer, likewise. Dense messages go without the padding. */
static onebit_status_t create_fused(onebit_optimizer_t optimizer, size_t u,
                                    const onebit_tensor_t *tensors,
                                    const struct ob_plan_shape *shape) {
  struct ob_bucket *bucket = &optimizer->buckets[u];
  struct ob_plan_shape own = *shape;
  struct ob_fused cut;
  onebit_status_t status = ob_fused_cut(optimizer, u, &cut);
  own.pieces = cut.pieces;
  own.counts = cut.counts;
  own.segment_pieces = cut.segment_pieces;
  status = create_plans(optimizer, bucket, status, &own, cut.real, cut.total);
  if (status == ONEBIT_OK)
    locate_fused(optimizer, bucket, tensors, &cut);
  ob_fused_release(&cut);
  return status == ONEBIT_OK ? complete(optimizer, bucket) : status;
}

onebit_status_t ob_buckets_create(onebit_optimizer_t optimizer, const onebit_tensor_t *tensors,
                                  struct ob_plan_shape *shape, size_t *counts) {
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    if (separate(optimizer))
      OB_TRY(create_padded(optimizer, u, tensors, shape, counts));
    else if (is_fused(optimizer, &optimizer->buckets[u]))
      OB_TRY(create_fused(optimizer, u, tensors, shape));
    else
      OB_TRY(create_bucket(optimizer, u, tensors, shape, counts));
  return ONEBIT_OK;
}

static void release_arrays(const struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  const struct ob_memory *memory = bucket->bits ? bucket->bits->executor->residuals : NULL;
  for (int slot = 0; memory && slot < OB_ARRAYS; slot++)
    if (arrays_of(optimizer, bucket) & OB_MASK(slot))
      memory->release(bucket->arrays[slot]);
  for (int k = 0; memory && k < OB_SUMS; k++)
    memory->release(bucket->sums[k]);
  if (memory)
    memory->release(bucket->masters);
}

static void destroy_bucket(const struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  if (optimizer->executor)
    optimizer->executor->destroy(bucket);
  release_arrays(optimizer, bucket);
  onebit_plan_destroy(bucket->parameters_back);
  onebit_plan_destroy(bucket->steps_back);
  onebit_plan_destroy(bucket->dense);
  onebit_plan_destroy(bucket->bits);
  ob_release(bucket->parameters);
  ob_release(bucket->copies);
  ob_release((void *)bucket->gradients);
  ob_release(bucket->means);
  ob_release(bucket->factors);
  ob_release(bucket->weight_decays);
  ob_release(bucket->learning_rates);
  ob_release(bucket->scalings);
  ob_release(bucket->tensor_of);
}

void ob_buckets_destroy(onebit_optimizer_t optimizer) {
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    destroy_bucket(optimizer, &optimizer->buckets[u]);
  ob_release(optimizer->buckets);
  ob_release(optimizer->tensors);
  optimizer->buckets = NULL;
  optimizer->tensors = NULL;
  optimizer->bucket_count = optimizer->tensor_count = 0;
}
