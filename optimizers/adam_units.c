/* The units of 1-bit Adam: which tensors are exchanged together, and the memory of that. */
#include "base/error.h"
#include "base/memory.h"
#include "collectives/agree.h"
#include "optimizers/adam.h"

static bool separate(const struct onebit_optimizer *optimizer) {
  return optimizer->options.profile == ONEBIT_PROFILE_DEEPSPEED;
}

/* A bucket is filled from the last tensor down, since backward passes come to that one first, and
 * is closed when it is large enough; but tensors without elements open no other one. Numbers the
 * buckets from the last one on, and says how many there are. */
static size_t fill_buckets(const onebit_tensor_t *tensors, size_t count, size_t bucket_size,
                           struct ob_adam_tensor *filled) {
  size_t bucket = 0, elements = 0;
  for (size_t t = count; t-- > 0;) {
    if (bucket_size && elements >= bucket_size && tensors[t].count) {
      bucket++;
      elements = 0;
    }
    elements += tensors[t].count;
    filled[t] = (struct ob_adam_tensor){.unit = bucket, .count = tensors[t].count};
  }
  return bucket + 1;
}

onebit_status_t ob_adam_group(onebit_optimizer_t optimizer, const onebit_tensor_t *tensors,
                              size_t count) {
  optimizer->tensors = ob_adam_take(optimizer, count, sizeof *optimizer->tensors);
  if (!optimizer->tensors)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for an optimizer of %zu tensors", count);
  size_t buckets = fill_buckets(tensors, count, optimizer->options.bucket_size, optimizer->tensors);
  size_t units = separate(optimizer) ? count : buckets;
  optimizer->units = ob_adam_take(optimizer, units, sizeof *optimizer->units);
  if (!optimizer->units)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for an optimizer of %zu tensors", count);
  optimizer->tensor_count = count;
  optimizer->unit_count = units;
  for (size_t t = 0; t < count; t++) {
    struct ob_adam_tensor *tensor = &optimizer->tensors[t];
    tensor->unit = separate(optimizer) ? t : buckets - 1 - tensor->unit;
    optimizer->units[tensor->unit].filled += tensor->count > 0;
  }
  return ONEBIT_OK;
}

static void *take_from(onebit_optimizer_t optimizer, const struct ob_memory *memory, size_t count,
                       size_t size) {
  optimizer->own_bytes += count * size;
  return memory->allocate(count, size);
}

/* Everything of a unit but its plans. */
static onebit_status_t allocate_unit(onebit_optimizer_t optimizer, struct ob_adam_unit *unit,
                                     size_t pieces, size_t words, size_t blocks) {
  const struct ob_memory *memory = unit->bits->place->kept;
  unit->variance = take_from(optimizer, memory, words, OB_LANES * sizeof(float));
  unit->block_sums = take_from(optimizer, memory, blocks, sizeof(double));
  unit->parameters = ob_adam_take(optimizer, pieces, sizeof *unit->parameters);
  unit->gradients = ob_adam_take(optimizer, pieces, sizeof *unit->gradients);
  unit->means = ob_adam_take(optimizer, pieces, sizeof *unit->means);
  unit->factors = ob_adam_take(optimizer, pieces, sizeof(float));
  unit->weight_decays = ob_adam_take(optimizer, pieces, sizeof(float));
  unit->learning_rates = ob_adam_take(optimizer, pieces, sizeof(float));
  if (unit->variance && unit->block_sums && unit->parameters && unit->gradients && unit->means &&
      unit->factors && unit->weight_decays && unit->learning_rates)
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_MEMORY, "no memory for %zu variances", words * OB_LANES);
}

/* Where piece k of the unit lies: it begins `offset` elements into its tensor. */
static void place_piece(struct ob_adam_unit *unit, size_t k, const onebit_tensor_t *tensor,
                        size_t offset) {
  const struct ob_piece *piece = &unit->bits->layout.piece[k];
  bool real = piece->valid > 0;
  unit->parameters[k] = real ? tensor->parameter + offset : NULL;
  unit->gradients[k] = real ? tensor->gradient + offset : NULL;
  unit->means[k] =
      unit->bits->worker.values[!unit->bits->worker.now] + piece->first_word * OB_LANES;
  float factor = tensor->learning_rate_factor;
  unit->factors[k] = factor == 0 ? 1 : factor;
  unit->weight_decays[k] = tensor->weight_decay;
}

/* The plans of a unit: collective. */
static onebit_status_t create_plans(onebit_optimizer_t optimizer, struct ob_adam_unit *unit,
                                    const struct ob_plan_shape *shape, size_t count) {
  struct ob_plan_shape bits = *shape, dense = *shape;
  bits.momentum = true;
  dense.windowed = true;
  dense.one_scale = dense.share_a_piece = false;
  dense.options.wire = ONEBIT_WIRE_DENSE;
  dense.options.profile = ONEBIT_PROFILE_DEFAULT;
  OB_TRY(ob_plan_create(optimizer->comm, ONEBIT_OK, &bits, count, &unit->bits));
  OB_TRY(ob_plan_create(optimizer->comm, ONEBIT_OK, &dense, count, &unit->dense));
  const struct ob_layout *layout = &unit->bits->layout;
  onebit_status_t status =
      allocate_unit(optimizer, unit, layout->pieces, layout->words, layout->blocks);
  return ob_agree(optimizer->comm, status, NULL, 0);
}

/* What the place needs to know of the unit, now that its pieces are placed: collective. */
static onebit_status_t complete(onebit_optimizer_t optimizer, struct ob_adam_unit *unit) {
  return ob_agree(optimizer->comm, optimizer->place->create(optimizer, unit), NULL, 0);
}

/* A bucket: the tensors from *first on, which is moved behind them. */
static onebit_status_t create_bucket(onebit_optimizer_t optimizer, size_t unit,
                                     const onebit_tensor_t *tensors, size_t *first,
                                     struct ob_plan_shape *shape, size_t *counts) {
  size_t total = 0, pieces = 0;
  for (size_t t = *first; t < optimizer->tensor_count && optimizer->tensors[t].unit == unit; t++)
    total += counts[pieces++] = tensors[t].count;
  shape->pieces = pieces;
  shape->counts = counts;
  OB_TRY(create_plans(optimizer, &optimizer->units[unit], shape, total));
  for (size_t k = 0; k < pieces; k++)
    place_piece(&optimizer->units[unit], k, &tensors[*first + k], 0);
  *first += pieces;
  return complete(optimizer, &optimizer->units[unit]);
}

/* A tensor, padded and cut as profile deepspeed has it. */
static onebit_status_t create_padded(onebit_optimizer_t optimizer, size_t unit,
                                     const onebit_tensor_t *tensor, struct ob_plan_shape *shape,
                                     size_t *counts) {
  size_t ranks = (size_t)optimizer->comm->size;
  ob_plan_cut(shape, ranks, tensor->count, counts, counts + ranks);
  OB_TRY(create_plans(optimizer, &optimizer->units[unit], shape, tensor->count));
  for (size_t k = 0; k < shape->pieces; k++)
    place_piece(&optimizer->units[unit], k, tensor, k * counts[0]);
  return complete(optimizer, &optimizer->units[unit]);
}

onebit_status_t ob_adam_create_units(onebit_optimizer_t optimizer, const onebit_tensor_t *tensors,
                                     struct ob_plan_shape *shape, size_t *counts) {
  size_t first = 0;
  for (size_t u = 0; u < optimizer->unit_count; u++)
    if (separate(optimizer))
      OB_TRY(create_padded(optimizer, u, &tensors[u], shape, counts));
    else
      OB_TRY(create_bucket(optimizer, u, tensors, &first, shape, counts));
  return ONEBIT_OK;
}

static void destroy_unit(const struct ob_adam_place *place, struct ob_adam_unit *unit) {
  if (place)
    place->destroy(unit);
  if (unit->bits) {
    unit->bits->place->kept->release(unit->variance);
    unit->bits->place->kept->release(unit->block_sums);
  }
  onebit_plan_destroy(unit->dense);
  onebit_plan_destroy(unit->bits);
  ob_release(unit->parameters);
  ob_release((void *)unit->gradients);
  ob_release(unit->means);
  ob_release(unit->factors);
  ob_release(unit->weight_decays);
  ob_release(unit->learning_rates);
}

void ob_adam_destroy_units(onebit_optimizer_t optimizer) {
  for (size_t u = 0; u < optimizer->unit_count; u++)
    destroy_unit(optimizer->place, &optimizer->units[u]);
  ob_release(optimizer->units);
  ob_release(optimizer->tensors);
}
