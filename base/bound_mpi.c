/* Looks up MPI's entry points in the process, and checks that the launcher belongs to the MPI
 * library. */
#ifdef ONEBIT_HAVE_MPI
#include "base/bound_mpi.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/lock.h"

/* The names of the table's members, in the order of the members; each member is one address. */
#define OB_MPI_NAME(name)          #name,
#define OB_MPI_NAMED(name, unused) #name,
static const char *const names[] = {
    OB_MPI_REQUIRED(OB_MPI_NAME) OB_MPI_REQUIRED_HERE(OB_MPI_NAME) OB_MPI_OPTIONAL(OB_MPI_NAMED)
        OB_MPI_OPTIONAL_VARIABLES(OB_MPI_NAME) OB_MPI_VARIABLES(OB_MPI_NAME)};
#define OB_MPI_ONE(name)          +1
#define OB_MPI_ONE_OF(name, type) +1
enum {
  NAMES = sizeof names / sizeof names[0],
  FIRST_OPTIONAL = 0 OB_MPI_REQUIRED(OB_MPI_ONE) OB_MPI_REQUIRED_HERE(OB_MPI_ONE),
  FIRST_VARIABLE =
      FIRST_OPTIONAL OB_MPI_OPTIONAL(OB_MPI_ONE_OF) OB_MPI_OPTIONAL_VARIABLES(OB_MPI_ONE)
};
_Static_assert(sizeof(struct ob_mpi_table) == NAMES * sizeof(void *), "one address a name");

static struct {
  pthread_mutex_t lock;
  _Atomic(const struct ob_mpi_table *) known; /* NULL: no MPI library was found yet */
  struct ob_mpi_table table;
  const char *missing; /* the name of a required function that is missing */
} bound = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- Binding ---- */

static void bound_mpi_fill(void *library) {
  void *address[NAMES];
  bound.missing = NULL;
  for (int i = 0; i < NAMES; i++) {
    address[i] = dlsym(library, names[i]);
    bool optional = i >= FIRST_OPTIONAL && i < FIRST_VARIABLE;
    if (!address[i] && !optional && !bound.missing)
      bound.missing = names[i];
  }
  memcpy(&bound.table, address,
         sizeof address); /* C has no cast from void * to a function's address */
}

static const struct ob_mpi_table *bound_table(void) {
  return atomic_load_explicit(&bound.known, memory_order_acquire);
}

/* Finds and binds an MPI library. Returns NULL if the process has loaded none yet. */
static const struct ob_mpi_table *bound_mpi_find(void) {
  const struct ob_mpi_found *found = bound_table() ? NULL : ob_mpi_find();
  if (!found)
    return bound_table();
  OB_LOCKED(&bound.lock);
  if (!bound_table()) {
    bound_mpi_fill(found->library);
    atomic_store_explicit(&bound.known, &bound.table, memory_order_release);
  }
  return bound_table();
}

/* ---- For callers ---- */

#ifndef OB_MPI_BUILT_FOR /* set by dropin/kinds/rules.mk in a build for several MPIs */
#ifdef OPEN_MPI
#define OB_MPI_BUILT_FOR "Open MPI"
#elif defined(MPICH_VERSION)
#define OB_MPI_BUILT_FOR "MPICH " MPICH_VERSION
#elif defined(MPI_ABI_VERSION)
#define OB_MPI_BUILT_FOR "the ABI of MPI 5"
#else
#define OB_MPI_BUILT_FOR "an MPI library of MPICH's ABI"
#endif
#endif

onebit_status_t ob_mpi_bind(void) {
  if (!bound_mpi_find())
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "the process has no MPI library: the program must load it as a shared library");
  if (ob_mpi_is_foreign())
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "onebit was built for " OB_MPI_BUILT_FOR ", and the program runs with %s",
                    ob_mpi_version());
  if (bound.missing)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "the program runs with the MPI library %s, which lacks the function %s",
                    ob_mpi_version(), bound.missing);
  return ONEBIT_OK;
}

bool ob_mpi_is_foreign(void) {
  const struct ob_mpi_found *found = ob_mpi_find();
  return found && found->kind != OB_MPI_KIND;
}

const struct ob_mpi_table *ob_mpi(void) {
  const struct ob_mpi_table *table = bound_mpi_find();
  if (table)
    return table;
  fputs("onebit: MPI was called in a process that has not loaded an MPI library\n", stderr);
  abort();
}

const char *ob_mpi_version(void) {
  const struct ob_mpi_found *found = ob_mpi_find();
  return found ? found->version : "no MPI library";
}

void *ob_mpi_symbol(const char *name) {
  const struct ob_mpi_found *found = ob_mpi_find();
  return found ? dlsym(found->library, name) : NULL;
}

/* --- Check that the launcher and the MPI library belong together -------------------------------*/

/* Environment variables by which launchers tell each rank its number and the number of ranks. */
static const struct launcher {
  const char *size; /* the variable that has the number of ranks */
  const char *sign; /* set only by this launcher, not by others that set the same `size` */
  bool open_mpi;    /* the launcher is Open MPI's; false: MPICH's or a derivative's */
} launchers[] = {
    {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", true},
    {"PMI_SIZE", "MPI_LOCALNRANKS", false},
    {"MPI_LOCALNRANKS", "MPI_LOCALNRANKS", false}}; /* ranks of this host, set with -pmi-port */

static int launch_read_variable(const char *name) {
  const char *text = getenv(name);
  return text ? atoi(text) : 0;
}

static const struct launcher *launch_find(void) {
  for (size_t i = 0; i < sizeof launchers / sizeof launchers[0]; i++)
    if (launch_read_variable(launchers[i].size) > 0)
      return &launchers[i];
  return NULL;
}

int ob_launch_rank(void) {
  static const char *const variables[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_ID",
                                          "PMIX_RANK"};
  for (size_t i = 0; i < sizeof variables / sizeof variables[0]; i++)
    if (getenv(variables[i]))
      return launch_read_variable(variables[i]);
  return 0;
}

static bool launch_is_alone(void) {
  MPI_Comm parent = MPI_COMM_NULL;
  int size = 1;
  PMPI_Comm_size(MPI_COMM_WORLD, &size);
  PMPI_Comm_get_parent(&parent);
  return size == 1 && parent == MPI_COMM_NULL;
}

bool ob_launch_is_foreign(char *text, size_t bytes) {
  const struct launcher *launcher = launch_find();
  const struct ob_mpi_found *mpi = ob_mpi_find();
  if (!launcher || launch_read_variable(launcher->size) < 2 || !mpi ||
      launcher->open_mpi == mpi->is_open_mpi || !getenv(launcher->sign))
    return false;
  snprintf(text, bytes,
           "the launcher has started %d ranks (%s) and is part of %s, but the program runs with %s",
           launch_read_variable(launcher->size), launcher->size,
           launcher->open_mpi ? "Open MPI" : "MPICH or a derivative", mpi->version);
  return true;
}

onebit_status_t ob_launch_check(MPI_Comm comm) {
  static atomic_flag said = ATOMIC_FLAG_INIT;
  char text[256];
  const struct launcher *launcher = launch_find();
  if (!launcher || launch_read_variable(launcher->size) < 2 || comm == MPI_COMM_SELF ||
      !launch_is_alone())
    return ONEBIT_OK;
  if (ob_launch_is_foreign(text, sizeof text))
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "%s; each rank is alone in MPI_COMM_WORLD: use the mpirun of the program's MPI",
                    text);
  if (!atomic_flag_test_and_set(&said))
    fprintf(stderr,
            "onebit: the launcher has started %d ranks (%s), but each rank is alone in "
            "MPI_COMM_WORLD of %s. If this is not intended, use the mpirun of this MPI library\n",
            launch_read_variable(launcher->size), launcher->size, ob_mpi_version());
  return ONEBIT_OK;
}

#else
typedef int ob_no_mpi_here; /* ISO C wants a declaration in every file */
#endif
