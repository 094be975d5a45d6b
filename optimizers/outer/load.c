/*
 * Loads an outer step from the parts of all ranks that saved one, in two passes: the first one,
 * dry, checks everything that is needed and changes nothing; in the second one only reading a file
 * can fail.
 *
 * The same number of ranks continues with the same bits. If the number of ranks differs, each rank
 * begins with means of the state that was different on each rank. So the mean of drifts and
 * residuals, which are not exchanged yet, stays the same.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/memory.h"
#include "onebit/checkpoint.h"
#include "optimizers/outer/sites.h"

/* --- Checks of a part --------------------------------------------------------------------------*/

static onebit_status_t load_check_part(const struct ob_part *part,
                                       const struct onebit_outer *outer) {
  const struct ob_part_header *header = &part->header;
  const bool momentum = outer->options.rule != ONEBIT_OUTER_MEAN;
  if (header->momentum != momentum)
    return ob_part_error(part,
                         "it was saved with%s outer momentum, but is loaded with%s outer momentum",
                         header->momentum ? "" : "out", momentum ? "" : "out");
  if (header->weighted != (uint32_t)outer->options.weighted)
    return ob_part_error(part, "it was saved with%s weights, but is loaded with%s weights",
                         header->weighted ? "" : "out", outer->options.weighted ? "" : "out");
  if (header->fragments != outer->options.fragments)
    return ob_part_error(part, "it was saved with %" PRIu32 " fragments, but is loaded with %zu",
                         header->fragments, outer->options.fragments);
  if (header->numbers != ob_outer_number_count(outer))
    return ob_part_error(
        part, "it has %" PRIu64 " numbers, but an outer step with this many fragments has %zu",
        header->numbers, ob_outer_number_count(outer));
  return ONEBIT_OK;
}

static bool is_valid_weight(double value) { return value >= 0 && value <= 1e300; }

static onebit_status_t check_fragment(const struct ob_part *part,
                                      const struct ob_fragment_numbers *numbers,
                                      const struct ob_fragment *fragment) {
  if (numbers->count != fragment->count)
    return ob_part_error(part,
                         "fragment %zu has %zu elements here, but %" PRIu64
                         " in the checkpoint: use the block_size with which it was saved",
                         fragment->number, fragment->count, numbers->count);
  const uint64_t state = numbers->state;
  const bool is_state = fragment->outer->sites ? state == OB_OUTER_IDLE || state == OB_OUTER_SENT
                                               : state < OB_OUTER_SENT;
  if (!is_state || numbers->finite > 1 ||
      numbers->keeps > (fragment->outer->exchange->keep != NULL) ||
      !is_valid_weight(numbers->weight) || !is_valid_weight(numbers->sent_weight) ||
      !is_valid_weight(numbers->squares) || numbers->remaining > UINT32_MAX)
    return ob_part_error(part, "the numbers of fragment %zu describe an impossible state",
                         fragment->number);
  return ONEBIT_OK;
}

/* Checks the numbers of a part, also against those of the first part. */
static onebit_status_t load_check_numbers(const struct ob_part *part,
                                          const struct ob_outer_numbers *numbers,
                                          const struct onebit_outer *outer,
                                          const struct ob_outer_numbers *first) {
  const uint64_t rounds = numbers->local_steps;
  if (rounds < (outer->sites ? 1 : outer->options.fragments) || rounds > UINT32_MAX ||
      numbers->position >= rounds)
    return ob_part_error(part, "step %" PRIu64 " of a round of %" PRIu64 " steps is impossible",
                         numbers->position, rounds);
  for (size_t f = 0; f < outer->options.fragments; f++) {
    OB_TRY(check_fragment(part, &numbers->fragment[f], &outer->fragments[f]));
    if (numbers->fragment[f].state != first->fragment[f].state)
      return ob_part_error(part, "fragment %zu has another state than in part 0", f);
  }
  return ONEBIT_OK;
}

struct loading {
  struct onebit_outer *outer;
  struct ob_parts *parts;
  uint64_t *numbers; /* the numbers of all parts */
  double *factors;   /* the weight of each part in the fragment that is being loaded */
  float *values;     /* scratch for the longest fragment, or OB_CHUNK elements */
  bool dry;
};

static struct ob_outer_numbers *part_numbers(const struct loading *loading, int part) {
  return (void *)(loading->numbers + (size_t)part * ob_outer_number_count(loading->outer));
}

static const struct ob_fragment_numbers *fragment_numbers(const struct loading *loading, int part,
                                                          const struct ob_fragment *fragment) {
  return &part_numbers(loading, part)->fragment[fragment->number];
}

static onebit_status_t read_part_numbers(struct loading *loading, int k) {
  struct ob_part *part = &loading->parts->list[k];
  const size_t count = ob_outer_number_count(loading->outer);
  const struct ob_part_section *section;
  OB_TRY(ob_part_find_numbers(part, OB_SAVED_NUMBERS, count, &section));
  OB_TRY(ob_part_copy(part, section, 0, count, part_numbers(loading, k)));
  return load_check_numbers(part, part_numbers(loading, k), loading->outer,
                            part_numbers(loading, 0));
}

static onebit_status_t outer_load_allocate(struct loading *loading) {
  const struct onebit_outer *outer = loading->outer;
  const size_t count = (size_t)loading->parts->count;
  const size_t longest = outer->longest > OB_CHUNK ? outer->longest : OB_CHUNK;
  loading->numbers = ob_allocate(count * ob_outer_number_count(outer), sizeof *loading->numbers);
  loading->factors = ob_allocate(count, sizeof *loading->factors);
  loading->values = ob_allocate(longest, sizeof *loading->values);
  if (!loading->numbers || !loading->factors || !loading->values)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for loading an outer step");
  return ONEBIT_OK;
}

/* --- A fragment --------------------------------------------------------------------------------*/

/* Returns the part with whose numbers this rank continues. */
static int continued_part(const struct loading *loading) {
  return loading->outer->comm->rank % loading->parts->count;
}

/* Reads `count` elements from number `first` on; if `to` is NULL, it only checks them. */
static onebit_status_t outer_load_read_elements(struct loading *loading, enum ob_saved what,
                                                uint64_t first, size_t count, float *to) {
  for (size_t some; count; first += some, count -= some) {
    some = count < OB_CHUNK ? count : OB_CHUNK;
    const struct ob_range range = {what, OB_ELEMENTS, first, some};
    OB_TRY(ob_parts_read(loading->parts, &range, loading->dry ? NULL : to));
    to = to ? to + some : NULL;
  }
  return ONEBIT_OK;
}

/* Sets the factor of each part in a mean: parts are weighted like the local steps of their
 * ranks. */
static void choose_factors(struct loading *loading, const struct ob_fragment *fragment) {
  const int count = loading->parts->count;
  double sum = 0;
  for (int k = 0; k < count; k++) {
    loading->factors[k] = fragment_numbers(loading, k, fragment)->weight;
    sum += loading->factors[k];
  }
  for (int k = 0; k < count; k++)
    loading->factors[k] *= count / sum;
  loading->parts->factors = sum > 0 ? loading->factors : NULL;
}

/* Stores the parameters. The drift of a former rank counts as zero if it was not finite. */
static void store_parameters(struct ob_fragment *fragment, const float *values, bool own) {
  const struct onebit_outer *outer = fragment->outer;
  for (size_t k = 0; k < fragment->pieces; k++) {
    const struct ob_outer_piece *piece = &fragment->piece[k];
    for (size_t i = 0; i < piece->count; i++) {
      const float value = values[piece->at + i];
      const bool usable = own || ob_is_finite(value);
      ob_store(outer->tensors[piece->tensor].parameter, piece->first + i,
               outer->options.parameter_dtype, usable ? value : fragment->consensus[piece->at + i]);
    }
  }
}

static onebit_status_t load_parameters(struct loading *loading, struct ob_fragment *fragment) {
  choose_factors(loading, fragment);
  onebit_status_t status = outer_load_read_elements(loading, OB_SAVED_PARAMETERS, fragment->first,
                                                    fragment->count, loading->values);
  loading->parts->factors = NULL;
  if (status == ONEBIT_OK && !loading->dry)
    store_parameters(fragment, loading->values, loading->parts->own >= 0);
  return status;
}

/* Reads this rank's elements of a residual to their places in loading->values. */
static onebit_status_t load_residual_elements(struct loading *loading,
                                              const struct ob_fragment *fragment,
                                              enum ob_saved what) {
  for (size_t k = 0; k < fragment->pieces; k++) {
    const struct ob_run run = loading->outer->exchange->extent(fragment, what, k);
    const size_t at = fragment->piece[k].at + run.offset;
    OB_TRY(outer_load_read_elements(loading, what, fragment->first + at, run.count,
                                    loading->values + at));
  }
  return ONEBIT_OK;
}

static onebit_status_t load_residual(struct loading *loading, struct ob_fragment *fragment,
                                     enum ob_saved what) {
  OB_TRY(load_residual_elements(loading, fragment, what));
  if (loading->dry)
    return ONEBIT_OK;
  return ob_outer_import_residual(fragment, what, loading->values, loading->values);
}

/* Returns true if the loaded parameters contain a residual. Those of a rank that was behind when
 * the ranks were moved contain none. */
static bool has_loaded_residual(const struct loading *loading, const struct ob_fragment *fragment) {
  if (loading->parts->own >= 0)
    return fragment_numbers(loading, loading->parts->own, fragment)->keeps;
  for (int k = 0; k < loading->parts->count; k++)
    if (fragment_numbers(loading, k, fragment)->keeps)
      return true;
  return false;
}

/* Subtracts the difference of two means from the parameters, since it must not count as drift. The
 * mean of residuals is unweighted, because drifts were weighted before they were sent; the mean of
 * parameters weights each rank. */
static onebit_status_t remove_mean_difference(struct loading *loading,
                                              struct ob_fragment *fragment) {
  if (loading->dry || loading->parts->own >= 0 || !has_loaded_residual(loading, fragment))
    return ONEBIT_OK;
  choose_factors(loading, fragment);
  if (!loading->parts->factors)
    return ONEBIT_OK;
  for (int k = 0; k < loading->parts->count; k++)
    loading->factors[k] = 1 - loading->factors[k];
  memset(loading->values, 0, fragment->count * sizeof *loading->values);
  const onebit_status_t status = load_residual_elements(loading, fragment, OB_SAVED_WORKER);
  loading->parts->factors = NULL;
  if (status == ONEBIT_OK)
    ob_fragment_shift(fragment, loading->values);
  return status;
}

/* Sets the fragment's weights to the means over the parts whose state this rank has. */
static void set_fragment_weights(const struct loading *loading, struct ob_fragment *fragment) {
  const int own = loading->parts->own, count = own >= 0 ? 1 : loading->parts->count;
  double weight = 0, sent_weight = 0;
  for (int k = own >= 0 ? own : 0, end = k + count; k < end; k++) {
    weight += fragment_numbers(loading, k, fragment)->weight;
    sent_weight += fragment_numbers(loading, k, fragment)->sent_weight;
  }
  fragment->weight = weight / count;
  fragment->sent_weight = sent_weight / count;
}

static void set_fragment_numbers(const struct loading *loading, struct ob_fragment *fragment) {
  const struct ob_fragment_numbers *numbers =
      fragment_numbers(loading, continued_part(loading), fragment);
  const bool idle = numbers->state == OB_OUTER_IDLE;
  const bool skipped = numbers->state == OB_OUTER_SKIPPED;
  set_fragment_weights(loading, fragment);
  fragment->drift_squares = numbers->squares;
  fragment->stage = idle                            ? OB_FRAGMENT_IDLE
                    : loading->outer->sites != NULL ? OB_FRAGMENT_SENDING
                                                    : OB_FRAGMENT_ENDED;
  fragment->outcome.status = skipped ? ONEBIT_SKIPPED : ONEBIT_OK;
  fragment->finite = loading->parts->own < 0 || numbers->finite;
  fragment->keeps = has_loaded_residual(loading, fragment);
  if (fragment->stage != OB_FRAGMENT_ENDED && fragment->keeps)
    (void)ob_outer_export_residual(fragment, OB_SAVED_WORKER, fragment->drift);
  fragment->apply_step = loading->outer->steps + numbers->remaining;
  if (skipped)
    snprintf(fragment->outcome.error, sizeof fragment->outcome.error,
             "the drift of a rank was not finite, before the checkpoint was saved");
}

static onebit_status_t load_fragment(struct loading *loading, struct ob_fragment *fragment) {
  const bool received = fragment_numbers(loading, 0, fragment)->state == OB_OUTER_RECEIVED;
  for (int k = OB_SAVED_NORMS; k < OB_SAVED_END; k++) {
    const enum ob_saved what = (enum ob_saved)k;
    float *to = ob_outer_has_array(what) ? ob_fragment_array(fragment, what) : NULL;
    if (to && (what != OB_SAVED_DRIFT || received))
      OB_TRY(outer_load_read_elements(loading, what, fragment->first, fragment->count, to));
  }
  OB_TRY(load_parameters(loading, fragment));
  OB_TRY(load_residual(loading, fragment, OB_SAVED_WORKER));
  OB_TRY(load_residual(loading, fragment, OB_SAVED_SERVER));
  OB_TRY(remove_mean_difference(loading, fragment));
  if (!loading->dry)
    set_fragment_numbers(loading, fragment);
  return ONEBIT_OK;
}

/* --- All fragments -----------------------------------------------------------------------------*/

size_t ob_outer_position(const struct onebit_outer *outer, size_t position, size_t round) {
  const size_t parts = outer->groups;
  size_t next = 0;
  while (round * (next + 1) / parts <= position)
    next++;
  const size_t begin = round * next / parts, end = round * (next + 1) / parts;
  const size_t own = outer->options.local_steps * next / parts;
  return own + (position - begin) * (ob_outer_begin_step(outer, next) - own) / (end - begin);
}

static onebit_status_t load_fragments(struct loading *loading) {
  struct onebit_outer *outer = loading->outer;
  const struct ob_outer_numbers *numbers = part_numbers(loading, continued_part(loading));
  const struct ob_part_header *header = &loading->parts->list[0].header;
  if (!loading->dry) {
    outer->steps = numbers->steps;
    outer->position =
        ob_outer_position(outer, (size_t)numbers->position, (size_t)numbers->local_steps);
    outer->started = header->exchanges[0];
    outer->exchanges = header->exchanges[1];
    outer->skipped = header->exchanges[2];
    outer->refused = false;
  }
  for (size_t f = 0; f < outer->options.fragments; f++)
    OB_TRY(load_fragment(loading, &outer->fragments[f]));
  return ONEBIT_OK;
}

/* Cuts the fragments into as many shards as when the state was saved, if the number of sites
 * differed then. */
static onebit_status_t cut_as_saved(struct loading *loading) {
  const struct ob_part *part = &loading->parts->list[0];
  const size_t shards = part->header.fragments, groups = loading->outer->groups;
  if (!loading->outer->sites)
    return ONEBIT_OK;
  if (shards < groups || shards % groups || shards / groups > OB_SITES_MAX)
    return ob_part_error(part,
                         "it was saved in %zu shards, which are not a multiple of this outer "
                         "step's %zu fragments, or are of more than %d sites",
                         shards, groups, OB_SITES_MAX);
  return ob_outer_recut(loading->outer, shards);
}

static onebit_status_t outer_check_all_parts(struct loading *loading, struct ob_parts *parts) {
  struct onebit_outer *outer = loading->outer;
  loading->parts = parts;
  OB_TRY(cut_as_saved(loading));
  for (int k = 0; k < parts->count; k++)
    OB_TRY(load_check_part(&parts->list[k], outer));
  OB_TRY(outer_load_allocate(loading));
  for (int k = 0; k < parts->count; k++)
    OB_TRY(read_part_numbers(loading, k));
  if (parts->count == outer->comm->size)
    parts->own = outer->comm->rank;
  loading->dry = true;
  OB_TRY(load_fragments(loading));
  return ob_outer_to_host(outer);
}

/* Restores the state; exchanges in flight are dropped, whatever their outcome. */
static onebit_status_t outer_load_restore(void *object, struct ob_parts *parts, bool dry) {
  struct loading *loading = object;
  if (dry)
    return outer_check_all_parts(loading, parts);
  (void)ob_outer_settle(loading->outer);
  loading->dry = false;
  const onebit_status_t status = load_fragments(loading);
  const onebit_status_t sent = ob_outer_from_host(loading->outer, true);
  return status == ONEBIT_OK ? sent : status;
}

/* Frees the copies of a device's arrays, which exist here only if ranks did not agree to load. */
static void outer_load_close(void *object) {
  struct loading *loading = object;
  (void)ob_outer_from_host(loading->outer, false);
  ob_release(loading->numbers);
  ob_release(loading->factors);
  ob_release(loading->values);
  *loading = (struct loading){.outer = loading->outer};
}

static onebit_status_t agree_with_sites(void *object, onebit_status_t status) {
  const struct onebit_outer *outer = ((const struct loading *)object)->outer;
  return ob_sites_agree(outer->comm, outer->sites->between, status, NULL, 0);
}

/* --- The calls ---------------------------------------------------------------------------------*/

/* Checks the outer step. Sites that have stopped may load: loading joins them again. */
static onebit_status_t outer_load_check(onebit_outer_t outer) {
  OB_TRY(ob_handle_check(outer, OB_HANDLE_OUTER, "outer"));
  return outer->sites ? ONEBIT_OK : ob_outer_check_attached(outer);
}

/* Brings together sites that have loaded different rounds: all continue from the latest. */
static onebit_status_t join_sites(struct onebit_outer *outer, onebit_status_t status) {
  struct ob_outcome outcome = {.status = ONEBIT_OK};
  ob_outcome_add(&outcome, status);
  const onebit_status_t joined = ob_outer_rejoin(outer, outer->sites->between);
  return status == ONEBIT_OK ? joined : ob_outcome_status(&outcome);
}

static onebit_status_t outer_load(onebit_outer_t outer, const struct ob_sources *sources,
                                  const char *directory) {
  struct loading loading = {.outer = outer};
  OB_TRY(outer_load_check(outer));
  const struct ob_state state = ob_outer_state(outer);
  const struct ob_load load = {.object = &loading,
                               .state = &state,
                               .term = {"the number of exchanges that have begun", outer->started},
                               .agreed = outer->sites ? agree_with_sites : NULL,
                               .restore = outer_load_restore,
                               .close = outer_load_close};
  onebit_status_t status = outer->sites ? ob_outer_detach(outer) : ONEBIT_OK;
  status = ob_state_load(&load, status, sources, directory);
  return outer->sites ? join_sites(outer, status) : status;
}

onebit_status_t onebit_outer_load(onebit_outer_t outer, const void *const *parts,
                                  const size_t *bytes, int count) {
  OB_CALL_SCOPE;
  const struct ob_sources sources = {.memory = parts, .bytes = bytes, .count = count};
  return outer_load(outer, &sources, NULL);
}

onebit_status_t onebit_outer_load_files(onebit_outer_t outer, const char *directory) {
  OB_CALL_SCOPE;
  return outer_load(outer, NULL, directory);
}
