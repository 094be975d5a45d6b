/* Declares the state of an outer step for checkpoints, and implements the calls that save it. */

#include "base/call_scope.h"
#include "base/error.h"
#include "base/memory.h"
#include "collectives/communicator.h"
#include "onebit/checkpoint.h"
#include "optimizers/outer/sites.h"

/* --- Exchanges in flight -----------------------------------------------------------------------*/

static onebit_status_t save_agree_started(struct onebit_outer *outer, onebit_status_t status) {
  const struct ob_term term = {"the number of exchanges that have begun", outer->started};
  return ob_agree(outer->comm, status, &term, 1);
}

static onebit_status_t outer_save_check(onebit_outer_t outer) {
  OB_TRY(ob_handle_check(outer, OB_HANDLE_OUTER, "outer"));
  return ob_outer_check_attached(outer);
}

/* Refuses to save while only some pieces of a consensus have arrived. Drifts whose delay is not
 * over are saved, to be sent again. */
static onebit_status_t check_no_torn_shard(const struct onebit_outer *outer) {
  for (size_t f = 0; outer->sites && f < outer->options.fragments; f++)
    if (((const struct ob_shard *)outer->fragments[f].state)->torn)
      return ob_error(
          ONEBIT_ERROR_UNSUPPORTED,
          "rounds that this site missed are still arriving: save after a later exchange");
  return ONEBIT_OK;
}

onebit_status_t ob_outer_settle(struct onebit_outer *outer) {
  onebit_status_t status = ONEBIT_OK;
  for (size_t f = 0; f < outer->options.fragments; f++) {
    struct ob_fragment *fragment = &outer->fragments[f];
    ob_fragment_wait(fragment);
    const bool failed = fragment->stage == OB_FRAGMENT_ENDED &&
                        fragment->outcome.status != ONEBIT_OK &&
                        fragment->outcome.status != ONEBIT_SKIPPED;
    if (failed && status == ONEBIT_OK)
      status = ob_outcome_status(&fragment->outcome);
  }
  return status;
}

/* --- The declaration of an outer step's state --------------------------------------------------*/

static struct ob_fragment_numbers make_fragment_numbers(const struct ob_fragment *fragment) {
  const bool idle = fragment->stage == OB_FRAGMENT_IDLE;
  const uint64_t steps = fragment->outer->steps;
  const struct ob_shard *shard = fragment->outer->sites ? fragment->state : NULL;
  const double unsent = shard && shard->in_flight && idle ? fragment->sent_weight : 0;
  return (struct ob_fragment_numbers){
      .count = fragment->count,
      .state = idle                                    ? OB_OUTER_IDLE
               : shard                                 ? OB_OUTER_SENT
               : fragment->outcome.status == ONEBIT_OK ? OB_OUTER_RECEIVED
                                                       : OB_OUTER_SKIPPED,
      .remaining = idle || fragment->apply_step < steps ? 0 : fragment->apply_step - steps,
      .finite = idle || fragment->finite,
      .keeps = fragment->keeps,
      .weight = fragment->weight + unsent,
      .sent_weight = idle ? 0 : fragment->sent_weight,
      .squares = fragment->drift_squares};
}

static void fill_in_numbers(const struct onebit_outer *outer, struct ob_outer_numbers *numbers) {
  numbers->steps = outer->steps;
  numbers->position = outer->position % outer->options.local_steps;
  numbers->local_steps = outer->options.local_steps;
  for (size_t f = 0; f < outer->options.fragments; f++)
    numbers->fragment[f] = make_fragment_numbers(&outer->fragments[f]);
}

static onebit_status_t outer_save_describe(struct ob_saving *saving) {
  struct onebit_outer *outer = saving->state->object;
  struct ob_part_header *header = &saving->header;
  outer->numbers = ob_allocate(ob_outer_number_count(outer), sizeof(uint64_t));
  if (!outer->numbers)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for saving an outer step");
  fill_in_numbers(outer, outer->numbers);
  header->weighted = (uint32_t)outer->options.weighted;
  header->momentum = outer->options.rule != ONEBIT_OUTER_MEAN;
  header->fragments = (uint32_t)outer->options.fragments;
  header->apart = true;
  header->steps = outer->options.weighted && !outer->sites ? outer->started : outer->steps;
  header->exchanges[0] = outer->started;
  header->exchanges[1] = outer->exchanges;
  header->exchanges[2] = outer->skipped;
  header->numbers = ob_outer_number_count(outer);
  return ONEBIT_OK;
}

static void outer_save_list_tensors(const void *object, struct ob_part_tensor *rows) {
  const struct onebit_outer *outer = object;
  for (size_t t = 0; t < outer->tensor_count; t++)
    rows[t] = (struct ob_part_tensor){outer->tensors[t].count, outer->tensors[t].uncompressed};
}

static size_t outer_save_list_stretches(const void *object, struct ob_stretch *all) {
  const struct onebit_outer *outer = object;
  for (size_t f = 0; all && f < outer->options.fragments; f++) {
    const struct ob_fragment *fragment = &outer->fragments[f];
    for (size_t k = 0; k < fragment->pieces; k++)
      *all++ = (struct ob_stretch){.first = {fragment->first + fragment->piece[k].at},
                                   .count = {fragment->piece[k].count},
                                   .bucket = f,
                                   .piece = k};
  }
  return outer->piece_count;
}

static bool outer_save_has(const struct ob_saving *saving, enum ob_saved what) {
  const struct onebit_outer *outer = saving->state->object;
  const bool others = what == OB_SAVED_NUMBERS || what == OB_SAVED_PARAMETERS ||
                      what == OB_SAVED_WORKER || what == OB_SAVED_SERVER;
  return others || (ob_outer_has_array(what) && outer->array[ob_saved_rows[what].slot]);
}

static const void *outer_save_number_at(void *object, enum ob_saved what, uint64_t i) {
  (void)what;
  return (const uint64_t *)(const void *)((const struct onebit_outer *)object)->numbers + i;
}

/* Returns true if fragment->drift is a mean that is not applied yet. */
static bool is_mean_received(const struct ob_fragment *fragment) {
  return fragment->stage == OB_FRAGMENT_ENDED && fragment->outcome.status == ONEBIT_OK;
}

static struct ob_run outer_save_extent(const struct ob_saving *saving, enum ob_saved what,
                                       const struct ob_stretch *stretch) {
  const struct onebit_outer *outer = saving->state->object;
  const struct ob_fragment *fragment = &outer->fragments[stretch->bucket];
  if (what == OB_SAVED_WORKER || what == OB_SAVED_SERVER)
    return outer->exchange->extent(fragment, what, stretch->piece);
  const bool there = what != OB_SAVED_DRIFT || is_mean_received(fragment);
  return (struct ob_run){.count = there ? fragment->piece[stretch->piece].count : 0};
}

static onebit_status_t outer_save_read_run(struct ob_saving *saving, enum ob_saved what, size_t f,
                                           const struct ob_run *run, float *values) {
  struct onebit_outer *outer = saving->state->object;
  const struct ob_fragment *fragment = &outer->fragments[f];
  const struct ob_outer_piece *piece = &fragment->piece[run->piece];
  OB_TRY(ob_outer_to_host(outer));
  if (!outer->array[OB_OUTER_HELD_WORKER])
    OB_TRY(ob_outer_hold_residuals(outer));
  const float *from = what == OB_SAVED_PARAMETERS ? NULL : ob_fragment_array(fragment, what);
  for (size_t i = run->offset, end = i + run->count; i < end; i++)
    *values++ = from ? from[piece->at + i]
                     : ob_load(outer->tensors[piece->tensor].parameter, piece->first + i,
                               outer->options.parameter_dtype);
  return ONEBIT_OK;
}

struct ob_state ob_outer_state(struct onebit_outer *outer) {
  return (struct ob_state){.object = outer,
                           .comm = outer->comm,
                           .kind = outer->sites
                                       ? "outer-sites" /* its ranks save and load by themselves */
                                       : "outer",
                           .noun = "kind",
                           .steps = outer->steps,
                           .tensors = outer->tensor_count,
                           .describe = outer_save_describe,
                           .list_tensors = outer_save_list_tensors,
                           .list_stretches = outer_save_list_stretches,
                           .has = outer_save_has,
                           .number = outer_save_number_at,
                           .extent = outer_save_extent,
                           .read = outer_save_read_run};
}

/* --- The calls ---------------------------------------------------------------------------------*/

static void outer_save_close(struct onebit_outer *outer) {
  (void)ob_outer_from_host(outer, false); /* values did not change: only pointers do */
  ob_outer_release_held(outer);
  ob_release(outer->numbers);
  outer->numbers = NULL;
}

onebit_status_t onebit_outer_save(onebit_outer_t outer, void *memory, size_t capacity,
                                  size_t *bytes) {
  OB_CALL_SCOPE;
  OB_TRY(outer_save_check(outer));
  if (!bytes)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "bytes is NULL");
  *bytes = 0;
  OB_TRY(ob_outer_settle(outer));
  OB_TRY(check_no_torn_shard(outer));
  const struct ob_state state = ob_outer_state(outer);
  const onebit_status_t status = ob_state_save(&state, false, memory, capacity, bytes);
  outer_save_close(outer);
  return status;
}

onebit_status_t onebit_outer_save_files(onebit_outer_t outer, const char *directory) {
  OB_CALL_SCOPE;
  OB_TRY(outer_save_check(outer));
  OB_TRY(save_agree_started(outer, ONEBIT_OK));
  onebit_status_t status = ob_outer_settle(outer);
  if (status == ONEBIT_OK)
    status = check_no_torn_shard(outer);
  const struct ob_state state = ob_outer_state(outer);
  status = ob_state_save_files(&state, status, directory);
  outer_save_close(outer);
  return status;
}
