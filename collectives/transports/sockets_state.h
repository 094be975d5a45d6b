/*
 * The state of a communicator over sockets (onebit/sockets.h).
 *
 * A message travels in segments, each behind a head that says which message it belongs to, the n-th
 * with that tag between the two ranks, and where in it: so segments may take any stream, and arrive
 * in any order. One more connection between each two ranks, the control connection, only carries
 * the note about the end.
 */
#ifndef OB_COLLECTIVES_SOCKETS_STATE_H
#define OB_COLLECTIVES_SOCKETS_STATE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "collectives/communicator.h"
#include "collectives/transports/sockets_calls.h"
#include "onebit/sockets.h"

/* --- Messages in segments ----------------------------------------------------------------------*/

/* A message is cut so that every stream gets two segments of it, within these: the smaller one is
 * what a new connection may send at once (10 packets of 1460 bytes), the larger one is long enough
 * to hide the call that it takes. */
#define OB_SEGMENT_MIN ((size_t)14 << 10)
#define OB_SEGMENT_MAX ((size_t)256 << 10)

struct ob_segment {
  uint32_t magic, check; /* check: a hash of the fields below */
  uint64_t number;       /* the message's number among those with its tag from that rank */
  uint64_t total;        /* bytes of the message */
  uint64_t offset;       /* offset of the segment in the message */
  uint32_t bytes;        /* of the segment */
  int32_t tag;
};

/* Fills in the fields magic and check. */
void ob_segment_seal(struct ob_segment *segment);

/* True if the segment arrived unchanged and lies within its message. */
bool ob_segment_is_valid(const struct ob_segment *segment);

/* Returns the bytes of a message's next segment; `given` bytes are in earlier ones. */
size_t ob_segment_bytes(uint64_t total, uint64_t given, int streams);

/* --- State -------------------------------------------------------------------------------------*/

/* A message on its way to a rank. */
struct ob_outgoing {
  struct ob_outgoing *next;
  const unsigned char *data;
  size_t total, given; /* bytes of the message; bytes that streams have taken */
  uint64_t number;
  int tag;
  unsigned under_way; /* segments that streams have not sent yet */
  size_t *open;       /* counts incomplete messages, this one included; or NULL */
};

/* A posted receive, or a message that arrived before its receive. */
struct ob_incoming {
  struct ob_incoming *next;
  unsigned char *data;
  struct ob_endpoint *endpoint; /* NULL: no receive has asked for it; `data` is then its own */
  size_t total, arrived;        /* bytes; total is OB_TOTAL_UNKNOWN before the first segment */
  uint64_t number;
  int tag;
  size_t *open; /* counts incomplete messages, as above */
};
#define OB_TOTAL_UNKNOWN SIZE_MAX

/* A connection. */
struct ob_stream {
  struct ob_sockets_link *link;
  int file;     /* -1: none */
  bool ended;   /* the other side has closed the stream */
  bool blocked; /* the stream's buffer is full until the system reports otherwise */
  bool watched; /* the system reports when there is space again */
  int unsent;   /* the limit of unsent bytes that was set; 0: the initial one */
  struct ob_outgoing *sending;
  struct ob_segment out, in;
  size_t out_done;           /* sent bytes of head and segment */
  size_t in_done;            /* bytes of the head that have arrived */
  size_t in_left, in_offset; /* bytes of the segment still to arrive; their offset in the message */
  struct ob_incoming *arriving; /* NULL: the bytes are discarded */
};

/* The number of messages with a tag that were begun so far. */
struct ob_tag_count {
  int tag;
  uint64_t sent, received;
};

/* The note on the control connection about the end, sent once. */
struct ob_end_note {
  uint32_t magic;
  char text[OB_END_BYTES];
};

/* The connections with one other rank. */
struct ob_sockets_link {
  struct ob_sockets *sockets;
  int peer;
  struct ob_stream *streams;         /* and after them the control connection */
  struct ob_outgoing *first, **last; /* messages that are not yet completely given to streams */
  struct ob_incoming *incoming;      /* in the order in which they were begun */
  struct ob_tag_count *tags;         /* ascending */
  size_t tag_count, tag_capacity;
  int turn;  /* the stream that gets the next segment first */
  int ended; /* the number of streams that have ended */
  bool far;  /* a single connection may not fill the link */
  bool lost; /* neither direction works any more */
  char why[160];
  struct ob_end_note note;
  size_t note_done;
};

struct ob_sockets {
  struct ob_sockets *next; /* the next communicator of this process */
  unsigned forks;          /* ob_forks() of the process that made it */
  uint64_t key[2];         /* the same on all ranks, different in each communicator */
  int listener;            /* on rank 0 of a job without an exact name; -1: none */
  int rank, size, streams;
  onebit_comm_t comm; /* NULL until it is made */
  pthread_mutex_t lock;
  int events; /* of epoll */
  bool any_lost;
  bool warned;                   /* a warning about a late rank was logged */
  bool use_all;                  /* all streams carry messages, even on a near link */
  struct ob_sockets_link *links; /* one a rank */
  struct ob_stream *all_streams;
  unsigned char waste[OB_SEGMENT_MIN]; /* receives bytes that are discarded */
};

/* Allocates all connections; none is open yet. ONEBIT_ERROR_MEMORY; *sockets is NULL. */
onebit_status_t ob_sockets_create(int rank, int size, int streams, struct ob_sockets **sockets);
/* Closes the open connections. NULL is fine. */
void ob_sockets_destroy(struct ob_sockets *sockets);

/* Adopts a nonblocking connection with a rank: number `stream`, the last of which is the control
 * connection. ONEBIT_ERROR_TRANSPORT: the system refuses; the file is still the caller's. */
onebit_status_t ob_sockets_adopt(struct ob_sockets *sockets, int rank, int stream, int file);

/* True if this process was forked from the one that created the connections, so that they are not
 * its own. */
bool ob_sockets_is_foreign(const struct ob_sockets *sockets);

/* True if this process has a communicator with that key that was not destroyed. */
bool ob_sockets_is_member(const uint64_t key[2]);

/* Gets the key of this process's newest communicator; zeros: it has none. */
void ob_sockets_newest_key(uint64_t key[2]);

/* Rank 0 keeps the port of a job without an exact name as long as the communicator: ranks of
 * another job that come later are refused, and do not join each other there. */
void ob_sockets_keep_listener(struct ob_sockets *sockets, int listener);
/* Takes the listener at the address from a communicator of this process. -1: none has one. */
int ob_sockets_claim_listener(const struct ob_address *at);
/* Refuses all ranks that have come. The caller holds the lock. */
void ob_sockets_refuse(struct ob_sockets *sockets);

/* Limits the unsent bytes of the connection to those that its speed needs. */
void ob_stream_limit_unsent(struct ob_stream *stream);

/* sockets_connect.c: finds the other ranks, and connects all with all; collective. `secret` may be
 * NULL. The number of streams is rank 0's. ONEBIT_ERROR_TRANSPORT, _ARGUMENT, _MISMATCH, _MEMORY;
 * *sockets is then NULL. */
onebit_status_t ob_sockets_connect(const onebit_sockets_options_t *options, double timeout,
                                   struct ob_sockets **sockets);

/* --- Moving: sockets_move.c. The lock is held. ------------------------------------------------*/

/* Sends and receives bytes as far as possible; waits up to `seconds` for that, without the lock. */
void ob_sockets_move(struct ob_sockets *sockets, double seconds);

/* Begins a message to the link's rank; the caller has filled in data and total.
 * ONEBIT_ERROR_MEMORY. */
onebit_status_t ob_sockets_send(struct ob_sockets_link *link, struct ob_outgoing *message, int tag);

/* Begins a receive; the caller has filled in the endpoint and data. ONEBIT_ERROR_MEMORY. */
onebit_status_t ob_sockets_receive(struct ob_sockets_link *link, struct ob_incoming *receive,
                                   int tag);

/* Cancel an incomplete send or receive. A link that has lost a message is unusable. */
void ob_sockets_cancel_send(struct ob_sockets_link *link, struct ob_outgoing *message);
void ob_sockets_cancel_receive(struct ob_sockets_link *link, struct ob_incoming *receive);

/* Sends the other ranks the note about the end. */
void ob_sockets_send_end_note(struct ob_sockets *sockets, const char *text);

#endif
