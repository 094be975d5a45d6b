/*
 * The collectives. Their arguments are the buffers and a plan, which has the element counts and
 * types.
 *
 * Rules that hold for all of them:
 *  - Collective over the plan's communicator: every rank calls the same function on its plan. Calls
 *    on different plans may be in flight at the same time, and may be completed in any order.
 *  - Buffers are the caller's, aligned to their element type. sendbuf is not changed, except in
 *    place.
 *  - In place: allreduce with sendbuf == recvbuf; allgather with sendbuf == recvbuf + rank * count;
 *    reduce-scatter with recvbuf == sendbuf + rank * count. Any other overlap is an error.
 *  - The result has the same bits on every rank (allreduce, allgather), with every codec and any
 *    number of threads. It does not depend on the program's floating-point environment: a call sets
 *    its own traps, rounding and flush-to-zero, and restores the program's, and its exception
 *    flags, when it ends.
 *  - Not-a-number and infinity never enter the residual. If the input of any rank has such a value,
 *    or values so large that the sum of their squares overflows float32, every rank gets
 *    ONEBIT_SKIPPED from that very call, and recvbuf and residuals are unchanged. (With
 *    ONEBIT_WIRE_DENSE an allreduce checks the squares of its result, not of its input, and an
 *    allgather checks no squares.)
 *  - Results are rounded to the plan's type, to the nearest, ties to even. Finite inputs give
 *    finite results. A result beyond the largest float16, which only the residual of earlier calls
 *    can cause, is stored as +-65504 by every operation, dense or not.
 *  - In an allreduce whose server sends a result (all schedules but ALLGATHER) and in an allgather
 *    the scale is rounded to the plan's type before it is sent. The residual then contains the
 *    error of rounding, or of the limit of +-65504, and a later call corrects it. In a
 *    reduce-scatter, in the schedule ALLGATHER and in profile deepspeed results are rounded only
 *    when they are stored, with a relative error of up to 2^-8 in bfloat16 and 2^-11 in float16. No
 *    residual contains that error, so a constant input has the same error in every call; if that
 *    matters, exchange in float32.
 *  - An error of one rank reaches the others: a rank that gave a wrong argument gets
 *    ONEBIT_ERROR_ARGUMENT, the others ONEBIT_ERROR_PEER with that rank's number, in the same call,
 *    and no recvbuf and no residual is changed.
 *  - Ranks that make blocking calls on plans in different orders wait for each other, as in MPI. If
 *    one rank passes NULL or an invalid plan, the others wait for its call. Such a wait ends after
 *    ONEBIT_TIMEOUT (onebit/communicator.h) with ONEBIT_ERROR_TRANSPORT on all.
 *  - A message whose checksum is wrong is refused (ONEBIT_ERROR_MESSAGE). After that, and after a
 *    failed transport, results may differ between ranks: results are applied as they arrive, so
 *    recvbuf may hold a part of a result, and the call may have succeeded on other ranks. Therefore
 *    the rank that refused a message takes part in no later call of the plan until
 *    onebit_plan_reset: these calls return ONEBIT_ERROR_MESSAGE on that rank and ONEBIT_ERROR_PEER
 *    on the others.
 *
 * Errors of all of them: ONEBIT_SKIPPED, ONEBIT_ERROR_ARGUMENT (no plan, NULL or misaligned
 * buffer, overlap, a plan made for another operation), ONEBIT_ERROR_BUSY (the plan has a request in
 * flight), ONEBIT_ERROR_MESSAGE, ONEBIT_ERROR_PEER, ONEBIT_ERROR_TRANSPORT, ONEBIT_ERROR_DEVICE.
 * With count 0 buffers may be NULL.
 */
#ifndef ONEBIT_COLLECTIVES_H
#define ONEBIT_COLLECTIVES_H

#include "onebit/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct onebit_request *onebit_request_t;

/* recvbuf[i] = mean over the ranks of sendbuf[i], compressed. Every rank sends the signs of
 * (sendbuf + residual). The server of element i, which is one of the ranks, averages what it
 * receives and sends back the signs of (average + server residual). onebit_schedule_t describes the
 * other schedules.
 * Source: Tang et al., "1-bit Adam", arXiv 2102.02888, section 4, but with one scale for each block
 * instead of one for all.
 * Collective.
 *   sendbuf   count elements
 *   recvbuf   out: count elements
 *   plan      made for ONEBIT_ALLREDUCE
 * Errors: those of all collectives, above. */
onebit_status_t onebit_allreduce(const void *sendbuf, void *recvbuf, onebit_plan_t plan);

/* recvbuf[r * count + i] = sendbuf[i] of rank r, compressed once: the signs of (sendbuf + residual)
 * times the block's scale. Collective.
 *   sendbuf   count elements
 *   recvbuf   out: size * count elements, in rank order
 *   plan      made for ONEBIT_ALLGATHER
 * Errors: those of all collectives, above. */
onebit_status_t onebit_allgather(const void *sendbuf, void *recvbuf, onebit_plan_t plan);

/* recvbuf[i] = mean over the ranks of sendbuf[rank * count + i], each rank's part compressed once.
 * Collective.
 *   sendbuf   size * count elements
 *   recvbuf   out: count elements, this rank's share of the mean
 *   plan      made for ONEBIT_REDUCE_SCATTER
 * Errors: those of all collectives, above. */
onebit_status_t onebit_reduce_scatter(const void *sendbuf, void *recvbuf, onebit_plan_t plan);

/* The nonblocking variants of the three collectives: they return at once. Collective.
 *   sendbuf, recvbuf, plan   as above; the caller must not use them until the request is finished
 *   request                  out: finished by onebit_test or onebit_wait, which set it to NULL;
 *                            NULL when the call fails
 * Errors of one rank alone (a wrong buffer, a plan made for another operation) are reported by
 * onebit_test or onebit_wait, because the other ranks must learn of them.
 * Errors at once: ONEBIT_ERROR_ARGUMENT (no plan; request is NULL: the other ranks are told,
 * so the call waits for them before it returns), ONEBIT_ERROR_BUSY (the plan has a request in
 * flight), ONEBIT_ERROR_TRANSPORT (the plan's transport failed in an earlier call). */
onebit_status_t onebit_iallreduce(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                  onebit_request_t *request);
onebit_status_t onebit_iallgather(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                  onebit_request_t *request);
onebit_status_t onebit_ireduce_scatter(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                       onebit_request_t *request);

/* Progresses the request. onebit_test returns ONEBIT_IN_PROGRESS, or the final status, and then
 * sets *request to NULL; onebit_wait returns only the final status. Local.
 *   request   from a nonblocking call; a *request of NULL counts as finished (ONEBIT_OK)
 * While one request is tested or waited for, all requests of this process progress, so the order of
 * waiting does not matter.
 * Errors: ONEBIT_ERROR_ARGUMENT (request is NULL, or *request was finished before), and those of
 * all collectives, above. */
onebit_status_t onebit_test(onebit_request_t *request);
onebit_status_t onebit_wait(onebit_request_t *request);

/* Progresses every request in flight that shares comm's transport, without finishing any. Local.
 *   comm   the communicator
 * Call it now and then in a long computation: it returns quickly when nothing has arrived. An error
 * of a request is reported when that request is tested.
 * Errors: ONEBIT_ERROR_ARGUMENT (no communicator). */
onebit_status_t onebit_progress(onebit_comm_t comm);

#ifdef __cplusplus
}
#endif
#endif
