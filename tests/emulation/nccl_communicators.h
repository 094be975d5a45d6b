/*
 * The common part of NCCL's calls on communicators and the calls that make them.
 */
#ifndef EMULATION_NCCL_COMMUNICATORS_H
#define EMULATION_NCCL_COMMUNICATORS_H

#include "nccl_meeting.h"

namespace emulation {

/* Returns the communicator of a handle, or none. The caller holds the lock. */
comm_ptr find_comm(ncclComm_t handle);

/* Keeps the message for ncclGetLastError, and returns the error; so does the end of a group. */
ncclResult_t refuse(ncclResult_t code, const char *words);

/* Ends the process if the emulated NCCL is older than that version. */
void must_be_there(int version, const char *function);
/* A communicator ends: an abort takes its windows along, else there may be none. With the lock. */
void close_windows(ncclComm_t comm, bool abort);

/* The result of a call that the ranks make together, which a rank that does not wait must be able
 * to get. */
ncclResult_t answer(const ncclComm &made);

/* True if the calling thread is between ncclGroupStart and ncclGroupEnd. */
bool in_group();
/* True if calls wait for the end of its group. */
bool group_has_calls();
/* At the end of a group: waits until the communicators that it makes are there, and returns the
 * first error; or gives them up. */
ncclResult_t arrive_all();
void forget_arrivals();

} // namespace emulation

#endif
