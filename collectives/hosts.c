/* Numbers the hosts and their ranks. */
#include "collectives/hosts.h"

#include "base/error.h"
#include "base/memory.h"

/* The first rank on the host of this rank. */
static int first_on(const int *host_of, int rank) {
  int first = 0;
  while (host_of && host_of[first] != host_of[rank])
    first++;
  return first;
}

/* The state of a host while hosts are numbered: at the number of its first rank. */
struct tally {
  int number, ranks;
};

static void hosts_count(struct ob_hosts *hosts, const struct tally *tallies, int size) {
  hosts->fewest = hosts->max = tallies[0].ranks;
  for (int r = 0; r < size; r++) {
    int ranks = tallies[r].ranks;
    if (ranks == 0)
      continue;
    hosts->fewest = ranks < hosts->fewest ? ranks : hosts->fewest;
    hosts->max = ranks > hosts->max ? ranks : hosts->max;
  }
  hosts->each = hosts->fewest == hosts->max ? hosts->max : 0;
}

/* The places of all ranks, where every host has `each`. */
static void order_ranks(struct ob_hosts *hosts, const int *host_of, struct tally *tallies,
                        int size) {
  for (int r = 0; r < size; r++)
    tallies[r].ranks = 0;
  for (int r = 0; r < size; r++) {
    struct tally *tally = &tallies[first_on(host_of, r)];
    hosts->ranks[tally->number * hosts->each + tally->ranks++] = r;
  }
}

onebit_status_t ob_hosts_create(struct ob_hosts *hosts, const int *host_of, int rank, int size) {
  *hosts = (struct ob_hosts){0};
  struct tally *tallies = ob_allocate((size_t)size, sizeof *tallies);
  hosts->ranks = ob_allocate((size_t)size, sizeof *hosts->ranks);
  if (!tallies || !hosts->ranks) {
    ob_release(tallies);
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for the hosts of %d ranks", size);
  }
  for (int r = 0; r < size; r++) {
    struct tally *tally = &tallies[first_on(host_of, r)];
    if (tally->ranks == 0)
      tally->number = hosts->count++;
    if (r == rank) {
      hosts->host = tally->number;
      hosts->local_rank = tally->ranks;
    }
    tally->ranks++;
  }
  hosts->here = tallies[first_on(host_of, rank)].ranks;
  hosts_count(hosts, tallies, size);
  if (hosts->each)
    order_ranks(hosts, host_of, tallies, size);
  ob_release(tallies);
  return ONEBIT_OK;
}

void ob_hosts_destroy(struct ob_hosts *hosts) {
  ob_release(hosts->ranks);
  hosts->ranks = NULL;
}
