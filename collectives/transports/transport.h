/*
 * Transports move bytes between ranks. Each is a row of functions, declared below, in a file
 * of this folder; NCCL's is in cuda/. A transport never looks inside a message.
 *
 * Messages go in batches: sends and receives that begin together and are complete together. Between
 * two ranks, messages with the same tag arrive in the order they were sent, and are received in the
 * order the receives were begun.
 */
#ifndef OB_COLLECTIVES_TRANSPORT_H
#define OB_COLLECTIVES_TRANSPORT_H

#include <stdbool.h>
#include <stddef.h>

#include "onebit/communicator.h"

struct ob_endpoint {
  void *data;
  size_t bytes; /* bytes to send; capacity to receive, and once complete the bytes received */
  int peer;
};

/* The common part of the batches of all transports; a transport's own batch begins with it. */
struct ob_batch {
  onebit_comm_t comm;
  size_t capacity; /* sends, and as many receives */
  size_t sends, receives;
  /* Filled in before `begin`, which starts the first `sends` and `receives` of them. */
  struct ob_endpoint *send, *receive;
  void *messages; /* memory of the transport's: message_bytes for each send with a receive */
};

/* Returns the peer of message i of a batch: the receives come first, then the sends. */
static inline int ob_batch_peer(const struct ob_batch *batch, size_t i) {
  return i < batch->receives ? batch->receive[i].peer : batch->send[i - batch->receives].peer;
}

/* Memory of a device that the transport has registered for messages; a transport's own window
 * begins with it. */
struct ob_window {
  onebit_comm_t comm;
  unsigned char *memory;
  size_t used; /* bytes of it that are in use */
};

struct ob_transport {
  const char *name;
  bool (*threads)(void); /* whether several threads may use it at once. NULL: they may */
  bool host_messages;    /* it can move messages in memory of the host */
  /* True if it can also move messages in memory of a device, driven by the host. NULL: it
   * cannot. */
  bool (*device_messages)(void);
  bool network; /* messages take time, so plans choose their schedule by the cost model */
  size_t batch_bytes,
      message_bytes; /* of the transport's struct of a batch; of ob_batch.messages */
  /* Cancels a batch's incomplete messages, if it has begun, before it is destroyed; false: some
   * could not be. NULL: nothing to do. */
  bool (*cancel)(struct ob_batch *batch);
  onebit_status_t (*begin)(struct ob_batch *batch, int tag);
  /* Returns ONEBIT_OK when the whole batch is complete, else ONEBIT_IN_PROGRESS. Waits for about
   * `seconds` at most; 0: not at all. */
  onebit_status_t (*test)(struct ob_batch *batch, double seconds);
  /* Waits about `seconds` at most until a message has arrived for any batch of the communicator, or
   * can be sent. NULL: a thread can wait for one batch only. */
  void (*await)(onebit_comm_t comm, double seconds);
  /* Returns the first rank whose message has not arrived, or that has not taken its message; -1: no
   * rank. NULL: the transport does not know. */
  int (*peer_awaited)(struct ob_batch *batch);
  /* For messages in memory of a device: puts the batch on a stream, complete before the stream's
   * next operation begins. NULL: the transport moves messages of the host only. */
  onebit_status_t (*put)(struct ob_batch *batch, void *stream);
  /* Returns the communicator's stream on which messages may be put beside kernels. NULL: it has
   * none. */
  void *(*stream)(onebit_comm_t comm);
  /* Allocates memory, set to zero, for all messages that a plan puts on streams; all ranks ask for
   * the same number of bytes. *window is NULL if a window would not be faster. ONEBIT_ERROR_MEMORY.
   * NULL: the transport has no windows. */
  onebit_status_t (*window_create)(onebit_comm_t comm, size_t bytes, struct ob_window **window);
  /* Registers the window; collective, after all ranks have made theirs. */
  onebit_status_t (*window_register)(struct ob_window *window);
  void (*window_destroy)(struct ob_window *window);
  /* Fails unless the current device is the one whose memory the transport moves. NULL: any device
   * will do. */
  onebit_status_t (*check_current)(onebit_comm_t comm);
  /* Fails if the transport has found that its messages cannot end; also passes the other ranks'
   * text of `abort` to ob_comm_receive_end. NULL: errors are found at once. */
  onebit_status_t (*health)(onebit_comm_t comm);
  /* Tells the other ranks that the communicator is at its end, and why: once, from any thread.
   * NULL: there are no others. */
  void (*abort)(onebit_comm_t comm, const char *text);
  /* Makes a communicator of the remaining ranks (onebit_comm_shrink) after this one was aborted.
   * NULL: the transport cannot. */
  onebit_status_t (*shrink)(onebit_comm_t comm, onebit_comm_t *survivors);
  /* Lets the transport move its messages while the caller waits for something else. NULL: they move
   * by themselves. */
  void (*progress)(onebit_comm_t comm);
  /* Releases comm->state. NULL: there is none. */
  void (*destroy)(onebit_comm_t comm);
};

#ifdef ONEBIT_HAVE_NCCL
extern const struct ob_transport ob_transport_nccl;
#endif

extern const struct ob_transport ob_transport_self, ob_transport_loopback, ob_transport_mpi,
    ob_transport_sockets, ob_transport_custom;

/* Makes a batch of at most `capacity` sends and receives. ONEBIT_ERROR_MEMORY; *batch is then
 * NULL. */
onebit_status_t ob_batch_create(onebit_comm_t comm, size_t capacity, struct ob_batch **batch);
/* Destroys the batch and cancels its incomplete messages. Returns false if some could not be
 * cancelled: their memory must then stay as long as the process. NULL is fine. */
bool ob_batch_destroy(struct ob_batch *batch);

#endif
