/* Optimizers over MPI: parameters equal the oracle's in every bit after each step. */
#include "tests/support_mpi.h"
#include "tests/support_zero_one.h"

static struct adam_case case_of(const struct optimizer_kind *kind, size_t freeze_step) {
  struct adam_case what = {.kind = kind,
                           .steps = 12,
                           .options = ONEBIT_ADAM_OPTIONS_INIT,
                           .tensors = &adam_tensors_odd,
                           .still = true};
  MPI_Comm_size(MPI_COMM_WORLD, &what.size);
  what.options.freeze_step = freeze_step;
  return what;
}

static void check(const struct adam_case *what) {
  struct adam_run run = adam_prepare(what);
  on_mpi_ranks(MPI_COMM_WORLD, adam_on_rank, &run);
  adam_release(&run);
}

/* In one exchange, and of one scale; then in buckets, with steps that all ranks must skip, other
 * types, clipping, and gradients that are not there. */
static void check_buckets(struct adam_case what) {
  what.options.common.schedule = ONEBIT_SCHEDULE_EXCHANGE;
  check(&what);
  what.options.common.block_size = ONEBIT_BLOCK_BUFFER;
  check(&what);
  what.options.common.block_size = what.options.shards ? 64 : 0;
  what.options.common.chunk_size = what.options.shards ? 256 : 0;
  what.options.common.bucket_size = 1000;
  what.poisoned_rank = what.size - 1;
  for (int form = BACKWARD; form < ADAM_FORMS; form++) {
    what.form = (enum adam_form)form;
    what.options.common.gradient_dtype = form % 2 ? ONEBIT_BFLOAT16 : ONEBIT_FLOAT32;
    what.options.common.parameter_dtype = (onebit_dtype_t)(what.options.shards ? 0 : form % 3);
    what.options.common.clip_norm = form < SHUFFLED ? 195 : 0;
    what.options.common.initial_loss_scale = form < SHUFFLED ? 8 : 0;
    what.options.common.loss_scale_interval = 2;
    what.uncompressed = form % 2 ? 0x2b : 0;
    what.absent = form % 2 ? 5 : 0;
    what.poison = form % 2 ? 0.0f : INFINITY;
    check(&what);
  }
}

/* In a schedule that the plan chooses, and with DeepSpeed's formulas. */
static void check_profiles(struct adam_case what) {
  check(&what);
  what.options.common.profile = ONEBIT_PROFILE_DEEPSPEED;
  check(&what);
  what.poison = INFINITY;
  what.poisoned_rank = what.size - 1;
  what.options.common.gradient_dtype = ONEBIT_FLOAT16;
  what.options.common.parameter_dtype = ONEBIT_BFLOAT16;
  what.options.common.clip_norm = 195;
  what.options.common.initial_loss_scale = 8;
  check(&what);
}

RankedTest(mpi_optimizers, equal_the_oracle) {
  check_profiles(case_of(&kind_adam, 5));
  check_buckets(case_of(&kind_adam, 5));
  check_profiles(case_of(&kind_lamb, 5));
  check_buckets(case_of(&kind_lamb, 5));
  check_buckets(case_of(&kind_momentum, 0));
  check_buckets(case_of(&kind_momentum, 3));
  check_buckets(case_of(&kind_efficient_adam, 0));
  check_buckets(case_of(&kind_lion, 0));
}

RankedTest(mpi_optimizers, shards_equal_the_oracle) {
  struct adam_case what = case_of(&kind_adam, 5);
  for (int mode = ONEBIT_SHARDS_STEP; mode <= ONEBIT_SHARDS_PARAMETERS; mode++) {
    what.options.shards = (onebit_shards_t)mode;
    check_buckets(what);
  }
  what.options.freeze_step = ONEBIT_FREEZE_AUTOMATIC;
  what.options.beta2 = 0.875;
  check(&what);
}

static void check_zero_one(const struct zero_one_case *what) {
  struct zero_one_run run = zero_one_prepare(what);
  on_mpi_ranks(MPI_COMM_WORLD, zero_one_on_rank, &run);
  zero_one_release(&run);
}

/* The plan may choose among the schedules of an optimizer only: an allgather has no servers. */
RankedTest(mpi_optimizers, zero_one_adam) {
  struct zero_one_case what = {
      .steps = 30, .options = zero_one_options(10), .tensors = &adam_tensors_odd, .still = true};
  MPI_Comm_size(MPI_COMM_WORLD, &what.size);
  check_zero_one(&what);
  what.tensors = &adam_tensors_tiny;
  check_zero_one(&what);
  what.tensors = &adam_tensors_odd;
  what.options.common.block_size = ONEBIT_BLOCK_BUFFER;
  check_zero_one(&what);
  what.options.common.block_size = 0;
  what.options.common.profile = ONEBIT_PROFILE_DEEPSPEED;
  what.options.common.gradient_dtype = ONEBIT_BFLOAT16;
  check_zero_one(&what);
  what.poison = NAN; /* every other call, which all ranks must skip, or this one alone */
  what.poisoned_rank = what.size - 1;
  check_zero_one(&what);
  what.options.common.profile = ONEBIT_PROFILE_DEFAULT;
  what.options.common.bucket_size = 1000;
  what.parts = true;
  check_zero_one(&what);
}
