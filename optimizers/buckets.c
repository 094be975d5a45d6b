/* Groups tensors into buckets, creates the buckets' plans, and sets the addresses of their
 * pieces. */
#include "base/error.h"
#include "base/memory.h"
#include "base/process.h"
#include "optimizers/optimizer.h"

/* Returns true if each tensor is compressed separately: in profile deepspeed, unless all tensors
 * are compressed in one buffer. */
static bool compresses_separately(const struct onebit_optimizer *optimizer) {
  return optimizer->options.profile == ONEBIT_PROFILE_DEEPSPEED && !optimizer->method->fused;
}

static bool is_fused(const struct onebit_optimizer *optimizer, const struct ob_bucket *bucket) {
  return optimizer->options.profile == ONEBIT_PROFILE_DEEPSPEED && optimizer->method->fused &&
         !bucket->uncompressed;
}

bool ob_is_uncompressed(const struct onebit_optimizer *optimizer, const onebit_tensor_t *tensor) {
  return (tensor->uncompressed && tensor->uncompressed != ONEBIT_TABLE) ||
         tensor->count < optimizer->options.dense_below;
}

/* Assigns tensors to buckets. A bucket is filled from the last tensor down, since a backward pass
 * computes the last tensor's gradient first, and is closed when it is large enough; tensors without
 * elements open no new bucket. All uncompressed tensors are in one separate bucket. Buckets are
 * numbered from the last tensor on. Returns the number of buckets. */
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
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for an optimizer of %zu tensors", count);
  size_t filled = fill_buckets(optimizer, tensors, count);
  size_t buckets = compresses_separately(optimizer) ? count : filled;
  optimizer->buckets = ob_optimizer_allocate(optimizer, buckets, sizeof *optimizer->buckets);
  if (!optimizer->buckets)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for an optimizer of %zu tensors", count);
  optimizer->tensor_count = count;
  optimizer->bucket_count = buckets;
  for (size_t t = 0; t < count; t++) {
    struct ob_tensor *tensor = &optimizer->tensors[t];
    tensor->first = t ? tensor[-1].first + tensor[-1].count : 0;
    tensor->count = tensors[t].count;
    tensor->bucket = compresses_separately(optimizer) ? t : filled - 1 - tensor->bucket;
    optimizer->buckets[tensor->bucket].filled += tensor->count > 0;
    optimizer->buckets[tensor->bucket].uncompressed = ob_is_uncompressed(optimizer, &tensors[t]);
  }
  return ONEBIT_OK;
}

/* --- Profile deepspeed's one buffer of several tensors
 *
 * The buffer has the tensors one after the other, then padding. Each rank is the server of one
 * segment, and all segments have the same size. Pieces end where a tensor or a segment ends. The
 * padding is one or more pieces without a tensor: it takes part in scales and has residuals. */

struct fused {
  size_t total, pieces; /* elements without padding */
  /* For each piece: the number of its elements, and how many of these are not padding; its tensor
   * (tensor_count: none), and its offset in the tensor. */
  size_t *counts, *real, *tensor, *offset;
  size_t *segment_pieces; /* as in struct ob_plan_shape */
};

/* Adds the pieces of a tensor, or of the padding, which begins at element `at` of the buffer. */
static void fused_add_pieces(struct fused *cut, size_t segment, size_t at, size_t tensor,
                             size_t count, bool real) {
  for (size_t done = 0; done < count;) {
    size_t capacity = segment - (at + done) % segment, left = count - done, k = cut->pieces++;
    cut->counts[k] = left < capacity ? left : capacity;
    cut->real[k] = real ? cut->counts[k] : 0;
    cut->tensor[k] = tensor;
    cut->offset[k] = done;
    done += cut->counts[k];
    if (left >= capacity)
      cut->segment_pieces[(at + done) / segment] = cut->pieces;
  }
}

static bool is_in_bucket(const struct onebit_optimizer *optimizer, size_t tensor, size_t bucket) {
  return optimizer->tensors[tensor].bucket == bucket;
}

/* Allocates the lists for the largest number of pieces: every piece ends a tensor, the padding or a
 * segment. */
static bool fused_allocate(struct fused *cut, size_t tensors, size_t ranks) {
  size_t max = tensors + 1 + ranks;
  cut->counts = ob_allocate(max, sizeof(size_t));
  cut->real = ob_allocate(max, sizeof(size_t));
  cut->tensor = ob_allocate(max, sizeof(size_t));
  cut->offset = ob_allocate(max, sizeof(size_t));
  cut->segment_pieces = ob_allocate(ranks + 1, sizeof(size_t));
  return cut->counts && cut->real && cut->tensor && cut->offset && cut->segment_pieces;
}

/* Cuts the tensors of this bucket into pieces. After a failure `cut` is safe to release. */
static onebit_status_t fused_cut_tensors(const struct onebit_optimizer *optimizer, size_t bucket,
                                         struct fused *cut) {
  size_t ranks = (size_t)optimizer->comm->size, tensors = optimizer->tensor_count;
  *cut = (struct fused){0};
  if (!fused_allocate(cut, tensors, ranks))
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for dividing %zu tensors into buckets",
                    tensors);
  for (size_t t = 0; t < tensors; t++)
    if (is_in_bucket(optimizer, t, bucket))
      cut->total += optimizer->tensors[t].count;
  size_t padded = ob_plan_pad_count(ranks, cut->total), segment = padded / ranks, at = 0;
  for (size_t t = 0; t < tensors; t++)
    if (is_in_bucket(optimizer, t, bucket)) {
      fused_add_pieces(cut, segment, at, t, optimizer->tensors[t].count, true);
      at += optimizer->tensors[t].count;
    }
  fused_add_pieces(cut, segment, at, tensors, padded - at, false);
  return ONEBIT_OK;
}

static void fused_release(struct fused *cut) {
  ob_release(cut->counts);
  ob_release(cut->real);
  ob_release(cut->tensor);
  ob_release(cut->offset);
  ob_release(cut->segment_pieces);
}

/* --- Addresses of pieces */

static const void *gradient_address(const struct onebit_optimizer *optimizer, const void *gradient,
                                    size_t offset) {
  size_t bytes = offset * ob_dtype_size(optimizer->options.gradient_dtype);
  return gradient ? (const char *)gradient + bytes : NULL;
}

/* Sets the addresses of a piece that is not only padding. With sharded state a rank has only a part
 * of the master values, so passes use sink->masters. */
static void locate_arrays(struct onebit_optimizer *optimizer, struct ob_bucket *bucket, size_t k,
                          const onebit_tensor_t *tensor, size_t offset) {
  size_t word = ob_plan_layout(bucket->bits)->piece[k].first_word;
  char *caller =
      (char *)tensor->parameter + offset * ob_dtype_size(optimizer->options.parameter_dtype);
  bucket->gradients[k] = gradient_address(optimizer, tensor->gradient, offset);
  if (bucket->masters || optimizer->method->sharded)
    bucket->copies[k] = caller;
  if (bucket->masters) {
    bucket->parameters[k] = optimizer->method->sharded ? NULL : bucket->masters + word * OB_LANES;
  } else {
    bucket->parameters[k] = (float *)(void *)caller;
  }
}

/* Sets the addresses and constants of piece k of the bucket, which begins `offset` elements into
 * tensor t. */
static void locate_piece(struct onebit_optimizer *optimizer, struct ob_bucket *bucket, size_t k,
                         const onebit_tensor_t *tensors, size_t t, size_t offset) {
  const struct ob_piece *piece = &ob_plan_layout(bucket->bits)->piece[k];
  const onebit_tensor_t *tensor = &tensors[t];
  if (piece->valid)
    locate_arrays(optimizer, bucket, k, tensor, offset);
  bucket->factors[k] = tensor->learning_rate_factor;
  bucket->weight_decays[k] = tensor->weight_decay;
  bucket->scalings[k] = 1;
  bucket->floors[k] = tensor->uncompressed == ONEBIT_TABLE ? OB_TABLE_FLOOR : 0;
  bucket->has_tables = bucket->has_tables || bucket->floors[k] > 0;
  bucket->tensor_of[k] = t;
  if (offset == 0)
    optimizer->tensors[t].first_block = piece->first_block;
  optimizer->tensors[t].end_block = piece[1].first_block;
}

/* Sets the constants of padding without a tensor; its momentum does not change. */
static void locate_padding(struct onebit_optimizer *optimizer, struct ob_bucket *bucket, size_t k) {
  bucket->factors[k] = 1;
  bucket->tensor_of[k] = optimizer->tensor_count;
}

/* Returns the offset of a piece in its tensor, which follows from the pieces of the tensor before
 * it. */
static size_t piece_offset(const struct ob_bucket *bucket, size_t piece) {
  size_t offset = 0;
  for (size_t k = piece; k-- > 0 && bucket->tensor_of[k] == bucket->tensor_of[piece];)
    offset += ob_plan_layout(bucket->bits)->piece[k].count;
  return offset;
}

onebit_status_t ob_buckets_set_gradient(onebit_optimizer_t optimizer, size_t tensor,
                                        const void *gradient) {
  struct ob_bucket *bucket = &optimizer->buckets[optimizer->tensors[tensor].bucket];
  for (size_t k = 0; k < ob_plan_layout(bucket->bits)->pieces; k++) {
    if (bucket->tensor_of[k] != tensor || !ob_plan_layout(bucket->bits)->piece[k].valid)
      continue;
    bucket->gradients[k] = gradient_address(optimizer, gradient, piece_offset(bucket, k));
    if (optimizer->executor->repoint)
      OB_TRY(optimizer->executor->repoint(optimizer, bucket, k));
  }
  return ONEBIT_OK;
}

onebit_status_t ob_buckets_set_constants(onebit_optimizer_t optimizer, size_t tensor) {
  struct ob_bucket *bucket = &optimizer->buckets[optimizer->tensors[tensor].bucket];
  for (size_t k = 0; k < ob_plan_layout(bucket->bits)->pieces; k++) {
    if (bucket->tensor_of[k] != tensor)
      continue;
    bucket->factors[k] = optimizer->list[tensor].learning_rate_factor;
    bucket->weight_decays[k] = optimizer->list[tensor].weight_decay;
    if (optimizer->executor->reweigh)
      OB_TRY(optimizer->executor->reweigh(optimizer, bucket, k));
  }
  return ONEBIT_OK;
}

void ob_buckets_set_serving(struct onebit_optimizer *optimizer) {
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    struct ob_bucket *bucket = &optimizer->buckets[u];
    ob_plan_residual(bucket->bits, true)->serving.lion = ob_make_lion_factors(optimizer);
    if (optimizer->executor->set_server_factors)
      optimizer->executor->set_server_factors(bucket);
  }
}

/* Sets the shape of the plan for the warm-up: dense messages, or compressed ones without momentum,
 * since no momentum exists yet. */
static void set_warmup_shape(const struct onebit_optimizer *optimizer,
                             const struct ob_bucket *bucket, struct ob_plan_shape *dense) {
  int bits = bucket->uncompressed ? 0 : optimizer->options.warmup_bits;
  dense->windowed = !bits;
  dense->from_servers = bits > 0; /* a gather would give results with other bits */
  dense->one_scale = dense->segment_a_piece = false;
  dense->segment_pieces = NULL;
  if (dense->options.schedule == ONEBIT_SCHEDULE_ALLGATHER) /* its messages are longer */
    dense->options.schedule = ONEBIT_SCHEDULE_EXCHANGE;
  dense->options.wire = bits ? ONEBIT_WIRE_BITS : ONEBIT_WIRE_DENSE;
  dense->options.bits = dense->options.max_bits = bits ? bits : 1;
  dense->options.residual_copies = 2;
  dense->options.scale = ONEBIT_SCALE_RMS;
  dense->options.profile = ONEBIT_PROFILE_DEFAULT;
}

/* Creates the plans of a bucket. Collective. `status` is this rank's status so far. In dense
 * messages pieces have dense_counts elements. */
static onebit_status_t buckets_create_plans(onebit_optimizer_t optimizer, struct ob_bucket *bucket,
                                            onebit_status_t status,
                                            const struct ob_plan_shape *shape,
                                            const size_t *dense_counts, size_t count) {
  const struct ob_method *method = optimizer->method;
  struct ob_plan_shape bits = *shape, dense = *shape;
  /* An uncompressed bucket sends no bits: it stores its momentum and mean gradient in the
   * residuals. */
  bits.momentum = method->momentum || (method->serve_rule && bucket->uncompressed);
  bits.moments = method->moments && !bucket->uncompressed;
  if (bucket->uncompressed)
    bits.options.bits = bits.options.max_bits = 1, bits.options.residual_copies = 2;
  bits.serving =
      (struct ob_serving){.rule = method->serve_rule, .lion = ob_make_lion_factors(optimizer)};
  bits.refused = dense.refused = &optimizer->refused;
  dense.counts = dense_counts;
  bits.from_servers = true;
  set_warmup_shape(optimizer, bucket, &dense);
  bits.output_dtype = dense.output_dtype = ONEBIT_FLOAT32; /* momentum, mean gradient */
  if (method->plans) {
    OB_TRY(method->plans(optimizer, bucket, &bits, &dense, count));
  } else {
    OB_TRY(ob_plan_create(optimizer->comm, status, &bits, count, &bucket->bits));
    OB_TRY(ob_plan_create(optimizer->comm, ONEBIT_OK, &dense, count, &bucket->dense));
  }
  ob_plan_start_timing(bucket->bits, ob_seconds);
  ob_plan_start_timing(bucket->dense, ob_seconds);
  return ob_agree(optimizer->comm, ob_bucket_allocate(optimizer, bucket), NULL, 0);
}

/* Completes a bucket once the addresses of its pieces are set. Collective. */
static onebit_status_t complete_bucket(onebit_optimizer_t optimizer, struct ob_bucket *bucket) {
  onebit_status_t status = bucket->masters ? ob_bucket_make_masters(optimizer, bucket) : ONEBIT_OK;
  if (status == ONEBIT_OK && optimizer->executor->create)
    status = optimizer->executor->create(optimizer, bucket);
  return ob_agree(optimizer->comm, status, NULL, 0);
}

/* Creates a bucket of consecutive or of uncompressed tensors. */
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
  OB_TRY(buckets_create_plans(optimizer, bucket, ONEBIT_OK, shape, counts, total));
  for (size_t t = 0, k = 0; t < optimizer->tensor_count; t++)
    if (optimizer->tensors[t].bucket == u)
      locate_piece(optimizer, bucket, k++, tensors, t, 0);
  return complete_bucket(optimizer, bucket);
}

/* Creates the bucket of one tensor, which is padded and cut as in profile deepspeed. */
static onebit_status_t create_padded_bucket(onebit_optimizer_t optimizer, size_t t,
                                            const onebit_tensor_t *tensors,
                                            struct ob_plan_shape *shape, size_t *counts) {
  struct ob_bucket *bucket = &optimizer->buckets[t];
  size_t ranks = (size_t)optimizer->comm->size;
  ob_plan_cut(shape, ranks, tensors[t].count, counts, counts + ranks);
  OB_TRY(buckets_create_plans(optimizer, bucket, ONEBIT_OK, shape, counts, tensors[t].count));
  for (size_t k = 0; k < shape->pieces; k++)
    locate_piece(optimizer, bucket, k, tensors, t, k * counts[0]);
  return complete_bucket(optimizer, bucket);
}

static void locate_fused_pieces(onebit_optimizer_t optimizer, struct ob_bucket *bucket,
                                const onebit_tensor_t *tensors, const struct fused *cut) {
  for (size_t k = 0; k < cut->pieces; k++)
    if (cut->real[k])
      locate_piece(optimizer, bucket, k, tensors, cut->tensor[k], cut->offset[k]);
    else
      locate_padding(optimizer, bucket, k);
}

/* Creates one bucket of all tensors, as in profile deepspeed. Dense messages omit the padding. */
static onebit_status_t create_fused_bucket(onebit_optimizer_t optimizer, size_t u,
                                           const onebit_tensor_t *tensors,
                                           const struct ob_plan_shape *shape) {
  struct ob_bucket *bucket = &optimizer->buckets[u];
  struct ob_plan_shape own = *shape;
  struct fused cut;
  onebit_status_t status = fused_cut_tensors(optimizer, u, &cut);
  own.pieces = cut.pieces;
  own.counts = cut.counts;
  own.segment_pieces = cut.segment_pieces;
  status = buckets_create_plans(optimizer, bucket, status, &own, cut.real, cut.total);
  if (status == ONEBIT_OK)
    locate_fused_pieces(optimizer, bucket, tensors, &cut);
  fused_release(&cut);
  return status == ONEBIT_OK ? complete_bucket(optimizer, bucket) : status;
}

onebit_status_t ob_buckets_create(onebit_optimizer_t optimizer, const onebit_tensor_t *tensors,
                                  struct ob_plan_shape *shape, size_t *counts) {
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    if (compresses_separately(optimizer))
      OB_TRY(create_padded_bucket(optimizer, u, tensors, shape, counts));
    else if (is_fused(optimizer, &optimizer->buckets[u]))
      OB_TRY(create_fused_bucket(optimizer, u, tensors, shape));
    else
      OB_TRY(create_bucket(optimizer, u, tensors, shape, counts));
  return ONEBIT_OK;
}

static void destroy_bucket(const struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  if (optimizer->executor && optimizer->executor->destroy)
    optimizer->executor->destroy(bucket);
  ob_bucket_release(optimizer, bucket);
  onebit_plan_destroy(bucket->parameters_back);
  onebit_plan_destroy(bucket->steps_back);
  onebit_plan_destroy(bucket->dense);
  onebit_plan_destroy(bucket->bits);
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
