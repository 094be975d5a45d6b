/*
 * Counters of a program's calls, for the report and onebit_counters_get. A record counts the calls
 * of a communicator with one operation, type and count. Records live until the process ends, since
 * the report at the end includes communicators that have been freed.
 */
#ifndef OB_DROPIN_COUNTERS_H
#define OB_DROPIN_COUNTERS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "onebit/plan.h"

/* The reason why a call is sent dense. The report counts the calls of each reason, in this
 * order. */
enum ob_reason {
  OB_REASON_NONE = 0,  /* the call can be compressed */
  OB_REASON_TYPE,      /* not float, double, bfloat16, half */
  OB_REASON_OPERATION, /* neither a sum nor a mean */
  OB_REASON_SMALL,     /* below the minimum size */
  OB_REASON_ALONE,     /* the communicator has one rank, or is an inter-communicator */
  OB_REASON_RULE,      /* a rule excludes the call; an allgather: no rule asks for it */
  OB_REASON_LEARNING,  /* the program has not repeated its loop of calls often enough */
  OB_REASON_UNSTABLE,  /* the order of calls does not repeat */
  /* compressed, then sent again dense: a rank had values that are not finite or exceed a float */
  OB_REASON_WITHDRAWN,
  OB_REASON_MEMORY,     /* some rank could not create a plan */
  OB_REASON_WATCHED,    /* neither ONEBIT_GRADIENTS nor a rule asks for compression */
  OB_REASON_UNFAITHFUL, /* the tensor's compressed sums were too far from the exact ones */
  OB_REASON_CALL,       /* a call of a kind that is never compressed, such as MPI_Reduce */
  OB_REASON_REFUSED,    /* a setting is wrong, ranks differ, or threads forbid it */
  OB_REASON_CAPTURED,   /* the call is in a CUDA graph */
  OB_REASON_COUNT
};

/* The number of dense calls whose times are stored one by one. A warm-up rarely has more calls. */
#define OB_DENSE_SAMPLES 64

/* Identifies the calls that a record counts. */
struct ob_record_of {
  uint64_t communicator; /* the handle as a number; MPI may reuse it after a free */
  int comm_size;
  const char *call;     /* "allreduce", "reduce" and the like */
  onebit_dtype_t dtype; /* or a type of dropin/elements.h */
  uint64_t type;        /* the handle as a number, if dtype is OB_OTHER_TYPE */
  size_t count;
};

/* The difference between a tensor's compressed sums and the exact sums (dropin/mpi/shadow.c).
 * `errors` and `norms` are squared norms: those of the latest differences, and of the latest exact
 * sums. Only the calling thread writes them. */
#define OB_SHADOW_SAMPLES 64
struct ob_record_shadow {
  struct ob_record_shadow *next;
  int tensor;
  bool refused;
  uint64_t samples;
  double errors[OB_SHADOW_SAMPLES], norms[OB_SHADOW_SAMPLES];
  double largest; /* the largest error of one sum, relative to the sum's norm */
};

struct ob_record {
  struct ob_record *next;
  char communicator[32]; /* the communicator's name */
  char type[24];         /* the name of the type */
  size_t bytes;          /* bytes of one call */
  struct ob_record_of of;
  /* The calling thread writes these values; any thread may read them. */
  _Atomic uint64_t calls, compressed, dense[OB_REASON_COUNT];
  _Atomic uint64_t bytes_sent, bytes_dense;
  _Atomic uint64_t skipped; /* results that are not-a-number */
  _Atomic int bits;         /* bits per element in the latest compressed call; 0: there was none */
  _Atomic uint64_t moves;   /* the number of changes of a tensor's bits per element */
  /* The number of blocking calls that were timed, and their seconds. The first dense call is not
   * timed, since it connects the ranks. A withdrawn call counts as compressed: its time includes
   * both the compressed call and the dense one. */
  _Atomic uint64_t timed_dense, timed_compressed;
  _Atomic double seconds_dense, seconds_compressed;
  _Atomic double seconds_deciding;                /* agreements, creation of plans, shadows */
  _Atomic double dense_samples[OB_DENSE_SAMPLES]; /* seconds of the latest dense calls */
  /* The norm of the residual divided by the norm of the mean: the latest sample, and the
   * largest. */
  _Atomic double residual_ratio, max_residual_ratio;
  _Atomic(struct ob_record_shadow *) shadows; /* the shadows of its tensors, the latest first */
};

/* Sets the time from which the report counts seconds. */
void ob_counters_start(double now);

/* Returns the record of such calls, or NULL if there is none. */
struct ob_record *ob_counters_find(const struct ob_record_of *of);
/* Finds the record, or creates one with these names for communicator and type. bytes: the bytes of
 * one call. Once there are very many records, or when out of memory, calls share one record. */
struct ob_record *ob_counters_make(const struct ob_record_of *of, const char *communicator,
                                   const char *type, size_t bytes);
/* Returns the latest record; `next` leads to all others. */
struct ob_record *ob_counters_first(void);

/* Counts a call that was passed on to MPI or NCCL before it was assigned to a record. The addition
 * is not atomic: if two threads add at once, which few programs do, one count may be lost. */
extern _Atomic uint64_t ob_counters_passed[OB_REASON_COUNT];
static inline void ob_counters_count_dense(enum ob_reason reason) {
  uint64_t passed = atomic_load_explicit(&ob_counters_passed[reason], memory_order_relaxed);
  atomic_store_explicit(&ob_counters_passed[reason], passed + 1, memory_order_relaxed);
}

void ob_record_count_dense(struct ob_record *record, enum ob_reason reason, double seconds);
void ob_record_count_compressed(struct ob_record *record, double seconds);
void ob_record_count_decision(struct ob_record *record, double seconds);
/* Counts the bytes of a compressed call with `bits` an element. */
void ob_record_count_sent(struct ob_record *record, int bits, uint64_t bytes, uint64_t bytes_dense);
/* Counts further bytes that compressed calls have sent: the bytes of a shadow (a comparison with
 * the exact sum). */
void ob_record_count_bytes(struct ob_record *record, uint64_t bytes);
/* Counts a change of a tensor's bits, at the first call with the new number. */
void ob_record_count_moves(struct ob_record *record);

/* Returns the bytes that a rank sends in such a call if the call is dense. In the usual algorithms
 * a rank sends each element once in each phase, except its own part. */
uint64_t ob_dense_bytes(onebit_operation_t operation, onebit_dtype_t dtype, size_t count,
                        int comm_size);

/* Passed as the seconds of a call that is not timed: a nonblocking call, or one whose time is added
 * later. */
#define OB_NOT_TIMED (-1.0)
void ob_record_add_time(struct ob_record *record, bool compressed, double seconds);

/* Notes a sample of the residual: its norm relative to the norm of the mean, in the same
 * elements. */
void ob_record_note_residual(struct ob_record *record, double error, double mean);

/* Notes a comparison of a compressed sum with the exact sum. error, norm: squared norms of the
 * difference and of the exact sum; refused: the tensor stays dense from now on. */
void ob_record_count_shadow(struct ob_record *record, int tensor, double error, double norm,
                            bool refused);

/* Returns the difference between the latest sums and the exact sums, relative to the sums' norm. */
double ob_record_difference(const struct ob_record_shadow *shadow);

/* Counts a compressed call whose result is not-a-number, since an input value was not finite. */
void ob_record_count_skip(struct ob_record *record);

/* Returns the median of the seconds of a dense call, or 0 before the second dense call. A few slow
 * first calls do not affect the median. */
double ob_record_dense_seconds(const struct ob_record *record);

/* Returns the seconds that the record's compressed calls have saved so far. */
double ob_record_saved_seconds(const struct ob_record *record);

#endif
