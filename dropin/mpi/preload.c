/* The beginning and the end of a preloaded program: what all ranks settle, and what is reported. */
#define _GNU_SOURCE /* RTLD_NEXT */
#include "dropin/mpi/preload.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bound_mpi.h"
#include "base/call_scope.h"
#include "base/error.h"
#include "base/knobs.h"
#include "base/process.h"
#include "dropin/mpi/preload_flights.h"
#include "dropin/mpi/preload_presence.h"

enum { MESSAGE_BYTES = 512 };

/* True: rank 0's exit status becomes 1. One rank's is enough, launchers end the others when they
 * see it. */
static bool failed;
static bool went_well(void) { return !failed; }

/* ---- What this rank finds ---- */

typedef const char *version_call(void);

/* Checks that the program's onebit is this one: a program that is linked to onebit gets this
 * library's calls. */
static onebit_status_t check_version(void) {
  version_call *next;
  void *found = dlsym(RTLD_NEXT, "onebit_version");
  if (!found)
    return ONEBIT_OK;
  memcpy(&next, &found, sizeof next); /* C knows no cast from void * to a function's address */
  if (!strcmp(next(), onebit_version()))
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                  "the program is linked to onebit %s, but onebit %s is preloaded", next(),
                  onebit_version());
}

static int every_rank;
static onebit_status_t find_settings(void) {
  onebit_status_t status = ob_preload_read_settings();
  if (status == ONEBIT_OK)
    status = ob_knob_number(OB_KNOB_EVERY_RANK, 0, 1, 0, &every_rank);
  return status == ONEBIT_OK ? check_version() : status;
}

/* ---- What all of them agree on ---- */

/* Gives all ranks the message of the lowest rank that has failed; false where none has. */
static bool agree_on_failure(int rank, int size, char message[MESSAGE_BYTES]) {
  int mine = message[0] ? rank : size, first = size;
  PMPI_Allreduce(&mine, &first, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  if (first == size)
    return false;
  PMPI_Bcast(message, MESSAGE_BYTES, MPI_CHAR, first, MPI_COMM_WORLD);
  size_t length = strlen(message);
  if (first)
    snprintf(message + length, MESSAGE_BYTES - length, " (rank %d)", first);
  return true;
}

static bool same_rules(void) {
  uint64_t hash = ob_preload_hash(), least[2];
  uint64_t mine[2] = {hash, ~hash}; /* the least of the second is of the largest hash */
  PMPI_Allreduce(mine, least, 2, MPI_UINT64_T, MPI_MIN, MPI_COMM_WORLD);
  return least[0] == ~least[1];
}

/* Makes one rank's wish everyone's, where the variable did not reach all of them. */
static void agree_on_required(void) {
  int mine = ob_preload.required, most = 0;
  PMPI_Allreduce(&mine, &most, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  ob_preload.required = most;
}

/* Agrees with all ranks, which are known to have the library. Collective. */
static void mpi_preload_agree(int rank, int size, char message[MESSAGE_BYTES]) {
  bool bad = agree_on_failure(rank, size, message);
  agree_on_required();
  if (!bad && !same_rules())
    snprintf(message, MESSAGE_BYTES,
             "the ranks' rules (ONEBIT_RULES) or versions of onebit differ");
}

/* Finds out whether every rank has the library: only the name service can tell; without one
 * ONEBIT_EVERY_RANK=1 says that the launcher has given it to all. */
static bool has_every_rank(int size, const struct ob_presence *presence,
                           char message[MESSAGE_BYTES]) {
  if (size == 1 || presence->found == OB_PRESENCE_ALL ||
      (presence->found == OB_PRESENCE_UNKNOWN && every_rank))
    return true;
  if (presence->found == OB_PRESENCE_SOME)
    snprintf(message, MESSAGE_BYTES, "rank %d of MPI_COMM_WORLD has no libonebit-mpi.so before MPI",
             presence->missing);
  else if (!message[0])
    snprintf(
        message, MESSAGE_BYTES,
        "the launcher has no name service (MPI_Publish_name), with which ranks find out whether "
        "all have libonebit-mpi.so; if they have, set ONEBIT_EVERY_RANK=1");
  return false;
}

static bool speaks;

/* Settles with the other ranks, once, from MPI_Init. */
static void mpi_preload_settle(void) {
  static char message[MESSAGE_BYTES];
  int rank, size;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  PMPI_Comm_size(MPI_COMM_WORLD, &size);
  ob_counters_start(ob_seconds());
  ob_preload_judge_exit(went_well);
  struct ob_presence presence = ob_presence_find(rank, size);
  if (find_settings() != ONEBIT_OK || ob_launch_check(MPI_COMM_WORLD) != ONEBIT_OK)
    snprintf(message, sizeof message, "%s", onebit_last_error());
  ob_preload.trusted = has_every_rank(size, &presence, message);
  speaks = presence.speaks;
  if (ob_preload.trusted)
    mpi_preload_agree(rank, size, message);
  ob_preload_refuse(message[0] ? message : NULL);
  if (speaks)
    ob_preload_report_start(size);
  if (message[0] && ob_preload.required)
    PMPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
  if (!message[0])
    ob_preload_open();
}

/* Ends the library's work, from MPI_Finalize. */
static void mpi_preload_end(void) {
  OB_CALL_SCOPE;
  ob_preload_close();
  ob_flights_finish();
  bool compressed = ob_preload_report_end(ob_preload.trusted, speaks);
  failed = !compressed && ob_preload.required && speaks;
  ob_presence_end();
}

/* ---- MPI's beginning and end ---- */

static bool started;
static void start_unless_foreign(void) {
  OB_CALL_SCOPE;
  started = ob_mpi_bind() == ONEBIT_OK;
  if (started)
    mpi_preload_settle();
  else if (ob_launch_rank() == 0)
    fprintf(stderr, "onebit %s: nothing is compressed: %s\n", onebit_version(),
            onebit_last_error());
}

/* Warns before MPI_Init, which may not return. */
static void warn_of_launcher(void) {
  char text[256];
  if (ob_launch_rank() == 0 && ob_launch_is_foreign(text, sizeof text))
    fprintf(stderr, "onebit %s: %s\n", onebit_version(), text);
}

OB_PRELOAD_VISIBLE int MPI_Init(int *argc, char ***argv) {
  warn_of_launcher();
  int code = PMPI_Init(argc, argv);
  if (code == MPI_SUCCESS)
    start_unless_foreign();
  return code;
}

OB_PRELOAD_VISIBLE int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
  warn_of_launcher();
  int code = PMPI_Init_thread(argc, argv, required, provided);
  if (code == MPI_SUCCESS)
    start_unless_foreign();
  return code;
}

OB_PRELOAD_VISIBLE int MPI_Finalize(void) {
  if (started)
    mpi_preload_end();
  return PMPI_Finalize();
}
