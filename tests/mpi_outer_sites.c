/* The outer step among sites over MPI: a late site is left out, and nothing of it is lost. */
#include "onebit/mpi.h"
#include "tests/support_mpi.h"

enum { COUNT = 1000, H = 3, STEPS = 8 * H };

/* A rank is a site, and each drifts by its own constant: with a quorum of all, where none is left
 * out but all may be late, they end where the mean of all drifts leads. */
static void drift(onebit_comm_t between, void *context) {
  const int site = onebit_comm_rank(between), sites = onebit_comm_size(between);
  const int *quorum = context;
  float p[COUNT] = {0};
  onebit_tensor_t tensor = {.parameter = p, .count = COUNT};
  onebit_outer_options_t options = ONEBIT_OUTER_OPTIONS_INIT;
  onebit_sites_options_t how = ONEBIT_SITES_OPTIONS_INIT;
  onebit_outer_t outer;
  options.local_steps = H;
  options.fragments = *quorum ? H : 1;
  options.delay = *quorum ? 0 : H - 1;
  options.mixing = 1;
  options.bits = *quorum ? ONEBIT_OUTER_DENSE : 1;
  how.quorum = *quorum ? sites : 0;
  how.patience = *quorum ? 0.01 : 1000;
  onebit_comm_t alone = self_comm();
  CHECK_STATUS(onebit_outer_create_sites(alone, between, &tensor, 1, &options, &how, &outer),
               ONEBIT_OK);
  for (int step = 1; step <= STEPS; step++) {
    if (*quorum && step == 2 * H && site == sites - 1)
      for (double until = MPI_Wtime() + 0.2; MPI_Wtime() < until;)
        ;
    for (size_t i = 0; i < COUNT; i++)
      p[i] -= (float)(2 * site);
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
  }
  CHECK_STATUS(onebit_outer_synchronize(outer), ONEBIT_OK);
  const onebit_outer_info_t info = outer_info(outer);
  const float wanted = -(float)(STEPS * (sites - 1));
  for (size_t i = 0; i < COUNT; i++)
    if (!CHECK(p[i] >= wanted * 1.0001f && p[i] <= wanted * 0.9999f, "p[%zu] is %g, not %g", i,
               (double)p[i], (double)wanted))
      break;
  float sums[2] = {(float)(info.checksum & 0xffff), 0};
  MPI_Allreduce(&sums[0], &sums[1], 1, MPI_FLOAT, MPI_MAX, MPI_COMM_WORLD);
  CHECK(sums[0] == sums[1], "checksum %08x", (unsigned)info.checksum);
  onebit_outer_destroy(outer);
  onebit_comm_destroy(alone);
}

RankedTest(mpi_outer_sites, a_late_site_loses_nothing) {
  for (int quorum = 0; quorum < 2; quorum++)
    on_mpi_ranks(MPI_COMM_WORLD, drift, &quorum);
}
