/* Ranks that are threads of this process, and what both kinds of ranks need. */
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <stdlib.h>

#include "bench/bench.h"

bool bench_team_agree(struct bench_team *team, bool well) {
  double worst = well ? 0 : 1;
  team->kind->combine(team, &worst, 1, false);
  return worst == 0;
}

/* What the threads share. */
struct hall {
  pthread_barrier_t barrier;
  double **values; /* one a rank: its array in `combine` */
};

struct member {
  struct bench_team team;
  bench_body *body;
  const void *context;
  pthread_t thread;
  int status;
};

static void threads_barrier(struct bench_team *team) {
  pthread_barrier_wait(&((struct hall *)team->state)->barrier);
}

static double combined(const struct hall *hall, int ranks, size_t i, bool sum) {
  double result = hall->values[0][i];
  for (int rank = 1; rank < ranks; rank++) {
    double value = hall->values[rank][i];
    result = sum ? result + value : value > result ? value : result;
  }
  return result;
}

/* Each thread does a part of the numbers, in everybody's array. */
static void threads_combine(struct bench_team *team, double *values, size_t count, bool sum) {
  struct hall *hall = team->state;
  size_t rank = (size_t)team->rank, ranks = (size_t)team->size;
  hall->values[rank] = values;
  threads_barrier(team);
  for (size_t i = count * rank / ranks; i < count * (rank + 1) / ranks; i++) {
    double result = combined(hall, team->size, i, sum);
    for (size_t k = 0; k < ranks; k++)
      hall->values[k][i] = result;
  }
  threads_barrier(team);
}

static const struct bench_team_kind threads_kind = {.barrier = threads_barrier,
                                                    .combine = threads_combine};

static void *run_member(void *argument) {
  struct member *member = argument;
  member->status = member->body(&member->team, member->context);
  return NULL;
}

/* Rank 0 is the calling thread. The others all start or the program ends: a team that is not
 * complete would wait for ever. */
static int run_members(struct member *members, int ranks) {
  for (int rank = 1; rank < ranks; rank++)
    if (pthread_create(&members[rank].thread, NULL, run_member, &members[rank]) != 0) {
      bench_complain("--ranks %d: no thread for rank %d", ranks, rank);
      exit(BENCH_FAILED);
    }
  run_member(&members[0]);
  int worst = members[0].status;
  for (int rank = 1; rank < ranks; rank++) {
    pthread_join(members[rank].thread, NULL);
    worst = members[rank].status > worst ? members[rank].status : worst;
  }
  return worst;
}

static int run_in_hall(struct hall *hall, onebit_comm_t *comms, struct member *members, int ranks,
                       bench_body *body, const void *context) {
  if (!hall->values || !comms || !members ||
      pthread_barrier_init(&hall->barrier, NULL, (unsigned)ranks) != 0) {
    bench_complain("no memory for %d ranks", ranks);
    return BENCH_FAILED;
  }
  int status =
      bench_status(onebit_comm_create_loopback(ranks, comms), "onebit_comm_create_loopback");
  for (int rank = 0; status == BENCH_OK && rank < ranks; rank++)
    members[rank] =
        (struct member){.team = {&threads_kind, rank, ranks, comms[rank], hall, NULL, 0},
                        .body = body,
                        .context = context};
  if (status == BENCH_OK)
    status = run_members(members, ranks);
  for (int rank = 0; rank < ranks; rank++)
    onebit_comm_destroy(comms[rank]);
  pthread_barrier_destroy(&hall->barrier);
  return status;
}

int bench_team_run_threads(int ranks, bench_body *body, const void *context) {
  struct hall hall = {.values = calloc((size_t)ranks, sizeof(double *))};
  onebit_comm_t *comms = calloc((size_t)ranks, sizeof(onebit_comm_t));
  struct member *members = calloc((size_t)ranks, sizeof(struct member));
  int status = run_in_hall(&hall, comms, members, ranks, body, context);
  free(members);
  free(comms);
  free(hall.values);
  return status;
}
