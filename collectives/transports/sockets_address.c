/* Names, addresses and listeners. */
#define _GNU_SOURCE
#include "collectives/transports/sockets_address.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/process.h"
#include "collectives/transports/sockets_calls.h"

static bool is_number(const char *host) {
  const struct addrinfo wanted = {.ai_family = AF_UNSPEC, .ai_flags = AI_NUMERICHOST};
  struct addrinfo *found = NULL;
  bool is = getaddrinfo(host, NULL, &wanted, &found) == 0;
  if (is)
    freeaddrinfo(found);
  return is;
}

static onebit_status_t sockets_address_look_up(const char *host, const char *port,
                                               struct ob_address *address) {
  const struct addrinfo wanted = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
  struct addrinfo *found = NULL;
  int code = getaddrinfo(host, port, &wanted, &found);
  if (code == EAI_SYSTEM)
    return ob_net_failed("getaddrinfo");
  if (code != 0)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "sockets: \"%s\" is no address and no known name: %s",
                    host, gai_strerror(code));
  memcpy(&address->storage, found->ai_addr, found->ai_addrlen);
  address->length = found->ai_addrlen;
  address->named = !is_number(host) && strcmp(host, "localhost") != 0;
  freeaddrinfo(found);
  return ONEBIT_OK;
}

/* Returns the interface of a link-local address, which is meaningless without it; NULL for
 * others. */
static uint32_t *scope_of(struct ob_address *address) {
  struct sockaddr_in6 *six = (struct sockaddr_in6 *)&address->storage;
  bool local = address->storage.ss_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&six->sin6_addr);
  return local ? &six->sin6_scope_id : NULL;
}

void ob_address_set_scope(struct ob_address *address, const struct ob_address *from) {
  struct ob_address other = *from;
  uint32_t *scope = scope_of(address), *given = scope_of(&other);
  if (scope && !*scope && given)
    *scope = *given;
}

static onebit_status_t not_a_rendezvous(const char *text) {
  return ob_error(ONEBIT_ERROR_ARGUMENT,
                  "options->rendezvous \"%.100s\": expected host:port, e.g. node1:29400", text);
}

onebit_status_t ob_address_resolve(const char *text, struct ob_address *address) {
  const char *colon = strrchr(text, ':');
  char host[256], *end;
  size_t length = colon ? (size_t)(colon - text) : 0;
  bool brackets = length > 2 && text[0] == '[' && text[length - 1] == ']';
  long port = colon ? strtol(colon + 1, &end, 10) : 0;
  if (length == 0 || length >= sizeof host || port < 1 || port > 65535 || *end ||
      (!brackets && memchr(text, ':', length)))
    return not_a_rendezvous(text);
  snprintf(host, sizeof host, "%.*s", (int)(brackets ? length - 2 : length), text + brackets);
  OB_TRY(sockets_address_look_up(host, colon + 1, address));
  const uint32_t *scope = scope_of(address);
  if (scope && !*scope)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "options->rendezvous \"%.100s\": a link-local address needs its interface, "
                    "e.g. [fe80::1%%eth0]:29400",
                    text);
  return ONEBIT_OK;
}

bool ob_address_is_loopback(const struct ob_address *address) {
  const struct sockaddr_in *four = (const struct sockaddr_in *)&address->storage;
  const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)&address->storage;
  if (address->storage.ss_family == AF_INET)
    return ntohl(four->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
  return IN6_IS_ADDR_LOOPBACK(&six->sin6_addr);
}

/* Relies on the port's place, which both families share. */
int ob_address_port(const struct ob_address *address) {
  return ntohs(((const struct sockaddr_in *)&address->storage)->sin_port);
}

void ob_address_set_port(struct ob_address *address, int port) {
  ((struct sockaddr_in *)&address->storage)->sin_port = htons((uint16_t)port);
}

void ob_address_print(const struct ob_address *address, char text[OB_ADDRESS_BYTES]) {
  char host[NI_MAXHOST] = "";
  getnameinfo((const struct sockaddr *)&address->storage, address->length, host, sizeof host, NULL,
              0, NI_NUMERICHOST);
  host[strcspn(host, "%")] = '\0';
  snprintf(text, OB_ADDRESS_BYTES, "%.56s %d", host, ob_address_port(address));
}

int ob_address_scan(const char text[OB_ADDRESS_BYTES], struct ob_address *address) {
  const struct addrinfo wanted = {
      .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST};
  struct addrinfo *found = NULL;
  char host[OB_ADDRESS_BYTES];
  int port = 0;
  if (!memchr(text, '\0', OB_ADDRESS_BYTES) || sscanf(text, "%63s %d", host, &port) != 2 ||
      port < 1 || port > 65535 || getaddrinfo(host, NULL, &wanted, &found) != 0)
    return 0;
  *address = (struct ob_address){.length = found->ai_addrlen};
  memcpy(&address->storage, found->ai_addr, found->ai_addrlen);
  freeaddrinfo(found);
  ob_address_set_port(address, port);
  return 1;
}

static struct ob_address any_of(const struct ob_address *address) {
  struct ob_address any = *address;
  if (ob_address_is_loopback(address) && !address->named)
    return any;
  if (address->storage.ss_family == AF_INET)
    ((struct sockaddr_in *)&any.storage)->sin_addr.s_addr = htonl(INADDR_ANY);
  else
    ((struct sockaddr_in6 *)&any.storage)->sin6_addr = in6addr_any;
  return any;
}

int ob_address_listen(const struct ob_address *address) {
  const struct ob_address at = any_of(address);
  int yes = 1;
  int file = ob_net_socket(at.storage.ss_family);
  if (file < 0)
    return -1;
  /* Connections of a job that has ended keep a port for a minute. */
  setsockopt(file, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (ob_net_bind(file, &at) == 0 && ob_net_listen(file) == 0)
    return file;
  int code = errno;
  ob_own_close(file);
  errno = code;
  return -1;
}
