/* The scenario of test_ladder.c over MPI, on MPI_COMM_WORLD. */
#include "onebit/mpi.h"
#include "tests/support_ladder.h"
#include "tests/support_mpi.h"

RankedTest(mpi_ladder, climbs_and_descends) {
  static const onebit_schedule_t schedules[] = {ONEBIT_SCHEDULE_EXCHANGE,
                                                ONEBIT_SCHEDULE_ALLGATHER};
  for (size_t k = 0; k < sizeof schedules / sizeof schedules[0]; k++) {
    struct climb climb = {.schedule = schedules[k]};
    check_case("schedule %d", (int)schedules[k]);
    on_mpi_ranks(MPI_COMM_WORLD, climb_on_rank, &climb);
  }
}
