/* The common part of blocking calls and requests. */
#ifndef OB_DROPIN_MPI_CALLS_H
#define OB_DROPIN_MPI_CALLS_H

#include "dropin/mpi/call.h"
#include "dropin/mpi/exchange.h"

/* An error of the call, through the communicator's error handler: MPI_COMM_NULL stands for
 * MPI_COMM_WORLD. Gives the code. */
int ob_call_failed(MPI_Comm comm, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* MPI_ERR_OTHER, without a handler, unless MPI is initialised and not yet finalised. */
int ob_call_begin_mpi(void);

/* Checks that it can be compressed and that its arguments are right, and sets its count to that of
 * the program. Reports what is wrong. */
int ob_call_check(struct ob_mpi_call *call, int count);

/* The call, which has been checked, blocking; and its exchange, or NULL for a dense call. Errors
 * have been reported. */
int ob_call_run(const struct ob_mpi_call *call);
int ob_call_find(const struct ob_mpi_call *call, struct ob_exchange **exchange, bool *withdraw);

/* Reports how an exchange failed: the message is that of the library. */
int ob_call_exchange_failed(MPI_Comm comm, int code);

/* Requests on a communicator that is being freed report their errors elsewhere from now on. */
void ob_requests_orphan(MPI_Comm comm);

#endif
