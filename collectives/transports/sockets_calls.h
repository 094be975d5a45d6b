/*
 * The system calls that connecting needs. Each function does the same as the system call of its
 * name, and sets errno if it fails. Files that it opens are nonblocking, and closed in forked
 * children (base/process.h).
 */
#ifndef OB_COLLECTIVES_SOCKETS_CALLS_H
#define OB_COLLECTIVES_SOCKETS_CALLS_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/types.h>

#include "onebit/status.h"

/* --- Addresses: ranks send them as text, "192.0.2.7 29500" -------------------------------------*/

#define OB_ADDRESS_BYTES 64

struct ob_address {
  struct sockaddr_storage storage;
  socklen_t length;
  bool named; /* given by a name that other hosts resolve to this host, too */
};

/* Resolves "host:port" or "[host]:port". Fails with ONEBIT_ERROR_ARGUMENT. */
onebit_status_t ob_address_resolve(const char *text, struct ob_address *address);

bool ob_address_is_loopback(const struct ob_address *address);

int ob_address_port(const struct ob_address *address);
void ob_address_set_port(struct ob_address *address, int port);

/* Prints an address. The interface of a link-local address is left out, since other hosts have
 * other names for their interfaces. */
void ob_address_print(const struct ob_address *address, char text[OB_ADDRESS_BYTES]);
/* Parses a printed address. Returns false if the text is no address. */
int ob_address_scan(const char text[OB_ADDRESS_BYTES], struct ob_address *address);

/* Sets the interface of a link-local address that has none to that of the address `from`. */
void ob_address_set_scope(struct ob_address *address, const struct ob_address *from);

/* Opens a nonblocking listener at the address's port: on all interfaces, unless the address is a
 * numeric loopback address. Returns -1 on failure, and sets errno. */
int ob_address_listen(const struct ob_address *address);

/* --- Calls -------------------------------------------------------------------------------------*/

int ob_net_socket(int family);
int ob_net_accept(int listener);
int ob_net_connect(int file, const struct ob_address *to);
int ob_net_getsockname(int file, struct ob_address *own);
ssize_t ob_net_send(int file, const void *data, size_t bytes);
ssize_t ob_net_recv(int file, void *data, size_t bytes);
int ob_net_epoll_create(void);
int ob_net_epoll_add(int events, int file, struct epoll_event *event);
int ob_net_getrandom(void *data, size_t bytes);

/* True if the error means that the other side does not exist, is not ready, or has sent nothing
 * yet. Any other error is one of this process or host, and waiting does not help. */
bool ob_net_is_absence(int code);

/* Writes to `text` the reason for an error: "Too many open files: this process may open 16 files
 * (ulimit -n)". Returns `text`. */
enum { OB_NET_REASON = 224 };
const char *ob_net_reason(int code, char text[OB_NET_REASON]);

/* Reports a call that has failed, with the reason from errno: "sockets: accept: Too many open
 * files: ...". */
onebit_status_t ob_net_failed(const char *call);

/* Raises this process's limit of open files to the hard limit. */
void ob_net_raise_limit(void);

/* A hook for tests, called with a call's name before each call. If its result is not 0, the call
 * fails with that error. May be NULL. */
extern int (*ob_net_fault)(const char *call);

#endif
