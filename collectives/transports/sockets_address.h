/* Addresses as text, "192.0.2.7 29500": the form that ranks tell each other. */
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
  bool named; /* by a name that means this host to others too, whatever it means here */
};

/* "host:port" or "[host]:port", into what it resolves to. ONEBIT_ERROR_ARGUMENT. */
onebit_status_t ob_address_resolve(const char *text, struct ob_address *address);

bool ob_address_is_loopback(const struct ob_address *address);

int ob_address_port(const struct ob_address *address);
void ob_address_set_port(struct ob_address *address, int port);

/* Without the interface of a link-local one: other hosts have names of their own for theirs. */
void ob_address_print(const struct ob_address *address, char text[OB_ADDRESS_BYTES]);
/* False: it is none. */
int ob_address_scan(const char text[OB_ADDRESS_BYTES], struct ob_address *address);

/* A link-local address without an interface gets that of another one. */
void ob_address_set_scope(struct ob_address *address, const struct ob_address *from);

/* Listens, nonblocking, at the address's port: on all interfaces, unless it is a loopback address
 * by number. -1, with errno. */
int ob_address_listen(const struct ob_address *address);

#endif
