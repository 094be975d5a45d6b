/*
 * Ends a communicator over MPI: a rank that gives up tells the others in a small message with its
 * own tag, for which every rank looks while it waits. With user-level failure mitigation (ULFM) MPI
 * itself finds that a process has failed, and can continue without it. The library asks for it at
 * run time, since one build serves several versions of MPI.
 */
#ifdef ONEBIT_HAVE_MPI
#define _POSIX_C_SOURCE 200809L
#include <sched.h>
#include <stdio.h>
#include <time.h>

#include "base/bound_mpi.h"
#include "base/error.h"
#include "base/lock.h"
#include "base/memory.h"
#include "base/process.h"
#include "collectives/transports/mpi_state.h"
#include "collectives/watch.h"
#include "onebit/mpi.h"

/* Seconds that messages about the end have to leave. */
#define TELL_SECONDS 0.1

onebit_status_t ob_mpi_error(const char *call, int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS)
    text[0] = '\0';
  return ob_error(ONEBIT_ERROR_TRANSPORT, "%s: %.200s", call, text);
}

bool ob_mpi_is_finalized(void) {
  int finalized = 0;
  MPI_Finalized(&finalized);
  return finalized;
}

onebit_status_t ob_mpi_wait(MPI_Request *request, const char *call) {
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

/* --- User-level failure mitigation -------------------------------------------------------------*/

/* MPICH's functions of these names end the job ("internal error"). */
static bool has_ulfm(void) {
#ifdef OPEN_MPI
  return MPIX_Comm_revoke && MPIX_Comm_shrink && MPIX_Comm_failure_ack &&
         MPIX_Comm_failure_get_acked;
#else
  return false;
#endif
}

/* Returns the communicator's lowest rank in the group of failed ones. */
static int lowest_of(MPI_Comm comm, int size, MPI_Group failed) {
  MPI_Group all;
  int lowest = -1, count = 0;
  MPI_Group_size(failed, &count);
  if (count == 0 || MPI_Comm_group(comm, &all) != MPI_SUCCESS)
    return -1;
  for (int rank = 0; rank < size && lowest < 0; rank++) {
    int number = MPI_UNDEFINED;
    MPI_Group_translate_ranks(all, 1, &rank, failed, &number);
    lowest = number != MPI_UNDEFINED ? rank : -1;
  }
  MPI_Group_free(&all);
  return lowest;
}

int ob_mpi_failed_rank(onebit_comm_t comm) {
  struct ob_mpi_state *state = comm->state;
  MPI_Group failed;
  if (!has_ulfm() || MPIX_Comm_failure_ack(state->comm) != MPI_SUCCESS ||
      MPIX_Comm_failure_get_acked(state->comm, &failed) != MPI_SUCCESS)
    return -1;
  int rank = lowest_of(state->comm, comm->size, failed);
  MPI_Group_free(&failed);
  return rank;
}

/* --- State -------------------------------------------------------------------------------------*/

onebit_status_t ob_mpi_state_create(MPI_Comm mpi, int size, struct ob_mpi_state **result) {
  struct ob_mpi_state *state = ob_allocate(1, sizeof *state);
  int provided = MPI_THREAD_SINGLE;
  *result = NULL;
  if (!state || !(state->told = ob_allocate((size_t)size, sizeof *state->told))) {
    ob_release(state);
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a communicator");
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

/* True if all messages about the end have left. */
static bool has_told(const struct ob_mpi_state *state, int size) {
  for (double until = ob_seconds() + TELL_SECONDS; ob_seconds() < until; sched_yield()) {
    bool all = true;
    for (int rank = 0; rank < size; rank++) {
      int done = 1;
      if (state->told[rank] != MPI_REQUEST_NULL &&
          MPI_Test(&state->told[rank], &done, MPI_STATUS_IGNORE) == MPI_SUCCESS)
        all = all && done;
    }
    if (all)
      return true;
  }
  return false;
}

/* MPI keeps a failed communicator, which may have messages on their way, and other ranks that do
 * not free theirs. */
void ob_mpi_state_destroy(onebit_comm_t comm) {
  struct ob_mpi_state *state = comm->state;
  bool finalized = ob_mpi_is_finalized(), ended = atomic_load(&comm->end.set);
  if (!finalized && !ended)
    MPI_Comm_free(&state->comm);
  bool over = finalized || !ended || has_told(state, comm->size);
  pthread_mutex_destroy(&state->lock);
  if (over) {
    ob_release(state->told);
    ob_release(state);
  } else {
    ob_memory_keep(state);
  }
}

/* --- The end -----------------------------------------------------------------------------------*/

/* Tells all other ranks. With ULFM it also revokes the communicator, which ends waits inside MPI
 * and receives nothing afterwards. The lock is held. */
static void end_mpi_tell(onebit_comm_t comm) {
  static const struct timespec time_to_hear = {.tv_nsec = (long)(3e9 * OB_WAIT_SLICE)};
  struct ob_mpi_state *state = comm->state;
  if (!atomic_exchange(&state->to_tell, false))
    return;
  for (int rank = 0; rank < comm->size; rank++)
    if (rank != comm->rank && MPI_Isend(state->out, OB_END_BYTES, MPI_BYTE, rank, state->end_tag,
                                        state->comm, &state->told[rank]) != MPI_SUCCESS)
      state->told[rank] = MPI_REQUEST_NULL;
  if (has_ulfm()) {
    has_told(state, comm->size);
    nanosleep(&time_to_hear, NULL);
    MPIX_Comm_revoke(state->comm);
  }
}

/* A thread that may not call MPI now leaves this to the one that does. */
void ob_mpi_abort(onebit_comm_t comm, const char *text) {
  struct ob_mpi_state *state = comm->state;
  int main_thread = 0;
  if (ob_mpi_is_finalized())
    return;
  OB_LOCKED(&state->lock);
  snprintf(state->out, sizeof state->out, "%s", text);
  atomic_store(&state->to_tell, true);
  if (!state->multiple)
    MPI_Is_thread_main(&main_thread);
  if (state->multiple || (main_thread && !atomic_load(&state->inside)))
    end_mpi_tell(comm);
}

static void hear_of_failed(onebit_comm_t comm) {
  int rank = ob_mpi_failed_rank(comm);
  char text[OB_END_BYTES];
  if (rank < 0)
    return; /* waiting calls find their own error */
  snprintf(text, sizeof text, "the process of rank %d%s%s has failed", rank,
           *ob_comm_host_name(comm, rank) ? " on host " : "", ob_comm_host_name(comm, rank));
  ob_comm_hear_end(comm, text);
}

static void end_mpi_look(onebit_comm_t comm) {
  struct ob_mpi_state *state = comm->state;
  MPI_Status status;
  int found = 0;
  end_mpi_tell(comm);
  int code = MPI_Iprobe(MPI_ANY_SOURCE, state->end_tag, state->comm, &found, &status);
  if (code == MPI_SUCCESS && found)
    code = MPI_Recv(state->in, OB_END_BYTES, MPI_BYTE, status.MPI_SOURCE, state->end_tag,
                    state->comm, MPI_STATUS_IGNORE);
  state->in[OB_END_BYTES - 1] = '\0';
  if (code == MPI_SUCCESS && found)
    ob_comm_hear_end(comm, state->in);
  else if (code != MPI_SUCCESS)
    hear_of_failed(comm);
}

onebit_status_t ob_mpi_health(onebit_comm_t comm) {
  struct ob_mpi_state *state = comm->state;
  if (ob_mpi_is_finalized() || pthread_mutex_trylock(&state->lock) != 0)
    return ONEBIT_OK; /* another thread looks */
  end_mpi_look(comm);
  pthread_mutex_unlock(&state->lock);
  return ONEBIT_OK;
}

onebit_status_t ob_mpi_shrink(onebit_comm_t comm, onebit_comm_t *survivors) {
  struct ob_mpi_state *state = comm->state;
  MPI_Comm smaller;
  if (!has_ulfm())
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "this MPI has no user-level failure mitigation (Open MPI 5 has, with "
                    "mpirun --with-ft ulfm): end the job, and start it again from the last "
                    "checkpoint");
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
