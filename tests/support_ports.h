/* Ports for communicators over sockets. */
#ifndef TESTS_SUPPORT_PORTS_H
#define TESTS_SUPPORT_PORTS_H

/* Returns a port of the address family that no other process uses or gets, or 0 if there is none.
 * This process can listen at the port as the library does, with SO_REUSEADDR. The port is reserved
 * until *socket is closed, or until the process ends if `socket` is NULL. No socket listens at it
 * yet. */
int port_reserve(int family, int *socket);

#endif
