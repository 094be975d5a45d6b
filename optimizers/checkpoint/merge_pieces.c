/* Sends pieces of the merged part to the ranks that do not have them, and replaces lost pieces. */
#include <string.h>

#include "base/error.h"
#include "optimizers/checkpoint/merge.h"

static uint64_t piece_hash(const struct ob_merge *merge, int rank, size_t slot) {
  return merge->hashes[(size_t)rank * OB_MERGE_WINDOW + slot];
}

static size_t piece_bytes(const struct ob_merge_piece *piece) {
  return piece->count * ob_saved_rows[piece->section->what].size;
}

/* --- Pieces that one rank sends to all ---------------------------------------------------------*/

/* Returns the rank whose copy of the piece is used: the source, or else the lowest rank that has
 * the piece; -1 if no rank has it. */
static int choose_original(const struct ob_merge *merge, size_t slot) {
  if (piece_hash(merge, merge->moving.source, slot))
    return merge->moving.source;
  for (int rank = 0; rank < merge->moving.comm->size; rank++)
    if (piece_hash(merge, rank, slot))
      return rank;
  return -1;
}

/* Returns the rank that sends a piece: ranks that have the same values take turns. */
static int choose_sender(const struct ob_merge *merge, size_t slot, uint64_t hash) {
  int count = 0, turn;
  for (int rank = 0; rank < merge->moving.comm->size; rank++)
    count += piece_hash(merge, rank, slot) == hash;
  turn = (int)(slot % (size_t)count);
  for (int rank = 0;; rank++)
    if (piece_hash(merge, rank, slot) == hash && turn-- == 0)
      return rank;
}

static onebit_status_t check_received(const struct ob_merge *merge,
                                      const struct ob_merge_piece *piece, int from, uint64_t hash) {
  if (ob_merge_hash(merge, piece) == hash)
    return ONEBIT_OK;
  return ob_error(
      ONEBIT_ERROR_MESSAGE,
      "from rank %d: section '%s' arrived damaged: its hash differs from the sender's hash", from,
      ob_saved_rows[piece->section->what].name);
}

static onebit_status_t distribute_piece(struct ob_merge *merge, const struct ob_merge_piece *piece,
                                        size_t slot) {
  const int original = choose_original(merge, slot);
  if (original < 0)
    return ONEBIT_OK;
  const uint64_t hash = piece_hash(merge, original, slot);
  const int from = choose_sender(merge, slot, hash);
  for (int rank = 0; rank < merge->moving.comm->size; rank++)
    merge->moving.wants[rank] = piece_hash(merge, rank, slot) != hash;
  OB_TRY(ob_moving_broadcast(&merge->moving, from, ob_merge_at(merge, piece), piece_bytes(piece)));
  return merge->moving.wants[merge->moving.comm->rank] ? check_received(merge, piece, from, hash)
                                                       : ONEBIT_OK;
}

/* --- Pieces that differ between ranks, and their means -----------------------------------------*/

static void compute_mean(struct ob_merge *merge, const struct ob_merge_piece *piece, size_t slot,
                         float *mean) {
  const float *own = ob_merge_at(merge, piece);
  double *sums = merge->sums;
  int count = 0;
  for (size_t i = 0; i < piece->count; i++)
    sums[i] = -0.0;
  for (int rank = 0; rank < merge->moving.comm->size; rank++) {
    const float *of =
        rank == merge->moving.comm->rank ? own : merge->received + (size_t)rank * OB_CHUNK;
    if (!piece_hash(merge, rank, slot))
      continue;
    for (size_t i = 0; i < piece->count; i++)
      sums[i] += (double)of[i];
    count++;
  }
  for (size_t i = 0; i < piece->count; i++)
    mean[i] = (float)(sums[i] / count);
}

/* One of the ranks that hold a piece computes the mean of their copies, and sends it to the ranks
 * without the piece, or to all ranks. */
static onebit_status_t distribute_mean(struct ob_merge *merge, const struct ob_merge_piece *piece,
                                       size_t slot, bool to_all) {
  struct ob_moving *moving = &merge->moving;
  const int me = moving->comm->rank, size = moving->comm->size;
  int holders = 0, at = -1;
  for (int rank = 0; rank < size; rank++)
    holders += piece_hash(merge, rank, slot) != 0;
  if (!holders || (holders == size && !to_all))
    return ONEBIT_OK;
  for (int rank = 0, turn = (int)(slot % (size_t)holders); at < 0; rank++)
    if (piece_hash(merge, rank, slot) && turn-- == 0)
      at = rank;
  float *values = ob_merge_at(merge, piece), *mean = to_all ? values : merge->received;
  for (int rank = 0; me == at && rank < size; rank++)
    if (rank != me && piece_hash(merge, rank, slot))
      ob_moving_receive(moving, merge->received + (size_t)rank * OB_CHUNK, piece_bytes(piece),
                        rank);
  if (piece_hash(merge, me, slot) && me != at)
    ob_moving_send(moving, values, piece_bytes(piece), at);
  OB_TRY(ob_moving_exchange(moving));
  if (me == at)
    compute_mean(merge, piece, slot, mean);
  for (int rank = 0; rank < size; rank++)
    moving->wants[rank] = to_all || !piece_hash(merge, rank, slot);
  return ob_moving_broadcast(moving, at, me == at ? mean : values, piece_bytes(piece));
}

/* Distributes a piece. Moments of uncompressed tensors come from the mean gradient, so they are
 * equal on all ranks. */
onebit_status_t ob_merge_distribute(struct ob_merge *merge, const struct ob_merge_piece *piece,
                                    size_t slot) {
  const struct onebit_optimizer *optimizer = merge->optimizer;
  const struct ob_part_section *section = piece->section;
  bool moments = section->what == OB_SAVED_MOMENTS && section->space == OB_ELEMENTS;
  if (moments &&
      ob_is_uncompressed(optimizer, &optimizer->list[ob_merge_tensor(merge, piece->first)]))
    return distribute_piece(merge, piece, slot);
  if (ob_saved_is_own((enum ob_saved)section->what, merge->merged->header.apart))
    return distribute_mean(merge, piece, slot, !ob_saved_rows[section->what].own);
  return distribute_piece(merge, piece, slot);
}

/* --- State that is lost -----------------------------------------------------------------------*/

/* Adds a variance to the sum or, if the stage stores reciprocals, the denominator. Elements without
 * variance do not count. */
static void add_variance(float value, bool reciprocal, double *sum, size_t *count) {
  if (value > 0) {
    *sum += reciprocal ? 1 / (double)value : (double)value;
    ++*count;
  }
}

/* Returns the mean variance of the elements first .. end - 1; 0 if there are none. */
static float mean_variance(const struct ob_merge *merge, const struct ob_merge_piece *piece,
                           uint64_t first, uint64_t end, bool reciprocal) {
  double sum = 0;
  size_t count = 0;
  const struct ob_merge_piece all = {piece->section, 0, 0};
  const float *values = ob_merge_at(merge, &all);
  for (uint64_t i = first; i < end; i++)
    add_variance(values[i], reciprocal, &sum, &count);
  return count ? (float)(reciprocal ? (double)count / sum : sum / (double)count) : 0;
}

/* Returns the value that replaces a lost variance: the mean over its tensor's other elements or, if
 * there are none, over all tensors. After the warm-up, it is a reciprocal in compressed tensors. */
static float find_replacement_variance(struct ob_merge *merge, const struct ob_merge_piece *piece,
                                       size_t tensor) {
  const struct onebit_optimizer *optimizer = merge->optimizer;
  bool reciprocal = merge->merged->header.stage != OB_STAGE_WARMUP &&
                    !ob_is_uncompressed(optimizer, &optimizer->list[tensor]);
  struct ob_merge_variance *latest = &merge->variance;
  if (latest->known && latest->tensor == tensor)
    return latest->mean;
  latest->mean =
      mean_variance(merge, piece, merge->elements[tensor], merge->elements[tensor + 1], reciprocal);
  if (latest->mean == 0 && !latest->known_of_all[reciprocal]) {
    latest->of_all[reciprocal] =
        mean_variance(merge, piece, 0, merge->elements[optimizer->list_count], reciprocal);
    latest->known_of_all[reciprocal] = true;
  }
  latest->mean = latest->mean == 0 ? latest->of_all[reciprocal] : latest->mean;
  latest->tensor = tensor;
  latest->known = true;
  return latest->mean;
}

static void replace_variance(struct ob_merge *merge, const struct ob_merge_piece *piece) {
  float *values = ob_merge_at(merge, piece);
  for (size_t i = 0, end; i < piece->count; i = end) {
    size_t tensor = ob_merge_tensor(merge, piece->first + i);
    uint64_t left = merge->elements[tensor + 1] - piece->first;
    float mean = find_replacement_variance(merge, piece, tensor);
    end = left < piece->count ? (size_t)left : piece->count;
    for (size_t k = i; k < end; k++)
      values[k] = mean;
  }
}

/* Reads the caller's parameters in place of lost master values. All ranks have all of the caller's
 * parameters; master values are lost only with sharded state. */
static void read_caller_parameters(const struct ob_merge *merge,
                                   const struct ob_merge_piece *piece) {
  const struct onebit_optimizer *optimizer = merge->optimizer;
  float *values = ob_merge_at(merge, piece);
  for (size_t i = 0; i < piece->count; i++) {
    uint64_t element = piece->first + i;
    size_t tensor = ob_merge_tensor(merge, element);
    values[i] =
        ob_load(optimizer->list[tensor].parameter, (size_t)(element - merge->elements[tensor]),
                optimizer->options.parameter_dtype);
  }
}

static onebit_status_t replace_parameters(struct ob_merge *merge,
                                          const struct ob_merge_piece *piece) {
  struct ob_moving *moving = &merge->moving;
  if (moving->comm->rank == moving->source)
    read_caller_parameters(merge, piece);
  memset(moving->wants, true, (size_t)moving->comm->size);
  return ob_moving_broadcast(moving, moving->source, ob_merge_at(merge, piece), piece_bytes(piece));
}

/* Lost momentum and residuals become zeros, which the memory has already. */
onebit_status_t ob_merge_replace(struct ob_merge *merge, const struct ob_merge_piece *piece) {
  if (piece->section->what == OB_SAVED_PARAMETERS)
    return replace_parameters(merge, piece);
  if (piece->section->what == OB_SAVED_VARIANCE && piece->section->space == OB_ELEMENTS)
    replace_variance(merge, piece);
  return ONEBIT_OK;
}
