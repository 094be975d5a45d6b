/*
 * Memory that the ranks of a host share: each rank has a block of its own, and sees those of the
 * others. POSIX shared memory, so that it is the same for processes and for threads, and giving it
 * back is a rank's own affair.
 */
#ifndef OB_COLLECTIVES_SHARED_H
#define OB_COLLECTIVES_SHARED_H

#include <stddef.h>
#include <stdint.h>

#include "onebit/status.h"

struct ob_shared {
  size_t bytes;
  int blocks, own;
  uint64_t name;        /* of this rank's block; 0 when it has none (any more) */
  int file;             /* while it has one: locked, so that nobody takes it for left behind */
  unsigned char **base; /* block k, here; NULL while not attached */
};

/* Makes this rank's block, zeroed: number `own` of `blocks`. Afterwards every rank tells the others
 * shared->name. Blocks that killed processes of this user have left behind are taken away. On
 * failure (ONEBIT_ERROR_MEMORY) it is safe to destroy. */
onebit_status_t ob_shared_create(struct ob_shared *shared, size_t bytes, int blocks, int own);

/* Attaches block number `block`, by its name. ONEBIT_ERROR_MEMORY: it does not exist, belongs to
 * another user, has another size, or is no shared memory. */
onebit_status_t ob_shared_attach(struct ob_shared *shared, int block, uint64_t name);

/* When all have attached it: takes the name back, so that nothing is left behind whatever happens
 * to the process. */
void ob_shared_hide(struct ob_shared *shared);

void ob_shared_destroy(struct ob_shared *shared);

#endif
