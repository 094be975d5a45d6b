#include "tests/support_sockets.h"

#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

int sockets_free_port(int family, int *keep) {
  struct sockaddr_storage address = {.ss_family = (sa_family_t)family};
  socklen_t length = sizeof address;
  int file = socket(family, SOCK_STREAM, 0);
  if (family == AF_INET6)
    ((struct sockaddr_in6 *)&address)->sin6_addr = in6addr_loopback;
  else
    ((struct sockaddr_in *)&address)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  cr_assert(file >= 0 && bind(file, (struct sockaddr *)&address, length) == 0);
  if (keep)
    cr_assert(listen(file, 16) == 0);
  getsockname(file, (struct sockaddr *)&address, &length);
  if (keep)
    *keep = file;
  else
    close(file);
  return ntohs(((struct sockaddr_in *)&address)->sin_port);
}
