/*
 * libonebit-nccl.so is loaded before NCCL in an unmodified program. It compresses those collectives
 * that the rules allow; all other calls go to NCCL unchanged.
 *
 * NCCL's calls return before they run. So if the library finds out later that a call should not
 * have been compressed, it can not repeat the call dense. Instead:
 *
 * - The order of calls alone, which is the same on all ranks, identifies the tensor of a call
 * (dropin/loops.h). If a rank's buffers change after many calls with the same ones, the rank resets
 * the tensor's residual, on the stream, and continues.
 *  - If a value is not finite, the whole result is not-a-number, on all ranks.
 *
 * Ranks agree by additional NCCL calls, for which the host waits: when a communicator is created,
 * when the library looks for a loop, and when a plan is created. If one thread drives several
 * ranks, it would wait for itself, so nothing is compressed.
 */
#ifndef OB_DROPIN_NCCL_PRELOAD_H
#define OB_DROPIN_NCCL_PRELOAD_H

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <pthread.h>
#include <stdbool.h>

#include "base/nccl_releases.h"
#include "cuda/enter.h"
#include "dropin/loops.h"
#include "dropin/preload.h"
#include "onebit/onebit.h"

/*
 * ---- NCCL's own functions (preload.c) ----
 *
 * ob_next_ncclX is the ncclX that follows in the loader's search order. libonebit-nccl.so is also
 * preloaded into processes without NCCL, and into processes that load NCCL later (Python's
 * modules), so it is not linked to NCCL.
 */

/* Applies X(name, parameters, arguments) to all NCCL functions that the library calls. If the
 * loaded NCCL lacks one of them, a call of it returns ncclInternalError. */
#define OB_NCCL_FUNCTIONS(X)                                                                       \
  X(CommInitRank, (ncclComm_t * comm, int nranks, ncclUniqueId id, int rank),                      \
    (comm, nranks, id, rank))                                                                      \
  X(CommInitRankConfig,                                                                            \
    (ncclComm_t * comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t *config),              \
    (comm, nranks, id, rank, config))                                                              \
  X(CommInitRankScalable,                                                                          \
    (ncclComm_t * comm, int nranks, int rank, int ids, ncclUniqueId *id, ncclConfig_t *config),    \
    (comm, nranks, rank, ids, id, config))                                                         \
  X(CommInitAll, (ncclComm_t * comms, int ndev, const int *devices), (comms, ndev, devices))       \
  X(CommSplit, (ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config),   \
    (comm, color, key, newcomm, config))                                                           \
  X(CommShrink,                                                                                    \
    (ncclComm_t comm, int *excluded, int count, ncclComm_t *newcomm, ncclConfig_t *config,         \
     int flags),                                                                                   \
    (comm, excluded, count, newcomm, config, flags))                                               \
  X(CommRevoke, (ncclComm_t comm, int flags), (comm, flags))                                       \
  X(CommFinalize, (ncclComm_t comm), (comm))                                                       \
  X(CommDestroy, (ncclComm_t comm), (comm))                                                        \
  X(CommAbort, (ncclComm_t comm), (comm))                                                          \
  X(CommGetAsyncError, (ncclComm_t comm, ncclResult_t * result), (comm, result))                   \
  X(CommCount, (const ncclComm_t comm, int *count), (comm, count))                                 \
  X(CommCuDevice, (const ncclComm_t comm, int *device), (comm, device))                            \
  X(CommUserRank, (const ncclComm_t comm, int *rank), (comm, rank))                                \
  X(GetVersion, (int *version), (version))                                                         \
  X(GroupStart, (void), ())                                                                        \
  X(GroupEnd, (void), ())                                                                          \
  X(Send,                                                                                          \
    (const void *buffer, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,         \
     cudaStream_t stream),                                                                         \
    (buffer, count, datatype, peer, comm, stream))                                                 \
  X(Recv,                                                                                          \
    (void *buffer, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,               \
     cudaStream_t stream),                                                                         \
    (buffer, count, datatype, peer, comm, stream))                                                 \
  X(AllReduce,                                                                                     \
    (const void *sendbuf, void *recvbuf, size_t count, ncclDataType_t datatype, ncclRedOp_t op,    \
     ncclComm_t comm, cudaStream_t stream),                                                        \
    (sendbuf, recvbuf, count, datatype, op, comm, stream))                                         \
  X(ReduceScatter,                                                                                 \
    (const void *sendbuf, void *recvbuf, size_t count, ncclDataType_t datatype, ncclRedOp_t op,    \
     ncclComm_t comm, cudaStream_t stream),                                                        \
    (sendbuf, recvbuf, count, datatype, op, comm, stream))                                         \
  X(AllGather,                                                                                     \
    (const void *sendbuf, void *recvbuf, size_t count, ncclDataType_t datatype, ncclComm_t comm,   \
     cudaStream_t stream),                                                                         \
    (sendbuf, recvbuf, count, datatype, comm, stream))

#define OB_NCCL_DECLARE(name, parameters, arguments) ncclResult_t ob_next_nccl##name parameters;
OB_NCCL_FUNCTIONS(OB_NCCL_DECLARE)
#undef OB_NCCL_DECLARE

/* Declares two functions with (void): NCCL's header leaves their parameters open. */
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);

/* Replaces ncclCommAbort in the library's own calls (dropin/rules.mk). */
ncclResult_t ob_nccl_leave_to_program(ncclComm_t comm);

/* Return NCCL's error messages as text. */
const char *ob_next_ncclGetErrorString(ncclResult_t result);
const char *ob_next_ncclGetLastError(ncclComm_t comm);

/* A collective as the program called it. */
struct ob_nccl_call {
  onebit_operation_t operation;
  const void *sendbuf;
  void *recvbuf;
  size_t count; /* number of elements; onebit_operation_t says of which buffer */
  ncclDataType_t datatype;
  ncclRedOp_t op; /* no meaning in an allgather */
  ncclComm_t comm;
  cudaStream_t stream;
};

/* The properties of a call on which its plan depends. */
struct ob_nccl_kind {
  onebit_dtype_t dtype;
  bool sum;
};

/* Finds the properties of a call. Returns the reason why its type or operation can not be
 * compressed, or OB_REASON_NONE. */
enum ob_reason ob_nccl_resolve(const struct ob_nccl_call *call, struct ob_nccl_kind *kind);

/* Makes the call dense, by NCCL. */
ncclResult_t ob_nccl_run_dense(const struct ob_nccl_call *call);

/* ---- Communicators, and agreements of their ranks (comm.c) ---- */

/* The largest number of values in one agreement of the ranks. */
#define OB_MAX_AGREED 128

/* The buffers by which a communicator's ranks agree on numbers. */
struct ob_agreement {
  cudaStream_t stream;
  cudaEvent_t done;
  int64_t *on_device, *on_host; /* on_host is pinned memory */
};

/* A call in a loop that the ranks follow. It has a plan, and this rank's buffers. */
struct ob_nccl_tensor {
  struct ob_buffers buffers;
  struct ob_nccl_kind kind;
  onebit_operation_t operation;
  onebit_plan_t plan;
  int bits; /* bits per element in messages */
  uint64_t calls, bytes_sent, bytes_dense;
  /* captures: the number of calls captured in graphs; after the first, plan and buffers do not
   * change. replays: how many replays of these calls were counted. skipped: how many results were
   * not-a-number. */
  uint64_t captures, replays, skipped;
  struct ob_record *record;
  struct ob_nccl_sample *sample; /* NULL: calls of this kind have no sample */
};

/* The largest number of calls that are timed on their streams at once. */
enum { OB_TIMERS = 16 };

struct ob_nccl_timer {
  cudaEvent_t start, end;
  struct ob_nccl_tensor *tensor; /* NULL for a dense call; `call` is the call's number */
  uint64_t call;
  bool compressed;
  struct ob_record *record;
};

struct ob_nccl_comm {
  struct ob_nccl_comm *next;
  ncclComm_t comm;
  int rank, size, device;
  bool same_thread; /* a thread drives several ranks of the communicator */
  bool settled;     /* all ranks have agreed; else nothing is compressed */
  struct ob_agreement agreement;
  struct ob_loops *loops;
  bool look; /* the library should look for a loop once the program's group has ended */
  onebit_comm_t onebit;
  int tensors;
  struct ob_nccl_tensor *tensor[OB_MAX_POSITIONS];
  int captured; /* the position of the latest call, if it was captured */
  struct ob_nccl_timer timers[OB_TIMERS];
  unsigned timers_first, timers_used;
  pthread_mutex_t lock; /* guards `aborted` */
  bool aborted;
  bool failed;    /* a rank did not arrive within ONEBIT_TIMEOUT: all later calls fail */
  unsigned users; /* references, guarded by the list's lock: threads in a call, and the list */
};

/* Returns the state of a communicator; NULL if the communicator is not known. The caller holds a
 * reference until it calls ob_nccl_comm_release. */
struct ob_nccl_comm *ob_nccl_comm_acquire(ncclComm_t comm);
void ob_nccl_comm_release(struct ob_nccl_comm *comm);

/* A new NCCL communicator. Its handle may become valid only when the program's group has ended. */
struct ob_nccl_made {
  ncclComm_t *comm;
  ncclUniqueId id; /* zeros: not known */
  bool same_thread, blocking;
};
/* Adds the states of all communicators that a thread creates in one call or group, and agrees with
 * their other ranks. Collective; must not be called in a group. */
ncclResult_t ob_nccl_add_comms(const struct ob_nccl_made *made, size_t count);

/* Replaces this rank's values by the largest of all ranks' values. Must not be called while the
 * thread has a group open. Returns false if NCCL or the device has failed. */
bool ob_nccl_allreduce_max(struct ob_nccl_comm *comm, int64_t *values, int count);
/* Waits for the agreement's event, and reads `count` values. */
bool ob_nccl_wait_for_answer(struct ob_nccl_comm *comm, int64_t *values, int count);

/* ---- Tensors (tensor.c) ---- */

/* The decision on a call, which is the same on all ranks of its communicator. */
struct ob_nccl_decision {
  struct ob_nccl_comm *comm; /* the call's communicator; NULL if it is not known */
  enum ob_reason reason;     /* OB_REASON_NONE: the call is to be compressed */
  int position;              /* for a call to be compressed, its position in the followed loop */
  bool captured; /* a graph captures the call: ranks can not agree, and nothing is noted or timed */
  struct ob_record *record; /* NULL: only the reason is counted */
};

/* Makes a call, compressed if `decision` says so and a plan can be created. Must not be called in a
 * group. */
ncclResult_t ob_nccl_run(const struct ob_nccl_call *call, const struct ob_nccl_decision *decision);

/* Counts the replays of graphs since the previous count, if all known calls are complete. */
void ob_nccl_count_replays(struct ob_nccl_tensor *tensor);

/* Looks for a loop. Collective; must not be called in a group. */
void ob_nccl_find_loop(struct ob_nccl_comm *comm);

/* Resets the residuals of a loop that the program has left: they may belong to other tensors. */
void ob_nccl_reset_residuals_of_left_loop(struct ob_nccl_comm *comm, cudaStream_t stream);

/* Destroys all tensors. Local. */
void ob_nccl_tensors_destroy(struct ob_nccl_comm *comm);

/* ---- Measurements (measure.c): the residual, and the time of calls ---- */

/* Creates the sample of a tensor with a plan. Returns NULL if the tensor has no residual to
 * compare, or when out of memory. */
struct ob_nccl_sample *ob_nccl_sample_create(const struct ob_nccl_tensor *tensor, int ranks);
void ob_nccl_sample_destroy(struct ob_nccl_sample *sample);

/* Copies a part of the result after the tensor's 1st, 2nd, 4th, 8th ... call. */
void ob_nccl_sample_start(struct ob_nccl_tensor *tensor, cudaStream_t stream);

/* Begins to time a call on its stream, and first records the times of calls that have ended.
 * tensor: NULL for a dense call, which the record has already counted. Returns NULL, which
 * ob_nccl_timer_end accepts, if too many timed calls are in flight. */
struct ob_nccl_timer *ob_nccl_timer_begin(struct ob_nccl_comm *comm, struct ob_nccl_tensor *tensor,
                                          struct ob_record *record, cudaStream_t stream);
void ob_nccl_timer_end(struct ob_nccl_timer *timer, cudaStream_t stream);
/* Removes the timers of a tensor that is about to be destroyed. */
void ob_nccl_timers_drop(struct ob_nccl_comm *comm, const struct ob_nccl_tensor *tensor);
void ob_nccl_timers_destroy(struct ob_nccl_comm *comm);

/* ---- Groups (group.c) ---- */

/* Returns true if this thread is in a group of the program. */
bool ob_nccl_in_group(void);

/* Adds a call to the group: either a call to be compressed when the group ends, or one that was
 * already passed to NCCL. Takes over the reference to the communicator. Returns false when out of
 * memory. */
bool ob_nccl_group_add(const struct ob_nccl_call *call, const struct ob_nccl_decision *decision);
/* Adds a communicator whose state is created when the group ends. Returns false if the list is
 * full. */
bool ob_nccl_group_add_comm(const struct ob_nccl_made *made);

/* ---- The beginning and the end (preload.c) ---- */

/* Reads the settings, once. */
void ob_nccl_start(void);
/* Returns the reason why the settings are wrong; NULL if they are right. */
const char *ob_nccl_wrong_settings(void);
/* Returns the reason why the library can not work on this machine; NULL if it can. */
const char *ob_nccl_unusable_reason(void);
/* Prints the line at the start for a communicator of several ranks. refused: the reason why nothing
 * is compressed, or NULL. */
void ob_nccl_print_start(const struct ob_nccl_comm *comm, const char *refused);

#endif
