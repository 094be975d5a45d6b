/*
 * Matches the calls of a communicator's ranks: sends with receives, and collectives with each
 * other.
 */
#ifndef EMULATION_NCCL_MATCHING_H
#define EMULATION_NCCL_MATCHING_H

#include <deque>
#include <map>
#include <string>

#include "inside.h"
#include "nccl.h"

namespace emulation {

struct shared_state;
using comm_ptr = std::shared_ptr<ncclComm>;

/* One transfer of an operation. */
struct transfer {
  enum { send, receive, all_gather, all_reduce, reduce_scatter } kind;
  const void *from;
  void *to;
  size_t count;
  ncclDataType_t type;
  ncclRedOp_t reduction;
  int peer; /* the peer of a send or receive */
};

/* Makes one operation from those calls of a group that are on one communicator and stream. */
work nccl_work(const comm_ptr &comm, std::vector<transfer> transfers);

/* Sets an error on all ranks: `code` on the culprit and ncclRemoteError on the others, or `code` on
 * all if `culprit` is NULL. Operations that have begun, or begin later, spin until their rank
 * aborts, as NCCL's kernels do. The caller holds the lock. */
void fail_ranks(shared_state &shared, ncclComm *culprit, ncclResult_t code);
/* Ends this rank's kernels, whatever they wait for. The other ranks notice that the rank is
 * gone. */
void abort_rank(ncclComm &comm);

size_t size_of(ncclDataType_t type);

/* Reduces the ranks' buffers element by element, in the order of the ranks. */
void reduce(void *to, const std::vector<const void *> &from, size_t count, ncclDataType_t type,
            ncclRedOp_t reduction);

/* An operation that has begun; it ends when all of its transfers have been matched. */
struct begun {
  operation_ptr self;
  const ncclComm *comm;
  size_t transfers;
  std::vector<int> awaited; /* [rank]: the number of transfers that wait for that rank */
};

struct posted {
  transfer what;
  int rank;
  std::shared_ptr<begun> by;
};

/* The arguments of a rank's ncclCommSplit or ncclCommShrink, and its result. */
struct choice {
  int color, key;
  bool blocking;
  comm_ptr made;
};
struct division {
  size_t present = 0, wanted = 0;
  std::vector<choice> choices; /* by the parent's rank */
};

/* A call of ncclCommWindowRegister, which all ranks make together. */
struct registration {
  size_t present = 0, size = 0;
  bool differs = false;
};

/* The state that the ranks of a communicator share. */
struct shared_state {
  std::vector<std::weak_ptr<ncclComm>> ranks;
  int joined = 0;
  bool failed = false;
  std::map<std::pair<int, int>, std::deque<posted>> sends, receives; /* keyed by (sender,
                                                                      * receiver) */
  std::map<long, std::vector<posted>> collectives;                   /* keyed by number */
  std::vector<std::shared_ptr<begun>> waiting;
  std::map<long, std::shared_ptr<division>>
      divisions; /* keyed by number; removed when all ranks have called */
  std::map<long, std::shared_ptr<registration>> registrations; /* as in `divisions` */
};

} // namespace emulation

struct ncclComm {
  std::shared_ptr<emulation::shared_state> shared;
  int rank, device;
  ncclResult_t error = ncclSuccess;
  bool breaks = false, blocking = true, finalized = false, aborted = false;
  int polled = 0; /* the number of threads in ncclCommGetAsyncError */
  long collectives = 0, splits = 0, registrations = 0;
  std::deque<emulation::operation_ptr> queued; /* enqueued and not begun */
  emulation::operation_ptr last; /* NCCL orders a communicator's operations across streams */
};

/* ---- Functions shared by the calls on communicators and the calls that create them ---- */

namespace emulation {

/* Returns the communicator of a handle, or NULL. The caller holds the lock. */
comm_ptr find_comm(ncclComm_t handle);

/* Stores the message for ncclGetLastError, and returns `code`. In a group, ncclGroupEnd returns
 * `code` again. */
ncclResult_t refuse(ncclResult_t code, const char *words);

/* Ends the process if the emulated NCCL is older than that version. */
void require_version(int version, const char *function);
/* Called when a communicator ends. An abort removes the communicator's windows. Otherwise no window
 * may be left. The caller holds the lock. */
void close_windows(ncclComm_t comm, bool abort);

/* Returns the result of a collective call: ncclSuccess, or ncclInProgress if the communicator is
 * nonblocking. */
ncclResult_t collective_result(const ncclComm &made);

/* True if the calling thread is between ncclGroupStart and ncclGroupEnd. */
bool in_group();
/* True if the calling thread's group contains calls that run at ncclGroupEnd. */
bool group_has_calls();
/* Called at the end of a group. run_deferred_waits waits until the group's communicators exist, and
 * returns the first error. drop_deferred_waits drops the waits instead. */
ncclResult_t run_deferred_waits();
void drop_deferred_waits();

} // namespace emulation

#endif
