/*
 * The terms of a step, on which ranks agree before its exchanges: the constants that the caller may
 * change between steps, the equality of their parameters, and the norm of all gradients, which sets
 * the factor of gradients.
 */
#include <math.h>
#include <stdio.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/memory.h"
#include "optimizers/optimizer.h"

/* --- Factors of the learning rate, weight decays, beta1 and the tag, which the caller may change
 * between steps.
 *
 * Factors and weight decays are only used when parameters are updated. Ranks of 0/1 Adam make
 * several local steps, and then one step on the sum of their rates: so a factor must be the same
 * from one synchronisation to the next, and a new one takes effect after it. At the freeze the
 * momentum is multiplied by beta1, as the first compressed step expects: a new beta1 takes effect
 * after that step. */

static bool constants_must_wait(const struct onebit_optimizer *optimizer) {
  return optimizer->method->adds_rates && optimizer->method->adds_rates(optimizer);
}

static bool beta1_must_wait(const struct onebit_optimizer *optimizer) {
  return optimizer->method->momentum && optimizer->frozen_at &&
         optimizer->steps == optimizer->frozen_at && ob_optimizer_compresses(optimizer);
}

static void apply_beta1(struct onebit_optimizer *optimizer) {
  if (optimizer->moments.beta1 == optimizer->beta1 || beta1_must_wait(optimizer))
    return;
  optimizer->moments.beta1 = optimizer->beta1;
  ob_buckets_set_serving(optimizer);
}

onebit_status_t ob_constants_apply(struct onebit_optimizer *optimizer) {
  apply_beta1(optimizer);
  if (!optimizer->constants_wait || constants_must_wait(optimizer))
    return ONEBIT_OK;
  optimizer->constants_wait = false;
  for (size_t t = 0; t < optimizer->tensor_count; t++)
    OB_TRY(ob_buckets_set_constants(optimizer, t));
  return ONEBIT_OK;
}

/* Agrees on the rate alone if no constant was set: error messages can then print the rate. */
void ob_constants_agree(const struct onebit_optimizer *optimizer, float rate, const char *name,
                        struct ob_call *call) {
  call->agreed = ob_bits_of(rate) ^ optimizer->constants;
  call->agreed_name = name;
  if (optimizer->constants == 0)
    return;
  call->agreed_name = "a constant of this step: learning_rate, a factor of it, a weight decay, "
                      "beta1 or the tag (shown as a hash)";
  call->agreed_whole = true;
}

static uint32_t tensor_fingerprint(const struct onebit_optimizer *optimizer, size_t tensor) {
  const onebit_tensor_t *of = &optimizer->list[tensor];
  const uint64_t number = tensor;
  uint64_t hash = ob_hash(OB_HASH_START, &number, sizeof number);
  hash = ob_hash(hash, &of->learning_rate_factor, sizeof(float));
  hash = ob_hash(hash, &of->weight_decay, sizeof(float));
  return (uint32_t)(hash ^ hash >> 32);
}

static uint32_t number_fingerprint(const void *number) {
  const uint64_t hash = ob_hash(OB_HASH_START, number, sizeof(uint64_t));
  return (uint32_t)(hash ^ hash >> 32);
}

static onebit_status_t check_constant(onebit_optimizer_t optimizer, size_t tensor, const char *name,
                                      float value) {
  OB_TRY(ob_optimizer_reach_idle(optimizer));
  OB_TRY(ob_check_tensor(tensor, optimizer->tensor_count));
  if (!(value >= 0) || !ob_is_finite(value))
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is %g: it must be finite and at least 0", name,
                    (double)value);
  return ONEBIT_OK;
}

/* Sets a constant. If its old value is set again, the fingerprints cancel. */
static onebit_status_t set_constant(onebit_optimizer_t optimizer, size_t tensor, float *constant,
                                    float value) {
  optimizer->constants ^= tensor_fingerprint(optimizer, tensor);
  *constant = value;
  optimizer->constants ^= tensor_fingerprint(optimizer, tensor);
  if (constants_must_wait(optimizer)) {
    optimizer->constants_wait = true;
    return ONEBIT_OK;
  }
  return ob_buckets_set_constants(optimizer, tensor);
}

onebit_status_t onebit_optimizer_set_learning_rate_factor(onebit_optimizer_t optimizer,
                                                          size_t tensor, float factor) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  OB_TRY(check_constant(optimizer, tensor, "factor", factor));
  return set_constant(optimizer, tensor, &optimizer->list[tensor].learning_rate_factor, factor);
}

onebit_status_t onebit_optimizer_set_weight_decay(onebit_optimizer_t optimizer, size_t tensor,
                                                  float weight_decay) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  OB_TRY(check_constant(optimizer, tensor, "weight_decay", weight_decay));
  return set_constant(optimizer, tensor, &optimizer->list[tensor].weight_decay, weight_decay);
}

onebit_status_t onebit_optimizer_set_beta1(onebit_optimizer_t optimizer, double beta1) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  OB_TRY(ob_optimizer_reach_idle(optimizer));
  OB_TRY(ob_check_fraction("beta1", beta1));
  optimizer->constants ^= number_fingerprint(&optimizer->beta1) ^ number_fingerprint(&beta1);
  optimizer->beta1 = beta1;
  apply_beta1(optimizer);
  return ONEBIT_OK;
}

onebit_status_t onebit_optimizer_take_parameters(onebit_optimizer_t optimizer) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  OB_TRY(ob_optimizer_reach_idle(optimizer));
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    if (optimizer->buckets[u].masters)
      OB_TRY(ob_bucket_make_masters(optimizer, &optimizer->buckets[u]));
  return ONEBIT_OK;
}

onebit_status_t onebit_optimizer_set_tag(onebit_optimizer_t optimizer, uint64_t tag) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  OB_TRY(ob_optimizer_reach_idle(optimizer));
  optimizer->constants ^= number_fingerprint(&optimizer->tag) ^ number_fingerprint(&tag);
  optimizer->tag = tag;
  return ONEBIT_OK;
}

/* --- Comparing parameters: ranks agree on a fingerprint of all tensors together and, if that
 * differs, on one fingerprint per tensor. */

/* The number of bytes that are copied to the host and hashed at once. */
#define PIECE ((size_t)1 << 18)

/* The number of tensors in one agreement. */
#define TENSORS 16

/* Hashes the whole words by the codec's checksum, and the remaining bytes one by one. */
static uint64_t compare_add_bytes(const struct ob_codec *codec, uint64_t hash,
                                  const unsigned char *bytes, size_t count) {
  const size_t words = count / sizeof(uint32_t), left = count % sizeof(uint32_t);
  const uint32_t sum = codec->checksum(bytes, words);
  hash = ob_hash(hash, &sum, sizeof sum);
  return ob_hash(hash, bytes + count - left, left);
}

static onebit_status_t compare_add_array(onebit_plan_t plan, const void *array, size_t bytes,
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

/* Hashes the caller's parameters, tensor by tensor. */
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
        OB_TRY(compare_add_array(bucket->bits, array, layout->piece[k].valid * size, buffer,
                                 &hashes[bucket->tensor_of[k]]));
    }
  }
  return ONEBIT_OK;
}

/* Finds the first tensor that differs. All ranks call this, since all have received the same
 * fingerprints of all tensors. */
static onebit_status_t compare_find_tensor(const struct onebit_optimizer *optimizer,
                                           const uint64_t *hashes) {
  for (size_t t = 0; t < optimizer->tensor_count; t += TENSORS) {
    char names[TENSORS][64];
    struct ob_term terms[TENSORS];
    size_t count = optimizer->tensor_count - t < TENSORS ? optimizer->tensor_count - t : TENSORS;
    for (size_t k = 0; k < count; k++) {
      snprintf(names[k], sizeof names[k], "the parameter of tensors[%zu] (shown as a hash)", t + k);
      terms[k] = (struct ob_term){names[k], hashes[t + k]};
    }
    OB_TRY(ob_agree(optimizer->comm, ONEBIT_OK, terms, count));
  }
  return ONEBIT_OK;
}

static onebit_status_t compare_agree(const struct onebit_optimizer *optimizer,
                                     onebit_status_t status, const uint64_t *hashes) {
  struct ob_term all = {"the parameters of all tensors (shown as a hash)", 0};
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
    status = ob_error(ONEBIT_ERROR_MEMORY, "out of memory for copying parameters to the host");
  if (status == ONEBIT_OK)
    status = hash_tensors(optimizer, buffer, optimizer->hashes);
  status = compare_agree(optimizer, status, optimizer->hashes);
  ob_release(buffer);
  return status;
}

bool ob_optimizer_must_compare(struct onebit_optimizer *optimizer) {
  bool apart = optimizer->method->apart && optimizer->method->apart(optimizer);
  bool asked = optimizer->compare_interval && ++optimizer->calls >= optimizer->compare_interval;
  if (optimizer->deferred || apart || (optimizer->compared && !asked))
    return false;
  optimizer->compared = true;
  optimizer->calls = 0;
  return true;
}

onebit_status_t onebit_optimizer_compare(onebit_optimizer_t optimizer) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  OB_TRY(ob_optimizer_check_held(optimizer));
  return ob_optimizer_compare(optimizer, ob_optimizer_reach_idle(optimizer));
}

onebit_status_t onebit_optimizer_set_compare_interval(onebit_optimizer_t optimizer,
                                                      uint64_t steps) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  if (steps && optimizer->deferred)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "interval is %ju, but the optimizer is on a device that counts its steps: call "
                    "onebit_optimizer_compare",
                    (uintmax_t)steps);
  optimizer->compare_interval = steps;
  optimizer->calls = 0;
  return ONEBIT_OK;
}

/* --- The factor of a step's gradients: accumulation, loss scale, clipping.
 *
 * Accumulation, loss scale and clipping are combined into one factor for each rank and step.
 * Exchanges multiply this rank's gradients by the factor before they add gradients of other ranks.
 * Clipping first needs the norm of all ranks' gradients. This takes a pass that reads 4 or 2 bytes
 * per parameter, and a message with this rank's sum of squares to each other rank, or log2(ranks)
 * messages (40 bytes of header and one word of 32 floats; every rank computes the mean, so there is
 * one round). A rank with an error tells the others in that message, and again in those of the
 * step's exchanges: every step has the same messages, whatever its outcome, so that no rank waits
 * for a message that is not sent. */

static onebit_status_t allocate_buffers(struct onebit_optimizer *optimizer) {
  const struct ob_memory *memory = ob_plan_memory(optimizer->squares);
  for (int k = 0; k < 2; k++) {
    optimizer->own_bytes += sizeof(float);
    optimizer->square[k] = memory->allocate(1, sizeof(float));
    if (!optimizer->square[k])
      return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for the norm of the gradients");
    OB_TRY(memory->clear(optimizer->square[k], sizeof(float))); /* waits until it is filled */
  }
  return ONEBIT_OK;
}

onebit_status_t ob_clipping_create(struct onebit_optimizer *optimizer) {
  if (optimizer->options.clip_norm == 0)
    return ONEBIT_OK;
  OB_TRY(ob_plan_create_numbers(optimizer->comm, ONEBIT_OK, ONEBIT_ALLREDUCE,
                                optimizer->options.device, 1, &optimizer->refused,
                                &optimizer->squares));
  return ob_agree(optimizer->comm, allocate_buffers(optimizer), NULL, 0);
}

void ob_clipping_destroy(struct onebit_optimizer *optimizer) {
  for (int k = 0; optimizer->squares && k < 2; k++)
    ob_plan_memory(optimizer->squares)->release(optimizer->square[k]);
  onebit_plan_destroy(optimizer->squares);
  optimizer->squares = NULL;
}

/* Computes the mean of `own` over the ranks. A rank without a value passes a status that says
 * why. */
static onebit_status_t exchange_mean(struct onebit_optimizer *optimizer, onebit_status_t status,
                                     float own, float *mean) {
  struct onebit_plan *plan = optimizer->squares;
  const struct ob_memory *memory = ob_plan_memory(plan);
  struct ob_call call = ob_plan_call(plan, optimizer->square[0], optimizer->square[1]);
  ob_constants_agree(optimizer, optimizer->step.learning_rate, "learning_rate", &call);
  if (status == ONEBIT_OK)
    status = memory->copy(optimizer->square[0], &own, sizeof own);
  OB_TRY(ob_plan_start(plan, status, &call));
  optimizer->sent[OB_EXCHANGE_DENSE] += ob_plan_wire_bytes(plan);
  OB_TRY(ob_plan_test(plan, true));
  return memory->copy(mean, optimizer->square[1], sizeof *mean);
}

/* --- The norm */

/* Sums the squares of this rank's gradients tensor by tensor, so that the bits do not depend on how
 * tensors are grouped into buckets. */
static onebit_status_t sum_squares(struct onebit_optimizer *optimizer, double *sum) {
  *sum = 0;
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    OB_TRY(ob_bucket_run_pass(optimizer, &optimizer->buckets[u], OB_PASS_SQUARES,
                              optimizer->steps + 1));
  for (size_t t = 0; t < optimizer->tensor_count; t++) {
    const struct ob_tensor *tensor = &optimizer->tensors[t];
    double part;
    OB_TRY(optimizer->executor->sum(optimizer, &optimizer->buckets[tensor->bucket], 0,
                                    tensor->first_block, tensor->end_block, &part));
    *sum += part;
  }
  return ONEBIT_OK;
}

/* Computes the mean square. In a step that sends nothing the mean square is this rank's sum alone;
 * the method handles a gradient that is not finite, since the step counts on the other ranks. */
static onebit_status_t compute_mean_square(struct onebit_optimizer *optimizer,
                                           onebit_status_t status, double *mean) {
  double sum = 0;
  float of_all;
  if (status == ONEBIT_OK)
    status = sum_squares(optimizer, &sum);
  if (!ob_optimizer_sends_nothing(optimizer)) {
    OB_TRY(exchange_mean(optimizer, status, (float)sum, &of_all));
    *mean = (double)of_all;
    return ONEBIT_OK;
  }
  *mean = isfinite(sum) ? sum : INFINITY;
  return status;
}

onebit_status_t ob_optimizer_set_gradient_factor(struct onebit_optimizer *optimizer,
                                                 onebit_status_t status) {
  double factor = optimizer->options.gradient_factor / optimizer->loss_scale, mean;
  optimizer->step.gradient_factor = (float)factor;
  if (optimizer->options.clip_norm == 0)
    return ONEBIT_OK;
  OB_TRY(compute_mean_square(optimizer, status, &mean));
  double norm = sqrt(mean);
  optimizer->gradient_norm = norm;
  if (norm > optimizer->options.clip_norm)
    optimizer->step.gradient_factor = (float)(factor * (optimizer->options.clip_norm / norm));
  return ONEBIT_OK;
}

/* --- The loss scale */

onebit_status_t onebit_optimizer_get_loss_scale(onebit_optimizer_t optimizer, double *scale) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  if (!scale)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "scale is NULL");
  OB_TRY(ob_optimizer_catch_up(optimizer));
  *scale = optimizer->loss_scale;
  return ONEBIT_OK;
}
