/* Finds the MPI library that the process has loaded. */
#ifdef ONEBIT_HAVE_MPI
#define _GNU_SOURCE /* dl_iterate_phdr, RTLD_DEFAULT */
#include "base/find_mpi.h"

#include <dlfcn.h>
#include <link.h>
#include <stdatomic.h>
#include <string.h>

#include "base/lock.h"
#include "base/memory.h"

static struct {
  pthread_mutex_t lock;
  _Atomic(const struct ob_mpi_found *) known; /* NULL: none was found yet */
  struct ob_mpi_found found;
} mpi = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- In the process ---- */

/* True if a library contains MPI. The check looks for PMPI_Init, since libonebit-mpi.so defines
 * MPI_Init too. */
static bool has_mpi(void *library) { return dlsym(library, "PMPI_Init") != NULL; }

/* The paths of the loaded libraries, which can be opened only after the loader's lock is
 * released. */
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

/* Finds a library whose symbols are not global (RTLD_LOCAL), as in Python with mpi4py. */
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
      found = library; /* kept open, so that it is not unloaded before this library */
    else if (library)
      dlclose(library);
    ob_release(paths.path[i]);
  }
  ob_release(paths.path);
  return found;
}

/* ---- The kind of a library */

typedef int version_call(char *text, int *length);
typedef int abi_call(int *version, int *subversion);

/* Looks up a function and converts its address, since C has no cast from void * to a function
 * pointer. */
#define LOOK_UP(call, library, name)                                                               \
  do {                                                                                             \
    void *address = dlsym(library, name);                                                          \
    memcpy(&(call), &address, sizeof(call));                                                       \
  } while (0)

/* True if the library has MPI 5's ABI. MPICH 5 has this function in both of its libraries, and
 * returns -1 in the one that has its own ABI. */
static bool has_standard_abi(void *library) {
  abi_call *call;
  int version = -1, subversion = -1;
  LOOK_UP(call, library, "PMPI_Abi_get_version");
  return call && call(&version, &subversion) == 0 && version > 0;
}

static void read_version(void *library, struct ob_mpi_found *found) {
  static char text[16384]; /* at least MPI_MAX_LIBRARY_VERSION_STRING: Open MPI 256, MPICH 8192 */
  version_call *call;
  int length = 0;
  LOOK_UP(call, library, "PMPI_Get_library_version");
  if (!call || call(text, &length) != 0)
    strcpy(text, "an MPI library without a version");
  found->is_open_mpi = strstr(text, "Open MPI");
  text[strcspn(text, ",\n")] = '\0';
  size_t count = 0; /* MPICH aligns its version text in columns */
  for (const char *c = text; *c && count < 63; c++)
    if (*c > ' ' || (count && found->version[count - 1] != ' '))
      found->version[count++] = *c > ' ' ? *c : ' ';
}

static void mpi_describe(void *library, struct ob_mpi_found *found) {
  found->library = library;
  read_version(library, found);
  found->kind = found->is_open_mpi ? OB_MPI_OPENMPI : OB_MPI_MPICH;
  if (!has_standard_abi(library))
    return;
  found->kind = OB_MPI_STANDARD;
  strcat(found->version, " (the ABI of MPI 5)");
}

const struct ob_mpi_found *ob_mpi_find(void) {
  const struct ob_mpi_found *known = atomic_load_explicit(&mpi.known, memory_order_acquire);
  if (known)
    return known;
  OB_LOCKED(&mpi.lock);
  known = atomic_load_explicit(&mpi.known, memory_order_relaxed);
  bool global = !known && has_mpi(RTLD_DEFAULT);
  void *library = known || global ? RTLD_DEFAULT : find_private();
  if (!known && (global || library)) {
    mpi_describe(library, &mpi.found);
    known = &mpi.found;
    atomic_store_explicit(&mpi.known, known, memory_order_release);
  }
  return known;
}

#else
typedef int ob_no_mpi_here; /* ISO C wants a declaration in every file */
#endif
