/*
 * The hosts of the ranks. Hosts are numbered in the order of their lowest ranks, and the ranks of a
 * host in the order of their ranks.
 */
#ifndef OB_COLLECTIVES_HOSTS_H
#define OB_COLLECTIVES_HOSTS_H

#include <stddef.h>
#include <stdint.h>

#include "onebit/status.h"

struct ob_hosts {
  int count; /* the number of hosts */
  int each;  /* ranks on every host; 0: not the same number on all */
  int fewest, max;
  int host;       /* the number of this rank's host */
  int local_rank; /* this rank's number among those of its host */
  int here;       /* the number of ranks on this host */
  int *ranks;     /* if `each` is not 0: local rank p of host h is ranks[h * each + p] */
};

/* Numbers the hosts. `host_of[r]` is any number that the ranks of one host share and no other rank
 * has; NULL: all ranks are on one host. After ONEBIT_ERROR_MEMORY the hosts are safe to destroy. */
onebit_status_t ob_hosts_create(struct ob_hosts *hosts, const int *host_of, int rank, int size);
void ob_hosts_destroy(struct ob_hosts *hosts);

/* --- Memory that the ranks of a host share -----------------------------------------------------*/

/* Each rank has a block of its own, and maps the blocks of the others. Blocks are POSIX shared
 * memory, so that processes and threads use them in the same way, and each rank can unmap a block
 * on its own. */

struct ob_shared {
  size_t bytes;
  int blocks, own;
  uint64_t name;        /* the name of this rank's block; 0: none, or none any more */
  int file;             /* open and locked while the block has a name, so that it is not removed */
  unsigned char **base; /* the address of block k; NULL while it is not attached */
};

/* Makes this rank's block, zeroed: number `own` of `blocks`. Afterwards every rank sends
 * shared->name to the others. Also removes the blocks that killed processes of this user have left.
 * After ONEBIT_ERROR_MEMORY `shared` is safe to destroy. */
onebit_status_t ob_shared_create(struct ob_shared *shared, size_t bytes, int blocks, int own);

/* Attaches block number `block` by its name. ONEBIT_ERROR_MEMORY: the block does not exist, belongs
 * to another user, has another size, or is no shared memory. */
onebit_status_t ob_shared_attach(struct ob_shared *shared, int block, uint64_t name);

/* Removes the block's name once all ranks have attached the block. From then on the system frees
 * the memory even if the process is killed. */
void ob_shared_unlink(struct ob_shared *shared);

void ob_shared_destroy(struct ob_shared *shared);

#endif
