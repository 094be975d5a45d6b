/*
 * Counters of a program's calls, for the report and onebit_counters_get. A record is a tensor, or
 * what is known of one before it has a number: the calls of a communicator with one operation, type
 * and count. Records live until the process ends, since communicators do not.
 */
#ifndef OB_DROPIN_COUNTERS_H
#define OB_DROPIN_COUNTERS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "onebit/plan.h"

/* The reason why a call can not be compressed, or is not. Reports count by it, in this order. */
enum ob_reason {
  OB_REASON_NONE = 0,  /* it can be */
  OB_REASON_TYPE,      /* not float, double, bfloat16, half */
  OB_REASON_OPERATION, /* neither a sum nor a mean */
  OB_REASON_SMALL,     /* below the least number of bytes */
  OB_REASON_ALONE,     /* one rank, or an inter-communicator */
  OB_REASON_RULE,      /* a rule excludes it, or no rule asks for it (allgathers) */
  OB_REASON_LEARNING,  /* not yet seen often enough, in this order */
  OB_REASON_UNSTABLE,  /* the order of calls does not repeat */
  /* compressed, but a rank had values that are not finite, or that no float holds: sent again */
  OB_REASON_WITHDRAWN,
  OB_REASON_MEMORY,     /* a plan could not be made, on some rank */
  OB_REASON_WATCHED,    /* neither ONEBIT_GRADIENTS nor a rule asks for compression */
  OB_REASON_UNFAITHFUL, /* its shadow was too far from the exact sums */
  OB_REASON_CALL,       /* of a kind that is never compressed, such as MPI_Reduce */
  OB_REASON_REFUSED,    /* a setting is wrong, ranks differ, or threads forbid it */
  OB_REASON_CAPTURED,   /* it is in a CUDA graph */
  OB_REASON_COUNT
};

/* The number of dense calls whose times are kept one by one: as many as a warm-up mostly has. */
#define OB_DENSE_SAMPLES 64

/* The calls that a record counts. */
struct ob_record_of {
  uint64_t communicator; /* its handle, as a number: one that is freed and used again is the same */
  int comm_size;
  const char *call;     /* "allreduce", "reduce" and the like */
  onebit_dtype_t dtype; /* may also be one of dropin/elements.h */
  uint64_t type;        /* of OB_OTHER_TYPE its handle, as a number */
  size_t count;
};

/* The distance of a tensor's compressed sums from the exact ones (dropin/mpi/shadow.c): squares of
 * the norms of the latest differences and sums. Written by the calling thread. */
#define OB_SHADOW_SAMPLES 64
struct ob_record_shadow {
  struct ob_record_shadow *next;
  int tensor;
  bool refused;
  uint64_t samples;
  double errors[OB_SHADOW_SAMPLES], norms[OB_SHADOW_SAMPLES];
  double largest; /* of one sum, relative to its norm */
};

struct ob_record {
  struct ob_record *next;
  char communicator[32]; /* its name */
  char type[24];         /* its name */
  size_t bytes;          /* of a call */
  struct ob_record_of of;
  /* Written by the thread that calls, read by any. */
  _Atomic uint64_t calls, compressed, dense[OB_REASON_COUNT];
  _Atomic uint64_t bytes_sent, bytes_dense;
  _Atomic uint64_t skipped; /* results that are not-a-number */
  _Atomic int bits;         /* bits an element in the latest compressed call; 0: there was none */
  _Atomic uint64_t moves;   /* how often a tensor's have changed */
  /* Blocking calls that were timed, and their seconds. The first dense call is left out: it
   * connects the ranks. A call that was withdrawn counts among the compressed ones: it has cost
   * both. */
  _Atomic uint64_t timed_dense, timed_compressed;
  _Atomic double seconds_dense, seconds_compressed;
  _Atomic double seconds_deciding;                /* agreeing, making plans, shadows */
  _Atomic double dense_samples[OB_DENSE_SAMPLES]; /* seconds of the latest dense ones */
  /* The norm of the residual relative to that of the mean: the latest sample, and the largest. */
  _Atomic double residual_ratio, max_residual_ratio;
  _Atomic(struct ob_record_shadow *) shadows; /* of its tensors, the latest first */
};

/* Begins the seconds of the report. */
void ob_counters_start(double now);

/* Returns the record of such calls, or NULL where none has been made. */
struct ob_record *ob_counters_find(const struct ob_record_of *of);
/* Finds the record, or makes one with these names for communicator and type, of so many bytes a
 * call; after very many records, and without memory, calls share one. */
struct ob_record *ob_counters_make(const struct ob_record_of *of, const char *communicator,
                                   const char *type, size_t bytes);
/* The latest record; `next` leads to all others. */
struct ob_record *ob_counters_first(void);

/* Counts a call that was passed on before it was assigned to a tensor. Adding takes no locked
 * instruction: of two threads that add at once, which few programs have, one count may be lost. */
extern _Atomic uint64_t ob_counters_passed[OB_REASON_COUNT];
static inline void ob_counters_pass(enum ob_reason reason) {
  uint64_t passed = atomic_load_explicit(&ob_counters_passed[reason], memory_order_relaxed);
  atomic_store_explicit(&ob_counters_passed[reason], passed + 1, memory_order_relaxed);
}

void ob_record_pass(struct ob_record *record, enum ob_reason reason, double seconds);
void ob_record_count_compressed(struct ob_record *record, double seconds);
void ob_record_count_decision(struct ob_record *record, double seconds);
/* Counts the bytes of a compressed call with `bits` an element. */
void ob_record_sent(struct ob_record *record, int bits, uint64_t bytes, uint64_t bytes_dense);
/* Counts a change of a tensor's bits, at the first call with the new number. */
void ob_record_count_moves(struct ob_record *record);

/* Returns the bytes that a rank sends in such a call when it is dense, by the usual algorithms:
 * each element once in each phase, except the rank's own part. */
uint64_t ob_dense_bytes(onebit_operation_t operation, onebit_dtype_t dtype, size_t count,
                        int comm_size);

/* The time of a call that is nonblocking, so that it says nothing, or that is known only later. */
#define OB_NOT_TIMED (-1.0)
void ob_record_time(struct ob_record *record, bool compressed, double seconds);

/* Notes a sample of the residual: its norm relative to that of the mean, in the same elements. */
void ob_record_residual(struct ob_record *record, double error, double mean);

/* Notes a compressed sum of a tensor beside the exact one, as squares of norms. */
void ob_record_count_shadow(struct ob_record *record, int tensor, double error, double norm,
                            bool refused);

/* The difference of the latest sums from the exact ones, relative to the sums' norm. */
double ob_record_difference(const struct ob_record_shadow *shadow);

/* Counts a compressed call with a result that is not-a-number, since a value was not finite. */
void ob_record_count_skip(struct ob_record *record);

/* Seconds of a dense call: the median, which a few slow first ones do not move; 0 before the
 * second. */
double ob_record_dense_seconds(const struct ob_record *record);

/* The seconds that the record's compressed calls have saved so far. */
double ob_record_saved_seconds(const struct ob_record *record);

#endif
