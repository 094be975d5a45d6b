/* Declares the state of an optimizer for checkpoints, and implements the calls that save and load
 * it. */
#include <math.h>
#include <string.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "onebit/checkpoint.h"
#include "optimizers/checkpoint/checkpoint.h"

/* --- State besides arrays ----------------------------------------------------------------------*/

enum ob_form ob_checkpoint_form(const struct onebit_optimizer *optimizer) {
  bool step = optimizer->moments.exchange == ONEBIT_ADAM_EXCHANGE_STEP;
  return step && ob_optimizer_compresses(optimizer) ? OB_FORM_STEP : OB_FORM_MOMENTUM;
}

size_t ob_checkpoint_hosts(const struct onebit_optimizer *optimizer) {
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    if (ob_plan_is_hierarchical(optimizer->buckets[u].bits))
      return (size_t)optimizer->comm->hosts.count;
  return 0;
}

/* Returns the address of number i in the scratch of the ladders; is->at and is->count describe the
 * whole scratch. */
static void *ladder_number(struct onebit_optimizer *optimizer, uint64_t i, struct ob_numbers *is) {
  static const struct {
    enum ob_numbers_kind kind;
    double min, max;
    size_t count;
  } rows[] = {{OB_NUMBERS_WHOLE, 1, OB_MAX_WIDTH, 2}, /* widths */
              {OB_NUMBERS_WHOLE, 0, 0x1p63, 6},
              {OB_NUMBERS_WHOLE, 0, OB_LADDER_FLAGS, 2},
              {OB_NUMBERS_REAL, 0, INFINITY, OB_LADDER_NUMBERS - 10}};
  uint64_t count = optimizer->ladders ? optimizer->list_count * OB_LADDER_NUMBERS : 0;
  size_t number = (size_t)(i % OB_LADDER_NUMBERS), k = 0;
  for (; number >= rows[k].count; k++)
    number -= rows[k].count;
  *is = (struct ob_numbers){rows[k].kind, optimizer->ladders, count, rows[k].min, rows[k].max};
  return i < count ? (uint64_t *)(void *)optimizer->ladders + i : NULL;
}

void *ob_checkpoint_number(struct onebit_optimizer *optimizer, enum ob_saved what, uint64_t i,
                           struct ob_numbers *is) {
  if (what == OB_SAVED_LADDERS)
    return ladder_number(optimizer, i, is);
  struct ob_numbers list[OB_MAX_NUMBERS] = {{.at = optimizer->norms, .count = optimizer->window}};
  size_t lists = 1;
  if (what == OB_SAVED_NUMBERS)
    lists = optimizer->method->numbers ? optimizer->method->numbers(optimizer, list) : 0;
  for (size_t k = 0; k < lists; i -= list[k++].count)
    if (i < list[k].count) {
      *is = list[k];
      return (char *)list[k].at + sizeof(uint64_t) * i;
    }
  return NULL;
}

uint64_t ob_checkpoint_numbers(struct onebit_optimizer *optimizer, enum ob_saved what) {
  struct ob_numbers is;
  uint64_t count = 0;
  while (ob_checkpoint_number(optimizer, what, count, &is))
    count += is.count;
  return count;
}

static const void *checkpoint_optimizer_number_at(void *optimizer, enum ob_saved what, uint64_t i) {
  struct ob_numbers is;
  return ob_checkpoint_number(optimizer, what, i, &is);
}

/* --- The declaration of an optimizer's state ---------------------------------------------------*/

static onebit_status_t checkpoint_optimizer_describe(struct ob_saving *saving) {
  struct onebit_optimizer *optimizer = saving->state->object;
  struct ob_part_header *header = &saving->header;
  const struct ob_hosts *hosts = &optimizer->comm->hosts;
  const enum ob_stage stage = ob_stage_of(optimizer);
  const bool norms = ob_has_section(optimizer, stage, OB_SAVED_NORMS);
  header->version = optimizer->ladders ? OB_PART_VERSION : OB_PART_VERSION_PLAIN;
  header->profile = (uint32_t)optimizer->options.profile;
  header->hosts = (uint32_t)ob_checkpoint_hosts(optimizer);
  header->stage = (uint32_t)stage;
  header->form = (uint32_t)ob_checkpoint_form(optimizer);
  header->shards = (uint32_t)optimizer->moments.shards;
  header->apart = optimizer->method->apart && optimizer->method->apart(optimizer);
  header->steps = optimizer->steps;
  header->frozen_at = optimizer->frozen_at;
  memcpy(header->exchanges, optimizer->exchanges, sizeof optimizer->exchanges);
  header->variance_ratio = optimizer->variance_ratio;
  header->window = norms ? optimizer->window : 0;
  header->numbers = ob_checkpoint_numbers(optimizer, OB_SAVED_NUMBERS);
  header->host = header->hosts ? (uint32_t)hosts->host : 0;
  header->local_rank = header->hosts ? (uint32_t)hosts->local_rank : 0;
  header->skipped = optimizer->skipped;
  header->good_steps = optimizer->good_steps;
  header->loss_scale = optimizer->options.initial_loss_scale != 0 ? optimizer->loss_scale : 0;
  header->gradient_norm = optimizer->gradient_norm;
  for (size_t t = 0; optimizer->ladders && t < optimizer->tensor_count; t++)
    optimizer->ladders[t] =
        ob_ladder_get_state(optimizer->buckets[optimizer->tensors[t].bucket].bits);
  return ob_reader_create(&saving->reader, optimizer);
}

static void checkpoint_optimizer_list_tensors(const void *object, struct ob_part_tensor *rows) {
  const struct onebit_optimizer *optimizer = object;
  for (size_t t = 0; t < optimizer->tensor_count; t++) {
    const struct ob_tensor *tensor = &optimizer->tensors[t];
    rows[t] =
        (struct ob_part_tensor){tensor->count, optimizer->buckets[tensor->bucket].uncompressed};
  }
}

/* Lists the pieces of a tensor one after the other; a piece without a tensor is padding. */
static size_t list_bucket_stretches(const struct onebit_optimizer *optimizer, size_t u,
                                    struct ob_stretch *stretches) {
  const struct ob_bucket *bucket = &optimizer->buckets[u];
  const struct ob_layout *layout = ob_plan_layout(bucket->bits);
  size_t before = optimizer->tensor_count;
  uint64_t element = 0;
  for (size_t k = 0; stretches && k < layout->pieces; k++) {
    const size_t tensor = bucket->tensor_of[k], count = layout->piece[k].count;
    const size_t real = tensor < optimizer->tensor_count ? layout->piece[k].valid : 0;
    if (tensor < optimizer->tensor_count && tensor != before)
      element = optimizer->tensors[tensor].first;
    before = tensor;
    stretches[k] = (struct ob_stretch){
        .first = {element}, .count = {real, count - real}, .bucket = u, .piece = k};
    element += real;
  }
  return layout->pieces;
}

static size_t checkpoint_optimizer_list_stretches(const void *optimizer, struct ob_stretch *all) {
  size_t count = 0;
  for (size_t u = 0; u < ((const struct onebit_optimizer *)optimizer)->bucket_count; u++)
    count += list_bucket_stretches(optimizer, u, all ? all + count : NULL);
  return count;
}

static bool checkpoint_optimizer_has(const struct ob_saving *saving, enum ob_saved what) {
  return ob_has_section(saving->state->object, (enum ob_stage)saving->header.stage, what);
}

/* Returns the elements that this rank saves: its shard of the parameters, and otherwise all
 * elements that it has. If servers keep the momentum, it saves only the part that it serves, unless
 * saving->whole is set. */
static struct ob_run checkpoint_optimizer_extent(const struct ob_saving *saving, enum ob_saved what,
                                                 const struct ob_stretch *stretch) {
  const struct onebit_optimizer *optimizer = saving->state->object;
  const struct ob_bucket *bucket = &optimizer->buckets[stretch->bucket];
  struct ob_section section = ob_section_of(bucket, (enum ob_stage)saving->header.stage, what);
  const struct ob_layout *layout = ob_plan_layout(section.plan);
  if (what == OB_SAVED_PARAMETERS) {
    section.first = bucket->first_block;
    section.end = section.first + bucket->blocks;
  }
  if (what == OB_SAVED_MOMENTUM && optimizer->method->serve_rule != OB_SERVE_MEAN &&
      !saving->whole) {
    section.first = ob_plan_residual(bucket->bits, true)->first;
    section.end = section.first + ob_plan_residual(bucket->bits, true)->blocks;
  }
  const size_t first = ob_block_offset_in_piece(layout, stretch->piece, section.first);
  const size_t end = ob_block_offset_in_piece(layout, stretch->piece, section.end);
  return (struct ob_run){stretch->piece, first, end > first ? end - first : 0};
}

static bool in_shards(const struct ob_saving *saving, enum ob_saved what) {
  const struct ob_method *method = ((const struct onebit_optimizer *)saving->state->object)->method;
  return method->sharded || (what == OB_SAVED_MOMENTUM && method->serve_rule != OB_SERVE_MEAN);
}

static onebit_status_t checkpoint_optimizer_read_run(struct ob_saving *saving, enum ob_saved what,
                                                     size_t bucket, const struct ob_run *run,
                                                     float *values) {
  const struct onebit_optimizer *optimizer = saving->state->object;
  const struct ob_section from =
      ob_section_of(&optimizer->buckets[bucket], (enum ob_stage)saving->header.stage, what);
  return ob_section_read(&saving->reader, &from, run, values);
}

struct ob_state ob_optimizer_state(onebit_optimizer_t optimizer) {
  return (struct ob_state){.object = optimizer,
                           .comm = optimizer->comm,
                           .kind = optimizer->method->name,
                           .noun = "optimizer",
                           .steps = optimizer->steps,
                           .tensors = optimizer->tensor_count,
                           .describe = checkpoint_optimizer_describe,
                           .list_tensors = checkpoint_optimizer_list_tensors,
                           .list_stretches = checkpoint_optimizer_list_stretches,
                           .has = checkpoint_optimizer_has,
                           .number = checkpoint_optimizer_number_at,
                           .extent = checkpoint_optimizer_extent,
                           .in_shards = in_shards,
                           .read = checkpoint_optimizer_read_run};
}

/* --- The calls ---------------------------------------------------------------------------------*/

static onebit_status_t checkpoint_optimizer_save(onebit_optimizer_t optimizer, bool whole,
                                                 void *memory, size_t capacity, size_t *bytes) {
  OB_TRY(ob_handle_check(optimizer, OB_HANDLE_OPTIMIZER, "optimizer"));
  if (!bytes)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "bytes is NULL");
  *bytes = 0;
  OB_TRY(ob_optimizer_reach_idle(optimizer));
  const struct ob_state state = ob_optimizer_state(optimizer);
  return ob_state_save(&state, whole, memory, capacity, bytes);
}

onebit_status_t onebit_optimizer_save(onebit_optimizer_t optimizer, void *memory, size_t capacity,
                                      size_t *bytes) {
  OB_CALL_SCOPE;
  return checkpoint_optimizer_save(optimizer, false, memory, capacity, bytes);
}

onebit_status_t onebit_optimizer_save_whole(onebit_optimizer_t optimizer, void *memory,
                                            size_t capacity, size_t *bytes) {
  OB_CALL_SCOPE;
  return checkpoint_optimizer_save(optimizer, true, memory, capacity, bytes);
}

onebit_status_t onebit_optimizer_save_files(onebit_optimizer_t optimizer, const char *directory) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  const onebit_status_t status = ob_optimizer_reach_idle(optimizer);
  const struct ob_state state = ob_optimizer_state(optimizer);
  return ob_state_save_files(&state, status, directory);
}
