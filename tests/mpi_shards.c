/* Sharded 1-bit Adam over MPI: parameters equal the oracle's in every bit after each step. */
#include <criterion/criterion.h>

#include "tests/support_adam.h"
#include "tests/support_mpi.h"

TestSuite(mpi_shards, .timeout = 300);

static void check(struct adam_case what) {
  for (int mode = ONEBIT_SHARDS_STEP; mode <= ONEBIT_SHARDS_PARAMETERS; mode++) {
    what.options.shards = (onebit_shards_t)mode;
    struct adam_run run = adam_prepare(&what);
    on_mpi_ranks(MPI_COMM_WORLD, adam_on_rank, &run);
    adam_release(&run);
  }
}

Test(mpi_shards, equals_the_oracle) {
  mpi_begin();
  struct adam_case what = {.steps = 12,
                           .options = ONEBIT_ADAM_OPTIONS_INIT,
                           .tensors = &adam_tensors_odd,
                           .still = true};
  MPI_Comm_size(MPI_COMM_WORLD, &what.size);
  what.options.freeze_step = 5;
  check(what);
  what.options.common.gradient_dtype = ONEBIT_BFLOAT16;
  what.options.common.block_size = 64;
  what.options.common.chunk_size = 256;
  check(what);
  what.poison = 1.0f / 0.0f; /* steps between that all ranks must skip */
  what.poisoned_rank = what.size - 1;
  for (int form = BACKWARD; form < ADAM_FORMS; form++) {
    what.form = (enum adam_form)form;
    what.options.common.bucket_size = 1000;
    check(what);
  }
  what.options.freeze_step = ONEBIT_FREEZE_AUTOMATIC;
  what.options.beta2 = 0.875;
  check(what);
  mpi_end();
}
