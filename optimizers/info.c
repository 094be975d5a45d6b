/* What an optimizer has to tell about itself. */
#include <math.h>

#include "base/error.h"
#include "base/memory.h"
#include "optimizers/optimizer.h"

static double square_sum(const float *values, size_t count) {
  double sum = 0;
  for (size_t i = 0; i < count; i++)
    sum += (double)values[i] * (double)values[i];
  return sum;
}

static void add_message(const struct onebit_plan *plan, struct ob_message_shape shape,
                        unsigned char *message, double *sum) {
  struct ob_view view = ob_message_view(message, &shape);
  size_t piece = 0;
  for (size_t b = 0; b < shape.blocks; b++) {
    double scale = (double)(shape.one_scale ? view.header->scale : view.scales[b]);
    struct ob_block block = ob_layout_block(&plan->layout, shape.first + b, &piece);
    *sum += scale * scale * (double)block.valid;
  }
}

/* The momentum that came with the last messages: every element of a block is +-scale. `room` is for
 * a copy of one of them, which may be in memory of a device. */
static onebit_status_t message_square_sum(const struct onebit_plan *plan, unsigned char *room,
                                          double *sum) {
  *sum = 0;
  for (size_t source = 0; source < ob_plan_sources(plan); source++)
    for (size_t chunk = 0; chunk < plan->chunks; chunk++) {
      struct ob_message_shape shape = ob_plan_message(plan, source, chunk);
      OB_TRY(plan->place->messages->copy(room, ob_plan_result(plan, false, source, chunk),
                                         ob_message_bytes(&shape)));
      add_message(plan, shape, room, sum);
    }
  return ONEBIT_OK;
}

static double error_square_sum(const struct onebit_plan *plan, const float *all_values,
                               const float *scales) {
  const struct ob_kept *kept = &plan->worker;
  double sum = 0;
  size_t piece = 0;
  size_t first, end;
  ob_plan_compressed(plan, &first, &end);
  for (size_t b = first; b < end; b++) {
    struct ob_block block = ob_layout_block(&plan->layout, b, &piece);
    const float *values = all_values + (block.word - kept->first_word) * OB_LANES;
    float scale = scales[kept->one_scale ? 0 : b - kept->first];
    for (size_t i = 0; i < block.count; i++) {
      double error = (double)ob_kept_error(values[i], scale);
      sum += error * error;
    }
  }
  return sum;
}

/* As a kept value the momentum of a float array is stored times beta1 from the freeze on. */
static double array_square_sum(const struct onebit_optimizer *optimizer, const struct ob_unit *unit,
                               const float *momentum) {
  double sum = square_sum(momentum, unit->bits->layout.words * OB_LANES);
  double beta1 = (double)(float)optimizer->moments.beta1;
  bool scaled = ob_optimizer_is_frozen(optimizer) && !unit->uncompressed;
  return scaled ? sum / (beta1 * beta1) : sum;
}

/* Until the first compressed step the momentum is still the array, and the kept error is
 * nothing. */
static bool momentum_is_array(const struct onebit_optimizer *optimizer,
                              const struct ob_unit *unit) {
  return unit->uncompressed || !ob_optimizer_is_frozen(optimizer) ||
         optimizer->steps == optimizer->frozen_at || !ob_optimizer_compresses(optimizer);
}

static onebit_status_t momentum_square_sum(const struct onebit_plan *plan, double *sum) {
  unsigned char *room = ob_allocate(1, plan->stride);
  onebit_status_t status = room ? message_square_sum(plan, room, sum)
                                : ob_error(ONEBIT_ERROR_MEMORY, "no memory for a message");
  ob_release(room);
  return status;
}

/* Where what is exchanged is no momentum. Sharded, of the share that this rank serves. */
static onebit_status_t own_array_square_sum(const struct ob_unit *unit, double *sum) {
  const struct ob_memory *memory = unit->bits->place->kept;
  const size_t count = unit->words * OB_LANES;
  float *copy = memory == &ob_memory_host ? NULL : ob_allocate(count, sizeof *copy);
  const float *values = copy ? copy : unit->arrays[OB_MOMENTUM];
  onebit_status_t status = ONEBIT_OK;
  if (memory != &ob_memory_host)
    status = copy ? memory->copy(copy, unit->arrays[OB_MOMENTUM], count * sizeof *copy)
                  : ob_error(ONEBIT_ERROR_MEMORY, "no memory for %zu values", count);
  if (status == ONEBIT_OK)
    *sum = square_sum(values, count);
  ob_release(copy);
  return status;
}

/* Of one unit, the squares. */
static onebit_status_t add_squares(const struct onebit_optimizer *optimizer,
                                   const struct ob_unit *unit, onebit_optimizer_info_t *info) {
  const struct onebit_plan *plan = unit->bits;
  float *values, *scales;
  double momentum = 0;
  onebit_status_t status = ob_kept_view(&plan->worker, &values, &scales);
  if (status == ONEBIT_OK && !optimizer->method->momentum) {
    info->error_norm += error_square_sum(plan, values, scales);
    status = own_array_square_sum(unit, &momentum);
  } else if (status == ONEBIT_OK && momentum_is_array(optimizer, unit)) {
    momentum = array_square_sum(optimizer, unit, values);
  } else if (status == ONEBIT_OK) {
    info->error_norm += error_square_sum(plan, values, scales);
    status = momentum_square_sum(plan, &momentum);
  }
  info->momentum_norm += momentum;
  ob_kept_end_view(&plan->worker, values, scales);
  return status;
}

static onebit_status_t add_norms(const struct onebit_optimizer *optimizer,
                                 onebit_optimizer_info_t *info) {
  for (size_t u = 0; u < optimizer->unit_count; u++)
    OB_TRY(add_squares(optimizer, &optimizer->units[u], info));
  info->momentum_norm = sqrt(info->momentum_norm);
  info->error_norm = sqrt(info->error_norm);
  return ONEBIT_OK;
}

static uint64_t wire_of(const struct onebit_plan *plan) { return plan ? plan->wire_bytes : 0; }

static uint64_t memory_of(const struct onebit_plan *plan) { return plan ? plan->memory_bytes : 0; }

/* What a unit's steps send, and its plans take. */
static void add_unit(const struct onebit_optimizer *optimizer, const struct ob_unit *unit,
                     onebit_optimizer_info_t *info) {
  const struct onebit_plan *back = unit->steps_back ? unit->steps_back : unit->parameters_back;
  bool compressed = ob_optimizer_compresses(optimizer) && !unit->uncompressed;
  uint64_t dense = wire_of(unit->dense) + wire_of(unit->parameters_back);
  info->warmup_bytes += dense;
  info->compressed_bytes += compressed ? wire_of(unit->bits) + wire_of(back) : dense;
  info->memory_bytes += memory_of(unit->bits) + memory_of(unit->dense) +
                        memory_of(unit->steps_back) + memory_of(unit->parameters_back);
}

static void add_bytes(const struct onebit_optimizer *optimizer, onebit_optimizer_info_t *info) {
  const struct onebit_plan *sums = optimizer->method->sharded ? ob_shards_sums(optimizer) : NULL;
  info->warmup_bytes = wire_of(optimizer->squares) + wire_of(sums);
  info->compressed_bytes = wire_of(optimizer->squares);
  info->memory_bytes += memory_of(optimizer->squares) + memory_of(sums);
  for (size_t u = 0; u < optimizer->unit_count; u++)
    add_unit(optimizer, &optimizer->units[u], info);
}

onebit_status_t onebit_optimizer_get_info(onebit_optimizer_t optimizer,
                                          onebit_optimizer_info_t *info) {
  if (!optimizer || !info)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is NULL", optimizer ? "info" : "optimizer");
  if (info->size != sizeof *info)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "info->size is %zu, not %zu", info->size, sizeof *info);
  OB_TRY(ob_optimizer_catch_up(optimizer));
  *info = (onebit_optimizer_info_t){
      .size = sizeof *info,
      .stage = ob_optimizer_is_frozen(optimizer) ? ONEBIT_STAGE_COMPRESSED : ONEBIT_STAGE_WARMUP,
      .steps = optimizer->steps,
      .skipped = optimizer->skipped,
      .freeze_step = optimizer->frozen_at,
      .variance_ratio = optimizer->variance_ratio,
      .memory_bytes = optimizer->own_bytes,
      .name = optimizer->method->name,
      .loss_scale = optimizer->loss_scale,
      .gradient_norm = optimizer->gradient_norm,
      .synchronized = !(optimizer->method->apart && optimizer->method->apart(optimizer)),
      .exchanges = {optimizer->exchanges[0], optimizer->exchanges[1], optimizer->exchanges[2]},
  };
  add_bytes(optimizer, info);
  return add_norms(optimizer, info);
}
