/*
 * libonebit-mpi.so: stands before the MPI library of a program that knows nothing of onebit, and
 * compresses those of its collectives that rules allow. All else goes on to MPI as it came.
 */
#ifndef OB_DROPIN_MPI_PRELOAD_H
#define OB_DROPIN_MPI_PRELOAD_H

#include "base/bound_mpi.h"
#include "dropin/mpi/communicator.h"
#include "dropin/preload.h"

/* Persistent allreduces are MPI 4's, and an extension of Open MPI 4.1; where there are none, these
 * are not defined. */
#if MPI_VERSION >= 4
#define OB_ALLREDUCE_INIT MPI_Allreduce_init
#define OB_DENSE_INIT     PMPI_Allreduce_init
#elif defined(OMPI_HAVE_MPI_EXT_PCOLLREQ)
#define OB_ALLREDUCE_INIT MPIX_Allreduce_init
#define OB_DENSE_INIT     PMPIX_Allreduce_init
#endif

/* The line at the start, by rank 0; and the report. Says whether any rank has compressed anything.
 */
void ob_preload_report_start(int rank, int size);
/* all: of all ranks, collective over MPI_COMM_WORLD; otherwise of this one. */
bool ob_preload_report_end(bool all, bool prints);

/* A decided call. Where exchange is NULL it is passed on, for `reason`. */
struct ob_preload_decision {
  struct ob_exchange *exchange;
  bool withdraw;
  enum ob_reason reason;
  struct ob_record *record; /* NULL: only counted by its reason */
};
void ob_preload_decide(const struct ob_mpi_call *call, struct ob_preload_decision *decision);

/* After a compressed call of float32 has ended: of the record's 1st, 2nd, 4th, 8th ... one it takes
 * the norm of the plan's residual relative to that of the mean which the call has given, in the
 * same elements. So it costs a few passes over the buffer now and then, ever more rarely. */
void ob_residual_sample(struct ob_record *record, const struct ob_mpi_call *call,
                        onebit_plan_t plan);

/* Whether the ranks of an intra-communicator all have the library and the same rules: all find the
 * same in the same call. OB_REASON_NONE: they have; OB_REASON_LEARNING, in its first calls; or
 * OB_REASON_REFUSED. */
enum ob_reason ob_preload_settled(MPI_Comm comm, int size);

#endif
