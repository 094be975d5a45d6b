/* Ranks as threads of this process or as processes of MPI. */
#define _POSIX_C_SOURCE 200809L
#include "tools/replay/ranks.h"

#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "onebit/onebit.h"

#ifdef ONEBIT_HAVE_MPI
#include "onebit/mpi.h"
#endif

/* Where threads wait for each other. The gate is held while they are made: if one cannot be, those
 * that were find the group abandoned and leave, instead of waiting for it. */
struct replay_meeting {
  pthread_mutex_t gate;
  bool abandoned;
  pthread_barrier_t barrier;
  const void **parts; /* one a rank: what it shows the others */
};

struct thread {
  pthread_t id;
  struct replay_rank rank;
  replay_body *body;
  void *context;
};

static void *run_thread(void *argument) {
  struct thread *self = argument;
  pthread_mutex_lock(&self->rank.meeting->gate);
  bool abandoned = self->rank.meeting->abandoned;
  pthread_mutex_unlock(&self->rank.meeting->gate);
  if (!abandoned)
    self->body(&self->rank, self->context);
  onebit_comm_destroy(self->rank.comm);
  return NULL;
}

/* Starts them, waits for them, and says how many could be started. */
static int run_threads(struct thread *threads, int size, struct replay_meeting *meeting) {
  int started = 0;
  pthread_mutex_lock(&meeting->gate);
  while (started < size &&
         pthread_create(&threads[started].id, NULL, run_thread, &threads[started]) == 0)
    started++;
  meeting->abandoned = started < size;
  pthread_mutex_unlock(&meeting->gate);
  for (int r = 0; r < started; r++)
    pthread_join(threads[r].id, NULL);
  for (int r = started; r < size; r++)
    onebit_comm_destroy(threads[r].rank.comm);
  return started;
}

static bool meet(struct thread *threads, int size, const void **parts, char words[REPLAY_WORDS]) {
  struct replay_meeting meeting = {.parts = parts};
  pthread_mutex_init(&meeting.gate, NULL);
  pthread_barrier_init(&meeting.barrier, NULL, (unsigned)size);
  for (int r = 0; r < size; r++)
    threads[r].rank.meeting = &meeting;
  int started = run_threads(threads, size, &meeting);
  pthread_barrier_destroy(&meeting.barrier);
  pthread_mutex_destroy(&meeting.gate);
  if (started == size)
    return true;
  snprintf(words, REPLAY_WORDS, "only %d of %d threads could be started", started, size);
  return false;
}

bool replay_on_threads(int size, replay_body *body, void *context, char words[REPLAY_WORDS]) {
  struct thread *threads = calloc((size_t)size, sizeof *threads);
  onebit_comm_t *comms = calloc((size_t)size, sizeof *comms);
  const void **parts = calloc((size_t)size, sizeof *parts);
  bool good = false;
  if (!threads || !comms || !parts)
    snprintf(words, REPLAY_WORDS, "no memory for %d ranks", size);
  else if (onebit_comm_create_loopback(size, comms) != ONEBIT_OK)
    snprintf(words, REPLAY_WORDS, "%s", onebit_last_error());
  else {
    for (int r = 0; r < size; r++)
      threads[r] = (struct thread){
          .rank = {.rank = r, .size = size, .comm = comms[r]}, .body = body, .context = context};
    good = meet(threads, size, parts, words);
  }
  free((void *)parts);
  free(comms);
  free(threads);
  return good;
}

#ifdef ONEBIT_HAVE_MPI
bool replay_on_mpi(replay_body *body, void *context, char words[REPLAY_WORDS]) {
  struct replay_rank rank = {0};
  if (onebit_comm_create_mpi(MPI_COMM_WORLD, &rank.comm) != ONEBIT_OK) {
    snprintf(words, REPLAY_WORDS, "%s", onebit_last_error());
    return false;
  }
  rank.rank = onebit_comm_rank(rank.comm);
  rank.size = onebit_comm_size(rank.comm);
  body(&rank, context);
  onebit_comm_destroy(rank.comm);
  return true;
}

static void share_mpi(const struct replay_rank *rank, const void *mine, size_t bytes,
                      replay_visit *visit, void *context) {
  _Alignas(max_align_t) char part[REPLAY_PART];
  for (int r = 0; r < rank->size; r++) {
    if (r == rank->rank)
      memcpy(part, mine, bytes);
    MPI_Bcast(part, (int)bytes, MPI_BYTE, r, MPI_COMM_WORLD);
    visit(context, r, part);
  }
}
#else
bool replay_on_mpi(replay_body *body, void *context, char words[REPLAY_WORDS]) {
  (void)body;
  (void)context;
  snprintf(words, REPLAY_WORDS, "this build is without MPI: only --loopback can run a case");
  return false;
}

/* Never called: without MPI all ranks are threads. */
static void share_mpi(const struct replay_rank *rank, const void *mine, size_t bytes,
                      replay_visit *visit, void *context) {
  (void)bytes;
  visit(context, rank->rank, mine);
}
#endif

void replay_share(const struct replay_rank *rank, const void *mine, size_t bytes,
                  replay_visit *visit, void *context) {
  struct replay_meeting *meeting = rank->meeting;
  if (!meeting) {
    share_mpi(rank, mine, bytes, visit, context);
    return;
  }
  meeting->parts[rank->rank] = mine;
  pthread_barrier_wait(&meeting->barrier);
  for (int r = 0; r < rank->size; r++)
    visit(context, r, meeting->parts[r]);
  pthread_barrier_wait(&meeting->barrier); /* until then the others read `mine` */
}
