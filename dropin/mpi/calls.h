/* The common part of blocking calls and requests. */
#ifndef OB_DROPIN_MPI_CALLS_H
#define OB_DROPIN_MPI_CALLS_H

#include "dropin/mpi/call.h"
#include "dropin/mpi/exchange.h"

/* Reports an error of the call through the communicator's error handler: MPI_COMM_NULL stands for
 * MPI_COMM_WORLD. Returns the code. */
int ob_call_failed(MPI_Comm comm, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Returns MPI_ERR_OTHER, without a handler, unless MPI is initialised and not yet finalised. */
int ob_call_begin_mpi(void);

/* Checks that the call can be compressed and that its arguments are right, and sets its count to
 * the program's. Reports errors. */
int ob_call_check(struct ob_mpi_call *call, int count);

/* Makes a checked call, blocking; below, finds its exchange, or NULL for a dense call. Errors have
 * been reported. */
int ob_call_run(const struct ob_mpi_call *call);
int ob_call_find(const struct ob_mpi_call *call, struct ob_exchange **exchange, bool *withdraw);

/* Reports the failure of an exchange, with the library's message. */
int ob_call_exchange_failed(MPI_Comm comm, int code);

/* Makes requests on a communicator that is being freed report their errors elsewhere. */
void ob_requests_orphan(MPI_Comm comm);

#endif
