/* Batches over MPI: nonblocking sends and receives on the library's own communicator. */
#ifdef ONEBIT_HAVE_MPI

#include <limits.h>
#include <sched.h>
#include <stdlib.h>

#include "base/bound_mpi.h"
#include "base/call_scope.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/process.h"
#include "collectives/agree.h"
#include "collectives/communicator.h"
#include "collectives/cost/tuning.h"
#include "collectives/transports/mpi_state.h"
#include "onebit/mpi.h"

/* A wait looks at the clock every LOOK_TRIES tries; after SPIN_TRIES, most of a millisecond, it
 * yields where MPI itself does not (MPI_Waitall may spin for ever); a cancelled message gets
 * CANCEL_SECONDS. */
#define LOOK_TRIES     16
#define SPIN_TRIES     4096
#define CANCEL_SECONDS 0.1

struct mpi_batch {
  struct ob_batch base;
  MPI_Request *requests; /* receives come first, so that the number of a receive is that of its
                          * status */
  MPI_Status *statuses;
  int started;
};

/* Requests on different communicators may depend on each other, so those of a process move
 * together. */
static struct ob_engine process_engine = OB_ENGINE_INIT;

#define MPI_CHECK(name, call)                                                                      \
  do {                                                                                             \
    int mpi_check_code = (call);                                                                   \
    if (mpi_check_code != MPI_SUCCESS)                                                             \
      return ob_mpi_error(name, mpi_check_code);                                                   \
  } while (0)
#define MPI_TRY(call, arguments) MPI_CHECK(#call, call arguments)

static struct ob_mpi_state *mpi_state_of(onebit_comm_t comm) { return comm->state; }

static MPI_Comm mpi_of(onebit_comm_t comm) { return mpi_state_of(comm)->comm; }

/* Returns true if the request ends soon, as a cancelled receive does, and a send that was on its
 * way. */
static bool ends_soon(MPI_Request *request) {
  int done = 0;
  for (double until = ob_seconds() + CANCEL_SECONDS; !done && ob_seconds() < until;) {
    if (MPI_Test(request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS)
      return *request == MPI_REQUEST_NULL;
    sched_yield();
  }
  return done;
}

/* Ends the requests of a failed call: a late message would overwrite memory that the program uses
 * again. Receives are cancelled; MPI cannot cancel a send that it has begun. */
static bool mpi_cancel(struct ob_batch *base) {
  struct mpi_batch *batch = (struct mpi_batch *)base;
  bool all = true;
  if (ob_mpi_is_finalized())
    return true;
  for (int i = 0; i < batch->started; i++) {
    if (batch->requests[i] == MPI_REQUEST_NULL)
      continue;
    if (i < (int)base->receives)
      MPI_Cancel(&batch->requests[i]);
    all = ends_soon(&batch->requests[i]) && all;
  }
  return all;
}

static onebit_status_t mpi_begin(struct ob_batch *base, int tag) {
  struct mpi_batch *batch = (struct mpi_batch *)base;
  MPI_Comm mpi = mpi_of(base->comm);
  batch->statuses = base->messages;
  batch->requests = (MPI_Request *)(batch->statuses + 2 * base->capacity);
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

/* Returns the peer of a request; requests are in the order of `begin`. */
static int peer_of(const struct mpi_batch *batch, size_t request) {
  const struct ob_batch *base = &batch->base;
  return request < base->receives ? base->receive[request].peer
                                  : base->send[request - base->receives].peer;
}

/* Finds the request that has failed, and its code: MPI_Testall gives "error in status", or the
 * status's own. */
static int find_failed(const struct mpi_batch *batch, int *code) {
  for (int i = 0; i < batch->started; i++) {
    int own = batch->statuses[i].MPI_ERROR;
    if (own == MPI_SUCCESS || own == MPI_ERR_PENDING ||
        (*code != MPI_ERR_IN_STATUS && *code != own))
      continue;
    *code = own;
    return peer_of(batch, (size_t)i);
  }
  return -1;
}

static onebit_status_t batch_error(const struct mpi_batch *batch, int code) {
  onebit_comm_t comm = batch->base.comm;
  int peer = find_failed(batch, &code), failed = ob_mpi_failed_rank(comm);
  onebit_status_t status = ob_mpi_error("MPI_Testall", code);
  if (failed >= 0)
    return ob_error(status, "the process of rank %d on host %s has failed: %.150s", failed,
                    ob_comm_host_name(comm, failed), onebit_last_error());
  return peer < 0 ? status
                  : ob_error(status, "a message from or to rank %d on host %s: %.150s", peer,
                             ob_comm_host_name(comm, peer), onebit_last_error());
}

static onebit_status_t mpi_read_sizes(struct mpi_batch *batch) {
  for (size_t i = 0; i < batch->base.receives; i++) {
    int bytes;
    MPI_TRY(MPI_Get_count, (&batch->statuses[i], MPI_BYTE, &bytes));
    batch->base.receive[i].bytes = (size_t)bytes;
  }
  return ONEBIT_OK;
}

static onebit_status_t test_inside(struct mpi_batch *batch, double seconds) {
  double until = 0;
  for (unsigned tries = 1;; tries++) {
    int done;
    int code = MPI_Testall(batch->started, batch->requests, &done, batch->statuses);
    if (code != MPI_SUCCESS)
      return batch_error(batch, code);
    if (done)
      return mpi_read_sizes(batch);
    if (seconds <= 0)
      return ONEBIT_IN_PROGRESS;
    if (tries % LOOK_TRIES == 0) {
      double now = ob_seconds();
      if (until > 0 && now >= until)
        return ONEBIT_IN_PROGRESS;
      until = until > 0 ? until : now + seconds;
    }
    if (tries > SPIN_TRIES)
      sched_yield();
  }
}

static onebit_status_t mpi_test(struct ob_batch *base, double seconds) {
  struct ob_mpi_state *state = mpi_state_of(base->comm);
  atomic_store_explicit(&state->inside, true, memory_order_relaxed);
  onebit_status_t status = test_inside((struct mpi_batch *)base, seconds);
  atomic_store_explicit(&state->inside, false, memory_order_relaxed);
  return status;
}

static int mpi_peer_awaited(struct ob_batch *base) {
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

static bool mpi_threads(void) {
  int provided = MPI_THREAD_SINGLE;
  return MPI_Query_thread(&provided) == MPI_SUCCESS && provided == MPI_THREAD_MULTIPLE;
}

/* Probing for a message makes MPI move its messages. */
static void mpi_progress(onebit_comm_t comm) {
  int found;
  MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, mpi_of(comm), &found, MPI_STATUS_IGNORE);
}

/* Asks the MPI library; one that is built for devices may still be told not to use them. */
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
    .threads = mpi_threads,
    .name = "mpi",
    .host_messages = true,
    .device_messages = device_messages,
    .network = true,
    .batch_bytes = sizeof(struct mpi_batch),
    .message_bytes = 2 * (sizeof(MPI_Status) + sizeof(MPI_Request)),
    .cancel = mpi_cancel,
    .begin = mpi_begin,
    .test = mpi_test,
    .peer_awaited = mpi_peer_awaited,
    .progress = mpi_progress,
    .health = ob_mpi_health,
    .abort = ob_mpi_abort,
    .shrink = ob_mpi_shrink,
    .destroy = ob_mpi_state_destroy,
};

static onebit_status_t mpi_check_usable(MPI_Comm mpi) {
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

/* Memory that MPI may still write to after a wait has timed out; then it is kept. */
struct creation {
  MPI_Comm mpi, host;
  int first;
  /* The numbers that ranks agree on: the status, the machine's number, and its negative. */
  int own[3], minimum[3];
  int *host_of;
  struct ob_costs costs;
};

/* Finds every rank's host, named by the first of its ranks. MPI's split has no nonblocking form. */
static onebit_status_t mpi_find_hosts(struct creation *creation, int rank) {
  MPI_Request request;
  creation->first = rank;
  MPI_TRY(MPI_Comm_split_type,
          (creation->mpi, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &creation->host));
  MPI_TRY(MPI_Ibcast, (&creation->first, 1, MPI_INT, 0, creation->host, &request));
  OB_TRY(ob_mpi_wait(&request, "creation of a communicator: hosts"));
  MPI_Comm_free(&creation->host);
  /* PMPI, since libonebit-mpi.so may replace MPI's collectives. */
  MPI_CHECK("MPI_Iallgather", PMPI_Iallgather(&creation->first, 1, MPI_INT, creation->host_of, 1,
                                              MPI_INT, creation->mpi, &request));
  return ob_mpi_wait(&request, "creation of a communicator: hosts of all ranks");
}

/* Makes this rank's part; if any rank fails, the caller frees the duplicate. */
static onebit_status_t mpi_create_local(MPI_Comm mpi, const int *host_of, onebit_comm_t *comm) {
  int rank, size, found = 0, *largest = NULL;
  MPI_TRY(MPI_Comm_rank, (mpi, &rank));
  MPI_TRY(MPI_Comm_size, (mpi, &size));
  struct ob_mpi_state *state;
  OB_TRY(ob_mpi_state_create(mpi, size, &state));
  onebit_status_t status =
      ob_comm_create(&ob_transport_mpi, rank, size, host_of, state, &process_engine, comm);
  if (status == ONEBIT_OK)
    status = ob_comm_make_names(*comm);
  if (status != ONEBIT_OK) {
    ob_comm_release(*comm);
    *comm = NULL;
    ob_release(state->told);
    ob_release(state);
    return status;
  }
  bool known = MPI_Comm_get_attr(mpi, MPI_TAG_UB, &largest, &found) == MPI_SUCCESS && found;
  state->end_tag = known ? *largest : 32767; /* the least that MPI guarantees */
  (*comm)->largest_tag = state->end_tag - 1;
  return ONEBIT_OK;
}

/* All ranks take the worst of their statuses, and find out if one machine has them all: then the
 * smallest number is also the largest. */
static onebit_status_t mpi_agree(struct creation *creation, onebit_status_t mine) {
  MPI_Request request;
  creation->own[0] = mine;
  MPI_CHECK("MPI_Iallreduce", PMPI_Iallreduce(creation->own, creation->minimum, 3, MPI_INT, MPI_MIN,
                                              creation->mpi, &request));
  OB_TRY(ob_mpi_wait(&request, "creation of a communicator: agreement"));
  onebit_status_t worst = (onebit_status_t)creation->minimum[0];
  if (mine == ONEBIT_OK && worst != ONEBIT_OK)
    return ob_error(worst, "another rank reports %s", onebit_status_string(worst));
  return mine;
}

/* True if all ranks are on one machine, which represents several hosts. */
static bool mpi_on_one_machine(const struct creation *creation, int size) {
  const int *minimum = creation->minimum, *host_of = creation->host_of;
  int rank = 1;
  while (rank < size && host_of[rank] == host_of[0])
    rank++;
  return minimum[1] > 0 && minimum[1] == -minimum[2] && rank < size;
}

/* All ranks choose schedules by the costs of rank 0, so that they choose the same. */
static onebit_status_t mpi_find_costs(struct creation *creation, int rank, int size) {
  struct ob_costs *costs = &creation->costs;
  MPI_Request request;
  if (rank == 0)
    ob_tuning_find(costs);
  if (rank == 0 && mpi_on_one_machine(creation, size))
    ob_costs_of_one_machine(costs);
  MPI_TRY(MPI_Ibcast, (costs, (int)sizeof *costs, MPI_BYTE, 0, creation->mpi, &request));
  return ob_mpi_wait(&request, "creation of a communicator: the costs of rank 0");
}

/* Collective on every rank: one without memory for the list takes part all the same. */
static onebit_status_t mpi_create(struct creation *creation, bool wanted, onebit_comm_t *comm) {
  int rank, size;
  onebit_status_t status = ONEBIT_OK;
  MPI_TRY(MPI_Comm_rank, (creation->mpi, &rank));
  MPI_TRY(MPI_Comm_size, (creation->mpi, &size));
  creation->own[1] = (int)(ob_machine_number() % INT_MAX);
  creation->own[2] = -creation->own[1];
  creation->host_of = ob_allocate((size_t)size, sizeof *creation->host_of);
  if (!creation->host_of)
    status = ob_error(ONEBIT_ERROR_MEMORY, "no memory for the hosts of %d ranks", size);
  OB_TRY(mpi_agree(creation, status));
  OB_TRY(mpi_find_hosts(creation, rank));
  OB_TRY(mpi_find_costs(creation, rank, size));
  status = wanted ? mpi_create_local(creation->mpi, creation->host_of, comm)
                  : ob_error(ONEBIT_ERROR_ARGUMENT, "comm is NULL");
  if (*comm)
    (*comm)->costs = creation->costs;
  OB_TRY(mpi_agree(creation, status));
  return ob_agree_names(*comm, NULL);
}

/* Cleans up after a failure. Memory that MPI may still use stays, and so does its communicator. */
static void mpi_abandon(struct creation *creation, onebit_comm_t comm, onebit_status_t status) {
  bool stays = status == ONEBIT_ERROR_TRANSPORT;
  if (comm && stays)
    ob_comm_hear_end(comm, onebit_last_error());
  if (comm)
    onebit_comm_destroy(comm); /* with the duplicate */
  else if (!stays)
    MPI_Comm_free(&creation->mpi);
  if (stays)
    ob_memory_keep(creation->host_of);
  else
    ob_release(creation->host_of);
}

/* MPI_Comm_dup would run the program's attribute callbacks, for a communicator that the program
 * never made. MPI_Comm_split does not return while a rank is missing, so all of them come first. */
static onebit_status_t duplicate_communicator(MPI_Comm mpi_comm, struct creation *creation) {
  MPI_Request request;
  int rank = 0;
  MPI_TRY(MPI_Comm_rank, (mpi_comm, &rank));
  MPI_TRY(MPI_Ibarrier, (mpi_comm, &request));
  OB_TRY(ob_mpi_wait(&request, "creation of a communicator: its duplicate"));
  MPI_TRY(MPI_Comm_split, (mpi_comm, 0, rank, &creation->mpi));
  MPI_Comm_set_errhandler(creation->mpi, MPI_ERRORS_RETURN);
  return ONEBIT_OK;
}

onebit_status_t onebit_comm_create_mpi(MPI_Comm mpi_comm, onebit_comm_t *result) {
  OB_CALL_SCOPE;
  if (result)
    *result = NULL;
  OB_TRY(mpi_check_usable(mpi_comm));
  /* Too little memory to be treated as able to run out: the others could not be told. */
  struct creation *creation = calloc(1, sizeof *creation);
  if (!creation)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a communicator");
  onebit_comm_t comm = NULL;
  onebit_status_t status = duplicate_communicator(mpi_comm, creation);
  bool duplicated = status == ONEBIT_OK;
  if (duplicated)
    status = mpi_create(creation, result != NULL, &comm);
  if (status != ONEBIT_OK && duplicated)
    mpi_abandon(creation, comm, status);
  else
    ob_release(creation->host_of);
  if (status == ONEBIT_OK)
    *result = comm;
  if (status == ONEBIT_ERROR_TRANSPORT)
    ob_memory_keep(creation);
  else
    free(creation);
  return status;
}

#else
typedef int ob_no_mpi_here; /* ISO C requires a declaration in every file */
#endif
