/*
 * Compares the ranks' parameters: ranks agree on a fingerprint of all tensors together, and only if
 * it differs on one of each tensor.
 */
#include <stdio.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/memory.h"
#include "optimizers/optimizer.h"

/* Bytes that are brought to the host and looked at together. */
#define PIECE ((size_t)1 << 18)

/* Tensors in one agreement. */
#define TENSORS 16

/* Adds as many whole words as there are, and the remaining bytes one by one. */
static uint64_t compare_add_bytes(const struct ob_codec *codec, uint64_t hash,
                                  const unsigned char *bytes, size_t count) {
  const size_t words = count / sizeof(uint32_t), left = count % sizeof(uint32_t);
  const uint32_t sum = codec->checksum(bytes, words);
  hash = ob_hash(hash, &sum, sizeof sum);
  return ob_hash(hash, bytes + count - left, left);
}

static onebit_status_t add_array(onebit_plan_t plan, const void *array, size_t bytes,
                                 unsigned char *buffer, uint64_t *hash) {
  const struct ob_memory *memory = ob_plan_memory(plan);
  for (size_t at = 0; at < bytes; at += PIECE) {
    const size_t count = bytes - at < PIECE ? bytes - at : PIECE;
    const unsigned char *from = (const unsigned char *)array + at;
    if (buffer)
      OB_TRY(memory->copy(buffer, from, count));
    *hash = compare_add_bytes(ob_plan_work(plan)->codec, *hash, buffer ? buffer : from, count);
  }
  return ONEBIT_OK;
}

/* The caller's parameters, by tensor. */
static onebit_status_t hash_tensors(const struct onebit_optimizer *optimizer, unsigned char *buffer,
                                    uint64_t *hashes) {
  const size_t size = ob_dtype_size(optimizer->options.parameter_dtype);
  for (size_t t = 0; t < optimizer->tensor_count; t++)
    hashes[t] = OB_HASH_START;
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    const struct ob_bucket *bucket = &optimizer->buckets[u];
    const struct ob_layout *layout = ob_plan_layout(bucket->bits);
    for (size_t k = 0; k < layout->pieces; k++) {
      const void *array = bucket->copies[k] ? bucket->copies[k] : bucket->parameters[k];
      if (bucket->tensor_of[k] < optimizer->tensor_count && layout->piece[k].valid)
        OB_TRY(add_array(bucket->bits, array, layout->piece[k].valid * size, buffer,
                         &hashes[bucket->tensor_of[k]]));
    }
  }
  return ONEBIT_OK;
}

/* All ranks reach this, since they have received the same fingerprints of all tensors together. */
static onebit_status_t compare_find_tensor(const struct onebit_optimizer *optimizer,
                                           const uint64_t *hashes) {
  for (size_t t = 0; t < optimizer->tensor_count; t += TENSORS) {
    char names[TENSORS][64];
    struct ob_term terms[TENSORS];
    size_t count = optimizer->tensor_count - t < TENSORS ? optimizer->tensor_count - t : TENSORS;
    for (size_t k = 0; k < count; k++) {
      snprintf(names[k], sizeof names[k], "the parameter of tensors[%zu] (its fingerprint)", t + k);
      terms[k] = (struct ob_term){names[k], hashes[t + k]};
    }
    OB_TRY(ob_agree(optimizer->comm, ONEBIT_OK, terms, count));
  }
  return ONEBIT_OK;
}

static onebit_status_t compare_agree(const struct onebit_optimizer *optimizer,
                                     onebit_status_t status, const uint64_t *hashes) {
  struct ob_term all = {"the parameters of all tensors (their fingerprint)", 0};
  if (status == ONEBIT_OK)
    all.value = ob_hash(OB_HASH_START, hashes, optimizer->tensor_count * sizeof *hashes);
  status = ob_agree(optimizer->comm, status, &all, 1);
  if (status == ONEBIT_ERROR_MISMATCH)
    OB_TRY(compare_find_tensor(optimizer, hashes));
  return status;
}

onebit_status_t ob_optimizer_compare(struct onebit_optimizer *optimizer, onebit_status_t status) {
  const bool device = optimizer->options.device != ONEBIT_DEVICE_HOST;
  unsigned char *buffer = device ? ob_allocate(PIECE, 1) : NULL;
  if (status == ONEBIT_OK && device && !buffer)
    status = ob_error(ONEBIT_ERROR_MEMORY, "no memory to bring parameters to the host");
  if (status == ONEBIT_OK)
    status = hash_tensors(optimizer, buffer, optimizer->hashes);
  status = compare_agree(optimizer, status, optimizer->hashes);
  ob_release(buffer);
  return status;
}

bool ob_optimizer_compares(struct onebit_optimizer *optimizer) {
  bool apart = optimizer->method->apart && optimizer->method->apart(optimizer);
  bool asked = optimizer->compare_interval && ++optimizer->calls >= optimizer->compare_interval;
  if (optimizer->deferred || apart || (optimizer->compared && !asked))
    return false;
  optimizer->compared = true;
  optimizer->calls = 0;
  return true;
}

onebit_status_t onebit_optimizer_compare(onebit_optimizer_t optimizer) {
  OB_CALL_SCOPE;
  onebit_status_t status = ONEBIT_OK;
  OB_TRY(ob_handle_check(optimizer, OB_HANDLE_OPTIMIZER, "optimizer"));
  OB_TRY(ob_optimizer_check_held(optimizer));
  if (optimizer->step.open)
    status = ob_error(ONEBIT_ERROR_BUSY, "a step is open: onebit_optimizer_step ends it");
  else
    status = ob_optimizer_catch_up(optimizer);
  return ob_optimizer_compare(optimizer, status);
}

onebit_status_t onebit_optimizer_set_compare_interval(onebit_optimizer_t optimizer,
                                                      uint64_t steps) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  if (steps && optimizer->deferred)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "interval is %ju, and the optimizer is on a device that counts its steps: call "
                    "onebit_optimizer_compare",
                    (uintmax_t)steps);
  optimizer->compare_interval = steps;
  optimizer->calls = 0;
  return ONEBIT_OK;
}
