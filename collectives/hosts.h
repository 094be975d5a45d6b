/*
 * The hosts of the ranks. Hosts are numbered in the order of their first rank, and so are the ranks
 * of a host.
 */
#ifndef OB_COLLECTIVES_HOSTS_H
#define OB_COLLECTIVES_HOSTS_H

#include <stddef.h>

#include "onebit/status.h"

struct ob_hosts {
  int count; /* hosts */
  int each;  /* ranks on every host, or 0: not the same on all */
  int fewest, max;
  int host;       /* this rank's */
  int local_rank; /* this rank's number among those of its host */
  int here;       /* ranks on this host */
  int *ranks;     /* with `each`: local rank p of host h is ranks[h * each + p] */
};

/* `host_of[r]` is any number that the ranks of a host have in common and no other rank has; NULL:
 * all on one host. ONEBIT_ERROR_MEMORY; the hosts are then safe to destroy. */
onebit_status_t ob_hosts_create(struct ob_hosts *hosts, const int *host_of, int rank, int size);
void ob_hosts_destroy(struct ob_hosts *hosts);

#endif
