/* 1-bit LAMB over MPI: parameters equal the oracle's in every bit after each step. */
#include <criterion/criterion.h>

#include "tests/support_lamb.h"
#include "tests/support_mpi.h"

TestSuite(mpi_lamb, .timeout = 300);

static void check(struct adam_case what) {
  struct adam_run run = adam_prepare(&what);
  on_mpi_ranks(MPI_COMM_WORLD, adam_on_rank, &run);
  adam_release(&run);
}

Test(mpi_lamb, equals_the_oracle) {
  mpi_begin();
  struct adam_case what = {.kind = &lamb,
                           .steps = 12,
                           .options = ONEBIT_ADAM_OPTIONS_INIT,
                           .tensors = &adam_tensors_odd,
                           .still = true};
  MPI_Comm_size(MPI_COMM_WORLD, &what.size);
  what.options.freeze_step = 5;
  check(what);
  what.options.common.block_size = ONEBIT_BLOCK_BUFFER;
  check(what);
  what.options.common.block_size = 0;
  what.options.common.profile = ONEBIT_PROFILE_DEEPSPEED;
  check(what);
  what.poison = 1.0f / 0.0f; /* steps between that all ranks must skip */
  what.poisoned_rank = what.size - 1;
  check(what);
  what.options.common.profile = ONEBIT_PROFILE_DEFAULT;
  what.options.common.bucket_size = 1000;
  what.form = SHUFFLED;
  check(what);
  mpi_end();
}
