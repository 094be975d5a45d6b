#include "tests/support_sockets.h"

#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

/* A port is let go before rank 0 listens there, and in some tests rank 0 never does: then no other
 * process may have been given it. So each test process has ports of its own, below those that the
 * system gives to connections: it listens at the first of them for as long as it lives. */
enum { FIRST_PORT = 10000, PORTS_EACH = 128, BLOCKS_OF_PORTS = 176 };

static bool bind_port(int file, int family, int port) {
  struct sockaddr_storage address = {.ss_family = (sa_family_t)family};
  const int on = 1;
  ((struct sockaddr_in *)&address)->sin_port = htons((uint16_t)port); /* as in sockaddr_in6 */
  if (family == AF_INET6)
    ((struct sockaddr_in6 *)&address)->sin6_addr = in6addr_loopback;
  else
    ((struct sockaddr_in *)&address)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  setsockopt(file, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  return bind(file, (struct sockaddr *)&address, sizeof address) == 0 && listen(file, 16) == 0;
}

static int next_port(void) {
  static int first;
  static unsigned calls;
  for (int tries = 0; !first && tries < BLOCKS_OF_PORTS; tries++) {
    const int port = FIRST_PORT + ((int)getpid() + tries) % BLOCKS_OF_PORTS * PORTS_EACH;
    const int file = socket(AF_INET, SOCK_STREAM, 0); /* stays open */
    if (bind_port(file, AF_INET, port))
      first = port;
    else
      close(file);
  }
  cr_assert(first, "none of %d blocks of ports is free", BLOCKS_OF_PORTS);
  return first + 1 + (int)(calls++ % (PORTS_EACH - 1));
}

int sockets_free_port(int family, int *keep) {
  for (int tries = 0; tries < PORTS_EACH; tries++) {
    const int port = next_port(), file = socket(family, SOCK_STREAM, 0);
    if (file >= 0 && bind_port(file, family, port)) {
      if (keep)
        *keep = file;
      else
        close(file);
      return port;
    }
    close(file);
  }
  cr_assert_fail("none of %d ports is free", PORTS_EACH);
  return 0;
}

struct member {
  onebit_sockets_options_t options;
  sockets_body *body;
  void *context;
};

static void *run_member(void *argument) {
  struct member *member = argument;
  member->body(&member->options, member->context);
  return NULL;
}

void sockets_attempt(int size, int hosts, int streams, sockets_body *body, void *context) {
  static const char *const names[SOCKETS_RANKS] = {"h0", "h1", "h2", "h3"};
  struct member members[SOCKETS_RANKS];
  pthread_t threads[SOCKETS_RANKS];
  char where[64];
  snprintf(where, sizeof where, "127.0.0.1:%d", sockets_free_port(AF_INET, NULL));
  for (int rank = 0; rank < size; rank++) {
    members[rank] = (struct member){ONEBIT_SOCKETS_OPTIONS_INIT, body, context};
    members[rank].options.rank = rank;
    members[rank].options.ranks = size;
    members[rank].options.rendezvous = where;
    members[rank].options.streams = streams;
    members[rank].options.timeout = 20;
    members[rank].options.secret = "of this test";
    members[rank].options.host = names[rank * hosts / size];
    cr_assert(pthread_create(&threads[rank], NULL, run_member, &members[rank]) == 0);
  }
  for (int rank = 0; rank < size; rank++)
    pthread_join(threads[rank], NULL);
}
