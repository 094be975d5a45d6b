/*
 * Stream capture and graphs.
 */
#ifndef EMULATION_CAPTURE_H
#define EMULATION_CAPTURE_H

#include <thread>

#include "operations.h"

namespace emulation {

struct graph_node {
  work what;
  std::vector<size_t> after;
};

struct capture {
  stream_ptr origin;
  std::vector<stream_ptr> streams;
  std::vector<graph_node> nodes;
  cudaStreamCaptureMode mode;
  std::thread::id owner;
  bool invalid = false;
};

/* Enqueues the work after the stream's and `after`, or adds a node to the stream's capture. All
 * work on streams passes here. The caller holds the lock. */
cudaError_t submit(lock &held, const stream_ptr &stream, work what,
                   operation_ptr *submitted = nullptr, const operation_ptr &after = nullptr);

/* True if a graph, or its launched work, has calls on a communicator: NCCL waits for the graph's
 * end before it ends the communicator. The caller holds the lock. */
bool is_in_graph(const ncclComm *comm);

/* For calls that wait on a stream: an error, and the end of its capture. */
cudaError_t refuse_capturing(CUstream_st &stream);

/* Record and wait for events in a capture. */
cudaError_t record_in_capture(CUevent_st &event, const stream_ptr &stream);
cudaError_t wait_in_capture(const stream_ptr &stream, const CUevent_st &event);

} // namespace emulation

#endif
