/* The collectives' cases, a part of them, over MPI: the same table and code as test_collectives.c.
 */
#include "collectives/communicator.h"
#include "tests/support_collectives.h"
#include "tests/support_mpi.h"

/* Sets a cost of a second per message, with which small allgathers go in rounds on one host too. */
static void in_rounds(onebit_comm_t comm, void *context) {
  comm->costs.inside.message = 1;
  collective_on_rank(comm, context);
}

RankedTest(mpi_collectives, equal_the_oracle) {
  size_t count;
  struct collective_case *cases = collective_cases(size, FEW, &count);
  struct sample sample = collective_sample("mpi_collectives", 1, cases, count);
  for (size_t k = 0; k < sample.count; k++) {
    struct collective_run run = collective_prepare(&cases[sample.rows[k]]);
    on_mpi_ranks(MPI_COMM_WORLD, collective_on_rank, &run);
    collective_release(&run);
  }
  free(sample.rows);
  free(cases);
  cases = schedule_cases(size, 1, FEW, &count); /* the ranks of a test are on one host */
  sample = collective_sample("mpi_schedules", 1, cases, count);
  for (size_t k = 0; k < sample.count; k++) {
    struct collective_run run = collective_prepare(&cases[sample.rows[k]]);
    on_mpi_ranks(MPI_COMM_WORLD, collective_on_rank, &run);
    on_mpi_ranks(MPI_COMM_WORLD, in_rounds, &run);
    collective_release(&run);
  }
  free(sample.rows);
  free(cases);
}
