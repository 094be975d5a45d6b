/* Transfers the bytes of messages over connections. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/error.h"
#include "base/memory.h"
#include "collectives/transports/sockets_state.h"

#define END_MAGIC 0x4542314fu /* the bytes "O1BE" */
/* The largest number of events handled at once, and of reads of one stream before the next stream
 * is read. */
#define EVENTS 64
#define READS  8
/* The longest wait in seconds; it is short, since another thread may handle the event that this
 * thread waits for. */
#define LONGEST_SLEEP 0.005

static bool is_control_stream(const struct ob_stream *stream) {
  return stream == &stream->link->streams[stream->link->sockets->streams];
}

/* --- The end of connections --------------------------------------------------------------------*/

static void stop_listening(struct ob_stream *stream) {
  if (!stream->ended)
    epoll_ctl(stream->link->sockets->events, EPOLL_CTL_DEL, stream->file, NULL);
  stream->ended = true;
}

/* Reads the note about the communicator's end that a rank has sent on its control connection. */
static void read_end_note(struct ob_stream *control) {
  struct ob_sockets_link *link = control->link;
  struct ob_end_note *note = &link->note;
  while (link->note_done < sizeof *note && !control->ended) {
    ssize_t got =
        recv(control->file, (char *)note + link->note_done, sizeof *note - link->note_done, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
      return;
    if (got <= 0)
      stop_listening(control);
    else
      link->note_done += (size_t)got;
  }
  stop_listening(control);
  note->text[sizeof note->text - 1] = '\0';
  if (link->note_done == sizeof *note && note->magic == END_MAGIC && link->sockets->comm)
    ob_comm_receive_end(link->sockets->comm, note->text);
}

static void lose_link(struct ob_sockets_link *link, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Marks a link as lost. The other rank may have sent the reason on the control connection. */
static void lose_link(struct ob_sockets_link *link, const char *format, ...) {
  struct ob_sockets *sockets = link->sockets;
  va_list arguments;
  if (link->lost)
    return;
  link->lost = sockets->any_lost = true;
  va_start(arguments, format);
  vsnprintf(link->why, sizeof link->why, format, arguments);
  va_end(arguments);
  for (int i = 0; i < sockets->streams; i++)
    stop_listening(&link->streams[i]);
  if (!link->streams[sockets->streams].ended)
    read_end_note(&link->streams[sockets->streams]);
}

static void end_stream(struct ob_stream *stream) {
  struct ob_sockets_link *link = stream->link;
  stop_listening(stream);
  link->ended++;
  if (link->ended == link->sockets->streams || stream->in_done || stream->in_left)
    lose_link(link, "it has closed its connections: its process has ended, or its communicator "
                    "has failed");
}

void ob_sockets_send_end_note(struct ob_sockets *sockets, const char *text) {
  struct ob_end_note note = {.magic = END_MAGIC};
  snprintf(note.text, sizeof note.text, "%s", text);
  for (int rank = 0; rank < sockets->size; rank++)
    if (rank != sockets->rank)
      (void)!send(sockets->links[rank].streams[sockets->streams].file, &note, sizeof note,
                  MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* --- Tags --------------------------------------------------------------------------------------*/

static onebit_status_t grow_tags(struct ob_sockets_link *link) {
  size_t capacity = link->tag_capacity ? 2 * link->tag_capacity : 16;
  struct ob_tag_count *larger = ob_allocate(capacity, sizeof *larger);
  if (!larger)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for %zu tags", capacity);
  if (link->tag_count)
    memcpy(larger, link->tags, link->tag_count * sizeof *larger);
  ob_release(link->tags);
  link->tags = larger;
  link->tag_capacity = capacity;
  return ONEBIT_OK;
}

/* Returns the index of the tag, or the index at which the tag has to be inserted. */
static size_t find_tag_index(const struct ob_sockets_link *link, int tag) {
  size_t low = 0, high = link->tag_count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (link->tags[middle].tag < tag)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

static onebit_status_t find_tag_count(struct ob_sockets_link *link, int tag,
                                      struct ob_tag_count **count) {
  size_t index = find_tag_index(link, tag);
  if (index == link->tag_count || link->tags[index].tag != tag) {
    if (link->tag_count == link->tag_capacity)
      OB_TRY(grow_tags(link));
    struct ob_tag_count *at = &link->tags[index];
    memmove(at + 1, at, (link->tag_count++ - index) * sizeof *at);
    *at = (struct ob_tag_count){.tag = tag};
  }
  *count = &link->tags[index];
  return ONEBIT_OK;
}

/* --- Sending -----------------------------------------------------------------------------------*/

static void close_outgoing(struct ob_outgoing *message) {
  --*message->open;
  message->open = NULL;
}

static void end_segment(struct ob_stream *stream) {
  struct ob_outgoing *message = stream->sending;
  stream->sending = NULL;
  if (--message->under_way == 0 && message->given == message->total)
    close_outgoing(message);
}

static void write_stream(struct ob_stream *stream) {
  const struct ob_segment *out = &stream->out;
  size_t head = sizeof *out, done = stream->out_done, past = done > head ? done - head : 0;
  struct iovec parts[2] = {
      {(char *)&stream->out + (done < head ? done : head), done < head ? head - done : 0},
      {(void *)(uintptr_t)(stream->sending->data + out->offset + past), out->bytes - past}};
  struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
  ssize_t sent = sendmsg(stream->file, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0 && errno != EAGAIN && errno != EINTR && errno != ENOBUFS) {
    lose_link(stream->link, "sending failed: %s", strerror(errno));
    return;
  }
  stream->out_done += sent > 0 ? (size_t)sent : 0;
  stream->blocked = stream->out_done < head + out->bytes;
  if (!stream->blocked)
    end_segment(stream);
}

/* Returns the number of streams of the link that carry messages. */
static int used_stream_count(const struct ob_sockets_link *link) {
  const bool all = link->round_trip >= OB_FAR_LINK || link->sockets->use_all;
  return all ? link->sockets->streams : 1;
}

static size_t link_min_share(const struct ob_sockets_link *link) {
  return link->round_trip >= OB_LONG_LINK ? OB_SHARE_MIN : OB_SEGMENT_MIN;
}

/* Chooses the stream for the next segment of the link's first message. A short message takes the
 * first free stream; the segments of a long message alternate between streams. */
static struct ob_stream *find_free_stream(struct ob_sockets_link *link) {
  int streams = used_stream_count(link);
  int from = link->first->total > link_min_share(link) ? link->turn : 0;
  for (int i = 0; i < streams; i++) {
    struct ob_stream *stream = &link->streams[(from + i) % streams];
    if (!stream->sending && !stream->blocked && !stream->ended)
      return stream;
  }
  return NULL;
}

static void assign_segment(struct ob_sockets_link *link, struct ob_stream *stream) {
  struct ob_outgoing *message = link->first;
  int streams = used_stream_count(link);
  size_t bytes = ob_segment_bytes(message->total, message->given, streams, link_min_share(link));
  if (bytes >= OB_SEGMENT_MIN)
    ob_stream_limit_unsent(stream);
  stream->out = (struct ob_segment){.number = message->number,
                                    .total = message->total,
                                    .offset = message->given,
                                    .bytes = (uint32_t)bytes,
                                    .tag = message->tag};
  ob_segment_seal(&stream->out);
  stream->out_done = 0;
  stream->sending = message;
  message->under_way++;
  message->given += bytes;
  link->turn = (int)(stream - link->streams + 1) % streams;
  if (message->given < message->total)
    return;
  link->first = message->next;
  if (!link->first)
    link->last = &link->first;
}

/* If the stream is blocked and has bytes to send, asks epoll to report when the stream can take
 * more bytes; otherwise cancels that request. */
static void watch_stream(struct ob_stream *stream) {
  bool wanted = stream->blocked && (stream->sending || stream->link->first);
  struct epoll_event event = {.events = EPOLLIN | (wanted ? EPOLLOUT : 0), .data.ptr = stream};
  if (wanted == stream->watched || stream->ended)
    return;
  epoll_ctl(stream->link->sockets->events, EPOLL_CTL_MOD, stream->file, &event);
  stream->watched = wanted;
}

static void push_segments(struct ob_sockets_link *link) {
  struct ob_stream *streams = link->streams, *next;
  int count = link->sockets->streams;
  for (int i = 0; i < count && !link->lost; i++)
    if (streams[i].sending && !streams[i].blocked)
      write_stream(&streams[i]);
  while (!link->lost && link->first && (next = find_free_stream(link))) {
    assign_segment(link, next);
    write_stream(next);
  }
  for (int i = 0; i < count; i++)
    watch_stream(&streams[i]);
}

onebit_status_t ob_sockets_send(struct ob_sockets_link *link, struct ob_outgoing *message,
                                int tag) {
  struct ob_tag_count *count;
  OB_TRY(find_tag_count(link, tag, &count));
  message->tag = tag;
  message->number = count->sent++;
  message->given = message->under_way = 0;
  message->next = NULL;
  *link->last = message;
  link->last = &message->next;
  push_segments(link);
  return ONEBIT_OK;
}

/* --- Receiving ---------------------------------------------------------------------------------*/

static struct ob_incoming **find_incoming(struct ob_sockets_link *link, int tag, uint64_t number) {
  struct ob_incoming **at = &link->incoming;
  while (*at && ((*at)->tag != tag || (*at)->number != number))
    at = &(*at)->next;
  return at;
}

static void unlink_incoming(struct ob_sockets_link *link, const struct ob_incoming *message) {
  struct ob_incoming **at = find_incoming(link, message->tag, message->number);
  if (*at)
    *at = message->next;
}

/* Makes streams that are reading segments of the message `from` store the remaining bytes in
 * `to`. */
static void redirect_streams(struct ob_sockets_link *link, const struct ob_incoming *from,
                             struct ob_incoming *to) {
  for (int i = 0; i < link->sockets->streams; i++)
    if (link->streams[i].arriving == from)
      link->streams[i].arriving = to;
}

static void complete_if_arrived(struct ob_sockets_link *link, struct ob_incoming *message) {
  if (message->arrived < message->total || !message->endpoint)
    return;
  message->endpoint->bytes = message->total;
  unlink_incoming(link, message);
  redirect_streams(link, message, NULL);
  --*message->open;
  message->open = NULL;
}

static bool check_message_fits(struct ob_sockets_link *link, const struct ob_incoming *receive,
                               size_t total) {
  if (total <= receive->endpoint->bytes)
    return true;
  lose_link(link, "it sent a message of %zu bytes, which is longer than expected, %zu", total,
            receive->endpoint->bytes);
  return false;
}

/* Allocates a message that has arrived before its receive was posted. */
static struct ob_incoming *keep_unexpected_message(struct ob_sockets_link *link,
                                                   const struct ob_segment *in) {
  struct ob_incoming *message = in->total < PTRDIFF_MAX - sizeof *message
                                    ? ob_allocate(1, sizeof *message + in->total)
                                    : NULL;
  if (!message) {
    lose_link(link, "this rank is out of memory for its message of %zu bytes", (size_t)in->total);
    return NULL;
  }
  *message = (struct ob_incoming){.data = (unsigned char *)(message + 1),
                                  .next = link->incoming,
                                  .total = in->total,
                                  .number = in->number,
                                  .tag = in->tag};
  link->incoming = message;
  return message;
}

/* Returns the message that a segment belongs to; NULL: the segment is discarded, or the link is
 * lost. */
static struct ob_incoming *find_segment_message(struct ob_sockets_link *link,
                                                const struct ob_segment *in) {
  struct ob_incoming *message = *find_incoming(link, in->tag, in->number);
  struct ob_tag_count *count;
  if (!message && find_tag_count(link, in->tag, &count) != ONEBIT_OK)
    lose_link(link, "%.120s", onebit_last_error());
  if (!message && !link->lost && in->number >= count->received)
    return keep_unexpected_message(link, in);
  if (!message)
    return NULL;
  if (message->total == OB_TOTAL_UNKNOWN && check_message_fits(link, message, in->total))
    message->total = in->total;
  else if (!link->lost &&
           (message->total != in->total || in->bytes > message->total - message->arrived))
    lose_link(link, "the headers of a message's segments differ: the connection is damaged");
  return link->lost ? NULL : message;
}

static void begin_segment(struct ob_stream *stream) {
  const struct ob_segment *in = &stream->in;
  stream->in_done = 0;
  if (!ob_segment_is_valid(in)) {
    lose_link(stream->link,
              "it sent data that is not a segment of a message: the connection is damaged");
    return;
  }
  stream->arriving = find_segment_message(stream->link, in);
  stream->in_left = in->bytes;
  stream->in_offset = in->offset;
  if (stream->arriving && in->bytes == 0)
    complete_if_arrived(stream->link, stream->arriving);
}

/* Counts received bytes: first those of the segment, then those of the next head. */
static void count_received(struct ob_stream *stream, size_t got) {
  size_t mine = got < stream->in_left ? got : stream->in_left;
  struct ob_incoming *message = stream->arriving;
  stream->in_left -= mine;
  stream->in_offset += mine;
  stream->in_done += got - mine;
  if (mine && message) {
    message->arrived += mine;
    if (stream->in_left == 0)
      stream->arriving = NULL;
    complete_if_arrived(stream->link, message);
  }
  if (stream->in_done == sizeof stream->in)
    begin_segment(stream);
}

/* Plans a read: the rest of a segment, and the head after it. Returns the number of bytes. */
static size_t plan_stream_read(struct ob_stream *stream, struct iovec parts[2], size_t *count) {
  size_t left = stream->in_left, bytes = left;
  *count = 0;
  if (left > 0 && stream->arriving)
    parts[(*count)++] = (struct iovec){stream->arriving->data + stream->in_offset, left};
  if (left > 0 && !stream->arriving) {
    bytes = left < OB_SEGMENT_MIN ? left : OB_SEGMENT_MIN;
    parts[(*count)++] = (struct iovec){stream->link->sockets->waste, bytes};
  }
  if (bytes < left)
    return bytes;
  parts[(*count)++] =
      (struct iovec){(char *)&stream->in + stream->in_done, sizeof stream->in - stream->in_done};
  return bytes + sizeof stream->in - stream->in_done;
}

static void read_stream(struct ob_stream *stream) {
  for (int reads = 0; reads < READS && !stream->ended; reads++) {
    struct iovec parts[2];
    struct msghdr message = {.msg_iov = parts};
    size_t count, wanted = plan_stream_read(stream, parts, &count);
    message.msg_iovlen = count;
    ssize_t got = recvmsg(stream->file, &message, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
      return;
    if (got < 0)
      lose_link(stream->link, "the connection has failed: %s", strerror(errno));
    else if (got == 0)
      end_stream(stream);
    else
      count_received(stream, (size_t)got);
    if ((size_t)got < wanted)
      return;
  }
}

/* Copies to a receive the part of its message that arrived before the receive was posted. */
static void adopt_early_message(struct ob_sockets_link *link, struct ob_incoming *receive,
                                struct ob_incoming *early) {
  unlink_incoming(link, early);
  if (check_message_fits(link, receive, early->total)) {
    memcpy(receive->data, early->data, early->total);
    receive->total = early->total;
    receive->arrived = early->arrived;
    redirect_streams(link, early, receive);
  } else {
    redirect_streams(link, early, NULL);
  }
  ob_release(early);
}

onebit_status_t ob_sockets_receive(struct ob_sockets_link *link, struct ob_incoming *receive,
                                   int tag) {
  struct ob_tag_count *count;
  OB_TRY(find_tag_count(link, tag, &count));
  receive->tag = tag;
  receive->number = count->received++;
  receive->total = OB_TOTAL_UNKNOWN;
  receive->arrived = 0;
  struct ob_incoming **at = find_incoming(link, tag, receive->number);
  if (*at)
    adopt_early_message(link, receive, *at);
  for (at = &link->incoming; *at;)
    at = &(*at)->next;
  *at = receive;
  receive->next = NULL;
  complete_if_arrived(link, receive);
  return ONEBIT_OK;
}

/* --- Cancelling --------------------------------------------------------------------------------*/

void ob_sockets_cancel_receive(struct ob_sockets_link *link, struct ob_incoming *receive) {
  if (!receive->open)
    return;
  unlink_incoming(link, receive);
  redirect_streams(link, receive, NULL);
  --*receive->open;
  receive->open = NULL;
}

void ob_sockets_cancel_send(struct ob_sockets_link *link, struct ob_outgoing *message) {
  if (!message->open)
    return;
  /* The rest of the message would be read from later bytes. */
  lose_link(link, "a send to it was cancelled, so the connection cannot be used any more");
  for (int i = 0; i < link->sockets->streams; i++)
    if (link->streams[i].sending == message)
      link->streams[i].sending = NULL;
  struct ob_outgoing **at = &link->first;
  while (*at && *at != message)
    at = &(*at)->next;
  if (*at)
    *at = message->next;
  for (link->last = &link->first; *link->last;)
    link->last = &(*link->last)->next;
  close_outgoing(message);
}

/* --- Moving ------------------------------------------------------------------------------------*/

static void handle_event(struct ob_stream *stream, uint32_t events) {
  if (stream->ended)
    return;
  if (is_control_stream(stream)) {
    read_end_note(stream);
    return;
  }
  if (events & (EPOLLIN | EPOLLHUP | EPOLLERR))
    read_stream(stream);
  if (events & EPOLLOUT && !stream->ended) {
    stream->blocked = false;
    push_segments(stream->link);
  }
}

void ob_sockets_move(struct ob_sockets *sockets, double seconds) {
  struct epoll_event events[EVENTS];
  double limit = seconds < LONGEST_SLEEP ? seconds : LONGEST_SLEEP;
  int wait = seconds > 0 ? 1 + (int)(limit * 1e3) : 0;
  if (wait)
    pthread_mutex_unlock(&sockets->lock);
  int count = epoll_wait(sockets->events, events, EVENTS, wait);
  if (wait)
    pthread_mutex_lock(&sockets->lock);
  for (int i = 0; i < count; i++)
    if (events[i].data.ptr == sockets)
      ob_sockets_refuse(sockets);
    else
      handle_event(events[i].data.ptr, events[i].events);
}
