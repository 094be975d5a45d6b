/*
 * A transport of stream sockets between processes, over the callbacks of onebit/custom.h: every
 * message is a length, a tag and its bytes. What arrives before anybody asks for it is kept in the
 * order of its coming. Here messages meet with faults on their way out.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "onebit/custom.h"
#include "tests/faults/faults.h"

#define CLOSED (-1000) /* minus the rank whose connection has ended */

struct letter {
  struct letter *next;
  int tag;
  size_t bytes, moved;
  double not_before; /* when it may leave */
  unsigned char *data;
};

struct head {
  uint64_t bytes;
  int64_t tag;
};

/* With one other rank. */
struct line {
  int file;
  bool closed;
  struct letter *out;     /* still to be sent; `data` begins with the head */
  struct letter *arrived; /* whole, and nobody has asked for them */
  struct letter *wanted;  /* receives, in the order of their beginning; `data` is the library's */
  struct head head;
  size_t head_bytes;
  struct letter *coming;
};

struct wire {
  struct participant *participant;
  struct line lines[RANKS];
  struct letter *done; /* receives that are complete, until they are tested */
};

static int ends[RANKS][RANKS]; /* rank a's end of its connection with rank b */

void sockets_open(void) {
  for (int a = 0; a < RANKS; a++)
    for (int b = a + 1; b < RANKS; b++) {
      int pair[2];
      if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair))
        exit(3);
      ends[a][b] = pair[0];
      ends[b][a] = pair[1];
    }
}

static void append(struct letter **list, struct letter *letter) {
  while (*list)
    list = &(*list)->next;
  letter->next = NULL;
  *list = letter;
}

static bool take(struct letter **list, const struct letter *letter) {
  while (*list && *list != letter)
    list = &(*list)->next;
  if (!*list)
    return false;
  *list = letter->next;
  return true;
}

static struct letter *new_letter(size_t bytes, int tag) {
  struct letter *letter = calloc(1, sizeof *letter);
  if (!letter)
    exit(3);
  letter->bytes = bytes;
  letter->tag = tag;
  return letter;
}

static struct letter *with_tag(struct letter *list, int tag) {
  while (list && list->tag != tag)
    list = list->next;
  return list;
}

/* A message for the first receive with its tag. */
static void hand_over(struct wire *wire, struct line *line, struct letter *message) {
  struct letter *wanted = with_tag(line->wanted, message->tag);
  if (!wanted) {
    append(&line->arrived, message);
    return;
  }
  take(&line->wanted, wanted);
  memcpy(wanted->data, message->data,
         message->bytes < wanted->bytes ? message->bytes : wanted->bytes);
  wanted->bytes = message->bytes;
  append(&wire->done, wanted);
  free(message->data);
  free(message);
}

/* --- Moving bytes */

static void send_some(struct line *line) {
  while (line->out && !line->closed && participant_clock() >= line->out->not_before) {
    struct letter *letter = line->out;
    ssize_t sent =
        send(line->file, letter->data + letter->moved, letter->bytes - letter->moved, MSG_NOSIGNAL);
    if (sent < 0) {
      line->closed = errno != EAGAIN && errno != EINTR;
      return;
    }
    letter->moved += (size_t)sent;
    if (letter->moved < letter->bytes)
      return;
    line->out = letter->next;
    free(letter->data);
    free(letter);
  }
}

static ssize_t read_some(struct line *line, void *to, size_t bytes) {
  ssize_t got = recv(line->file, to, bytes, 0);
  if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR))
    line->closed = true;
  return got > 0 ? got : 0;
}

static void receive_some(struct wire *wire, struct line *line) {
  while (!line->closed) {
    if (!line->coming) {
      line->head_bytes += (size_t)read_some(line, (char *)&line->head + line->head_bytes,
                                            sizeof line->head - line->head_bytes);
      if (line->head_bytes < sizeof line->head)
        return;
      line->coming = new_letter(line->head.bytes, (int)line->head.tag);
      line->coming->data = malloc(line->head.bytes + 1);
      line->head_bytes = 0;
    }
    struct letter *coming = line->coming;
    size_t left = coming->bytes - coming->moved;
    if (left)
      coming->moved += (size_t)read_some(line, coming->data + coming->moved, left);
    if (coming->moved < coming->bytes)
      return;
    line->coming = NULL;
    hand_over(wire, line, coming);
  }
}

static void move(struct wire *wire, double seconds) {
  struct pollfd files[RANKS];
  for (int rank = 0; rank < RANKS; rank++) {
    struct line *line = &wire->lines[rank];
    bool away = rank == wire->participant->rank || line->closed;
    bool sends = line->out && participant_clock() >= line->out->not_before;
    files[rank] =
        (struct pollfd){away ? -1 : line->file, (short)(POLLIN | (sends ? POLLOUT : 0)), 0};
  }
  poll(files, RANKS, seconds > 0 ? 1 + (int)(seconds * 1000) : 0);
  for (int rank = 0; rank < RANKS; rank++)
    if (rank != wire->participant->rank) {
      send_some(&wire->lines[rank]);
      receive_some(wire, &wire->lines[rank]);
    }
}

/* --- The callbacks */

static int send_message(void *context, const void *data, size_t bytes, int peer, int tag,
                        void **operation) {
  struct wire *wire = context;
  struct line *line = &wire->lines[peer];
  unsigned char *copy = malloc(sizeof(struct head) + bytes + 8);
  if (!copy)
    exit(3);
  memcpy(copy + sizeof(struct head), data, bytes);
  enum fate fate = strike_message(wire->participant, copy + sizeof(struct head), &bytes);
  const struct head head = {bytes, tag};
  memcpy(copy, &head, sizeof head);
  *operation = NULL;
  for (int times = fate == IS_LOST ? 0 : fate == GOES_TWICE ? 2 : 1; times; times--) {
    struct letter *letter = new_letter(sizeof head + bytes, tag);
    letter->data = malloc(letter->bytes);
    memcpy(letter->data, copy, letter->bytes);
    letter->not_before = fate == IS_HELD ? wire->participant->held_until : 0;
    append(&line->out, letter);
  }
  free(copy);
  send_some(line);
  return line->closed ? CLOSED - peer : 0;
}

static int receive_message(void *context, void *data, size_t bytes, int peer, int tag,
                           void **operation) {
  struct wire *wire = context;
  struct line *line = &wire->lines[peer];
  struct letter *wanted = new_letter(bytes, tag), *message = with_tag(line->arrived, tag);
  wanted->data = data;
  wanted->moved = (size_t)peer; /* of no other use in a receive */
  append(&line->wanted, wanted);
  if (message) {
    take(&line->arrived, message);
    hand_over(wire, line, message);
  }
  *operation = wanted;
  return 0;
}

static int test_message(void *context, void *operation, double seconds, size_t *bytes) {
  struct wire *wire = context;
  struct letter *wanted = operation;
  int peer = (int)wanted->moved;
  move(wire, 0);
  if (!take(&wire->done, wanted)) {
    if (wire->lines[peer].closed)
      return CLOSED - peer;
    if (seconds > 0)
      move(wire, seconds < 0.02 ? seconds : 0.02);
    if (!take(&wire->done, wanted))
      return ONEBIT_IN_PROGRESS;
  }
  *bytes = wanted->bytes;
  free(wanted);
  return 0;
}

static void cancel_message(void *context, void *operation) {
  struct wire *wire = context;
  struct letter *wanted = operation;
  if (!take(&wire->done, wanted))
    take(&wire->lines[wanted->moved].wanted, wanted);
  free(wanted);
}

static void close_all(void *context) {
  struct wire *wire = context;
  for (int rank = 0; rank < RANKS; rank++)
    if (rank != wire->participant->rank) {
      shutdown(wire->lines[rank].file, SHUT_RDWR);
      wire->lines[rank].closed = true;
    }
}

static const char *message_of(void *context, int code) {
  static _Thread_local char text[64];
  (void)context;
  snprintf(text, sizeof text, "the connection with rank %d has ended", CLOSED - code);
  return text;
}

static void move_on(void *context) { move(context, 0); }

/* What this rank still has to say is said before its connections end. */
static void release(void *context) {
  struct wire *wire = context;
  double until = participant_clock() + SHORT_PAUSE;
  for (int rank = 0; rank < RANKS; rank++)
    while (wire->lines[rank].out && !wire->lines[rank].closed && participant_clock() < until)
      move(wire, 0.001);
}

onebit_status_t connect_sockets(struct participant *participant, onebit_comm_t *comm) {
  static struct wire wire;
  onebit_transport_callbacks_t callbacks = ONEBIT_TRANSPORT_CALLBACKS_INIT;
  bool two = participant->scene->row.transport == TWO_HOSTS;
  wire.participant = participant;
  for (int rank = 0; rank < RANKS; rank++)
    wire.lines[rank].file = ends[participant->rank][rank];
  for (int a = 0; a < RANKS; a++)
    for (int b = 0; b < RANKS; b++)
      if (a != b && a != participant->rank)
        close(ends[a][b]); /* so that a rank's end is seen by the others */
  callbacks.context = &wire;
  callbacks.send = send_message;
  callbacks.receive = receive_message;
  callbacks.test = test_message;
  callbacks.cancel = cancel_message;
  callbacks.abort = close_all;
  callbacks.message = message_of;
  callbacks.progress = move_on;
  callbacks.release = release;
  callbacks.host = two && participant->rank >= RANKS / 2 ? "second" : "first";
  return onebit_comm_create_custom(&callbacks, participant->rank, RANKS, comm);
}
