/* How much of what a tensor wants to say is still kept, sampled while a program runs. */
#ifndef OB_DROPIN_MPI_RESIDUAL_H
#define OB_DROPIN_MPI_RESIDUAL_H

#include "dropin/counters.h"
#include "dropin/mpi/call.h"

/* After a compressed call of float32 has ended: of the record's 1st, 2nd, 4th, 8th ... one it takes
 * the norm of the plan's residual relative to that of the mean which the call has given, in the
 * same elements. So it costs a few passes over the buffer now and then, ever more rarely. */
void ob_residual_sample(struct ob_record *record, const struct ob_mpi_call *call,
                        onebit_plan_t plan);

#endif
