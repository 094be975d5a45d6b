/* Mixed precision, clipping and loss scales over MPI: parameters and norms equal the oracle's in
 * every bit after each step, and mistakes of one rank reach the others. */
#include "tests/support_adam.h"
#include "tests/support_errors.h"
#include "tests/support_mpi.h"

static void check(struct adam_case what) {
  struct adam_run run = adam_prepare(&what);
  on_mpi_ranks(MPI_COMM_WORLD, adam_on_rank, &run);
  adam_release(&run);
}

static struct adam_case case_of(int k) {
  struct adam_case what = {.steps = 10,
                           .options = ONEBIT_ADAM_OPTIONS_INIT,
                           .tensors = &adam_tensors_odd,
                           .form = (enum adam_form)(k % ADAM_FORMS)};
  MPI_Comm_size(MPI_COMM_WORLD, &what.size);
  what.options.freeze_step = 4;
  what.options.common.gradient_dtype = (onebit_dtype_t)(k / 3);
  what.options.common.parameter_dtype = (onebit_dtype_t)(k % 3);
  return what;
}

RankedTest(mpi_mixed, equals_the_oracle) {
  for (int k = 0; k < 9; k++) {
    struct adam_case what = case_of(k);
    what.uncompressed = k % 2 ? 0x2b : 0;
    what.options.common.bucket_size = k % 2 ? 1000 : 0;
    what.absent = k % 4 ? 0 : 5;
    check(what);
    what.absent = 0;
    what.options.common.clip_norm = 195;
    what.options.common.initial_loss_scale = 8;
    what.options.common.loss_scale_interval = 2;
    what.poison = 1.0f / 0.0f; /* steps between that all ranks must skip */
    what.poisoned_rank = k % what.size;
    check(what);
    what.options.common.bucket_size = 0;
    what.options.common.profile = ONEBIT_PROFILE_DEEPSPEED;
    check(what);
  }
}

SeveralRanksTest(mpi_mixed, mistakes_before_the_norm) {
  for (int guilty = 0; guilty < size; guilty++) {
    struct culprit culprit = {.rank = guilty, .clip_norm = 1.5};
    on_mpi_ranks(MPI_COMM_WORLD, wrong_learning_rate_on_one_rank, &culprit);
    on_mpi_ranks(MPI_COMM_WORLD, mistakes_in_an_open_step, &culprit);
    on_mpi_ranks(MPI_COMM_WORLD, destroyed_in_an_open_step, &culprit);
  }
}
