/* Batches over MPI: nonblocking sends and receives on a communicator of our own. */
#ifdef ONEBIT_HAVE_MPI

#include <limits.h>
#include <sched.h>

#include "base/bound_mpi.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/launch_mpi.h"
#include "base/memory.h"
#include "collectives/communicator.h"
#include "collectives/cost/tuning.h"
#include "onebit/mpi.h"

/* How often a wait looks at the clock, and how long a cancelled message is given. */
#define LOOK_TRIES     16
#define CANCEL_SECONDS 0.1

struct mpi_batch {
  struct ob_batch base;
  MPI_Request *requests; /* receives first, so that a status is found by its receive's number */
  MPI_Status *statuses;
  int started;
};

/* Requests on different communicators may depend on each other, so those of a process move
 * together. */
static struct ob_engine process_engine = OB_ENGINE_INIT;

static onebit_status_t mpi_error(const char *call, int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS)
    text[0] = '\0';
  return ob_error(ONEBIT_ERROR_TRANSPORT, "%s: %s", call, text);
}

#define MPI_CHECK(name, call)                                                                      \
  do {                                                                                             \
    int mpi_check_code = (call);                                                                   \
    if (mpi_check_code != MPI_SUCCESS)                                                             \
      return mpi_error(name, mpi_check_code);                                                      \
  } while (0)
#define MPI_TRY(call, arguments) MPI_CHECK(#call, call arguments)

static MPI_Comm mpi_of(onebit_comm_t comm) { return *(MPI_Comm *)comm->state; }

static bool is_finalized(void) {
  int finalized = 0;
  MPI_Finalized(&finalized);
  return finalized;
}

/* Whether the request ends soon, which a receive does that was cancelled, and a send that was on
 * its way. */
static bool ends_soon(MPI_Request *request) {
  int done = 0;
  for (double until = ob_seconds() + CANCEL_SECONDS; !done && ob_seconds() < until;) {
    if (MPI_Test(request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS)
      return *request == MPI_REQUEST_NULL;
    sched_yield();
  }
  return done;
}

/* Of a call that has failed: a message that came later would be written where the program has other
 * things by then. Receives are cancelled; MPI cannot take back a send that it has begun. */
static bool end_requests(struct mpi_batch *batch) {
  bool all = true;
  for (int i = 0; i < batch->started; i++) {
    if (batch->requests[i] == MPI_REQUEST_NULL)
      continue;
    if (i < (int)batch->base.receives)
      MPI_Cancel(&batch->requests[i]);
    all = ends_soon(&batch->requests[i]) && all;
  }
  return all;
}

static bool batch_destroy(struct ob_batch *base) {
  struct mpi_batch *batch = (struct mpi_batch *)base;
  if (!batch)
    return true;
  bool all = is_finalized() || end_requests(batch);
  ob_release(batch->requests);
  ob_release(batch->statuses);
  ob_batch_release(base);
  return all;
}

static onebit_status_t batch_create(onebit_comm_t comm, size_t capacity, struct ob_batch **result) {
  struct ob_batch *base = ob_batch_allocate(comm, capacity, sizeof(struct mpi_batch));
  struct mpi_batch *batch = (struct mpi_batch *)base;
  *result = base;
  if (base) {
    batch->requests = ob_allocate(2 * capacity, sizeof *batch->requests);
    batch->statuses = ob_allocate(2 * capacity, sizeof *batch->statuses);
    if (batch->requests && batch->statuses)
      return ONEBIT_OK;
  }
  batch_destroy(base);
  *result = NULL;
  return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a batch of %zu messages", capacity);
}

static onebit_status_t begin(struct ob_batch *base, int tag) {
  struct mpi_batch *batch = (struct mpi_batch *)base;
  MPI_Comm mpi = mpi_of(base->comm);
  batch->started = 0;
  for (size_t i = 0; i < base->receives; i++) {
    const struct ob_endpoint *in = &base->receive[i];
    MPI_TRY(MPI_Irecv, (in->data, (int)in->bytes, MPI_BYTE, in->peer, tag, mpi,
                        &batch->requests[batch->started]));
    batch->started++;
  }
  for (size_t i = 0; i < base->sends; i++) {
    const struct ob_endpoint *out = &base->send[i];
    MPI_TRY(MPI_Isend, (out->data, (int)out->bytes, MPI_BYTE, out->peer, tag, mpi,
                        &batch->requests[batch->started]));
    batch->started++;
  }
  return ONEBIT_OK;
}

/* What MPI_Testall and MPI_Waitall return for a failed batch is "error in status": the status says
 * which. */
static onebit_status_t batch_error(const struct mpi_batch *batch, const char *call, int code) {
  for (int i = 0; code == MPI_ERR_IN_STATUS && i < batch->started; i++) {
    int own = batch->statuses[i].MPI_ERROR;
    if (own != MPI_SUCCESS && own != MPI_ERR_PENDING)
      code = own;
  }
  return mpi_error(call, code);
}

static onebit_status_t read_sizes(struct mpi_batch *batch) {
  for (size_t i = 0; i < batch->base.receives; i++) {
    int bytes;
    MPI_TRY(MPI_Get_count, (&batch->statuses[i], MPI_BYTE, &bytes));
    batch->base.receive[i].bytes = (size_t)bytes;
  }
  return ONEBIT_OK;
}

static onebit_status_t test(struct ob_batch *base, double seconds) {
  struct mpi_batch *batch = (struct mpi_batch *)base;
  double until = 0;
  for (unsigned tries = 1;; tries++) {
    int done;
    int code = MPI_Testall(batch->started, batch->requests, &done, batch->statuses);
    if (code != MPI_SUCCESS)
      return batch_error(batch, "MPI_Testall", code);
    if (done)
      return read_sizes(batch);
    if (seconds <= 0)
      return ONEBIT_IN_PROGRESS;
    if (tries % LOOK_TRIES == 0) {
      double now = ob_seconds();
      if (until > 0 && now >= until)
        return ONEBIT_IN_PROGRESS;
      until = until > 0 ? until : now + seconds;
    }
    sched_yield();
  }
}

static int peer_awaited(struct ob_batch *base) {
  struct mpi_batch *batch = (struct mpi_batch *)base;
  for (int i = 0; i < batch->started; i++) {
    int done = 1, receives = (int)base->receives;
    if (batch->requests[i] != MPI_REQUEST_NULL)
      MPI_Request_get_status(batch->requests[i], &done, MPI_STATUS_IGNORE);
    if (!done)
      return i < receives ? base->receive[i].peer : base->send[i - receives].peer;
  }
  return -1;
}

static bool threads(void) {
  int provided = MPI_THREAD_SINGLE;
  return MPI_Query_thread(&provided) == MPI_SUCCESS && provided == MPI_THREAD_MULTIPLE;
}

/* Looking for a message makes the library move what it has in hand. */
static void progress(onebit_comm_t comm) {
  int found;
  MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, mpi_of(comm), &found, MPI_STATUS_IGNORE);
}

static void destroy(onebit_comm_t comm) {
  if (!is_finalized())
    MPI_Comm_free((MPI_Comm *)comm->state);
  ob_release(comm->state);
}

/* The library's own word; one that was built for it can still be told not to. */
static bool device_messages(void) {
#if defined(MPIX_CUDA_AWARE_SUPPORT) && MPIX_CUDA_AWARE_SUPPORT
  return MPIX_Query_cuda_support && MPIX_Query_cuda_support() == 1;
#elif defined(MPIX_GPU_SUPPORT_CUDA)
  int yes = 0;
  return MPIX_GPU_query_support &&
         MPIX_GPU_query_support(MPIX_GPU_SUPPORT_CUDA, &yes) == MPI_SUCCESS && yes;
#else
  return false;
#endif
}

const struct ob_transport ob_transport_mpi = {
    .threads = threads,
    .name = "mpi",
    .host_messages = true,
    .device_messages = device_messages,
    .network = true,
    .batch_create = batch_create,
    .batch_destroy = batch_destroy,
    .begin = begin,
    .test = test,
    .peer_awaited = peer_awaited,
    .progress = progress,
    .destroy = destroy,
};

static onebit_status_t check_usable(MPI_Comm mpi) {
  int initialized = 0, finalized = 0, inter = 0;
  OB_TRY(ob_mpi_bind());
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (!initialized || finalized)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "MPI is not initialised, or already finalised");
  if (mpi == MPI_COMM_NULL)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "mpi_comm is MPI_COMM_NULL");
  MPI_TRY(MPI_Comm_test_inter, (mpi, &inter));
  if (inter)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "mpi_comm is an inter-communicator");
  return ob_launch_check(mpi);
}

/* Every rank's host, named by the first of its ranks. */
static onebit_status_t find_hosts(MPI_Comm mpi, int rank, int *host_of) {
  MPI_Comm host;
  int first = rank;
  MPI_TRY(MPI_Comm_split_type, (mpi, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &host));
  int code = MPI_Bcast(&first, 1, MPI_INT, 0, host);
  MPI_Comm_free(&host);
  if (code != MPI_SUCCESS)
    return mpi_error("MPI_Bcast", code);
  /* libonebit-mpi.so may stand before MPI's collectives. */
  MPI_CHECK("MPI_Allgather", PMPI_Allgather(&first, 1, MPI_INT, host_of, 1, MPI_INT, mpi));
  return ONEBIT_OK;
}

/* Makes this rank's part; the duplicate is freed by the caller when any rank fails. */
static onebit_status_t create_local(MPI_Comm mpi, const int *host_of, onebit_comm_t *comm) {
  int rank, size, found = 0, *largest = NULL;
  MPI_TRY(MPI_Comm_rank, (mpi, &rank));
  MPI_TRY(MPI_Comm_size, (mpi, &size));
  MPI_Comm *state = ob_allocate(1, sizeof *state);
  if (!state)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a communicator");
  *state = mpi;
  onebit_status_t status =
      ob_comm_create(&ob_transport_mpi, rank, size, host_of, state, &process_engine, comm);
  if (status != ONEBIT_OK) {
    ob_release(state);
    return status;
  }
  bool known = MPI_Comm_get_attr(mpi, MPI_TAG_UB, &largest, &found) == MPI_SUCCESS && found;
  (*comm)->largest_tag = known ? *largest : 32767; /* the least that MPI guarantees */
  return ONEBIT_OK;
}

/* All ranks take the worst of their statuses. */
static onebit_status_t agree(MPI_Comm mpi, onebit_status_t mine) {
  int worst = mine, status = mine;
  MPI_CHECK("MPI_Allreduce", PMPI_Allreduce(&status, &worst, 1, MPI_INT, MPI_MIN, mpi));
  if (mine == ONEBIT_OK && worst != ONEBIT_OK)
    return ob_error((onebit_status_t)worst, "another rank reports %s",
                    onebit_status_string((onebit_status_t)worst));
  return mine != ONEBIT_OK ? mine : ONEBIT_OK;
}

/* All ranks choose by the costs of rank 0, so that they choose alike. */
static onebit_status_t find_costs(MPI_Comm mpi, int rank, struct ob_costs *costs) {
  if (rank == 0)
    ob_tuning_find(costs);
  MPI_TRY(MPI_Bcast, (costs, (int)sizeof *costs, MPI_BYTE, 0, mpi));
  return ONEBIT_OK;
}

/* Collective, whatever a rank's own lot: one without memory for the list takes part all the same.
 * */
static onebit_status_t create(MPI_Comm mpi, bool wanted, onebit_comm_t *comm) {
  int rank, size, status = ONEBIT_OK;
  struct ob_costs costs = {0};
  MPI_TRY(MPI_Comm_rank, (mpi, &rank));
  MPI_TRY(MPI_Comm_size, (mpi, &size));
  int *host_of = ob_allocate((size_t)size, sizeof *host_of);
  if (!host_of)
    status = ob_error(ONEBIT_ERROR_MEMORY, "no memory for the hosts of %d ranks", size);
  status = agree(mpi, (onebit_status_t)status);
  if (status == ONEBIT_OK)
    status = find_hosts(mpi, rank, host_of);
  if (status == ONEBIT_OK)
    status = find_costs(mpi, rank, &costs);
  if (status == ONEBIT_OK)
    status =
        wanted ? create_local(mpi, host_of, comm) : ob_error(ONEBIT_ERROR_ARGUMENT, "comm is NULL");
  if (*comm)
    (*comm)->costs = costs;
  ob_release(host_of);
  return agree(mpi, (onebit_status_t)status);
}

onebit_status_t onebit_comm_create_mpi(MPI_Comm mpi_comm, onebit_comm_t *result) {
  if (result)
    *result = NULL;
  OB_TRY(check_usable(mpi_comm));
  MPI_Comm mpi;
  MPI_TRY(MPI_Comm_dup, (mpi_comm, &mpi));
  MPI_Comm_set_errhandler(mpi, MPI_ERRORS_RETURN);
  onebit_comm_t comm = NULL;
  onebit_status_t status = create(mpi, result != NULL, &comm);
  if (status == ONEBIT_OK) {
    *result = comm;
    return ONEBIT_OK;
  }
  if (comm)
    onebit_comm_destroy(comm); /* frees the duplicate */
  else
    MPI_Comm_free(&mpi);
  return status;
}

#else
typedef int ob_no_mpi_here; /* ISO C wants a declaration in every file */
#endif
