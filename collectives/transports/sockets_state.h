/*
 * The state of a communicator over sockets (onebit/sockets.h).
 *
 * A message is sent in segments. A head precedes each segment; it has the message's tag, the
 * message's number among those with that tag between the two ranks, and the segment's offset in the
 * message. So segments may take any stream, and arrive in any order. Each two ranks have one more
 * connection, the control connection, which only carries the note about the communicator's end.
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

/* A long message is cut so that every stream gets two segments, within two limits. The smaller
 * limit is the number of bytes that a new connection may send at once (10 packets of 1460 bytes).
 * The larger one is long enough that sending it takes longer than the system call.
 *
 * If a message is too short for that, each stream gets one segment, its share of the message. On a
 * long link a share has at least OB_SHARE_MIN bytes, on other links at least OB_SEGMENT_MIN.
 * OB_SHARE_MIN bytes fit two packets, which Linux always passes on at once. It may send the next
 * ones later: BBR spreads them over a part of the round trip, and for 0.2 s in every 10 s it sends
 * only four packets per round trip. (Measured: 4 MiB in one bit on 4 hosts at 1 Gbit/s. With a
 * round trip of 80 ms calls take 85 ms in the mean and at most 88 ms; with OB_SEGMENT_MIN on all
 * links 110 to 128 ms and at most 410 ms with BBR, and 100 ms with CUBIC. With a round trip of 2 ms
 * shorter segments cost time: 8.4 ms instead of 6.7 ms.) */
#define OB_SHARE_MIN   ((size_t)2800)
#define OB_SEGMENT_MIN ((size_t)14 << 10)
#define OB_SEGMENT_MAX ((size_t)256 << 10)

struct ob_segment {
  uint32_t magic, check; /* check: a hash of the fields below */
  uint64_t number;       /* number of the message among the sender's messages with this tag */
  uint64_t total;        /* bytes of the message */
  uint64_t offset;       /* offset of the segment in the message */
  uint32_t bytes;        /* of the segment */
  int32_t tag;
};

/* Fills in the fields magic and check. */
void ob_segment_seal(struct ob_segment *segment);

/* True if the segment arrived unchanged and lies within its message. */
bool ob_segment_is_valid(const struct ob_segment *segment);

/* Returns the bytes of a message's next segment; its earlier segments have `given` bytes.
 * min_share: OB_SHARE_MIN on a long link, else OB_SEGMENT_MIN. */
size_t ob_segment_bytes(uint64_t total, uint64_t given, int streams, size_t min_share);

/* --- State -------------------------------------------------------------------------------------*/

/* A message that is being sent to a rank. */
struct ob_outgoing {
  struct ob_outgoing *next;
  const unsigned char *data;
  size_t total, given; /* bytes of the message, and of its segments assigned so far */
  uint64_t number;
  int tag;
  unsigned under_way; /* number of segments that a stream has and has not sent completely */
  size_t *open;       /* a counter of incomplete messages, or NULL */
};

/* A posted receive, or a message that arrived before its receive. */
struct ob_incoming {
  struct ob_incoming *next;
  unsigned char *data;
  struct ob_endpoint *endpoint; /* NULL: no receive was posted yet; this struct then owns `data` */
  size_t total, arrived;        /* bytes; total is OB_TOTAL_UNKNOWN before the first segment */
  uint64_t number;
  int tag;
  size_t *open; /* a counter of incomplete messages, as above */
};
#define OB_TOTAL_UNKNOWN SIZE_MAX

/* A connection. */
struct ob_stream {
  struct ob_sockets_link *link;
  int file;     /* -1: none */
  bool ended;   /* the other side has closed the stream */
  bool blocked; /* the stream's buffer is full, until the system reports space */
  bool watched; /* the system will report when the buffer has space */
  int unsent;   /* limit of unsent bytes that was set; 0: none was set yet */
  struct ob_outgoing *sending;
  struct ob_segment out, in;
  size_t out_done;           /* bytes of head and segment that were sent */
  size_t in_done;            /* bytes of the head that have arrived */
  size_t in_left, in_offset; /* bytes of the segment still to arrive; their offset in the message */
  struct ob_incoming *arriving; /* NULL: the bytes are discarded */
};

/* The number of messages with a tag that have begun so far. */
struct ob_tag_count {
  int tag;
  uint64_t sent, received;
};

/* The note about the communicator's end, sent once on the control connection. */
struct ob_end_note {
  uint32_t magic;
  char text[OB_END_BYTES];
};

/* Round-trip times in microseconds. From OB_FAR_LINK on, all streams carry messages: a connection
 * sends at most its window in one round trip, 4 MB by default, which is 16 Gbit/s at this time. On
 * nearer links more connections are no faster and take more system calls: 64 MiB at 1 Gbit/s took a
 * fifth longer over 16 connections than over one. From OB_LONG_LINK on, the streams share short
 * messages too: that saves 0.2 round trips, and takes up to 2 ms for the segments of 4 MiB in one
 * bit. */
#define OB_FAR_LINK  2000
#define OB_LONG_LINK 20000

/* The connections with one other rank. */
struct ob_sockets_link {
  struct ob_sockets *sockets;
  int peer;
  struct ob_stream *streams;         /* the control connection comes after them */
  struct ob_outgoing *first, **last; /* messages with segments that no stream has yet */
  struct ob_incoming *incoming;      /* in the order in which they were begun */
  struct ob_tag_count *tags;         /* ascending */
  size_t tag_count, tag_capacity;
  int turn;            /* the stream that gets the next segment first */
  int ended;           /* the number of streams that have ended */
  unsigned round_trip; /* microseconds, when the connections were new */
  bool lost;           /* messages can no longer be sent or received */
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
  onebit_comm_t comm; /* NULL until the communicator is created */
  pthread_mutex_t lock;
  int events; /* of epoll */
  bool any_lost;
  bool warned;                   /* a warning about a late rank was logged */
  bool use_all;                  /* all streams carry messages, even on a near link */
  struct ob_sockets_link *links; /* one for each rank */
  struct ob_stream *all_streams;
  unsigned char waste[OB_SEGMENT_MIN]; /* receives bytes that are discarded */
};

/* Allocates all links, none of whose connections is open yet. ONEBIT_ERROR_MEMORY: *sockets is
 * NULL. */
onebit_status_t ob_sockets_create(int rank, int size, int streams, struct ob_sockets **sockets);
/* Closes the open connections. NULL is fine. */
void ob_sockets_destroy(struct ob_sockets *sockets);

/* Adds an open nonblocking connection with a rank, as stream number `stream`; the last number is
 * the control connection. ONEBIT_ERROR_TRANSPORT: the system refuses; the caller still owns the
 * file. */
onebit_status_t ob_sockets_adopt(struct ob_sockets *sockets, int rank, int stream, int file);

/* True if this process was forked from the process that created the connections, so that they do
 * not belong to it. */
bool ob_sockets_is_foreign(const struct ob_sockets *sockets);

/* True if this process has a communicator with that key that has not been destroyed. */
bool ob_sockets_is_member(const uint64_t key[2]);

/* Gets the key of this process's newest communicator; zeros if it has none. */
void ob_sockets_newest_key(uint64_t key[2]);

/* Gives the listener to the communicator of rank 0 in a job without an exact name, which listens as
 * long as it exists. So ranks of another job that come later are refused, and do not join each
 * other at this port. */
void ob_sockets_keep_listener(struct ob_sockets *sockets, int listener);
/* Takes the listener at the address away from a communicator of this process. Returns -1 if none
 * has one there. */
int ob_sockets_claim_listener(const struct ob_address *at);
/* Refuses all ranks that are waiting at the listener. The caller holds the lock. */
void ob_sockets_refuse(struct ob_sockets *sockets);

/* Limits the connection's unsent bytes to the number that its speed needs. */
void ob_stream_limit_unsent(struct ob_stream *stream);

/* sockets_connect.c: finds the other ranks, and connects each with all others. Collective. `secret`
 * may be NULL. All ranks use the number of streams of rank 0. ONEBIT_ERROR_TRANSPORT, _ARGUMENT,
 * _MISMATCH, _MEMORY; *sockets is then NULL. */
onebit_status_t ob_sockets_connect(const onebit_sockets_options_t *options, double timeout,
                                   struct ob_sockets **sockets);

/* --- Transfers: sockets_move.c. The caller holds the lock. -------------------------------------*/

/* Sends and receives bytes as far as possible without blocking. If nothing can be transferred,
 * waits up to `seconds`, without the lock. */
void ob_sockets_move(struct ob_sockets *sockets, double seconds);

/* Begins a message to the link's rank; the caller has filled in `data` and `total`.
 * ONEBIT_ERROR_MEMORY. */
onebit_status_t ob_sockets_send(struct ob_sockets_link *link, struct ob_outgoing *message, int tag);

/* Begins a receive; the caller has filled in `endpoint` and `data`. ONEBIT_ERROR_MEMORY. */
onebit_status_t ob_sockets_receive(struct ob_sockets_link *link, struct ob_incoming *receive,
                                   int tag);

/* Cancel an incomplete send or receive. If bytes of the message may be missing, the link becomes
 * unusable. */
void ob_sockets_cancel_send(struct ob_sockets_link *link, struct ob_outgoing *message);
void ob_sockets_cancel_receive(struct ob_sockets_link *link, struct ob_incoming *receive);

/* Sends the other ranks the note about the communicator's end, with the reason `text`. */
void ob_sockets_send_end_note(struct ob_sockets *sockets, const char *text);

#endif
