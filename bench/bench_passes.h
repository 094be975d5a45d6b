/*
 * The library's passes over memory, each timed alone: on the blocks, the messages and the choices
 * of a plan of one rank, through the same functions that its steps call, and a triad loop and
 * memcpy beside them.
 */
#ifndef BENCH_PASSES_H
#define BENCH_PASSES_H

#include "bench/bench.h"
#include "collectives/plan.h"

/* What the passes work on: all arrays that any of them needs, so that they can take turns. */
struct bench_passes {
  size_t count; /* elements */
  onebit_comm_t comm;
  onebit_plan_t plan;
  struct ob_work work;     /* the plan's, with room for more streams */
  struct ob_kept in_place; /* the plan's worker, with one copy of the values */
  float *gradient, *output;
  void *input;             /* the gradient in the plan's dtype; may be `gradient` */
  unsigned char *messages; /* one of random bits a stream; the first is also the momentum */
  float *parameters, *reciprocals, *momentum, *variance;
  float learning_rate, weight_decay; /* of the one piece */
  double *sums;                      /* one a block */
  /* The optimizers benchmark's. */
  const struct bench_optimizer_arrays *optimizer_arrays;
  onebit_optimizer_t optimizer; /* the adam benchmark's */
  onebit_status_t status;       /* of its latest step */
};

/* A pass, and what it must move for an element: inputs of the plan's dtype, float32 values, bits.
 * Scales (8 bytes a block, twice) are left out. */
struct bench_pass {
  const char *name;
  void (*run)(struct bench_passes *passes, size_t streams);
  double inputs, floats, bits;
  bool streams; /* a bit for each stream, besides */
};

extern const struct bench_pass bench_triad, bench_triad_apart, bench_memcpy, bench_compress,
    bench_compress_momentum, bench_compress_in_place, bench_compress_streaming,
    bench_compress_cached, bench_reduce, bench_reduce_lion, bench_store, bench_apply, bench_adam;

/* A pass to be timed, with its times: a number for each round, seconds for one pass. */
struct bench_entry {
  const struct bench_pass *pass;
  size_t streams;
  double *times;
};

#define BENCH_ENTRIES (BENCH_STREAMS + 12)

/* The rounds of a size: each takes all entries in turn. */
struct bench_rounds {
  struct bench_entry entries[BENCH_ENTRIES];
  size_t count, rounds, warmups;
  size_t repeats; /* passes in one time, so that small sizes stay in the caches */
  double *scratch;
};

/* An exit status; `passes` is safe to destroy in any case. streams: the most in any pass. */
int bench_passes_create(const struct bench_options *options, size_t count, size_t streams,
                        struct bench_passes *passes);
void bench_passes_destroy(struct bench_passes *passes);

void bench_rounds_add(struct bench_rounds *rounds, const struct bench_pass *pass, size_t streams);
/* Allocates the times of what was added, and takes them. An exit status. */
int bench_rounds_run(struct bench_rounds *rounds, const struct bench_options *options,
                     struct bench_passes *passes);
void bench_rounds_destroy(struct bench_rounds *rounds);

/* Prints what `codec` and `adam` say of their plan. */
void bench_print_plan(const struct bench_options *options, const struct bench_passes *passes,
                      const struct bench_rounds *rounds);

double bench_pass_bytes(const struct bench_passes *passes, const struct bench_entry *entry);
size_t bench_most_streams(const struct bench_options *options);

/* For passes that are defined elsewhere: compressing what a source gives; a pass of an optimizer on
 * all of its arrays, or on a message, whose last one is another stream's: for these there must be
 * two. `parameters`: a list of one. */
void bench_pass_compress(struct bench_passes *passes, const struct ob_source *source);
struct ob_pass_sink bench_sink(const struct bench_passes *passes, enum ob_pass_kind kind,
                               float **parameters);
void bench_pass_on_arrays(struct bench_passes *passes, const struct ob_pass_sink *sink);
void bench_pass_on_messages(struct bench_passes *passes, const struct ob_pass_sink *sink);
extern const struct ob_adam_factors bench_factors;
extern const struct ob_lion_factors bench_lion_factors;

/* The baselines: a[i] = b[i] + s * a[i], with the widest vectors of this processor. */
void bench_triad_loop(float *a, const float *b, float s, size_t count);
void bench_triad_apart_loop(float *to, const float *a, const float *b, float s, size_t count);
const char *bench_triad_width(void);

int bench_run_codec(const struct bench_benchmark *benchmark, const struct bench_options *options,
                    struct bench_team *team);
int bench_run_adam(const struct bench_benchmark *benchmark, const struct bench_options *options,
                   struct bench_team *team);

#endif
