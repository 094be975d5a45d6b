/* Cuts the one buffer of profile deepspeed: index arithmetic and nothing else. */
#include "optimizers/fused.h"

#include "base/error.h"
#include "base/memory.h"
#include "optimizers/optimizer.h"

/* Adds a tensor, or the padding, where the last one ended: element `at` of the buffer. */
static void fused_add(struct ob_fused *cut, size_t segment, size_t at, size_t tensor, size_t count,
                      bool real) {
  for (size_t done = 0; done < count;) {
    size_t capacity = segment - (at + done) % segment, left = count - done, k = cut->pieces++;
    cut->counts[k] = left < capacity ? left : capacity;
    cut->real[k] = real ? cut->counts[k] : 0;
    cut->tensor[k] = tensor;
    cut->offset[k] = done;
    done += cut->counts[k];
    if (left >= capacity)
      cut->segment_pieces[(at + done) / segment] = cut->pieces;
  }
}

static bool is_in(const struct onebit_optimizer *optimizer, size_t tensor, size_t bucket) {
  return optimizer->tensors[tensor].bucket == bucket;
}

/* Every piece ends a tensor, the padding or a share. */
static bool fused_allocate(struct ob_fused *cut, size_t tensors, size_t ranks) {
  size_t max = tensors + 1 + ranks;
  cut->counts = ob_allocate(max, sizeof(size_t));
  cut->real = ob_allocate(max, sizeof(size_t));
  cut->tensor = ob_allocate(max, sizeof(size_t));
  cut->offset = ob_allocate(max, sizeof(size_t));
  cut->segment_pieces = ob_allocate(ranks + 1, sizeof(size_t));
  return cut->counts && cut->real && cut->tensor && cut->offset && cut->segment_pieces;
}

onebit_status_t ob_fused_cut(const struct onebit_optimizer *optimizer, size_t bucket,
                             struct ob_fused *cut) {
  size_t ranks = (size_t)optimizer->comm->size, tensors = optimizer->tensor_count;
  *cut = (struct ob_fused){0};
  if (!fused_allocate(cut, tensors, ranks))
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory to cut %zu tensors", tensors);
  for (size_t t = 0; t < tensors; t++)
    if (is_in(optimizer, t, bucket))
      cut->total += optimizer->tensors[t].count;
  size_t padded = ob_plan_padded(ranks, cut->total), segment = padded / ranks, at = 0;
  for (size_t t = 0; t < tensors; t++)
    if (is_in(optimizer, t, bucket)) {
      fused_add(cut, segment, at, t, optimizer->tensors[t].count, true);
      at += optimizer->tensors[t].count;
    }
  fused_add(cut, segment, at, tensors, padded - at, false);
  return ONEBIT_OK;
}

void ob_fused_release(struct ob_fused *cut) {
  ob_release(cut->counts);
  ob_release(cut->real);
  ob_release(cut->tensor);
  ob_release(cut->offset);
  ob_release(cut->segment_pieces);
}
