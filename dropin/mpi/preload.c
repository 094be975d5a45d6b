/*
 * Starts the library in MPI_Init of a preloaded program, and ends it in MPI_Finalize: finds out
 * whether all ranks have the library, agrees on the settings, and reports.
 */
#define _GNU_SOURCE /* RTLD_NEXT */
#include "dropin/mpi/preload.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/bound_mpi.h"
#include "base/call_scope.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/knobs.h"
#include "base/process.h"
#include "dropin/preload.h"

/*
 * ---- Finding the ranks that have the library ----
 *
 * The ranks find out whether all of them have the library. They use no message and no collective
 * for this: a rank without the library would match these with a call of the program. In MPI_Init
 * each rank publishes that it has the library in MPI's name service, which the launcher provides.
 * Rank 0 looks up all other ranks and publishes the result; the other ranks wait for this result.
 */
enum presence_found { PRESENCE_UNKNOWN, PRESENCE_SOME, PRESENCE_ALL };

struct presence {
  enum presence_found found; /* UNKNOWN: there is no name service */
  int missing;               /* with SOME: the first rank that has no library */
  bool reports;              /* this rank is the first that has the library: it prints the report */
};

enum {
  NAME_BYTES = 64,
  VALUE_BYTES = MPI_MAX_PORT_NAME > 1024 ? MPI_MAX_PORT_NAME : 1024, /* with any MPI library */
  OWN_BYTES = 32,
  /* Attempts to find a rank: on a busy machine it may publish its name late. */
  ATTEMPTS = 250,
  ANSWER_ATTEMPTS = 1500,
  PAUSE = 20000, /* microseconds */
  ANSWER = -1    /* the pseudo rank in the name of rank 0's result */
};

static struct {
  int rank;
  uint64_t job;
  bool published, answered;
  char value[OWN_BYTES], answer[OWN_BYTES];
} presence;

/* The program's error handlers, which are replaced during the look-up. By default an error ends the
 * program, through the handler of MPI_COMM_WORLD, or in MPI 4 of MPI_COMM_SELF. A missing name is
 * no error here. */
struct handlers {
  MPI_Errhandler world, self;
};

static struct handlers replace_error_handlers(void) {
  struct handlers handlers;
  PMPI_Comm_get_errhandler(MPI_COMM_WORLD, &handlers.world);
  PMPI_Comm_get_errhandler(MPI_COMM_SELF, &handlers.self);
  PMPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  PMPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
  return handlers;
}

static void restore_error_handlers(struct handlers *handlers) {
  PMPI_Comm_set_errhandler(MPI_COMM_WORLD, handlers->world);
  PMPI_Comm_set_errhandler(MPI_COMM_SELF, handlers->self);
  PMPI_Errhandler_free(&handlers->world);
  PMPI_Errhandler_free(&handlers->self);
}

/* ---- Names of the ranks, and of rank 0's result ---- */

static const char *presence_format_name(int rank) {
  static char name[NAME_BYTES];
  snprintf(name, NAME_BYTES, "onebit-%016llx-%d", (unsigned long long)presence.job, rank);
  return name;
}

static bool presence_look_up(int rank, int attempts, char value[VALUE_BYTES]) {
  for (int attempt = 1;; attempt++) {
    memset(value, 0, VALUE_BYTES);
    if (PMPI_Lookup_name(presence_format_name(rank), MPI_INFO_NULL, value) == MPI_SUCCESS &&
        value[0])
      return true;
    if (attempt >= attempts)
      return false;
    usleep(PAUSE);
  }
}

/* Publishes this rank's value. If an earlier program of the job has left the name published,
 * removes that name first. */
static bool presence_publish(int rank, const char *value) {
  char found[VALUE_BYTES];
  for (int attempt = 0; attempt < 2; attempt++) {
    if (PMPI_Publish_name(presence_format_name(rank), MPI_INFO_NULL, value) == MPI_SUCCESS &&
        presence_look_up(rank, 1, found) && !strcmp(found, value))
      return true;
    PMPI_Unpublish_name(presence_format_name(rank), MPI_INFO_NULL, value);
  }
  return false;
}

/* Returns a hash of the job's name and number of ranks, which all ranks of the job share. Several
 * jobs may use one name service. */
static uint64_t hash_job(int size) {
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

/* Returns true for ranks that a program has spawned in a job without a name. They use the same name
 * service and the same rank numbers as their parents, and could be mistaken for their parents. */
static bool is_unnamed_child(void) {
  MPI_Comm parent = MPI_COMM_NULL;
  PMPI_Comm_get_parent(&parent);
  return parent != MPI_COMM_NULL && !getenv("PMIX_NAMESPACE");
}

/* ---- The look-up ---- */

static int presence_find_missing(int size) {
  char value[VALUE_BYTES];
  int rank = 1;
  while (rank < size && presence_look_up(rank, ATTEMPTS, value))
    rank++;
  return rank;
}

/* Returns the first rank that has no library, or the number of ranks if all have it. Rank 0 looks
 * up the others and publishes the result, which the other ranks wait for. */
static int agree_on_missing_rank(int size) {
  char value[VALUE_BYTES];
  if (presence.rank != 0)
    return presence_look_up(0, ATTEMPTS, value) && presence_look_up(ANSWER, ANSWER_ATTEMPTS, value)
               ? atoi(value)
               : 0;
  int missing = presence_find_missing(size);
  snprintf(presence.answer, sizeof presence.answer, "%d", missing);
  presence.answered = presence_publish(ANSWER, presence.answer);
  return missing;
}

/* Returns true if this is the first rank that has the library. */
static bool is_first_with_library(void) {
  char value[VALUE_BYTES];
  int rank = 0;
  while (rank < presence.rank && !presence_look_up(rank, 1, value))
    rank++;
  return rank == presence.rank;
}

/* Finds out which ranks of MPI_COMM_WORLD have the library, once, in MPI_Init. Waits five seconds
 * for a missing rank. */
static struct presence presence_find(int rank, int size) {
  struct presence result = {.found = PRESENCE_UNKNOWN, .reports = rank == 0};
  presence.rank = rank;
  presence.job = hash_job(size);
  snprintf(presence.value, sizeof presence.value, "%ld", (long)getpid());
  if (is_unnamed_child())
    return result;
  struct handlers handlers = replace_error_handlers();
  presence.published = presence_publish(rank, presence.value);
  if (presence.published) {
    result.missing = agree_on_missing_rank(size);
    result.found = result.missing == size ? PRESENCE_ALL : PRESENCE_SOME;
    result.reports = rank == 0 || (result.missing == 0 && is_first_with_library());
  }
  restore_error_handlers(&handlers);
  return result;
}

/* Withdraws the names that this rank has published. Local. */
static void unpublish_names(void) {
  struct handlers handlers = replace_error_handlers();
  if (presence.published)
    PMPI_Unpublish_name(presence_format_name(presence.rank), MPI_INFO_NULL, presence.value);
  if (presence.answered)
    PMPI_Unpublish_name(presence_format_name(ANSWER), MPI_INFO_NULL, presence.answer);
  presence.published = presence.answered = false;
  restore_error_handlers(&handlers);
}

/* ---- The report ---- */

/* Gathers the counters of this rank, or of all ranks together. */
static void preload_report_gather(struct ob_report *report, bool all) {
  const onebit_counters_t *own = &report->own;
  uint64_t sums[3] = {own->compressed, own->bytes_sent, own->bytes_dense};
  double saved = own->seconds_saved, largest[2] = {own->seconds, ob_report_max_residual_ratio()};
  PMPI_Comm_size(MPI_COMM_WORLD, &report->ranks);
  if (all) {
    PMPI_Allreduce(MPI_IN_PLACE, sums, 3, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    PMPI_Allreduce(MPI_IN_PLACE, &saved, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    PMPI_Allreduce(MPI_IN_PLACE, largest, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  }
  report->compressed = sums[0];
  report->bytes_sent = sums[1];
  report->bytes_dense = sums[2];
  report->seconds_saved = all ? saved / report->ranks : saved;
  report->seconds = largest[0];
  report->max_residual_ratio = largest[1];
}

/* Computes the number of hosts from the launcher's number of ranks on each host, if that is the
 * same on all hosts. */
static int count_hosts(int ranks) {
  const char *text = getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
  int local = atoi(text ? text : (text = getenv("MPI_LOCALNRANKS")) ? text : "0");
  return local > 0 && ranks % local == 0 ? ranks / local : 0;
}

/* Prints the report of all ranks, which is collective over MPI_COMM_WORLD, or of this rank alone.
 * Returns true if any of these ranks has compressed a call. */
static bool preload_report_end(bool all, bool prints) {
  struct ob_report report = {.own_only = !all,
                             .calls = "in blocking calls",
                             .span = "from MPI_Init to MPI_Finalize",
                             .own = {.size = sizeof report.own}};
  onebit_counters_get(&report.own);
  preload_report_gather(&report, all);
  report.hosts = count_hosts(report.ranks);
  if (prints)
    ob_report_print(&report);
  return report.compressed > 0;
}

/* ---- Agreeing on the settings ---- */

enum { MESSAGE_BYTES = 512 };

/* True: rank 0's exit status becomes 1. The exit status of one rank is enough: launchers end the
 * other ranks when they see it. */
static bool failed;
static bool has_succeeded(void) { return !failed; }

/* ---- This rank's settings */

typedef const char *version_call(void);

/* Checks that this library has the same version as the onebit that the program is linked to: the
 * program's calls of onebit's functions run this library's code. */
static onebit_status_t check_version(void) {
  version_call *next;
  void *found = dlsym(RTLD_NEXT, "onebit_version");
  if (!found)
    return ONEBIT_OK;
  memcpy(&next, &found, sizeof next); /* C has no cast from void * to a function's address */
  if (!strcmp(next(), onebit_version()))
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                  "the program is linked to onebit %s, but onebit %s is preloaded", next(),
                  onebit_version());
}

static int every_rank;
static onebit_status_t read_settings(void) {
  onebit_status_t status = ob_preload_read_settings();
  if (status == ONEBIT_OK)
    status = ob_knob_number(OB_KNOB_EVERY_RANK, 0, 1, 0, &every_rank);
  return status == ONEBIT_OK ? check_version() : status;
}

/* ---- The agreement of all ranks */

/* Sends all ranks the error message of the lowest rank that has failed. Returns false if no rank
 * has failed. */
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

static bool have_same_rules(void) {
  uint64_t hash = ob_preload_hash(), least[2];
  uint64_t mine[2] = {hash, ~hash}; /* the minimum of ~hash is ~maximum of hash */
  PMPI_Allreduce(mine, least, 2, MPI_UINT64_T, MPI_MIN, MPI_COMM_WORLD);
  return least[0] == ~least[1];
}

/* Sets `required` on all ranks if it is set on one: the launcher may not pass the variable to all
 * ranks. */
static void agree_on_required(void) {
  int mine = ob_preload.required, most = 0;
  PMPI_Allreduce(&mine, &most, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  ob_preload.required = most;
}

/* Agrees with all ranks on the settings. All ranks must be known to have the library.
 * Collective. */
static void mpi_preload_agree(int rank, int size, char message[MESSAGE_BYTES]) {
  bool bad = agree_on_failure(rank, size, message);
  agree_on_required();
  if (!bad && !have_same_rules())
    snprintf(message, MESSAGE_BYTES,
             "the rules (ONEBIT_RULES) or the versions of onebit differ between ranks");
}

/* Returns true if every rank is known to have the library. The name service shows this. Without a
 * name service ONEBIT_EVERY_RANK=1 says that the launcher has preloaded the library on all
 * ranks. */
static bool has_every_rank(int size, const struct presence *ranks, char message[MESSAGE_BYTES]) {
  if (size == 1 || ranks->found == PRESENCE_ALL || (ranks->found == PRESENCE_UNKNOWN && every_rank))
    return true;
  if (ranks->found == PRESENCE_SOME)
    snprintf(message, MESSAGE_BYTES,
             "rank %d of MPI_COMM_WORLD has not loaded libonebit-mpi.so before the MPI library: "
             "give it the same LD_PRELOAD",
             ranks->missing);
  else if (!message[0])
    snprintf(
        message, MESSAGE_BYTES,
        "the launcher has no name service (MPI_Publish_name), so ranks cannot find out whether all "
        "ranks have loaded libonebit-mpi.so; if they have, set ONEBIT_EVERY_RANK=1");
  return false;
}

static bool reports;

/* Agrees with the other ranks on the settings, once, in MPI_Init. */
static void mpi_preload_begin(void) {
  static char message[MESSAGE_BYTES];
  int rank, size;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  PMPI_Comm_size(MPI_COMM_WORLD, &size);
  ob_counters_start(ob_seconds());
  ob_preload_judge_exit(has_succeeded);
  struct presence ranks = presence_find(rank, size);
  if (read_settings() != ONEBIT_OK || ob_launch_check(MPI_COMM_WORLD) != ONEBIT_OK)
    snprintf(message, sizeof message, "%s", onebit_last_error());
  ob_preload.trusted = has_every_rank(size, &ranks, message);
  reports = ranks.reports;
  if (ob_preload.trusted)
    mpi_preload_agree(rank, size, message);
  ob_preload_refuse(message[0] ? message : NULL);
  if (reports)
    ob_report_start(size, ob_mpi_version(), "MPI_Allreduce of float or double sums");
  if (message[0] && ob_preload.required)
    PMPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
  if (!message[0])
    ob_preload_open();
}

/* Ends the library's work. MPI_Finalize calls it. */
static void mpi_preload_end(void) {
  OB_CALL_SCOPE;
  ob_preload_close();
  ob_flights_finish();
  bool compressed = preload_report_end(ob_preload.trusted, reports);
  failed = !compressed && ob_preload.required && reports;
  unpublish_names();
}

/* ---- MPI's beginning and end ---- */

static bool started;
static void begin_unless_foreign(void) {
  OB_CALL_SCOPE;
  started = ob_mpi_bind() == ONEBIT_OK;
  if (started)
    mpi_preload_begin();
  else if (ob_launch_rank() == 0)
    fprintf(stderr, "onebit %s: nothing is compressed: %s\n", onebit_version(),
            onebit_last_error());
}

/* Prints a warning before MPI_Init, which may never return. */
static void warn_of_launcher(void) {
  char text[256];
  if (ob_launch_rank() == 0 && ob_launch_is_foreign(text, sizeof text))
    fprintf(stderr, "onebit %s: %s\n", onebit_version(), text);
}

OB_PRELOAD_VISIBLE int MPI_Init(int *argc, char ***argv) {
  warn_of_launcher();
  int code = PMPI_Init(argc, argv);
  if (code == MPI_SUCCESS)
    begin_unless_foreign();
  return code;
}

OB_PRELOAD_VISIBLE int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
  warn_of_launcher();
  int code = PMPI_Init_thread(argc, argv, required, provided);
  if (code == MPI_SUCCESS)
    begin_unless_foreign();
  return code;
}

OB_PRELOAD_VISIBLE int MPI_Finalize(void) {
  if (started)
    mpi_preload_end();
  return PMPI_Finalize();
}
