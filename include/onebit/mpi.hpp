/*
 * Communicators over MPI for C++14 (onebit/onebit.hpp); not available in a library built
 * with MPI=0.
 */
#ifndef ONEBIT_MPI_HPP
#define ONEBIT_MPI_HPP

#include "onebit/mpi.h"
#include "onebit/onebit.hpp"

namespace onebit {

/* onebit_comm_create_mpi. Collective over mpi_comm. The communicator must go before MPI_Finalize:
 * give it a scope of its own inside main. */
inline communicator over_mpi(MPI_Comm mpi_comm) {
  onebit_comm_t handle = nullptr;
  check(onebit_comm_create_mpi(mpi_comm, &handle));
  return communicator(handle);
}

} // namespace onebit

#endif
