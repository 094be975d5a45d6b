/*
 * The MPI library that the process has, and whose ABI it has. Knows no mpi.h: a build for several
 * MPIs (MPICC_ALSO) has this once, and what includes base/bound_mpi.h once for each ABI.
 */
#ifndef OB_BASE_FIND_MPI_H
#define OB_BASE_FIND_MPI_H

#include <stdbool.h>

/* The ABI of an MPI library. A handle is the address of a variable in Open MPI, an int in MPICH and
 * its relatives (Intel MPI, MVAPICH, Cray MPICH), and a pointer that is a small number in the ABI
 * of MPI 5, which several libraries have beside their own. */
enum ob_mpi_kind { OB_MPI_OPENMPI, OB_MPI_MPICH, OB_MPI_STANDARD, OB_MPI_KINDS };

struct ob_mpi_found {
  void *library; /* for dlsym */
  enum ob_mpi_kind kind;
  bool is_open_mpi; /* by whatever ABI */
  char version[96]; /* the library's version text, and the name of its ABI if that is not its own */
};

/* The library is looked for until there is one; thread-safe. NULL: the process has none yet. */
const struct ob_mpi_found *ob_mpi_find(void);

#endif
