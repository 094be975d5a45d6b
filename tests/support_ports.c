#include "tests/support_ports.h"

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/socket.h>
#include <unistd.h>

/* A socket that is bound without SO_REUSEADDR gets a port that no other socket has. After the bind
 * the option is set, so that another socket with the option can listen at the port. The system
 * gives the port to no connection, and to no socket that asks for any port. */
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
  return ntohs(((struct sockaddr_in *)&address)->sin_port); /* as in sockaddr_in6 */
}
