/* 1-bit momentum SGD over MPI: parameters equal the oracle's in every bit after each step. */
#include <criterion/criterion.h>

#include "tests/support_momentum.h"
#include "tests/support_mpi.h"

TestSuite(mpi_momentum, .timeout = 120);

static void check(const struct momentum_case *what) {
  struct momentum_run run = momentum_prepare(what);
  on_mpi_ranks(MPI_COMM_WORLD, momentum_on_rank, &run);
  momentum_release(&run);
}

Test(mpi_momentum, equals_the_oracle) {
  mpi_begin();
  for (size_t warmup = 0; warmup <= 3; warmup += 3) {
    struct momentum_case what = {
        .steps = 10, .options = ONEBIT_MOMENTUM_OPTIONS_INIT, .tensors = &adam_tensors_odd};
    MPI_Comm_size(MPI_COMM_WORLD, &what.size);
    what.options.warmup_steps = warmup;
    what.options.common.schedule = ONEBIT_SCHEDULE_EXCHANGE;
    check(&what);
    what.options.common.block_size = ONEBIT_BLOCK_BUFFER;
    what.poison = 1.0f / 0.0f; /* steps between that all ranks must skip */
    what.poisoned_rank = what.size - 1;
    check(&what);
    what.options.common.block_size = 0;
    what.options.common.bucket_size = 1000;
    what.parts = true;
    check(&what);
  }
  mpi_end();
}
