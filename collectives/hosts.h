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

/* Numbers the hosts. `host_of[r]` is any number that the ranks of a host have in common and no
 * other rank has; NULL: all ranks are on one host. ONEBIT_ERROR_MEMORY; the hosts are then safe to
 * destroy. */
onebit_status_t ob_hosts_create(struct ob_hosts *hosts, const int *host_of, int rank, int size);
void ob_hosts_destroy(struct ob_hosts *hosts);

/* --- Memory that the ranks of a host share -----------------------------------------------------*/

/* Each rank has a block of its own, and maps those of the others. It is POSIX shared memory, so
 * that processes and threads use it in the same way, and each rank unmaps it without the others. */

struct ob_shared {
  size_t bytes;
  int blocks, own;
  uint64_t name;        /* of this rank's block; 0: it has none, or none any more */
  int file;             /* open and locked while the block has a name: others do not remove it */
  unsigned char **base; /* the address of block k; NULL while it is not attached */
};

/* Makes this rank's block, zeroed: number `own` of `blocks`. Afterwards every rank tells the others
 * shared->name. Removes the blocks that killed processes of this user have left behind. On failure
 * (ONEBIT_ERROR_MEMORY) `shared` is safe to destroy. */
onebit_status_t ob_shared_create(struct ob_shared *shared, size_t bytes, int blocks, int own);

/* Attaches block number `block`, by its name. ONEBIT_ERROR_MEMORY: it does not exist, belongs to
 * another user, has another size, or is no shared memory. */
onebit_status_t ob_shared_attach(struct ob_shared *shared, int block, uint64_t name);

/* Removes the name once all ranks have attached the memory, so that the system frees the memory
 * even if the process is killed. */
void ob_shared_unlink(struct ob_shared *shared);

void ob_shared_destroy(struct ob_shared *shared);

#endif
