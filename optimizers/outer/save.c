/* A part of a checkpoint, of an outer step: what is docs/checkpoints.md's. */
#include <string.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/handles.h"
#include "base/memory.h"
#include "collectives/agree.h"
#include "onebit/checkpoint.h"
#include "optimizers/outer/sites.h"
#include "optimizers/outer/state.h"

/* --- What is in flight -------------------------------------------------------------------------*/

onebit_status_t ob_outer_agree_started(struct onebit_outer *outer, onebit_status_t status) {
  const struct ob_term term = {"how many exchanges have begun", outer->started};
  return ob_agree(outer->comm, status, &term, 1);
}

static onebit_status_t check(onebit_outer_t outer) {
  OB_TRY(ob_handle_check(outer, OB_HANDLE_OUTER, "outer"));
  return ob_outer_check_attached(outer);
}

/* Of what is under way between sites drifts are saved, to be sent again, where their delay is not
 * over; rounds are not. */
static onebit_status_t check_whole(const struct onebit_outer *outer) {
  for (size_t f = 0; outer->sites && f < outer->options.fragments; f++)
    if (((const struct ob_shard *)outer->fragments[f].state)->torn)
      return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                      "some of what this site has missed is still under way: save after a later "
                      "exchange");
  return ONEBIT_OK;
}

onebit_status_t ob_outer_settle(struct onebit_outer *outer) {
  onebit_status_t status = ONEBIT_OK;
  for (size_t f = 0; f < outer->options.fragments; f++) {
    struct ob_fragment *fragment = &outer->fragments[f];
    ob_fragment_wait(fragment);
    const bool failed = fragment->stage == OB_FRAGMENT_ENDED && fragment->status != ONEBIT_OK &&
                        fragment->status != ONEBIT_SKIPPED;
    if (failed && status == ONEBIT_OK)
      status = ob_error(fragment->status, "%s", fragment->error);
  }
  return status;
}

/* --- What there is -----------------------------------------------------------------------------*/

struct saving {
  struct onebit_outer *outer;
  struct ob_part_header header;
  struct ob_part_tensor *tensors;
  struct ob_part_section *sections;
  uint64_t *numbers;
  float *residual; /* and its values; */
  size_t fragment; /* which fragment's, or SIZE_MAX */
  uint32_t what;
};

size_t ob_outer_number_count(const struct onebit_outer *outer) {
  return OB_OUTER_NUMBERS + OB_FRAGMENT_NUMBERS * outer->options.fragments;
}

static void describe(struct saving *saving) {
  const struct onebit_outer *outer = saving->outer;
  const onebit_outer_options_t *options = &outer->options;
  saving->header = (struct ob_part_header){
      .version = OB_PART_VERSION_PLAIN,
      .order = OB_PART_ORDER,
      .library = ONEBIT_VERSION_MAJOR << 16 | ONEBIT_VERSION_MINOR << 8 | ONEBIT_VERSION_PATCH,
      .ranks = (uint32_t)outer->comm->size,
      .weighted = (uint32_t)options->weighted,
      .momentum = options->rule != ONEBIT_OUTER_MEAN,
      .fragments = (uint32_t)options->fragments,
      .apart = true,
      .tensors = outer->tensor_count,
      .elements = outer->count,
      .steps = options->weighted && !outer->sites ? outer->started : outer->steps,
      .exchanges = {outer->started, outer->exchanges, outer->skipped},
      .numbers = ob_outer_number_count(outer),
      .rank = (uint32_t)outer->comm->rank,
  };
  memcpy(saving->header.magic, OB_PART_MAGIC, sizeof saving->header.magic);
  strcpy(saving->header.kind, ob_outer_kind(outer));
}

static uint64_t bits_of(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static void number_fragment(const struct ob_fragment *fragment, uint64_t *numbers) {
  const bool idle = fragment->stage == OB_FRAGMENT_IDLE;
  const uint64_t steps = fragment->outer->steps;
  const struct ob_shard *shard = fragment->outer->sites ? fragment->state : NULL;
  const double unsent = shard && shard->in_flight && idle ? fragment->sent_weight : 0;
  numbers[OB_FRAGMENT_COUNT] = fragment->count;
  numbers[OB_FRAGMENT_STATE] = idle                            ? OB_OUTER_IDLE
                               : shard                         ? OB_OUTER_SENT
                               : fragment->status == ONEBIT_OK ? OB_OUTER_RECEIVED
                                                               : OB_OUTER_SKIPPED;
  numbers[OB_FRAGMENT_REMAINING] =
      idle || fragment->apply_step < steps ? 0 : fragment->apply_step - steps;
  numbers[OB_FRAGMENT_FINITE] = idle || fragment->finite;
  numbers[OB_FRAGMENT_KEEPS] = fragment->keeps;
  numbers[OB_FRAGMENT_WEIGHT] = bits_of(fragment->weight + unsent);
  numbers[OB_FRAGMENT_SENT_WEIGHT] = bits_of(idle ? 0 : fragment->sent_weight);
  numbers[OB_FRAGMENT_SQUARES] = bits_of(fragment->drift_squares);
}

static void fill_in(struct saving *saving) {
  const struct onebit_outer *outer = saving->outer;
  for (size_t t = 0; t < outer->tensor_count; t++)
    saving->tensors[t] =
        (struct ob_part_tensor){outer->tensors[t].count, outer->tensors[t].uncompressed};
  saving->numbers[OB_OUTER_STEPS] = outer->steps;
  saving->numbers[OB_OUTER_POSITION] = outer->position % outer->options.local_steps;
  saving->numbers[OB_OUTER_LOCAL_STEPS] = outer->options.local_steps;
  for (size_t f = 0; f < outer->options.fragments; f++)
    number_fragment(&outer->fragments[f],
                    saving->numbers + OB_OUTER_NUMBERS + f * OB_FRAGMENT_NUMBERS);
}

/* --- Which sections there are ------------------------------------------------------------------*/

/* Elements that follow those before are in one section with them. */
static void add(struct saving *saving, uint32_t what, uint64_t first, uint64_t end) {
  struct ob_part_section *next = saving->sections + saving->header.sections;
  if (first >= end)
    return;
  if (saving->header.sections && next[-1].what == what &&
      next[-1].first + next[-1].count == first) {
    next[-1].count += end - first;
    return;
  }
  *next = (struct ob_part_section){.what = what, .first = first, .count = end - first};
  saving->header.sections++;
}

/* What all ranks have alike, of the elements first .. end - 1: this rank's part. */
static void add_alike(struct saving *saving, uint32_t what, uint64_t first, uint64_t end) {
  const struct ob_part_header *header = &saving->header;
  const uint64_t n = header->elements, ranks = header->ranks, rank = header->rank;
  const uint64_t low = n / ranks * rank + n % ranks * rank / ranks;
  const uint64_t high = n / ranks * (rank + 1) + n % ranks * (rank + 1) / ranks;
  add(saving, what, first > low ? first : low, end < high ? end : high);
}

static void add_residual(struct saving *saving, enum ob_saved what) {
  const struct onebit_outer *outer = saving->outer;
  for (size_t f = 0; f < outer->options.fragments; f++) {
    const struct ob_fragment *fragment = &outer->fragments[f];
    const size_t runs = outer->exchange->runs(fragment, what, outer->runs);
    for (size_t k = 0; k < runs; k++)
      add(saving, what, fragment->first + outer->runs[k].at,
          fragment->first + outer->runs[k].at + outer->runs[k].count);
  }
}

static void list_sections(struct saving *saving) {
  const struct onebit_outer *outer = saving->outer;
  const uint64_t elements = saving->header.elements;
  add(saving, OB_SAVED_NUMBERS, 0, saving->header.numbers);
  add(saving, OB_SAVED_PARAMETERS, 0, elements);
  add_residual(saving, OB_SAVED_WORKER);
  add_residual(saving, OB_SAVED_SERVER);
  add_alike(saving, OB_SAVED_CONSENSUS, 0, elements);
  if (saving->header.momentum)
    add_alike(saving, OB_SAVED_OUTER_MOMENTUM, 0, elements);
  for (size_t f = 0; f < outer->options.fragments; f++) {
    const struct ob_fragment *fragment = &outer->fragments[f];
    if (ob_outer_received(fragment))
      add_alike(saving, OB_SAVED_DRIFT, fragment->first, fragment->first + fragment->count);
  }
  ob_part_lay_out(&saving->header, saving->sections);
}

/* --- Their values ------------------------------------------------------------------------------*/

/* The residual of a fragment, each element in its place. */
static onebit_status_t look_at_residual(struct saving *saving, enum ob_saved what, size_t f) {
  const struct ob_fragment *fragment = &saving->outer->fragments[f];
  if (saving->fragment == f && saving->what == what)
    return ONEBIT_OK;
  OB_TRY(ob_outer_export_residual(fragment, what, saving->residual));
  saving->fragment = f;
  saving->what = what;
  return ONEBIT_OK;
}

static void read_parameters(const struct ob_fragment *fragment, size_t at, size_t count,
                            float *values) {
  const onebit_dtype_t dtype = fragment->outer->options.parameter_dtype;
  for (size_t k = 0; k < fragment->pieces; k++) {
    const struct ob_outer_piece *piece = &fragment->piece[k];
    const void *parameters = fragment->outer->tensors[piece->tensor].parameter;
    const size_t low = at > piece->at ? at : piece->at;
    const size_t piece_end = piece->at + piece->count, end = at + count;
    for (size_t i = low; i < piece_end && i < end; i++)
      values[i - at] = ob_load(parameters, piece->first + i - piece->at, dtype);
  }
}

static onebit_status_t read_fragment(struct saving *saving, uint32_t what, size_t f, size_t at,
                                     size_t count, float *values) {
  const struct ob_fragment *fragment = &saving->outer->fragments[f];
  const float *from = what == OB_SAVED_CONSENSUS        ? fragment->consensus
                      : what == OB_SAVED_OUTER_MOMENTUM ? fragment->momentum
                      : what == OB_SAVED_DRIFT          ? fragment->drift
                                                        : saving->residual;
  if (what == OB_SAVED_PARAMETERS) {
    read_parameters(fragment, at, count, values);
    return ONEBIT_OK;
  }
  if (from == saving->residual)
    OB_TRY(look_at_residual(saving, what, f));
  memcpy(values, from + at, count * sizeof *values);
  return ONEBIT_OK;
}

static onebit_status_t read_section(void *context, const struct ob_part_section *section,
                                    uint64_t first, size_t count, void *values) {
  struct saving *saving = context;
  float *floats = values;
  if (section->what == OB_SAVED_NUMBERS) {
    memcpy(values, saving->numbers + first, count * sizeof *saving->numbers);
    return ONEBIT_OK;
  }
  for (size_t f = 0; count; f++) {
    const struct ob_fragment *fragment = &saving->outer->fragments[f];
    if (first >= fragment->first + fragment->count)
      continue;
    const size_t at = (size_t)first - fragment->first, left = fragment->count - at;
    const size_t some = left < count ? left : count;
    OB_TRY(read_fragment(saving, section->what, f, at, some, floats));
    first += some;
    count -= some;
    floats += some;
  }
  return ONEBIT_OK;
}

/* --- All of it ---------------------------------------------------------------------------------*/

static void destroy(struct saving *saving) {
  (void)ob_outer_from_host(saving->outer, false); /* only pointers change */
  ob_release(saving->tensors);
  ob_release(saving->sections);
  ob_release(saving->numbers);
  ob_release(saving->residual);
}

/* Destroyed also after a failure. */
static onebit_status_t create(struct saving *saving, struct onebit_outer *outer) {
  *saving = (struct saving){.outer = outer, .fragment = SIZE_MAX};
  OB_TRY(check_whole(outer));
  saving->tensors = ob_allocate(outer->tensor_count, sizeof *saving->tensors);
  saving->sections =
      ob_allocate(4 + 2 * outer->piece_count + outer->options.fragments, sizeof *saving->sections);
  saving->numbers = ob_allocate(ob_outer_number_count(outer), sizeof *saving->numbers);
  saving->residual = ob_allocate(outer->longest, sizeof *saving->residual);
  if (!saving->tensors || !saving->sections || !saving->numbers || !saving->residual)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory to save an outer step");
  describe(saving);
  fill_in(saving);
  list_sections(saving);
  return ONEBIT_OK;
}

static onebit_status_t write(void *context, const struct ob_sink *sink) {
  struct saving *saving = context;
  const struct ob_part_writer writer = {&saving->header, saving->tensors, saving->sections,
                                        read_section, saving};
  OB_TRY(ob_outer_to_host(saving->outer));
  return ob_part_write(&writer, sink);
}

onebit_status_t onebit_outer_save(onebit_outer_t outer, void *memory, size_t capacity,
                                  size_t *bytes) {
  OB_CALL_SCOPE;
  struct saving saving;
  OB_TRY(check(outer));
  if (!bytes)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "bytes is NULL");
  *bytes = 0;
  OB_TRY(ob_outer_settle(outer));
  onebit_status_t status = create(&saving, outer);
  if (status == ONEBIT_OK)
    status = ob_part_to_memory(&saving.header, write, &saving, memory, capacity, bytes);
  destroy(&saving);
  return status;
}

static onebit_status_t write_part(void *outer, const struct ob_sink *sink, uint64_t *checksum) {
  struct saving saving;
  onebit_status_t status = create(&saving, outer);
  if (status == ONEBIT_OK)
    status = write(&saving, sink);
  *checksum = saving.header.checksum;
  destroy(&saving);
  return status;
}

onebit_status_t onebit_outer_save_files(onebit_outer_t outer, const char *directory) {
  OB_CALL_SCOPE;
  OB_TRY(check(outer));
  OB_TRY(ob_outer_agree_started(outer, ONEBIT_OK));
  const onebit_status_t status = ob_outer_settle(outer);
  const struct ob_subject subject = {outer->comm, ob_outer_kind(outer), outer->steps, outer,
                                     write_part};
  return ob_files_save(&subject, status, directory);
}
