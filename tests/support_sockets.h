/* Ports for communicators over sockets. */
#ifndef ONEBIT_TESTS_SUPPORT_SOCKETS_H
#define ONEBIT_TESTS_SUPPORT_SOCKETS_H

#include "onebit/sockets.h"

/* Returns a free port of the loopback interface, which nobody else takes for some time. `keep`:
 * gets a file that holds the port from now on. */
int sockets_free_port(int family, int *keep);

/* Runs `body` on up to SOCKETS_RANKS threads as ranks and waits for all. Each gets options that it
 * may change: its number, a free port, a secret, its host of `hosts`. */
enum { SOCKETS_RANKS = 4 };
typedef void sockets_body(onebit_sockets_options_t *options, void *context);
void sockets_attempt(int size, int hosts, int streams, sockets_body *body, void *context);

#endif
