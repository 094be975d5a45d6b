/*
 * The interface between C and CUDA C++: the structs that kernels get, and the functions that launch
 * kernels.
 *
 * A function that launches a kernel puts one step of a collective on a stream, for one chunk and
 * all peers at once, and returns. The arithmetic is compression/numerics.h's, compiled with
 * -fmad=false, so results equal those of the codecs of the processor in every bit. No function here
 * allocates or waits.
 *
 * All pointers point to device memory. The structs are passed by value, so that a captured graph
 * does not depend on the caller's stack.
 */
#ifndef OB_CUDA_KERNELS_H
#define OB_CUDA_KERNELS_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "collectives/geometry.h"
#include "compression/passes.h"
#include "optimizers/methods/lamb_tensor.h"
#include "optimizers/outer/element.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The outcome of calls on a stream, whose end the host does not check. */
struct ob_cuda_outcome {
  int32_t status, origin; /* of the first failed call or, if none failed, the first skipped */
  uint32_t agreed;
  uint32_t calls, skipped; /* calls that ended well; calls that were skipped */
};

/* The state that changes from call to call, in device memory. A call on a stream knows nothing else
 * about the calls before it. */
struct ob_cuda_state {
  uint32_t now;            /* which copy of residuals and results is the current one */
  uint32_t flags;          /* set by this call's kernels: OB_FLAG_NOT_FINITE, OB_FLAG_LARGE */
  uint32_t server_flags;   /* OB_FLAG_LARGE if a scale of the server's new residuals is large */
  uint32_t residual_flags; /* the same for its current residuals; a call's flags start from it */
  uint32_t stop;           /* the call does not end well: nothing is applied */
  uint32_t refused;        /* a message was refused, as in struct onebit_plan */
  float worker_scale, server_scale; /* scales of this call, if all blocks have one scale */
  /* The fields below are for calls whose end the host does not check (state.cu). */
  uint32_t sequence;
  int32_t status;             /* onebit_status_t: why the call does not end well */
  int32_t origin;             /* the member that the status names, as ob_cuda_plan.origin */
  int32_t failed, not_finite; /* the first rank that reported it, or -1 */
  uint32_t agreed;            /* the origin's number, if numbers differ */
  float momentum_factor, variance_factor; /* of this step */
  struct ob_moment_factors moment;        /* the moments' factors of this step */
  uint64_t before;                        /* steps that outcome.calls does not count */
  struct ob_cuda_outcome outcome;
};

/* The blocks of struct ob_residual: two copies, of which state->now is the current one. */
struct ob_cuda_residual {
  size_t first, first_word, blocks, elements;
  float *values[2];
  float *scales[2];     /* one per block, or one for all */
  uint16_t *moments[2]; /* one per element; NULL without moments */
  struct ob_serving serving;
  onebit_dtype_t result_dtype;
  double *sums; /* one for each block, if there is one scale */
};

/* The header's description of a call, and the additional work of sealing and opening. */
struct ob_cuda_stamp {
  enum ob_message_kind kind;
  uint32_t agreed;
  const float *rate; /* NULL, or device memory with a number that must be the same on all ranks */
  bool failed;       /* this rank cannot take part */
  bool begins;       /* when sealing: these are the call's first messages */
  bool decides; /* when opening: these are the call's last messages, and its end can be decided */
};

/* A plan with the contents of struct onebit_plan; its geometry points to device memory. */
struct ob_cuda_plan {
  struct ob_geometry geometry;
  size_t max_blocks; /* blocks in the longest message */
  /* If true, results in flight always go to results[1]: ob_cuda_conclude copies them to results[0],
   * which holds the results of the last call. Otherwise state->now selects the copies. */
  bool results_stay;
  bool gathered; /* an allgather: outputs get the ranks' results next to each other */
  /* Member m is reported as origin + m * origin_step, which the host converts to a rank. */
  size_t origin, origin_step;
  onebit_scale_t rule;
  onebit_dtype_t dtype, output_dtype; /* as struct ob_work has them */
  struct ob_cuda_residual worker, server;
  struct ob_cuda_state *state;
  /* Scratch of checksums, 0 between kernels: the number of warps, or messages, that are done; the
   * sum of each member's message so far; the number of thread blocks that are done with it. */
  uint32_t *checks;
  /* True if ob_cuda_compress and ob_cuda_reduce also seal the messages that they make with this
   * stamp, and open the workers'. */
  bool seals, opens;
  struct ob_cuda_stamp stamp;
  bool early; /* kernels may start on the device before the kernels ahead of them have ended */
};

/* 32-bit words of scratch for the checksums of `members` messages. */
#define OB_CUDA_CHECKS(members) (1 + 2 * (size_t)(members))

/* The addresses of a buffer's pieces: each[k]; or, if `each` is NULL, base + k * step. */
struct ob_cuda_pieces {
  void *const *each;
  char *base;
  size_t step; /* bytes */
};

/* The kernels' form of struct ob_source. `values` replaces the pieces: the message for member m is
 * made of float32 from values + m * step on. */
struct ob_cuda_source {
  struct ob_cuda_pieces inputs;
  const float *values;
  size_t step; /* elements */
  float factor;
  bool momentum, momentum_in_residual;
  bool only_at_first; /* momentum_in_residual holds until a call of the plan has ended well */
  float decay, weight;
  const float *scalings;    /* NULL, or one per piece */
  const float *reciprocals; /* NULL, or one per element in the layout's order */
  bool float32;
  enum ob_moment_rule moment_rule;
  struct ob_moment_factors moment;
  const float *floors; /* NULL, or one per piece */
  struct ob_interval own;
  bool counted; /* factors that depend on the step number are in the state */
  float limit;  /* the largest product with a reciprocal, for more than one bit */
};

/* The kernels' form of struct ob_pass_sink. Without learning rates, a piece's rate is the step's
 * times the piece's factor. */
struct ob_cuda_pass {
  enum ob_pass_kind kind;
  size_t first_word;
  float *arrays[OB_ARRAYS];
  float *const *parameters;
  void *const *copies, *const *gradients;
  onebit_dtype_t copy_dtype, gradient_dtype;
  float learning_rate;
  const float *rate; /* NULL, or the rate's address in device memory */
  const float *learning_rates, *rate_factors, *weight_decays;
  bool sums_of_rates;       /* sums of rates are multiplied by the pieces' factors too */
  const float *scalings;    /* NULL: 1 */
  const float *last_values; /* NULL: the last message has them, times last_decay */
  bool only_at_first;       /* last_values are used until a call of the plan has ended well */
  float last_decay;
  struct ob_pass_factors factors; /* all factors except those that differ by piece */
  bool counted;                   /* factors that depend on the step number are in the state */
  double *sums[OB_SUMS];          /* one per block of the layout; NULL: not computed */
  const double *variances;
};

/* --- Messages of one bit an element. `chunk`: the number of the chunk in every message */

/* Compresses every segment's input to its message in outgoing, or with geometry.whole to this
 * rank's result. Notes flags in the state. With one scale for all blocks it writes the sums to
 * worker.sums, for ob_cuda_finish. */
cudaError_t ob_cuda_compress(struct ob_cuda_plan plan, struct ob_cuda_source source, size_t chunk,
                             cudaStream_t stream);

/* Reduces the members' messages about this rank's segment (its own from outgoing, the others from
 * incoming) and the residuals to this rank's result. */
cudaError_t ob_cuda_reduce(struct ob_cuda_plan plan, size_t chunk, cudaStream_t stream);

/* Computes the single scale of all blocks from the sums, and stores it for the residuals and in
 * state->worker_scale or server_scale. */
cudaError_t ob_cuda_finish(struct ob_cuda_plan plan, bool server, cudaStream_t stream);

/* Stores the results of the call in flight in the outputs. ob_cuda_store, ob_cuda_convert and the
 * optimizers' passes apply nothing if state->stop is set. */
cudaError_t ob_cuda_store(struct ob_cuda_plan plan, struct ob_cuda_pieces outputs, size_t chunk,
                          cudaStream_t stream);

/* Stores the mean of the members' messages in the outputs: with geometry.whole, of their results
 * for all elements; otherwise, of their messages for this rank's segment. */
cudaError_t ob_cuda_sum(struct ob_cuda_plan plan, struct ob_cuda_pieces outputs, size_t chunk,
                        cudaStream_t stream);

/* Runs an optimizer's pass that reads the messages of the call in flight. */
cudaError_t ob_cuda_apply(struct ob_cuda_plan plan, struct ob_cuda_pass pass, size_t chunk,
                          cudaStream_t stream);

/* The functions above call the next four functions if messages have more than one bit per element.
 * `part` is the plan of one chunk (select_chunk), and source.weight is set. */
cudaError_t ob_cuda_compress_levels(struct ob_cuda_plan part, struct ob_cuda_source source,
                                    cudaStream_t stream);
cudaError_t ob_cuda_reduce_levels(struct ob_cuda_plan plan, size_t chunk, cudaStream_t stream);
cudaError_t ob_cuda_sum_levels(struct ob_cuda_plan plan, struct ob_cuda_pieces outputs,
                               size_t chunk, cudaStream_t stream);
cudaError_t ob_cuda_store_levels(struct ob_cuda_plan plan, struct ob_cuda_pieces outputs,
                                 size_t chunk, cudaStream_t stream);

/* --- Dense messages */

/* Writes inputs times their factor as float32 to the messages, and zeros to the unused elements of
 * their last words. */
cudaError_t ob_cuda_load(struct ob_cuda_plan plan, struct ob_cuda_source source, size_t chunk,
                         cudaStream_t stream);

/* Writes the mean of the members' messages about this rank's segment to its result, or with
 * geometry.whole the mean of their results to the first message of outgoing. */
cudaError_t ob_cuda_mean(struct ob_cuda_plan plan, size_t chunk, cudaStream_t stream);

/* Converts the results, or with plan.geometry.whole the first message of outgoing, and stores them
 * in the outputs. */
cudaError_t ob_cuda_convert(struct ob_cuda_plan plan, struct ob_cuda_pieces outputs, size_t chunk,
                            cudaStream_t stream);

/* --- Inside a host */

/* Writes the inputs to the messages for the ranks of the host, as ob_cuda_load does; with
 * geometry.half in their own type, without their factor. */
cudaError_t ob_cuda_host_put(struct ob_cuda_plan window, struct ob_cuda_source source, size_t chunk,
                             cudaStream_t stream);

/* Writes the mean of the inputs of the host's ranks, which are `host`'s members: for each of the
 * plan's `members` that member's segment, which is written from values + m * step on for member m.
 * A rank's messages about these segments follow each other in memory. Values of 16 bits are
 * multiplied by `factor`. */
cudaError_t ob_cuda_host_mean(struct ob_cuda_plan host, float factor, size_t members, float *values,
                              size_t step, size_t chunk, cudaStream_t stream);

/* --- The optimizers' local passes */

/* Runs a pass that reads no message over all blocks. Without a state the pass always runs. */
cudaError_t ob_cuda_pass_over(struct ob_cuda_plan plan, struct ob_cuda_pass pass,
                              cudaStream_t stream);

/* A tensor in one bucket of 1-bit LAMB, as in struct ob_lamb. */
struct ob_cuda_tensor {
  size_t number, first_block, end_block, first_piece, end_piece;
};

struct ob_cuda_lamb {
  struct ob_lamb_limits limits;
  const struct ob_cuda_tensor *tensors;
  size_t count;
  double *coefficients, *factors; /* by number of the tensor */
  float *learning_rates;          /* by piece */
  const float *rate;              /* as in struct ob_cuda_pass */
  const float *rate_factors;
  const double *sums[OB_SUMS];
};

/* Computes per-tensor coefficients and learning rates from the sums of the bucket's latest pass,
 * unless `state` has `stop` set. It does not support OB_LAMB_SCALE. */
cudaError_t ob_cuda_lamb_rates(const struct ob_cuda_state *state, struct ob_cuda_lamb lamb,
                               enum ob_lamb_stage stage, float learning_rate, cudaStream_t stream);

/* --- The outer step, which is made once in many local steps */

/* Elements of a fragment, or of a piece of it; NULL for arrays that a pass does not use. */
struct ob_cuda_outer {
  float *consensus, *momentum, *drift;
  void *parameters;
  size_t count;
};

/* Computes the drift; with `keeps` the residual in `drift` stays in the parameters. *unsound
 * becomes 1 if an element cannot be sent. */
cudaError_t ob_cuda_outer_drift(struct ob_cuda_outer of, onebit_dtype_t dtype, bool keeps,
                                uint32_t *unsound, cudaStream_t stream);

/* Adds the checksum of the consensus to *checksum. */
cudaError_t ob_cuda_outer_checksum(struct ob_cuda_outer of, uint32_t *checksum,
                                   cudaStream_t stream);

/* Applies the outer rule. sums: the sums of the drift's squares, one for each OB_OUTER_RUN
 * elements. */
cudaError_t ob_cuda_outer_update(struct ob_cuda_outer of, onebit_outer_rule_t rule, float rate,
                                 float decay, double *sums, cudaStream_t stream);

/* Sets the parameters from the consensus; with `keeps` minus the residual in `drift`. */
cudaError_t ob_cuda_outer_set(struct ob_cuda_outer of, onebit_dtype_t dtype, bool keeps,
                              float mixing, cudaStream_t stream);

/* Copies a plan's worker residual, of copy number `copy`, to the pieces as float32. */
cudaError_t ob_cuda_outer_export(struct ob_cuda_plan plan, int copy, void *const *pieces,
                                 cudaStream_t stream);

/* --- Calls that the host does not supervise (headers.cuh). These functions write, read and check
 * headers as collectives/messages.c and steps.c do. */

/* Returns true if the current device supports programmatic dependent launch. */
bool ob_cuda_can_be_early(void);

/* ob_cuda_is_short returns true if messages are short enough for compress and reduce to open and
 * seal them. ob_cuda_can_seal returns true if these kernels may also seal messages; with one scale
 * for all blocks they may not, since the header depends on all blocks. */
bool ob_cuda_is_short(const struct ob_cuda_plan *plan);
bool ob_cuda_can_seal(const struct ob_cuda_plan *plan);

/* Stamps the messages of a chunk that are about to be sent. */
cudaError_t ob_cuda_seal(struct ob_cuda_plan plan, struct ob_cuda_stamp stamp, size_t chunk,
                         cudaStream_t stream);

/* Checks the other members' messages of a chunk, and notes their flags. */
cudaError_t ob_cuda_open(struct ob_cuda_plan plan, struct ob_cuda_stamp stamp, size_t chunk,
                         cudaStream_t stream);

/* Sets state->stop unless all ranks can apply the results. */
cudaError_t ob_cuda_decide(struct ob_cuda_plan plan, struct ob_cuda_stamp stamp,
                           cudaStream_t stream);

/* Adds the end of the call to state->outcome. With `commit` it also does the work of
 * ob_cuda_commit, and keeps the results for the next call. It is the last launch of a call. */
cudaError_t ob_cuda_conclude(struct ob_cuda_plan plan, struct ob_cuda_stamp stamp, bool commit,
                             bool forget, cudaStream_t stream);

/* Stops all of `count` calls if one of them stops. `states`: an array on the device. */
cudaError_t ob_cuda_join(struct ob_cuda_state *const *states, size_t count, cudaStream_t stream);

/* Computes the state's factors for step number state->before + calls that ended well + 1. */
cudaError_t ob_cuda_adam_count(struct ob_cuda_plan plan, double beta1, double beta2,
                               cudaStream_t stream);

/* --- The state */

/* Begins a call that the host supervises: resets the state of a call. */
cudaError_t ob_cuda_begin(struct ob_cuda_plan plan, cudaStream_t stream);

/* Makes the new residuals the current ones, unless state->stop is set. */
cudaError_t ob_cuda_commit(struct ob_cuda_plan plan, bool forget, cudaStream_t stream);

/* Sets the current residuals to zero, between calls. */
cudaError_t ob_cuda_forget(struct ob_cuda_plan plan, cudaStream_t stream);

/* --- Results */

/* Multiplies `count` elements after a call; if state->stop is set, they become not-a-number. */
cudaError_t ob_cuda_scale(const struct ob_cuda_state *state, void *result, onebit_dtype_t dtype,
                          size_t count, float factor, cudaStream_t stream);

/* --- Modules of kernels (memory.c) */

/* Registers the module that contains a kernel: each file of kernels does so before main
 * (cuda/device.cuh).
 */
void ob_cuda_add_module(const void *kernel);

/* Loads the kernels of all modules on the current device. Local; errors: ONEBIT_ERROR_UNSUPPORTED
 * (the device can run none of the code that the library contains). */
onebit_status_t ob_cuda_load_kernels(void);

#ifdef __cplusplus
}
#endif
#endif
