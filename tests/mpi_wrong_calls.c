/*
 * Wrong calls of onebit/mpi.h and onebit/mpi_calls.h on every rank: requests that are stale, of
 * another kind or never were any are MPI_ERR_REQUEST, with a message, and nobody is left waiting.
 * mpi_calls_arguments.c has how errors reach the communicator's handler.
 */
#include <limits.h>

#include "onebit/mpi.h"
#include "tests/support_calls.h"
#include "tests/support_wrong_calls.h"

enum { COUNT = 3000 };
static float send[COUNT], receive[COUNT];

static int class_of(int code) {
  int class = MPI_SUCCESS;
  MPI_Error_class(code, &class);
  return class;
}

/* The call must give an error of this class, and a message that has `part` in it. */
#define WRONG_MPI(function, arguments, wanted, part)                                               \
  WRONG_VALUE(function, arguments, class_of(function arguments) == (wanted), part)

static void wrong_arguments(MPI_Comm comm) {
  ONEBIT_Request request;
#define SUMS(call, ...)                                                                            \
  WRONG_MPI(call, (send, receive, -1, MPI_FLOAT, MPI_SUM, __VA_ARGS__), MPI_ERR_COUNT,             \
            "count is -1");                                                                        \
  WRONG_MPI(call, (send, receive, INT_MIN, MPI_FLOAT, MPI_SUM, __VA_ARGS__), MPI_ERR_COUNT,        \
            "count is -2147483648");                                                               \
  WRONG_MPI(call, (send, receive, 8, MPI_INT, MPI_SUM, __VA_ARGS__), MPI_ERR_TYPE, "datatype");    \
  WRONG_MPI(call, (send, receive, 8, MPI_FLOAT, MPI_MAX, __VA_ARGS__), MPI_ERR_OP, "op");          \
  WRONG_MPI(call, (NULL, receive, 8, MPI_FLOAT, MPI_SUM, __VA_ARGS__), MPI_ERR_BUFFER,             \
            "sendbuf is NULL");                                                                    \
  WRONG_MPI(call, (send, NULL, 8, MPI_FLOAT, MPI_SUM, __VA_ARGS__), MPI_ERR_BUFFER,                \
            "recvbuf is NULL")
  SUMS(ONEBIT_Allreduce, comm);
  SUMS(ONEBIT_Reduce_scatter_block, comm);
  SUMS(ONEBIT_Iallreduce, comm, &request);
  SUMS(ONEBIT_Allreduce_init, comm, MPI_INFO_NULL, &request);
  WRONG_MPI(ONEBIT_Allreduce, (send, receive, 8, MPI_FLOAT, MPI_SUM, MPI_COMM_NULL), MPI_ERR_COMM,
            "comm is MPI_COMM_NULL");
  WRONG_MPI(ONEBIT_Iallreduce, (send, receive, 8, MPI_FLOAT, MPI_SUM, comm, NULL), MPI_ERR_REQUEST,
            "request is NULL");
  WRONG_MPI(ONEBIT_Allreduce_init,
            (send, receive, 8, MPI_FLOAT, MPI_SUM, comm, MPI_INFO_NULL, NULL), MPI_ERR_REQUEST,
            "request is NULL");
  WRONG_MPI(ONEBIT_Allgather, (send, 7, MPI_FLOAT, receive, 8, MPI_FLOAT, comm), MPI_ERR_COUNT,
            "sendcount is 7, recvcount 8");
  WRONG_MPI(ONEBIT_Allgather, (send, 8, MPI_INT, receive, 8, MPI_FLOAT, comm), MPI_ERR_TYPE,
            "sendtype");
  WRONG_MPI(ONEBIT_Forget, (NULL, comm), MPI_ERR_BUFFER, "buffer is NULL");
  WRONG_MPI(ONEBIT_Forget, (send, MPI_COMM_NULL), MPI_ERR_COMM, "comm is MPI_COMM_NULL");
}

/* Every call refuses a value that is no valid request. */
static void wrong_handle(ONEBIT_Request request, const char *part) {
  int flag;
  WRONG_MPI(ONEBIT_Start, (&request), MPI_ERR_REQUEST, part);
  WRONG_MPI(ONEBIT_Wait, (&request, MPI_STATUS_IGNORE), MPI_ERR_REQUEST, part);
  WRONG_MPI(ONEBIT_Test, (&request, &flag, MPI_STATUS_IGNORE), MPI_ERR_REQUEST, part);
  WRONG_MPI(ONEBIT_Request_free, (&request), MPI_ERR_REQUEST, part);
  MPI_Status statuses[2];
  ONEBIT_Request both[2] = {ONEBIT_REQUEST_NULL, request};
  WRONG_MPI(ONEBIT_Waitall, (2, both, statuses), MPI_ERR_IN_STATUS, part);
  CHECK(class_of(statuses[1].MPI_ERROR) == MPI_ERR_REQUEST, "the wrong request has no error");
  CHECK(statuses[0].MPI_ERROR == MPI_SUCCESS, "the other one has an error");
}

static void wrong_requests(MPI_Comm comm) {
  static char foreign[4096];
  int flag;
  ONEBIT_Request request, once, persistent, gone;
  CHECK(ONEBIT_Iallreduce(send, receive, COUNT, MPI_FLOAT, MPI_SUM, comm, &request) == MPI_SUCCESS,
        "a call");
  once = request;
  CHECK(ONEBIT_Wait(&request, MPI_STATUS_IGNORE) == MPI_SUCCESS, "its wait");
  CHECK(ONEBIT_Allreduce_init(send, receive, COUNT, MPI_FLOAT, MPI_SUM, comm, MPI_INFO_NULL,
                              &persistent) == MPI_SUCCESS,
        "a persistent call");
  gone = persistent;
  CHECK(ONEBIT_Request_free(&persistent) == MPI_SUCCESS, "its end");
  wrong_handle(once, "request is 0x");
  wrong_handle(gone, "which is no ONEBIT_Request (finished, or never made)");
  wrong_handle((ONEBIT_Request)(void *)foreign, "which is no ONEBIT_Request");
  onebit_comm_t self = self_comm();
  wrong_handle((ONEBIT_Request)(void *)self, "which is a communicator");
  onebit_comm_destroy(self);
  WRONG_MPI(ONEBIT_Start, (NULL), MPI_ERR_REQUEST, "request is NULL");
  WRONG_MPI(ONEBIT_Wait, (NULL, MPI_STATUS_IGNORE), MPI_ERR_REQUEST, "request is NULL");
  WRONG_MPI(ONEBIT_Test, (NULL, &flag, MPI_STATUS_IGNORE), MPI_ERR_REQUEST, "request is NULL");
  WRONG_MPI(ONEBIT_Request_free, (NULL), MPI_ERR_REQUEST, "request is NULL");
  WRONG_MPI(ONEBIT_Test, (&request, NULL, MPI_STATUS_IGNORE), MPI_ERR_ARG, "flag is NULL");
  WRONG_MPI(ONEBIT_Waitall, (-1, &request, MPI_STATUSES_IGNORE), MPI_ERR_COUNT, "count is -1");
  WRONG_MPI(ONEBIT_Waitall, (1, NULL, MPI_STATUSES_IGNORE), MPI_ERR_REQUEST, "requests is NULL");
}

RankedTest(mpi_wrong_calls, are_errors_with_a_message) {
  onebit_comm_t made;
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm comm = duplicate();
  WRONG(onebit_comm_create_mpi, (MPI_COMM_NULL, &made), ONEBIT_ERROR_ARGUMENT, "MPI_COMM_NULL");
  WRONG(onebit_comm_create_mpi, (comm, NULL), ONEBIT_ERROR_ARGUMENT, "comm is NULL");
  wrong_arguments(comm);
  wrong_requests(comm);
  CHECK(ONEBIT_Allreduce(send, receive, COUNT, MPI_FLOAT, MPI_SUM, comm) == MPI_SUCCESS,
        "the call after the wrong ones: %s", onebit_last_error());
  MPI_Comm_free(&comm);
  cr_expect_eq(wrong_check_header("mpi"), 1);
  cr_expect_eq(wrong_check_header("mpi_calls"), 11);
  cr_expect_eq(wrong_failed(), 0, "%zu of %zu", wrong_failed(), wrong_made());
}
