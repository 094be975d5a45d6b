/* Ranks that a launcher such as torchrun has started, and that talk over the library's own
 * connections: without MPI. */
#include <stdlib.h>
#include <string.h>

#include "bench/bench.h"
#include "collectives/communicator.h"
#include "collectives/watch.h"

#define PART ((size_t)4096) /* numbers that are combined at a time */

/* Ends the process after a failure: a team that is not complete would wait for ever. */
static void require_ok(onebit_status_t status, const char *what) {
  if (bench_status(status, what) != BENCH_OK)
    exit(BENCH_FAILED);
}

static void bench_sockets_barrier(struct bench_team *team) {
  require_ok(ob_agree(team->comm, ONEBIT_OK, NULL, 0), "barrier");
}

/* Exchanges each rank's numbers: the team's state has PART of them for every rank. */
static void exchange(struct bench_team *team, size_t count) {
  struct ob_batch *batch = team->comm->control;
  double *all = team->state, *mine = all + (size_t)team->rank * PART;
  size_t bytes = count * sizeof *all;
  batch->sends = batch->receives = 0;
  for (int peer = 0; peer < team->size; peer++) {
    if (peer == team->rank)
      continue;
    batch->send[batch->sends++] = (struct ob_endpoint){mine, bytes, peer};
    batch->receive[batch->receives++] =
        (struct ob_endpoint){all + (size_t)peer * PART, bytes, peer};
  }
  if (batch->sends == 0)
    return;
  require_ok(team->comm->transport->begin(batch, 0), "exchange of numbers");
  require_ok(ob_watch_batch(batch, "exchange of numbers"), "exchange of numbers");
}

static void bench_sockets_combine(struct bench_team *team, double *values, size_t count, bool sum) {
  double *all = team->state;
  for (size_t first = 0; first < count; first += PART) {
    size_t part = count - first < PART ? count - first : PART;
    memcpy(all + (size_t)team->rank * PART, values + first, part * sizeof *all);
    exchange(team, part);
    for (size_t i = 0; i < part; i++) {
      double result = all[i];
      for (int rank = 1; rank < team->size; rank++) {
        double value = all[(size_t)rank * PART + i];
        result = sum ? result + value : value > result ? value : result;
      }
      values[first + i] = result;
    }
  }
}

static const struct bench_team_kind kind = {.barrier = bench_sockets_barrier,
                                            .combine = bench_sockets_combine};

int bench_sockets_run(int connections, bench_body *body, const void *context) {
  onebit_sockets_options_t options = ONEBIT_SOCKETS_OPTIONS_INIT;
  struct bench_team team = {.kind = &kind};
  options.streams = connections;
  BENCH_TRY(
      bench_status(onebit_comm_create_sockets(&options, &team.comm), "onebit_comm_create_sockets"));
  team.rank = onebit_comm_rank(team.comm);
  team.size = onebit_comm_size(team.comm);
  team.state = malloc((size_t)team.size * PART * sizeof(double));
  int status =
      team.state ? body(&team, context) : bench_no_memory("ranks' numbers", (size_t)team.size);
  onebit_comm_destroy(team.comm);
  free(team.state);
  return status;
}
