/* The system calls that connecting needs, and the addresses that they use. */
#define _GNU_SOURCE
#include "collectives/transports/sockets_calls.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
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

static int net_bind(int file, const struct ob_address *at) {
  return fails_for_test("bind") ? -1
                                : bind(file, (const struct sockaddr *)&at->storage, at->length);
}

static int net_listen(int file) { return fails_for_test("listen") ? -1 : listen(file, BACKLOG); }

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

/* Returns the remedy for an error as text; NULL: none is known. */
static const char *find_remedy(int code) {
  switch (code) {
  case ENFILE:
    return ": this host has no more files to open (sysctl fs.file-max)";
  case EADDRNOTAVAIL:
    return ": no local port is free (sysctl net.ipv4.ip_local_port_range), or the address is not "
           "this host's";
  case EADDRINUSE:
    return ": another program or job uses this port";
  case EACCES:
  case EPERM:
    return ": only root may use ports below 1024, or a firewall of this host forbids the "
           "connection";
  case ENOMEM:
  case ENOBUFS:
    return ": the system is out of memory for connections (sysctl net.ipv4.tcp_mem)";
  case ENOSPC:
    return ": this user watches too many files (sysctl fs.epoll.max_user_watches)";
  default:
    return "";
  }
}

const char *ob_net_reason(int code, char text[OB_NET_REASON]) {
  struct rlimit limit;
  const char *reason = strerror(code);
  if (code == EMFILE && getrlimit(RLIMIT_NOFILE, &limit) == 0)
    snprintf(text, OB_NET_REASON, "%s: this process may open %llu files (ulimit -n)", reason,
             (unsigned long long)limit.rlim_cur);
  else
    snprintf(text, OB_NET_REASON, "%s%s", reason, find_remedy(code));
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
    setrlimit(RLIMIT_NOFILE, &limit); /* a failure shows when a file cannot be opened */
  }
}

/* --- Names, addresses and listeners ------------------------------------------------------------*/

static bool is_numeric_host(const char *host) {
  const struct addrinfo wanted = {.ai_family = AF_UNSPEC, .ai_flags = AI_NUMERICHOST};
  struct addrinfo *found = NULL;
  bool is = getaddrinfo(host, NULL, &wanted, &found) == 0;
  if (is)
    freeaddrinfo(found);
  return is;
}

static onebit_status_t resolve_host(const char *host, const char *port,
                                    struct ob_address *address) {
  const struct addrinfo wanted = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
  struct addrinfo *found = NULL;
  int code = getaddrinfo(host, port, &wanted, &found);
  if (code == EAI_SYSTEM)
    return ob_net_failed("getaddrinfo");
  if (code != 0)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "sockets: \"%s\" is neither an address nor the name of a known host: %s", host,
                    gai_strerror(code));
  memcpy(&address->storage, found->ai_addr, found->ai_addrlen);
  address->length = found->ai_addrlen;
  address->named = !is_numeric_host(host) && strcmp(host, "localhost") != 0;
  freeaddrinfo(found);
  return ONEBIT_OK;
}

/* Returns a pointer to the interface number of a link-local address, which is meaningless without
 * it; NULL for other addresses. */
static uint32_t *find_scope_id(struct ob_address *address) {
  struct sockaddr_in6 *six = (struct sockaddr_in6 *)&address->storage;
  bool local = address->storage.ss_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&six->sin6_addr);
  return local ? &six->sin6_scope_id : NULL;
}

void ob_address_set_scope(struct ob_address *address, const struct ob_address *from) {
  struct ob_address other = *from;
  uint32_t *scope = find_scope_id(address), *given = find_scope_id(&other);
  if (scope && !*scope && given)
    *scope = *given;
}

static onebit_status_t report_bad_address(const char *text) {
  return ob_error(ONEBIT_ERROR_ARGUMENT,
                  "options->rendezvous is \"%.100s\": expected host:port, e.g. node1:29400", text);
}

onebit_status_t ob_address_resolve(const char *text, struct ob_address *address) {
  const char *colon = strrchr(text, ':');
  char host[256], *end;
  size_t length = colon ? (size_t)(colon - text) : 0;
  bool brackets = length > 2 && text[0] == '[' && text[length - 1] == ']';
  long port = colon ? strtol(colon + 1, &end, 10) : 0;
  if (length == 0 || length >= sizeof host || port < 1 || port > 65535 || *end ||
      (!brackets && memchr(text, ':', length)))
    return report_bad_address(text);
  snprintf(host, sizeof host, "%.*s", (int)(brackets ? length - 2 : length), text + brackets);
  OB_TRY(resolve_host(host, colon + 1, address));
  const uint32_t *scope = find_scope_id(address);
  if (scope && !*scope)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "options->rendezvous is \"%.100s\": a link-local address needs its interface, "
                    "e.g. [fe80::1%%eth0]:29400",
                    text);
  return ONEBIT_OK;
}

bool ob_address_is_loopback(const struct ob_address *address) {
  const struct sockaddr_in *four = (const struct sockaddr_in *)&address->storage;
  const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)&address->storage;
  if (address->storage.ss_family == AF_INET)
    return ntohl(four->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
  return IN6_IS_ADDR_LOOPBACK(&six->sin6_addr);
}

/* Returns the port, which is at the same offset in addresses of both families. */
int ob_address_port(const struct ob_address *address) {
  return ntohs(((const struct sockaddr_in *)&address->storage)->sin_port);
}

void ob_address_set_port(struct ob_address *address, int port) {
  ((struct sockaddr_in *)&address->storage)->sin_port = htons((uint16_t)port);
}

void ob_address_print(const struct ob_address *address, char text[OB_ADDRESS_BYTES]) {
  char host[NI_MAXHOST] = "";
  getnameinfo((const struct sockaddr *)&address->storage, address->length, host, sizeof host, NULL,
              0, NI_NUMERICHOST);
  host[strcspn(host, "%")] = '\0';
  snprintf(text, OB_ADDRESS_BYTES, "%.56s %d", host, ob_address_port(address));
}

int ob_address_scan(const char text[OB_ADDRESS_BYTES], struct ob_address *address) {
  const struct addrinfo wanted = {
      .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST};
  struct addrinfo *found = NULL;
  char host[OB_ADDRESS_BYTES];
  int port = 0;
  if (!memchr(text, '\0', OB_ADDRESS_BYTES) || sscanf(text, "%63s %d", host, &port) != 2 ||
      port < 1 || port > 65535 || getaddrinfo(host, NULL, &wanted, &found) != 0)
    return 0;
  *address = (struct ob_address){.length = found->ai_addrlen};
  memcpy(&address->storage, found->ai_addr, found->ai_addrlen);
  freeaddrinfo(found);
  ob_address_set_port(address, port);
  return 1;
}

static struct ob_address choose_listen_address(const struct ob_address *address) {
  struct ob_address any = *address;
  if (ob_address_is_loopback(address) && !address->named)
    return any;
  if (address->storage.ss_family == AF_INET)
    ((struct sockaddr_in *)&any.storage)->sin_addr.s_addr = htonl(INADDR_ANY);
  else
    ((struct sockaddr_in6 *)&any.storage)->sin6_addr = in6addr_any;
  return any;
}

int ob_address_listen(const struct ob_address *address) {
  const struct ob_address at = choose_listen_address(address);
  int yes = 1;
  int file = ob_net_socket(at.storage.ss_family);
  if (file < 0)
    return -1;
  /* Connections of a job that has ended would block its port for a minute. */
  setsockopt(file, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (net_bind(file, &at) == 0 && net_listen(file) == 0)
    return file;
  int code = errno;
  ob_own_close(file);
  errno = code;
  return -1;
}
