/* Ports for communicators over sockets. */
#ifndef TESTS_SUPPORT_PORTS_H
#define TESTS_SUPPORT_PORTS_H

/* Returns a port of the address family that no other process uses or gets, and at which this one
 * can listen as the library does, with SO_REUSEADDR; 0 if there is none. It is reserved until
 * *socket is closed, or if `socket` is NULL, until the process ends. Nothing listens at it yet. */
int port_reserve(int family, int *socket);

#endif
