/*
 * The state of a communicator over sockets (onebit/sockets.h).
 *
 * A message travels in segments, each behind a head that says which message it belongs to, the n-th
 * with that tag between the two ranks, and where in it: so segments may take any stream, and arrive
 * in any order. One more connection of each two ranks, with nothing else on it, tells of the
 * end.
 */
#ifndef OB_COLLECTIVES_SOCKETS_STATE_H
#define OB_COLLECTIVES_SOCKETS_STATE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "collectives/communicator.h"
#include "collectives/transports/sockets_address.h"
#include "onebit/sockets.h"

/* --- Messages in segments: sockets_segment.c ---------------------------------------------------*/

/* A message is cut so that every stream gets two segments of it, within these: the smaller one is
 * what a new connection may send at once (10 packets of 1460 bytes), the larger one is long enough
 * to hide the call that it takes. */
#define OB_SEGMENT_MIN ((size_t)14 << 10)
#define OB_SEGMENT_MAX ((size_t)256 << 10)

struct ob_segment {
  uint32_t magic, check; /* of what follows */
  uint64_t number;       /* of the message, among those with its tag from that rank */
  uint64_t total;        /* bytes of the message */
  uint64_t offset;       /* of the segment in it */
  uint32_t bytes;        /* of the segment */
  int32_t tag;
};

/* Fills in what is not the caller's: magic and check. */
void ob_segment_seal(struct ob_segment *segment);

/* True if the segment came as it was sent, and lies in its message. */
bool ob_segment_is_valid(const struct ob_segment *segment);

/* Bytes of the next segment of a message, of which `given` bytes are in others. */
size_t ob_segment_bytes(uint64_t total, uint64_t given, int streams);

/* --- State -------------------------------------------------------------------------------------*/

/* A message on its way to a rank. */
struct ob_outgoing {
  struct ob_outgoing *next;
  const unsigned char *data;
  size_t total, given; /* bytes; of them, those that streams have got */
  uint64_t number;
  int tag;
  unsigned under_way; /* segments that streams have not sent yet */
  size_t *open;       /* counts messages that are not complete; NULL: this one is */
};

/* A receive, or a message that nobody has asked for yet. */
struct ob_incoming {
  struct ob_incoming *next;
  unsigned char *data;
  struct ob_endpoint *endpoint; /* NULL: nobody has asked for it; `data` is then its own */
  size_t total, arrived;        /* bytes; total is OB_TOTAL_UNKNOWN before the first segment */
  uint64_t number;
  int tag;
  size_t *open; /* as above */
};
#define OB_TOTAL_UNKNOWN SIZE_MAX

/* A connection. */
struct ob_stream {
  struct ob_sockets_link *link;
  int file;     /* -1: none */
  bool ended;   /* nothing comes any more */
  bool blocked; /* takes nothing until the system says so */
  bool watched; /* the system is to say so */
  int unsent;   /* bytes that it takes besides those under way; 0: as it began */
  struct ob_outgoing *sending;
  struct ob_segment out, in;
  size_t out_done;              /* bytes of head and segment that are sent */
  size_t in_done;               /* bytes of the head that have come */
  size_t in_left, in_offset;    /* bytes of the segment that are still to come; where they go */
  struct ob_incoming *arriving; /* NULL: what comes is thrown away */
};

/* The number of messages with a tag that were begun so far. */
struct ob_tag_count {
  int tag;
  uint64_t sent, received;
};

/* On the control connection, once: the end, and why. */
struct ob_end_note {
  uint32_t magic;
  char text[OB_END_BYTES];
};

/* With one other rank. */
struct ob_sockets_link {
  struct ob_sockets *sockets;
  int peer;
  struct ob_stream *streams;         /* and behind them the control connection */
  struct ob_outgoing *first, **last; /* not yet given to streams in full */
  struct ob_incoming *incoming;      /* in the order of their beginning */
  struct ob_tag_count *tags;         /* ascending */
  size_t tag_count, tag_capacity;
  int turn;  /* the stream that the next segment is offered to first */
  int ended; /* streams */
  bool far;  /* one connection may not fill the way to it */
  bool lost; /* nothing can come or go any more */
  char why[160];
  struct ob_end_note note;
  size_t note_done;
};

struct ob_sockets {
  struct ob_sockets *next; /* of this process */
  unsigned forks;          /* ob_forks() of the process that made it */
  uint64_t key[2];         /* the same on all ranks, and another in each communicator */
  int listener;            /* rank 0's, of a job that others could be taken for; -1: none */
  int rank, size, streams;
  onebit_comm_t comm; /* NULL until it is made */
  pthread_mutex_t lock;
  int events; /* of epoll */
  bool any_lost;
  bool warned;                   /* of a rank that came to the listener */
  bool use_all;                  /* all streams carry messages, also where a link is not far */
  struct ob_sockets_link *links; /* one a rank */
  struct ob_stream *all_streams;
  unsigned char waste[OB_SEGMENT_MIN]; /* what is thrown away */
};

/* Memory for all connections, none of which is made yet. ONEBIT_ERROR_MEMORY; *sockets is NULL. */
onebit_status_t ob_sockets_create(int rank, int size, int streams, struct ob_sockets **sockets);
/* Closes what is open. NULL is fine. */
void ob_sockets_destroy(struct ob_sockets *sockets);

/* A connection with a rank, which does not block: number `stream`, the last of which is the control
 * connection. ONEBIT_ERROR_TRANSPORT: the system refuses; the file is still the caller's. */
onebit_status_t ob_sockets_adopt(struct ob_sockets *sockets, int rank, int stream, int file);

/* True if this process was forked from the one that made it: the connections are not its own. */
bool ob_sockets_is_foreign(const struct ob_sockets *sockets);

/* True if this process has made a communicator with that key, and not destroyed it. */
bool ob_sockets_is_member(const uint64_t key[2]);

/* The key of the newest one of this process; zeros: it has none. */
void ob_sockets_newest_key(uint64_t key[2]);

/* Rank 0 keeps the port of a job without an exact name while the communicator is there: ranks of
 * another job, which come later, are refused and not joined by each other. */
void ob_sockets_keep_listener(struct ob_sockets *sockets, int listener);
/* Takes the listener at the address from a communicator of this process. -1: none has one. */
int ob_sockets_claim_listener(const struct ob_address *at);
/* Refuses all who have come. The lock is held. */
void ob_sockets_refuse(struct ob_sockets *sockets);

/* Lets the connection take as much as its speed asks for. */
void ob_stream_limit_unsent(struct ob_stream *stream);

/* Collective, sockets_connect.c: finds the other ranks, and connects all with all. `secret` NULL:
 * none. Rank 0's number of streams counts. ONEBIT_ERROR_TRANSPORT, _ARGUMENT, _MISMATCH, _MEMORY;
 * *sockets is then NULL. */
onebit_status_t ob_sockets_connect(const onebit_sockets_options_t *options, double timeout,
                                   struct ob_sockets **sockets);

/* --- Moving: sockets_move.c. The lock is held. ------------------------------------------------*/

/* Moves what can be moved. Waits up to `seconds` for that, without the lock. */
void ob_sockets_move(struct ob_sockets *sockets, double seconds);

/* Begins a message to the link's rank: data and total are filled in. ONEBIT_ERROR_MEMORY. */
onebit_status_t ob_sockets_send(struct ob_sockets_link *link, struct ob_outgoing *message, int tag);

/* Begins a receive: the endpoint and data are filled in. ONEBIT_ERROR_MEMORY. */
onebit_status_t ob_sockets_receive(struct ob_sockets_link *link, struct ob_incoming *receive,
                                   int tag);

/* Forgets one that is not complete. Without a message the link is of no use any more. */
void ob_sockets_cancel_send(struct ob_sockets_link *link, struct ob_outgoing *message);
void ob_sockets_cancel_receive(struct ob_sockets_link *link, struct ob_incoming *receive);

/* Tells the others of the end. */
void ob_sockets_tell(struct ob_sockets *sockets, const char *text);

#endif
