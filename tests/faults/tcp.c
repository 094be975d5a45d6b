/*
 * Ranks over the library's own connections (onebit/sockets.h). A fault at JOINING happens before
 * one of the system calls that connect the rank. Message faults are committed in sendmsg, which
 * this file defines in place of the system's function.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "collectives/transports/sockets_rendezvous.h"
#include "tests/faults/faults.h"

static struct participant *own;
static unsigned calls;

static struct sockaddr_in address_of(int port) {
  return (struct sockaddr_in){.sin_family = AF_INET,
                              .sin_port = htons((uint16_t)port),
                              .sin_addr = {htonl(INADDR_LOOPBACK)}};
}

/* Commits the fault before system call number k, where the seed chooses k. Every rank makes more
 * than k system calls. */
static int commit_fault_in_call(const char *call) {
  (void)call;
  if (calls++ == own->shared->row.seed * 5 % 61 && !commit_fault(own, JOINING))
    _exit(0);
  return 0;
}

onebit_status_t connect_tcp(struct participant *participant, onebit_comm_t *comm) {
  onebit_sockets_options_t options = ONEBIT_SOCKETS_OPTIONS_INIT;
  char at[32];
  own = participant;
  snprintf(at, sizeof at, "127.0.0.1:%d", participant->shared->port);
  options.rank = participant->rank;
  options.ranks = RANKS;
  options.rendezvous = at;
  options.secret = participant->shared->directory;
  options.streams = 2;
  if (participant->shared->row.transport == TWO_HOSTS)
    options.host = participant->rank >= RANKS / 2 ? "second" : "first";
  ob_net_fault = commit_fault_in_call;
  onebit_status_t status = onebit_comm_create_sockets(&options, comm);
  ob_net_fault = NULL;
  return status;
}

/* Opens three connections that stay open until the process ends. One sends nothing and one sends an
 * HTTP request. The third sends the greeting of this process's rank, without a proof of the
 * secret. */
void tcp_connect_as_stranger(const struct shared *shared, int rank) {
  struct ob_greeting greeting = {.magic = OB_GREETING_MAGIC,
                                 .version = OB_GREETING_VERSION,
                                 .kind = OB_JOIN,
                                 .rank = rank,
                                 .size = RANKS};
  const char request[] = "GET / HTTP/1.1\r\nHost: here\r\n\r\n";
  struct sockaddr_in to = address_of(shared->port);
  for (int k = 0; k < 3 && rank > 0; k++) {
    int file = socket(AF_INET, SOCK_STREAM, 0);
    while (connect(file, (struct sockaddr *)&to, sizeof to) != 0)
      usleep(1000);
    if (k > 0)
      (void)!send(file, k == 1 ? (const void *)request : &greeting,
                  k == 1 ? sizeof request : sizeof greeting, MSG_NOSIGNAL);
  }
  participant_sleep(SHORT_PAUSE);
}

/* --- Messages */

static ssize_t refuse_send(void) {
  errno = EAGAIN;
  return -1;
}

static void send_whole(int file, const unsigned char *data, size_t bytes) {
  while (bytes) {
    struct pollfd wait = {.fd = file, .events = POLLOUT};
    ssize_t sent = send(file, data, bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN)
      return;
    data += sent > 0 ? sent : 0;
    bytes -= sent > 0 ? (size_t)sent : 0;
    poll(&wait, 1, 10);
  }
}

/* Disconnects the socket so that the peer gets a TCP reset. */
static void disconnect(int file) {
  const struct sockaddr none = {.sa_family = AF_UNSPEC};
  connect(file, &none, sizeof none);
}

/* Sends a segment of a message. message->msg_iov[0] is the segment's header. */
static ssize_t send_segment(int file, const struct msghdr *message) {
  const struct iovec *head = &message->msg_iov[0], *data = &message->msg_iov[1];
  size_t total = head->iov_len + data->iov_len, bytes = total;
  unsigned char *copy = malloc(total + 8);
  bool before = own->committed;
  if (!copy)
    exit(3);
  memcpy(copy, head->iov_base, head->iov_len);
  memcpy(copy + head->iov_len, data->iov_base, data->iov_len);
  enum fate fate = commit_message_fault(own, copy, &bytes);
  if (own->shared->row.fault == RESET && own->committed && !before)
    disconnect(file);
  for (int times = fate == IS_LOST ? 0 : fate == GOES_TWICE ? 2 : 1; times; times--)
    send_whole(file, copy, bytes);
  free(copy);
  return (ssize_t)total;
}

ssize_t sendmsg(int file, const struct msghdr *message, int flags) {
  enum fault fault = own ? own->shared->row.fault : NONE;
  bool fails = own && own->messages_fail;
  if (fails && (fault == CUT || (fault == HELD && participant_clock() < own->held_until)))
    return refuse_send();
  if (!fails || message->msg_iovlen != 2 ||
      message->msg_iov[0].iov_len != sizeof(struct ob_segment))
    return syscall(SYS_sendmsg, file, message, flags);
  return send_segment(file, message);
}
