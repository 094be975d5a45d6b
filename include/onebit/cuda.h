/*
 * Collectives and optimizers on NVIDIA GPUs. The header is separate so that code without CUDA can
 * include the others. A library built without CUDA does not have these functions.
 *
 * A plan or an optimizer whose options say ONEBIT_DEVICE_CUDA belongs to the device that is current
 * when it is made, which must have compute capability 8.0 or newer. Its buffers are memory of that
 * device (cudaMalloc), and results have the same bits as on a CPU, so ranks with a GPU and ranks
 * without one can share a job over MPI. The calls without a stream (onebit/collectives.h) work on
 * such plans too. Their inputs must be complete when they are called: a cudaMemcpy from host memory
 * that is not pinned may return earlier, so call cudaStreamSynchronize after it. They return when
 * the result is complete.
 *
 * The calls of this header are ordered with the work of a stream: they begin when earlier work on
 * it is complete, and later work on it finds the result.
 *
 *   over NCCL, and with one rank   They return at once, and do not allocate: the stream may be
 *                                  capturing a graph. The library orders calls on one plan from two
 *                                  streams; it does not order calls in graphs.
 *   over MPI and loopback          The host stages messages through pinned memory and drives the
 *                                  network, so they return when the last part is on the stream. A
 *                                  stream that is capturing is an ONEBIT_ERROR_UNSUPPORTED.
 *   over a CUDA-aware MPI          As over MPI, but messages stay in device memory, and the device
 *                                  writes and checks their headers as over NCCL.
 *
 * Unless messages are staged, a call returns before the library knows its status (ONEBIT_SKIPPED,
 * an error of another rank); onebit_plan_synchronize and onebit_optimizer_synchronize return that
 * status. The rules of onebit/collectives.h hold: a call that fails or is skipped changes nothing,
 * on any rank.
 *
 * Errors of all these calls: those of the call without a stream; ONEBIT_ERROR_ARGUMENT for memory
 * of the host or of another device, for a plan or an optimizer on the host, and for a stream of
 * another device; ONEBIT_ERROR_DEVICE when CUDA fails. The device that is current is not changed.
 */
#ifndef ONEBIT_CUDA_H
#define ONEBIT_CUDA_H

#include <cuda_runtime_api.h>

#include "onebit/collectives.h"
#include "onebit/optimizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* onebit_allreduce, onebit_allgather and onebit_reduce_scatter on a stream. Collective.
 *   sendbuf, recvbuf, plan   as in those calls; the buffers are in memory of the plan's device
 *   stream                   a stream of the plan's device; NULL is its default stream
 * Errors: above. */
onebit_status_t onebit_allreduce_stream(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                        cudaStream_t stream);
onebit_status_t onebit_allgather_stream(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                        cudaStream_t stream);
onebit_status_t onebit_reduce_scatter_stream(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                             cudaStream_t stream);

/* Waits for the calls that were put on streams since the last onebit_plan_synchronize, and returns
 * one status for all of them: that of the first call with an error, else that of the first skipped
 * call. Local.
 *   plan   the plan; no stream may be capturing a call on it
 * Errors: ONEBIT_ERROR_ARGUMENT (plan is NULL), ONEBIT_ERROR_BUSY (a request is in flight), those
 * of the calls. */
onebit_status_t onebit_plan_synchronize(onebit_plan_t plan);

/* Counts the plan's complete calls, including those of replayed graphs, which the host does not
 * see. Local; it does not wait.
 *   plan      over NCCL, a CUDA-aware MPI or with one rank
 *   made      out: calls that succeeded, modulo 2^32
 *   skipped   out: calls that were skipped (ONEBIT_SKIPPED), modulo 2^32
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL, or a plan on the host), ONEBIT_ERROR_UNSUPPORTED (over
 * another transport, where the host makes all calls). */
onebit_status_t onebit_plan_get_calls(onebit_plan_t plan, uint64_t *made, uint64_t *skipped);

/* Multiplies the result of the plan's latest call on a stream by a factor. If the factor is the
 * number of ranks, the mean becomes a sum. If that call failed or was skipped, all of the result
 * becomes not-a-number, on every rank: a program that does not wait for the status then cannot use
 * the old contents of recvbuf as a result. A product too large for float16 becomes infinity, as the
 * dense sum would. Local.
 *   recvbuf   the recvbuf of that call
 *   factor    1 leaves a result as it is
 *   plan      over NCCL, a CUDA-aware MPI or with one rank. Over another transport:
 *             ONEBIT_ERROR_UNSUPPORTED, since there a call returns its status to the host
 *   stream    as in onebit_allreduce_stream
 * A graph can capture it together with the call.
 * Errors: above; ONEBIT_ERROR_BUSY (the plan has a request in flight), ONEBIT_ERROR_TRANSPORT (its
 * transport has failed). */
onebit_status_t onebit_scale_result_stream(void *recvbuf, float factor, onebit_plan_t plan,
                                           cudaStream_t stream);

/* Resets the residual as onebit_plan_reset_residual does, but in the order of a stream, without
 * waiting. It is for a buffer that holds another tensor from now on. Local.
 *   plan, stream   as in onebit_scale_result_stream
 * Errors: as there. */
onebit_status_t onebit_plan_reset_residual_stream(onebit_plan_t plan, cudaStream_t stream);

/* Makes a step (onebit_optimizer_step) on a stream. Collective.
 *   optimizer       made for memory of a device
 *   learning_rate   as in onebit_optimizer_step; a graph keeps the rate of its capture, unless the
 *                   rate is in memory of the device (onebit_optimizer_set_learning_rate_pointer)
 *   stream          a stream of the optimizer's device
 * Over NCCL a step of the compressed stage can be captured. Capturing is an
 * ONEBIT_ERROR_UNSUPPORTED over other transports, in the warm-up, with clip_norm and with 0/1 Adam.
 * docs/cuda.md says in which steps the host waits.
 * Errors: above. */
onebit_status_t onebit_optimizer_step_stream(onebit_optimizer_t optimizer, float learning_rate,
                                             cudaStream_t stream);

/* onebit_optimizer_begin and onebit_optimizer_ready on streams: the exchange of a bucket overlaps
 * with the backward pass, on a stream of the optimizer's.
 *
 *   onebit_optimizer_begin_stream(optimizer, rate, stream);
 *   for each tensor, as the backward pass comes to it:
 *     put what computes its gradient on a stream
 *     onebit_optimizer_ready_stream(optimizer, tensor, that stream);
 *   onebit_optimizer_step_stream(optimizer, rate, stream);
 *
 * The gradient is final when the work that is on the stream at the call is complete: the tensor's
 * bucket (bucket_size) waits for that work, and not for later work. The step's update follows the
 * work on the stream of onebit_optimizer_step_stream. That stream must wait for the backward pass
 * on all of its streams; later work on it finds the new parameters. Over NCCL all ranks send
 * buckets in the same order, from the last tensors to the first, so let tensors become ready in
 * about that order. Each rank may call ready in an order of its own, or make its step without
 * ready. No bit of any result depends on it.
 *   optimizer       made for memory of a device
 *   learning_rate   as in onebit_optimizer_begin
 *   tensor          as in onebit_optimizer_ready
 *   stream          a stream of the optimizer's device. If a graph captures the step, begin gets
 *                   the stream that is capturing, and all streams of the step must be part of that
 *                   capture
 * Local. The host waits in the same steps as with onebit_optimizer_step_stream, but waits in begin.
 * The calls without a stream work too, and end with onebit_optimizer_step: over NCCL they use the
 * default stream. One step must not mix calls with and without a stream.
 * Errors: those of onebit_optimizer_begin and onebit_optimizer_ready; above; ONEBIT_ERROR_ARGUMENT
 * for a step that was begun without a stream, or outside the capture of this stream. */
onebit_status_t onebit_optimizer_begin_stream(onebit_optimizer_t optimizer, float learning_rate,
                                              cudaStream_t stream);
onebit_status_t onebit_optimizer_ready_stream(onebit_optimizer_t optimizer, size_t tensor,
                                              cudaStream_t stream);

/* Makes steps read the learning rate from device memory when they run, from the next step on. One
 * captured graph then serves any rate: write the next rate to that memory before the launch. A
 * graph keeps the address that it was captured with. Local; some ranks may use a pointer and others
 * not, but all must have the same rate, which is compared in the messages as always.
 *   optimizer   made for memory of a device, over NCCL, a CUDA-aware MPI or with one rank; not 0/1
 *               Adam
 *   rate        one float32 in memory of the optimizer's device, finite and not negative. The
 *               caller owns it, and keeps it until another pointer or NULL is set and the last step
 *               or graph that uses it is complete. Its value must not change from the begin of a
 *               step to its end: change it on the stream of the step. The learning_rate of calls is
 *               ignored meanwhile. NULL: steps use the learning_rate of calls again
 * Results have the same bits as with the same rate in a call's argument. A value that is negative
 * or not finite fails the step on every rank, and the step changes nothing:
 * onebit_optimizer_synchronize returns ONEBIT_ERROR_ARGUMENT on this rank, and ONEBIT_ERROR_PEER on
 * the others.
 * Errors: ONEBIT_ERROR_ARGUMENT (no optimizer, or one of the host; a rate that is misaligned or not
 * in memory of its device), ONEBIT_ERROR_BUSY (a step is open), ONEBIT_ERROR_UNSUPPORTED (0/1 Adam,
 * whose host adds up the rates; a transport that the host drives). */
onebit_status_t onebit_optimizer_set_learning_rate_pointer(onebit_optimizer_t optimizer,
                                                           const float *rate);

/* Waits for the steps of an optimizer, and returns their status, as onebit_plan_synchronize does
 * for the calls of a plan. */
onebit_status_t onebit_optimizer_synchronize(onebit_optimizer_t optimizer);

#ifdef __cplusplus
}
#endif
#endif
