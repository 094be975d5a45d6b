/* Creates and destroys communicators over MPI, and creates new communicators of the surviving
 * ranks. */
#ifdef ONEBIT_HAVE_MPI
#include <limits.h>
#include <sched.h>
#include <stdlib.h>

#include "base/bound_mpi.h"
#include "base/call_scope.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/process.h"
#include "collectives/communicator.h"
#include "collectives/cost/tuning.h"
#include "collectives/transports/mpi_state.h"
#include "collectives/watch.h"
#include "onebit/mpi.h"

/* The requests of all communicators of a process advance together, since requests on different
 * communicators may depend on each other. */
static struct ob_engine process_engine = OB_ENGINE_INIT;

/* Waits for a request until the timeout that the environment sets, and then leaves the request
 * unfinished. `call` names the operation in error messages. */
static onebit_status_t mpi_wait(MPI_Request *request, const char *call) {
  struct ob_watch watch = {0};
  double timeout;
  int done = 0;
  OB_TRY(ob_watch_timeout(&timeout));
  for (;;) {
    int code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
    if (code != MPI_SUCCESS)
      return ob_mpi_error(call, code);
    if (done)
      return ONEBIT_OK;
    OB_TRY(ob_watch_alone(&watch, timeout, call));
    sched_yield();
  }
}

/* --- State -------------------------------------------------------------------------------------*/

/* Creates the state. On failure *result is NULL, and the caller still owns the MPI communicator. */
static onebit_status_t mpi_state_create(MPI_Comm mpi, int size, struct ob_mpi_state **result) {
  struct ob_mpi_state *state = ob_allocate(1, sizeof *state);
  int provided = MPI_THREAD_SINGLE;
  *result = NULL;
  if (!state || !(state->told = ob_allocate((size_t)size, sizeof *state->told))) {
    ob_release(state);
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a communicator");
  }
  MPI_Query_thread(&provided);
  state->comm = mpi;
  state->multiple = provided == MPI_THREAD_MULTIPLE;
  pthread_mutex_init(&state->lock, NULL);
  for (int rank = 0; rank < size; rank++)
    state->told[rank] = MPI_REQUEST_NULL;
  *result = state;
  return ONEBIT_OK;
}

/* Destroys the state. The MPI communicator of a failed communicator is not freed: messages may
 * still be in flight, and MPI_Comm_free would wait for other ranks. */
void ob_mpi_state_destroy(onebit_comm_t comm) {
  struct ob_mpi_state *state = comm->state;
  bool finalized = ob_mpi_is_finalized(), ended = atomic_load(&comm->end.set);
  if (!finalized && !ended)
    MPI_Comm_free(&state->comm);
  bool over = finalized || !ended || ob_mpi_end_is_sent(state, comm->size);
  pthread_mutex_destroy(&state->lock);
  if (over) {
    ob_release(state->told);
    ob_release(state);
  } else {
    ob_memory_keep(state);
  }
}

/* --- Creation ----------------------------------------------------------------------------------*/

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

/* The memory of a creation. MPI may still write to it after a wait has timed out; it is then never
 * freed. */
struct creation {
  MPI_Comm mpi, host;
  int first;
  /* The numbers that the ranks agree on: the status, the machine's number, and the negative of that
   * number. */
  int own[3], minimum[3];
  int *host_of;
  struct ob_costs costs;
};

/* Finds the host of every rank; a host's number is its lowest rank. MPI_Comm_split_type has no
 * nonblocking form. */
static onebit_status_t mpi_find_hosts(struct creation *creation, int rank) {
  MPI_Request request;
  creation->first = rank;
  MPI_TRY(MPI_Comm_split_type,
          (creation->mpi, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &creation->host));
  MPI_TRY(MPI_Ibcast, (&creation->first, 1, MPI_INT, 0, creation->host, &request));
  OB_TRY(mpi_wait(&request, "creation of a communicator: broadcast of the host's first rank"));
  MPI_Comm_free(&creation->host);
  /* PMPI is called, since libonebit-mpi.so may replace MPI's collectives. */
  MPI_CHECK("MPI_Iallgather", PMPI_Iallgather(&creation->first, 1, MPI_INT, creation->host_of, 1,
                                              MPI_INT, creation->mpi, &request));
  return mpi_wait(&request, "creation of a communicator: exchange of the ranks' hosts");
}

/* Creates this rank's communicator. If this fails on any rank, the caller frees the duplicate of
 * the MPI communicator. */
static onebit_status_t mpi_create_local(MPI_Comm mpi, const int *host_of, onebit_comm_t *comm) {
  int rank, size, found = 0, *largest = NULL;
  MPI_TRY(MPI_Comm_rank, (mpi, &rank));
  MPI_TRY(MPI_Comm_size, (mpi, &size));
  struct ob_mpi_state *state;
  OB_TRY(mpi_state_create(mpi, size, &state));
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
  state->end_tag = known ? *largest : 32767; /* the smallest limit that MPI allows */
  (*comm)->largest_tag = state->end_tag - 1;
  return ONEBIT_OK;
}

/* Agrees on the worst status of all ranks, and on the smallest and the largest number of a machine.
 * The two numbers are equal if all ranks are on one machine. */
static onebit_status_t mpi_agree_on_status(struct creation *creation, onebit_status_t mine) {
  MPI_Request request;
  creation->own[0] = mine;
  MPI_CHECK("MPI_Iallreduce", PMPI_Iallreduce(creation->own, creation->minimum, 3, MPI_INT, MPI_MIN,
                                              creation->mpi, &request));
  OB_TRY(mpi_wait(&request, "creation of a communicator: agreement on the status"));
  onebit_status_t worst = (onebit_status_t)creation->minimum[0];
  if (mine == ONEBIT_OK && worst != ONEBIT_OK)
    return ob_error(worst, "another rank failed with %s: read its error message",
                    onebit_status_string(worst));
  return mine;
}

/* True if all ranks are on one machine but on several hosts, as with containers. */
static bool mpi_is_one_machine(const struct creation *creation, int size) {
  const int *minimum = creation->minimum, *host_of = creation->host_of;
  int rank = 1;
  while (rank < size && host_of[rank] == host_of[0])
    rank++;
  return minimum[1] > 0 && minimum[1] == -minimum[2] && rank < size;
}

/* Sets the costs of rank 0 on all ranks, so that all ranks choose the same schedules. */
static onebit_status_t mpi_find_costs(struct creation *creation, int rank, int size) {
  struct ob_costs *costs = &creation->costs;
  MPI_Request request;
  if (rank == 0)
    ob_tuning_find(costs);
  if (rank == 0 && mpi_is_one_machine(creation, size))
    ob_costs_of_one_machine(costs);
  MPI_TRY(MPI_Ibcast, (costs, (int)sizeof *costs, MPI_BYTE, 0, creation->mpi, &request));
  return mpi_wait(&request, "creation of a communicator: broadcast of rank 0's cost table");
}

/* Creates the communicator. Collective on every rank: a rank without memory for the list of hosts
 * still takes part. */
static onebit_status_t mpi_create(struct creation *creation, bool wanted, onebit_comm_t *comm) {
  int rank, size;
  onebit_status_t status = ONEBIT_OK;
  MPI_TRY(MPI_Comm_rank, (creation->mpi, &rank));
  MPI_TRY(MPI_Comm_size, (creation->mpi, &size));
  creation->own[1] = (int)(ob_machine_number() % INT_MAX);
  creation->own[2] = -creation->own[1];
  creation->host_of = ob_allocate((size_t)size, sizeof *creation->host_of);
  if (!creation->host_of)
    status = ob_error(ONEBIT_ERROR_MEMORY, "out of memory for the host names of %d ranks", size);
  OB_TRY(mpi_agree_on_status(creation, status));
  OB_TRY(mpi_find_hosts(creation, rank));
  OB_TRY(mpi_find_costs(creation, rank, size));
  status = wanted ? mpi_create_local(creation->mpi, creation->host_of, comm)
                  : ob_error(ONEBIT_ERROR_ARGUMENT, "comm is NULL");
  if (*comm)
    (*comm)->costs = creation->costs;
  OB_TRY(mpi_agree_on_status(creation, status));
  return ob_agree_names(*comm, NULL);
}

/* Cleans up after a failure. Memory that MPI may still use is not freed, nor is the MPI
 * communicator. */
static void mpi_clean_up(struct creation *creation, onebit_comm_t comm, onebit_status_t status) {
  bool stays = status == ONEBIT_ERROR_TRANSPORT;
  if (comm && stays)
    ob_comm_receive_end(comm, onebit_last_error());
  if (comm)
    onebit_comm_destroy(comm); /* also frees the duplicate */
  else if (!stays)
    MPI_Comm_free(&creation->mpi);
  if (stays)
    ob_memory_keep(creation->host_of);
  else
    ob_release(creation->host_of);
}

/* Duplicates the communicator by MPI_Comm_split, since MPI_Comm_dup would run the program's
 * attribute callbacks for a communicator that the program did not create. MPI_Comm_split does not
 * return while a rank is missing, so this function first waits for all ranks. */
static onebit_status_t duplicate_communicator(MPI_Comm mpi_comm, struct creation *creation) {
  MPI_Request request;
  int rank = 0;
  MPI_TRY(MPI_Comm_rank, (mpi_comm, &rank));
  MPI_TRY(MPI_Ibarrier, (mpi_comm, &request));
  OB_TRY(mpi_wait(&request, "creation of a communicator: duplication of the MPI communicator"));
  MPI_TRY(MPI_Comm_split, (mpi_comm, 0, rank, &creation->mpi));
  MPI_Comm_set_errhandler(creation->mpi, MPI_ERRORS_RETURN);
  return ONEBIT_OK;
}

onebit_status_t onebit_comm_create_mpi(MPI_Comm mpi_comm, onebit_comm_t *result) {
  OB_CALL_SCOPE;
  if (result)
    *result = NULL;
  OB_TRY(mpi_check_usable(mpi_comm));
  /* Memory comes from calloc, not from ob_allocate, which tests make fail: a rank that fails here
   * cannot tell the other ranks. */
  struct creation *creation = calloc(1, sizeof *creation);
  if (!creation)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a communicator");
  onebit_comm_t comm = NULL;
  onebit_status_t status = duplicate_communicator(mpi_comm, creation);
  bool duplicated = status == ONEBIT_OK;
  if (duplicated)
    status = mpi_create(creation, result != NULL, &comm);
  if (status != ONEBIT_OK && duplicated)
    mpi_clean_up(creation, comm, status);
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

onebit_status_t ob_mpi_shrink(onebit_comm_t comm, onebit_comm_t *survivors) {
  struct ob_mpi_state *state = comm->state;
  MPI_Comm smaller;
  if (!ob_mpi_has_ulfm())
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "this MPI has no user-level failure mitigation (Open MPI 5 has it with mpirun "
                    "--with-ft ulfm): end the job, and start it again from the last checkpoint");
  MPIX_Comm_revoke(state->comm);
  int code = MPIX_Comm_shrink(state->comm, &smaller);
  if (code != MPI_SUCCESS)
    return ob_mpi_error("MPIX_Comm_shrink", code);
  MPI_Comm_set_errhandler(smaller, MPI_ERRORS_RETURN);
  onebit_status_t status = onebit_comm_create_mpi(smaller, survivors);
  MPI_Comm_free(&smaller);
  return status;
}

#else
typedef int ob_no_mpi_here; /* ISO C requires a declaration in every file */
#endif
