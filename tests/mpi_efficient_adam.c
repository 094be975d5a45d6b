/* Efficient-Adam over MPI: parameters equal the oracle's in every bit after each step. */
#include <criterion/criterion.h>

#include "tests/support_efficient_adam.h"
#include "tests/support_mpi.h"

TestSuite(mpi_efficient_adam, .timeout = 120);

static void check(const struct adam_case *what) {
  struct adam_run run = adam_prepare(what);
  on_mpi_ranks(MPI_COMM_WORLD, adam_on_rank, &run);
  adam_release(&run);
}

Test(mpi_efficient_adam, equals_the_oracle) {
  mpi_begin();
  struct adam_case what = {.kind = &efficient_adam,
                           .steps = 10,
                           .options = ONEBIT_ADAM_OPTIONS_INIT,
                           .tensors = &adam_tensors_odd,
                           .still = true};
  MPI_Comm_size(MPI_COMM_WORLD, &what.size);
  what.options.common.schedule = ONEBIT_SCHEDULE_EXCHANGE;
  check(&what);
  what.poison = 1.0f / 0.0f; /* steps between that all ranks must skip */
  what.poisoned_rank = what.size - 1;
  check(&what);
  what.options.common.bucket_size = 1000;
  what.form = SHUFFLED;
  check(&what);
  mpi_end();
}
