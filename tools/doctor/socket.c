/* Plain TCP between two hosts, without MPI: what the network itself carries. */
#define _GNU_SOURCE /* accept4 */
#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tools/doctor/doctor.h"

enum { MOST_STREAMS = 1 << (DOCTOR_STREAMS - 1) };

static struct sockaddr_in address_of(uint32_t address, uint16_t port) {
  struct sockaddr_in result = {.sin_family = AF_INET, .sin_port = htons(port)};
  result.sin_addr.s_addr = htonl(address);
  return result;
}

static int open_socket(uint32_t own) {
  struct sockaddr_in address = address_of(own, 0);
  int end = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (end >= 0 && bind(end, (struct sockaddr *)&address, sizeof address) != 0) {
    close(end);
    end = -1;
  }
  return end;
}

static void close_all(int streams, const int *sockets) {
  for (int i = 0; i < streams; i++)
    if (sockets[i] >= 0)
      close(sockets[i]);
}

int doctor_listen(uint32_t address, uint16_t *port) {
  struct sockaddr_in bound;
  socklen_t length = sizeof bound;
  int listener = open_socket(address);
  if (listener < 0)
    return -1;
  if (listen(listener, MOST_STREAMS) != 0 ||
      getsockname(listener, (struct sockaddr *)&bound, &length) != 0) {
    close(listener);
    return -1;
  }
  *port = ntohs(bound.sin_port);
  return listener;
}

/* Whether the event comes before the deadline, a doctor_now(). */
static bool wait_for(int end, short event, double deadline) {
  struct pollfd poller = {.fd = end, .events = event};
  double left = deadline - doctor_now();
  return left > 0 && poll(&poller, 1, (int)(left * 1000) + 1) == 1 && (poller.revents & event) != 0;
}

static bool connect_one(int end, uint32_t address, uint16_t port, double deadline) {
  struct sockaddr_in peer = address_of(address, port);
  int error = 0;
  socklen_t length = sizeof error;
  if (connect(end, (struct sockaddr *)&peer, sizeof peer) == 0)
    return true;
  return errno == EINPROGRESS && wait_for(end, POLLOUT, deadline) &&
         getsockopt(end, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0;
}

bool doctor_connect(uint32_t own, uint32_t address, uint16_t port, int streams, double limit,
                    int *sockets) {
  double deadline = doctor_now() + limit;
  for (int i = 0; i < streams; i++) {
    sockets[i] = open_socket(own);
    if (sockets[i] < 0 || !connect_one(sockets[i], address, port, deadline)) {
      close_all(i + 1, sockets);
      return false;
    }
  }
  return true;
}

bool doctor_accept(int listener, int streams, double limit, int *sockets) {
  double deadline = doctor_now() + limit;
  for (int i = 0; i < streams; i++) {
    sockets[i] = wait_for(listener, POLLIN, deadline)
                     ? accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)
                     : -1;
    if (sockets[i] < 0) {
      close_all(i, sockets);
      return false;
    }
  }
  return true;
}

/* What one call sends or receives at most: a few of the kernel's buffers, so that a stream that is
 * ready does not keep the others waiting. */
enum { PIECE = 256 << 10 };

static void fill_pollers(struct pollfd *pollers, int streams, const int *sockets, short event) {
  for (int i = 0; i < streams; i++)
    pollers[i] = (struct pollfd){.fd = sockets[i], .events = event};
}

void doctor_send_for(double seconds, int streams, int *sockets) {
  struct pollfd pollers[MOST_STREAMS];
  char *piece = calloc(1, PIECE);
  double end = doctor_now() + seconds;
  fill_pollers(pollers, streams, sockets, POLLOUT);
  while (piece && doctor_now() < end && poll(pollers, (nfds_t)streams, 100) >= 0)
    for (int i = 0; i < streams; i++)
      if (pollers[i].revents && send(sockets[i], piece, PIECE, MSG_NOSIGNAL) < 0 && errno != EAGAIN)
        pollers[i].fd = -1; /* poll passes over it */
  free(piece);
  close_all(streams, sockets);
}

/* One reading of a stream; true while it is open. */
static bool receive_piece(int end, char *piece, double *bytes) {
  ssize_t got = recv(end, piece, PIECE, 0);
  if (got > 0)
    *bytes += (double)got;
  return got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR));
}

/* The clock starts with the first bytes, which are not counted, and stops with the last. */
double doctor_receive_all(double limit, int streams, int *sockets) {
  struct pollfd pollers[MOST_STREAMS];
  char *piece = malloc(PIECE);
  double deadline = doctor_now() + limit, start = 0, last = 0, bytes = 0;
  int open = piece ? streams : 0;
  fill_pollers(pollers, streams, sockets, POLLIN);
  while (open > 0 && doctor_now() < deadline && poll(pollers, (nfds_t)streams, 100) >= 0) {
    for (int i = 0; i < streams; i++)
      if (pollers[i].revents && !receive_piece(sockets[i], piece, &bytes)) {
        pollers[i].fd = -1;
        open--;
      }
    if (start <= 0 && bytes > 0) {
      start = doctor_now();
      bytes = 0;
    } else if (bytes > 0)
      last = doctor_now();
  }
  free(piece);
  close_all(streams, sockets);
  return last > start && start > 0 ? 8e-9 * bytes / (last - start) : 0;
}
