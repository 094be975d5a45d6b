/* Completes a communicator of a transport without collectives of its own, once its ranks can reach
 * each other. */
#ifndef OB_COLLECTIVES_SETTLE_H
#define OB_COLLECTIVES_SETTLE_H

#include "collectives/agree.h"

/* Collective, in creation: the ranks agree on `terms`, find out which share a host, take rank 0's
 * costs, and exchange the names of their hosts. `status` is this rank's so far; `host` NULL:
 * gethostname's. comm->host_names has memory already. */
onebit_status_t ob_settle(onebit_comm_t comm, onebit_status_t status, const struct ob_term *terms,
                          size_t count, const char *host);

#endif
