/*
 * An outer step from the parts of all ranks that saved one. Twice: first dry, which looks at
 * everything that is needed and changes nothing; then nothing can fail but reading a file.
 *
 * As many ranks go on to the bit. Another number of ranks begins with means of what is each rank's
 * own, so that the mean of what has not been exchanged yet, drifts and residuals, stays what it
 * was.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/handles.h"
#include "base/memory.h"
#include "collectives/agree.h"
#include "onebit/checkpoint.h"
#include "optimizers/outer/sites.h"
#include "optimizers/outer/state.h"

struct loading {
  struct onebit_outer *outer;
  struct ob_parts parts;
  const uint64_t **numbers; /* of each part, copies: */
  uint64_t *copies;
  double *factors; /* what each part counts, in the fragment that is being loaded */
  float *values;   /* as many as the longest fragment has, or OB_CHUNK */
  bool dry;
};

/* --- Whether the parts fit ---------------------------------------------------------------------*/

static onebit_status_t read_numbers(struct loading *loading, int k) {
  struct ob_part *part = &loading->parts.list[k];
  const size_t count = ob_outer_number_count(loading->outer);
  const struct ob_part_section *section = ob_part_from(part, OB_SAVED_NUMBERS, OB_ELEMENTS, 0);
  uint64_t *to = loading->copies + (size_t)k * count;
  if (!section || section->first || section->count != count)
    return ob_part_error(part, "section 'numbers' is not there");
  OB_TRY(ob_part_verify(part, section));
  OB_TRY(ob_part_copy(part, section, 0, count, to));
  loading->numbers[k] = to;
  return ob_outer_check_numbers(part, to, loading->outer, loading->numbers[0]);
}

static onebit_status_t allocate(struct loading *loading) {
  const struct onebit_outer *outer = loading->outer;
  const size_t count = (size_t)loading->parts.count;
  const size_t longest = outer->longest > OB_CHUNK ? outer->longest : OB_CHUNK;
  loading->numbers = ob_allocate(count, sizeof *loading->numbers);
  loading->copies = ob_allocate(count * ob_outer_number_count(outer), sizeof *loading->copies);
  loading->factors = ob_allocate(count, sizeof *loading->factors);
  loading->values = ob_allocate(longest, sizeof *loading->values);
  if (!loading->numbers || !loading->copies || !loading->factors || !loading->values)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory to load an outer step");
  return ONEBIT_OK;
}

/* --- A fragment --------------------------------------------------------------------------------*/

static const uint64_t *numbers_of(const struct loading *loading, int part,
                                  const struct ob_fragment *fragment) {
  return loading->numbers[part] + OB_OUTER_NUMBERS + fragment->number * OB_FRAGMENT_NUMBERS;
}

/* The part whose numbers this rank goes on with. */
static int part_of(const struct loading *loading) {
  return loading->outer->comm->rank % loading->parts.count;
}

/* `count` elements from number `first` on; to == NULL: only looks. */
static onebit_status_t read_elements(struct loading *loading, enum ob_saved what, uint64_t first,
                                     size_t count, float *to) {
  for (size_t some; count; first += some, count -= some) {
    some = count < OB_CHUNK ? count : OB_CHUNK;
    const struct ob_range range = {what, OB_ELEMENTS, first, some};
    OB_TRY(ob_parts_read(&loading->parts, &range, loading->dry ? NULL : to));
    to = to ? to + some : NULL;
  }
  return ONEBIT_OK;
}

/* The local steps of a rank count as its weight does. */
static void choose_factors(struct loading *loading, const struct ob_fragment *fragment) {
  const int count = loading->parts.count;
  double sum = 0;
  for (int k = 0; k < count; k++) {
    loading->factors[k] = ob_outer_double(numbers_of(loading, k, fragment)[OB_FRAGMENT_WEIGHT]);
    sum += loading->factors[k];
  }
  for (int k = 0; k < count; k++)
    loading->factors[k] *= count / sum;
  loading->parts.factors = sum > 0 ? loading->factors : NULL;
}

/* A drift that was not finite on a rank that is no more is none. */
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
  onebit_status_t status = read_elements(loading, OB_SAVED_PARAMETERS, fragment->first,
                                         fragment->count, loading->values);
  loading->parts.factors = NULL;
  if (status == ONEBIT_OK && !loading->dry)
    store_parameters(fragment, loading->values, loading->parts.own >= 0);
  return status;
}

static onebit_status_t load_residual(struct loading *loading, struct ob_fragment *fragment,
                                     enum ob_saved what) {
  const struct ob_outer_exchange *exchange = loading->outer->exchange;
  const size_t runs = exchange->runs(fragment, what, loading->outer->runs);
  float *to = loading->values;
  for (size_t k = 0; k < runs; k++) {
    const struct ob_outer_run *run = &loading->outer->runs[k];
    OB_TRY(read_elements(loading, what, fragment->first + run->at, run->count, to));
    to += run->count;
  }
  if (!runs || loading->dry)
    return ONEBIT_OK;
  return exchange->import_residual(fragment, what, loading->values);
}

/* Whether the parameters that are loaded have a residual in them. A rank that was behind when the
 * ranks were moved has none, and not in its parameters. */
static bool keeps(const struct loading *loading, const struct ob_fragment *fragment) {
  if (loading->parts.own >= 0)
    return numbers_of(loading, loading->parts.own, fragment)[OB_FRAGMENT_KEEPS];
  for (int k = 0; k < loading->parts.count; k++)
    if (numbers_of(loading, k, fragment)[OB_FRAGMENT_KEEPS])
      return true;
  return false;
}

/* Residuals were held back of what had its weight already: their mean is the plain one, while in
 * the mean of the parameters each counts as its weight does. The difference is no drift. */
static onebit_status_t remove_difference(struct loading *loading, struct ob_fragment *fragment) {
  const struct onebit_outer *outer = loading->outer;
  if (loading->dry || loading->parts.own >= 0 || !keeps(loading, fragment))
    return ONEBIT_OK;
  choose_factors(loading, fragment);
  if (!loading->parts.factors)
    return ONEBIT_OK;
  for (int k = 0; k < loading->parts.count; k++)
    loading->factors[k] = 1 - loading->factors[k];
  memset(loading->values, 0, fragment->count * sizeof *loading->values);
  const size_t runs = outer->exchange->runs(fragment, OB_SAVED_WORKER, outer->runs);
  onebit_status_t status = ONEBIT_OK;
  for (size_t k = 0; status == ONEBIT_OK && k < runs; k++)
    status = read_elements(loading, OB_SAVED_WORKER, fragment->first + outer->runs[k].at,
                           outer->runs[k].count, loading->values + outer->runs[k].at);
  loading->parts.factors = NULL;
  if (status == ONEBIT_OK)
    ob_fragment_shift(fragment, loading->values);
  return status;
}

static double mean_of(const struct loading *loading, const struct ob_fragment *fragment,
                      int number) {
  double sum = 0;
  if (loading->parts.own >= 0)
    return ob_outer_double(numbers_of(loading, loading->parts.own, fragment)[number]);
  for (int k = 0; k < loading->parts.count; k++)
    sum += ob_outer_double(numbers_of(loading, k, fragment)[number]);
  return sum / loading->parts.count;
}

static void set_numbers(const struct loading *loading, struct ob_fragment *fragment) {
  const uint64_t *numbers = numbers_of(loading, part_of(loading), fragment);
  const bool idle = numbers[OB_FRAGMENT_STATE] == OB_OUTER_IDLE;
  const bool skipped = numbers[OB_FRAGMENT_STATE] == OB_OUTER_SKIPPED;
  fragment->weight = mean_of(loading, fragment, OB_FRAGMENT_WEIGHT);
  fragment->sent_weight = mean_of(loading, fragment, OB_FRAGMENT_SENT_WEIGHT);
  fragment->drift_squares = ob_outer_double(numbers[OB_FRAGMENT_SQUARES]);
  fragment->stage = idle                            ? OB_FRAGMENT_IDLE
                    : loading->outer->sites != NULL ? OB_FRAGMENT_SENDING
                                                    : OB_FRAGMENT_ENDED;
  fragment->status = skipped ? ONEBIT_SKIPPED : ONEBIT_OK;
  fragment->finite = loading->parts.own < 0 || numbers[OB_FRAGMENT_FINITE];
  fragment->keeps = keeps(loading, fragment);
  if (fragment->stage != OB_FRAGMENT_ENDED && fragment->keeps)
    (void)ob_outer_export_residual(fragment, OB_SAVED_WORKER, fragment->drift);
  fragment->apply_step = loading->outer->steps + numbers[OB_FRAGMENT_REMAINING];
  if (skipped)
    snprintf(fragment->error, sizeof fragment->error,
             "the drift of a rank was not finite, before the checkpoint was saved");
}

static onebit_status_t load_fragment(struct loading *loading, struct ob_fragment *fragment) {
  const bool received = numbers_of(loading, 0, fragment)[OB_FRAGMENT_STATE] == OB_OUTER_RECEIVED;
  const size_t count = fragment->count;
  OB_TRY(read_elements(loading, OB_SAVED_CONSENSUS, fragment->first, count, fragment->consensus));
  if (fragment->momentum)
    OB_TRY(read_elements(loading, OB_SAVED_OUTER_MOMENTUM, fragment->first, count,
                         fragment->momentum));
  if (received)
    OB_TRY(read_elements(loading, OB_SAVED_DRIFT, fragment->first, count, fragment->drift));
  OB_TRY(load_parameters(loading, fragment));
  OB_TRY(load_residual(loading, fragment, OB_SAVED_WORKER));
  OB_TRY(load_residual(loading, fragment, OB_SAVED_SERVER));
  OB_TRY(remove_difference(loading, fragment));
  if (!loading->dry)
    set_numbers(loading, fragment);
  return ONEBIT_OK;
}

/* --- All of them -------------------------------------------------------------------------------*/

size_t ob_outer_position(const struct onebit_outer *outer, size_t position, size_t round) {
  const size_t parts = outer->groups;
  size_t next = 0;
  while (round * (next + 1) / parts <= position)
    next++;
  const size_t begin = round * next / parts, end = round * (next + 1) / parts;
  const size_t own = outer->options.local_steps * next / parts;
  return own + (position - begin) * (ob_outer_begin_step(outer, next) - own) / (end - begin);
}

static onebit_status_t restore(struct loading *loading) {
  struct onebit_outer *outer = loading->outer;
  const uint64_t *numbers = loading->numbers[part_of(loading)];
  const struct ob_part_header *header = &loading->parts.list[0].header;
  if (!loading->dry) {
    outer->steps = numbers[OB_OUTER_STEPS];
    outer->position = ob_outer_position(outer, (size_t)numbers[OB_OUTER_POSITION],
                                        (size_t)numbers[OB_OUTER_LOCAL_STEPS]);
    outer->started = header->exchanges[0];
    outer->exchanges = header->exchanges[1];
    outer->skipped = header->exchanges[2];
    outer->refused = false;
  }
  for (size_t f = 0; f < outer->options.fragments; f++)
    OB_TRY(load_fragment(loading, &outer->fragments[f]));
  return ONEBIT_OK;
}

/* Sites that are more or fewer than those that saved first have what these had. */
static onebit_status_t cut_as_saved(struct loading *loading) {
  const struct ob_part *part = &loading->parts.list[0];
  const size_t shards = part->header.fragments, groups = loading->outer->groups;
  if (!loading->outer->sites)
    return ONEBIT_OK;
  if (shards < groups || shards % groups || shards / groups > OB_SITES_MAX)
    return ob_part_error(part, "saved in %zu shards, which are not %zu fragments of some sites",
                         shards, groups);
  return ob_outer_recut(loading->outer, shards);
}

static onebit_status_t look(struct loading *loading, onebit_status_t status,
                            const struct ob_sources *sources) {
  struct onebit_outer *outer = loading->outer;
  OB_TRY(status);
  OB_TRY(ob_parts_open(&loading->parts, sources));
  OB_TRY(ob_parts_together(&loading->parts));
  OB_TRY(cut_as_saved(loading));
  for (int k = 0; k < loading->parts.count; k++)
    OB_TRY(ob_outer_check_part(&loading->parts.list[k], outer));
  OB_TRY(allocate(loading));
  for (int k = 0; k < loading->parts.count; k++)
    OB_TRY(read_numbers(loading, k));
  if (loading->parts.count == outer->comm->size)
    loading->parts.own = outer->comm->rank;
  loading->dry = true;
  OB_TRY(restore(loading));
  return ob_outer_to_host(outer);
}

static onebit_status_t run(struct loading *loading, onebit_status_t status) {
  struct onebit_outer *outer = loading->outer;
  const struct ob_term terms[] = {
      {"count", (uint64_t)loading->parts.count},
      {"the checkpoint (its fingerprint)",
       status == ONEBIT_OK ? ob_parts_identity(&loading->parts) : 0},
      {"how many exchanges have begun", outer->started},
  };
  status = ob_agree(outer->comm, status, terms, sizeof terms / sizeof terms[0]);
  if (outer->sites)
    status = ob_sites_agree(outer->comm, outer->sites->between, status, NULL, 0);
  OB_TRY(status);
  (void)ob_outer_settle(outer); /* what is in flight is replaced, however it ends */
  loading->dry = false;
  status = restore(loading);
  if (status == ONEBIT_ERROR_FILE)
    status = ob_error(status, "%s; a part of the state has been taken", onebit_last_error());
  const onebit_status_t sent = ob_outer_from_host(outer, true);
  return ob_agree(outer->comm, status == ONEBIT_OK ? sent : status, NULL, 0);
}

/* Where they have loaded unequal rounds, all go on with the latest. */
static onebit_status_t join_sites(struct onebit_outer *outer, onebit_status_t status) {
  char error[256];
  snprintf(error, sizeof error, "%s", status == ONEBIT_OK ? "" : onebit_last_error());
  const onebit_status_t joined = ob_outer_rejoin(outer, outer->sites->between);
  return status == ONEBIT_OK ? joined : ob_error(status, "%s", error);
}

static onebit_status_t load(struct onebit_outer *outer, onebit_status_t status,
                            const struct ob_sources *sources) {
  struct loading loading = {.outer = outer};
  const onebit_status_t detached = outer->sites ? ob_outer_detach(outer) : ONEBIT_OK;
  status = status == ONEBIT_OK ? detached : status;
  status = run(&loading, look(&loading, status, sources));
  (void)ob_outer_from_host(outer, false); /* only where the ranks do not agree to load it */
  ob_parts_close(&loading.parts);
  ob_release((void *)loading.numbers);
  ob_release(loading.copies);
  ob_release(loading.factors);
  ob_release(loading.values);
  return outer->sites ? join_sites(outer, status) : status;
}

/* Sites that have stopped are joined again. */
static onebit_status_t check(onebit_outer_t outer) {
  OB_TRY(ob_handle_check(outer, OB_HANDLE_OUTER, "outer"));
  return outer->sites ? ONEBIT_OK : ob_outer_check_attached(outer);
}

onebit_status_t onebit_outer_load(onebit_outer_t outer, const void *const *parts,
                                  const size_t *bytes, int count) {
  OB_CALL_SCOPE;
  OB_TRY(check(outer));
  const struct ob_sources sources = {.memory = parts, .bytes = bytes, .count = count};
  return load(outer, ONEBIT_OK, &sources);
}

static onebit_status_t load_files(struct onebit_outer *outer, const char *directory) {
  struct ob_opened opened;
  onebit_status_t status = ob_files_open(&opened, ONEBIT_OK, directory);
  const bool ready = status == ONEBIT_OK;
  const struct ob_sources sources = {.files = opened.parts, .count = opened.manifest.ranks};
  status = load(outer, status, &sources);
  if (ready && status == ONEBIT_ERROR_CHECKPOINT)
    status = ob_error(status, "%s: %s", directory, onebit_last_error());
  ob_files_close(&opened);
  return status;
}

onebit_status_t onebit_outer_load_files(onebit_outer_t outer, const char *directory) {
  OB_CALL_SCOPE;
  OB_TRY(check(outer));
  onebit_status_t status = load_files(outer, directory);
  for (int turn = 1; turn < OB_FILES_TURNS && !outer->sites && ob_files_differ(outer->comm, status);
       turn++)
    status = load_files(outer, directory);
  return status;
}
