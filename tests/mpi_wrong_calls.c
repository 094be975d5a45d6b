/* Tests wrong calls of onebit/mpi.h and onebit/mpi_calls.h, and calls that one rank does not
 * make. */
#include <limits.h>

#include "dropin/mpi/exchange.h"
#include "onebit/mpi.h"
#include "tests/support_mpi.h"
#include "tests/support_wrong_calls.h"

enum { COUNT = 3000 };
static float send[COUNT], receive[COUNT];

static int handled;

static void note_error(MPI_Comm *comm, int *code, ...) {
  (void)comm, (void)code;
  handled++;
}

/* True if the error class of `code` is `wanted`, and the error handler was called exactly once. */
static bool is_refused(int code, int wanted) {
  bool once = handled == 1;
  handled = 0;
  return once && error_class_of(code) == wanted;
}

static void add_nothing(void *from, void *to, int *count, MPI_Datatype *type) {
  (void)from, (void)to, (void)count, (void)type;
}

/* Checks that the call invokes the error handler once and returns an error of class `wanted`, with
 * a message that contains `part`. */
#define WRONG_MPI(function, arguments, wanted, part)                                               \
  WRONG_VALUE(function, arguments, is_refused(function arguments, (wanted)), part)

static void wrong_arguments(MPI_Comm comm) {
  ONEBIT_Request request;
  MPI_Op own;
  MPI_Op_create(add_nothing, 1, &own);
#define SUMS(call, ...)                                                                            \
  WRONG_MPI(call, (send, receive, -1, MPI_FLOAT, MPI_SUM, __VA_ARGS__), MPI_ERR_COUNT,             \
            "count is -1");                                                                        \
  WRONG_MPI(call, (send, receive, INT_MIN, MPI_FLOAT, MPI_SUM, __VA_ARGS__), MPI_ERR_COUNT,        \
            "count is -2147483648");                                                               \
  WRONG_MPI(call, (send, receive, 8, MPI_INT, MPI_SUM, __VA_ARGS__), MPI_ERR_TYPE, "datatype");    \
  WRONG_MPI(call, (send, receive, 8, MPI_DATATYPE_NULL, MPI_SUM, __VA_ARGS__), MPI_ERR_TYPE,       \
            "datatype");                                                                           \
  WRONG_MPI(call, (send, receive, 8, MPI_FLOAT, MPI_MAX, __VA_ARGS__), MPI_ERR_OP, "op");          \
  WRONG_MPI(call, (send, receive, 8, MPI_FLOAT, MPI_OP_NULL, __VA_ARGS__), MPI_ERR_OP, "op");      \
  WRONG_MPI(call, (send, receive, 1, MPI_FLOAT, own, __VA_ARGS__), MPI_ERR_OP, "op");              \
  WRONG_MPI(call, (NULL, receive, 8, MPI_FLOAT, MPI_SUM, __VA_ARGS__), MPI_ERR_BUFFER,             \
            "sendbuf is NULL");                                                                    \
  WRONG_MPI(call, (send, MPI_IN_PLACE, 8, MPI_FLOAT, MPI_SUM, __VA_ARGS__), MPI_ERR_BUFFER,        \
            "recvbuf is MPI_IN_PLACE");                                                            \
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
  CHECK(ONEBIT_Allreduce(NULL, NULL, 0, MPI_FLOAT, MPI_SUM, comm) == MPI_SUCCESS, "count 0");
  MPI_Op_free(&own);
}

/* Checks that every call refuses a value that is not a valid request. */
static void wrong_handle(ONEBIT_Request request, const char *part) {
  int flag;
  WRONG_MPI(ONEBIT_Start, (&request), MPI_ERR_REQUEST, part);
  WRONG_MPI(ONEBIT_Wait, (&request, MPI_STATUS_IGNORE), MPI_ERR_REQUEST, part);
  WRONG_MPI(ONEBIT_Test, (&request, &flag, MPI_STATUS_IGNORE), MPI_ERR_REQUEST, part);
  WRONG_MPI(ONEBIT_Request_free, (&request), MPI_ERR_REQUEST, part);
  MPI_Status statuses[2];
  ONEBIT_Request both[2] = {ONEBIT_REQUEST_NULL, request};
  WRONG_MPI(ONEBIT_Waitall, (2, both, statuses), MPI_ERR_IN_STATUS, part);
  CHECK(error_class_of(statuses[1].MPI_ERROR) == MPI_ERR_REQUEST, "the wrong request has no error");
  CHECK(statuses[0].MPI_ERROR == MPI_SUCCESS, "the other one has an error");
}

static void wrong_requests(MPI_Comm comm) {
  static char foreign[4096];
  int flag;
  ONEBIT_Request request, once, persistent, gone;
  CHECK(ONEBIT_Iallreduce(send, receive, COUNT, MPI_FLOAT, MPI_SUM, comm, &request) == MPI_SUCCESS,
        "the call fails");
  once = request;
  CHECK(ONEBIT_Wait(&request, MPI_STATUS_IGNORE) == MPI_SUCCESS, "the wait fails");
  CHECK(ONEBIT_Allreduce_init(send, receive, COUNT, MPI_FLOAT, MPI_SUM, comm, MPI_INFO_NULL,
                              &persistent) == MPI_SUCCESS,
        "the persistent call fails");
  gone = persistent;
  CHECK(ONEBIT_Request_free(&persistent) == MPI_SUCCESS, "the request is not freed");
  wrong_handle(once, "request is 0x");
  wrong_handle(gone, "not an ONEBIT_Request that exists (it is finished, or was never created)");
  wrong_handle((ONEBIT_Request)(void *)foreign, "not an ONEBIT_Request that exists");
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
  MPI_Comm comm = duplicate_world();
  MPI_Errhandler handler;
  MPI_Comm_create_errhandler(note_error, &handler);
  MPI_Comm_set_errhandler(comm, handler);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, handler);
  WRONG(onebit_comm_create_mpi, (comm, NULL), ONEBIT_ERROR_ARGUMENT, "comm is NULL");
  wrong_arguments(comm);
  wrong_requests(comm);
  CHECK(ONEBIT_Allreduce(send, receive, COUNT, MPI_FLOAT, MPI_SUM, comm) == MPI_SUCCESS,
        "the call after the wrong ones: %s", onebit_last_error());
  MPI_Errhandler_free(&handler);
  MPI_Comm_free(&comm);
  cr_expect_eq(wrong_check_header("mpi"), 1);
  cr_expect_eq(wrong_check_header("mpi_calls"), 11);
  cr_expect_eq(wrong_calls_failed(), 0, "%zu of %zu", wrong_calls_failed(), wrong_calls_made());
}

/* Tests calls of onebit/mpi_calls.h that must be refused on all ranks, so that no rank waits for
 * ever. */

static void check_refused(int code, int wanted, const char *word) {
  CHECK(is_refused(code, wanted), "class %d, not %d", error_class_of(code), wanted);
  CHECK_WORDS(word);
}

static void check_refused_intercommunicator(int rank, MPI_Errhandler handler) {
  MPI_Comm half, between;
  float a[8] = {0}, b[8];
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
  if (size_of(MPI_COMM_WORLD) > 1) {
    MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - rank % 2, 1, &between);
    MPI_Comm_set_errhandler(between, handler);
    check_refused(ONEBIT_Allreduce(a, b, 8, MPI_FLOAT, MPI_SUM, between), MPI_ERR_COMM, "inter");
    MPI_Comm_free(&between);
  }
  MPI_Comm_free(&half);
}

static void check_refused_counts(MPI_Comm comm, int rank) {
  float a[8] = {0}, b[8];
  if (size_of(comm) > 1)
    check_refused(ONEBIT_Allreduce(a, b, rank ? 8 : 7, MPI_FLOAT, MPI_SUM, comm), MPI_ERR_COUNT,
                  "differs between ranks");
}

/* Sets a wrong environment variable on one rank. Every rank must get an error, and the next call
 * must succeed. */
static void check_refused_environments(int rank, MPI_Errhandler handler) {
  static const char *const wrong[][2] = {{"ONEBIT_CODEC", "abacus"}, {"ONEBIT_PROGRESS", "none"}};
  static float a[COUNT], b[COUNT];
  for (size_t k = 0; size_of(MPI_COMM_WORLD) > 1 && k < 2; k++) {
    MPI_Comm comm = duplicate_world();
    MPI_Comm_set_errhandler(comm, handler);
    check_case("%s=%s", wrong[k][0], wrong[k][1]);
    if (rank == 0)
      setenv(wrong[k][0], wrong[k][1], 1);
    int code = ONEBIT_Allreduce(a, b, COUNT, MPI_FLOAT, MPI_SUM, comm);
    check_refused(code, MPI_ERR_OTHER, rank == 0 ? wrong[k][1] : "rank");
    unsetenv(wrong[k][0]);
    MPI_Comm_free(&comm);
    comm = duplicate_world();
    CHECK(ONEBIT_Allreduce(a, b, COUNT, MPI_FLOAT, MPI_SUM, comm) == MPI_SUCCESS,
          "the next call fails");
    MPI_Comm_free(&comm);
  }
}

/* Checks that MPI's own reductions refuse ONEBIT_AVG, since they cannot compute means. */
static void check_mean_outside_library(void) {
  float mine = 1, result = 1;
  MPI_Allreduce(&mine, &result, 1, MPI_FLOAT, ONEBIT_AVG, MPI_COMM_WORLD);
  CHECK(size_of(MPI_COMM_WORLD) == 1 || isnan(result), "a mean of %g", (double)result);
}

Test(mpi_calls_arguments, are_refused_where_they_are_wrong) {
  float a = 0, b;
  MPI_Errhandler handler;
  CHECK(ONEBIT_Allreduce(&a, &b, 1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD) == MPI_ERR_OTHER,
        "a call without MPI succeeds");
  CHECK_WORDS("not initialised");
  CHECK(ONEBIT_AVG == MPI_OP_NULL && ONEBIT_FLOAT16_TYPE == MPI_DATATYPE_NULL,
        "types exist without MPI");
  int rank = mpi_begin();
  MPI_Comm comm = duplicate_world();
  MPI_Comm_create_errhandler(note_error, &handler);
  MPI_Comm_set_errhandler(comm, handler);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, handler);
  check_refused_intercommunicator(rank, handler);
  check_refused_counts(comm, rank);
  check_refused_environments(rank, handler);
  check_mean_outside_library();
  MPI_Errhandler_free(&handler);
  MPI_Comm_free(&comm);
  mpi_end();
}

/* Tests calls of onebit/mpi_calls.h that one rank does not make. After ONEBIT_TIMEOUT the other
 * ranks must get an error that names this rank. A shorter timeout could also expire if one of the
 * other ranks is merely slow. */

#define TIMEOUT "2"

static int call_allreduce(MPI_Comm comm, const float *from, float *to, int count) {
  return ONEBIT_Allreduce(from, to, count, MPI_FLOAT, MPI_SUM, comm);
}

/* Makes an MPI_Iallreduce and waits for it as the library waits for dense calls. */
static int call_dense(MPI_Comm comm, const float *from, float *to, int count) {
  MPI_Request request;
  MPI_Iallreduce(from, to, count, MPI_FLOAT, MPI_SUM, comm, &request);
  return ob_wait_for_request(comm, &request, "a dense call");
}

typedef int mpi_call(MPI_Comm comm, const float *from, float *to, int count);

/* Makes a call on all ranks except the last. The last rank calls after the others got their errors,
 * and must get an error as well. */
static void check_missing_last_rank(mpi_call *call, bool late_fails) {
  int rank = rank_of(MPI_COMM_WORLD), last = size_of(MPI_COMM_WORLD) - 1;
  MPI_Comm comm = duplicate_world();
  float *from = allocate(2 * COUNT, sizeof *from), *to = allocate(2 * COUNT, sizeof *to);
  char name[48];
  snprintf(name, sizeof name, "waited " TIMEOUT " s for rank %d", last);
  for (int k = 0; k < 2; k++) {
    fill_exact(from, ONEBIT_FLOAT32, COUNT, rank, k);
    CHECK(call_allreduce(comm, from, to, COUNT) == MPI_SUCCESS, "%s", onebit_last_error());
    CHECK_EXACT("before", to, COUNT, last + 1, k);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  for (int other = 0; rank == last && other < last; other++)
    MPI_Recv(NULL, 0, MPI_BYTE, other, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  const int code = call(comm, from, to, COUNT + 1);
  if (rank != last) {
    CHECK(code == MPI_ERR_OTHER, "code %d", code);
    CHECK_WORDS(rank == 0 || last < 2 ? name : "rank");
    MPI_Send(NULL, 0, MPI_BYTE, last, 0, MPI_COMM_WORLD);
  }
  CHECK(rank != last || !late_fails || code != MPI_SUCCESS, "it finds all well");
  MPI_Barrier(MPI_COMM_WORLD); /* gives the last rank time to receive the error */
  CHECK(call_allreduce(comm, from, to, COUNT + 2) != MPI_SUCCESS, "the communicator works again");
  MPI_Barrier(MPI_COMM_WORLD);
}

RankedTest(mpi_calls_waits, an_agreement_without_one_rank) {
  setenv("ONEBIT_TIMEOUT", TIMEOUT, 1);
  if (size_of(MPI_COMM_WORLD) > 1)
    check_missing_last_rank(call_allreduce, true);
}

RankedTest(mpi_calls_waits, a_dense_call_without_one_rank) {
  setenv("ONEBIT_TIMEOUT", TIMEOUT, 1);
  if (size_of(MPI_COMM_WORLD) > 1)
    check_missing_last_rank(call_dense, false);
}
