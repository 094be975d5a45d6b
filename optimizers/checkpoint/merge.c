/* Merges the state of several ranks into one part. Each of these ranks gets a copy of the part. */
#include "optimizers/checkpoint/merge.h"

#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "collectives/communicator.h"

/* --- Messages ----------------------------------------------------------------------------------*/

/* Sends every rank's bytes to all ranks: the bytes of rank r are in `base` from starts[r] to
 * starts[r + 1]. */
static onebit_status_t merge_gather(struct ob_moving *moving, unsigned char *base,
                                    const size_t *starts) {
  const int me = moving->comm->rank;
  for (int rank = 0; rank < moving->comm->size; rank++) {
    if (rank == me)
      continue;
    ob_moving_send(moving, base + starts[me], starts[me + 1] - starts[me], rank);
    ob_moving_receive(moving, base + starts[rank], starts[rank + 1] - starts[rank], rank);
  }
  return ob_moving_exchange(moving);
}

/* --- The ranks' headers and sections -----------------------------------------------------------*/

static onebit_status_t merge_no_memory(void) {
  return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for moving an optimizer");
}

static const struct ob_part_header *own_header(const struct ob_merge *merge) {
  const struct ob_part *held = merge->optimizer->held;
  return held ? &held->header : &merge->saving.header;
}

static onebit_status_t merge_allocate(struct ob_merge *merge) {
  const struct onebit_optimizer *optimizer = merge->optimizer;
  size_t ranks = (size_t)merge->moving.comm->size, tensors = optimizer->list_count;
  merge->ranks = ob_allocate(ranks, sizeof *merge->ranks);
  merge->starts = ob_allocate(2 * (ranks + 1), sizeof *merge->starts);
  merge->elements = ob_allocate(tensors + 1, sizeof *merge->elements);
  merge->merged = ob_allocate(1, sizeof *merge->merged);
  merge->hashes = ob_allocate(ranks * OB_MERGE_WINDOW, sizeof *merge->hashes);
  merge->received = ob_allocate(ranks * OB_CHUNK, sizeof *merge->received);
  merge->sums = ob_allocate(OB_CHUNK, sizeof *merge->sums);
  if (!merge->ranks || !merge->starts || !merge->elements || !merge->merged || !merge->hashes ||
      !merge->received || !merge->sums)
    return merge_no_memory();
  merge->windows = merge->starts + ranks + 1;
  for (size_t rank = 0; rank <= ranks; rank++)
    merge->windows[rank] = rank * OB_MERGE_WINDOW * sizeof *merge->hashes;
  for (size_t t = 0; t < tensors; t++)
    merge->elements[t + 1] = merge->elements[t] + optimizer->list[t].count;
  return ONEBIT_OK;
}

/* Prepares the merge on this rank, without messages. */
static onebit_status_t merge_open_own(struct ob_merge *merge, onebit_comm_t comm) {
  OB_TRY(ob_moving_create(&merge->moving, comm, "onebit_optimizer_move"));
  OB_TRY(merge_allocate(merge));
  if (merge->optimizer->held)
    return ONEBIT_OK;
  return ob_saving_create(&merge->saving, &merge->state, true);
}

/* Returns the largest number of steps by which a rank of the same run can be behind: the step in
 * which a rank was lost, and local steps, in which ranks send nothing. */
static uint64_t max_steps_behind(const struct onebit_optimizer *optimizer) {
  return 1 + optimizer->moments.local_step_clipper;
}

static void fill_front(struct ob_merge *merge, unsigned char *front) {
  const struct onebit_optimizer *optimizer = merge->optimizer;
  const struct ob_part_header *header = own_header(merge);
  const struct ob_part_section *sections =
      optimizer->held ? optimizer->held->sections : merge->saving.sections;
  memcpy(front, header, sizeof *header);
  memcpy(front + sizeof *header, sections, header->sections * sizeof *sections);
}

static void merge_read_front(struct ob_merge *merge, int rank) {
  struct ob_part *part = &merge->ranks[rank];
  unsigned char *front = merge->fronts + merge->starts[rank];
  *part = (struct ob_part){.number = rank};
  memcpy(&part->header, front, sizeof part->header);
  part->sections = (struct ob_part_section *)(void *)(front + sizeof part->header);
  part->header.sections = (merge->starts[rank + 1] - merge->starts[rank] - sizeof part->header) /
                          sizeof *part->sections;
}

/* Gathers all ranks' headers and lists of sections. */
static onebit_status_t gather_fronts(struct ob_merge *merge, onebit_status_t status) {
  struct ob_moving *moving = &merge->moving;
  onebit_comm_t comm = moving->comm;
  OB_TRY(ob_moving_gather_numbers(moving, status, status ? 0 : own_header(merge)->steps));
  ob_moving_choose_source(moving, max_steps_behind(merge->optimizer));
  OB_TRY(ob_moving_gather_numbers(moving, ONEBIT_OK, own_header(merge)->sections));
  for (int rank = 0; rank < comm->size; rank++)
    merge->starts[rank + 1] = merge->starts[rank] + sizeof(struct ob_part_header) +
                              (size_t)moving->noted[rank] * sizeof(struct ob_part_section);
  merge->fronts = ob_allocate(1, merge->starts[comm->size]);
  OB_TRY(ob_agree(comm, merge->fronts ? ONEBIT_OK : merge_no_memory(), NULL, 0));
  fill_front(merge, merge->fronts + merge->starts[comm->rank]);
  status = merge_gather(moving, merge->fronts, merge->starts);
  if (status != ONEBIT_OK)
    ob_comm_give_up(comm, onebit_last_error());
  OB_TRY(status);
  for (int rank = 0; rank < comm->size; rank++)
    merge_read_front(merge, rank);
  return ONEBIT_OK;
}

/* --- The merged part ---------------------------------------------------------------------------*/

static void add_merged_section(struct ob_part *part, uint32_t what, uint32_t space) {
  const uint64_t count = ob_section_limit(&part->header, what, space);
  if (!count || (what == OB_SAVED_PARAMETERS && space == OB_PADDING))
    return;
  struct ob_part_section *sections = (struct ob_part_section *)(void *)part->front;
  sections[part->header.sections++] = (struct ob_part_section){
      .what = what, .space = space, .count = count, .offset = part->header.bytes};
  part->header.bytes += ob_section_bytes(what, count);
}

/* Lists the sections of the merged part: all sections of the source's stage, with all elements. */
static onebit_status_t merge_lay_out(struct ob_merge *merge) {
  struct ob_part *part = merge->merged;
  part->header = merge->ranks[merge->moving.source].header;
  const enum ob_stage stage = (enum ob_stage)part->header.stage;
  part->header.sections = part->header.bytes = 0;
  part->front = ob_allocate((size_t)OB_SAVED_END * OB_SPACES, sizeof *part->sections);
  part->sections = (const void *)part->front;
  part->sound = ob_allocate((size_t)OB_SAVED_END * OB_SPACES, sizeof *part->sound);
  if (!part->front || !part->sound)
    return merge_no_memory();
  for (uint32_t what = OB_SAVED_NORMS; what < OB_SAVED_END; what++)
    for (uint32_t space = 0; space < OB_SPACES; space++)
      if (ob_has_section(merge->optimizer, stage, (enum ob_saved)what))
        add_merged_section(part, what, space);
  for (uint64_t i = 0; i < part->header.sections; i++)
    part->sound[i] = true;
  part->source.bytes = part->header.bytes;
  part->source.memory = ob_allocate(1, (size_t)part->header.bytes);
  return part->source.memory ? ONEBIT_OK : merge_no_memory();
}

void *ob_merge_at(const struct ob_merge *merge, const struct ob_merge_piece *piece) {
  size_t size = ob_saved_rows[piece->section->what].size;
  return (unsigned char *)merge->merged->source.memory + piece->section->offset +
         piece->first * size;
}

uint64_t ob_merge_hash(const struct ob_merge *merge, const struct ob_merge_piece *piece) {
  struct ob_checksum sum = ob_checksum_begin();
  const unsigned char *values = ob_merge_at(merge, piece);
  size_t bytes = piece->count * ob_saved_rows[piece->section->what].size;
  uint64_t last = 0;
  ob_checksum_add(&sum, values, bytes);
  memcpy(&last, values + bytes / 8 * 8, bytes % 8);
  ob_checksum_add(&sum, &last, sizeof last);
  uint64_t hash = ob_checksum_end(&sum);
  return hash ? hash : 1;
}

size_t ob_merge_tensor(const struct ob_merge *merge, uint64_t element) {
  size_t low = 0, high = merge->optimizer->list_count;
  while (high - low > 1) {
    size_t middle = low + (high - low) / 2;
    if (merge->elements[middle] <= element)
      low = middle;
    else
      high = middle;
  }
  return low;
}

/* --- Pieces ------------------------------------------------------------------------------------*/

/* Returns true if the rank's section can be used. Padding depends on the number of ranks, which may
 * differ from the source's. A rank still in the warm-up, while the source is not, has no moments
 * yet. */
static bool is_section_usable(const struct ob_merge *merge, int rank,
                              const struct ob_part_section *section) {
  const struct ob_part_header *own = &merge->ranks[rank].header, *source = &merge->merged->header;
  bool same = own->padding == source->padding && own->ranks == source->ranks;
  bool known = own->stage != OB_STAGE_WARMUP || source->stage == OB_STAGE_WARMUP;
  if (section->what == OB_SAVED_MOMENTS && !known)
    return false;
  return merge->moving.holder[rank] && (section->space != OB_PADDING || same);
}

/* Returns the rank's section that has this element or, if there is none, its next section. */
static const struct ob_part_section *merge_find_section(const struct ob_merge *merge, int rank,
                                                        const struct ob_part_section *section,
                                                        uint64_t number) {
  if (!is_section_usable(merge, rank, section))
    return NULL;
  return ob_part_find_section(&merge->ranks[rank], (enum ob_saved)section->what,
                              (enum ob_space)section->space, number);
}

/* Returns the end of the piece that begins at `first`. Every rank has all elements of a piece or
 * none. */
static uint64_t find_piece_end(const struct ob_merge *merge, const struct ob_part_section *section,
                               uint64_t first) {
  uint64_t end = first - first % OB_CHUNK + OB_CHUNK;
  end = end < section->count ? end : section->count;
  if (section->what == OB_SAVED_MOMENTS && section->space == OB_ELEMENTS) {
    uint64_t tensor_end = merge->elements[ob_merge_tensor(merge, first) + 1];
    end = tensor_end < end ? tensor_end : end;
  }
  for (int rank = 0; rank < merge->moving.comm->size; rank++) {
    const struct ob_part_section *has = merge_find_section(merge, rank, section, first);
    uint64_t bound = !has ? end : has->first > first ? has->first : has->first + has->count;
    end = bound < end ? bound : end;
  }
  return end;
}

static bool has_piece(const struct ob_merge *merge, int rank, const struct ob_merge_piece *piece) {
  const struct ob_part_section *has = merge_find_section(merge, rank, piece->section, piece->first);
  return has && has->first <= piece->first;
}

/* Freezes the variance of this rank's piece if the source has frozen its variance and this rank has
 * not. */
static void merge_freeze(const struct ob_merge *merge, const struct ob_merge_piece *piece) {
  const struct onebit_optimizer *optimizer = merge->optimizer;
  if (optimizer->held || !optimizer->method->sharded || piece->section->what != OB_SAVED_VARIANCE ||
      own_header(merge)->stage != OB_STAGE_WARMUP || merge->merged->header.stage == OB_STAGE_WARMUP)
    return;
  struct ob_pass_factors factors = ob_make_factors(optimizer, optimizer->steps);
  float *values = ob_merge_at(merge, piece);
  for (size_t i = 0; i < piece->count; i++) {
    size_t tensor = ob_merge_tensor(merge, piece->first + i);
    if (!ob_is_uncompressed(optimizer, &optimizer->list[tensor]))
      values[i] = ob_adam_reciprocal(values[i], factors.keep_zero, &factors.adam);
  }
}

/* Copies this rank's piece into the merged part. Returns its hash, or 0 if this rank does not have
 * the piece. */
static uint64_t merge_read_own(struct ob_merge *merge, const struct ob_merge_piece *piece) {
  const struct onebit_optimizer *optimizer = merge->optimizer;
  const struct ob_part_section *has =
      merge_find_section(merge, merge->moving.comm->rank, piece->section, piece->first);
  onebit_status_t status = ONEBIT_OK;
  if (!has || has->first > piece->first)
    return 0;
  void *values = ob_merge_at(merge, piece);
  if (optimizer->held)
    ob_part_copy(optimizer->held, has, piece->first, piece->count, values);
  else
    status = ob_saving_read(&merge->saving, has, piece->first, piece->count, values);
  ob_outcome_add(&merge->outcome, status);
  merge_freeze(merge, piece);
  return status == ONEBIT_OK ? ob_merge_hash(merge, piece) : 0;
}

static onebit_status_t merge_next_window(struct ob_merge *merge,
                                         const struct ob_part_section *section, uint64_t *at) {
  struct ob_merge_piece pieces[OB_MERGE_WINDOW];
  uint64_t *own = merge->hashes + merge->moving.comm->rank * OB_MERGE_WINDOW;
  size_t count = 0;
  memset(own, 0, OB_MERGE_WINDOW * sizeof *own);
  for (; count < OB_MERGE_WINDOW && *at < section->count; count++) {
    uint64_t end = find_piece_end(merge, section, *at);
    pieces[count] = (struct ob_merge_piece){section, *at, (size_t)(end - *at)};
    own[count] = merge_read_own(merge, &pieces[count]);
    *at = end;
  }
  OB_TRY(merge_gather(&merge->moving, (unsigned char *)merge->hashes, merge->windows));
  for (size_t slot = 0; slot < count; slot++)
    OB_TRY(ob_merge_distribute(merge, &pieces[slot], slot));
  return ONEBIT_OK;
}

static onebit_status_t merge_section(struct ob_merge *merge,
                                     const struct ob_part_section *section) {
  for (uint64_t at = 0; at < section->count;)
    OB_TRY(merge_next_window(merge, section, &at));
  merge->variance = (struct ob_merge_variance){0};
  for (uint64_t at = 0, end; at < section->count; at = end) {
    end = find_piece_end(merge, section, at);
    struct ob_merge_piece piece = {section, at, (size_t)(end - at)};
    bool lost = true;
    for (int rank = 0; rank < merge->moving.comm->size; rank++)
      lost &= !has_piece(merge, rank, &piece);
    if (lost)
      OB_TRY(ob_merge_replace(merge, &piece));
  }
  return ONEBIT_OK;
}

/* --- The whole merge ---------------------------------------------------------------------------*/

/* Merges the sections. Ranks do not agree on a failure here: the other ranks get an error while
 * they wait for messages. */
static onebit_status_t merge_sections(struct ob_merge *merge) {
  onebit_status_t status = ONEBIT_OK;
  for (uint64_t i = 0; status == ONEBIT_OK && i < merge->merged->header.sections; i++)
    status = merge_section(merge, &merge->merged->sections[i]);
  if (status != ONEBIT_OK)
    ob_comm_give_up(merge->moving.comm, onebit_last_error());
  return status;
}

static onebit_status_t merge_run(struct ob_merge *merge, onebit_status_t status) {
  OB_TRY(gather_fronts(merge, status));
  OB_TRY(ob_agree(merge->moving.comm, merge_lay_out(merge), NULL, 0));
  OB_TRY(merge_sections(merge));
  return ob_agree(merge->moving.comm, ob_outcome_status(&merge->outcome), NULL, 0);
}

/* Keeps the memory of messages that could not be cancelled. */
static void keep_message_memory(struct ob_merge *merge) {
  ob_memory_keep(merge->fronts);
  ob_memory_keep(merge->hashes);
  ob_memory_keep(merge->received);
  merge->fronts = NULL;
  merge->hashes = NULL;
  merge->received = NULL;
  if (merge->merged) {
    ob_memory_keep((void *)merge->merged->source.memory);
    merge->merged->source.memory = NULL;
  }
}

static void merge_close(struct ob_merge *merge) {
  if (!ob_moving_destroy(&merge->moving))
    keep_message_memory(merge);
  ob_saving_destroy(&merge->saving);
  ob_release(merge->ranks);
  ob_release(merge->starts);
  ob_release(merge->fronts);
  ob_release(merge->elements);
  ob_release(merge->hashes);
  ob_release(merge->received);
  ob_release(merge->sums);
  ob_part_release(merge->merged);
}

onebit_status_t ob_merge(onebit_optimizer_t optimizer, onebit_comm_t comm, struct ob_part **part) {
  struct ob_merge merge = {.optimizer = optimizer, .state = ob_optimizer_state(optimizer)};
  onebit_status_t status = merge_run(&merge, merge_open_own(&merge, comm));
  *part = NULL;
  if (status == ONEBIT_OK) {
    *part = merge.merged;
    merge.merged = NULL;
  }
  merge_close(&merge);
  return status;
}
