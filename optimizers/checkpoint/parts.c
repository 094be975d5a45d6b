/* Checks that the parts of all ranks belong together, reads elements from them, and loads an object
 * from them, which is collective. The parts may be from another number of ranks than now. */
#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "collectives/communicator.h"
#include "optimizers/checkpoint/checkpoint.h"

static struct ob_part_source make_part_source(const struct ob_sources *sources, int k) {
  if (sources->files)
    return (struct ob_part_source){.file = &sources->files[k],
                                   .bytes = sources->files[k].input.bytes};
  return (struct ob_part_source){.memory = sources->memory[k], .bytes = sources->bytes[k]};
}

static onebit_status_t parts_open(struct ob_parts *parts, const struct ob_sources *sources) {
  const int count = sources->count;
  *parts = (struct ob_parts){.own = -1};
  if (!sources->files && (!sources->memory || !sources->bytes))
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is NULL", sources->memory ? "bytes" : "parts");
  if (count < 1)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "count is %d: a checkpoint has at least one part",
                    count);
  parts->list = ob_allocate((size_t)count, sizeof *parts->list);
  parts->sums = ob_allocate(OB_CHUNK, sizeof *parts->sums);
  parts->counts = ob_allocate(OB_CHUNK, sizeof *parts->counts);
  if (!parts->list || !parts->sums || !parts->counts)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for reading %d parts", count);
  for (int k = 0; k < count; k++) {
    parts->count = k + 1; /* to be closed, even when opening it has failed */
    struct ob_part_source source = make_part_source(sources, k);
    OB_TRY(ob_part_open(&parts->list[k], k, &source));
  }
  return ONEBIT_OK;
}

static void parts_close(struct ob_parts *parts) {
  for (int k = 0; k < parts->count; k++)
    ob_part_close(&parts->list[k]);
  ob_release(parts->list);
  ob_release(parts->sums);
  ob_release(parts->counts);
}

/* --- Checks of the parts against each other ----------------------------------------------------*/

enum {
  ALIKE_FROM = offsetof(struct ob_part_header, kind),
  ALIKE_END = offsetof(struct ob_part_header, rank)
};

static onebit_status_t check_same_checkpoint(const struct ob_part *part,
                                             const struct ob_part *first) {
  const struct ob_part_header *mine = &part->header, *theirs = &first->header;
  if (mine->steps != theirs->steps)
    return ob_error(ONEBIT_ERROR_CHECKPOINT,
                    "parts 0 and %d were saved after different steps, %" PRIu64 " and %" PRIu64,
                    part->number, theirs->steps, mine->steps);
  if (memcmp((const char *)mine + ALIKE_FROM, (const char *)theirs + ALIKE_FROM,
             ALIKE_END - ALIKE_FROM) != 0 ||
      memcmp(part->tensors, first->tensors, mine->tensors * sizeof(struct ob_part_tensor)) != 0)
    return ob_error(ONEBIT_ERROR_CHECKPOINT, "parts 0 and %d do not belong to the same checkpoint",
                    part->number);
  return ONEBIT_OK;
}

/* Fails unless all parts belong to one checkpoint. */
static onebit_status_t parts_check_together(const struct ob_parts *parts) {
  for (int k = 0; k < parts->count; k++) {
    const struct ob_part *part = &parts->list[k];
    if (part->header.ranks != (uint32_t)parts->count)
      return ob_part_error(part,
                           "it was saved by %" PRIu32 " ranks, but the number of parts given is %d",
                           part->header.ranks, parts->count);
    if (part->header.rank != (uint32_t)k)
      return ob_part_error(part,
                           "it was saved by rank %" PRIu32 ": give the parts in the order of ranks",
                           part->header.rank);
    OB_TRY(check_same_checkpoint(part, &parts->list[0]));
  }
  return ONEBIT_OK;
}

/* Returns the fingerprint of the checkpoint. */
static uint64_t parts_fingerprint(const struct ob_parts *parts) {
  struct ob_checksum sum = ob_checksum_begin();
  for (int k = 0; k < parts->count; k++)
    ob_checksum_add(&sum, &parts->list[k].header.checksum, sizeof(uint64_t));
  return ob_checksum_end(&sum);
}

/* Fails unless the part is of this kind of object and of the same tensors. */
static onebit_status_t parts_check_object(const struct ob_part *part, const struct ob_state *state,
                                          const struct ob_part_tensor *tensors) {
  const struct ob_part_header *header = &part->header;
  uint64_t elements = 0;
  if (strncmp(header->kind, state->kind, sizeof header->kind) != 0)
    return ob_part_error(part, "it belongs to another %s: saved by %.16s, loaded by %s",
                         state->noun, header->kind, state->kind);
  if (header->tensors != state->tensors)
    return ob_part_error(part, "it was saved with %" PRIu64 " tensors, but loaded into %zu",
                         header->tensors, state->tensors);
  for (size_t t = 0; t < state->tensors; elements += tensors[t++].count)
    if (part->tensors[t].count != tensors[t].count)
      return ob_part_error(
          part, "tensor %zu has %" PRIu64 " elements here, and %" PRIu64 " in the checkpoint", t,
          tensors[t].count, part->tensors[t].count);
  if (header->elements != elements)
    return ob_part_error(part,
                         "its header says %" PRIu64 " elements, but its tensors have %" PRIu64,
                         header->elements, elements);
  return ONEBIT_OK;
}

static onebit_status_t parts_check_objects(const struct ob_parts *parts,
                                           const struct ob_state *state) {
  struct ob_part_tensor *tensors = ob_allocate(state->tensors, sizeof *tensors);
  onebit_status_t status = ONEBIT_OK;
  if (!tensors)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a list of %zu tensors", state->tensors);
  state->list_tensors(state->object, tensors);
  for (int k = 0; status == ONEBIT_OK && k < parts->count; k++)
    status = parts_check_object(&parts->list[k], state, tensors);
  ob_release(tensors);
  return status;
}

/* --- Checks of the parts against the optimizer -------------------------------------------------*/

/* Checks options of the optimizer against those of the part. From the freeze on, and in a warm-up
 * of divided gradients, a tensor's state depends on whether the tensor is compressed. */
static onebit_status_t check_options(const struct ob_part *part,
                                     const struct onebit_optimizer *optimizer) {
  const struct ob_part_header *header = &part->header;
  const bool frozen = header->stage != OB_STAGE_WARMUP;
  if (header->profile != (uint32_t)optimizer->options.profile)
    return ob_part_error(
        part, "it belongs to another profile: saved with profile %" PRIu32 ", loaded with %d",
        header->profile, (int)optimizer->options.profile);
  if (frozen && header->shards != (uint32_t)optimizer->moments.shards)
    return ob_part_error(
        part, "it was saved after the freeze with shards=%" PRIu32 ", but loaded with shards=%d",
        header->shards, (int)optimizer->moments.shards);
  for (size_t t = 0; (frozen || optimizer->method->divides) && t < optimizer->tensor_count; t++) {
    const struct ob_part_tensor row = part->tensors[t];
    const bool uncompressed = optimizer->buckets[optimizer->tensors[t].bucket].uncompressed;
    if (row.count && row.uncompressed != uncompressed)
      return ob_part_error(part, "tensor %zu was %scompressed when it was saved", t,
                           uncompressed ? "" : "un");
  }
  return ONEBIT_OK;
}

/* Returns true if the header describes a possible state. Without a warm-up, frozen_at is 0. */
static bool is_possible_state(const struct ob_part_header *header,
                              const struct onebit_optimizer *optimizer) {
  switch (header->stage) {
  case OB_STAGE_WARMUP:
    return header->frozen_at == 0;
  case OB_STAGE_FROZEN:
    return header->frozen_at <= header->steps;
  case OB_STAGE_SENT:
    return header->frozen_at < header->steps && optimizer->method->momentum;
  default:
    return false;
  }
}

static onebit_status_t check_stage(const struct ob_part *part,
                                   const struct onebit_optimizer *optimizer) {
  const struct ob_part_header *header = &part->header;
  bool frozen = header->stage != OB_STAGE_WARMUP;
  if (!is_possible_state(header, optimizer))
    return ob_part_error(
        part, "stage %" PRIu32 ", frozen at step %" PRIu64 " of %" PRIu64 ": %s has no such state",
        header->stage, header->frozen_at, header->steps, optimizer->method->name);
  const bool may_begin_frozen =
      optimizer->moments.no_warmup || optimizer->method->divides || optimizer->asked->begins_frozen;
  if (frozen && !header->frozen_at && !may_begin_frozen)
    return ob_part_error(
        part, "it was saved without a warm-up, but is loaded into an optimizer with a warm-up");
  if (!frozen && optimizer->moments.no_warmup)
    return ob_part_error(
        part, "it was saved in a warm-up, but is loaded into an optimizer without a warm-up");
  if (frozen && header->form != (uint32_t)ob_checkpoint_form(optimizer))
    return ob_part_error(part,
                         "it was saved after the freeze with an exchange of %s, but is loaded with "
                         "an exchange of %s",
                         header->form == OB_FORM_STEP ? "steps" : "momentum",
                         header->form == OB_FORM_STEP ? "momentum" : "steps");
  return ONEBIT_OK;
}

/* Checks the numbers in the header. The method's own numbers are checked when they are loaded. */
static onebit_status_t check_numbers(const struct ob_part *part,
                                     struct onebit_optimizer *optimizer) {
  const struct ob_part_header *header = &part->header;
  uint64_t numbers = ob_checkpoint_numbers(optimizer, OB_SAVED_NUMBERS);
  const bool before = optimizer->method->divides && header->numbers + 1 == numbers;
  if (before && header->stage == OB_STAGE_WARMUP)
    return ob_part_error(part,
                         "saved in the warm-up of %s by onebit %" PRIu32 ".%" PRIu32 ".%" PRIu32
                         ", which sent plain gradients; onebit %s normalises them: load a "
                         "checkpoint saved after the warm-up",
                         optimizer->method->name, header->library >> 16, header->library >> 8 & 255,
                         header->library & 255, onebit_version());
  if (header->numbers != numbers && !before)
    return ob_part_error(part, "it has %" PRIu64 " numbers of %s, expected %" PRIu64,
                         header->numbers, optimizer->method->name, numbers);
  if (!(header->loss_scale >= 0) || isinf(header->loss_scale))
    return ob_part_error(part, "its loss scale is %g: it must be finite and at least 0",
                         header->loss_scale);
  return ONEBIT_OK;
}

static bool has_same_ranks(const struct ob_parts *parts, const struct onebit_optimizer *optimizer) {
  const struct ob_hosts *hosts = &optimizer->comm->hosts;
  const struct ob_part_header *first = &parts->list[0].header;
  if (parts->count != optimizer->comm->size || first->hosts != ob_checkpoint_hosts(optimizer))
    return false;
  for (int k = 0; first->hosts && k < parts->count; k++) {
    const struct ob_part_header *header = &parts->list[k].header;
    if (header->host >= (uint32_t)hosts->count || header->local_rank >= (uint32_t)hosts->each ||
        hosts->ranks[header->host * (uint32_t)hosts->each + header->local_rank] != k)
      return false;
  }
  return true;
}

onebit_status_t ob_parts_check(struct ob_parts *parts, struct onebit_optimizer *optimizer,
                               const struct ob_map *map) {
  for (int k = 0; k < parts->count; k++) {
    const struct ob_part *part = &parts->list[k];
    OB_TRY(check_options(part, optimizer));
    OB_TRY(check_stage(part, optimizer));
    OB_TRY(check_numbers(part, optimizer));
  }
  if (has_same_ranks(parts, optimizer))
    parts->own = optimizer->comm->rank;
  parts->same_padding = parts->count == optimizer->comm->size &&
                        parts->list[0].header.padding == map->total[OB_PADDING];
  return ONEBIT_OK;
}

/* --- Contents of the parts ---------------------------------------------------------------------*/

static onebit_status_t report_missing_element(enum ob_saved what, uint64_t element) {
  return ob_error(ONEBIT_ERROR_CHECKPOINT, "no part has element %" PRIu64 " of section '%s'",
                  element, ob_saved_rows[what].name);
}

/* Adds one part's values of the elements to the sums, and counts them; returns how many there
 * were. */
static onebit_status_t add_part_values(struct ob_parts *parts, struct ob_part *part,
                                       const struct ob_range *range, bool dry, size_t *found) {
  const uint64_t end = range->first + range->count;
  const double factor = parts->factors ? parts->factors[part->number] : 1;
  float values[OB_READ_AT_ONCE];
  for (uint64_t at = range->first, some; at < end; at += some) {
    const struct ob_part_section *section =
        ob_part_find_section(part, range->what, range->space, at);
    if (!section || section->first >= end)
      break;
    at = section->first > at ? section->first : at;
    some = section->first + section->count < end ? section->first + section->count : end;
    some = some - at < OB_READ_AT_ONCE ? some - at : OB_READ_AT_ONCE;
    if (dry)
      OB_TRY(ob_part_verify(part, section));
    else
      OB_TRY(ob_part_copy(part, section, at, (size_t)some, values));
    for (size_t j = 0, i = (size_t)(at - range->first); j < some; j++, i++) {
      parts->sums[i] += dry ? 0 : factor * (double)values[j];
      parts->counts[i]++;
    }
    *found += (size_t)some;
  }
  return ONEBIT_OK;
}

/* Reads the mean over the parts that have the element. If one part has it, or all have the same
 * value, the mean is that value. */
static onebit_status_t read_mean(struct ob_parts *parts, const struct ob_range *range,
                                 float *values) {
  const struct ob_saved_row *row = &ob_saved_rows[range->what];
  bool apart = row->own_apart && parts->list[0].header.apart;
  bool equal = !apart && !row->own && !row->may_lack;
  uint32_t wanted = apart ? (uint32_t)parts->count : !row->may_lack;
  int start = equal ? parts->latest : 0; /* usually the part that has the element before */
  size_t found = 0;
  memset(parts->counts, 0, range->count * sizeof *parts->counts);
  for (size_t i = 0; i < range->count; i++)
    parts->sums[i] = -0.0; /* adding to -0 changes no value, not even -0 */
  for (int k = 0; k < parts->count && !(equal && found == range->count); k++) {
    int number = (start + k) % parts->count;
    OB_TRY(add_part_values(parts, &parts->list[number], range, !values, &found));
    parts->latest = equal ? number : parts->latest;
  }
  for (size_t i = 0; i < range->count; i++) {
    if (parts->counts[i] < wanted)
      return report_missing_element(range->what, range->first + i);
    if (values)
      values[i] = parts->counts[i] ? (float)(parts->sums[i] / parts->counts[i]) : 0;
  }
  return ONEBIT_OK;
}

/* Reads this rank's own elements. For elements that this rank did not have when it saved, as in a
 * hierarchical schedule with other blocks or buckets, it reads the mean of the other ranks'
 * values. */
static onebit_status_t parts_read_own(struct ob_parts *parts, const struct ob_range *range,
                                      float *values) {
  struct ob_part *part = &parts->list[parts->own];
  struct ob_range remainder = *range, some = *range;
  for (; remainder.count; remainder.count -= some.count, remainder.first += some.count) {
    const struct ob_part_section *section =
        ob_part_find_section(part, remainder.what, remainder.space, remainder.first);
    bool here = section && section->first <= remainder.first;
    uint64_t end = !section ? UINT64_MAX : here ? section->first + section->count : section->first;
    some.first = remainder.first;
    some.count =
        end - remainder.first < remainder.count ? (size_t)(end - remainder.first) : remainder.count;
    if (!here)
      OB_TRY(read_mean(parts, &some, values));
    else if (!values)
      OB_TRY(ob_part_verify(part, section));
    else
      OB_TRY(ob_part_copy(part, section, some.first, some.count, values));
    values = values ? values + some.count : NULL;
  }
  return ONEBIT_OK;
}

onebit_status_t ob_parts_read(struct ob_parts *parts, const struct ob_range *range, float *values) {
  const bool own = ob_saved_is_own(range->what, parts->list[0].header.apart);
  return own && parts->own >= 0 ? parts_read_own(parts, range, values)
                                : read_mean(parts, range, values);
}

/* --- Loading an object -------------------------------------------------------------------------*/

/* Checks everything that can be checked before the object is changed. */
static onebit_status_t check_all_parts(const struct ob_load *load, onebit_status_t status,
                                       struct ob_parts *parts, const struct ob_sources *sources) {
  OB_TRY(status);
  OB_TRY(parts_open(parts, sources));
  OB_TRY(parts_check_together(parts));
  OB_TRY(parts_check_objects(parts, load->state));
  return load->restore(load->object, parts, true);
}

onebit_status_t ob_load_parts(const struct ob_load *load, onebit_status_t status,
                              const struct ob_sources *sources) {
  struct ob_parts parts = {0};
  status = check_all_parts(load, status, &parts, sources);
  const struct ob_term terms[] = {
      {"count", (uint64_t)parts.count},
      {"the checkpoint (shown as a hash)", status == ONEBIT_OK ? parts_fingerprint(&parts) : 0},
      load->term,
  };
  status = ob_agree(load->state->comm, status, terms, 2 + (load->term.name != NULL));
  if (load->agreed)
    status = load->agreed(load->object, status);
  if (status == ONEBIT_OK) {
    status = load->restore(load->object, &parts, false);
    if (status == ONEBIT_ERROR_FILE)
      status =
          ob_error(status, "%s; a part of the state has already been loaded", onebit_last_error());
    status = ob_agree(load->state->comm, status, NULL, 0);
  }
  load->close(load->object);
  parts_close(&parts);
  return status;
}
