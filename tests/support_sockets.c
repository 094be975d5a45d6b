#include "tests/support_sockets.h"

#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
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
