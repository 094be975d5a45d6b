#include "tests/support_ports.h"

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/socket.h>
#include <unistd.h>

/* Binds a socket without SO_REUSEADDR, so that it gets a port that no other socket has. Sets the
 * option afterwards, so that another socket with the option can listen at the port. Meanwhile the
 * system gives the port neither to connections nor to sockets that ask for any free port. */
static bool reserve_port(int file, struct sockaddr_storage *address) {
  socklen_t size = sizeof *address;
  const int on = 1;
  return bind(file, (struct sockaddr *)address, size) == 0 &&
         setsockopt(file, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
         getsockname(file, (struct sockaddr *)address, &size) == 0;
}

int port_reserve(int family, int *keep) {
  struct sockaddr_storage address = {.ss_family = (sa_family_t)family}; /* any address and port */
  const int file = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (file < 0 || !reserve_port(file, &address)) {
    close(file);
    return 0;
  }
  if (keep)
    *keep = file;
  return ntohs(((struct sockaddr_in *)&address)->sin_port); /* sockaddr_in6 has the port at the same
                                                             * offset */
}
