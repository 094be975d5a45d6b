/* Whether all ranks have the library, by MPI's name service. */
#define _DEFAULT_SOURCE /* usleep */
#include "dropin/mpi/preload_presence.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/hash.h"
#include "base/memory.h"

enum {
  NAME_BYTES = 64,
  VALUE_BYTES = MPI_MAX_PORT_NAME > 1024 ? MPI_MAX_PORT_NAME : 1024, /* any library's fit */
  OWN_BYTES = 240, /* MPICH's port names have 256 */
  /* An earlier call of the ranks' has ended on this one, mostly: then all have published. Where it
   * may not have (all calls so far were nonblocking), a rank may be on its way out of MPI_Init. */
  ATTEMPTS = 25,
  PAUSE = 20000, /* microseconds */
  SHORT_ATTEMPTS = 50,
  SHORT_PAUSE = 2000
};

/* What has been found of a group. */
struct verdict {
  struct verdict *next;
  uint64_t group;
  bool published;
  struct ob_presence found;
};

static struct {
  pthread_mutex_t lock;
  bool works;
  int rank;
  uint64_t job;
  char name[NAME_BYTES], value[OWN_BYTES];
  struct verdict *verdicts;
} presence = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- The name service ---- */

/* Its errors go to the handler of MPI_COMM_WORLD, or in MPI 4 of MPI_COMM_SELF, which end the
 * program: a name that is not there is no error here. */
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

static bool look_up(const char *name, char value[VALUE_BYTES]) {
  memset(value, 0, VALUE_BYTES);
  return PMPI_Lookup_name(name, MPI_INFO_NULL, value) == MPI_SUCCESS && value[0];
}

static bool publish(const char *name, const char *value) {
  return PMPI_Publish_name(name, MPI_INFO_NULL, value) == MPI_SUCCESS;
}

/* Jobs may share a name service. Ranks of one have these in common, and their number. */
static uint64_t hash_of_job(void) {
  static const char *const variables[] = {"PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID",
                                          "PBS_JOBID", "LSB_JOBID"};
  int size = 0;
  PMPI_Comm_size(MPI_COMM_WORLD, &size);
  uint64_t hash = ob_hash(OB_HASH_START, &size, sizeof size);
  for (size_t i = 0; i < sizeof variables / sizeof variables[0]; i++) {
    const char *text = getenv(variables[i]);
    if (text)
      hash = ob_hash(hash, text, strlen(text) + 1);
  }
  return hash;
}

/* Ranks that a program has started share their parents' name service, and their numbers: without a
 * name of the job they could be taken for those. */
static bool is_unnamed_child(void) {
  MPI_Comm parent = MPI_COMM_NULL;
  PMPI_Comm_get_parent(&parent);
  return parent != MPI_COMM_NULL && !getenv("PMIX_NAMESPACE");
}

static void name_of(int rank, char name[NAME_BYTES]) {
  snprintf(name, NAME_BYTES, "onebit-%016llx-%d", (unsigned long long)presence.job, rank);
}

static void name_of_group(uint64_t group, char name[NAME_BYTES]) {
  snprintf(name, NAME_BYTES, "onebit-%016llx-all-%016llx", (unsigned long long)presence.job,
           (unsigned long long)group);
}

/* ---- What a rank publishes: HASH.REQUIRED.PROCESS.MESSAGE, of which a hash of 0 has a message.
 * Launchers take words without blanks only. ---- */

static void write_own(const char *failure) {
  int length = snprintf(presence.value, OWN_BYTES, "%016llx.%d.%ld.",
                        failure ? 0ULL : (unsigned long long)ob_preload_hash() | 1,
                        (int)ob_preload.required, (long)getpid());
  char *to = presence.value + length;
  for (; failure && *failure && to < presence.value + OWN_BYTES - 1; failure++)
    *to++ = *failure <= ' ' || strchr("=;\\", *failure) ? '~' : *failure;
  *to = '\0';
}

bool ob_presence_begin(int rank, const char *failure) {
  char found[VALUE_BYTES];
  presence.rank = rank;
  presence.job = hash_of_job();
  name_of(rank, presence.name);
  write_own(failure);
  if (is_unnamed_child())
    return false;
  struct handlers handlers = hold_errors();
  for (int attempt = 0; attempt < 2 && !presence.works; attempt++) {
    presence.works = publish(presence.name, presence.value) && look_up(presence.name, found) &&
                     !strcmp(found, presence.value);
    if (!presence.works) /* what an earlier program of the job has left, or what is of no use */
      PMPI_Unpublish_name(presence.name, MPI_INFO_NULL, presence.value);
  }
  release_errors(&handlers);
  return presence.works;
}

void ob_presence_end(void) {
  if (!presence.works)
    return;
  struct handlers handlers = hold_errors();
  PMPI_Unpublish_name(presence.name, MPI_INFO_NULL, presence.value);
  for (struct verdict *next, *verdict = presence.verdicts; verdict; verdict = next) {
    char name[NAME_BYTES];
    next = verdict->next;
    name_of_group(verdict->group, name);
    if (verdict->published)
      PMPI_Unpublish_name(name, MPI_INFO_NULL, verdict->found.agreed ? "yes" : "no");
    ob_release(verdict);
  }
  presence.verdicts = NULL;
  presence.works = false;
  release_errors(&handlers);
}

/* ---- What the ranks of a group have published ---- */

struct finding {
  int speaker; /* the first rank that has the library: it says what is wrong */
  bool required;
  char why[OWN_BYTES]; /* empty: all have the same */
};

static bool wait_for(const char *name, int attempts, unsigned pause, char value[VALUE_BYTES]) {
  for (int attempt = 1; !look_up(name, value); attempt++) {
    if (attempt >= attempts)
      return false;
    usleep(pause);
  }
  return true;
}

static bool find_rank(int rank, bool patient, char value[VALUE_BYTES]) {
  char name[NAME_BYTES];
  name_of(rank, name);
  return wait_for(name, patient ? ATTEMPTS : 1, PAUSE, value);
}

static void judge(int rank, const char *value, struct finding *finding) {
  unsigned long long hash = 0, own = 0;
  int required = 0, at = 0;
  sscanf(presence.value, "%llx", &own);
  sscanf(value, "%llx.%d.%*d.%n", &hash, &required, &at);
  finding->required |= required;
  if (finding->why[0])
    return;
  if (!hash && at) {
    snprintf(finding->why, sizeof finding->why, "%.200s (rank %d)", value + at, rank);
    for (char *mark = finding->why; (mark = strchr(mark, '~'));)
      *mark = ' ';
  } else if (hash != own) {
    snprintf(finding->why, sizeof finding->why,
             "the ranks' rules (ONEBIT_RULES) or versions of onebit differ");
  }
}

static void look_at_all(const int *ranks, int count, struct finding *finding) {
  char value[VALUE_BYTES];
  *finding = (struct finding){.speaker = -1};
  for (int i = 0; i < count && (!finding->why[0] || finding->speaker < 0); i++) {
    if (ranks[i] != presence.rank && !find_rank(ranks[i], !finding->why[0], value)) {
      if (!finding->why[0])
        snprintf(finding->why, sizeof finding->why,
                 "rank %d of MPI_COMM_WORLD has no libonebit-mpi.so before MPI", ranks[i]);
      continue;
    }
    if (finding->speaker < 0)
      finding->speaker = ranks[i];
    judge(ranks[i], ranks[i] == presence.rank ? presence.value : value, finding);
  }
}

static void refuse(const struct finding *finding, int count) {
  static char said[OWN_BYTES];
  int size = 0;
  PMPI_Comm_size(MPI_COMM_WORLD, &size);
  bool known = presence.rank == 0 && ob_preload.refused; /* and said, in MPI_Init */
  if (finding->speaker == presence.rank && !known && strcmp(said, finding->why) != 0) {
    snprintf(said, sizeof said, "%s", finding->why);
    if (count == size)
      fprintf(stderr, "onebit %s: nothing is compressed: %s\n", onebit_version(), said);
    else
      fprintf(stderr, "onebit %s: nothing is compressed among %d ranks: %s\n", onebit_version(),
              count, said);
  }
  if (finding->required || ob_preload.required)
    PMPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
}

/* ---- Verdicts ---- */

static bool read_verdict(struct verdict *verdict, const char *name, bool wait) {
  char value[VALUE_BYTES];
  if (!wait_for(name, wait ? SHORT_ATTEMPTS : 1, SHORT_PAUSE, value))
    return false;
  verdict->found.agreed = !strncmp(value, "yes", 3);
  if (!strcmp(value, "yes!"))
    ob_preload.required = true;
  return true;
}

static void settle(struct verdict *verdict, const int *ranks, int count, bool wait) {
  char name[NAME_BYTES];
  struct finding finding;
  bool first = ranks[0] == presence.rank;
  name_of_group(verdict->group, name);
  if (!first && read_verdict(verdict, name, wait))
    return;
  look_at_all(ranks, count, &finding);
  verdict->found = (struct ob_presence){!finding.why[0], finding.speaker == presence.rank};
  if (first)
    verdict->published = publish(name, finding.why[0] ? "no" : finding.required ? "yes!" : "yes");
  if (!verdict->found.agreed)
    refuse(&finding, count);
  else if (finding.required)
    ob_preload.required = true;
}

static struct verdict *known(uint64_t group) {
  struct verdict *verdict = presence.verdicts;
  while (verdict && verdict->group != group)
    verdict = verdict->next;
  return verdict;
}

struct ob_presence ob_presence_of(const int *ranks, int count, bool wait) {
  struct verdict here = {.group = ob_hash(OB_HASH_START, ranks, (size_t)count * sizeof *ranks)};
  if (!presence.works)
    return (struct ob_presence){false, presence.rank == 0};
  pthread_mutex_lock(&presence.lock);
  struct verdict *verdict = known(here.group);
  if (!verdict) {
    struct handlers handlers = hold_errors();
    settle(&here, ranks, count, wait);
    release_errors(&handlers);
    verdict = ob_allocate(1, sizeof *verdict);
    if (verdict) {
      *verdict = here;
      verdict->next = presence.verdicts;
      presence.verdicts = verdict;
    }
  }
  struct ob_presence found = verdict ? verdict->found : here.found;
  pthread_mutex_unlock(&presence.lock);
  return found;
}
