/*
 * The collectives. Buffers first, then the plan; counts and types are the plan's.
 *
 * Rules that hold for all of them:
 *  - Collective over the plan's communicator: every rank calls the same function on its plan. Calls
 * on different plans may be in flight at the same time, and may be completed in any order.
 *  - Buffers are the caller's, aligned to their element type. sendbuf is not changed, except in
 * place.
 *  - In place: allreduce with sendbuf == recvbuf; allgather with sendbuf == recvbuf + rank * count;
 * reduce-scatter with recvbuf == sendbuf + rank * count. Any other overlap is an error.
 *  - The result has the same bits on every rank (allreduce, allgather), with every codec and any
 * number of threads.
 *  - Not-a-number and infinity never enter the kept error. If the input of any rank holds one, or
 * holds values so large that the sum of their squares overflows float32, every rank gets
 * ONEBIT_SKIPPED from that very call, and recvbuf and kept errors are as they were.
 *  - An error of one rank reaches the others: a rank that gave a wrong argument gets
 * ONEBIT_ERROR_ARGUMENT, the others ONEBIT_ERROR_PEER with that rank's number; nobody waits for
 * ever, and no recvbuf and no kept error is changed.
 *
 * Errors of all of them: ONEBIT_SKIPPED, ONEBIT_ERROR_ARGUMENT (NULL or misaligned buffer, overlap,
 * a plan made for another operation), ONEBIT_ERROR_BUSY (the plan has a request in flight),
 * ONEBIT_ERROR_MESSAGE, ONEBIT_ERROR_PEER, ONEBIT_ERROR_TRANSPORT. With count 0 buffers may be
 * NULL.
 */
#ifndef ONEBIT_COLLECTIVES_H
#define ONEBIT_COLLECTIVES_H

#include "onebit/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct onebit_request *onebit_request_t;

/* recvbuf[i] = mean over the ranks of sendbuf[i], compressed: sent as signs of (sendbuf + kept
 * error), averaged by the rank that serves element i, sent back as signs of (average + kept server
 * error). Source: Tang et al., "1-bit Adam", arXiv 2102.02888, section 4, with a scale a block. */
onebit_status_t onebit_allreduce(const void *sendbuf, void *recvbuf, onebit_plan_t plan);

/* recvbuf[r * count + i] = what rank r sent, compressed once: signs of (sendbuf + kept error) times
 * the block's scale. */
onebit_status_t onebit_allgather(const void *sendbuf, void *recvbuf, onebit_plan_t plan);

/* recvbuf[i] = mean over the ranks of sendbuf[rank * count + i], each rank's part compressed once.
 */
onebit_status_t onebit_reduce_scatter(const void *sendbuf, void *recvbuf, onebit_plan_t plan);

/* The same, returning at once: the buffers belong to the library until the request is finished.
 * Errors that are known at once and on this rank alone (a wrong buffer) are still reported by
 * onebit_test or onebit_wait, because the other ranks must learn of them. request   out: finished
 * by onebit_test or onebit_wait, which set it to NULL; NULL when the call fails Errors:
 * ONEBIT_ERROR_ARGUMENT (plan or request is NULL, another operation), ONEBIT_ERROR_BUSY. */
onebit_status_t onebit_iallreduce(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                  onebit_request_t *request);
onebit_status_t onebit_iallgather(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                  onebit_request_t *request);
onebit_status_t onebit_ireduce_scatter(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                       onebit_request_t *request);

/* Moves the request on and says how it stands: ONEBIT_IN_PROGRESS, or its final status, and then
 * *request is NULL. A NULL request is finished (ONEBIT_OK). onebit_wait returns only the final
 * status. While one request is tested or waited for, the others of this process move on too, so the
 * order of waiting does not matter. */
onebit_status_t onebit_test(onebit_request_t *request);
onebit_status_t onebit_wait(onebit_request_t *request);

/* Moves every request in flight on that shares comm's transport, without finishing any. Call it now
 * and then from a long computation: it returns quickly when nothing has arrived. Errors:
 * ONEBIT_ERROR_ARGUMENT (comm is NULL). What goes wrong in a request is reported when that request
 * is tested. */
onebit_status_t onebit_progress(onebit_comm_t comm);

#ifdef __cplusplus
}
#endif
#endif
