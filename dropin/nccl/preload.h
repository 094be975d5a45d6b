/*
 * libonebit-nccl.so: stands before NCCL in a program that knows nothing of onebit, and compresses
 * those of its collectives that rules allow. All else goes on to NCCL as it came.
 *
 * NCCL's calls return before anything has happened, so a call can not be made again dense when it
 * turns out that it should not have been compressed. Instead:
 *
 *  - Which tensor a call is of follows from the order of calls alone, which is the same on all
 *    ranks (dropin/loops.h). A rank whose buffers have been the same for long and are others gives
 *    up what it has kept of that tensor's error, on the stream, and goes on.
 *  - Where a value is not finite, the result is not-a-number throughout, on all ranks.
 *
 * Ranks agree by NCCL calls of their own, for which the host waits: when a communicator is made,
 * when a loop is looked for, and when a plan is made. Where several ranks are driven by one
 * thread, which could not wait for itself, nothing is compressed.
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
 * ob_next_ncclX is the next ncclX in the order of libraries. libonebit-nccl.so is also preloaded
 * into processes without NCCL, and into those that load theirs later (Python's modules), so it is
 * not linked with NCCL.
 */

/* X(name, parameters, arguments) for all functions that the library calls. A missing one gives
 * ncclInternalError. */
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

/* NCCL's header declares them without saying that they have no parameters. */
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);

/* The library's ncclCommAbort (dropin/rules.mk). */
ncclResult_t ob_nccl_leave_to_program(ncclComm_t comm);

/* The two functions that return text. */
const char *ob_next_ncclGetErrorString(ncclResult_t result);
const char *ob_next_ncclGetLastError(ncclComm_t comm);

/* A collective as the program called it. */
struct ob_nccl_call {
  onebit_operation_t operation;
  const void *sendbuf;
  void *recvbuf;
  size_t count; /* with the meaning that the operation gives it: onebit_operation_t */
  ncclDataType_t datatype;
  ncclRedOp_t op; /* not of an allgather */
  ncclComm_t comm;
  cudaStream_t stream;
};

/* The properties of a call that count for plans. */
struct ob_nccl_kind {
  onebit_dtype_t dtype;
  bool sum;
};

/* Decides by type and operation whether the call can be compressed at all; else returns why not. */
enum ob_reason ob_nccl_resolve(const struct ob_nccl_call *call, struct ob_nccl_kind *kind);

/* The call by NCCL. */
ncclResult_t ob_nccl_dense(const struct ob_nccl_call *call);

/* ---- Communicators, and agreements of their ranks (comm.c) ---- */

/* The most numbers in one message. */
#define OB_MAX_AGREED 128

/* The buffers in which a communicator's ranks send each other numbers. */
struct ob_agreement {
  cudaStream_t stream;
  cudaEvent_t done;
  int64_t *on_device, *on_host; /* the latter pinned */
};

/* A call in a loop that the ranks follow: a plan, and this rank's buffers. */
struct ob_nccl_tensor {
  struct ob_buffers buffers;
  struct ob_nccl_kind kind;
  onebit_operation_t operation;
  onebit_plan_t plan;
  int bits; /* an element, of what is sent */
  uint64_t calls, bytes_sent, bytes_dense;
  /* Counts of its calls that are in graphs, after which plan and buffers stay; of their replays, as
   * far as was counted; and of results that were not-a-number, of all calls. */
  uint64_t captures, replays, skipped;
  struct ob_record *record;
  struct ob_nccl_sample *sample; /* NULL: such calls have none */
};

/* The most calls that are timed on their streams at once. */
enum { OB_TIMERS = 16 };

struct ob_nccl_timer {
  cudaEvent_t start, end;
  struct ob_nccl_tensor *tensor; /* of a compressed call, whose number is `call` */
  uint64_t call;
  bool compressed;
  struct ob_record *record;
};

struct ob_nccl_comm {
  struct ob_nccl_comm *next;
  ncclComm_t comm;
  int rank, size, device;
  bool same_thread; /* with another rank of the same communicator */
  bool settled;     /* with all ranks; else nothing is compressed */
  struct ob_agreement agreement;
  struct ob_loops *loops;
  bool look; /* once the program's group has ended */
  onebit_comm_t onebit;
  int tensors;
  struct ob_nccl_tensor *tensor[OB_MAX_POSITIONS];
  int captured; /* the position of the latest call, if it was captured */
  struct ob_nccl_timer timers[OB_TIMERS];
  unsigned timers_first, timers_used;
  pthread_mutex_t lock; /* of `aborted` */
  bool aborted;
  bool failed;    /* a rank did not arrive within ONEBIT_TIMEOUT: all later calls fail */
  unsigned users; /* of the list's lock: threads that are in a call on it, and the list itself */
};

/* The library's state of a communicator, in use until ob_nccl_comm_release; NULL where nothing is
 * known. */
struct ob_nccl_comm *ob_nccl_comm_use(ncclComm_t comm);
void ob_nccl_comm_release(struct ob_nccl_comm *comm);

/* A communicator that NCCL has been asked for, whose handle is there once the group has ended. */
struct ob_nccl_made {
  ncclComm_t *comm;
  ncclUniqueId id; /* zeros: not known */
  bool same_thread, blocking;
};
/* Keeps their state, and settles with the other ranks; of all that one thread makes at a time.
 * Collective; not in a group. */
ncclResult_t ob_nccl_note_comms(const struct ob_nccl_made *made, size_t count);

/* Replaces this rank's values by the largest of all ranks'. Not while the thread has a group open.
 * False: NCCL or the device has failed. */
bool ob_nccl_largest(struct ob_nccl_comm *comm, int64_t *values, int count);
/* Waits until what is recorded as the agreement's event has come, and reads `count` values. */
bool ob_nccl_answer(struct ob_nccl_comm *comm, int64_t *values, int count);

/* ---- Tensors (tensor.c) ---- */

/* The decision on a call, the same on all ranks of its communicator. */
struct ob_nccl_decision {
  struct ob_nccl_comm *comm; /* the communicator used; NULL if it is not known */
  enum ob_reason reason;     /* OB_REASON_NONE: it is to be compressed */
  int position;              /* then; in the loop that is followed */
  bool captured;             /* by a graph: nothing is asked, noted or timed */
  struct ob_record *record;  /* NULL: only counted by its reason */
};

/* Makes a call: compressed if so decided, unless no plan can be made. Not in a group. */
ncclResult_t ob_nccl_run(const struct ob_nccl_call *call, const struct ob_nccl_decision *decision);

/* Counts the replays of graphs since this was last called, if all known calls are complete. */
void ob_nccl_count_replays(struct ob_nccl_tensor *tensor);

/* Looks for a loop. Collective; not in a group. */
void ob_nccl_look(struct ob_nccl_comm *comm);

/* Gives up the residuals of a loop that has been left: they may be of other tensors. */
void ob_nccl_restart_left(struct ob_nccl_comm *comm, cudaStream_t stream);

/* Destroys all tensors. Local. */
void ob_nccl_tensors_destroy(struct ob_nccl_comm *comm);

/* ---- Measurements (measure.c): how much is kept, and how long calls take ---- */

/* Creates a sample of a tensor that has its plan; NULL where there is nothing to look at, or no
 * memory. */
struct ob_nccl_sample *ob_nccl_sample_create(const struct ob_nccl_tensor *tensor, int ranks);
void ob_nccl_sample_destroy(struct ob_nccl_sample *sample);

/* Takes a part of the result behind the tensor's 1st, 2nd, 4th, 8th ... call. */
void ob_nccl_sample_start(struct ob_nccl_tensor *tensor, cudaStream_t stream);

/* Times a call on its stream: NULL where too many are in flight, which is fine for the end. Times
 * that have come since are put down first. The tensor is NULL for a dense call, whose record has
 * counted it already. */
struct ob_nccl_timer *ob_nccl_timer_begin(struct ob_nccl_comm *comm, struct ob_nccl_tensor *tensor,
                                          struct ob_record *record, cudaStream_t stream);
void ob_nccl_timer_end(struct ob_nccl_timer *timer, cudaStream_t stream);
/* Removes the timers of a tensor that is about to be destroyed. */
void ob_nccl_timers_drop(struct ob_nccl_comm *comm, const struct ob_nccl_tensor *tensor);
void ob_nccl_timers_destroy(struct ob_nccl_comm *comm);

/* ---- Groups (group.c) ---- */

/* True if this thread is in a group of the program's. */
bool ob_nccl_in_group(void);

/* Adds to the group a call that is to be compressed at its end, or that NCCL has been given. Takes
 * over the use of the communicator. False: no memory for it. */
bool ob_nccl_group_add(const struct ob_nccl_call *call, const struct ob_nccl_decision *decision);
/* Adds a communicator that is to be kept and settled when the group ends. False: there is no room
 * for one more. */
bool ob_nccl_group_make(const struct ob_nccl_made *made);

/* ---- The beginning and the end (preload.c) ---- */

/* Reads the settings, once. */
void ob_nccl_start(void);
/* The reason why they are wrong; NULL where they are not. */
const char *ob_nccl_wrong_settings(void);
/* The reason why the library can do nothing on this machine; NULL where it can. */
const char *ob_nccl_why_unusable(void);
/* Prints the line for a communicator of several ranks, settled unless `refused`. */
void ob_nccl_print_start(const struct ob_nccl_comm *comm, const char *refused);

#endif
