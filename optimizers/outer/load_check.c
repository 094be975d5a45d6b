/* Checks that a part of a checkpoint fits an outer step. */
#include <inttypes.h>
#include <string.h>

#include "base/error.h"
#include "optimizers/outer/state.h"

static onebit_status_t load_check_tensors(const struct ob_part *part,
                                          const struct onebit_outer *outer) {
  const struct ob_part_header *header = &part->header;
  if (header->tensors != outer->tensor_count)
    return ob_part_error(part, "%" PRIu64 " tensors were saved, there are %zu", header->tensors,
                         outer->tensor_count);
  for (size_t t = 0; t < outer->tensor_count; t++)
    if (part->tensors[t].count != outer->tensors[t].count)
      return ob_part_error(part, "tensor %zu has %zu elements, saved were %" PRIu64, t,
                           outer->tensors[t].count, part->tensors[t].count);
  if (header->elements != outer->count)
    return ob_part_error(part, "%" PRIu64 " elements, but its tensors have %zu", header->elements,
                         outer->count);
  return ONEBIT_OK;
}

onebit_status_t ob_outer_check_part(const struct ob_part *part, const struct onebit_outer *outer) {
  const struct ob_part_header *header = &part->header;
  const bool momentum = outer->options.rule != ONEBIT_OUTER_MEAN;
  if (strncmp(header->kind, ob_outer_kind(outer), sizeof header->kind) != 0)
    return ob_part_error(part, "of another kind: saved by %.16s, loaded by %s", header->kind,
                         ob_outer_kind(outer));
  OB_TRY(load_check_tensors(part, outer));
  if (header->momentum != momentum)
    return ob_part_error(part, "saved with%s outer momentum, loaded with%s it",
                         header->momentum ? "" : "out", momentum ? "" : "out");
  if (header->weighted != (uint32_t)outer->options.weighted)
    return ob_part_error(part, "saved with%s weights, loaded with%s them",
                         header->weighted ? "" : "out", outer->options.weighted ? "" : "out");
  if (header->fragments != outer->options.fragments)
    return ob_part_error(part, "saved with %" PRIu32 " fragments, loaded with %zu",
                         header->fragments, outer->options.fragments);
  if (header->numbers != ob_outer_number_count(outer))
    return ob_part_error(part, "%" PRIu64 " numbers, an outer step of so many fragments has %zu",
                         header->numbers, ob_outer_number_count(outer));
  return ONEBIT_OK;
}

static bool is_weight(double value) { return value >= 0 && value <= 1e300; }

static onebit_status_t check_fragment(const struct ob_part *part,
                                      const struct ob_fragment_numbers *numbers,
                                      const struct ob_fragment *fragment) {
  if (numbers->count != fragment->count)
    return ob_part_error(
        part, "fragment %zu has %zu elements, saved were %" PRIu64 ": give block_size as it was",
        fragment->number, fragment->count, numbers->count);
  const uint64_t state = numbers->state;
  const bool is_state = fragment->outer->sites ? state == OB_OUTER_IDLE || state == OB_OUTER_SENT
                                               : state < OB_OUTER_SENT;
  if (!is_state || numbers->finite > 1 ||
      numbers->keeps > (fragment->outer->exchange->keep != NULL) || !is_weight(numbers->weight) ||
      !is_weight(numbers->sent_weight) || !is_weight(numbers->squares) ||
      numbers->remaining > UINT32_MAX)
    return ob_part_error(part, "the numbers of fragment %zu describe no possible state",
                         fragment->number);
  return ONEBIT_OK;
}

onebit_status_t ob_outer_check_numbers(const struct ob_part *part,
                                       const struct ob_outer_numbers *numbers,
                                       const struct onebit_outer *outer,
                                       const struct ob_outer_numbers *first) {
  const uint64_t rounds = numbers->local_steps;
  if (rounds < (outer->sites ? 1 : outer->options.fragments) || rounds > UINT32_MAX ||
      numbers->position >= rounds)
    return ob_part_error(part, "step %" PRIu64 " of a round of %" PRIu64 " steps",
                         numbers->position, rounds);
  for (size_t f = 0; f < outer->options.fragments; f++) {
    OB_TRY(check_fragment(part, &numbers->fragment[f], &outer->fragments[f]));
    if (numbers->fragment[f].state != first->fragment[f].state)
      return ob_part_error(part, "fragment %zu is in another state than in part 0", f);
  }
  return ONEBIT_OK;
}
