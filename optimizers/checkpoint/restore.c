/* Loads parts into the state of an optimizer, in a first pass that changes nothing and a second one
 * that does; implements the calls that load. */
#include <math.h>
#include <string.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/memory.h"
#include "onebit/checkpoint.h"
#include "optimizers/checkpoint/checkpoint.h"

onebit_status_t ob_loading_read(struct ob_loading *loading, enum ob_saved what,
                                const struct ob_run *run, float *values) {
  const struct ob_stretch *at = &loading->stretches[run->piece];
  struct ob_parts *parts = loading->parts;
  size_t real = at->count[OB_ELEMENTS], left = run->offset < real ? real - run->offset : 0;
  struct ob_range range = {what, OB_ELEMENTS, at->first[OB_ELEMENTS] + run->offset,
                           left < run->count ? left : run->count};
  size_t some = range.count, remainder = run->count - some;
  if (some)
    OB_TRY(ob_parts_read(parts, &range, loading->dry ? NULL : values));
  if (!remainder)
    return ONEBIT_OK;
  range = (struct ob_range){what, OB_PADDING, at->first[OB_PADDING] + (run->offset + some - real),
                            remainder};
  if (parts->same_padding)
    return ob_parts_read(parts, &range, loading->dry ? NULL : values + some);
  memset(values + some, 0, remainder * sizeof *values);
  return ONEBIT_OK;
}

/* --- Sections of a bucket ---------------------------------------------------------------------*/

/* Returns true if the bucket sends nothing after the freeze: a single rank that does not
 * compress. */
static bool restore_is_alone(const struct ob_loading *loading, const struct ob_bucket *bucket) {
  const struct onebit_optimizer *optimizer = loading->optimizer;
  return optimizer->method->momentum && !bucket->uncompressed &&
         loading->stage == OB_STAGE_FROZEN && !ob_optimizer_compresses(optimizer);
}

/* Converts momentum that was saved after it was sent, for a bucket that sends nothing now:
 * multiplies it by beta1, adds all residuals, and removes its scaling in messages. */
static onebit_status_t add_residuals(struct ob_loading *loading, const struct ob_bucket *bucket,
                                     const struct ob_run *run) {
  const struct ob_method *method = loading->optimizer->method;
  size_t tensor = bucket->tensor_of[run->piece];
  bool scaled = method->scalings && tensor < loading->optimizer->tensor_count;
  float scaling = scaled ? (float)method->scalings(loading->optimizer)[tensor] : 1;
  float beta1 = (float)loading->optimizer->moments.beta1, *values = loading->values;
  if (loading->parts->list[0].header.stage != OB_STAGE_SENT)
    return ONEBIT_OK;
  for (size_t i = 0; !loading->dry && i < run->count; i++)
    values[i] *= beta1;
  for (int what = OB_SAVED_WORKER; what <= OB_SAVED_SERVER; what++) {
    OB_TRY(ob_loading_read(loading, (enum ob_saved)what, run, loading->more));
    for (size_t i = 0; !loading->dry && i < run->count; i++)
      values[i] += loading->more[i];
  }
  for (size_t i = 0; !loading->dry && i < run->count && scaling != 1; i++)
    values[i] /= scaling;
  return ONEBIT_OK;
}

/* Writes parameters to the caller's arrays, in their type, and to the master values that this rank
 * has. */
static onebit_status_t write_parameters(struct ob_loading *loading, const struct ob_section *to,
                                        const struct ob_run *run) {
  const struct ob_bucket *bucket = to->bucket;
  const struct ob_layout *layout = ob_plan_layout(bucket->bits);
  onebit_dtype_t dtype = loading->optimizer->options.parameter_dtype;
  size_t size = ob_dtype_size(dtype), low = ob_block_offset_in_piece(layout, run->piece, to->first);
  size_t high = ob_block_offset_in_piece(layout, run->piece, to->end),
         end = run->offset + run->count;
  if (to->content == OB_CONTENT_PIECES)
    return ob_section_write(to, run, loading->values, loading->more);
  low = low > run->offset ? low : run->offset;
  high = high < end ? high : end;
  struct ob_run part = {run->piece, low, high - low};
  if (low < high)
    OB_TRY(ob_section_write(to, &part, loading->values + (low - run->offset), loading->more));
  for (size_t i = 0; i < run->count; i++)
    ob_store(loading->more, i, dtype, ob_bound(loading->values[i], dtype));
  return ob_plan_memory(bucket->bits)
      ->copy((char *)bucket->copies[run->piece] + run->offset * size, loading->more,
             run->count * size);
}

static onebit_status_t restore_parameters(struct ob_loading *loading, const struct ob_section *to,
                                          struct ob_run run) {
  const size_t real = loading->stretches[run.piece].count[OB_ELEMENTS];
  if (run.offset >= real)
    return ONEBIT_OK;
  run.count = run.count < real - run.offset ? run.count : real - run.offset;
  OB_TRY(ob_loading_read(loading, OB_SAVED_PARAMETERS, &run, loading->values));
  return loading->dry ? ONEBIT_OK : write_parameters(loading, to, &run);
}

/* Restores a run. Without error feedback, the residual is only the rounding error of the message.
 * *large is set if the residual has a number of OB_LARGE_SCALE or more. */
static onebit_status_t restore_run(struct ob_loading *loading, const struct ob_section *to,
                                   const struct ob_run *run, bool *large) {
  bool residual = to->content == OB_CONTENT_RESIDUAL;
  if (residual && loading->optimizer->options.no_error_feedback)
    memset(loading->values, 0, run->count * sizeof *loading->values);
  else
    OB_TRY(ob_loading_read(loading, to->what, run, loading->values));
  if (to->what == OB_SAVED_MOMENTUM && restore_is_alone(loading, to->bucket))
    OB_TRY(add_residuals(loading, to->bucket, run));
  if (loading->dry)
    return ONEBIT_OK;
  if (to->what == OB_SAVED_WORKER && loading->stage == OB_STAGE_SENT)
    OB_TRY(ob_add_rounding_error(loading, run, loading->values));
  for (size_t i = 0; residual && i < run->count; i++)
    *large |= fabsf(loading->values[i]) >= OB_LARGE_SCALE;
  return ob_section_write(to, run, loading->values, loading->more);
}

static bool is_section_wanted(const struct ob_loading *loading, enum ob_saved what) {
  const struct onebit_optimizer *optimizer = loading->optimizer;
  bool residual = what == OB_SAVED_WORKER || what == OB_SAVED_SERVER;
  if (residual && optimizer->method->momentum)
    return loading->stage == OB_STAGE_SENT ||
           (loading->stage == OB_STAGE_WARMUP && ob_has_section(optimizer, loading->stage, what));
  return ob_has_section(optimizer, (enum ob_stage)loading->parts->list[0].header.stage, what);
}

static onebit_status_t restore_section(struct ob_loading *loading, enum ob_saved what) {
  const struct ob_bucket *bucket = &loading->optimizer->buckets[loading->bucket];
  const struct ob_section to = ob_section_of(bucket, loading->stage, what);
  const struct ob_layout *layout = ob_plan_layout(to.plan);
  const bool parameters = what == OB_SAVED_PARAMETERS;
  const size_t first = parameters ? 0 : to.first, end = parameters ? layout->blocks : to.end;
  bool large = false;
  if (!is_section_wanted(loading, what))
    return ONEBIT_OK;
  if (to.content == OB_CONTENT_MESSAGES)
    return ob_restore_messages(loading);
  for (struct ob_run run = {0}; ob_find_next_run(layout, first, end, &run);)
    OB_TRY(parameters ? restore_parameters(loading, &to, run)
                      : restore_run(loading, &to, &run, &large));
  if (what == OB_SAVED_SERVER && !loading->dry)
    return ob_plan_note_import(to.plan, large);
  return ONEBIT_OK;
}

/* Returns the ladder of the bucket's plan. Its tensors may have been in several buckets: the ladder
 * with the largest width is used. Returns NULL if no ladder was saved; momentum is then sent in the
 * plan's smallest width. */
static const struct ob_ladder_state *find_bucket_ladder(const struct ob_loading *loading,
                                                        const struct ob_bucket *bucket) {
  const struct onebit_optimizer *optimizer = loading->optimizer;
  const struct ob_ladder_state *widest = NULL;
  for (size_t t = 0; loading->ladders && t < optimizer->tensor_count; t++)
    if (&optimizer->buckets[optimizer->tensors[t].bucket] == bucket &&
        (!widest || optimizer->ladders[t].width > widest->width))
      widest = &optimizer->ladders[t];
  return widest;
}

static onebit_status_t restore_bucket(struct ob_loading *loading) {
  const struct ob_bucket *bucket = &loading->optimizer->buckets[loading->bucket];
  const struct ob_ladder_state *state = find_bucket_ladder(loading, bucket);
  if (!loading->dry)
    OB_TRY(ob_plan_restart(bucket->bits, state ? state->last_width : 1));
  if (!loading->dry && bucket->steps_back)
    OB_TRY(ob_plan_restart(bucket->steps_back, 1));
  if (!loading->dry && ob_plan_is_compressed(bucket->dense))
    OB_TRY(ob_plan_restart(bucket->dense, 1));
  for (int what = OB_SAVED_PARAMETERS; what < OB_SAVED_END; what++)
    if (!ob_saved_is_numbers((uint32_t)what))
      OB_TRY(restore_section(loading, (enum ob_saved)what));
  return ONEBIT_OK;
}

/* --- Numbers -----------------------------------------------------------------------------------*/

static onebit_status_t restore_check_number(const struct ob_loading *loading,
                                            const struct ob_numbers *is, uint64_t bits) {
  double value = (double)bits;
  if (is->kind != OB_NUMBERS_WHOLE)
    memcpy(&value, &bits, sizeof value);
  if (value >= is->min && value <= is->max)
    return ONEBIT_OK;
  return ob_part_error(loading->own,
                       "section 'numbers' has the value %g, which is not from %g to %g", value,
                       is->min, is->max);
}

/* Restores numbers. A ring of norms of another length cannot be used: norms are collected anew. A
 * rank's own numbers that an older library did not write are zeros. */
static onebit_status_t restore_numbers(struct ob_loading *loading, enum ob_saved what) {
  uint64_t count = ob_checkpoint_numbers(loading->optimizer, what);
  bool own = what != OB_SAVED_NORMS;
  bool fits = own || (is_section_wanted(loading, what) && loading->own->header.window == count);
  uint64_t stored = !fits ? 0 : what == OB_SAVED_NUMBERS ? loading->own->header.numbers : count;
  const struct ob_part_section *section = NULL;
  struct ob_numbers is;
  if (stored)
    OB_TRY(ob_part_find_numbers(loading->own, what, stored, &section));
  for (uint64_t i = 0; i < count; i++) {
    void *number = ob_checkpoint_number(loading->optimizer, what, i, &is);
    uint64_t bits = 0;
    if (i < stored)
      OB_TRY(ob_part_copy(loading->own, section, i, 1, &bits));
    if (own && i < stored)
      OB_TRY(restore_check_number(loading, &is, bits));
    if (!loading->dry)
      memcpy(number, &bits, sizeof bits);
  }
  return ONEBIT_OK;
}

/* Restores the ladders. Parts of an older version, or saved with other options, have no ladders. */
static onebit_status_t restore_ladders(struct ob_loading *loading) {
  loading->ladders = loading->optimizer->ladders &&
                     ob_part_find_section(loading->own, OB_SAVED_LADDERS, OB_ELEMENTS, 0);
  return loading->ladders ? restore_numbers(loading, OB_SAVED_LADDERS) : ONEBIT_OK;
}

static void set_ladders(struct ob_loading *loading) {
  for (size_t u = 0; u < loading->optimizer->bucket_count; u++) {
    const struct ob_bucket *bucket = &loading->optimizer->buckets[u];
    const struct ob_ladder_state *state = find_bucket_ladder(loading, bucket);
    if (state)
      ob_ladder_restore(bucket->bits, state);
  }
}

/* Resets the tensors' scalings if this optimizer sends nothing, since then the loaded momentum has
 * been divided by them; otherwise the loaded scalings take effect in the next call. */
static void reset_scalings(struct onebit_optimizer *optimizer) {
  bool alone = !ob_optimizer_compresses(optimizer) && optimizer->method->scalings;
  for (size_t t = 0; alone && t < optimizer->tensor_count; t++)
    optimizer->method->scalings(optimizer)[t] = 1;
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    struct ob_bucket *bucket = &optimizer->buckets[u];
    for (size_t k = 0; k < ob_plan_layout(bucket->bits)->pieces; k++)
      if (bucket->tensor_of[k] < optimizer->tensor_count)
        bucket->scalings[k] = 1;
  }
}

static void restore_counts(struct ob_loading *loading) {
  struct onebit_optimizer *optimizer = loading->optimizer;
  const struct ob_part_header *header = &loading->own->header;
  double first = optimizer->options.initial_loss_scale;
  optimizer->steps = header->steps;
  optimizer->frozen_at = header->frozen_at;
  optimizer->zero_steps =
      optimizer->zero_steps < header->steps ? optimizer->zero_steps : header->steps;
  optimizer->began_frozen = header->stage != OB_STAGE_WARMUP && !header->frozen_at;
  optimizer->skipped = header->skipped;
  optimizer->unknown = 0;
  memcpy(optimizer->exchanges, header->exchanges, sizeof optimizer->exchanges);
  optimizer->variance_ratio = header->variance_ratio;
  optimizer->gradient_norm = header->gradient_norm;
  bool scaled = first != 0 && header->loss_scale > 0;
  optimizer->loss_scale = scaled ? header->loss_scale : first != 0 ? first : 1;
  optimizer->good_steps = scaled ? header->good_steps : 0;
}

/* Returns the stage of the latest step. Whether this optimizer would have sent bits in it depends
 * on the parts and on the optimizer. */
static enum ob_stage restored_stage(const struct ob_loading *loading) {
  const struct ob_part_header *header = &loading->parts->list[0].header;
  bool sent = ob_optimizer_compresses(loading->optimizer) && header->steps != header->frozen_at;
  if (header->stage == OB_STAGE_WARMUP || !loading->optimizer->method->momentum)
    return (enum ob_stage)header->stage;
  return sent ? OB_STAGE_SENT : OB_STAGE_FROZEN;
}

/* Restores all state, the numbers first, since the code that restores momentum may read them. */
static onebit_status_t restore_all(struct ob_loading *loading) {
  struct onebit_optimizer *optimizer = loading->optimizer;
  loading->own = &loading->parts->list[loading->parts->own >= 0 ? loading->parts->own : 0];
  loading->stage = restored_stage(loading);
  OB_TRY(ob_buckets_fit_arrays(optimizer, loading->stage == OB_STAGE_WARMUP));
  OB_TRY(restore_numbers(loading, OB_SAVED_NORMS));
  OB_TRY(restore_numbers(loading, OB_SAVED_NUMBERS));
  OB_TRY(restore_ladders(loading));
  loading->stretches = loading->map.all;
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    loading->bucket = u;
    OB_TRY(restore_bucket(loading));
    loading->stretches += ob_plan_layout(optimizer->buckets[u].bits)->pieces;
  }
  if (loading->dry)
    return ONEBIT_OK;
  reset_scalings(optimizer);
  restore_counts(loading);
  OB_TRY(ob_optimizer_accept(optimizer));
  set_ladders(loading);
  OB_TRY(ob_buckets_fit_arrays(optimizer, false));
  return optimizer->executor->restored ? optimizer->executor->restored(optimizer) : ONEBIT_OK;
}

/* --- The calls ---------------------------------------------------------------------------------*/

static onebit_status_t restore_allocate(struct ob_loading *loading) {
  const struct onebit_optimizer *optimizer = loading->optimizer;
  size_t scales = 0;
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    const struct onebit_plan *plan = optimizer->buckets[u].bits;
    size_t wanted = ob_plan_geometry(plan)->one_scale ? ob_plan_geometry(plan)->segments
                                                      : ob_plan_layout(plan)->blocks;
    scales = wanted > scales ? wanted : scales;
  }
  loading->values = ob_allocate(2 * OB_CHUNK, sizeof(float));
  loading->scales = ob_allocate(scales, sizeof(float));
  if (!loading->values || !loading->scales)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for loading an optimizer");
  loading->more = loading->values + OB_CHUNK;
  return ob_reader_create(&loading->reader, optimizer);
}

static onebit_status_t restore_prepare(struct ob_loading *loading, struct ob_parts *parts) {
  const struct ob_state state = ob_optimizer_state(loading->optimizer);
  loading->parts = parts;
  OB_TRY(ob_map_create(&loading->map, &state));
  return restore_allocate(loading);
}

static onebit_status_t restore_optimizer(void *object, struct ob_parts *parts, bool dry) {
  struct ob_loading *loading = object;
  if (dry) {
    OB_TRY(restore_prepare(loading, parts));
    OB_TRY(ob_parts_check(parts, loading->optimizer, &loading->map));
  }
  loading->dry = dry;
  return restore_all(loading);
}

static void close_loading(void *object) {
  struct ob_loading *loading = object;
  ob_map_destroy(&loading->map);
  ob_reader_destroy(&loading->reader);
  ob_release(loading->values);
  ob_release(loading->scales);
  *loading = (struct ob_loading){.optimizer = loading->optimizer};
}

static onebit_status_t restore_part(struct ob_loading *loading, struct ob_parts *parts) {
  const struct ob_part_header *header = &parts->list[0].header;
  parts->sums = ob_allocate(OB_CHUNK, sizeof *parts->sums);
  parts->counts = ob_allocate(OB_CHUNK, sizeof *parts->counts);
  if (!parts->sums || !parts->counts)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for restoring an optimizer");
  OB_TRY(restore_prepare(loading, parts));
  parts->same_padding = header->ranks == (uint32_t)loading->optimizer->comm->size &&
                        header->padding == loading->map.total[OB_PADDING];
  return restore_all(loading);
}

onebit_status_t ob_checkpoint_restore(onebit_optimizer_t optimizer, struct ob_part *part) {
  struct ob_loading loading = {.optimizer = optimizer};
  struct ob_parts parts = {.list = part, .count = 1};
  onebit_status_t status = restore_part(&loading, &parts);
  ob_release(parts.sums);
  ob_release(parts.counts);
  close_loading(&loading);
  return status;
}

static onebit_status_t check_loadable(onebit_optimizer_t optimizer) {
  OB_TRY(ob_optimizer_reach_idle(optimizer));
  if (optimizer->deferred && !optimizer->executor->restored)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "optimizer is on a device, which counts its steps itself: they cannot be set");
  return ONEBIT_OK;
}

static onebit_status_t load_optimizer(onebit_optimizer_t optimizer,
                                      const struct ob_sources *sources, const char *directory) {
  struct ob_loading loading = {.optimizer = optimizer};
  OB_TRY(ob_handle_check(optimizer, OB_HANDLE_OPTIMIZER, "optimizer"));
  const struct ob_state state = ob_optimizer_state(optimizer);
  const struct ob_load load = {
      .object = &loading, .state = &state, .restore = restore_optimizer, .close = close_loading};
  return ob_buckets_share_servers(
      optimizer, ob_state_load(&load, check_loadable(optimizer), sources, directory));
}

onebit_status_t onebit_optimizer_load(onebit_optimizer_t optimizer, const void *const *parts,
                                      const size_t *bytes, int count) {
  OB_CALL_SCOPE;
  const struct ob_sources sources = {.memory = parts, .bytes = bytes, .count = count};
  return load_optimizer(optimizer, &sources, NULL);
}

onebit_status_t onebit_optimizer_load_files(onebit_optimizer_t optimizer, const char *directory) {
  OB_CALL_SCOPE;
  return load_optimizer(optimizer, NULL, directory);
}
