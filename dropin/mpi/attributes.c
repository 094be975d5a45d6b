/*
 * Attaches the library's objects to MPI communicators: as an attribute, whose deletion frees it. A
 * communicator that is still there when MPI ends is found in a list, by a deletion too: that of an
 * attribute of MPI_COMM_SELF, which MPI_Finalize deletes first, while everything still works.
 */
#include "base/error.h"
#include "base/lock.h"
#include "base/memory.h"
#include "dropin/mpi/communicator.h"
#include "dropin/mpi/exchange.h"

/* The attribute of one communicator; its address is the attribute's value. */
struct holder {
  struct holder *next; /* of this process, the oldest first: on all ranks in an order that agrees */
  MPI_Comm comm;
  struct ob_attached *attached; /* NULL: the ranks could not make one, and how they failed: */
  struct ob_outcome outcome;    /* of making it */
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

/* Deletes one, as an MPI_Comm_delete_attr_function: in MPI_Comm_free, which is collective, or at
 * the end. */
static int delete_holder(MPI_Comm comm, int key, void *value, void *extra) {
  struct holder *holder = value;
  (void)key, (void)extra;
  remove_holder(holder);
  ob_attached_destroy(holder->attached);
  if (holder->comm != MPI_COMM_NULL)
    ob_requests_orphan(comm);
  ob_release(holder);
  return MPI_SUCCESS;
}

static struct holder *oldest_attribute(void) {
  OB_LOCKED(&lock);
  return holders;
}

/* Deletes the attribute of all communicators when that of MPI_COMM_SELF is deleted. */
static int delete_all(MPI_Comm self, int key, void *value, void *extra) {
  (void)self, (void)key, (void)value, (void)extra;
  for (struct holder *holder = oldest_attribute(); holder; holder = oldest_attribute())
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
      PMPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, delete_all, &end_key, NULL) == MPI_SUCCESS) {
    PMPI_Comm_set_attr(MPI_COMM_SELF, end_key, NULL);
    int key = end_key; /* MPI frees it once the attribute is gone */
    PMPI_Comm_free_keyval(&key);
  }
}

static int key_of_communicators(void) {
  ob_attached_watch_finalize();
  OB_LOCKED(&lock);
  if (communicators_key == MPI_KEYVAL_INVALID)
    PMPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, delete_holder, &communicators_key, NULL);
  return communicators_key;
}

static struct holder *holder_of(MPI_Comm comm, int key) {
  void *value = NULL;
  int found = 0;
  if (key == MPI_KEYVAL_INVALID || PMPI_Comm_get_attr(comm, key, &value, &found) != MPI_SUCCESS ||
      !found)
    return NULL;
  return value;
}

struct ob_attached *ob_attached_known(MPI_Comm comm) {
  pthread_mutex_lock(&lock);
  int key = communicators_key;
  pthread_mutex_unlock(&lock);
  struct holder *holder = holder_of(comm, key);
  return holder ? holder->attached : NULL;
}

onebit_status_t ob_attached_read_failure(MPI_Comm comm) {
  pthread_mutex_lock(&lock);
  int key = communicators_key;
  pthread_mutex_unlock(&lock);
  const struct holder *holder = holder_of(comm, key);
  return holder ? ob_outcome_tell(&holder->outcome) : ONEBIT_OK;
}

/* True if the communicator has several ranks of one group. */
static bool is_group(MPI_Comm comm) {
  int inter = 1, size = 1;
  return PMPI_Comm_test_inter(comm, &inter) == MPI_SUCCESS && !inter &&
         PMPI_Comm_size(comm, &size) == MPI_SUCCESS && size > 1;
}

/* Agrees with the other ranks that all keep the attribute. A rank that cannot keep it could not
 * take part later either, so it reports that now; the next call tries again, on all ranks. */
static bool agree_to_keep(MPI_Comm comm, int key, struct holder *holder) {
  bool mine = holder && PMPI_Comm_set_attr(comm, key, holder) == MPI_SUCCESS;
  int64_t missing = !mine;
  if (ob_largest(comm, &missing, 1) == MPI_SUCCESS && !missing)
    return true;
  if (mine) {
    holder->attached = NULL; /* the caller keeps both */
    holder->comm = MPI_COMM_NULL;
    PMPI_Comm_delete_attr(comm, key);
  } else {
    ob_release(holder);
  }
  return false;
}

static struct ob_attached *attributes_attach(MPI_Comm comm, int key, unsigned repeats) {
  struct ob_attached *attached;
  onebit_status_t status = ob_attached_create(comm, repeats, &attached);
  if (status == ONEBIT_ERROR_TRANSPORT)
    return NULL; /* some rank has not arrived: no agreement is possible */
  struct holder *holder = ob_allocate(1, sizeof *holder);
  if (holder) {
    *holder = (struct holder){.comm = comm, .attached = attached};
    ob_outcome_add(&holder->outcome, status);
  }
  if (!agree_to_keep(comm, key, holder)) {
    ob_attached_destroy(attached);
    return NULL;
  }
  add_holder(holder);
  return attached;
}

struct ob_attached *ob_attached_of(MPI_Comm comm, unsigned repeats) {
  int key = key_of_communicators();
  struct holder *holder = holder_of(comm, key);
  if (holder)
    return holder->attached;
  return is_group(comm) ? attributes_attach(comm, key, repeats) : NULL;
}
