/* Ports for communicators over sockets. */
#ifndef ONEBIT_TESTS_SUPPORT_SOCKETS_H
#define ONEBIT_TESTS_SUPPORT_SOCKETS_H

/* A port of the loopback interface that is free; nobody else takes it so soon. `keep`: it is taken
 * from now on, by that file. */
int sockets_free_port(int family, int *keep);

#endif
