/*
 * The library's passes over memory, each timed alone. They use the blocks, messages and settings of
 * a plan with one rank, and call the same functions as the plan's steps. A triad loop is timed for
 * comparison. On a device the passes are kernels (bench_kernels_cuda.c).
 */
#ifndef BENCH_PASSES_H
#define BENCH_PASSES_H

#include "bench/bench.h"
#include "collectives/plan_private.h"
#ifdef ONEBIT_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

/* The operands of the loop that is a step of a dense optimizer. */
struct bench_fused {
  const struct ob_adam_factors *factors;
  const struct ob_lion_factors *lion;
  float learning_rate, weight_decay;
  size_t count;
  const float *gradient;
  float *parameter, *momentum, *variance;
  float *update;   /* for LAMB */
  double norms[2]; /* for LAMB: squared norms of parameters and updates */
};

/* The dense step of Adam. Moves 28 bytes per parameter. */
void bench_fused_adam(struct bench_fused *fused);
/* The two loops of LAMB's dense step. They move 28 and 12 bytes per parameter. */
void bench_fused_lamb(struct bench_fused *fused);
void bench_fused_lamb_move(struct bench_fused *fused);
/* The dense steps of momentum SGD and Lion. They move 20 bytes per parameter. */
void bench_fused_momentum(struct bench_fused *fused);
void bench_fused_lion(struct bench_fused *fused);

/* The arrays of float32. BENCH_MOMENTUM and later arrays are for optimizers, and BENCH_FRESH and
 * later arrays are only for the kernels of optimizers. */
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

/* The operands of the passes. They include the arrays of all passes, so that the passes can be
 * timed by turns. */
struct bench_passes {
  struct bench_job *job;
  const struct bench_space *space;
  size_t count, streams; /* number of elements; largest number of streams of a pass */
  onebit_comm_t comm;
  onebit_plan_t plan;
  struct ob_work work;         /* as in the plan, but for more streams */
  struct ob_residual in_place; /* the plan's worker residual, with only one copy */
  float *arrays[BENCH_ARRAYS];
  void *input;             /* the gradient in the plan's dtype; for float32 the array itself */
  unsigned char *messages; /* random bits: a message of each stream; momentum uses the first */
  float learning_rate, weight_decay; /* of all parameters */
  double *sums[OB_SUMS];             /* each has one number per block */
  uint16_t *moments[2];              /* for kernels of optimizers */
  struct bench_kernels *kernels;     /* additional data on a device, or NULL */
};

/* A pass: its function, and how much it reads and writes for each element. `inputs` counts values
 * of the plan's dtype, `floats` counts float32 values, and `bits` counts bits. `scales` counts the
 * scales of a block. `each` is added for every stream. If all these are 0, the traffic follows from
 * `kind` (compression/passes.h). */
struct bench_pass {
  const char *name;
  bench_timed *run;     /* its entry's context is a struct bench_passes */
  onebit_dtype_t dtype; /* the dtype of the input on a device */
  double inputs, floats, bits, scales;
  const struct bench_pass *like; /* a plain loop with the same reads and writes, or NULL */
  struct {
    double floats, bits, scales;
  } each;
  bool streams; /* the pass reads other ranks' messages */
  enum ob_pass_kind kind;
  bool frozen;                                   /* the variance is stored as its reciprocal */
  bool momentum, reciprocals, moments, in_place; /* properties of a compress pass */
};

/* Plain loops, and the passes that are compared with these loops. */
extern const struct bench_pass bench_triad, bench_triad_apart, bench_scale, bench_scale_apart,
    bench_write, bench_compress, bench_compress_momentum, bench_compress_in_place, bench_reduce,
    bench_store, bench_apply;

/* Creates the operands of the passes. Returns an exit status. The caller must destroy `passes` even
 * after a failure. streams: the largest number of streams of a pass. */
int bench_passes_create(struct bench_job *job, size_t count, size_t streams,
                        struct bench_passes *passes);
void bench_passes_destroy(struct bench_passes *passes);

/* Parts of the creation. bench_passes_allocate allocates and fills the arrays from `first` up to,
 * but not including, `end`. bench_fill_message fills a message with random bits or values. */
int bench_passes_allocate(struct bench_passes *passes, int first, int end);
onebit_status_t bench_passes_create_plan(const struct bench_options *options, onebit_dtype_t dtype,
                                         onebit_wire_t wire, const struct bench_passes *passes,
                                         onebit_plan_t *plan);
void bench_fill_message(unsigned char *message, const struct ob_message_shape *shape,
                        uint64_t seed);

/* Prepares rounds on these passes: as many as the options say, or by default 15 after 2
 * warm-ups. */
void bench_rounds_prepare(struct bench_rounds *rounds, struct bench_passes *passes);

extern const struct ob_adam_factors bench_factors;
extern const struct ob_lion_factors bench_lion_factors;
#define BENCH_LEARNING_RATE 1e-6f /* so small that parameters change little in a long run */

/* The plain loops. They compute to[i] = b[i] + s * a[i], to[i] = s * a[i] or to[i] = s, in place or
 * (those with `to`) into another array. */
void bench_triad_loop(float *a, const float *b, float s, size_t count);
void bench_triad_apart_loop(float *to, const float *a, const float *b, float s, size_t count);
void bench_scale_loop(float *a, float s, size_t count);
void bench_scale_apart_loop(float *to, const float *a, float s, size_t count);
void bench_write_loop(float *to, float s, size_t count);
const char *bench_triad_width(void);

/* For each size, creates passes on one core or on a device, and measures them. */
typedef int bench_measure_passes(struct bench_job *job, struct bench_passes *passes);
int bench_measure_on_one_core(struct bench_job *job, bench_measure_passes *measure);

/* Prints notes: before the first size about the benchmark, and then about the arrays. */
void bench_passes_print_notes(const struct bench_passes *passes, const struct bench_rounds *rounds,
                              const char *about, const char *columns);

/* The passes that are timed by turns; each has a row. The first pass is the triad loop, or on a
 * device a copy. The bytes per second of the other passes are compared with those of the first
 * pass. */
struct bench_list {
  const struct bench_pass *passes[20];
};

/* --- A device. An entry starts work on a stream, and events measure its time. bench_kernels_cuda.c
 * has the kernels and their arrays. bench_collective_cuda.c has the device, its events, and the
 * collectives, including NCCL's. */

/* True if a job has a device. In a build without CUDA it is the constant 0, so that the compiler
 * removes the branches that call functions for devices. */
#ifdef ONEBIT_HAVE_CUDA
#define BENCH_HAS_DEVICE(job) ((job)->device != NULL)
#else
#define BENCH_HAS_DEVICE(job) 0
#endif

#ifdef ONEBIT_EMULATED_CUDA
#define BENCH_EMULATED 1
#else
#define BENCH_EMULATED 0
#endif

/* The number of launches of a kernel that are timed together. */
#define BENCH_LAUNCHES (BENCH_EMULATED ? 1 : 20)

#ifdef ONEBIT_HAVE_CUDA
struct bench_device {
  int number;
  int ranks; /* number of ranks on this machine */
  struct cudaDeviceProp properties;
  cudaStream_t stream;
  cudaEvent_t started, ended;
};

#define BENCH_TRY_CUDA(call)                                                                       \
  do {                                                                                             \
    cudaError_t bench_try_error = (call);                                                          \
    if (bench_try_error != cudaSuccess)                                                            \
      return bench_cuda_failed(bench_try_error, #call);                                            \
  } while (0)

/* Prints CUDA's message; returns BENCH_FAILED. */
int bench_cuda_failed(cudaError_t error, const char *what);
#endif

/* Opens the device of this rank, and makes it the current device. Rank k of a machine with n
 * devices uses device k modulo n. Collective if team is not NULL. Returns an exit status; the
 * machine's first rank prints the reason if there is no device. */
int bench_device_open(struct bench_team *team, struct bench_device *device);
void bench_device_close(struct bench_device *device);

/* Prints notes: which device is used, and a warning that times on an emulated device mean
 * nothing. */
void bench_device_print_notes(struct bench_job *job);

/* --- The kernels, as passes over arrays in the device's memory */

int bench_kernels_create(struct bench_job *job, size_t count, size_t streams,
                         struct bench_passes *passes);
int bench_kernels_extend(
    struct bench_passes *passes); /* adds the arrays for kernels of optimizers */
void bench_kernels_destroy(struct bench_kernels *kernels);
extern const struct bench_list bench_codec_kernels, bench_optimizer_kernels;

/* Start a step on the stream: bench_kernels_step a step of the optimizer, and
 * bench_kernels_dense_step a dense step, which has one or two kernels of the given kinds. */
int bench_kernels_step(const struct bench_passes *passes, onebit_optimizer_t optimizer);
onebit_status_t bench_kernels_synchronize(
    onebit_optimizer_t optimizer); /* waits for the optimizer's steps */
int bench_kernels_dense_step(const struct bench_passes *passes, const enum ob_pass_kind kinds[2]);

#endif
