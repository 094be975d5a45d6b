/* Measures what plain TCP carries between two hosts. */
#define _GNU_SOURCE /* accept4 */
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "base/process.h"
#include "tools/doctor/doctor.h"

#define SEND_SECONDS  0.3
#define RECEIVE_LIMIT 10.0 /* what is in the kernel's buffers drains at 10 Mbit/s in four */
enum {
  CONNECT_LIMIT = 2, /* seconds, after which a connection that a firewall drops is given up */
  PIECE = 256 << 10  /* what one call moves at most: a few of the kernel's buffers, so that a
                          stream that is ready does not keep the others waiting */
};

static struct sockaddr_in place_of_rank(uint32_t address, uint16_t port) {
  struct sockaddr_in result = {.sin_family = AF_INET, .sin_port = htons(port)};
  result.sin_addr.s_addr = htonl(address);
  return result;
}

/* Opens a socket at an address of this host; connect and accept give up in time. */
static int open_socket(uint32_t own) {
  struct sockaddr_in address = place_of_rank(own, 0);
  struct timeval sending = {.tv_sec = CONNECT_LIMIT}, receiving = {.tv_sec = CONNECT_LIMIT + 1};
  int end = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (end >= 0 && (setsockopt(end, SOL_SOCKET, SO_SNDTIMEO, &sending, sizeof sending) != 0 ||
                   setsockopt(end, SOL_SOCKET, SO_RCVTIMEO, &receiving, sizeof receiving) != 0 ||
                   bind(end, (struct sockaddr *)&address, sizeof address) != 0)) {
    close(end);
    end = -1;
  }
  return end;
}

int doctor_listen(uint32_t address, uint16_t *port) {
  struct sockaddr_in bound;
  socklen_t length = sizeof bound;
  int listener = open_socket(address);
  if (listener >= 0 && (listen(listener, DOCTOR_STREAMS) != 0 ||
                        getsockname(listener, (struct sockaddr *)&bound, &length) != 0)) {
    close(listener);
    listener = -1;
  }
  *port = listener >= 0 ? ntohs(bound.sin_port) : 0;
  return listener;
}

/* Closes what is open, and makes the ends of `streams` connections: to a peer, or from a listener.
 * False where one of them cannot be made. */
static bool tcp_open_all(struct pollfd *ends, int streams, int listener, uint32_t own,
                         struct sockaddr_in peer) {
  bool good = true;
  for (int i = 0; i < streams; i++) {
    int end = !good           ? -1
              : listener >= 0 ? accept4(listener, NULL, NULL, SOCK_CLOEXEC)
                              : open_socket(own);
    ends[i] = (struct pollfd){.fd = end, .events = listener >= 0 ? POLLIN : POLLOUT};
    good = good && end >= 0 &&
           (listener >= 0 || connect(end, (struct sockaddr *)&peer, sizeof peer) == 0);
  }
  return good;
}

static void close_all(const struct pollfd *ends, int streams) {
  for (int i = 0; i < streams; i++)
    if (ends[i].fd >= 0)
      close(ends[i].fd);
}

static bool wait_for_any(struct pollfd *ends, int streams, double deadline) {
  return ob_seconds() < deadline && poll(ends, (nfds_t)streams, 100) >= 0;
}

void doctor_send(uint32_t own, uint32_t address, uint16_t port, int streams) {
  static const char piece[PIECE];
  struct pollfd ends[DOCTOR_STREAMS];
  bool connected = tcp_open_all(ends, streams, -1, own, place_of_rank(address, port));
  double deadline = ob_seconds() + SEND_SECONDS;
  while (connected && wait_for_any(ends, streams, deadline))
    for (int i = 0; i < streams; i++)
      if (ends[i].revents)
        send(ends[i].fd, piece, PIECE, MSG_NOSIGNAL | MSG_DONTWAIT);
  close_all(ends, streams);
}

/* Receives. The clock starts with the first bytes, which are not counted, and stops with the
 * last. */
double doctor_receive(int listener, int streams) {
  static char piece[PIECE];
  struct pollfd ends[DOCTOR_STREAMS];
  int open = tcp_open_all(ends, streams, listener, 0, place_of_rank(0, 0)) ? streams : 0;
  double deadline = ob_seconds() + RECEIVE_LIMIT, start = 0, last = 0, bytes = 0;
  while (open > 0 && wait_for_any(ends, streams, deadline))
    for (int i = 0; i < streams; i++) {
      ssize_t got = ends[i].revents ? recv(ends[i].fd, piece, PIECE, MSG_DONTWAIT) : -1;
      if (got > 0) {
        last = ob_seconds();
        bytes += start > 0 ? (double)got : 0;
        start = start > 0 ? start : last;
      } else if (ends[i].revents && (got == 0 || (errno != EAGAIN && errno != EINTR))) {
        close(ends[i].fd);
        ends[i].fd = -1; /* poll passes over it */
        open--;
      }
    }
  close_all(ends, streams);
  close(listener);
  return last > start && start > 0 ? 8e-9 * bytes / (last - start) : 0;
}
