/*
 * Finds the MPI library that the process has loaded, and its ABI. This file includes no mpi.h. A
 * build for several MPIs (MPICC_ALSO) compiles this module once, but files that include
 * base/bound_mpi.h once for each ABI.
 */
#ifndef OB_BASE_FIND_MPI_H
#define OB_BASE_FIND_MPI_H

#include <stdbool.h>

/* The ABI of an MPI library. A handle is the address of a variable in Open MPI, an int in MPICH and
 * its derivatives (Intel MPI, MVAPICH, Cray MPICH), and a pointer with a small number as its value
 * in the ABI of MPI 5, which several libraries support in addition to their own ABI. */
enum ob_mpi_kind { OB_MPI_OPENMPI, OB_MPI_MPICH, OB_MPI_STANDARD, OB_MPI_KINDS };

struct ob_mpi_found {
  void *library; /* handle for dlsym */
  enum ob_mpi_kind kind;
  bool is_open_mpi; /* true for Open MPI, whichever ABI it has */
  /* the library's version text; if it is used with the ABI of MPI 5, also the name of that ABI */
  char version[96];
};

/* Returns the MPI library of the process. Every call searches again until a library is found; NULL:
 * the process has none yet. Thread-safe. */
const struct ob_mpi_found *ob_mpi_find(void);

#endif
