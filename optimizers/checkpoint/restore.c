/* From parts into an optimizer: all but messages and residuals. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/error.h"
#include "optimizers/checkpoint/checkpoint.h"

onebit_status_t ob_loading_fetch(struct ob_loading *loading, enum ob_saved what, size_t unit,
                                 size_t piece, size_t offset, size_t count, float *values) {
  const struct ob_piece_map *at = &loading->map.of_unit[unit][piece];
  float *out = loading->dry ? NULL : values;
  size_t real = offset < at->real ? at->real - offset : 0, some = real < count ? real : count;
  if (some)
    OB_TRY(ob_parts_fetch(&loading->parts, what, OB_ELEMENTS, at->element + offset, some, out));
  if (some == count)
    return ONEBIT_OK;
  if (loading->parts.same_padding)
    return ob_parts_fetch(&loading->parts, what, OB_PADDING,
                          at->padding + (offset + some - at->real), count - some,
                          out ? out + some : NULL);
  memset(values + some, 0, (count - some) * sizeof *values);
  return ONEBIT_OK;
}

/* The part that has this rank's numbers. */
static struct ob_part *own_part(struct ob_loading *loading) {
  struct ob_parts *parts = &loading->parts;
  return &parts->list[parts->own >= 0 ? parts->own : 0];
}

static bool has(struct ob_loading *loading, enum ob_saved what) {
  enum ob_stage stage = (enum ob_stage)loading->parts.list[0].header.stage;
  return ob_checkpoint_has(loading->optimizer, stage, what);
}

/* --- Arrays ------------------------------------------------------------------------------------*/

/* What is done with elements of a piece that were fetched. */
typedef onebit_status_t store(struct ob_loading *loading, const struct ob_unit *unit,
                              enum ob_saved what, size_t piece, size_t offset, size_t count);

static onebit_status_t store_array(struct ob_loading *loading, const struct ob_unit *unit,
                                   enum ob_saved what, size_t piece, size_t offset, size_t count) {
  return unit->bits->executor->residuals->copy(ob_saved_at(unit, what, piece, offset),
                                               loading->values, count * sizeof(float));
}

/* Means over ranks are rounded to what moments are kept in. */
static onebit_status_t store_moments(struct ob_loading *loading, const struct ob_unit *unit,
                                     enum ob_saved what, size_t piece, size_t offset,
                                     size_t count) {
  uint16_t *moments = ob_saved_moments(unit, what, piece, offset);
  if (!moments)
    return store_array(loading, unit, what, piece, offset, count);
  for (size_t i = 0; i < count; i++)
    ob_store(loading->more, i, ONEBIT_BFLOAT16, loading->values[i]);
  return unit->bits->executor->residuals->copy(moments, loading->more, count * sizeof *moments);
}

/* Of a part of a piece, what lies in blocks that this rank has master values of. */
static onebit_status_t store_masters(struct ob_loading *loading, const struct ob_unit *unit,
                                     size_t piece, size_t offset, size_t count) {
  const struct ob_layout *layout = &unit->bits->geometry.layout;
  size_t first = ob_offset_in(layout, piece, unit->first_block);
  size_t end = ob_offset_in(layout, piece, unit->first_block + unit->blocks);
  first = first > offset ? first : offset;
  end = end < offset + count ? end : offset + count;
  if (first >= end)
    return ONEBIT_OK;
  return unit->bits->executor->residuals->copy(ob_saved_at(unit, OB_SAVED_PARAMETERS, piece, first),
                                               loading->values + (first - offset),
                                               (end - first) * sizeof(float));
}

/* The caller has all parameters, in its own type. */
static onebit_status_t store_parameters(struct ob_loading *loading, const struct ob_unit *unit,
                                        enum ob_saved what, size_t piece, size_t offset,
                                        size_t count) {
  onebit_dtype_t dtype = loading->optimizer->options.parameter_dtype;
  size_t size = ob_dtype_size(dtype);
  if (!unit->masters)
    return store_array(loading, unit, what, piece, offset, count);
  OB_TRY(store_masters(loading, unit, piece, offset, count));
  for (size_t i = 0; i < count; i++)
    ob_store(loading->more, i, dtype, ob_bound(loading->values[i], dtype));
  return unit->bits->executor->residuals->copy((char *)unit->copies[piece] + offset * size,
                                               loading->more, count * size);
}

static float scaling_of(const struct onebit_optimizer *optimizer, const struct ob_unit *unit,
                        size_t piece) {
  const struct ob_method *method = optimizer->method;
  size_t tensor = unit->tensor_of[piece];
  bool scaled = method->scalings && tensor < optimizer->tensor_count;
  return scaled ? (float)method->scalings((struct onebit_optimizer *)optimizer)[tensor] : 1;
}

/* Where nothing is sent, after the freeze: momentum times beta1, and once it was sent all errors
 * that were kept of it, without the scaling that it travelled with. */
static onebit_status_t store_unsent(struct ob_loading *loading, const struct ob_unit *unit,
                                    enum ob_saved what, size_t piece, size_t offset, size_t count) {
  static const enum ob_saved errors[] = {OB_SAVED_WORKER, OB_SAVED_SERVER};
  bool sent = loading->parts.list[0].header.stage == OB_STAGE_SENT;
  size_t u = (size_t)(unit - loading->optimizer->units);
  float beta1 = (float)loading->optimizer->moments.beta1;
  for (size_t i = 0; sent && !loading->dry && i < count; i++)
    loading->values[i] *= beta1;
  for (int k = 0; sent && k < 2; k++) {
    OB_TRY(ob_loading_fetch(loading, errors[k], u, piece, offset, count, loading->more));
    for (size_t i = 0; i < count && !loading->dry; i++)
      loading->values[i] += loading->more[i];
  }
  if (loading->dry)
    return ONEBIT_OK;
  float scaling = scaling_of(loading->optimizer, unit, piece);
  for (size_t i = 0; sent && i < count && scaling != 1; i++)
    loading->values[i] /= scaling;
  return store_array(loading, unit, what, piece, offset, count);
}

static onebit_status_t restore_piece(struct ob_loading *loading, size_t u, enum ob_saved what,
                                     size_t piece, store *body) {
  const struct ob_unit *unit = &loading->optimizer->units[u];
  const struct ob_layout *layout = &unit->bits->geometry.layout;
  bool all = what == OB_SAVED_PARAMETERS;
  size_t first = unit->first_block, end = first + unit->blocks;
  if (!unit->uncompressed || !ob_saved_by_servers(unit, what)) /* else all have all of it */
    ob_saved_blocks(unit, what, &first, &end);
  first = all ? 0 : ob_offset_in(layout, piece, first);
  end = all ? loading->map.of_unit[u][piece].real : ob_offset_in(layout, piece, end);
  for (size_t offset = first; offset < end; offset += OB_CHUNK) {
    size_t some = end - offset < OB_CHUNK ? end - offset : OB_CHUNK;
    OB_TRY(ob_loading_fetch(loading, what, u, piece, offset, some, loading->values));
    if (!loading->dry || body == store_unsent)
      OB_TRY(body(loading, unit, what, piece, offset, some));
  }
  return ONEBIT_OK;
}

static onebit_status_t restore_array(struct ob_loading *loading, size_t u, enum ob_saved what,
                                     store *body) {
  const struct ob_layout *layout = &loading->optimizer->units[u].bits->geometry.layout;
  for (size_t k = 0; k < layout->pieces; k++)
    OB_TRY(restore_piece(loading, u, what, k, body));
  return ONEBIT_OK;
}

/* --- Momentum and errors -----------------------------------------------------------------------*/

static onebit_status_t clear_messages(const struct onebit_plan *plan) {
  bool shared = ob_host_shares(plan);
  size_t first = shared ? plan->geometry.first_segment : 0;
  size_t end = shared ? first + plan->geometry.members : ob_plan_sources(plan);
  for (size_t share = first; share < end; share++)
    for (size_t chunk = 0; chunk < plan->geometry.chunks; chunk++) {
      struct ob_message_shape shape = ob_plan_message(plan, share, chunk);
      OB_TRY(plan->executor->messages->clear(ob_plan_result(plan, false, share, chunk),
                                             ob_message_bytes(&shape)));
    }
  return ONEBIT_OK;
}

/* As it was made: the first copy of the kept values is the current one, since it is the momentum
 * until bits are sent. */
static onebit_status_t reset(struct onebit_plan *plan) {
  plan->worker.now = plan->server.now = 0;
  plan->server_large = false;
  OB_TRY(ob_kept_reset(&plan->worker));
  OB_TRY(ob_kept_reset(&plan->server));
  return plan->momentum ? clear_messages(plan) : ONEBIT_OK;
}

static onebit_status_t reset_unit(const struct ob_loading *loading, const struct ob_unit *unit) {
  if (!loading->dry)
    OB_TRY(reset(unit->bits));
  return loading->dry || !unit->steps_back ? ONEBIT_OK : reset(unit->steps_back);
}

/* Which form momentum and errors take depends on both sides: on what was saved, and on whether this
 * optimizer's latest step has sent bits. One rank alone that does not compress has sent none. */
static onebit_status_t restore_momentum(struct ob_loading *loading, size_t u) {
  const struct onebit_optimizer *optimizer = loading->optimizer;
  const struct ob_unit *unit = &optimizer->units[u];
  const struct ob_part_header *header = &loading->parts.list[0].header;
  bool momentum = optimizer->method->momentum && !unit->uncompressed;
  bool frozen = momentum && header->stage != OB_STAGE_WARMUP;
  bool alone = frozen && !ob_optimizer_compresses(optimizer);
  bool sent = frozen && !alone && header->steps != header->frozen_at;
  OB_TRY(reset_unit(loading, unit));
  if (sent)
    OB_TRY(ob_restore_messages(loading, u));
  else
    OB_TRY(restore_array(loading, u, OB_SAVED_MOMENTUM, alone ? store_unsent : store_array));
  bool others = !optimizer->method->momentum && has(loading, OB_SAVED_WORKER);
  return sent || (others && !unit->uncompressed) ? ob_restore_errors(loading, u, sent) : ONEBIT_OK;
}

static onebit_status_t restore_unit(struct ob_loading *loading, size_t u) {
  static const enum ob_saved arrays[] = {OB_SAVED_VARIANCE, OB_SAVED_FRESH, OB_SAVED_ANCHOR,
                                         OB_SAVED_MOVED};
  struct onebit_plan *plan = loading->optimizer->units[u].bits;
  OB_TRY(restore_array(loading, u, OB_SAVED_PARAMETERS, store_parameters));
  for (size_t k = 0; k < sizeof arrays / sizeof arrays[0]; k++)
    if (has(loading, arrays[k]))
      OB_TRY(restore_array(loading, u, arrays[k], store_array));
  OB_TRY(restore_momentum(loading, u));
  if (has(loading, OB_SAVED_MOMENTS)) /* of the copy that is the current one from now on */
    OB_TRY(restore_array(loading, u, OB_SAVED_MOMENTS, store_moments));
  return loading->dry || !plan->executor->imported ? ONEBIT_OK : plan->executor->imported(plan);
}

/* --- Numbers -----------------------------------------------------------------------------------*/

/* The section that has all of what is not elements. */
static onebit_status_t find(struct ob_loading *loading, enum ob_saved what, uint64_t count,
                            const struct ob_part_section **section) {
  struct ob_part *part = own_part(loading);
  *section = ob_part_from(part, what, OB_ELEMENTS, 0);
  if (!*section || (*section)->first || (*section)->count != count)
    return ob_part_error(part, "section '%s' is not there", ob_saved_name(what));
  return ob_part_verify(part, *section);
}

static onebit_status_t check_number(struct ob_loading *loading, const struct ob_numbers *list,
                                    uint64_t bits) {
  double value = (double)bits;
  if (list->kind != OB_NUMBERS_WHOLE)
    memcpy(&value, &bits, sizeof value);
  if (!(value >= list->least && value <= list->most))
    return ob_part_error(own_part(loading), "section 'numbers' has %g, not in %g .. %g", value,
                         list->least, list->most);
  return ONEBIT_OK;
}

static onebit_status_t restore_numbers(struct ob_loading *loading) {
  struct ob_numbers list[OB_NUMBERS_AT_MOST];
  const struct ob_part_section *section;
  size_t lists = ob_checkpoint_numbers(loading->optimizer, list);
  uint64_t count = ob_checkpoint_count_numbers(loading->optimizer), number = 0, bits;
  if (!count)
    return ONEBIT_OK;
  OB_TRY(find(loading, OB_SAVED_NUMBERS, count, &section));
  for (size_t k = 0; k < lists; k++)
    for (size_t i = 0; i < list[k].count; i++) {
      ob_part_copy(own_part(loading), section, number++, 1, &bits);
      if (loading->dry)
        OB_TRY(check_number(loading, &list[k], bits));
      else
        memcpy(ob_number_at(&list[k], i), &bits, sizeof bits);
    }
  return ONEBIT_OK;
}

/* A ring of another length is of no use: then the norms are collected anew. */
static onebit_status_t restore_norms(struct ob_loading *loading) {
  struct onebit_optimizer *optimizer = loading->optimizer;
  const struct ob_part_section *section;
  size_t window = optimizer->window;
  bool fits = has(loading, OB_SAVED_NORMS) && own_part(loading)->header.window == window;
  if (fits)
    OB_TRY(find(loading, OB_SAVED_NORMS, window, &section));
  if (loading->dry || !window)
    return ONEBIT_OK;
  if (fits)
    ob_part_copy(own_part(loading), section, 0, window, optimizer->norms);
  else
    memset(optimizer->norms, 0, window * sizeof *optimizer->norms);
  return ONEBIT_OK;
}

/* What was loaded of them has been used where nothing is sent; else they come to their places with
 * the next call. */
static void reset_scalings(struct onebit_optimizer *optimizer) {
  bool alone = !ob_optimizer_compresses(optimizer) && optimizer->method->scalings;
  for (size_t t = 0; alone && t < optimizer->tensor_count; t++)
    optimizer->method->scalings(optimizer)[t] = 1;
  for (size_t u = 0; u < optimizer->unit_count; u++) {
    struct ob_unit *unit = &optimizer->units[u];
    for (size_t k = 0; k < unit->bits->geometry.layout.pieces; k++)
      if (unit->tensor_of[k] < optimizer->tensor_count)
        unit->scalings[k] = 1;
  }
}

static void restore_counts(struct ob_loading *loading) {
  struct onebit_optimizer *optimizer = loading->optimizer;
  const struct ob_part_header *header = &own_part(loading)->header;
  double first = optimizer->options.initial_loss_scale;
  optimizer->steps = header->steps;
  optimizer->frozen_at = header->frozen_at;
  optimizer->skipped = header->skipped;
  optimizer->unknown = 0;
  memcpy(optimizer->exchanges, header->exchanges, sizeof optimizer->exchanges);
  optimizer->variance_ratio = header->variance_ratio;
  optimizer->gradient_norm = header->gradient_norm;
  bool scaled = first != 0 && header->loss_scale > 0;
  optimizer->loss_scale = scaled ? header->loss_scale : first != 0 ? first : 1;
  optimizer->good_steps = scaled ? header->good_steps : 0;
}

/* Numbers come first: what is done with momentum may ask for them. */
onebit_status_t ob_restore(struct ob_loading *loading) {
  struct onebit_optimizer *optimizer = loading->optimizer;
  OB_TRY(restore_norms(loading));
  OB_TRY(restore_numbers(loading));
  for (size_t u = 0; u < optimizer->unit_count; u++)
    OB_TRY(restore_unit(loading, u));
  if (loading->dry)
    return ONEBIT_OK;
  reset_scalings(optimizer);
  restore_counts(loading);
  return optimizer->place->restored ? optimizer->place->restored(optimizer) : ONEBIT_OK;
}
