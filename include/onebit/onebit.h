/*
 * onebit: compressed collectives and the optimizers that converge with them.
 *
 * Read the headers in this order: status.h (results), communicator.h (groups of ranks; mpi.h for
 * MPI, custom.h for a transport of your own), plan.h (a tensor's exchanges, options and memory),
 * collectives.h (the exchange), optimizer.h (the interface of all optimizers) and one of
 * efficient_adam.h (the one to begin with), adam.h, lamb.h, zero_one_adam.h, momentum.h and lion.h,
 * statistics.h (checks of a training run) and checkpoint.h; outer.h (many local steps between
 * exchanges); method.h (the choice between these methods by measurement). This header does not
 * include cuda.h and nccl.h, for GPUs, and mpi_calls.h, for programs that call MPI.
 * docs/wire-format.md describes the messages, docs/optimizers.md the optimizers.
 */
#ifndef ONEBIT_ONEBIT_H
#define ONEBIT_ONEBIT_H

#include "onebit/adam.h"
#include "onebit/checkpoint.h"
#include "onebit/collectives.h"
#include "onebit/communicator.h"
#include "onebit/custom.h"
#include "onebit/efficient_adam.h"
#include "onebit/lamb.h"
#include "onebit/lion.h"
#include "onebit/method.h"
#include "onebit/momentum.h"
#include "onebit/optimizer.h"
#include "onebit/outer.h"
#include "onebit/plan.h"
#include "onebit/sockets.h"
#include "onebit/statistics.h"
#include "onebit/status.h"
#include "onebit/zero_one_adam.h"

#endif
