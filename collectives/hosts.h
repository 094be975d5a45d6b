/*
 * The hosts of the ranks. Hosts are numbered in the order of their first rank, and so are the ranks
 * of a host.
 */
#ifndef OB_COLLECTIVES_HOSTS_H
#define OB_COLLECTIVES_HOSTS_H

#include <stddef.h>
#include <stdint.h>

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

/* --- Memory that the ranks of a host share -----------------------------------------------------*/

/* Each rank has a block of its own, and sees those of the others. POSIX shared memory, so that it
 * is the same for processes and for threads, and giving it back is a rank's own affair. */

struct ob_shared {
  size_t bytes;
  int blocks, own;
  uint64_t name;        /* of this rank's block; 0 when it has none (any more) */
  int file;             /* open and locked while there is a block: it is in use */
  unsigned char **base; /* block k, here; NULL while not attached */
};

/* Makes this rank's block, zeroed: number `own` of `blocks`. Afterwards every rank tells the others
 * shared->name. Blocks that killed processes of this user have left behind are taken away. On
 * failure (ONEBIT_ERROR_MEMORY) it is safe to destroy. */
onebit_status_t ob_shared_create(struct ob_shared *shared, size_t bytes, int blocks, int own);

/* Attaches block number `block`, by its name. ONEBIT_ERROR_MEMORY: it does not exist, belongs to
 * another user, has another size, or is no shared memory. */
onebit_status_t ob_shared_attach(struct ob_shared *shared, int block, uint64_t name);

/* Removes the name once all have attached the memory, so that nothing is left behind whatever
 * happens to the process. */
void ob_shared_hide(struct ob_shared *shared);

void ob_shared_destroy(struct ob_shared *shared);

#endif
