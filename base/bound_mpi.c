/* MPI's entry points, looked up in the process. */
#ifdef ONEBIT_HAVE_MPI
#include "base/bound_mpi.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/lock.h"

/* The table's members in their order: each is one address. */
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
  const char *missing; /* of what is required */
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
  memcpy(&bound.table, address, sizeof address); /* C knows no cast to a function's address */
}

static const struct ob_mpi_table *known(void) {
  return atomic_load_explicit(&bound.known, memory_order_acquire);
}

/* Finds and binds an MPI library; NULL: the process has none yet. */
static const struct ob_mpi_table *bound_mpi_find(void) {
  const struct ob_mpi_found *found = known() ? NULL : ob_mpi_find();
  if (!found)
    return known();
  OB_LOCKED(&bound.lock);
  if (!known()) {
    bound_mpi_fill(found->library);
    atomic_store_explicit(&bound.known, &bound.table, memory_order_release);
  }
  return known();
}

/* ---- For callers ---- */

#ifndef OB_MPI_BUILT_FOR /* of several: dropin/kinds/rules.mk */
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
    return ob_error(ONEBIT_ERROR_UNSUPPORTED, "the MPI library, %s, has no %s", ob_mpi_version(),
                    bound.missing);
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
  fputs("onebit: a call of MPI in a process without an MPI library\n", stderr);
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

#else
typedef int ob_no_mpi_here; /* ISO C wants a declaration in every file */
#endif
