/*
 * A communicator: a transport, a rank, and the state that its plans share.
 */
#ifndef OB_COLLECTIVES_COMMUNICATOR_H
#define OB_COLLECTIVES_COMMUNICATOR_H

#include <stdatomic.h>
#include <stdint.h>

#include "collectives/cost/cost.h"
#include "collectives/hosts.h"
#include "collectives/steps.h"
#include "collectives/transports/transport.h"
#include "collectives/watch.h"
#include "onebit/communicator.h"

#define OB_HOST_NAME_BYTES 64
#define OB_END_BYTES       256

/* The largest size in bytes of a proposal, which has the terms of one agreement. */
#define OB_AGREE_BYTES 256

/* The reason why the communicator has ended: one error message for all ranks. */
struct ob_comm_end {
  pthread_mutex_t lock;
  atomic_bool set;
  char text[OB_END_BYTES];
};

struct onebit_comm {
  const struct ob_transport *transport;
  int rank, size;
  unsigned forks; /* ob_forks() of the process that made the communicator */
  struct ob_hosts hosts;
  struct ob_costs costs; /* the costs by which plans choose a schedule; the same on all ranks */
  void *state;           /* the state of the transport */
  int largest_tag;       /* tags are 0 .. largest_tag; agreements use tag 0 */
  /* The number of agreements so far, including failed ones. All ranks take part in each agreement,
   * so the number is the same on all. */
  uint32_t agreements;
  atomic_uint_fast64_t bytes_sent;
  atomic_uint users; /* the caller's handle, plans, optimizers; the last user frees the struct */
  uint64_t plans;    /* number of plans made so far, the same on all ranks */
  double timeout;    /* the longest wait in seconds; INFINITY: no limit */
  struct ob_presence presence;
  _Atomic double noticed;                 /* time of the latest notice of a wait (standard error) */
  char (*host_names)[OB_HOST_NAME_BYTES]; /* one for each rank; NULL: not known */
  struct ob_comm_end end;
  struct ob_engine *engine; /* requests that all advance while a rank waits for one of them */
  struct ob_engine own_engine;
  bool progress; /* ONEBIT_PROGRESS=thread: a thread advances the engine's requests */
  /* The batch and the messages of agreements. They are allocated with the communicator, so that an
   * agreement cannot run out of memory. */
  struct ob_batch *control;
  unsigned char *control_memory;
};

/* Creates a communicator over a transport. `host_of` tells which ranks share a host (hosts.h).
 * `engine` NULL: the communicator has its own. ONEBIT_ERROR_MEMORY: *comm is NULL, and the caller
 * still owns `state`. */
onebit_status_t ob_comm_create(const struct ob_transport *transport, int rank, int size,
                               const int *host_of, void *state, struct ob_engine *engine,
                               onebit_comm_t *comm);

/* Allocates memory for the names of the hosts (ob_agree_names). ONEBIT_ERROR_MEMORY. */
onebit_status_t ob_comm_make_names(onebit_comm_t comm);

/* Returns the tag of the object that the latest agreement was about. The tag is the same on all
 * ranks, and each agreement gives a new one. */
int ob_comm_tag(onebit_comm_t comm);

/* Begins a batch and counts its bytes. */
onebit_status_t ob_comm_begin(struct ob_batch *batch, int tag);

/* Begins a batch on a stream of a device (`put` in transport.h), and counts its bytes. */
onebit_status_t ob_comm_put(struct ob_batch *batch, void *stream);

/* Add a user of the communicator, and remove one. A plan or an optimizer is a user, so the
 * communicator exists as long as they do, even after the caller has destroyed the handle. */
onebit_comm_t ob_comm_add_user(onebit_comm_t comm);
void ob_comm_remove_user(onebit_comm_t comm);

/* Frees the memory that ob_comm_create allocated, but not the transport's state. */
void ob_comm_release(onebit_comm_t comm);

/* True if this process is a fork of the process that made the communicator, and the connections
 * belong to that process. */
bool ob_comm_is_foreign(onebit_comm_t comm);

/* ob_comm_check and ob_comm_health return ONEBIT_ERROR_TRANSPORT if the communicator has ended, or
 * if ob_comm_is_foreign is true. ob_comm_check is called before an operation begins. ob_comm_health
 * is called in waits, and also asks the transport. */
onebit_status_t ob_comm_check(onebit_comm_t comm);
onebit_status_t ob_comm_health(onebit_comm_t comm);

/* Ends the communicator on this rank and on the others. `text` is this rank's reason. */
void ob_comm_give_up(onebit_comm_t comm, const char *text);

/* Called by the transport when another rank has ended the communicator; `text` is that rank's
 * reason. */
void ob_comm_receive_end(onebit_comm_t comm, const char *text);

/* Returns the name of the rank's host, or "" if it is not known. */
static inline const char *ob_comm_host_name(onebit_comm_t comm, int rank) {
  return comm->host_names ? comm->host_names[rank] : "";
}

/* --- Agreement ---------------------------------------------------------------------------------*/

/*
 * Before the ranks create anything collectively, each sends all others its arguments and whether it
 * has failed. So all ranks fail together, with a message that names the difference, and no rank is
 * left waiting.
 */

/* A number that must be the same on all ranks. If the name begins with OB_TERM_DOUBLE, the value is
 * the bits of a double; messages show the name without this mark. */
#define OB_TERM_DOUBLE "\001"
struct ob_term {
  const char *name;
  uint64_t value;
};

enum { OB_TERMS = (OB_AGREE_BYTES - 40) / 8 };

/* Collective. `status` is this rank's status so far. Returns ONEBIT_OK if the status is ONEBIT_OK
 * on all ranks and all terms are equal; this rank's own error, with its message;
 * ONEBIT_ERROR_MEMORY if another rank has that error; ONEBIT_ERROR_PEER if another rank has any
 * other error; ONEBIT_ERROR_MISMATCH if terms differ; ONEBIT_ERROR_MESSAGE if a rank's message is
 * damaged, has another length, or belongs to another agreement. */
onebit_status_t ob_agree(onebit_comm_t comm, onebit_status_t status, const struct ob_term *terms,
                         size_t count);

/* Does the same as ob_agree, and also sends the other ranks a number, `note`, which may differ
 * between ranks. */
onebit_status_t ob_agree_noting(onebit_comm_t comm, onebit_status_t status,
                                const struct ob_term *terms, size_t count, uint64_t note);

/* Compares the proposals of all ranks in comm->control_memory, once they have arrived;
 * comm->control is the batch that received them. The proposals are not trusted. Local. */
onebit_status_t ob_agree_check(onebit_comm_t comm, const struct ob_term *terms, size_t count);

/* Returns the note that a rank sent in the latest agreement, if that agreement succeeded. */
uint64_t ob_agree_note(onebit_comm_t comm, int rank);

/* True if the latest agreement ended with ONEBIT_ERROR_MISMATCH because of this term alone. The
 * result is the same on all ranks. */
bool ob_agree_differed_only(onebit_comm_t comm, size_t term);

/* Exchanges the names of the ranks' hosts, for error messages. `name` is this host's; NULL: the
 * name from gethostname. Collective; called once. */
onebit_status_t ob_agree_names(onebit_comm_t comm, const char *name);

/* Logs, with ONEBIT_DEBUG=INFO, that a communicator was created; called once its hosts are
 * known. */
void ob_comm_log(onebit_comm_t comm);

/* Completes the creation of a communicator whose transport has no collectives of its own, once its
 * ranks can reach each other. Collective: the ranks agree on `terms`, find out which ranks share a
 * host, adopt rank 0's costs, and exchange the names of their hosts. `status` is this rank's status
 * so far; `host` NULL: the name from gethostname. comm->host_names must be allocated. */
onebit_status_t ob_comm_exchange_setup(onebit_comm_t comm, onebit_status_t status,
                                       const struct ob_term *terms, size_t count, const char *host);

#endif
