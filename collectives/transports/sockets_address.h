/* Addresses as text, "192.0.2.7 29500", in which form ranks send them. */
#ifndef OB_COLLECTIVES_SOCKETS_ADDRESS_H
#define OB_COLLECTIVES_SOCKETS_ADDRESS_H

#include <netinet/in.h>
#include <stdbool.h>
#include <sys/socket.h>

#include "onebit/status.h"

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
/* False: it is none. */
int ob_address_scan(const char text[OB_ADDRESS_BYTES], struct ob_address *address);

/* Gives a link-local address without an interface the interface of another address. */
void ob_address_set_scope(struct ob_address *address, const struct ob_address *from);

/* Listens, nonblocking, at the address's port: on all interfaces, unless the address is a numeric
 * loopback one. Returns -1, with errno. */
int ob_address_listen(const struct ob_address *address);

#endif
