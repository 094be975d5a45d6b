/*
 * Stream capture. Work on a captured stream, and on streams that events connect with it, becomes
 * nodes of a graph instead of running. When a graph is launched its nodes become operations,
 * ordered only by the edges of the graph.
 */
#include <algorithm>
#include <set>

#include "inside.h"

struct CUgraph_st {
  std::vector<emulation::graph_node> nodes;
};

struct CUgraphExec_st : CUgraph_st {
  emulation::operation_ptr last; /* of the previous launch: launches of one graph do not overlap */
};

namespace emulation {

namespace {

std::vector<std::shared_ptr<capture>> &captures() {
  static std::vector<std::shared_ptr<capture>> active;
  return active;
}

/* Returns all graphs: the captured graphs, and the executable graphs made from them. */
std::set<const CUgraph_st *> &graphs() {
  static std::set<const CUgraph_st *> all;
  return all;
}

bool has_calls(const std::vector<graph_node> &nodes, const ncclComm *comm) {
  return std::any_of(nodes.begin(), nodes.end(),
                     [=](const graph_node &node) { return node.what.comm == comm; });
}

template <typename graph> cudaError_t destroy(graph *unwanted) {
  lock held(guard());
  graphs().erase(unwanted);
  delete unwanted;
  wake_others();
  return cudaSuccess;
}

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

void join_capture(const stream_ptr &stream, const std::shared_ptr<capture> &into) {
  if (stream->capturing)
    return;
  stream->capturing = into;
  stream->capture_tail.clear();
  into->streams.push_back(stream);
}

void append_nodes(std::vector<size_t> &to, const std::vector<size_t> &more) {
  for (size_t node : more)
    if (std::find(to.begin(), to.end(), node) == to.end())
      to.push_back(node);
}

/* True if work on the stream would make the default stream wait for captured work. */
bool captured_implicitly(const CUstream_st &stream) {
  if (!stream.is_default)
    return false;
  for (const stream_ptr &other : streams_of(stream.device))
    if (other->blocking && other->capturing)
      return other->capturing->invalid = true;
  return false;
}

/* True if every node without a successor is among the last nodes of the origin stream. */
bool is_joined(const capture &all) {
  std::vector<bool> followed(all.nodes.size());
  for (const graph_node &node : all.nodes)
    for (size_t before : node.after)
      followed[before] = true;
  for (size_t node : all.origin->capture_tail)
    followed[node] = true;
  return std::find(followed.begin(), followed.end(), false) == followed.end();
}

cudaError_t begin_capture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  lock held(guard());
  stream_ptr stream = find_stream(handle);
  if (!stream)
    return cudaErrorInvalidResourceHandle;
  if (stream->is_default)
    return cudaErrorStreamCaptureUnsupported;
  if (stream->capturing)
    return cudaErrorIllegalState;
  auto begun = std::make_shared<capture>();
  begun->origin = stream;
  begun->mode = mode;
  begun->owner = std::this_thread::get_id();
  join_capture(stream, begun);
  captures().push_back(begun);
  return cudaSuccess;
}

cudaError_t end_capture(cudaStream_t handle, cudaGraph_t *graph) {
  lock held(guard());
  *graph = nullptr;
  stream_ptr stream = find_stream(handle);
  if (!stream)
    return cudaErrorInvalidResourceHandle;
  std::shared_ptr<capture> ended = stream->capturing;
  if (!ended)
    return cudaErrorIllegalState;
  if (ended->mode != cudaStreamCaptureModeRelaxed && ended->owner != std::this_thread::get_id())
    return cudaErrorStreamCaptureWrongThread;
  if (ended->origin != stream)
    return ended->invalid = true, cudaErrorStreamCaptureUnmatched;
  cudaError_t error = ended->invalid      ? cudaErrorStreamCaptureInvalidated
                      : is_joined(*ended) ? cudaSuccess
                                          : cudaErrorStreamCaptureUnjoined;
  for (const stream_ptr &member : ended->streams)
    member->capturing = nullptr;
  ended->streams.clear();
  captures().erase(std::find(captures().begin(), captures().end(), ended));
  if (!error)
    graphs().insert(*graph = new CUgraph_st{ended->nodes});
  return error;
}

cudaError_t launch_graph(CUgraphExec_st &graph, cudaStream_t handle) {
  lock held(guard());
  stream_ptr stream = find_stream(handle);
  if (!stream)
    return cudaErrorInvalidResourceHandle;
  if (stream->capturing) /* CUDA would insert the graph's nodes */
    return cudaErrorNotSupported;
  if (captured_implicitly(*stream))
    return cudaErrorStreamCaptureImplicit;
  operation_ptr entry = enqueue(held, stream, make_work([] {}), {graph.last});
  std::vector<operation_ptr> made;
  for (const graph_node &node : graph.nodes) {
    std::vector<operation_ptr> after{entry};
    for (size_t before : node.after)
      after.push_back(made[before]);
    made.push_back(add_node(node.what, std::move(after)));
  }
  graph.last = enqueue(held, stream, make_work([] {}), std::move(made));
  return cudaSuccess;
}

} // namespace

cudaError_t submit(lock &held, const stream_ptr &stream, work what, operation_ptr *submitted,
                   const operation_ptr &after) {
  if (captured_implicitly(*stream))
    return cudaErrorStreamCaptureImplicit;
  if (!stream->capturing) {
    operation_ptr added = enqueue(held, stream, std::move(what), {after});
    if (submitted)
      *submitted = added;
    return cudaSuccess;
  }
  if (stream->capturing->invalid)
    return cudaErrorStreamCaptureInvalidated;
  std::vector<graph_node> &nodes = stream->capturing->nodes;
  nodes.push_back({std::move(what), stream->capture_tail});
  stream->capture_tail = {nodes.size() - 1};
  return cudaSuccess;
}

bool is_in_graph(const ncclComm *comm) {
  for (const auto &active : captures())
    if (has_calls(active->nodes, comm))
      return true;
  return std::any_of(graphs().begin(), graphs().end(),
                     [=](const CUgraph_st *graph) { return has_calls(graph->nodes, comm); });
}

cudaError_t refuse_capturing(CUstream_st &stream) {
  if (captured_implicitly(stream))
    return cudaErrorStreamCaptureImplicit;
  if (!stream.capturing)
    return cudaSuccess;
  stream.capturing->invalid = true;
  return cudaErrorStreamCaptureUnsupported;
}

/* Follows CUDA's rule. The calling thread's own captures forbid the call unless they are relaxed.
 * Global captures of other threads forbid it unless this thread is relaxed. A relaxed thread may
 * make any call. */
cudaError_t refuse_in_capture() {
  cudaError_t error = cudaSuccess;
  for (const auto &active : captures()) {
    bool own = active->owner == std::this_thread::get_id();
    bool forbids = own ? active->mode != cudaStreamCaptureModeRelaxed
                       : active->mode == cudaStreamCaptureModeGlobal &&
                             thread_mode == cudaStreamCaptureModeGlobal;
    if (!forbids || thread_mode == cudaStreamCaptureModeRelaxed)
      continue;
    active->invalid = true;
    error = cudaErrorStreamCaptureUnsupported;
  }
  return error;
}

cudaError_t record_in_capture(CUevent_st &event, const stream_ptr &stream) {
  if (stream->capturing->invalid)
    return cudaErrorStreamCaptureInvalidated;
  event.captured = stream->capturing;
  event.capture_nodes = stream->capture_tail;
  return cudaSuccess;
}

cudaError_t wait_in_capture(const stream_ptr &stream, const CUevent_st &event) {
  if (!event.captured) {
    if (!event.recorded)
      return cudaSuccess;
    stream->capturing->invalid = true;
    return cudaErrorStreamCaptureIsolation;
  }
  if (std::find(captures().begin(), captures().end(), event.captured) == captures().end())
    return cudaErrorCapturedEvent;
  if (event.captured->invalid)
    return cudaErrorStreamCaptureInvalidated;
  if (stream->is_default)
    return event.captured->invalid = true, cudaErrorStreamCaptureImplicit;
  if (stream->capturing && stream->capturing != event.captured) {
    stream->capturing->invalid = event.captured->invalid = true;
    return cudaErrorStreamCaptureMerge;
  }
  join_capture(stream, event.captured);
  append_nodes(stream->capture_tail, event.capture_nodes);
  return cudaSuccess;
}

} // namespace emulation

using namespace emulation;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  return result(begin_capture(stream, mode));
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *pGraph) {
  return result(pGraph ? end_capture(stream, pGraph) : cudaErrorInvalidValue);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream,
                                  enum cudaStreamCaptureStatus *pCaptureStatus) {
  lock held(guard());
  stream_ptr found = find_stream(stream);
  if (!found || !pCaptureStatus)
    return result(found ? cudaErrorInvalidValue : cudaErrorInvalidResourceHandle);
  if (captured_implicitly(*found))
    return result(cudaErrorStreamCaptureImplicit);
  *pCaptureStatus = !found->capturing           ? cudaStreamCaptureStatusNone
                    : found->capturing->invalid ? cudaStreamCaptureStatusInvalidated
                                                : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  use_device();
  if (!mode)
    return result(cudaErrorInvalidValue);
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *pGraphExec, cudaGraph_t graph,
                                 unsigned long long) {
  if (!pGraphExec || !graph)
    return result(cudaErrorInvalidValue);
  lock held(guard());
  graphs().insert(*pGraphExec = new CUgraphExec_st{{graph->nodes}, nullptr});
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graphExec, cudaStream_t stream) {
  return result(graphExec ? launch_graph(*graphExec, stream) : cudaErrorInvalidValue);
}

/* Returns only the number of nodes; the nodes themselves are not available. */
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *numNodes) {
  if (!graph || !numNodes)
    return result(cudaErrorInvalidValue);
  if (nodes)
    return result(cudaErrorNotSupported);
  *numNodes = graph->nodes.size();
  return cudaSuccess;
}

/* Relies on the order of nodes: each node comes after the nodes that it depends on. */
long emulation_longest_chain(cudaGraph_t graph) {
  std::vector<long> chains;
  for (const graph_node &node : graph->nodes) {
    long before = 0;
    for (size_t other : node.after)
      before = std::max(before, chains[other]);
    chains.push_back(before + 1);
  }
  return chains.empty() ? 0 : *std::max_element(chains.begin(), chains.end());
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return destroy(graph); }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graphExec) { return destroy(graphExec); }
