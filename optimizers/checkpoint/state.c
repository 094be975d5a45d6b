/* What an optimizer has that checkpoints have to have. */
#include <string.h>

#include "optimizers/checkpoint/checkpoint.h"

enum ob_stage ob_checkpoint_stage(const struct onebit_optimizer *optimizer) {
  if (!ob_optimizer_is_frozen(optimizer))
    return OB_STAGE_WARMUP;
  bool sent = optimizer->method->momentum && optimizer->steps != optimizer->frozen_at &&
              ob_optimizer_compresses(optimizer);
  return sent ? OB_STAGE_SENT : OB_STAGE_FROZEN;
}

enum ob_form ob_checkpoint_form(const struct onebit_optimizer *optimizer) {
  bool step = optimizer->moments.exchange == ONEBIT_ADAM_EXCHANGE_STEP;
  return step && ob_optimizer_compresses(optimizer) ? OB_FORM_STEP : OB_FORM_MOMENTUM;
}

static int slot_of(enum ob_saved what) {
  switch (what) {
  case OB_SAVED_VARIANCE:
  case OB_SAVED_MOMENTS: /* of what is uncompressed */
    return OB_VARIANCE;
  case OB_SAVED_FRESH:
    return OB_FRESH;
  case OB_SAVED_ANCHOR:
    return OB_ANCHOR;
  case OB_SAVED_MOVED:
    return OB_MOVED;
  default:
    return OB_MOMENTUM;
  }
}

/* Where steps come back in bits, it is the server that sends them whose error that is. */
struct ob_kept *ob_saved_server(const struct ob_unit *unit) {
  return unit->steps_back ? &unit->steps_back->worker : &unit->bits->server;
}

bool ob_saved_by_servers(const struct ob_unit *unit, enum ob_saved what) {
  return what == OB_SAVED_MOMENTUM && unit->bits->server.serving.rule == OB_SERVE_LION;
}

/* Whether the bucket has nothing of what others have. */
static bool is_missing(const struct ob_unit *unit, enum ob_saved what) {
  switch (what) {
  case OB_SAVED_WORKER:
    return unit->uncompressed;
  case OB_SAVED_SERVER:
    return unit->uncompressed || ob_saved_server(unit)->serving.rule != OB_SERVE_MEAN;
  case OB_SAVED_MOMENTS:
    return unit->uncompressed && !unit->arrays[OB_VARIANCE];
  default:
    return false;
  }
}

void ob_saved_blocks(const struct ob_unit *unit, enum ob_saved what, size_t *first, size_t *end) {
  const struct ob_kept *server = ob_saved_server(unit);
  bool sent = what == OB_SAVED_WORKER || (what == OB_SAVED_MOMENTS && !unit->uncompressed);
  if (sent) {
    ob_plan_compressed(unit->bits, first, end);
  } else if (what == OB_SAVED_SERVER || ob_saved_by_servers(unit, what)) {
    *first = server->first;
    *end = server->first + server->blocks;
  } else {
    *first = unit->first_block;
    *end = unit->first_block + unit->blocks;
  }
  if (is_missing(unit, what))
    *end = *first;
}

size_t ob_offset_in(const struct ob_layout *layout, size_t piece, size_t block) {
  const struct ob_piece *at = &layout->piece[piece];
  if (block <= at->first_block)
    return 0;
  if (block - at->first_block > at->count / layout->block)
    return at->count;
  return (block - at->first_block) * layout->block;
}

float *ob_saved_at(const struct ob_unit *unit, enum ob_saved what, size_t piece, size_t offset) {
  size_t word = unit->bits->geometry.layout.piece[piece].first_word;
  const struct ob_kept *server = &unit->bits->server;
  if (ob_saved_by_servers(unit, what) && !unit->uncompressed)
    return server->values[server->now] + ((word - server->first_word) * OB_LANES + offset);
  float *array = what == OB_SAVED_PARAMETERS ? unit->masters : unit->arrays[slot_of(what)];
  if (!array)
    return unit->parameters[piece] + offset;
  return array + ((word * OB_LANES + offset) - unit->first_word * OB_LANES);
}

uint16_t *ob_saved_moments(const struct ob_unit *unit, enum ob_saved what, size_t piece,
                           size_t offset) {
  const struct ob_kept *kept = &unit->bits->worker;
  size_t word = unit->bits->geometry.layout.piece[piece].first_word;
  if (what != OB_SAVED_MOMENTS || unit->uncompressed)
    return NULL;
  return kept->moments[kept->now] + ((word - kept->first_word) * OB_LANES + offset);
}

/* Fresh variance, anchor and movement begin at the freeze; and errors there, where momentum is what
 * is sent or the state is sharded. */
bool ob_checkpoint_has(const struct onebit_optimizer *optimizer, enum ob_stage stage,
                       enum ob_saved what) {
  unsigned arrays = optimizer->method->arrays;
  switch (what) {
  case OB_SAVED_NORMS:
    return optimizer->window && stage == OB_STAGE_WARMUP;
  case OB_SAVED_VARIANCE:
    return arrays & OB_MASK(OB_VARIANCE);
  case OB_SAVED_FRESH:
  case OB_SAVED_ANCHOR:
  case OB_SAVED_MOVED:
    return arrays & OB_MASK(slot_of(what)) && stage != OB_STAGE_WARMUP;
  case OB_SAVED_WORKER:
  case OB_SAVED_SERVER:
    if (optimizer->options.no_error_feedback ||
        (what == OB_SAVED_SERVER && optimizer->method->serve_rule != OB_SERVE_MEAN))
      return false;
    return optimizer->method->momentum  ? stage == OB_STAGE_SENT
           : optimizer->method->sharded ? stage == OB_STAGE_FROZEN
                                        : true;
  case OB_SAVED_MOMENTS:
    return optimizer->method->moments;
  default:
    return true;
  }
}

bool ob_saved_is_own(enum ob_saved what, bool apart) {
  return what == OB_SAVED_WORKER || what == OB_SAVED_MOMENTS ||
         (apart &&
          (what == OB_SAVED_PARAMETERS || what == OB_SAVED_MOMENTUM || what == OB_SAVED_MOVED));
}

/* --- What is not an array ----------------------------------------------------------------------*/

bool ob_checkpoint_apart(const struct onebit_optimizer *optimizer) {
  return optimizer->method->apart && optimizer->method->apart(optimizer);
}

size_t ob_checkpoint_hosts(const struct onebit_optimizer *optimizer) {
  for (size_t u = 0; u < optimizer->unit_count; u++)
    if (optimizer->units[u].bits->host.ranks)
      return (size_t)optimizer->comm->hosts.count;
  return 0;
}

size_t ob_checkpoint_numbers(struct onebit_optimizer *optimizer,
                             struct ob_numbers list[OB_NUMBERS_AT_MOST]) {
  return optimizer->method->numbers ? optimizer->method->numbers(optimizer, list) : 0;
}

uint64_t ob_checkpoint_count_numbers(struct onebit_optimizer *optimizer) {
  struct ob_numbers list[OB_NUMBERS_AT_MOST];
  uint64_t count = 0;
  for (size_t k = ob_checkpoint_numbers(optimizer, list); k-- > 0;)
    count += list[k].count;
  return count;
}

void *ob_number_at(const struct ob_numbers *numbers, size_t i) {
  return (char *)numbers->at + sizeof(uint64_t) * i;
}
