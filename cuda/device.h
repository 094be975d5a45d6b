/*
 * The device part of a plan, and host code that the files of this folder share. If CUDA fails, the
 * functions return ONEBIT_ERROR_DEVICE with CUDA's message.
 */
#ifndef OB_CUDA_DEVICE_H
#define OB_CUDA_DEVICE_H

#include "collectives/plan_private.h"
#include "cuda/enter.h"
#include "cuda/kernels.h"

/* The streams and events of a staged plan, and the host's copies of the device's state: one copy
 * for each slot of messages, and one for the scales of a whole call. */
struct ob_staging {
  cudaStream_t compute, out, in; /* kernels; copies to the host; copies from it */
  cudaEvent_t computed, copied_in;
  cudaEvent_t *ready;         /* slots + 1: copies to the host are complete */
  struct ob_cuda_state *seen; /* slots + 1, pinned: the states that were copied with them */
};

/* The number of chunks in a host's window of inputs: one chunk is added up while the next
 * arrives. */
#define OB_WINDOW_CHUNKS 2

/* The device's state if the ranks of a host share memory (staging.c). */
struct ob_staged_host {
  size_t registered; /* number of shared memory blocks registered with CUDA */
  size_t applied;    /* number of the call's chunks whose results are being applied */
  cudaEvent_t inputs_copied[OB_WINDOW_CHUNKS]; /* a chunk of inputs is in this rank's block */
  struct ob_cuda_state *seen;                  /* pinned; per chunk: the state after its kernel */
};

/* The device's state for exchanges inside a host (device_host.c). The window has this rank's inputs
 * of all segments (outgoing), and all ranks' inputs of the segments that this rank sends to other
 * hosts (incoming). */
struct ob_device_host {
  unsigned char *outgoing, *incoming;
  float *mean; /* scratch: a chunk of the host's inputs, by member */
  /* Descriptions for kernels: of the window for filling it (window) and for adding it up (host),
   * and of all ranks' results. */
  struct ob_cuda_plan window, host, results;
  struct ob_batch *batch; /* messages inside the host */
  struct ob_staged_host staged;
};

/* The stream for messages that overlap with kernels (see below); NULL if no messages do. */
struct ob_overlap {
  cudaStream_t stream;  /* for messages; belongs to the communicator */
  cudaEvent_t computed; /* the kernels before the next message */
  cudaEvent_t *moved;   /* one per slot: the slot's latest batch */
};

struct ob_device {
  int number;                 /* of the CUDA device */
  struct ob_cuda_plan kernel; /* the plan as kernels get it */
  struct ob_piece *pieces;
  size_t *bounds;
  struct ob_device_host host; /* for a hierarchical plan */
  cudaEvent_t started;        /* the end of earlier work on the caller's stream */
  struct ob_staging staging;  /* staged.c */
  struct ob_overlap overlap;
  /* stream.c */
  cudaStream_t own;    /* for calls without a stream */
  cudaStream_t stream; /* of the call in flight */
  bool capturing;      /* that stream is capturing a graph */
  cudaEvent_t reached; /* messages are ready, for a transport that the host drives */
  bool sealed;      /* kernels that seal the next messages are queued, and `reached` after them */
  cudaEvent_t last; /* the end of the latest call on any stream */
  struct ob_cuda_state *seen; /* pinned: the state, with the outcome of calls */
  bool has_sealed;            /* a message of the call in flight has been sealed */
  /* Received messages that must be opened before anything depends on them; NULL: none. */
  const struct ob_cuda_plan *unopened;
  enum ob_message_kind unopened_kind;
  size_t unopened_chunk;
};

/* ob_memory_cuda.allocate, and ob_cuda_copy_array, only begin to fill memory, on the default
 * stream. A function that creates an object therefore ends with ob_cuda_settle, which waits until
 * the memory is filled. */
extern const struct ob_memory ob_memory_cuda, ob_memory_pinned;

/* Allocates an array on the current device, and copies `values` of the host into it. Returns NULL
 * when out of memory. */
void *ob_cuda_copy_array(const void *values, size_t count, size_t size);

/* Waits until the memory that this thread has allocated is filled. This wait is needed because the
 * library's streams are not ordered after the default stream. */
onebit_status_t ob_cuda_settle(void);

#define OB_TRY_CUDA(call)                                                                          \
  do {                                                                                             \
    cudaError_t ob_try_error = (call);                                                             \
    if (ob_try_error != cudaSuccess)                                                               \
      return ob_cuda_error(ob_try_error, #call);                                                   \
  } while (0)

onebit_status_t ob_cuda_error(cudaError_t error, const char *call);

/* Makes the plan's device current. */
int ob_device_enter(const struct onebit_plan *plan);

/* Gets the current device, if the kernels can run there. Returns ONEBIT_ERROR_UNSUPPORTED if the
 * device is too old, or if there is no device. */
onebit_status_t ob_cuda_current_device(int *number);

/* Creates plan->device, on the current device. */
onebit_status_t ob_device_open(struct onebit_plan *plan);

/* Creates the kernels' plan. `mirrors`: messages are in host memory, and the device gets its own
 * memory for copies of them. ob_device_destroy frees plan->device too. */
onebit_status_t ob_device_create(struct onebit_plan *plan, bool mirrors);
void ob_device_destroy(struct onebit_plan *plan, bool mirrors);

/* These functions fail unless the buffer is in memory of the right device: the plan's
 * (ob_device_check, the executor's check), device `number` (ob_cuda_check), or the current one
 * (ob_cuda_check_current). */
onebit_status_t ob_device_check(const struct onebit_plan *plan, const char *name,
                                const void *buffer);
onebit_status_t ob_cuda_check(int number, const char *name, const void *buffer);
onebit_status_t ob_cuda_check_current(const char *name, const void *buffer);

bool ob_cuda_is_capturing(cudaStream_t stream);

/* Fails unless work for the plan's device can be put on this stream. */
onebit_status_t ob_device_check_stream(const struct onebit_plan *plan, cudaStream_t stream);

/* Returns the number of chunks for a plan on a device (device.c). */
size_t ob_device_chunks(const struct onebit_plan *plan, size_t elements);

/* Returns cudaErrorNotReady until the event has been reached; with `wait`, waits for the event. */
static inline cudaError_t ob_cuda_reach(cudaEvent_t event, bool wait) {
  return wait ? cudaEventSynchronize(event) : cudaEventQuery(event);
}

static inline void ob_cuda_destroy_event(cudaEvent_t event) {
  if (event)
    cudaEventDestroy(event);
}

static inline void ob_cuda_destroy_stream(cudaStream_t stream) {
  if (stream)
    cudaStreamDestroy(stream);
}

/* Describes the inputs of the call in flight for kernels. */
struct ob_cuda_source ob_device_source(const struct onebit_plan *plan);

/* Returns the kernels' description of an optimizer's pass (optimizer.c). */
struct ob_cuda_pass ob_device_pass(const struct ob_pass_sink *sink);

/* Create and destroy the part for exchanges inside a host: after ob_device_create, before
 * ob_device_destroy. */
onebit_status_t ob_device_host_create(struct onebit_plan *plan);
void ob_device_host_destroy(const struct onebit_plan *plan);

/* Must be called at the beginning of a collective call, or of the call's first step. */
void ob_device_host_begin(const struct onebit_plan *plan);

/* Compresses a chunk of the host's inputs into messages for the other hosts. */
cudaError_t ob_device_host_compress(const struct onebit_plan *plan, size_t chunk,
                                    cudaStream_t stream);

/* Returns how many bytes of a hierarchical plan's results lie before the results of its own
 * group. */
size_t ob_device_results_offset(const struct onebit_plan *plan);

/* Returns the kernels' plan of all ranks' results. */
const struct ob_cuda_plan *ob_device_results(const struct onebit_plan *plan);

/* These functions launch the kernels of a step on a stream. */
cudaError_t ob_device_compress(const struct onebit_plan *plan, size_t chunk, cudaStream_t stream);
cudaError_t ob_device_reduce(const struct onebit_plan *plan, size_t chunk, cudaStream_t stream);
cudaError_t ob_device_apply(const struct onebit_plan *plan, size_t chunk, cudaStream_t stream);

/* Applies a result that is a mean of members' messages. */
cudaError_t ob_device_apply_sum(const struct onebit_plan *plan, size_t chunk, cudaStream_t stream);

/*
 * ---- Staged plans (staging.c, staged.c) ----
 *
 * These functions create and destroy the staging of a plan on a device, and make its copies.
 */

/* Create and destroy the plan's device part, which has copies of messages (mirrors). Both are
 * functions of the executor. */
onebit_status_t ob_staging_create(struct onebit_plan *plan);
void ob_staging_destroy(struct onebit_plan *plan);

/* Makes the next sends wait for all kernels launched so far. */
onebit_status_t ob_staging_mark_computed(struct ob_staging *staging);

/* These functions copy to the host: a chunk of the messages to all servers; a chunk of this rank's
 * result; the state. After the copy of the state the event of `index` is recorded, which is reached
 * when all these copies are complete. */
onebit_status_t ob_staging_send_outgoing(const struct onebit_plan *plan, size_t chunk);
onebit_status_t ob_staging_send_result(const struct onebit_plan *plan, size_t chunk);
onebit_status_t ob_staging_send_state(const struct onebit_plan *plan, size_t index);

/* These functions copy from the host, before the next kernels: a chunk of the workers' messages; a
 * chunk of all results. */
onebit_status_t ob_staging_load_incoming(const struct onebit_plan *plan, size_t chunk);
onebit_status_t ob_staging_load_results(const struct onebit_plan *plan, size_t chunk);

/* Returns true if there is nothing more to wait for: a query or a wait has returned an error other
 * than cudaErrorNotReady. An error other than cudaSuccess fails the call. */
bool ob_staged_is_over(const struct onebit_plan *plan, cudaError_t error);

/* Fails the call, unless the status is ONEBIT_OK: after a failure this rank only tells the other
 * ranks that it cannot take part. */
void ob_staged_fail(const struct onebit_plan *plan, onebit_status_t status);

/* Sets the call's flags from a state that the device has sent. */
void ob_staged_read_flags(const struct onebit_plan *plan, const struct ob_cuda_state *seen);

/* Registers with CUDA the memory that the ranks of a host share, once it is attached, so that
 * copies from and to it do not block. Does nothing unless the plan is hierarchical. */
onebit_status_t ob_staged_host_register(const struct onebit_plan *plan);

/* Must be called at the beginning of every collective call. */
void ob_staged_host_begin(const struct onebit_plan *plan);

/* Steps inside a host (collectives/steps.h). */
ob_step_run ob_staged_host_put, ob_staged_host_barrier;

/* Copies a chunk of the host's inputs to the device and compresses it. */
onebit_status_t ob_staged_host_compress(const struct onebit_plan *plan, size_t chunk);

/* Returns the address of this rank's result of the call in flight, in the host's geometry or in the
 * device's. */
unsigned char *ob_staging_result(const struct onebit_plan *plan, const struct ob_geometry *geometry,
                                 size_t chunk);

/*
 * ---- Plans on streams (stream.c, stream_messages.c, calls.c) ----
 *
 * The steps among the members of a group are in stream.c, those among the ranks of a host in
 * stream_messages.c.
 */

/* Seals the messages of a chunk (stamps their headers), unless the kernel that makes them does so
 * (ob_cuda_can_seal). After a failure it tries again with a stamp that reports the failure, since
 * other ranks wait for the message. */
void ob_stream_seal(const struct onebit_plan *plan, const struct ob_cuda_plan *messages,
                    size_t chunk, enum ob_message_kind kind);

/* ob_stream_note_arrival notes that the messages of a chunk have arrived; the kernel that reads
 * them may open them too. ob_stream_open opens messages that are not open yet, for a step that
 * needs their flags. */
void ob_stream_note_arrival(const struct onebit_plan *plan, const struct ob_cuda_plan *messages,
                            size_t chunk, enum ob_message_kind kind);
void ob_stream_open(const struct onebit_plan *plan);

/* Decides how the call continues after a step with this status. Returns false if the step has to
 * wait. */
bool ob_stream_end_batch(const struct onebit_plan *plan, onebit_status_t status);

/* Create and destroy the part for messages inside a host, if the plan is hierarchical: after
 * ob_device_create, before ob_device_destroy. */
onebit_status_t ob_stream_host_create(struct onebit_plan *plan);
void ob_stream_host_destroy(const struct onebit_plan *plan);

/* Steps inside a host (collectives/steps.h). */
ob_step_run ob_stream_host_put, ob_stream_host_barrier, ob_stream_host_publish, ob_stream_host_wait;

/* Functions of the executor (calls.c). ob_stream_is_settled returns true if the last call is over,
 * and sets its outcome; ob_stream_note_import is called after the host has imported residuals,
 * which may be large; ob_stream_accept is the executor's part of ob_plan_accept. */
bool ob_stream_is_settled(const struct onebit_plan *plan, bool wait);
onebit_status_t ob_stream_note_import(const struct onebit_plan *plan);
onebit_status_t ob_stream_accept(const struct onebit_plan *plan);

/* Returns the rank that `origin` of a state identifies. */
int ob_stream_origin(const struct onebit_plan *plan, int32_t origin);

/*
 * ---- Messages beside kernels (stream_messages.c) ----
 *
 * A plan of several chunks over a transport that puts messages on streams (NCCL) puts them on a
 * second stream, which belongs to the communicator. A message follows all kernels that were put
 * before it. A kernel follows a message only if it reads that message, so that chunk i + 1 is
 * compressed while chunk i is sent.
 *
 *   stream of the call   C0 . C1 . C2 ...  r0 R0 . r1 R1 . ...
 *   messages             .  E0 . E1 . E2 ...     . G0 .  G1 ...
 *
 * In a graph the same events are a fork and a join. A plan of one chunk has nothing to overlap:
 * its messages are put on the stream of the call.
 */

onebit_status_t ob_overlap_create(struct onebit_plan *plan);
void ob_overlap_destroy(const struct onebit_plan *plan);

/* Enqueues a batch of a chunk's messages, which begins after the kernels enqueued so far. Returns
 * errors of the transport. */
onebit_status_t ob_overlap_put(const struct onebit_plan *plan, struct ob_batch *batch,
                               size_t chunk);

/* Makes the next work on the call's stream follow the latest batch of a chunk. */
onebit_status_t ob_overlap_join(const struct onebit_plan *plan, size_t chunk);

#endif
