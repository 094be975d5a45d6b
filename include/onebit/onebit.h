/*
 * onebit: compressed collectives and the optimizers that converge with them.
 *
 * Read in this order: status.h (results), communicator.h (who takes part; mpi.h for MPI), plan.h
 * (what is exchanged, and the memory of it), collectives.h (the exchange), optimizer.h (1-bit
 * Adam); for GPUs cuda.h and nccl.h, which this header does not include. docs/wire-format.md has
 * the messages.
 */
#ifndef ONEBIT_ONEBIT_H
#define ONEBIT_ONEBIT_H

#include "onebit/collectives.h"
#include "onebit/communicator.h"
#include "onebit/optimizer.h"
#include "onebit/plan.h"
#include "onebit/status.h"

#endif
