/* Finds NCCL's own functions, when they are first called. */
#define _GNU_SOURCE /* RTLD_NEXT */
#include "dropin/nccl/next.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <string.h>

/* Finds a function behind this library, in the order in which names are found, if NCCL is linked to
 * the program; or by a handle if the program has loaded NCCL at run time. */
static void *next_find(const char *name) {
  void *found = dlsym(RTLD_NEXT, name);
  if (found)
    return found;
  void *library = dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD);
  return library ? dlsym(library, name) : NULL;
}

bool ob_next_is_loaded(void) { return next_find("ncclCommInitRank") != NULL; }

/* Looks up a function; all threads find the same. */
static void *next_look_up(_Atomic(void *) *known, const char *name) {
  void *found = atomic_load_explicit(known, memory_order_acquire);
  if (!found) {
    found = next_find(name);
    atomic_store_explicit(known, found, memory_order_release);
  }
  return found;
}

/* Defines a call of NCCL's function: C knows no cast from void * to a function's address. */
#define OB_NCCL_DEFINE(name, parameters, arguments)                                                \
  ncclResult_t ob_next_nccl##name parameters {                                                     \
    static _Atomic(void *) known;                                                                  \
    ncclResult_t(*function) parameters;                                                            \
    void *found = next_look_up(&known, "nccl" #name);                                              \
    memcpy(&function, &found, sizeof function);                                                    \
    return function ? function arguments : ncclInternalError;                                      \
  }
OB_NCCL_FUNCTIONS(OB_NCCL_DEFINE)

const char *ob_next_ncclGetErrorString(ncclResult_t result) {
  static _Atomic(void *) known;
  const char *(*function)(ncclResult_t);
  void *found = next_look_up(&known, "ncclGetErrorString");
  memcpy(&function, &found, sizeof function);
  return function ? function(result) : "NCCL is not loaded";
}

const char *ob_next_ncclGetLastError(ncclComm_t comm) {
  static _Atomic(void *) known;
  const char *(*function)(ncclComm_t);
  void *found = next_look_up(&known, "ncclGetLastError"); /* from 2.13 on */
  memcpy(&function, &found, sizeof function);
  return function ? function(comm) : "";
}
