/* Connections that have been made to this rank, until it is known whose they are. */
#include <errno.h>

#include "base/error.h"
#include "base/process.h"
#include "collectives/transports/sockets_rendezvous.h"

void ob_visitor_close(struct ob_visitor *visitor) {
  ob_own_close(visitor->file);
  visitor->file = -1;
}

/* A new connection replaces the oldest visitor. */
static onebit_status_t accept_connections(struct ob_rendezvous *state) {
  for (int file; (file = ob_net_accept(state->listener)) >= 0;) {
    struct ob_visitor *visitor = &state->visitors[state->next_visitor++ % OB_VISITORS];
    ob_visitor_close(visitor);
    *visitor = (struct ob_visitor){.file = file};
  }
  return ob_net_is_absence(errno) ? ONEBIT_OK : ob_rendezvous_failed(state, "accept");
}

static bool is_other_version(const struct ob_visitor *visitor) {
  return visitor->done >= 2 * sizeof(uint32_t) && visitor->greeting.version != OB_GREETING_VERSION;
}

/* A greeting of another version is complete as soon as its version is known. */
bool ob_visitor_read_greeting(struct ob_rendezvous *state, struct ob_visitor *visitor) {
  struct ob_greeting *greeting = &visitor->greeting;
  if (visitor->done == sizeof *greeting)
    return true;
  ssize_t got = ob_net_recv(visitor->file, (char *)greeting + visitor->done,
                            sizeof *greeting - visitor->done);
  if (got < 0 && !ob_net_is_absence(errno))
    state->refused = ob_rendezvous_failed(state, "recv");
  if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
    ob_visitor_close(visitor);
    return false;
  }
  visitor->done += got > 0 ? (size_t)got : 0;
  if (visitor->done >= sizeof greeting->magic && greeting->magic != OB_GREETING_MAGIC)
    ob_visitor_close(visitor);
  else if (visitor->done == sizeof *greeting && greeting->rank < 0)
    ob_visitor_close(visitor);
  return visitor->file >= 0 && (visitor->done == sizeof *greeting || is_other_version(visitor));
}

onebit_status_t ob_visitors_serve(struct ob_rendezvous *state, ob_visitor_accept *accept_one) {
  OB_TRY(accept_connections(state));
  for (int i = 0; i < OB_VISITORS; i++) {
    struct ob_visitor *visitor = &state->visitors[i];
    if (visitor->file < 0 || !ob_visitor_read_greeting(state, visitor))
      continue;
    if (!accept_one(state, visitor))
      ob_visitor_close(visitor);
  }
  return ONEBIT_OK;
}
