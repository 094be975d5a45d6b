/* Units: which tensors are exchanged together, and the memory of that. */
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

static bool is_fused(const struct onebit_optimizer *optimizer, const struct ob_unit *unit) {
  return optimizer->options.profile == ONEBIT_PROFILE_DEEPSPEED && optimizer->method->fused &&
         !unit->uncompressed;
}

static bool is_uncompressed(const struct onebit_optimizer *optimizer,
                            const onebit_tensor_t *tensor) {
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
    plain += is_uncompressed(optimizer, &tensors[t]);
    if (is_uncompressed(optimizer, &tensors[t]))
      continue;
    if (bucket_size && elements >= bucket_size && tensors[t].count) {
      bucket++;
      elements = 0;
    }
    elements += tensors[t].count;
    optimizer->tensors[t].unit = bucket;
  }
  size_t buckets = plain < count || !plain ? bucket + 1 : 0;
  for (size_t t = 0; plain && t < count; t++)
    if (is_uncompressed(optimizer, &tensors[t]))
      optimizer->tensors[t].unit = buckets;
  return buckets + (plain > 0);
}

onebit_status_t ob_units_group(onebit_optimizer_t optimizer, const onebit_tensor_t *tensors,
                               size_t count) {
  optimizer->tensors = ob_optimizer_take(optimizer, count, sizeof *optimizer->tensors);
  if (!optimizer->tensors)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for an optimizer of %zu tensors", count);
  size_t buckets = fill_buckets(optimizer, tensors, count);
  size_t units = separate(optimizer) ? count : buckets;
  optimizer->units = ob_optimizer_take(optimizer, units, sizeof *optimizer->units);
  if (!optimizer->units)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for an optimizer of %zu tensors", count);
  optimizer->tensor_count = count;
  optimizer->unit_count = units;
  for (size_t t = 0; t < count; t++) {
    struct ob_tensor *tensor = &optimizer->tensors[t];
    tensor->first = t ? tensor[-1].first + tensor[-1].count : 0;
    tensor->count = tensors[t].count;
    tensor->unit = separate(optimizer) ? t : buckets - 1 - tensor->unit;
    optimizer->units[tensor->unit].filled += tensor->count > 0;
    optimizer->units[tensor->unit].uncompressed = is_uncompressed(optimizer, &tensors[t]);
  }
  return ONEBIT_OK;
}

static void *take_from(onebit_optimizer_t optimizer, const struct ob_memory *memory, size_t count,
                       size_t size) {
  optimizer->own_bytes += count * size;
  return memory->allocate(count, size);
}

static onebit_status_t no_memory(const struct ob_layout *layout) {
  return ob_error(ONEBIT_ERROR_MEMORY, "no memory for the state of %zu parameters",
                  layout->words * OB_LANES);
}

/* The slots that are arrays of the unit's own. */
static unsigned arrays_of(const struct onebit_optimizer *optimizer, const struct ob_unit *unit) {
  return optimizer->method->arrays | (unit->uncompressed ? optimizer->method->dense_arrays : 0);
}

/* The arrays that are as long as the layout, and the sums. */
static onebit_status_t allocate_arrays(onebit_optimizer_t optimizer, struct ob_unit *unit) {
  const struct ob_layout *layout = &unit->bits->geometry.layout;
  const struct ob_memory *memory = unit->bits->executor->residuals;
  const unsigned own = arrays_of(optimizer, unit);
  const size_t size = OB_LANES * sizeof(float);
  /* Not where they are replaced: what is there is released, whatever came in between. */
  unit->arrays[OB_MOMENTUM] = own & OB_MASK(OB_MOMENTUM) ? NULL : unit->bits->worker.values[0];
  unit->arrays[OB_SCRATCH] = own & OB_MASK(OB_SCRATCH) ? NULL : unit->bits->worker.values[1];
  for (int slot = 0; slot < OB_ARRAYS; slot++)
    if (own & OB_MASK(slot)) {
      unit->arrays[slot] = take_from(optimizer, memory, unit->words, size);
      if (!unit->arrays[slot])
        return no_memory(layout);
    }
  if (optimizer->options.parameter_dtype != ONEBIT_FLOAT32) {
    unit->masters = take_from(optimizer, memory, unit->words, size);
    if (!unit->masters)
      return no_memory(layout);
  }
  for (int k = 0; k < OB_SUMS; k++) {
    unit->sums[k] = take_from(optimizer, memory, layout->blocks, sizeof(double));
    if (!unit->sums[k])
      return no_memory(layout);
  }
  return ONEBIT_OK;
}

static void set_extent(const struct onebit_optimizer *optimizer, struct ob_unit *unit) {
  const struct ob_layout *layout = &unit->bits->geometry.layout;
  size_t first = 0, end = layout->blocks;
  if (optimizer->method->sharded)
    ob_plan_share(unit->bits, &first, &end);
  unit->first_block = first;
  unit->blocks = end - first;
  unit->first_word = ob_layout_word(layout, first);
  unit->words = ob_layout_word(layout, end) - unit->first_word;
}

/* Everything of a unit but its plans. */
static onebit_status_t allocate_unit(onebit_optimizer_t optimizer, struct ob_unit *unit) {
  size_t pieces = unit->bits->geometry.layout.pieces;
  set_extent(optimizer, unit);
  unit->parameters = ob_optimizer_take(optimizer, pieces, sizeof *unit->parameters);
  unit->copies = ob_optimizer_take(optimizer, pieces, sizeof *unit->copies);
  unit->gradients = ob_optimizer_take(optimizer, pieces, sizeof *unit->gradients);
  unit->means = ob_optimizer_take(optimizer, pieces, sizeof *unit->means);
  unit->factors = ob_optimizer_take(optimizer, pieces, sizeof(float));
  unit->weight_decays = ob_optimizer_take(optimizer, pieces, sizeof(float));
  unit->learning_rates = ob_optimizer_take(optimizer, pieces, sizeof(float));
  unit->scalings = ob_optimizer_take(optimizer, pieces, sizeof(float));
  unit->tensor_of = ob_optimizer_take(optimizer, pieces, sizeof *unit->tensor_of);
  if (!unit->parameters || !unit->copies || !unit->gradients || !unit->means || !unit->factors ||
      !unit->weight_decays || !unit->learning_rates || !unit->scalings || !unit->tensor_of)
    return no_memory(&unit->bits->geometry.layout);
  return allocate_arrays(optimizer, unit);
}

/* --- Where pieces lie */

static const void *gradient_at(const struct onebit_optimizer *optimizer, const void *gradient,
                               size_t offset) {
  size_t bytes = offset * ob_dtype_size(optimizer->options.gradient_dtype);
  return gradient ? (const char *)gradient + bytes : NULL;
}

/* The arrays of a piece that is not all padding. Of a share's master values a piece has but a part:
 * passes know where they lie. */
static void place_arrays(struct onebit_optimizer *optimizer, struct ob_unit *unit, size_t k,
                         const onebit_tensor_t *tensor, size_t offset) {
  size_t word = unit->bits->geometry.layout.piece[k].first_word;
  char *caller =
      (char *)tensor->parameter + offset * ob_dtype_size(optimizer->options.parameter_dtype);
  unit->gradients[k] = gradient_at(optimizer, tensor->gradient, offset);
  if (unit->masters || optimizer->method->sharded)
    unit->copies[k] = caller;
  if (unit->masters) {
    unit->parameters[k] = optimizer->method->sharded ? NULL : unit->masters + word * OB_LANES;
  } else {
    unit->parameters[k] = (float *)(void *)caller;
  }
}

/* Where piece k of the unit lies: it begins `offset` elements into tensor t. */
static void place_piece(struct onebit_optimizer *optimizer, struct ob_unit *unit, size_t k,
                        const onebit_tensor_t *tensors, size_t t, size_t offset) {
  const struct ob_piece *piece = &unit->bits->geometry.layout.piece[k];
  const onebit_tensor_t *tensor = &tensors[t];
  if (piece->valid)
    place_arrays(optimizer, unit, k, tensor, offset);
  if (!optimizer->method->sharded)
    unit->means[k] = unit->arrays[OB_SCRATCH] + piece->first_word * OB_LANES;
  float factor = tensor->learning_rate_factor;
  unit->factors[k] = factor == 0 ? 1 : factor;
  unit->weight_decays[k] = tensor->weight_decay;
  unit->scalings[k] = 1;
  unit->tensor_of[k] = t;
  if (offset == 0)
    optimizer->tensors[t].first_block = piece->first_block;
  optimizer->tensors[t].end_block = piece[1].first_block;
}

/* Padding that is no tensor's: its momentum stays as it is. */
static void place_padding(struct onebit_optimizer *optimizer, struct ob_unit *unit, size_t k) {
  unit->means[k] =
      unit->arrays[OB_SCRATCH] + unit->bits->geometry.layout.piece[k].first_word * OB_LANES;
  unit->factors[k] = 1;
  unit->tensor_of[k] = optimizer->tensor_count;
}

/* How far into its tensor a piece begins: pieces of a tensor follow each other. */
static size_t offset_of(const struct ob_unit *unit, size_t piece) {
  size_t offset = 0;
  for (size_t k = piece; k-- > 0 && unit->tensor_of[k] == unit->tensor_of[piece];)
    offset += unit->bits->geometry.layout.piece[k].count;
  return offset;
}

onebit_status_t ob_units_set_gradient(onebit_optimizer_t optimizer, size_t tensor,
                                      const void *gradient) {
  struct ob_unit *unit = &optimizer->units[optimizer->tensors[tensor].unit];
  for (size_t k = 0; k < unit->bits->geometry.layout.pieces; k++) {
    if (unit->tensor_of[k] != tensor || !unit->bits->geometry.layout.piece[k].valid)
      continue;
    unit->gradients[k] = gradient_at(optimizer, gradient, offset_of(unit, k));
    OB_TRY(optimizer->place->repoint(optimizer, unit, k));
  }
  return ONEBIT_OK;
}

/* The plans of a unit: collective. `status` is how this rank fares so far. Messages that are dense
 * have other elements of the pieces. */
static onebit_status_t create_plans(onebit_optimizer_t optimizer, struct ob_unit *unit,
                                    onebit_status_t status, const struct ob_plan_shape *shape,
                                    const size_t *dense_counts, size_t count) {
  const struct ob_method *method = optimizer->method;
  struct ob_plan_shape bits = *shape, dense = *shape;
  /* Of what is uncompressed all of the kept values are momentum and mean gradient, in one piece. */
  bits.momentum = method->momentum || (method->serve_rule && unit->uncompressed);
  bits.moments = method->moments && !unit->uncompressed;
  bits.serving =
      (struct ob_serving){.rule = method->serve_rule, .lion = ob_lion_factors_of(optimizer)};
  dense.counts = dense_counts;
  bits.served = true;
  dense.windowed = true;
  dense.one_scale = dense.share_a_piece = false;
  dense.share_pieces = NULL;
  dense.options.wire = ONEBIT_WIRE_DENSE;
  dense.options.profile = ONEBIT_PROFILE_DEFAULT;
  bits.output_dtype = dense.output_dtype = ONEBIT_FLOAT32; /* momentum, mean gradient */
  if (method->plans) {
    OB_TRY(method->plans(optimizer, unit, &bits, &dense, count));
  } else {
    OB_TRY(ob_plan_create(optimizer->comm, status, &bits, count, &unit->bits));
    OB_TRY(ob_plan_create(optimizer->comm, ONEBIT_OK, &dense, count, &unit->dense));
  }
  unit->bits->clocked = unit->dense->clocked = true;
  return ob_agree(optimizer->comm, allocate_unit(optimizer, unit), NULL, 0);
}

/* Master values of `count` elements that lie in the kind of memory that the unit's arrays are in;
 * `room` on the host is for MASTERS_AT_ONCE, in their type and then as float32. */
static onebit_status_t convert(const struct ob_memory *memory, onebit_dtype_t dtype, float *master,
                               const uint16_t *parameter, size_t count, float *room) {
  uint16_t *given = (uint16_t *)(void *)(room + MASTERS_AT_ONCE);
  for (size_t at = 0; at < count; at += MASTERS_AT_ONCE) {
    size_t some = count - at < MASTERS_AT_ONCE ? count - at : MASTERS_AT_ONCE;
    OB_TRY(memory->copy(given, parameter + at, some * sizeof *given));
    for (size_t i = 0; i < some; i++)
      room[i] = ob_load(given, i, dtype);
    OB_TRY(memory->copy(master + at, room, some * sizeof *room));
  }
  return ONEBIT_OK;
}

/* Of a piece, what the unit has master values of. */
static onebit_status_t fill_piece(const struct onebit_optimizer *optimizer, struct ob_unit *unit,
                                  size_t k, float *room) {
  const struct ob_layout *layout = &unit->bits->geometry.layout;
  const struct ob_piece *piece = &layout->piece[k];
  size_t first = unit->first_block, last = first + unit->blocks;
  first = piece->first_block > first ? piece->first_block : first;
  last = piece[1].first_block < last ? piece[1].first_block : last;
  if (!unit->copies[k] || first >= last)
    return ONEBIT_OK;
  size_t begin = (first - piece->first_block) * layout->block;
  size_t end = (last - piece->first_block) * layout->block;
  size_t word = ob_layout_word(layout, first) - unit->first_word;
  end = end < piece->valid ? end : piece->valid;
  return convert(unit->bits->executor->residuals, optimizer->options.parameter_dtype,
                 unit->masters + word * OB_LANES, (const uint16_t *)unit->copies[k] + begin,
                 end > begin ? end - begin : 0, room);
}

static onebit_status_t fill_masters(const struct onebit_optimizer *optimizer, struct ob_unit *unit,
                                    float *room) {
  for (size_t k = 0; k < unit->bits->geometry.layout.pieces; k++)
    OB_TRY(fill_piece(optimizer, unit, k, room));
  return ONEBIT_OK;
}

/* This happens once: the host converts for a device too, a part at a time. */
static onebit_status_t make_masters(const struct onebit_optimizer *optimizer,
                                    struct ob_unit *unit) {
  float *room = ob_allocate(MASTERS_AT_ONCE, sizeof(float) + sizeof(uint16_t));
  onebit_status_t status =
      room ? fill_masters(optimizer, unit, room) : no_memory(&unit->bits->geometry.layout);
  ob_release(room);
  return status;
}

/* What is left once the unit's pieces are placed: collective. */
static onebit_status_t complete(onebit_optimizer_t optimizer, struct ob_unit *unit) {
  onebit_status_t status = unit->masters ? make_masters(optimizer, unit) : ONEBIT_OK;
  if (status == ONEBIT_OK)
    status = optimizer->place->create(optimizer, unit);
  return ob_agree(optimizer->comm, status, NULL, 0);
}

/* A bucket, or the tensors that stay uncompressed. */
static onebit_status_t create_bucket(onebit_optimizer_t optimizer, size_t u,
                                     const onebit_tensor_t *tensors, struct ob_plan_shape *shape,
                                     size_t *counts) {
  struct ob_unit *unit = &optimizer->units[u];
  size_t total = 0, pieces = 0;
  for (size_t t = 0; t < optimizer->tensor_count; t++)
    if (optimizer->tensors[t].unit == u)
      total += counts[pieces++] = tensors[t].count;
  shape->pieces = pieces;
  shape->counts = counts;
  OB_TRY(create_plans(optimizer, unit, ONEBIT_OK, shape, counts, total));
  for (size_t t = 0, k = 0; t < optimizer->tensor_count; t++)
    if (optimizer->tensors[t].unit == u)
      place_piece(optimizer, unit, k++, tensors, t, 0);
  return complete(optimizer, unit);
}

/* A tensor, padded and cut as profile deepspeed has it. */
static onebit_status_t create_padded(onebit_optimizer_t optimizer, size_t t,
                                     const onebit_tensor_t *tensors, struct ob_plan_shape *shape,
                                     size_t *counts) {
  struct ob_unit *unit = &optimizer->units[t];
  size_t ranks = (size_t)optimizer->comm->size;
  ob_plan_cut(shape, ranks, tensors[t].count, counts, counts + ranks);
  OB_TRY(create_plans(optimizer, unit, ONEBIT_OK, shape, counts, tensors[t].count));
  for (size_t k = 0; k < shape->pieces; k++)
    place_piece(optimizer, unit, k, tensors, t, k * counts[0]);
  return complete(optimizer, unit);
}

static void place_fused(onebit_optimizer_t optimizer, struct ob_unit *unit,
                        const onebit_tensor_t *tensors, const struct ob_fused *cut) {
  for (size_t k = 0; k < cut->pieces; k++)
    if (cut->real[k])
      place_piece(optimizer, unit, k, tensors, cut->tensor[k], cut->offset[k]);
    else
      place_padding(optimizer, unit, k);
}

/* All tensors in one buffer, likewise. Dense messages go without the padding. */
static onebit_status_t create_fused(onebit_optimizer_t optimizer, size_t u,
                                    const onebit_tensor_t *tensors,
                                    const struct ob_plan_shape *shape) {
  struct ob_unit *unit = &optimizer->units[u];
  struct ob_plan_shape own = *shape;
  struct ob_fused cut;
  onebit_status_t status = ob_fused_cut(optimizer, u, &cut);
  own.pieces = cut.pieces;
  own.counts = cut.counts;
  own.share_pieces = cut.share_pieces;
  status = create_plans(optimizer, unit, status, &own, cut.real, cut.total);
  if (status == ONEBIT_OK)
    place_fused(optimizer, unit, tensors, &cut);
  ob_fused_release(&cut);
  return status == ONEBIT_OK ? complete(optimizer, unit) : status;
}

onebit_status_t ob_units_create(onebit_optimizer_t optimizer, const onebit_tensor_t *tensors,
                                struct ob_plan_shape *shape, size_t *counts) {
  for (size_t u = 0; u < optimizer->unit_count; u++)
    if (separate(optimizer))
      OB_TRY(create_padded(optimizer, u, tensors, shape, counts));
    else if (is_fused(optimizer, &optimizer->units[u]))
      OB_TRY(create_fused(optimizer, u, tensors, shape));
    else
      OB_TRY(create_bucket(optimizer, u, tensors, shape, counts));
  return ONEBIT_OK;
}

static void release_arrays(const struct onebit_optimizer *optimizer, struct ob_unit *unit) {
  const struct ob_memory *memory = unit->bits ? unit->bits->executor->residuals : NULL;
  for (int slot = 0; memory && slot < OB_ARRAYS; slot++)
    if (arrays_of(optimizer, unit) & OB_MASK(slot))
      memory->release(unit->arrays[slot]);
  for (int k = 0; memory && k < OB_SUMS; k++)
    memory->release(unit->sums[k]);
  if (memory)
    memory->release(unit->masters);
}

static void destroy_unit(const struct onebit_optimizer *optimizer, struct ob_unit *unit) {
  if (optimizer->place)
    optimizer->place->destroy(unit);
  release_arrays(optimizer, unit);
  onebit_plan_destroy(unit->parameters_back);
  onebit_plan_destroy(unit->steps_back);
  onebit_plan_destroy(unit->dense);
  onebit_plan_destroy(unit->bits);
  ob_release(unit->parameters);
  ob_release(unit->copies);
  ob_release((void *)unit->gradients);
  ob_release(unit->means);
  ob_release(unit->factors);
  ob_release(unit->weight_decays);
  ob_release(unit->learning_rates);
  ob_release(unit->scalings);
  ob_release(unit->tensor_of);
}

void ob_units_destroy(onebit_optimizer_t optimizer) {
  for (size_t u = 0; u < optimizer->unit_count; u++)
    destroy_unit(optimizer, &optimizer->units[u]);
  ob_release(optimizer->units);
  ob_release(optimizer->tensors);
}
