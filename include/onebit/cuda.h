/*
 * Collectives and optimizers on NVIDIA GPUs. In a header of its own so that code without CUDA can
 * include the others; not available, and not linked, in a library built without CUDA.
 *
 * A plan or an optimizer whose options say ONEBIT_DEVICE_CUDA belongs to the device that is current
 * when it is made: compute capability 8.0 or newer. Its buffers are memory of that device
 * (cudaMalloc), and results have the same bits as on a processor, so ranks with a GPU and ranks
 * without can share a job over MPI. The calls without a stream (onebit/collectives.h) work on such
 * plans too: what they read must be complete (a cudaMemcpy from memory of the host that is not
 * pinned may return before it is: cudaStreamSynchronize), and they return when the result is.
 *
 * The calls here are ordered with the work of a stream: they begin when what was put on it before
 * is complete, and what is put on it next finds the result.
 *
 *   over NCCL, and with one rank   They return at once, and do not allocate: the stream may be
 *                                  capturing a graph. Calls on one plan from two streams are put in
 *                                  order, but not those in graphs.
 *   over MPI and loopback          The host stages messages through pinned memory and drives the
 *                                  network, so they return when the last part is on the stream. A
 *                                  stream that is capturing is an ONEBIT_ERROR_UNSUPPORTED.
 *   over a CUDA-aware MPI          The same, but messages stay in memory of the device, which
 *                                  writes and checks their headers as over NCCL.
 *
 * Unless messages are staged, a call returns before the library knows how it ends (ONEBIT_SKIPPED,
 * an error of another rank): the two synchronize calls report that. The rules of
 * onebit/collectives.h hold: a call that fails or is skipped changes nothing, on any rank.
 *
 * Errors of all of them: those of the call without a stream; ONEBIT_ERROR_ARGUMENT for memory of
 * the host or of another device, for a plan or an optimizer on the host, and for a stream of
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
 *   sendbuf, recvbuf, plan   as there, in memory of the plan's device
 *   stream                   a stream of the plan's device; NULL is its default stream
 * Errors: above. */
onebit_status_t onebit_allreduce_stream(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                        cudaStream_t stream);
onebit_status_t onebit_allgather_stream(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                        cudaStream_t stream);
onebit_status_t onebit_reduce_scatter_stream(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                             cudaStream_t stream);

/* Waits for the calls that were put on streams, and returns how they ended: since the last time the
 * status of the first call with an error, else of the first that was skipped. Local.
 *   plan   the plan; not while a stream captures a call on it
 * Errors: ONEBIT_ERROR_ARGUMENT (plan is NULL), ONEBIT_ERROR_BUSY (a request is in flight), those
 * of the calls. */
onebit_status_t onebit_plan_synchronize(onebit_plan_t plan);

/* Counts the plan's complete calls, also those that graphs have replayed and no host has seen.
 * Local; waits for nothing.
 *   plan      over NCCL, a CUDA-aware MPI or with one rank
 *   made      out: calls that ended well, modulo 2^32
 *   skipped   out: calls that were skipped (ONEBIT_SKIPPED), modulo 2^32
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL, or a plan on the host), ONEBIT_ERROR_UNSUPPORTED (elsewhere:
 * there the host makes all calls). */
onebit_status_t onebit_plan_get_calls(onebit_plan_t plan, uint64_t *made, uint64_t *skipped);

/* Multiplies the result of the plan's latest call on a stream by a factor; the number of ranks
 * makes a sum of the mean. If that call failed or was skipped, all of the result becomes
 * not-a-number, on every rank: a program that does not wait for the status then cannot use the old
 * contents of recvbuf as a result. A product too large for float16 becomes infinity, as the dense
 * sum would. Local.
 *   recvbuf   that call's
 *   factor    1 leaves a result as it is
 *   plan      over NCCL, a CUDA-aware MPI or with one rank: elsewhere the host knows how a call has
 *             ended when it returns, and this is an ONEBIT_ERROR_UNSUPPORTED
 *   stream    as there
 * In graphs it can be captured with the call.
 * Errors: above; ONEBIT_ERROR_BUSY (the plan has a request in flight), ONEBIT_ERROR_TRANSPORT (its
 * transport has failed). */
onebit_status_t onebit_scale_result_stream(void *recvbuf, float factor, onebit_plan_t plan,
                                           cudaStream_t stream);

/* Does onebit_plan_reset_residual in the order of a stream, without waiting: for a buffer that
 * holds another tensor from now on. Local.
 *   plan, stream   as in onebit_scale_result_stream
 * Errors: as there. */
onebit_status_t onebit_plan_reset_residual_stream(onebit_plan_t plan, cudaStream_t stream);

/* Makes a step (onebit_optimizer_step) on a stream. Collective.
 *   optimizer       made for memory of a device
 *   learning_rate   as there; a graph keeps the one that it was captured with, unless it is in
 *                   memory of the device (onebit_optimizer_set_learning_rate_pointer)
 *   stream          a stream of the optimizer's device
 * Over NCCL a step of the compressed stage can be captured; elsewhere, and in the warm-up, with
 * clip_norm, and with 0/1 Adam, that is an ONEBIT_ERROR_UNSUPPORTED. docs/cuda.md says in which
 * steps the host waits.
 * Errors: above. */
onebit_status_t onebit_optimizer_step_stream(onebit_optimizer_t optimizer, float learning_rate,
                                             cudaStream_t stream);

/* onebit_optimizer_begin and onebit_optimizer_ready on streams: the exchange of a bucket goes on
 * beside the backward pass, on a stream of the optimizer's.
 *
 *   onebit_optimizer_begin_stream(optimizer, rate, stream);
 *   for each tensor, as the backward pass comes to it:
 *     put what computes its gradient on a stream
 *     onebit_optimizer_ready_stream(optimizer, tensor, that stream);
 *   onebit_optimizer_step_stream(optimizer, rate, stream);
 *
 * The gradient is final when the work that is on the stream at the call is complete: the tensor's
 * bucket (bucket_size) waits for that work, and not for later work. The step's update follows the
 * stream of onebit_optimizer_step_stream, which must wait for the backward pass on all of its
 * streams; what is put on that stream next finds the new parameters. Over NCCL all ranks send
 * buckets in the same order, from the last tensors to the first, so let tensors become ready in
 * about that order. Each rank may call ready in an order of its own, or make its step without. No
 * bit of any result depends on it.
 *   optimizer       made for memory of a device
 *   learning_rate   as in onebit_optimizer_begin
 *   tensor          as in onebit_optimizer_ready
 *   stream          a stream of the optimizer's device; with begin, the one whose capture the step
 *                   is part of, if there is one: then all streams of the step are
 * Local. The host waits where onebit_optimizer_step_stream does, begin instead of step. The calls
 * without a stream work too, and end with onebit_optimizer_step: over NCCL their stream is the
 * default one. The two forms do not mix in one step.
 * Errors: those of onebit_optimizer_begin and onebit_optimizer_ready; above; ONEBIT_ERROR_ARGUMENT
 * for a step that was begun without a stream, or not in the capture that this stream is in. */
onebit_status_t onebit_optimizer_begin_stream(onebit_optimizer_t optimizer, float learning_rate,
                                              cudaStream_t stream);
onebit_status_t onebit_optimizer_ready_stream(onebit_optimizer_t optimizer, size_t tensor,
                                              cudaStream_t stream);

/* Makes steps read the learning rate from memory of the device when they run, from the next step
 * on, so that one captured graph serves any rate: write the next rate there before it is launched.
 * A graph keeps the address that it was captured with. Local; some ranks may use a pointer and
 * others not, but all must have the same rate, which is compared in the messages as always.
 *   optimizer   made for memory of a device, over NCCL, a CUDA-aware MPI or with one rank; not 0/1
 *               Adam
 *   rate        one float32 in memory of the optimizer's device, finite and not negative; the
 *               caller's, until another is set or NULL, and the last step or graph with it is
 *               complete. Its value must stay from the begin of a step to its end: put what changes
 *               it on the stream of the step. The calls' learning_rate is then not looked at.
 *               NULL: that is the rate again
 * Bits are those of the same rate in a call's argument. A value that can be no rate fails the step
 * on every rank, which changes nothing: onebit_optimizer_synchronize gives ONEBIT_ERROR_ARGUMENT,
 * and on the others ONEBIT_ERROR_PEER.
 * Errors: ONEBIT_ERROR_ARGUMENT (no optimizer, or one of the host; a rate that is misaligned or not
 * in memory of its device), ONEBIT_ERROR_BUSY (a step is open), ONEBIT_ERROR_UNSUPPORTED (0/1 Adam,
 * whose host adds up the rates; a transport that the host drives). */
onebit_status_t onebit_optimizer_set_learning_rate_pointer(onebit_optimizer_t optimizer,
                                                           const float *rate);

/* Does for the steps of an optimizer what onebit_plan_synchronize does for calls. */
onebit_status_t onebit_optimizer_synchronize(onebit_optimizer_t optimizer);

#ifdef __cplusplus
}
#endif
#endif
