/*
 * Exchanges drifts as sparse messages (compression/sparse.h). Every rank sends its message to all
 * others, as words that a dense allgather moves unchanged. So the allgather's plan handles waits,
 * checksums and failures. A rank's message:
 *
 *   word 0   1: a value is not finite, and all ranks skip the exchange; else 0
 *   then     piece by piece: sparse words, or float32 values of one that stays uncompressed
 *
 * All ranks decode the same messages in the same order, so they have the same mean, and the same
 * status if a message is not sound.
 */
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "collectives/communicator.h"
#include "compression/sparse.h"
#include "optimizers/outer/outer.h"

/* The factor of a residual in the next exchange, as in SparseLoCo, where the residual is a decaying
 * momentum (arXiv 2508.15706). */
#define RESIDUAL_DECAY 0.95f

struct sparse {
  onebit_plan_t plan;
  size_t words;           /* the number of words in a message */
  uint32_t *own, *all;    /* this rank's message, and those of all */
  float *residual, *next; /* fragment->count each; next: the residual of the exchange in flight */
  const void **inputs;    /* one for each rank, all equal to `own` */
  void **outputs;
};

static struct sparse *fragment_sparse(const struct ob_fragment *fragment) {
  return fragment->state;
}

static size_t piece_word_count(const struct ob_outer_piece *piece) {
  return piece->uncompressed ? piece->count : ob_sparse_bytes(piece->count) / sizeof(uint32_t);
}

static onebit_status_t outer_sparse_allocate(struct ob_fragment *fragment) {
  struct onebit_outer *outer = fragment->outer;
  const size_t ranks = (size_t)onebit_comm_size(outer->comm);
  struct sparse *sparse = ob_outer_allocate(outer, 1, sizeof *sparse);
  fragment->state = sparse;
  if (!sparse)
    return ob_outer_no_memory(outer);
  sparse->words = 1;
  for (size_t k = 0; k < fragment->pieces; k++)
    sparse->words += piece_word_count(&fragment->piece[k]);
  sparse->own = ob_outer_allocate(outer, sparse->words, sizeof *sparse->own);
  sparse->all = ob_outer_allocate(outer, sparse->words * ranks, sizeof *sparse->all);
  sparse->residual = ob_outer_allocate(outer, fragment->count, sizeof(float));
  sparse->next = ob_outer_allocate(outer, fragment->count, sizeof(float));
  sparse->inputs = ob_outer_allocate(outer, ranks, sizeof *sparse->inputs);
  sparse->outputs = ob_outer_allocate(outer, ranks, sizeof *sparse->outputs);
  if (!sparse->own || !sparse->all || !sparse->residual || !sparse->next || !sparse->inputs ||
      !sparse->outputs)
    return ob_outer_no_memory(outer);
  for (size_t rank = 0; rank < ranks; rank++) {
    sparse->inputs[rank] = sparse->own;
    sparse->outputs[rank] = sparse->all + rank * sparse->words;
  }
  return ONEBIT_OK;
}

/* Creates the plan of the allgather, with a piece for each rank, all of the same length. */
static onebit_status_t outer_sparse_create_plan(struct ob_fragment *fragment, size_t *counts) {
  struct onebit_outer *outer = fragment->outer;
  struct sparse *sparse = fragment_sparse(fragment);
  struct ob_plan_shape shape;
  onebit_status_t status = ob_outer_shape(outer, true, &shape);
  shape.options.operation = ONEBIT_ALLGATHER;
  shape.options.schedule = ONEBIT_SCHEDULE_AUTOMATIC;
  shape.pieces = (size_t)onebit_comm_size(outer->comm);
  shape.counts = counts;
  shape.valid = NULL;
  shape.segment_a_piece = shape.of_segments = true;
  shape.refused = &outer->refused;
  for (size_t rank = 0; rank < shape.pieces; rank++)
    counts[rank] = sparse->words;
  return ob_plan_create(outer->comm, status, &shape, sparse->words * shape.pieces, &sparse->plan);
}

static onebit_status_t outer_sparse_create(struct ob_fragment *fragment) {
  struct onebit_outer *outer = fragment->outer;
  size_t *counts = ob_allocate((size_t)onebit_comm_size(outer->comm), sizeof *counts);
  onebit_status_t status = counts
                               ? outer_sparse_allocate(fragment)
                               : ob_error(ONEBIT_ERROR_MEMORY, "out of memory for an outer step");
  status = ob_agree(outer->comm, status, NULL, 0);
  if (status == ONEBIT_OK)
    status = outer_sparse_create_plan(fragment, counts);
  ob_release(counts);
  return status;
}

static void outer_sparse_destroy(struct ob_fragment *fragment) {
  struct sparse *sparse = fragment_sparse(fragment);
  if (!sparse)
    return;
  onebit_plan_destroy(sparse->plan);
  ob_release(sparse->own);
  ob_release(sparse->all);
  ob_release(sparse->residual);
  ob_release(sparse->next);
  ob_release((void *)sparse->inputs);
  ob_release(sparse->outputs);
  ob_release(sparse);
  fragment->state = NULL;
}

/* --- An exchange -------------------------------------------------------------------------------*/

static void compensate_drift(const float *residual, const float *drift, float decay, float factor,
                             float *next, size_t count) {
  for (size_t i = 0; i < count; i++)
    next[i] = decay * residual[i] + factor * drift[i];
}

/* Writes this rank's message. Returns whether all values are finite. */
static bool outer_sparse_write_message(struct ob_fragment *fragment) {
  const onebit_outer_options_t *options = &fragment->outer->options;
  const float decay = options->no_error_feedback ? 0 : RESIDUAL_DECAY;
  struct sparse *sparse = fragment_sparse(fragment);
  uint32_t *message = sparse->own + 1;
  bool finite = fragment->finite;
  for (size_t k = 0; finite && k < fragment->pieces; k++) {
    const struct ob_outer_piece *piece = &fragment->piece[k];
    float *next = sparse->next + piece->at;
    compensate_drift(sparse->residual + piece->at, fragment->drift + piece->at, decay,
                     fragment->factor, next, piece->count);
    if (!piece->uncompressed) {
      finite = ob_sparse_compress(next, piece->count, message);
    } else {
      memcpy(message, next, piece->count * sizeof *next);
      memset(next, 0, piece->count * sizeof *next);
    }
    message += piece_word_count(piece);
  }
  return finite;
}

static onebit_status_t outer_sparse_begin(struct ob_fragment *fragment, onebit_status_t status) {
  struct sparse *sparse = fragment_sparse(fragment);
  const struct ob_call call = {.source = {.inputs = sparse->inputs, .factor = 1, .weight = 1},
                               .outputs = sparse->outputs,
                               .agreed = fragment->checksum,
                               .agreed_name = "the consensus (its checksum)",
                               .agreed_whole = true};
  if (status == ONEBIT_OK)
    sparse->own[0] = !outer_sparse_write_message(fragment);
  return ob_plan_start(sparse->plan, status, &call);
}

static onebit_status_t check_message(const struct ob_fragment *fragment, size_t rank) {
  const struct sparse *sparse = fragment_sparse(fragment);
  const uint32_t *message = sparse->all + rank * sparse->words;
  if (message[0] > 1)
    return ob_error(ONEBIT_ERROR_MESSAGE,
                    "from rank %zu: a sparse message begins with the flag %u, not 0 or 1", rank,
                    message[0]);
  if (message[0])
    return ob_error(ONEBIT_SKIPPED, "the drift of rank %zu is not finite", rank);
  message++;
  for (size_t k = 0; k < fragment->pieces; k++) {
    const struct ob_outer_piece *piece = &fragment->piece[k];
    const size_t bytes = piece_word_count(piece) * sizeof *message;
    if (!piece->uncompressed && ob_sparse_check(message, bytes, piece->count) != ONEBIT_OK)
      return ob_error(ONEBIT_ERROR_MESSAGE, "from rank %zu: %.200s", rank, onebit_last_error());
    message += piece_word_count(piece);
  }
  return ONEBIT_OK;
}

/* Adds a rank's message; called in the order of the ranks. */
static void add_message(struct ob_fragment *fragment, size_t rank, float weight) {
  const struct sparse *sparse = fragment_sparse(fragment);
  const uint32_t *message = sparse->all + rank * sparse->words + 1;
  for (size_t k = 0; k < fragment->pieces; k++) {
    const struct ob_outer_piece *piece = &fragment->piece[k];
    float *drift = fragment->drift + piece->at;
    if (!piece->uncompressed)
      ob_sparse_add(message, piece->count, weight, drift);
    for (size_t i = 0; piece->uncompressed && i < piece->count; i++)
      drift[i] += weight * ob_float_of(message[i]);
    message += piece_word_count(piece);
  }
}

static onebit_status_t outer_sparse_test(struct ob_fragment *fragment, bool wait) {
  struct sparse *sparse = fragment_sparse(fragment);
  const size_t ranks = (size_t)onebit_comm_size(fragment->outer->comm);
  onebit_status_t status = ob_plan_test(sparse->plan, wait);
  for (size_t rank = 0; status == ONEBIT_OK && rank < ranks; rank++)
    status = check_message(fragment, rank);
  if (status != ONEBIT_OK)
    return status;
  memset(fragment->drift, 0, fragment->count * sizeof *fragment->drift);
  for (size_t rank = 0; rank < ranks; rank++)
    add_message(fragment, rank, 1 / (float)ranks);
  float *residual = sparse->residual;
  sparse->residual = sparse->next;
  sparse->next = residual;
  return ONEBIT_OK;
}

static void outer_sparse_abandon(struct ob_fragment *fragment) {
  ob_plan_abandon(fragment_sparse(fragment)->plan);
}

static void outer_sparse_cost(const struct ob_fragment *fragment, uint64_t *wire,
                              uint64_t *memory) {
  *wire = ob_plan_wire_bytes(fragment_sparse(fragment)->plan);
  *memory = ob_plan_memory_bytes(fragment_sparse(fragment)->plan);
}

/* --- The residual ------------------------------------------------------------------------------*/

static struct ob_run outer_sparse_extent(const struct ob_fragment *fragment, enum ob_saved what,
                                         size_t k) {
  const bool none = what == OB_SAVED_SERVER || fragment->outer->options.no_error_feedback;
  return (struct ob_run){k, 0, none ? 0 : fragment->piece[k].count};
}

static onebit_status_t outer_sparse_export_residual(const struct ob_fragment *fragment,
                                                    enum ob_saved what, float *values) {
  (void)what;
  memcpy(values, fragment_sparse(fragment)->residual, fragment->count * sizeof *values);
  return ONEBIT_OK;
}

static onebit_status_t outer_sparse_import_residual(struct ob_fragment *fragment,
                                                    enum ob_saved what, const float *values) {
  (void)what;
  memcpy(fragment_sparse(fragment)->residual, values, fragment->count * sizeof *values);
  return ONEBIT_OK;
}

const struct ob_outer_exchange ob_outer_sparse = {.name = "sparse",
                                                  .create = outer_sparse_create,
                                                  .destroy = outer_sparse_destroy,
                                                  .begin = outer_sparse_begin,
                                                  .test = outer_sparse_test,
                                                  .abandon = outer_sparse_abandon,
                                                  .cost = outer_sparse_cost,
                                                  .extent = outer_sparse_extent,
                                                  .export_residual = outer_sparse_export_residual,
                                                  .import_residual = outer_sparse_import_residual};
