/* Ranks that are processes, and ranks that are threads. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/faults/faults.h"

static void rank_process(struct scene *scene, int rank) {
  struct seat seat = {.scene = scene, .rank = rank};
  scene->records[rank].process = getpid();
  seat_run(&seat, connect_sockets);
  _exit(0);
}

void run_processes(struct scene *scene) {
  sockets_open();
  pid_t processes[RANKS];
  for (int rank = 0; rank < RANKS; rank++)
    if ((processes[rank] = fork()) == 0)
      rank_process(scene, rank);
  for (int a = 3; a < 3 + RANKS * RANKS * 2; a++)
    close(a); /* the connections are the ranks' alone */
  for (int rank = 0; rank < RANKS; rank++)
    waitpid(processes[rank], NULL, 0);
}

static onebit_comm_t comms[RANKS];

onebit_status_t connect_threads(struct seat *seat, onebit_comm_t *comm) {
  *comm = comms[seat->rank];
  comms[seat->rank] = NULL;
  return ONEBIT_OK;
}

static void *rank_thread(void *argument) {
  struct seat *seat = argument;
  seat_run(seat, connect_threads);
  onebit_comm_destroy(comms[seat->rank]); /* of a rank that left before it took it */
  return NULL;
}

void run_threads(struct scene *scene) {
  pthread_t threads[RANKS];
  struct seat seats[RANKS];
  if (onebit_comm_create_loopback(RANKS, comms) != ONEBIT_OK)
    exit(3);
  for (int rank = 0; rank < RANKS; rank++) {
    seats[rank] = (struct seat){.scene = scene, .rank = rank};
    if (pthread_create(&threads[rank], NULL, rank_thread, &seats[rank]))
      exit(3);
  }
  for (int rank = 0; rank < RANKS; rank++)
    pthread_join(threads[rank], NULL);
}
