/* Finds out by MPI's name service whether all ranks have the library. */
#define _DEFAULT_SOURCE /* usleep */
#include "dropin/mpi/preload_presence.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/hash.h"

enum {
  NAME_BYTES = 64,
  VALUE_BYTES = MPI_MAX_PORT_NAME > 1024 ? MPI_MAX_PORT_NAME : 1024, /* any library's fit */
  OWN_BYTES = 32,
  /* Attempts to find a rank, which may be on its way out of MPI_Init, on a machine with other
   * work. */
  ATTEMPTS = 250,
  ANSWER_ATTEMPTS = 1500,
  PAUSE = 20000, /* microseconds */
  ANSWER = -1    /* in place of a rank: what rank 0 has found */
};

static struct {
  int rank;
  uint64_t job;
  bool published, answered;
  char value[OWN_BYTES], answer[OWN_BYTES];
} presence;

/* Error handlers that are replaced meanwhile: by default errors go to that of MPI_COMM_WORLD, or in
 * MPI 4 of MPI_COMM_SELF, which ends the program, but a missing name is no error here. */
struct handlers {
  MPI_Errhandler world, self;
};

static struct handlers hold_errors(void) {
  struct handlers handlers;
  PMPI_Comm_get_errhandler(MPI_COMM_WORLD, &handlers.world);
  PMPI_Comm_get_errhandler(MPI_COMM_SELF, &handlers.self);
  PMPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  PMPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
  return handlers;
}

static void release_errors(struct handlers *handlers) {
  PMPI_Comm_set_errhandler(MPI_COMM_WORLD, handlers->world);
  PMPI_Comm_set_errhandler(MPI_COMM_SELF, handlers->self);
  PMPI_Errhandler_free(&handlers->world);
  PMPI_Errhandler_free(&handlers->self);
}

/* ---- Names: of a rank, and of what rank 0 has found ---- */

static const char *preload_presence_name_of(int rank) {
  static char name[NAME_BYTES];
  snprintf(name, NAME_BYTES, "onebit-%016llx-%d", (unsigned long long)presence.job, rank);
  return name;
}

static bool preload_presence_look_up(int rank, int attempts, char value[VALUE_BYTES]) {
  for (int attempt = 1;; attempt++) {
    memset(value, 0, VALUE_BYTES);
    if (PMPI_Lookup_name(preload_presence_name_of(rank), MPI_INFO_NULL, value) == MPI_SUCCESS &&
        value[0])
      return true;
    if (attempt >= attempts)
      return false;
    usleep(PAUSE);
  }
}

/* Publishes this rank's value, and withdraws what an earlier program of the job has left. */
static bool preload_presence_publish(int rank, const char *value) {
  char found[VALUE_BYTES];
  for (int attempt = 0; attempt < 2; attempt++) {
    if (PMPI_Publish_name(preload_presence_name_of(rank), MPI_INFO_NULL, value) == MPI_SUCCESS &&
        preload_presence_look_up(rank, 1, found) && !strcmp(found, value))
      return true;
    PMPI_Unpublish_name(preload_presence_name_of(rank), MPI_INFO_NULL, value);
  }
  return false;
}

/* Hashes what ranks of one job have in common, and their number: jobs may share a name service. */
static uint64_t hash_of_job(int size) {
  static const char *const variables[] = {"PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID",
                                          "PBS_JOBID", "LSB_JOBID"};
  uint64_t hash = ob_hash(OB_HASH_START, &size, sizeof size);
  for (size_t i = 0; i < sizeof variables / sizeof variables[0]; i++) {
    const char *text = getenv(variables[i]);
    if (text)
      hash = ob_hash(hash, text, strlen(text) + 1);
  }
  return hash;
}

/* True for ranks that a program has started: they share their parents' name service, and their
 * numbers, and without a name of the job they could be taken for those. */
static bool is_unnamed_child(void) {
  MPI_Comm parent = MPI_COMM_NULL;
  PMPI_Comm_get_parent(&parent);
  return parent != MPI_COMM_NULL && !getenv("PMIX_NAMESPACE");
}

/* ---- Looking ---- */

static int preload_presence_first_missing(int size) {
  char value[VALUE_BYTES];
  int rank = 1;
  while (rank < size && preload_presence_look_up(rank, ATTEMPTS, value))
    rank++;
  return rank;
}

/* The first rank that has no library, or the number of ranks. */
static int missing_rank(int size) {
  char value[VALUE_BYTES];
  if (presence.rank != 0)
    return preload_presence_look_up(0, ATTEMPTS, value) &&
                   preload_presence_look_up(ANSWER, ANSWER_ATTEMPTS, value)
               ? atoi(value)
               : 0;
  int missing = preload_presence_first_missing(size);
  snprintf(presence.answer, sizeof presence.answer, "%d", missing);
  presence.answered = preload_presence_publish(ANSWER, presence.answer);
  return missing;
}

/* True for the first rank that is there: it finds none before itself. */
static bool is_first(void) {
  char value[VALUE_BYTES];
  int rank = 0;
  while (rank < presence.rank && !preload_presence_look_up(rank, 1, value))
    rank++;
  return rank == presence.rank;
}

struct ob_presence ob_presence_find(int rank, int size) {
  struct ob_presence result = {.found = OB_PRESENCE_UNKNOWN, .speaks = rank == 0};
  presence.rank = rank;
  presence.job = hash_of_job(size);
  snprintf(presence.value, sizeof presence.value, "%ld", (long)getpid());
  if (is_unnamed_child())
    return result;
  struct handlers handlers = hold_errors();
  presence.published = preload_presence_publish(rank, presence.value);
  if (presence.published) {
    result.missing = missing_rank(size);
    result.found = result.missing == size ? OB_PRESENCE_ALL : OB_PRESENCE_SOME;
    result.speaks = rank == 0 || (result.missing == 0 && is_first());
  }
  release_errors(&handlers);
  return result;
}

void ob_presence_end(void) {
  struct handlers handlers = hold_errors();
  if (presence.published)
    PMPI_Unpublish_name(preload_presence_name_of(presence.rank), MPI_INFO_NULL, presence.value);
  if (presence.answered)
    PMPI_Unpublish_name(preload_presence_name_of(ANSWER), MPI_INFO_NULL, presence.answer);
  presence.published = presence.answered = false;
  release_errors(&handlers);
}
