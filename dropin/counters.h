/*
 * What calls have gone through, kept for the report and onebit_counters_get. A record is a tensor,
 * or what is known of one before it has a number: the calls of a communicator with one operation,
 * type and count. Records live until the process ends, since communicators do not.
 */
#ifndef OB_DROPIN_COUNTERS_H
#define OB_DROPIN_COUNTERS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "dropin/reason.h"
#include "onebit/plan.h"

/* Dense calls that are remembered one by one: as many as a warm-up mostly has. */
#define OB_DENSE_SAMPLES 64

/* Which calls a record is of. */
struct ob_record_of {
  uint64_t communicator; /* its handle, as a number: one that is freed and used again is the same */
  int comm_size;
  onebit_operation_t operation;
  onebit_dtype_t dtype;
  size_t count;
};

struct ob_record {
  struct ob_record *next;
  char communicator[32]; /* its name */
  struct ob_record_of of;
  /* Written by the thread that calls, read by any. */
  _Atomic uint64_t calls, compressed, dense[OB_REASON_COUNT];
  _Atomic uint64_t bytes_sent, bytes_dense;
  _Atomic uint64_t skipped; /* results that are not-a-number */
  _Atomic int bits;         /* an element, in the latest compressed call; 0: there was none */
  _Atomic uint64_t moves;   /* how often a tensor's have changed */
  /* Of blocking calls: how many, and their seconds. The first dense call is left out: it connects
   * the ranks. One that was withdrawn counts among the compressed ones: it has cost both. */
  _Atomic uint64_t timed_dense, timed_compressed;
  _Atomic double seconds_dense, seconds_compressed;
  _Atomic double seconds_deciding;                /* learning, agreeing, making plans */
  _Atomic double dense_samples[OB_DENSE_SAMPLES]; /* seconds of the latest dense ones */
  /* Norm of the residual relative to that of the mean, as last sampled and at most. */
  _Atomic double residual_ratio, max_residual_ratio;
  _Atomic uint32_t findings; /* a bit for each enum ob_finding that has spoken against it */
};

/* The seconds begin. */
void ob_counters_start(double now);

/* The record of such calls, or NULL where none has been made. */
struct ob_record *ob_counters_find(const struct ob_record_of *of);
/* The same, or a new one with this name for the communicator; of very many, and where there is no
 * memory, one that is shared. */
struct ob_record *ob_counters_make(const struct ob_record_of *of, const char *name);
/* All of them, the latest first. */
struct ob_record *ob_counters_first(void);

/* A call that was passed on before anybody asked whose it is. Adding takes no locked instruction:
 * of two threads that add at once, which few programs have, one count may be lost. */
extern _Atomic uint64_t ob_counters_passed[OB_REASON_COUNT];
static inline void ob_counters_pass(enum ob_reason reason) {
  uint64_t passed = atomic_load_explicit(&ob_counters_passed[reason], memory_order_relaxed);
  atomic_store_explicit(&ob_counters_passed[reason], passed + 1, memory_order_relaxed);
}

void ob_record_pass(struct ob_record *record, enum ob_reason reason, double seconds);
void ob_record_compressed(struct ob_record *record, double seconds);
void ob_record_decided(struct ob_record *record, double seconds);
/* Of a compressed call; `bits` an element. */
void ob_record_sent(struct ob_record *record, int bits, uint64_t bytes, uint64_t bytes_dense);
/* It was the first of its tensor with other bits than before. */
void ob_record_moved(struct ob_record *record);

/* What a rank sends in such a call that is dense, as the common algorithms go about it: each
 * element once in each phase, but for a rank's own part. */
uint64_t ob_dense_bytes(onebit_operation_t operation, onebit_dtype_t dtype, size_t count,
                        int comm_size);

/* Seconds of a call that is not blocking say nothing; or come later. */
#define OB_NOT_TIMED (-1.0)
void ob_record_time(struct ob_record *record, bool compressed, double seconds);

/* A sample of the residual: its norm relative to that of the mean, in the same elements. */
void ob_record_residual(struct ob_record *record, double error, double mean);

/* What speaks against a gradient (enum ob_finding). */
void ob_record_finding(struct ob_record *record, int finding);

/* A compressed call has given not-a-number, since a value was not finite. */
void ob_record_skipped(struct ob_record *record);

/* Seconds of a dense call: the median, which a few slow first ones do not move; 0 before the
 * second. */
double ob_record_dense_seconds(const struct ob_record *record);

/* What its compressed calls have saved so far. */
double ob_record_saved(const struct ob_record *record);

#endif
