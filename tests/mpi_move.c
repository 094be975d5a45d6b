/*
 * Optimizers go on over MPI: without the last rank, and with it again, which has made its optimizer
 * alone. All replicas are equal to the bit.
 */
#include "onebit/mpi.h"
#include "tests/support_checkpoint.h"
#include "tests/support_mpi.h"

enum { LEFT_AT = 5, JOINED_AT = 7, STEPS = 10 };

static void check_equal(const struct trainee *trainee, MPI_Comm mpi) {
  float first[TRAINEE_ELEMENTS];
  memcpy(first, trainee->parameters, sizeof first);
  MPI_Bcast(first, TRAINEE_ELEMENTS, MPI_FLOAT, 0, mpi);
  CHECK_BITS("parameters", trainee->parameters, first, TRAINEE_ELEMENTS, ONEBIT_FLOAT32);
}

static void train(struct trainee *trainee, MPI_Comm mpi, int from, int to) {
  check_equal(trainee, mpi);
  for (int step = from; step < to; step++)
    trainee_step(trainee, step);
  check_equal(trainee, mpi);
}

/* The ranks but the last one go on for some steps. */
static onebit_comm_t go_on_without(struct trainee *trainee, MPI_Comm *fewer) {
  onebit_comm_t comm;
  CHECK_STATUS(onebit_comm_create_mpi(*fewer, &comm), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_move(trainee->optimizer, comm), ONEBIT_OK);
  train(trainee, *fewer, LEFT_AT, JOINED_AT);
  return comm;
}

static onebit_comm_t begin_anew(struct trainee *trainee, const struct checkpoint_case *what) {
  trainee_destroy(trainee);
  onebit_comm_t self = self_comm();
  *trainee = trainee_create(self, what, 1);
  return self;
}

static void leave_and_come(onebit_comm_t comm, void *context) {
  const struct checkpoint_case *what = context;
  int rank = onebit_comm_rank(comm), size = onebit_comm_size(comm);
  check_case("%s", what->name);
  struct trainee trainee = trainee_create(comm, what, 0);
  train(&trainee, MPI_COMM_WORLD, 0, LEFT_AT);
  MPI_Comm fewer;
  bool leaves = rank == size - 1 && size > 1;
  MPI_Comm_split(MPI_COMM_WORLD, leaves ? MPI_UNDEFINED : 0, rank, &fewer);
  onebit_comm_t then = leaves ? begin_anew(&trainee, what) : go_on_without(&trainee, &fewer);
  trainee.rank = rank;
  CHECK_STATUS(onebit_optimizer_move(trainee.optimizer, comm), ONEBIT_OK);
  onebit_comm_destroy(then);
  if (!leaves)
    MPI_Comm_free(&fewer);
  train(&trainee, MPI_COMM_WORLD, JOINED_AT, STEPS);
  trainee_destroy(&trainee);
}

RankedTest(mpi_move, ranks_leave_and_come) {
  static const struct checkpoint_case cases[] = {
      {.name = "efficient adam", .method = &ob_method_efficient_adam},
      {.name = "adam", .method = &ob_method_adam, .freeze_step = 6},
      {.name = "adam, shards",
       .method = &ob_method_adam,
       .freeze_step = 3,
       .shards = ONEBIT_SHARDS_PARAMETERS},
      {.name = "lion", .method = &ob_method_lion}};
  for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++)
    on_mpi_ranks(MPI_COMM_WORLD, leave_and_come, (void *)&cases[k]);
}
