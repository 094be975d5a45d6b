/* Ports for communicators over sockets. */
#ifndef ONEBIT_TESTS_SUPPORT_SOCKETS_H
#define ONEBIT_TESTS_SUPPORT_SOCKETS_H

#include "onebit/sockets.h"

/* A port of the loopback interface that is free; nobody else takes it so soon. `keep`: it is taken
 * from now on, by that file. */
int sockets_free_port(int family, int *keep);

/* Each of up to SOCKETS_RANKS ranks a thread, with options that it may change: its number, a port
 * that is free, a secret, one of so many hosts. Until all have returned. */
enum { SOCKETS_RANKS = 4 };
typedef void sockets_body(onebit_sockets_options_t *options, void *context);
void sockets_attempt(int size, int hosts, int streams, sockets_body *body, void *context);

#endif
