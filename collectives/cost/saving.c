/* The cost model, asked about a call of MPI's. */
#include "collectives/cost/saving.h"

#include "collectives/cost/cost.h"
#include "collectives/cost/tuning.h"

double ob_cost_part(int hosts, int ranks, size_t elements, size_t element_bytes, int bits) {
  struct ob_costs costs;
  struct ob_cost_choice choice;
  const struct ob_cost_task task = {.operation = ONEBIT_ALLREDUCE,
                                    .elements = elements,
                                    .wire = ONEBIT_WIRE_BITS,
                                    .bits = bits,
                                    .hosts = hosts,
                                    .ranks_per_host = ranks / hosts,
                                    .ranks = ranks,
                                    .max_ranks = ranks / hosts};
  ob_tuning_find(&costs);
  double dense = ob_cost_mpi_seconds(&costs, &task, element_bytes);
  ob_cost_choose(&costs, &task, &choice);
  return dense > 0 ? choice.seconds / dense : 1;
}
