/* Settles a communicator of a transport without collectives of its own, once ranks can reach each
 * other. */
#ifndef OB_COLLECTIVES_SETTLE_H
#define OB_COLLECTIVES_SETTLE_H

#include "collectives/agree.h"

/* Collective, in creation: the ranks agree on `terms`, find out who shares a host, take rank 0's
 * costs, and tell each other the names of their hosts. `status` is how this rank fares so far;
 * `host` NULL: what gethostname says. comm->host_names has memory already. */
onebit_status_t ob_settle(onebit_comm_t comm, onebit_status_t status, const struct ob_term *terms,
                          size_t count, const char *host);

#endif
