/* The collectives' cases, a part of them, over MPI: the same table and code as test_collectives.c.
 */
#include "collectives/communicator.h"
#include "tests/support_collectives.h"
#include "tests/support_ladder.h"
#include "tests/support_mpi.h"

/* Sets a cost of a second per message, with which small allgathers go in rounds on one host too. */
static void in_rounds(onebit_comm_t comm, void *context) {
  comm->costs.inside.message = 1;
  collective_on_rank(comm, context);
}

static void check(struct collective_run *run, size_t number) {
  (void)number;
  on_mpi_ranks(MPI_COMM_WORLD, collective_on_rank, run);
}

static void check_schedule(struct collective_run *run, size_t number) {
  check(run, number);
  on_mpi_ranks(MPI_COMM_WORLD, in_rounds, run);
}

RankedTest(mpi_collectives, equal_the_oracle) {
  size_t count;
  struct collective_case *cases = collective_cases(size, FEW, &count);
  collective_each("mpi_collectives", 1, cases, count, check);
  cases = schedule_cases(size, 1, FEW, &count); /* the ranks of a test are on one host */
  collective_each("mpi_schedules", 1, cases, count, check_schedule);
}

RankedTest(mpi_collectives, climb_and_descend) {
  static const onebit_schedule_t schedules[] = {ONEBIT_SCHEDULE_EXCHANGE,
                                                ONEBIT_SCHEDULE_ALLGATHER};
  for (size_t k = 0; k < sizeof schedules / sizeof schedules[0]; k++) {
    struct climb climb = {.schedule = schedules[k]};
    check_case("schedule %d", (int)schedules[k]);
    on_mpi_ranks(MPI_COMM_WORLD, climb_on_rank, &climb);
  }
}
