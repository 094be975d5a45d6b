/* Allocates and closes the connections of a communicator, and adds open ones to it. */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "base/error.h"
#include "base/hash.h"
#include "base/lock.h"
#include "base/memory.h"
#include "base/process.h"
#include "collectives/transports/sockets_calls.h"
#include "collectives/transports/sockets_state.h"

/* The longest time in milliseconds until the system sends unacknowledged data again, an option of
 * Linux 6.15. Linux's own limit is two minutes; each outage of a host would then last up to two
 * minutes longer. */
#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44
#endif
#define RESEND_MS 3000

/* The seconds until an idle connection is probed. Routers forget idle connections, some after five
 * minutes, and an outer step may be idle for longer between exchanges. KEEP_PROBES is large, so
 * that keep-alive does not close connections to a host that does not answer: the timeout of the
 * communicator decides that. */
#define KEEP_IDLE   60
#define KEEP_PROBES 127
/* The time in milliseconds for which unacknowledged data is sent again, the same as for idle
 * connections. Without this option the system gives up after 15 attempts, which take 40 s with
 * RESEND_MS. */
#define GIVE_UP_MS (KEEP_IDLE * (KEEP_PROBES + 1) * 1000)

/* The largest number of reads, of OB_SEGMENT_MIN bytes each, that discard unread bytes before a
 * stream is closed. */
#define LAST_READS 64

static size_t stream_count(const struct ob_sockets *sockets) {
  return (size_t)sockets->size * ((size_t)sockets->streams + 1);
}

/* --- The communicators of this process ---------------------------------------------------------*/

static struct ob_sockets *first;
static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;

static void add_to_list(struct ob_sockets *sockets) {
  OB_LOCKED(&list_lock);
  sockets->next = first;
  first = sockets;
}

static void remove_from_list(struct ob_sockets *sockets) {
  OB_LOCKED(&list_lock);
  struct ob_sockets **at = &first;
  while (*at && *at != sockets)
    at = &(*at)->next;
  if (*at)
    *at = sockets->next;
}

bool ob_sockets_is_foreign(const struct ob_sockets *sockets) {
  return sockets->forks != ob_forks();
}

bool ob_sockets_is_member(const uint64_t key[2]) {
  bool found = false;
  OB_LOCKED(&list_lock);
  for (const struct ob_sockets *one = first; one; one = one->next)
    found |=
        one->comm && !ob_sockets_is_foreign(one) && memcmp(one->key, key, sizeof one->key) == 0;
  return found;
}

void ob_sockets_newest_key(uint64_t key[2]) {
  OB_LOCKED(&list_lock);
  for (const struct ob_sockets *one = first; one; one = one->next)
    if (one->comm && !ob_sockets_is_foreign(one)) {
      memcpy(key, one->key, sizeof one->key);
      break;
    }
}

static bool is_listening_at(const struct ob_sockets *sockets, const struct ob_address *at) {
  struct ob_address own;
  return !ob_sockets_is_foreign(sockets) && sockets->listener >= 0 &&
         ob_net_getsockname(sockets->listener, &own) == 0 &&
         ob_address_port(&own) == ob_address_port(at);
}

int ob_sockets_claim_listener(const struct ob_address *at) {
  int file = -1;
  pthread_mutex_lock(&list_lock);
  for (struct ob_sockets *one = first; one && file < 0; one = one->next) {
    pthread_mutex_lock(&one->lock);
    if (is_listening_at(one, at)) {
      file = one->listener;
      one->listener = -1;
      epoll_ctl(one->events, EPOLL_CTL_DEL, file, NULL);
    }
    pthread_mutex_unlock(&one->lock);
  }
  pthread_mutex_unlock(&list_lock);
  return file;
}

/* --- Connections ------------------------------------------------------------------------------*/

static void init_links(struct ob_sockets *sockets) {
  for (int rank = 0; rank < sockets->size; rank++) {
    struct ob_sockets_link *link = &sockets->links[rank];
    link->sockets = sockets;
    link->peer = rank;
    link->last = &link->first;
    link->streams = sockets->all_streams + (size_t)rank * ((size_t)sockets->streams + 1);
    for (int i = 0; i <= sockets->streams; i++)
      link->streams[i] = (struct ob_stream){.link = link, .file = -1};
  }
}

onebit_status_t ob_sockets_create(int rank, int size, int streams, struct ob_sockets **result) {
  struct ob_sockets *sockets = ob_allocate(1, sizeof *sockets);
  *result = NULL;
  if (!sockets)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a communicator");
  sockets->forks = ob_forks();
  sockets->listener = -1;
  sockets->rank = rank;
  sockets->size = size;
  sockets->streams = streams;
  pthread_mutex_init(&sockets->lock, NULL);
  add_to_list(sockets);
  sockets->events = ob_net_epoll_create();
  int code = sockets->events < 0 ? errno : 0;
  sockets->links = ob_allocate((size_t)size, sizeof *sockets->links);
  sockets->all_streams = ob_allocate(stream_count(sockets), sizeof *sockets->all_streams);
  if (sockets->events < 0 || !sockets->links || !sockets->all_streams) {
    if (sockets->all_streams)
      ob_release(sockets->all_streams);
    sockets->all_streams = NULL;
    ob_sockets_destroy(sockets);
    errno = code;
    return code ? ob_net_failed("epoll_create")
                : ob_error(ONEBIT_ERROR_MEMORY, "out of memory for the connections with %d ranks",
                           size);
  }
  init_links(sockets);
  *result = sockets;
  return ONEBIT_OK;
}

/* Closes a stream. Reads unread bytes first: if a stream is closed with unread bytes, the system
 * discards bytes that are still to be sent. */
static void close_stream(struct ob_sockets *sockets, struct ob_stream *stream) {
  if (stream->file < 0)
    return;
  for (int i = 0; i < LAST_READS; i++)
    if (recv(stream->file, sockets->waste, sizeof sockets->waste, MSG_DONTWAIT) <= 0)
      break;
  ob_own_close(stream->file);
}

/* Closes all connections. A forked child closes nothing: its copies of the files are closed
 * already, and their numbers may belong to other files now. */
void ob_sockets_destroy(struct ob_sockets *sockets) {
  if (!sockets || ob_sockets_is_foreign(sockets))
    return;
  remove_from_list(sockets);
  for (size_t i = 0; sockets->all_streams && i < stream_count(sockets); i++)
    close_stream(sockets, &sockets->all_streams[i]);
  for (int rank = 0; sockets->links && rank < sockets->size; rank++) {
    struct ob_sockets_link *link = &sockets->links[rank];
    for (struct ob_incoming *message = link->incoming, *next; message; message = next) {
      next = message->next;
      if (!message->endpoint)
        ob_release(message);
    }
    ob_release(link->tags);
  }
  ob_own_close(sockets->listener);
  ob_own_close(sockets->events);
  pthread_mutex_destroy(&sockets->lock);
  ob_release(sockets->links);
  ob_release(sockets->all_streams);
  ob_release(sockets);
}

/* Limits of a connection's unsent bytes, which it has accepted and not sent yet. These bytes cannot
 * move to another connection, so a slow connection must not have many of them when a message ends.
 * A fast connection must not run out of bytes before the rank writes to it again: 64 kB on each of
 * 8 connections take 4 ms at 1 Gbit/s. */
#define MIN_UNSENT     (16 << 10)
#define MAX_UNSENT     (64 << 10)
#define UNSENT_SECONDS 0.02

static void set_socket_option(int file, int level, int option, int value) {
  setsockopt(file, level, option, &value, sizeof value); /* a failure only makes messages slower */
}

/* Sets the options of a socket. The system chooses buffer sizes, and adapts them to the link; a
 * size that a program sets stays fixed, and is at most net.core.rmem_max. */
static void set_socket_options(int file) {
  set_socket_option(file, IPPROTO_TCP, TCP_NODELAY, 1);
  set_socket_option(file, IPPROTO_TCP, TCP_NOTSENT_LOWAT, MAX_UNSENT);
  set_socket_option(file, IPPROTO_TCP, TCP_RTO_MAX_MS, RESEND_MS);
  set_socket_option(file, IPPROTO_TCP, TCP_USER_TIMEOUT, GIVE_UP_MS);
  set_socket_option(file, IPPROTO_TCP, TCP_KEEPIDLE, KEEP_IDLE);
  set_socket_option(file, IPPROTO_TCP, TCP_KEEPINTVL, KEEP_IDLE);
  set_socket_option(file, IPPROTO_TCP, TCP_KEEPCNT, KEEP_PROBES);
  set_socket_option(file, SOL_SOCKET, SO_KEEPALIVE, 1);
}

void ob_stream_limit_unsent(struct ob_stream *stream) {
  struct tcp_info info;
  socklen_t bytes = sizeof info;
  if (getsockopt(stream->file, IPPROTO_TCP, TCP_INFO, &info, &bytes) < 0 || !info.tcpi_rtt)
    return;
  double window = (double)info.tcpi_snd_cwnd * info.tcpi_snd_mss;
  double unsent = window / (1e-6 * info.tcpi_rtt) * UNSENT_SECONDS;
  int wanted = unsent < MIN_UNSENT   ? MIN_UNSENT
               : unsent > MAX_UNSENT ? MAX_UNSENT
                                     : (int)unsent / MIN_UNSENT * MIN_UNSENT;
  if (wanted == stream->unsent)
    return;
  set_socket_option(stream->file, IPPROTO_TCP, TCP_NOTSENT_LOWAT, wanted);
  stream->unsent = wanted;
}

/* Returns a connection's round-trip time in microseconds. The connection must be new, so that no
 * queue adds to the time. If the time is not known, the link counts as far. */
static unsigned read_round_trip(int file) {
  struct tcp_info info;
  socklen_t bytes = sizeof info;
  return getsockopt(file, IPPROTO_TCP, TCP_INFO, &info, &bytes) < 0 ? OB_FAR_LINK : info.tcpi_rtt;
}

onebit_status_t ob_sockets_adopt(struct ob_sockets *sockets, int rank, int number, int file) {
  struct ob_stream *stream = &sockets->links[rank].streams[number];
  struct epoll_event event = {.events = EPOLLIN, .data.ptr = stream};
  set_socket_options(file);
  if (ob_net_epoll_add(sockets->events, file, &event) < 0)
    return ob_net_failed("epoll_ctl");
  stream->file = file;
  const unsigned round_trip = read_round_trip(file);
  if (round_trip > stream->link->round_trip)
    stream->link->round_trip = round_trip;
  return ONEBIT_OK;
}

/* --- Heads of segments, and where messages are cut ---------------------------------------------*/

#define SEGMENT_MAGIC 0x5342314fu /* the bytes "O1BS" */
#define SEGMENT_STEP  ((uint64_t)4096)

static uint32_t hash_segment(const struct ob_segment *segment) {
  size_t from = offsetof(struct ob_segment, number);
  return (uint32_t)ob_hash(OB_HASH_START, &segment->number, sizeof *segment - from);
}

void ob_segment_seal(struct ob_segment *segment) {
  segment->magic = SEGMENT_MAGIC;
  segment->check = hash_segment(segment);
}

bool ob_segment_is_valid(const struct ob_segment *segment) {
  return segment->magic == SEGMENT_MAGIC && segment->check == hash_segment(segment) &&
         segment->tag >= 0 && segment->total <= PTRDIFF_MAX && segment->bytes <= OB_SEGMENT_MAX &&
         segment->offset <= segment->total && segment->bytes <= segment->total - segment->offset &&
         (segment->bytes > 0 || segment->total == 0);
}

size_t ob_segment_bytes(uint64_t total, uint64_t given, int streams, size_t min_share) {
  uint64_t part = OB_SEGMENT_MAX, left = total - given;
  if (streams > 1)
    part = total / (2 * (uint64_t)streams) / SEGMENT_STEP * SEGMENT_STEP + SEGMENT_STEP;
  if (part < OB_SEGMENT_MIN) {
    part = total / (uint64_t)streams + 1;
    part = part < min_share ? min_share : part;
    part = part > OB_SEGMENT_MIN ? OB_SEGMENT_MIN : part;
  }
  part = part > OB_SEGMENT_MAX ? OB_SEGMENT_MAX : part;
  return (size_t)(left < part ? left : part);
}
