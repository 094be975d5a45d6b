/* Exchanges the hosts, costs and host names of a new communicator, in the library's own
 * messages. */
#define _POSIX_C_SOURCE 200809L
#include "collectives/communicator.h"

#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "base/hash.h"
#include "base/memory.h"
#include "base/process.h"
#include "collectives/cost/tuning.h"
#include "collectives/watch.h"

/* Returns a number that identifies the host. */
static uint64_t settle_host_number(const char *name) {
  char own[256] = "";
  if (!name && gethostname(own, sizeof own - 1) == 0)
    name = own;
  return ob_hash(OB_HASH_START, name ? name : "", name ? strlen(name) : 0);
}

/* Finds out from the host numbers that the ranks have sent which ranks share a host. */
static onebit_status_t settle_find_hosts(onebit_comm_t comm) {
  int *host_of = ob_allocate((size_t)comm->size, sizeof *host_of);
  if (!host_of)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for the host names of %d ranks",
                    comm->size);
  for (int rank = 0; rank < comm->size; rank++)
    while (ob_agree_note(comm, host_of[rank]) != ob_agree_note(comm, rank))
      host_of[rank]++;
  ob_hosts_destroy(&comm->hosts);
  onebit_status_t status = ob_hosts_create(&comm->hosts, host_of, comm->rank, comm->size);
  ob_release(host_of);
  return status;
}

/* True if all ranks are on one machine but on several hosts, as with containers. */
static bool settle_is_one_machine(onebit_comm_t comm) {
  uint64_t first = ob_agree_note(comm, 0);
  int rank = 1;
  while (rank < comm->size && ob_agree_note(comm, rank) == first)
    rank++;
  return first && rank == comm->size && comm->hosts.count > 1;
}

/* Sets the costs of rank 0 on all ranks, so that all ranks choose the same schedules. */
static onebit_status_t settle_find_costs(onebit_comm_t comm) {
  struct ob_batch *batch = comm->control;
  batch->sends = batch->receives = 0;
  if (comm->rank == 0)
    ob_tuning_find(&comm->costs);
  if (comm->rank == 0 && settle_is_one_machine(comm))
    ob_costs_of_one_machine(&comm->costs);
  for (int peer = 1; comm->rank == 0 && peer < comm->size; peer++)
    batch->send[batch->sends++] = (struct ob_endpoint){&comm->costs, sizeof comm->costs, peer};
  if (comm->rank != 0)
    batch->receive[batch->receives++] = (struct ob_endpoint){&comm->costs, sizeof comm->costs, 0};
  OB_TRY(comm->transport->begin(batch, 0));
  OB_TRY(ob_watch_batch(batch, "creation of the communicator: broadcast of rank 0's cost table"));
  if (batch->receives && batch->receive[0].bytes != sizeof comm->costs)
    return ob_error(
        ONEBIT_ERROR_MESSAGE,
        "rank 0 sent %zu bytes of costs, expected %zu: install the same onebit on all hosts",
        batch->receive[0].bytes, sizeof comm->costs);
  return ONEBIT_OK;
}

onebit_status_t ob_comm_exchange_setup(onebit_comm_t comm, onebit_status_t status,
                                       const struct ob_term *terms, size_t count,
                                       const char *host) {
  OB_TRY(ob_agree_noting(comm, status, terms, count, settle_host_number(host)));
  OB_TRY(ob_agree_noting(comm, settle_find_hosts(comm), NULL, 0, ob_machine_number()));
  status = settle_find_costs(comm);
  if (status == ONEBIT_ERROR_TRANSPORT)
    return status;
  const struct ob_term costs = {"the cost table that rank 0 sent (shown as a hash)",
                                ob_hash(OB_HASH_START, &comm->costs, sizeof comm->costs)};
  OB_TRY(ob_agree(comm, status, &costs, 1));
  return ob_agree_names(comm, host);
}
