/* 0/1 Adam over MPI: parameters equal the oracle's in every bit after each step. */
#include <criterion/criterion.h>
#include <math.h>

#include "tests/support_mpi.h"
#include "tests/support_zero_one.h"

TestSuite(mpi_zero_one, .timeout = 300);

static void check(struct zero_one_case what) {
  struct zero_one_run run = zero_one_prepare(&what);
  on_mpi_ranks(MPI_COMM_WORLD, zero_one_on_rank, &run);
  zero_one_release(&run);
}

/* The plan may choose among the schedules of an optimizer only: an allgather has no servers. */
Test(mpi_zero_one, equals_the_oracle) {
  mpi_begin();
  struct zero_one_case what = {
      .steps = 30, .options = zero_one_options(10), .tensors = &adam_tensors_odd, .still = true};
  MPI_Comm_size(MPI_COMM_WORLD, &what.size);
  check(what);
  what.tensors = &adam_tensors_tiny;
  check(what);
  what.tensors = &adam_tensors_odd;
  what.options.common.block_size = ONEBIT_BLOCK_BUFFER;
  check(what);
  what.options.common.block_size = 0;
  what.options.common.profile = ONEBIT_PROFILE_DEEPSPEED;
  what.options.common.gradient_dtype = ONEBIT_BFLOAT16;
  check(what);
  what.poison = NAN; /* every other call, which all ranks must skip, or this one alone */
  what.poisoned_rank = what.size - 1;
  check(what);
  what.options.common.profile = ONEBIT_PROFILE_DEFAULT;
  what.options.common.bucket_size = 1000;
  what.parts = true;
  check(what);
  mpi_end();
}
