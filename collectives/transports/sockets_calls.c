/* The system calls of connecting. */
#define _GNU_SOURCE
#include "collectives/transports/sockets_calls.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "base/error.h"
#include "base/process.h"

#define BACKLOG 1024

int (*ob_net_fault)(const char *call);

static bool fails_for_test(const char *call) {
  int code = ob_net_fault ? ob_net_fault(call) : 0;
  if (code)
    errno = code;
  return code != 0;
}

int ob_net_socket(int family) {
  const int type = SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK;
  return fails_for_test("socket") ? -1 : ob_own_file(socket(family, type, 0));
}

int ob_net_bind(int file, const struct ob_address *at) {
  return fails_for_test("bind") ? -1
                                : bind(file, (const struct sockaddr *)&at->storage, at->length);
}

int ob_net_listen(int file) { return fails_for_test("listen") ? -1 : listen(file, BACKLOG); }

int ob_net_accept(int listener) {
  const int flags = SOCK_CLOEXEC | SOCK_NONBLOCK;
  return fails_for_test("accept") ? -1 : ob_own_file(accept4(listener, NULL, NULL, flags));
}

int ob_net_connect(int file, const struct ob_address *to) {
  return fails_for_test("connect")
             ? -1
             : connect(file, (const struct sockaddr *)&to->storage, to->length);
}

int ob_net_getsockname(int file, struct ob_address *own) {
  own->length = sizeof own->storage;
  return fails_for_test("getsockname")
             ? -1
             : getsockname(file, (struct sockaddr *)&own->storage, &own->length);
}

ssize_t ob_net_send(int file, const void *data, size_t bytes) {
  return fails_for_test("send") ? -1 : send(file, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
}

ssize_t ob_net_recv(int file, void *data, size_t bytes) {
  return fails_for_test("recv") ? -1 : recv(file, data, bytes, MSG_DONTWAIT);
}

int ob_net_epoll_create(void) {
  return fails_for_test("epoll_create") ? -1 : ob_own_file(epoll_create1(EPOLL_CLOEXEC));
}

int ob_net_epoll_add(int events, int file, struct epoll_event *event) {
  return fails_for_test("epoll_ctl") ? -1 : epoll_ctl(events, EPOLL_CTL_ADD, file, event);
}

int ob_net_getrandom(void *data, size_t bytes) {
  return fails_for_test("getrandom") || getrandom(data, bytes, 0) != (ssize_t)bytes ? -1 : 0;
}

bool ob_net_is_absence(int code) {
  static const int absences[] = {EAGAIN,      EINTR,        EINPROGRESS, EALREADY,  ECONNREFUSED,
                                 ECONNRESET,  ECONNABORTED, EPIPE,       ETIMEDOUT, EHOSTUNREACH,
                                 ENETUNREACH, EHOSTDOWN,    ENETDOWN,    ENETRESET, ENOTCONN,
                                 EPROTO,      ENOPROTOOPT,  ENONET};
  for (size_t k = 0; k < sizeof absences / sizeof absences[0]; k++)
    if (absences[k] == code)
      return true;
  return false;
}

/* Returns the remedy for an error, if one is known. */
static const char *remedy_for(int code) {
  switch (code) {
  case ENFILE:
    return ": this host has no more (sysctl fs.file-max)";
  case EADDRNOTAVAIL:
    return ": no local port is free (sysctl net.ipv4.ip_local_port_range), or the address is not "
           "this host's";
  case EADDRINUSE:
    return ": another program, or job, has this port";
  case EACCES:
  case EPERM:
    return ": ports below 1024 are root's; or a firewall of this host forbids it";
  case ENOMEM:
  case ENOBUFS:
    return ": the system has no memory for it (sysctl net.ipv4.tcp_mem)";
  case ENOSPC:
    return ": too many for this user (sysctl fs.epoll.max_user_watches)";
  default:
    return "";
  }
}

const char *ob_net_reason(int code, char text[OB_NET_REASON]) {
  struct rlimit limit;
  const char *reason = strerror(code);
  if (code == EMFILE && getrlimit(RLIMIT_NOFILE, &limit) == 0)
    snprintf(text, OB_NET_REASON, "%s: this process may have %llu (ulimit -n)", reason,
             (unsigned long long)limit.rlim_cur);
  else
    snprintf(text, OB_NET_REASON, "%s%s", reason, remedy_for(code));
  return text;
}

onebit_status_t ob_net_failed(const char *call) {
  char reason[OB_NET_REASON];
  return ob_error(ONEBIT_ERROR_TRANSPORT, "sockets: %s: %s", call, ob_net_reason(errno, reason));
}

void ob_net_raise_limit(void) {
  struct rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit); /* if it fails, opening files reports it */
  }
}
