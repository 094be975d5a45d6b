/* The transport over sockets needs Linux's epoll, so a build for macOS refuses it. */
#include "base/call_scope.h"
#include "base/error.h"
#include "onebit/sockets.h"

onebit_status_t onebit_comm_create_sockets(const onebit_sockets_options_t *options,
                                           onebit_comm_t *comm) {
  OB_CALL_SCOPE;
  (void)options;
  if (comm)
    *comm = NULL;
  return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                  "sockets: a build for macOS does not have this transport");
}
