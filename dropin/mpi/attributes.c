/*
 * Attaches the library's state to MPI communicators as an attribute: deleting the attribute frees
 * the state. A list holds all communicators that have the attribute. MPI_Finalize first deletes the
 * attributes of MPI_COMM_SELF, while MPI still works. The callback for one of these deletes the
 * attributes of all communicators in the list.
 */
#include "base/error.h"
#include "base/lock.h"
#include "base/memory.h"
#include "dropin/mpi/communicator.h"
#include "dropin/mpi/exchange.h"

/* The attribute of one communicator; its address is the attribute's value. */
struct holder {
  struct holder *next; /* the list of this process, oldest first: the same order on all ranks */
  MPI_Comm comm;
  struct ob_attached *attached; /* NULL: the ranks could not create the state */
  struct ob_outcome outcome;    /* how the creation of the state ended */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct holder *holders;
static int communicators_key = MPI_KEYVAL_INVALID, end_key = MPI_KEYVAL_INVALID;

static void remove_holder(const struct holder *holder) {
  OB_LOCKED(&lock);
  struct holder **at = &holders;
  while (*at && *at != holder)
    at = &(*at)->next;
  if (*at)
    *at = holder->next;
}

static void add_holder(struct holder *holder) {
  OB_LOCKED(&lock);
  struct holder **at = &holders;
  while (*at)
    at = &(*at)->next;
  *at = holder;
}

/* Deletes a holder. MPI calls this function as an MPI_Comm_delete_attr_function, in MPI_Comm_free,
 * which is collective, or in MPI_Finalize. */
static int delete_holder(MPI_Comm comm, int key, void *value, void *extra) {
  struct holder *holder = value;
  (void)key, (void)extra;
  remove_holder(holder);
  ob_attached_destroy(holder->attached);
  if (holder->comm != MPI_COMM_NULL)
    ob_requests_detach_comm(comm);
  ob_release(holder);
  return MPI_SUCCESS;
}

static struct holder *get_oldest_holder(void) {
  OB_LOCKED(&lock);
  return holders;
}

/* Deletes the attribute of all communicators. MPI calls this function when it deletes the attribute
 * of MPI_COMM_SELF. */
static int delete_all_holders(MPI_Comm self, int key, void *value, void *extra) {
  (void)self, (void)key, (void)value, (void)extra;
  for (struct holder *holder = get_oldest_holder(); holder; holder = get_oldest_holder())
    if (PMPI_Comm_delete_attr(holder->comm, communicators_key) != MPI_SUCCESS)
      remove_holder(holder);
  ob_mpi_handles_free();
  if (communicators_key != MPI_KEYVAL_INVALID)
    PMPI_Comm_free_keyval(&communicators_key);
  return MPI_SUCCESS;
}

void ob_attached_watch_finalize(void) {
  OB_LOCKED(&lock);
  if (end_key == MPI_KEYVAL_INVALID &&
      PMPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, delete_all_holders, &end_key, NULL) ==
          MPI_SUCCESS) {
    PMPI_Comm_set_attr(MPI_COMM_SELF, end_key, NULL);
    int key = end_key; /* MPI frees the key once no attribute uses it */
    PMPI_Comm_free_keyval(&key);
  }
}

static int get_communicators_key(void) {
  ob_attached_watch_finalize();
  OB_LOCKED(&lock);
  if (communicators_key == MPI_KEYVAL_INVALID)
    PMPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, delete_holder, &communicators_key, NULL);
  return communicators_key;
}

static struct holder *find_holder(MPI_Comm comm, int key) {
  void *value = NULL;
  int found = 0;
  if (key == MPI_KEYVAL_INVALID || PMPI_Comm_get_attr(comm, key, &value, &found) != MPI_SUCCESS ||
      !found)
    return NULL;
  return value;
}

struct ob_attached *ob_attached_find(MPI_Comm comm) {
  pthread_mutex_lock(&lock);
  int key = communicators_key;
  pthread_mutex_unlock(&lock);
  struct holder *holder = find_holder(comm, key);
  return holder ? holder->attached : NULL;
}

onebit_status_t ob_attached_read_failure(MPI_Comm comm) {
  pthread_mutex_lock(&lock);
  int key = communicators_key;
  pthread_mutex_unlock(&lock);
  const struct holder *holder = find_holder(comm, key);
  return holder ? ob_outcome_status(&holder->outcome) : ONEBIT_OK;
}

/* Returns true for an intra-communicator with several ranks. */
static bool has_several_ranks(MPI_Comm comm) {
  int inter = 1, size = 1;
  return PMPI_Comm_test_inter(comm, &inter) == MPI_SUCCESS && !inter &&
         PMPI_Comm_size(comm, &size) == MPI_SUCCESS && size > 1;
}

/* Returns true if all ranks have stored the attribute. If one rank can not store it, no rank keeps
 * it: that rank could not take part in later calls. The next call tries again, on all ranks. */
static bool store_on_all_ranks(MPI_Comm comm, int key, struct holder *holder) {
  bool mine = holder && PMPI_Comm_set_attr(comm, key, holder) == MPI_SUCCESS;
  int64_t missing = !mine;
  if (ob_allreduce_max(comm, &missing, 1) == MPI_SUCCESS && !missing)
    return true;
  if (mine) {
    holder->attached = NULL; /* the caller frees the state, and comm continues to exist */
    holder->comm = MPI_COMM_NULL;
    PMPI_Comm_delete_attr(comm, key);
  } else {
    ob_release(holder);
  }
  return false;
}

static struct ob_attached *attach_state(MPI_Comm comm, int key, unsigned repeats) {
  struct ob_attached *attached;
  onebit_status_t status = ob_attached_create(comm, repeats, &attached);
  if (status == ONEBIT_ERROR_TRANSPORT)
    return NULL; /* some rank has not arrived, so the ranks can not agree */
  struct holder *holder = ob_allocate(1, sizeof *holder);
  if (holder) {
    *holder = (struct holder){.comm = comm, .attached = attached};
    ob_outcome_add(&holder->outcome, status);
  }
  if (!store_on_all_ranks(comm, key, holder)) {
    ob_attached_destroy(attached);
    return NULL;
  }
  add_holder(holder);
  return attached;
}

struct ob_attached *ob_attached_get(MPI_Comm comm, unsigned repeats) {
  int key = get_communicators_key();
  struct holder *holder = find_holder(comm, key);
  if (holder)
    return holder->attached;
  return has_several_ranks(comm) ? attach_state(comm, key, repeats) : NULL;
}
