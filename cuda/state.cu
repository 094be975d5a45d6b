/*
 * Kernels for a call as a whole: its headers, the decision whether it ended well, its beginning,
 * its single scale, and its commit.
 *
 * Finishing reads 8 bytes for each 2048 elements, with one thread block: with 100 M elements a
 * thread reads 48 sums in six rounds of eight loads, which take about 6 us, while compressing takes
 * 280.
 */
#include "cuda/headers.cuh"

/* --- Headers (cuda/headers.cuh), and the decision on a call */

static __global__ void seal_kernel(const struct ob_cuda_plan plan,
                                   const struct ob_cuda_stamp stamp) {
  await_kernels_ahead();
  struct ob_message_shape shape;
  unsigned char *message = sent_message(plan, stamp.kind, blockIdx.y, &shape);
  check_run(message, shape, warp_number(), &plan.checks[1 + blockIdx.y]);
  if (is_last_warp(plan.checks))
    stamp_messages(plan, stamp);
}

/* Decides the call as steps.c does. A rank that could not take part has already returned the error
 * to its caller. Called by one lane. */
static __device__ void decide_call(const struct ob_cuda_plan &plan,
                                   const struct ob_cuda_stamp &stamp) {
  struct ob_cuda_state *state = plan.state;
  note_own_flags(plan);
  const onebit_status_t status =
      ob_call_verdict((onebit_status_t)state->status, state->failed, state->not_finite);
  if (state->status == ONEBIT_OK && status != ONEBIT_OK)
    state->origin = status == ONEBIT_SKIPPED ? state->not_finite : state->failed;
  state->status = status;
  state->stop = stamp.failed || state->status != ONEBIT_OK;
}

/* Opens messages: row y of the grid opens the message of the member y + 1 places after this
 * rank. */
static __global__ void open_messages_kernel(const struct ob_cuda_plan plan,
                                            const struct ob_cuda_stamp stamp) {
  await_kernels_ahead();
  check_message_run(plan, stamp.kind, 1 + blockIdx.y, warp_number());
  if (!is_last_warp(plan.checks))
    return;
  read_all_headers(plan, stamp);
  __syncwarp();
  if (stamp.decides && lane_number() == 0)
    decide_call(plan, stamp);
}

static __global__ void decide_alone_kernel(const struct ob_cuda_plan plan,
                                           const struct ob_cuda_stamp stamp) {
  await_kernels_ahead();
  if (lane_number() == 0)
    decide_call(plan, stamp);
}

/* Stops all calls that are held together if one of them stopped, and sets their status to the
 * status of the stopped call. */
static __global__ void join_kernel(struct ob_cuda_state *const *states, size_t count) {
  const struct ob_cuda_state *first = NULL;
  if (lane_number() != 0)
    return;
  for (size_t i = 0; i < count; i++)
    if (states[i]->stop && (!first || is_worse_status(states[i]->status, first->status)))
      first = states[i];
  for (size_t i = 0; first && i < count; i++) {
    states[i]->stop = 1;
    states[i]->status = first->status;
    states[i]->origin = first->origin;
    states[i]->agreed = first->agreed;
  }
}

static __global__ void adam_count_kernel(struct ob_cuda_state *state, double beta1, double beta2,
                                         double ranks) {
  if (lane_number() != 0)
    return;
  const uint64_t step = state->before + state->outcome.calls + 1;
  state->momentum_factor = ob_adam_momentum_factor(beta1, step);
  state->variance_factor = ob_adam_variance_factor(beta2, step);
  ob_moment_set_factors(&state->moment, beta2, ranks, step);
}

/* --- Launching */

/* Returns true if the loaded code was compiled for compute capability 9.0 or newer: in other code
 * await_kernels_ahead would not wait. OB_CUDA_LATE turns early launches off, to measure their
 * effect. */
bool ob_cuda_can_be_early(void) {
#ifdef OB_CUDA_LATE
  const bool wanted = false;
#else
  const bool wanted = true;
#endif
  cudaFuncAttributes code = {};
  const cudaError_t error = cudaFuncGetAttributes(&code, decide_alone_kernel);
  return wanted && error == cudaSuccess && code.ptxVersion >= 90;
}

/* One thread block computes the checksum of a message, with four runs of 4 KiB in flight, which
 * take about 0.5 us to come from the L2 cache and to be added up. A separate launch can use all
 * multiprocessors, but takes about 2 us: up to eight runs, 1 us, it gains nothing. */
constexpr size_t max_short_runs = 8;

bool ob_cuda_is_short(const struct ob_cuda_plan *plan) {
  return !plan->geometry.dense && check_runs(plan->geometry) <= max_short_runs;
}

bool ob_cuda_can_seal(const struct ob_cuda_plan *plan) {
  return ob_cuda_is_short(plan) && !plan->geometry.one_scale && plan->max_blocks > 0;
}

cudaError_t ob_cuda_seal(struct ob_cuda_plan plan, struct ob_cuda_stamp stamp, size_t chunk,
                         cudaStream_t stream) {
  return launch_early_kernel(seal_kernel, check_runs(plan.geometry), sent_count(plan, stamp.kind),
                             stream, select_chunk(plan, chunk), stamp);
}

cudaError_t ob_cuda_open(struct ob_cuda_plan plan, struct ob_cuda_stamp stamp, size_t chunk,
                         cudaStream_t stream) {
  return plan.geometry.members == 1
             ? cudaSuccess
             : launch_early_kernel(open_messages_kernel, check_runs(plan.geometry),
                                   plan.geometry.members - 1, stream, select_chunk(plan, chunk),
                                   stamp);
}

cudaError_t ob_cuda_decide(struct ob_cuda_plan plan, struct ob_cuda_stamp stamp,
                           cudaStream_t stream) {
  return launch_with_overlap(plan.early, decide_alone_kernel, dim3(1), OB_LANES, stream, plan,
                             stamp);
}

cudaError_t ob_cuda_join(struct ob_cuda_state *const *states, size_t count, cudaStream_t stream) {
  return launch_one_warp(join_kernel, stream, states, count);
}

cudaError_t ob_cuda_adam_count(struct ob_cuda_plan plan, double beta1, double beta2,
                               cudaStream_t stream) {
  return launch_one_warp(adam_count_kernel, stream, plan.state, beta1, beta2,
                         (double)plan.geometry.members);
}

/* --- Begin */

static __global__ void __launch_bounds__(OB_LANES) begin_kernel(struct ob_cuda_state *state) {
  if (lane_number() != 0)
    return;
  state->flags = state->residual_flags;
  state->worker_scale = state->server_scale = 0;
  begin_call(state);
}

cudaError_t ob_cuda_begin(struct ob_cuda_plan plan, cudaStream_t stream) {
  return launch_one_warp(begin_kernel, stream, plan.state);
}

/* --- Finish */

template <unsigned threads>
static __global__ void __launch_bounds__(threads)
    finish_kernel(const __grid_constant__ struct ob_cuda_plan plan, bool server) {
  __shared__ double parts[threads];
  const struct ob_cuda_residual &residual = server ? plan.server : plan.worker;
  const double sum = add_sums<threads>(residual.sums, residual.blocks, parts);
  if (threadIdx.x != 0)
    return;
  const enum ob_serve_rule rule = residual.serving.rule;
  const float exact = ob_buffer_scale(sum, residual.elements, ob_serve_scale_rule(rule, plan.rule));
  const float scale = note_scale(plan.state, ob_round(exact, residual.result_dtype), server);
  residual.scales[!plan.state->now][0] = scale;
  (server ? plan.state->server_scale : plan.state->worker_scale) = ob_serve_scale(rule, scale);
}

/* Finishes the scale; without residuals it stays at its first value, 0. */
cudaError_t ob_cuda_finish(struct ob_cuda_plan plan, bool server, cudaStream_t stream) {
  const struct ob_cuda_residual &residual = server ? plan.server : plan.worker;
  if (residual.elements == 0)
    return cudaSuccess;
  if (residual.blocks <= few_sums)
    return launch_grid(finish_kernel<threads_for_few>, dim3(1), threads_for_few, stream, plan,
                       server);
  return launch_grid(finish_kernel<threads_for_many>, dim3(1), threads_for_many, stream, plan,
                     server);
}

/* --- Commit */

static __device__ inline void commit_residuals(struct ob_cuda_state *state) {
  if (state->stop)
    return;
  state->now = !state->now;
  state->residual_flags = state->server_flags;
}

static __global__ void __launch_bounds__(OB_LANES) commit_kernel(struct ob_cuda_state *state) {
  if (lane_number() == 0)
    commit_residuals(state);
}

/* Forgets residuals as ob_residual_reset does, a warp per block. */
static __global__ void __launch_bounds__(threads_a_block)
    forget_kernel(const __grid_constant__ struct ob_cuda_plan plan, bool server,
                  bool even_if_stopped) {
  const struct ob_cuda_residual &residual = server ? plan.server : plan.worker;
  if ((plan.state->stop && !even_if_stopped) || warp_number() >= residual.blocks)
    return;
  size_t piece = 0;
  const struct ob_block block =
      ob_layout_block(&plan.geometry.layout, residual.first + warp_number(), &piece);
  float *values = values_of(residual, plan.state->now, block);
  const unsigned end = padded_count((unsigned)block.count);
  for (unsigned i = lane_number(); i < end; i += OB_LANES)
    __stcs(&values[i], 0.0f);
  if (lane_number() == 0)
    residual.scales[plan.state->now][plan.geometry.one_scale ? 0 : warp_number()] = 0;
}

/* Sets residuals to zero: with `even_if_stopped`, between calls, all of them as ob_residual_reset
 * does; after a call only errors, as ob_residual_forget does. */
static cudaError_t forget_residuals(const struct ob_cuda_plan &plan, bool even_if_stopped,
                                    cudaStream_t stream) {
  const bool server = even_if_stopped || plan.server.serving.rule == OB_SERVE_MEAN;
  cudaError_t error =
      launch_kernel(forget_kernel, plan.worker.blocks, 1, stream, plan, false, even_if_stopped);
  if (error == cudaSuccess && server)
    error =
        launch_kernel(forget_kernel, plan.server.blocks, 1, stream, plan, true, even_if_stopped);
  return error;
}

cudaError_t ob_cuda_commit(struct ob_cuda_plan plan, bool forget, cudaStream_t stream) {
  cudaError_t error = launch_one_warp(commit_kernel, stream, plan.state);
  return error == cudaSuccess && forget ? forget_residuals(plan, false, stream) : error;
}

/* Adds the call's end to the outcome. Flags that kernels set from here on belong to the next call,
 * which may begin after them. */
static __device__ inline void conclude_call(struct ob_cuda_state *state,
                                            const struct ob_cuda_stamp &stamp) {
  struct ob_cuda_outcome *outcome = &state->outcome;
  state->flags = 0;
  outcome->calls += !state->stop;
  outcome->skipped += state->stop && !stamp.failed && state->status == ONEBIT_SKIPPED;
  if (stamp.failed || !is_worse_status(state->status, outcome->status))
    return;
  outcome->status = state->status;
  outcome->origin = state->origin;
  outcome->agreed = state->agreed;
}

/* All threads copy the results in flight to the memory of the last results, unless state->stop,
 * which no thread changes; one thread does everything else. */
static __global__ void __launch_bounds__(threads_a_block)
    conclude_kernel(const __grid_constant__ struct ob_cuda_plan plan,
                    const struct ob_cuda_stamp stamp, bool commits, size_t count) {
  await_kernels_ahead();
  const size_t i = (size_t)blockIdx.x * threads_a_block + threadIdx.x;
  if (!plan.state->stop && i < count)
    ((uint4 *)plan.geometry.results[0])[i] = ((const uint4 *)plan.geometry.results[1])[i];
  if (i > 0)
    return;
  conclude_call(plan.state, stamp);
  if (commits)
    commit_residuals(plan.state);
}

/* Returns the number of 16-byte pieces to copy, if results stay; the size of every message is a
 * multiple of 16 bytes. */
static size_t results_to_copy(const struct ob_cuda_plan &plan) {
  return !plan.results_stay || plan.geometry.results[0] == plan.geometry.results[1]
             ? 0
             : plan.geometry.members * plan.geometry.peer_stride / sizeof(uint4);
}

cudaError_t ob_cuda_conclude(struct ob_cuda_plan plan, struct ob_cuda_stamp stamp, bool commit,
                             bool forget, cudaStream_t stream) {
  const size_t count = commit ? results_to_copy(plan) : 0;
  cudaError_t error = launch_early_kernel(conclude_kernel, 1 + count / OB_LANES, 1, stream, plan,
                                          stamp, commit, count);
  return error == cudaSuccess && commit && forget ? forget_residuals(plan, false, stream) : error;
}

/* --- Between calls */

static __global__ void __launch_bounds__(OB_LANES)
    forget_flags_kernel(struct ob_cuda_state *state) {
  if (lane_number() == 0)
    state->residual_flags = 0;
}

cudaError_t ob_cuda_forget(struct ob_cuda_plan plan, cudaStream_t stream) {
  cudaError_t error = launch_one_warp(forget_flags_kernel, stream, plan.state);
  return error == cudaSuccess ? forget_residuals(plan, true, stream) : error;
}
