/* MPI's entry points, looked up in the process. */
#ifdef ONEBIT_HAVE_MPI
#define _GNU_SOURCE /* dl_iterate_phdr, RTLD_DEFAULT */

#include "base/bound_mpi.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"

#undef PMPI_Get_library_version /* here the member itself is meant */

/* The table's members in their order: each is one address. */
#define OB_MPI_NAME(name)          #name,
#define OB_MPI_NAMED(name, unused) #name,
static const char *const names[] = {OB_MPI_REQUIRED(OB_MPI_NAME) OB_MPI_REQUIRED_HERE(
    OB_MPI_NAME) OB_MPI_OPTIONAL(OB_MPI_NAMED) OB_MPI_VARIABLES(OB_MPI_NAME)};
#define OB_MPI_ONE(name)          +1
#define OB_MPI_ONE_OF(name, type) +1
enum {
  NAMES = sizeof names / sizeof names[0],
  FIRST_OPTIONAL = 0 OB_MPI_REQUIRED(OB_MPI_ONE) OB_MPI_REQUIRED_HERE(OB_MPI_ONE),
  FIRST_VARIABLE = FIRST_OPTIONAL OB_MPI_OPTIONAL(OB_MPI_ONE_OF)
};
_Static_assert(sizeof(struct ob_mpi_table) == NAMES * sizeof(void *), "one address a name");

static struct {
  pthread_mutex_t lock;
  _Atomic(const struct ob_mpi_table *) known; /* NULL: no MPI library was found yet */
  struct ob_mpi_table table;
  void *library;       /* for dlsym */
  const char *missing; /* of what is required */
  bool foreign;
  char version[64]; /* what the library says of itself */
} bound = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- Which library ---- */

/* PMPI: an MPI_Init may be that of libonebit-mpi.so. */
static bool has_mpi(void *library) { return dlsym(library, "PMPI_Init") != NULL; }

/* Paths of what is loaded. Opening it has to wait until the loader's lock is free. */
struct paths {
  char **path;
  size_t count, capacity;
};

static int note_path(struct dl_phdr_info *object, size_t size, void *context) {
  struct paths *paths = context;
  (void)size;
  if (!object->dlpi_name[0] || paths->count == paths->capacity)
    return 0;
  paths->path[paths->count] = ob_allocate(strlen(object->dlpi_name) + 1, 1);
  if (paths->path[paths->count])
    strcpy(paths->path[paths->count++], object->dlpi_name);
  return 0;
}

static int count_path(struct dl_phdr_info *object, size_t size, void *context) {
  (void)object, (void)size;
  ++*(size_t *)context;
  return 0;
}

/* One that was loaded for a part of the process only, as Python does for mpi4py. */
static void *find_private(void) {
  struct paths paths = {0};
  void *found = NULL;
  dl_iterate_phdr(count_path, &paths.capacity);
  paths.path = ob_allocate(paths.capacity, sizeof *paths.path);
  if (paths.path)
    dl_iterate_phdr(note_path, &paths);
  for (size_t i = 0; i < paths.count; i++) {
    void *library = found ? NULL : dlopen(paths.path[i], RTLD_LAZY | RTLD_NOLOAD);
    if (library && has_mpi(library))
      found = library; /* kept open: it must not go before this library */
    else if (library)
      dlclose(library);
    ob_release(paths.path[i]);
  }
  ob_release(paths.path);
  return found;
}

/* ---- Binding ---- */

static void find_version(void) {
  static char text[16384]; /* of that library's size, which may be more: MPICH's is 8192 */
  _Static_assert(sizeof text >= MPI_MAX_LIBRARY_VERSION_STRING, "this library's fit too");
  int length = 0;
  if (!bound.table.PMPI_Get_library_version ||
      bound.table.PMPI_Get_library_version(text, &length) != MPI_SUCCESS)
    strcpy(text, "an MPI library without a version");
#ifdef OPEN_MPI
  bound.foreign = !strstr(text, "Open MPI");
#else
  bound.foreign = strstr(text, "Open MPI");
#endif
  text[strcspn(text, ",\n")] = '\0';
  size_t count = 0; /* MPICH sets its words in columns */
  for (const char *c = text; *c && count < sizeof bound.version - 1; c++)
    if (*c > ' ' || (count && bound.version[count - 1] != ' '))
      bound.version[count++] = *c > ' ' ? *c : ' ';
}

static void fill(void *library) {
  void *address[NAMES];
  bound.missing = NULL;
  for (int i = 0; i < NAMES; i++) {
    address[i] = dlsym(library, names[i]);
    bool optional = i >= FIRST_OPTIONAL && i < FIRST_VARIABLE;
    if (!address[i] && !optional && !bound.missing)
      bound.missing = names[i];
  }
  memcpy(&bound.table, address, sizeof address); /* C knows no cast to a function's address */
  bound.library = library;
  find_version();
}

static const struct ob_mpi_table *known(void) {
  return atomic_load_explicit(&bound.known, memory_order_acquire);
}

/* NULL: none is in the process, yet. */
static const struct ob_mpi_table *find(void) {
  if (known())
    return known();
  pthread_mutex_lock(&bound.lock);
  if (!known()) {
    bool global = has_mpi(RTLD_DEFAULT);
    void *library = global ? RTLD_DEFAULT : find_private();
    if (global || library) {
      fill(library);
      atomic_store_explicit(&bound.known, &bound.table, memory_order_release);
    }
  }
  pthread_mutex_unlock(&bound.lock);
  return known();
}

/* ---- For callers ---- */

static const char built_for[] =
#ifdef OPEN_MPI
    "Open MPI";
#elif defined(MPICH_VERSION)
    "MPICH " MPICH_VERSION;
#else
    "an MPI library of MPICH's ABI";
#endif

onebit_status_t ob_mpi_bind(void) {
  if (!find())
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "the process has no MPI library: the program must load it as a shared library");
  if (bound.foreign)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "onebit was built for %s, and the program runs with %s", built_for,
                    bound.version);
  if (bound.missing)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED, "the MPI library, %s, has no %s", bound.version,
                    bound.missing);
  return ONEBIT_OK;
}

bool ob_mpi_is_foreign(void) { return find() && bound.foreign; }

const struct ob_mpi_table *ob_mpi(void) {
  const struct ob_mpi_table *table = find();
  if (table)
    return table;
  fputs("onebit: a call of MPI in a process without an MPI library\n", stderr);
  abort();
}

const char *ob_mpi_version(void) { return find() ? bound.version : "no MPI library"; }

void *ob_mpi_symbol(const char *name) { return find() ? dlsym(bound.library, name) : NULL; }

#else
typedef int ob_no_mpi_here; /* ISO C wants a declaration in every file */
#endif
