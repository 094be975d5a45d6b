/*
 * The system calls of connecting. Each function does the same as the system call of its name and
 * fails in the same way, with errno. Files that it opens do not block, and are this process's alone
 * (base/process.h).
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

/* --- Addresses as text, "192.0.2.7 29500", in which form ranks send them -----------------------*/

#define OB_ADDRESS_BYTES 64

struct ob_address {
  struct sockaddr_storage storage;
  socklen_t length;
  bool named; /* given by a name that means this host on other hosts too */
};

/* Resolves "host:port" or "[host]:port". ONEBIT_ERROR_ARGUMENT. */
onebit_status_t ob_address_resolve(const char *text, struct ob_address *address);

bool ob_address_is_loopback(const struct ob_address *address);

int ob_address_port(const struct ob_address *address);
void ob_address_set_port(struct ob_address *address, int port);

/* Prints an address, without the interface of a link-local one: other hosts name theirs
 * differently. */
void ob_address_print(const struct ob_address *address, char text[OB_ADDRESS_BYTES]);
/* Returns false if the text is no address. */
int ob_address_scan(const char text[OB_ADDRESS_BYTES], struct ob_address *address);

/* Gives a link-local address without an interface the interface of another address. */
void ob_address_set_scope(struct ob_address *address, const struct ob_address *from);

/* Listens, nonblocking, at the address's port: on all interfaces, unless the address is a numeric
 * loopback one. Returns -1, with errno. */
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

/* True if the error means that the other side is not there, or not yet, or that nothing has
 * arrived; any other error is this process's or host's own, and waiting does not help. */
bool ob_net_is_absence(int code);

/* Writes the reason to `text`: "Too many open files: this process may have 16 (ulimit -n)". Returns
 * `text`. */
enum { OB_NET_REASON = 224 };
const char *ob_net_reason(int code, char text[OB_NET_REASON]);

/* Reports a call that has failed by errno: "sockets: accept: Too many open files: ...". */
onebit_status_t ob_net_failed(const char *call);

/* Raises the number of files that this process may open to the limit set by the administrator. */
void ob_net_raise_limit(void);

/* A hook of tests, called before each call with its name: a result other than 0 is the error with
 * which the call fails. May be NULL. */
extern int (*ob_net_fault)(const char *call);

#endif
