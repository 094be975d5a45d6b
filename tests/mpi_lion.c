/* Lion in one bit over MPI: parameters equal the oracle's in every bit after each step. */
#include <criterion/criterion.h>

#include "tests/support_lion.h"
#include "tests/support_mpi.h"

TestSuite(mpi_lion, .timeout = 120);

static void check(const struct lion_case *what) {
  struct lion_run *run = lion_prepare(what);
  on_mpi_ranks(MPI_COMM_WORLD, lion_on_rank, run);
  lion_release(run);
}

Test(mpi_lion, equals_the_oracle) {
  mpi_begin();
  struct lion_case what = lion_case_of(&adam_tensors_odd);
  MPI_Comm_size(MPI_COMM_WORLD, &what.size);
  what.options.common.schedule = ONEBIT_SCHEDULE_EXCHANGE;
  check(&what);
  what.poison = 1.0f / 0.0f; /* steps between that all ranks must skip */
  what.poisoned_rank = what.size - 1;
  check(&what);
  what.options.common.bucket_size = 1000;
  what.parts = true;
  check(&what);
  mpi_end();
}
