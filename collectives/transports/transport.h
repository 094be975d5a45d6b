/*
 * Transports transfer messages between ranks. Each transport is a struct of functions, declared
 * below, in a file of this folder; that of NCCL is in cuda/. A transport never reads the contents
 * of a message.
 *
 * Messages are sent and received in batches. A batch has sends and receives that begin together; it
 * is complete when all of them are. Between two ranks, messages with the same tag arrive in the
 * order in which they were sent, and match receives in the order in which those were posted.
 */
#ifndef OB_COLLECTIVES_TRANSPORT_H
#define OB_COLLECTIVES_TRANSPORT_H

#include <stdbool.h>
#include <stddef.h>

#include "onebit/communicator.h"

struct ob_endpoint {
  void *data;
  size_t bytes; /* bytes to send; or the capacity, and once complete the bytes received */
  int peer;
};

/* The part of a batch that all transports have; a transport's own batch begins with it. */
struct ob_batch {
  onebit_comm_t comm;
  size_t capacity; /* the largest number of sends, and of receives */
  size_t sends, receives;
  /* The endpoints. The caller fills them in before `begin`, which starts the first `sends` and the
   * first `receives` of them. */
  struct ob_endpoint *send, *receive;
  void *messages; /* memory of the transport: message_bytes for each send and receive */
};

/* Returns the peer of message i of a batch; receives are numbered first, then sends. */
static inline int ob_batch_peer(const struct ob_batch *batch, size_t i) {
  return i < batch->receives ? batch->receive[i].peer : batch->send[i - batch->receives].peer;
}

/* Memory of a device that the transport has registered for messages. A transport's own window
 * struct begins with this one. */
struct ob_window {
  onebit_comm_t comm;
  unsigned char *memory;
  size_t used; /* bytes that are in use */
};

struct ob_transport {
  const char *name;
  bool (*threads)(void); /* true if several threads may call it at once. NULL: they may */
  bool host_messages;    /* it can transfer messages in host memory */
  /* Returns true if the host can also make it transfer messages in memory of a device. NULL: it
   * cannot. */
  bool (*device_messages)(void);
  bool network; /* messages take time, so plans use the cost model for their schedule */
  size_t batch_bytes, message_bytes; /* sizes: of the transport's own batch; of ob_batch.messages */
  /* Called before a batch is destroyed: cancels the batch's incomplete messages, if it has begun.
   * Returns false if some could not be cancelled. NULL: nothing to do. */
  bool (*cancel)(struct ob_batch *batch);
  onebit_status_t (*begin)(struct ob_batch *batch, int tag);
  /* Returns ONEBIT_OK when the whole batch is complete, until then ONEBIT_IN_PROGRESS. Waits at
   * most about `seconds`; with 0 it does not wait. */
  onebit_status_t (*test)(struct ob_batch *batch, double seconds);
  /* Waits at most about `seconds` until a message of any of the communicator's batches has arrived
   * or can be sent. NULL: a thread can wait for one batch only. */
  void (*await)(onebit_comm_t comm, double seconds);
  /* Returns the rank of the batch's first incomplete message; -1: none is incomplete. NULL: the
   * transport does not know. */
  int (*peer_awaited)(struct ob_batch *batch);
  /* For messages in memory of a device: enqueues the batch on a stream; the stream's next operation
   * begins after the batch is complete. NULL: the transport only transfers messages in host
   * memory. */
  onebit_status_t (*put)(struct ob_batch *batch, void *stream);
  /* Returns a stream of the communicator on which messages can run beside kernels. NULL: it has
   * none. */
  void *(*stream)(onebit_comm_t comm);
  /* Allocates memory, set to zero, for all messages that a plan puts on streams. All ranks request
   * the same number of bytes. *window is NULL if a window would not be faster. ONEBIT_ERROR_MEMORY.
   * NULL: the transport has no windows. */
  onebit_status_t (*window_create)(onebit_comm_t comm, size_t bytes, struct ob_window **window);
  /* Registers the window. Collective; called after all ranks have allocated theirs. */
  onebit_status_t (*window_register)(struct ob_window *window);
  void (*window_destroy)(struct ob_window *window);
  /* Fails if the current device is not the one whose memory the transport uses. NULL: any device is
   * possible. */
  onebit_status_t (*check_current)(onebit_comm_t comm);
  /* Fails if the transport has found that its messages cannot complete. Also passes on to
   * ob_comm_receive_end the text that another rank gave to `abort`. NULL: errors are found at
   * once. */
  onebit_status_t (*health)(onebit_comm_t comm);
  /* Tells the other ranks, once, that the communicator has ended, and the reason; any thread may
   * call it. NULL: there are no other ranks. */
  void (*abort)(onebit_comm_t comm, const char *text);
  /* Creates a communicator of the surviving ranks (onebit_comm_shrink) after this communicator was
   * aborted. NULL: the transport cannot. */
  onebit_status_t (*shrink)(onebit_comm_t comm, onebit_comm_t *survivors);
  /* Advances the transport's messages while the caller waits for something else. NULL: they advance
   * by themselves. */
  void (*progress)(onebit_comm_t comm);
  /* Releases comm->state. NULL: it has none. */
  void (*destroy)(onebit_comm_t comm);
};

#ifdef ONEBIT_HAVE_NCCL
extern const struct ob_transport ob_transport_nccl;
#endif

extern const struct ob_transport ob_transport_self, ob_transport_loopback, ob_transport_mpi,
    ob_transport_sockets, ob_transport_custom;

/* Creates a batch of at most `capacity` sends and as many receives. ONEBIT_ERROR_MEMORY: *batch is
 * NULL. */
onebit_status_t ob_batch_create(onebit_comm_t comm, size_t capacity, struct ob_batch **batch);
/* Destroys the batch and cancels its incomplete messages. Returns false if some could not be
 * cancelled; their memory must then stay allocated until the process ends. NULL is fine. */
bool ob_batch_destroy(struct ob_batch *batch);

#endif
