/* Counts calls in records, and sums the records. */
#include "dropin/counters.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/lock.h"
#include "base/memory.h"
#include "base/process.h"
#include "dropin/elements.h"
#include "onebit/counters.h"

_Static_assert(OB_REASON_COUNT <= ONEBIT_COUNTERS_REASONS, "each reason has a place");

static _Atomic(struct ob_record *) records;
_Atomic uint64_t ob_counters_passed[OB_REASON_COUNT];
static _Atomic double started;
static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;

void ob_counters_start(double now) { atomic_store(&started, now); }

struct ob_record *ob_counters_first(void) {
  return atomic_load_explicit(&records, memory_order_acquire);
}

static bool is_same_call(const struct ob_record_of *one, const struct ob_record_of *other) {
  return one->communicator == other->communicator && one->comm_size == other->comm_size &&
         one->dtype == other->dtype && one->type == other->type && one->count == other->count &&
         !strcmp(one->call, other->call);
}

struct ob_record *ob_counters_find(const struct ob_record_of *of) {
  for (struct ob_record *record = ob_counters_first(); record; record = record->next)
    if (is_same_call(&record->of, of))
      return record;
  return NULL;
}

static struct ob_record *allocate_record(const struct ob_record_of *of, const char *communicator,
                                         const char *type, size_t bytes) {
  struct ob_record *record = ob_allocate(1, sizeof *record);
  if (!record)
    return NULL;
  record->of = *of;
  record->bytes = bytes;
  snprintf(record->communicator, sizeof record->communicator, "%.31s", communicator);
  snprintf(record->type, sizeof record->type, "%.23s", type);
  record->next = ob_counters_first();
  atomic_store_explicit(&records, record, memory_order_release);
  return record;
}

/* Limits the number of records: a program whose counts change would need a new record for every
 * call. Beyond this number, or without memory, calls share one record. */
enum { MAX_RECORDS = 1024 };

static struct ob_record *get_shared_record(void) {
  static struct ob_record others = {
      .communicator = "tensors beyond the list", .type = "elements", .of.call = "call"};
  static bool listed;
  if (!listed) {
    others.next = ob_counters_first();
    atomic_store_explicit(&records, &others, memory_order_release);
    listed = true;
  }
  return &others;
}

struct ob_record *ob_counters_make(const struct ob_record_of *of, const char *communicator,
                                   const char *type, size_t bytes) {
  static int made;
  OB_LOCKED(&making);
  struct ob_record *record = ob_counters_find(of);
  if (!record && made++ < MAX_RECORDS)
    record = allocate_record(of, communicator, type, bytes);
  if (!record)
    record = get_shared_record();
  return record;
}

/* Adds to a counter by a load and a store, without an atomic read-modify-write, as
 * ob_counters_count_dense does. */
static void add_count(_Atomic uint64_t *to, uint64_t more) {
  atomic_store_explicit(to, atomic_load_explicit(to, memory_order_relaxed) + more,
                        memory_order_relaxed);
}

static void add_seconds(_Atomic double *to, double more) {
  atomic_store_explicit(to, atomic_load_explicit(to, memory_order_relaxed) + more,
                        memory_order_relaxed);
}

void ob_record_add_time(struct ob_record *record, bool compressed, double seconds) {
  if (seconds < 0)
    return;
  if (compressed) {
    add_count(&record->timed_compressed, 1);
    add_seconds(&record->seconds_compressed, seconds);
    return;
  }
  uint64_t index = atomic_load_explicit(&record->timed_dense, memory_order_relaxed);
  atomic_store(&record->dense_samples[index % OB_DENSE_SAMPLES], seconds);
  add_count(&record->timed_dense, 1);
  add_seconds(&record->seconds_dense, seconds);
}

void ob_record_count_dense(struct ob_record *record, enum ob_reason reason, double seconds) {
  if (!record) {
    ob_counters_count_dense(reason);
    return;
  }
  bool first = atomic_load_explicit(&record->calls, memory_order_relaxed) == 0;
  add_count(&record->calls, 1);
  add_count(&record->dense[reason], 1);
  if (!first)
    ob_record_add_time(record, reason == OB_REASON_WITHDRAWN, seconds);
}

void ob_record_count_compressed(struct ob_record *record, double seconds) {
  if (!record)
    return;
  add_count(&record->calls, 1);
  add_count(&record->compressed, 1);
  ob_record_add_time(record, true, seconds);
}

void ob_record_note_residual(struct ob_record *record, double error, double mean) {
  double ratio = mean > 0 ? error / mean : 0;
  atomic_store(&record->residual_ratio, ratio);
  if (ratio > atomic_load(&record->max_residual_ratio))
    atomic_store(&record->max_residual_ratio, ratio);
}

static struct ob_record_shadow *find_or_make_shadow(struct ob_record *record, int tensor) {
  struct ob_record_shadow *shadow = atomic_load(&record->shadows);
  while (shadow && shadow->tensor != tensor)
    shadow = shadow->next;
  if (shadow || !(shadow = ob_allocate(1, sizeof *shadow)))
    return shadow;
  shadow->tensor = tensor;
  shadow->next = atomic_load(&record->shadows);
  atomic_store(&record->shadows, shadow);
  return shadow;
}

void ob_record_count_shadow(struct ob_record *record, int tensor, double error, double norm,
                            bool refused) {
  struct ob_record_shadow *shadow = record ? find_or_make_shadow(record, tensor) : NULL;
  if (!shadow)
    return;
  size_t at = shadow->samples++ % OB_SHADOW_SAMPLES;
  double ratio = norm > 0 ? sqrt(error / norm) : 0;
  shadow->errors[at] = error;
  shadow->norms[at] = norm;
  shadow->refused |= refused;
  shadow->largest = ratio > shadow->largest ? ratio : shadow->largest;
}

double ob_record_difference(const struct ob_record_shadow *shadow) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < OB_SHADOW_SAMPLES && i < shadow->samples; i++) {
    error += shadow->errors[i];
    norm += shadow->norms[i];
  }
  return norm > 0 ? sqrt(error / norm) : 0;
}

void ob_record_count_skip(struct ob_record *record) {
  if (record)
    add_count(&record->skipped, 1);
}

void ob_record_count_decision(struct ob_record *record, double seconds) {
  if (record)
    add_seconds(&record->seconds_deciding, seconds);
}

void ob_record_count_sent(struct ob_record *record, int bits, uint64_t bytes,
                          uint64_t bytes_dense) {
  if (!record)
    return;
  atomic_store_explicit(&record->bits, bits, memory_order_relaxed);
  add_count(&record->bytes_sent, bytes);
  add_count(&record->bytes_dense, bytes_dense);
}

void ob_record_count_bytes(struct ob_record *record, uint64_t bytes) {
  if (record)
    add_count(&record->bytes_sent, bytes);
}

void ob_record_count_moves(struct ob_record *record) {
  if (record)
    add_count(&record->moves, 1);
}

uint64_t ob_dense_bytes(onebit_operation_t operation, onebit_dtype_t dtype, size_t count,
                        int comm_size) {
  uint64_t size = (uint64_t)comm_size, part = (uint64_t)count * ob_elements_size(dtype);
  return operation == ONEBIT_ALLREDUCE ? 2 * (size - 1) * part / size : (size - 1) * part;
}

static int compare_doubles(const void *one, const void *other) {
  double a = *(const double *)one, b = *(const double *)other;
  return (a > b) - (a < b);
}

double ob_record_dense_seconds(const struct ob_record *record) {
  double samples[OB_DENSE_SAMPLES];
  uint64_t timed = atomic_load(&record->timed_dense);
  size_t count = timed < OB_DENSE_SAMPLES ? (size_t)timed : OB_DENSE_SAMPLES;
  for (size_t i = 0; i < count; i++)
    samples[i] = atomic_load(&record->dense_samples[i]);
  qsort(samples, count, sizeof samples[0], compare_doubles);
  return count ? (samples[(count - 1) / 2] + samples[count / 2]) / 2 : 0;
}

double ob_record_saved_seconds(const struct ob_record *record) {
  uint64_t compressed = atomic_load(&record->timed_compressed);
  if (!atomic_load(&record->timed_dense) || !compressed)
    return 0;
  return (double)compressed * ob_record_dense_seconds(record) -
         atomic_load(&record->seconds_compressed) - atomic_load(&record->seconds_deciding);
}

/* ---- The public sum ---- */

static void sum_record(const struct ob_record *record, onebit_counters_t *sum) {
  sum->calls += atomic_load(&record->calls);
  sum->compressed += atomic_load(&record->compressed);
  for (size_t reason = 0; reason < OB_REASON_COUNT; reason++)
    sum->passed[reason] += atomic_load(&record->dense[reason]);
  sum->bytes_sent += atomic_load(&record->bytes_sent);
  sum->bytes_dense += atomic_load(&record->bytes_dense);
  if (!atomic_load(&record->timed_compressed))
    return;
  sum->seconds_dense += atomic_load(&record->seconds_dense);
  sum->seconds_compressed += atomic_load(&record->seconds_compressed);
  sum->seconds_saved += ob_record_saved_seconds(record);
}

onebit_status_t onebit_counters_get(onebit_counters_t *counters) {
  OB_CALL_SCOPE;
  if (!counters)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "counters is NULL");
  if (counters->size != sizeof *counters)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "counters->size is %zu, but this library's onebit_counters_t has %zu bytes",
                    counters->size, sizeof *counters);
  *counters = (onebit_counters_t){.size = sizeof *counters};
  for (size_t reason = 0; reason < OB_REASON_COUNT; reason++) {
    counters->passed[reason] = atomic_load(&ob_counters_passed[reason]);
    counters->calls += counters->passed[reason];
  }
  for (struct ob_record *record = ob_counters_first(); record; record = record->next)
    sum_record(record, counters);
  double since = atomic_load(&started);
  counters->seconds = since > 0 ? ob_seconds() - since : 0;
  return ONEBIT_OK;
}

const char *onebit_counters_reason(size_t reason) {
  static const char *const texts[OB_REASON_COUNT] = {
      [OB_REASON_TYPE] = "the type is not float, double, bfloat16 or half",
      [OB_REASON_OPERATION] = "the operation is neither a sum nor a mean",
      [OB_REASON_SMALL] = "below minimum size",
      [OB_REASON_ALONE] = "one rank, or an inter-communicator",
      [OB_REASON_RULE] = "no rule compresses it",
      [OB_REASON_LEARNING] = "not repeated often enough yet (warmup)",
      [OB_REASON_UNSTABLE] = "calls do not repeat",
      [OB_REASON_WITHDRAWN] =
          "with values not finite, too large for float, or far smaller than in the call before",
      [OB_REASON_WATCHED] = "only counted: neither --gradients nor a rule selects them",
      [OB_REASON_UNFAITHFUL] =
          "no longer compressed: compressed sums were too far from the exact ones",
      [OB_REASON_CALL] = "of a kind that is never compressed",
      [OB_REASON_MEMORY] = "no plan could be made",
      [OB_REASON_CAPTURED] = "in a CUDA graph",
      [OB_REASON_REFUSED] =
          "ruled out by a wrong setting, ranks that differ, or the use of threads",
  };
  return reason < OB_REASON_COUNT ? texts[reason] : NULL;
}
