/*
 * Defines the functions of one library that supports MPI libraries of several ABIs (rules.mk in
 * this folder). The library has a part for each ABI. Each function calls the function of the same
 * name in the part for the process's MPI library.
 *
 * Handles are ints in MPICH, and pointers in other libraries. On the machines that onebit supports
 * either is passed as an integer, in a register or in a word of the stack. So each function passes
 * on 13 words, the number of arguments of the longest call (MPI_T_pvar_get_info); a call with fewer
 * arguments ignores the other words. No argument is a floating-point number.
 */
#define _GNU_SOURCE /* RTLD_NEXT */
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#include "base/find_mpi.h"

typedef uintptr_t word;
_Static_assert(sizeof(word) == 8, "a register holds an int and a pointer alike");
typedef word entry(word, word, word, word, word, word, word, word, word, word, word, word, word);

enum { openmpi = OB_MPI_OPENMPI, mpich = OB_MPI_MPICH, standard = OB_MPI_STANDARD };

/* Returns the function to call. Only Open MPI's part defines Fortran functions. For another MPI,
 * the Fortran function of that MPI is returned, since it calls the C functions. If the library has
 * no part for the process's MPI, the first part is called, which reports the error. */
static entry *choose_function(entry *const parts[OB_MPI_KINDS], const bool *has, const char *name) {
  const struct ob_mpi_found *found = ob_mpi_find();
  entry *next = NULL;
  if (found && parts[found->kind])
    return parts[found->kind];
  void *address = found && has[found->kind] ? dlsym(RTLD_NEXT, name) : NULL;
  memcpy(&next, &address, sizeof next); /* C has no cast from void * to a function's address */
  for (int kind = 0; !next; kind++)
    next = parts[kind];
  return next;
}

#define DECLARE(kind, name)  entry kind##_##name __attribute__((weak));
#define PART(kind, name)     [kind] = kind##_##name,
#define IS_THERE(kind, name) [kind] = true,
#define ENTRY(name)                                                                                \
  PARTS(DECLARE, name)                                                                             \
  entry name;                                                                                      \
  word name(word a, word b, word c, word d, word e, word f, word g, word h, word i, word j,        \
            word k, word l, word m) {                                                              \
    static entry *const parts[OB_MPI_KINDS] = {PARTS(PART, name)};                                 \
    static const bool has[OB_MPI_KINDS] = {PARTS(IS_THERE, name)};                                 \
    return choose_function(parts, has, #name)(a, b, c, d, e, f, g, h, i, j, k, l, m);              \
  }
#include OB_ENTRIES
