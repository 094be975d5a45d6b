/*
 * The outer step over MPI: equal parameters on all ranks, to the bit, whatever is in flight; a
 * checkpoint in files goes on exactly; and a wrong weight fails on all ranks.
 */
#include "tests/support_disk.h"
#include "tests/support_mpi.h"
#include "tests/support_outer.h"

/* Rank 0's, on all. */
static void check_equal(const float *values) {
  float wanted[OUTER_ELEMENTS];
  memcpy(wanted, values, sizeof wanted);
  MPI_Bcast(wanted, OUTER_ELEMENTS, MPI_FLOAT, 0, MPI_COMM_WORLD);
  CHECK_BITS("the parameters", values, wanted, OUTER_ELEMENTS, ONEBIT_FLOAT32);
}

static void exchange(onebit_comm_t comm, void *context) {
  struct outer_trained *it = outer_begin(comm, context);
  outer_train_to(it, 1, 10);
  CHECK_STATUS(onebit_outer_synchronize(it->outer), ONEBIT_OK);
  check_equal(it->p);
  outer_end(it);
}

RankedTest(mpi_outer, equal_parameters_on_all_ranks) {
  static const int widths[] = {1, 4, 8, ONEBIT_OUTER_DENSE, ONEBIT_OUTER_SPARSE};
  for (size_t k = 0; k < 5; k++)
    for (size_t delay = 0; delay < 4; delay += 3) {
      onebit_outer_options_t options = outer_options(widths[k], (onebit_outer_rule_t)(k % 3));
      options.delay = delay;
      options.fragments = 1 + delay;
      options.weighted = k % 2 != 0;
      on_mpi_ranks(MPI_COMM_WORLD, exchange, &options);
    }
}

static void go_on(onebit_comm_t comm, void *context) {
  struct directories *directories = context;
  onebit_outer_options_t options = outer_options(1, ONEBIT_OUTER_MOMENTUM);
  options.delay = 3;
  options.fragments = 2;
  options.weighted = 1;
  struct outer_trained *it = outer_begin(comm, &options);
  struct outer_trained *other = outer_begin(comm, &options);
  outer_train_to(it, 1, 7);
  CHECK_STATUS(onebit_outer_save_files(it->outer, directories->saved), ONEBIT_OK);
  CHECK_STATUS(onebit_outer_load_files(other->outer, directories->saved), ONEBIT_OK);
  for (int number = 8; number <= 13; number++) {
    CHECK_STATUS(outer_train(it, number, false), ONEBIT_OK);
    CHECK_STATUS(outer_train(other, number, false), ONEBIT_OK);
    CHECK_BITS("the parameters", other->p, it->p, OUTER_ELEMENTS, ONEBIT_FLOAT32);
  }
  onebit_outer_destroy(it->outer);
  onebit_outer_destroy(other->outer);
  free(it);
  free(other);
}

RankedTest(mpi_outer, a_checkpoint_goes_on_to_the_bit) {
  struct directories directories = {0};
  if (rank == 0)
    directories = directories_create();
  MPI_Bcast(&directories, sizeof directories, MPI_BYTE, 0, MPI_COMM_WORLD);
  on_mpi_ranks(MPI_COMM_WORLD, go_on, &directories);
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0)
    directories_remove(&directories);
}

/* All ranks begin an exchange, of which one has a weight that is none. */
static void weigh_wrong(onebit_comm_t comm, void *context) {
  (void)context;
  onebit_outer_options_t options = outer_options(1, ONEBIT_OUTER_MEAN);
  const int last = onebit_comm_size(comm) - 1;
  options.local_steps = 1;
  options.weighted = 1;
  struct outer_trained *it = outer_begin(comm, &options);
  const bool wrong = it->rank == last;
  CHECK_STATUS(onebit_outer_step(it->outer, wrong ? NAN : 1),
               wrong ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
  CHECK_STATUS(outer_train(it, 1, false), ONEBIT_OK);
  CHECK_STATUS(onebit_outer_synchronize(it->outer), ONEBIT_OK);
  check_equal(it->p);
  outer_end(it);
}

RankedTest(mpi_outer, a_wrong_weight_fails_on_all_ranks) {
  on_mpi_ranks(MPI_COMM_WORLD, weigh_wrong, NULL);
}
