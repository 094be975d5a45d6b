/* Kernels that only handle headers (cuda/headers.cuh), and the decision on a call. */
#include "cuda/headers.cuh"

static __global__ void seal(const struct ob_cuda_plan plan, const struct ob_cuda_stamp stamp) {
  await_kernels_ahead();
  struct ob_message_shape shape;
  unsigned char *message = sent_message(plan, stamp.kind, blockIdx.y, &shape);
  check_run(message, shape, warp_number(), &plan.checks[1 + blockIdx.y]);
  if (is_last_warp(plan.checks))
    stamp_messages(plan, stamp);
}

/* Decides the call as steps.c does. A rank that could not take part has said so to its caller. For
 * one lane. */
static __device__ void decide(const struct ob_cuda_plan &plan, const struct ob_cuda_stamp &stamp) {
  struct ob_cuda_state *state = plan.state;
  note_own(plan);
  const onebit_status_t status =
      ob_call_verdict((onebit_status_t)state->status, state->failed, state->not_finite);
  if (state->status == ONEBIT_OK && status != ONEBIT_OK)
    state->origin = status == ONEBIT_SKIPPED ? state->not_finite : state->failed;
  state->status = status;
  state->stop = stamp.failed || state->status != ONEBIT_OK;
}

/* Number y of the grid looks at the message of the member y + 1 places further. */
static __global__ void open_messages(const struct ob_cuda_plan plan,
                                     const struct ob_cuda_stamp stamp) {
  await_kernels_ahead();
  open_run(plan, stamp.kind, 1 + blockIdx.y, warp_number());
  if (!is_last_warp(plan.checks))
    return;
  hear_all(plan, stamp);
  __syncwarp();
  if (stamp.decides && lane_number() == 0)
    decide(plan, stamp);
}

static __global__ void decide_alone(const struct ob_cuda_plan plan,
                                    const struct ob_cuda_stamp stamp) {
  await_kernels_ahead();
  if (lane_number() == 0)
    decide(plan, stamp);
}

/* A call that would have succeeded, but is held with one that did not: it takes the other's
 * status. */
static __global__ void join(struct ob_cuda_state *const *states, size_t count) {
  const struct ob_cuda_state *first = NULL;
  if (lane_number() != 0)
    return;
  for (size_t i = 0; i < count; i++)
    if (states[i]->stop && (!first || is_worse(states[i]->status, first->status)))
      first = states[i];
  for (size_t i = 0; first && i < count; i++) {
    states[i]->stop = 1;
    states[i]->status = first->status;
    states[i]->origin = first->origin;
    states[i]->agreed = first->agreed;
  }
}

static __global__ void adam_count(struct ob_cuda_state *state, double beta1, double beta2,
                                  double ranks) {
  if (lane_number() != 0)
    return;
  const uint64_t step = state->before + state->outcome.calls + 1;
  state->momentum_factor = ob_adam_momentum_factor(beta1, step);
  state->variance_factor = ob_adam_variance_factor(beta2, step);
  ob_moment_correct(&state->moment, beta2, ranks, step);
}

/* --- Launching */

/* The code that runs there was compiled for compute capability 9.0 or newer, and so is the device:
 * with other code, nothing would wait. OB_CUDA_LATE: none is early, to see what that is worth. */
bool ob_cuda_can_be_early(void) {
#ifdef OB_CUDA_LATE
  const bool wanted = false;
#else
  const bool wanted = true;
#endif
  cudaFuncAttributes code = {};
  const cudaError_t error = cudaFuncGetAttributes(&code, decide_alone);
  return wanted && error == cudaSuccess && code.ptxVersion >= 90;
}

/* One thread block computes the checksum of a message, with four runs of 4 KiB in flight, which
 * take about 0.5 us to come from the second cache and to be added up. A launch takes about 2 us,
 * and may use all multiprocessors: so up to eight runs, 1 us, nothing is gained by one. */
constexpr size_t max_short_runs = 8;

bool ob_cuda_is_short(const struct ob_cuda_plan *plan) {
  return !plan->geometry.dense && check_runs(plan->geometry) <= max_short_runs;
}

bool ob_cuda_can_seal(const struct ob_cuda_plan *plan) {
  return ob_cuda_is_short(plan) && !plan->geometry.one_scale && plan->max_blocks > 0;
}

cudaError_t ob_cuda_seal(struct ob_cuda_plan plan, struct ob_cuda_stamp stamp, size_t chunk,
                         cudaStream_t stream) {
  return launch_early(seal, check_runs(plan.geometry), sent_count(plan, stamp.kind), stream,
                      of_chunk(plan, chunk), stamp);
}

cudaError_t ob_cuda_open(struct ob_cuda_plan plan, struct ob_cuda_stamp stamp, size_t chunk,
                         cudaStream_t stream) {
  return plan.geometry.members == 1
             ? cudaSuccess
             : launch_early(open_messages, check_runs(plan.geometry), plan.geometry.members - 1,
                            stream, of_chunk(plan, chunk), stamp);
}

cudaError_t ob_cuda_decide(struct ob_cuda_plan plan, struct ob_cuda_stamp stamp,
                           cudaStream_t stream) {
  return launch_in(plan.early, decide_alone, dim3(1), OB_LANES, stream, plan, stamp);
}

cudaError_t ob_cuda_join(struct ob_cuda_state *const *states, size_t count, cudaStream_t stream) {
  return launch_one_warp(join, stream, states, count);
}

cudaError_t ob_cuda_adam_count(struct ob_cuda_plan plan, double beta1, double beta2,
                               cudaStream_t stream) {
  return launch_one_warp(adam_count, stream, plan.state, beta1, beta2,
                         (double)plan.geometry.members);
}
