/* The elements of an outer step in another number of fragments, when it is among other sites. */
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "optimizers/outer/outer.h"

/* The elements that both have. */
static void copy_common(float *to, const struct ob_fragment *next, const float *from,
                        const struct ob_fragment *before) {
  const size_t next_end = next->first + next->count, before_end = before->first + before->count;
  const size_t first = next->first > before->first ? next->first : before->first;
  const size_t end = next_end < before_end ? next_end : before_end;
  if (to && from && first < end)
    memcpy(to + (first - next->first), from + (first - before->first), (end - first) * sizeof *to);
}

static void copy_fragment(struct ob_fragment *next, const struct ob_fragment *before,
                          size_t parts) {
  for (size_t f = 0; f < parts; f++) {
    copy_common(next->consensus, next, before[f].consensus, &before[f]);
    copy_common(next->momentum, next, before[f].momentum, &before[f]);
    copy_common(next->drift, next, before[f].drift, &before[f]);
    for (int k = 0; k < 2; k++)
      copy_common(next->held[k], next, before[f].held[k], &before[f]);
    if (before[f].first <= next->first) { /* it has its first element */
      next->keeps = before[f].keeps;
      next->weight = before[f].weight;
      next->weight += before[f].stage == OB_FRAGMENT_SENDING ? before[f].sent_weight : 0;
    }
  }
}

static bool hold(struct ob_fragment *fragment) {
  for (int k = 0; k < 2; k++)
    fragment->held[k] = ob_allocate(fragment->count, sizeof(float));
  return fragment->held[0] && fragment->held[1];
}

onebit_status_t ob_outer_recut(struct onebit_outer *outer, size_t parts) {
  const struct onebit_outer before = *outer;
  const size_t old = before.options.fragments;
  if (parts == old)
    return ONEBIT_OK;
  outer->own_bytes -= before.fragment_bytes;
  outer->options.fragments = parts;
  outer->piece_count = 0;
  onebit_status_t status = ob_fragments_create(outer);
  for (size_t f = 0; status == ONEBIT_OK && f < parts; f++)
    if (!hold(&outer->fragments[f]))
      status =
          ob_error(ONEBIT_ERROR_MEMORY, "no memory to cut an outer step into %zu fragments", parts);
  for (size_t f = 0; status == ONEBIT_OK && f < parts; f++)
    copy_fragment(&outer->fragments[f], before.fragments, old);
  struct onebit_outer gone = status == ONEBIT_OK ? before : *outer;
  if (status != ONEBIT_OK)
    *outer = before;
  ob_fragments_destroy(&gone);
  return status;
}
