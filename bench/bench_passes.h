/*
 * The library's sweeps over memory, each timed alone: on the blocks, the messages and the choices
 * of a plan of one rank, through the same functions that its steps call, and a triad loop and
 * memcpy beside them. On a device they are kernels (bench_kernels_cuda.c).
 */
#ifndef BENCH_PASSES_H
#define BENCH_PASSES_H

#include "bench/bench.h"
#include "bench/bench_fused.h"
#include "collectives/plan_private.h"

/* Arrays of float32: those of kernels, of all passes, and the additional ones of optimizers. */
enum bench_array {
  BENCH_GRADIENT,
  BENCH_PARAMETERS,
  BENCH_OUTPUT,
  BENCH_VARIANCE,
  BENCH_RECIPROCALS,
  BENCH_MOMENTUM,
  BENCH_FRESH,
  BENCH_ANCHOR,
  BENCH_ARRAYS
};

/* The operands of the passes: all arrays that any of them needs, so that they can take turns. */
struct bench_passes {
  const struct bench_space *space;
  size_t count, streams; /* elements; the most streams in any pass */
  onebit_comm_t comm;
  onebit_plan_t plan;
  struct ob_work work;         /* the plan's, with room for more streams */
  struct ob_residual in_place; /* the plan's worker, with one copy of the values */
  float *arrays[BENCH_ARRAYS];
  void *input;             /* the gradient in the plan's dtype; may be the array */
  unsigned char *messages; /* one of random bits a stream; the first is also the momentum */
  float learning_rate, weight_decay; /* of the one piece */
  double *sums[OB_SUMS];             /* one a block */
  uint16_t *moments[2];              /* the optimizers' */
  float *stepped;                    /* parameters of `optimizer`, the adam benchmark's */
  onebit_optimizer_t optimizer;
  struct bench_kernels *kernels; /* what a device has besides, or NULL */
};

/* A pass: its function, and the memory that it reads and writes of an element: inputs of the plan's
 * dtype, float32 values, bits, and scales of a block; `each` is for each stream besides. Members
 * that are zero follow from `kinds`, by compression/passes.h. */
struct bench_pass {
  const char *name;
  bench_timed *run;     /* its context is a struct bench_passes */
  onebit_dtype_t dtype; /* of the input; on a device */
  double inputs, floats, bits, scales;
  const struct bench_pass *like; /* a plain loop that reads and writes as it does; NULL: none */
  struct {
    double floats, bits, scales;
  } each;
  bool streams;  /* it takes other ranks' messages */
  bool captured; /* it is a whole step, on a device in a graph too */
  /* For bench_run_pass and _apply; for plain loops the form of the variance, and the array that is
   * scratch. */
  enum ob_pass_kind kinds[2]; /* the second one OB_PASS_SQUARES: there is one */
  bool frozen;
  enum bench_array scratch;
  void (*fused[2])(struct bench_fused *fused);
  /* For bench_run_compress and _reduce. */
  bool momentum, reciprocals, moments, in_place;
  bool otherwise; /* stores that are streaming where the plan's are cached, and the reverse */
  enum ob_serve_rule serve_rule;
};

extern const struct bench_pass bench_triad, bench_triad_apart, bench_scale, bench_scale_apart,
    bench_write, bench_memcpy, bench_compress, bench_compress_momentum, bench_compress_in_place,
    bench_compress_other, bench_reduce, bench_store, bench_apply, bench_adam, bench_step;

/* Creates the passes. Returns an exit status; `passes` is safe to destroy in any case. streams: the
 * most in any pass. */
int bench_passes_create(const struct bench_options *options, size_t count, size_t streams,
                        struct bench_passes *passes);
int bench_passes_extend(struct bench_passes *passes); /* with what only optimizers need */
void bench_passes_destroy(struct bench_passes *passes);

/* Parts of the creation: arrays from `first` up to `end`, with numbers in them; a plan; random
 * bits, or values, for a message of that shape. */
int bench_passes_allocate(struct bench_passes *passes, int first, int end);
onebit_status_t bench_passes_plan(const struct bench_options *options, onebit_dtype_t dtype,
                                  onebit_wire_t wire, const struct bench_passes *passes,
                                  onebit_plan_t *plan);
void bench_fill_message(unsigned char *message, const struct ob_message_shape *shape,
                        uint64_t seed);

void bench_rounds_add(struct bench_rounds *rounds, const struct bench_pass *pass, size_t streams);
/* Prepares rounds on these arrays: as many as the options say, or 15 after 2. */
void bench_rounds_prepare(struct bench_rounds *rounds, const struct bench_options *options,
                          struct bench_passes *passes);
double bench_pass_bytes(const struct bench_passes *passes, const struct bench_pass *pass,
                        size_t streams);

/* Run passes that are defined elsewhere: over arrays, one or two; over a message. */
int bench_run_pass(const struct bench_entry *entry);
int bench_run_apply(const struct bench_entry *entry);
int bench_run_compress(const struct bench_entry *entry);
int bench_run_reduce(const struct bench_entry *entry);
extern const struct ob_adam_factors bench_factors;
extern const struct ob_lion_factors bench_lion_factors;
#define BENCH_LEARNING_RATE 1e-6f /* moves parameters little however long the benchmark runs */

/* The baselines: to[i] = b[i] + s * a[i], in place with the widest vectors of this processor, and
 * in an array of its own; and to[i] = s. */
void bench_triad_loop(float *a, const float *b, float s, size_t count);
void bench_triad_apart_loop(float *to, const float *a, const float *b, float s, size_t count);
void bench_scale_loop(float *a, float s, size_t count);
void bench_scale_apart_loop(float *to, const float *a, float s, size_t count);
void bench_write_loop(float *to, float s, size_t count);
const char *bench_triad_width(void);

#endif
