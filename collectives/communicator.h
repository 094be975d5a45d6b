/*
 * A communicator: a transport, a rank, and what plans on it share.
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

/* The bytes of the terms of one agreement, at most. */
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
  struct ob_costs costs; /* plans choose a schedule by them; the same on all ranks */
  void *state;           /* the transport's */
  int largest_tag;       /* tags are 0 .. largest_tag; 0 is for agreements */
  /* The number of agreements so far, failed ones too: all ranks take part in each, so the number is
   * the same on all. */
  uint32_t agreements;
  atomic_uint_fast64_t bytes_sent;
  atomic_uint users; /* the caller's handle, plans and optimizers: the last one frees the struct */
  uint64_t plans;    /* plans made so far: the number of the latest one, the same on all ranks */
  double timeout;    /* seconds of a wait; INFINITY: no limit */
  struct ob_presence presence;
  _Atomic double noticed;                 /* when standard error last had a notice of a wait */
  char (*host_names)[OB_HOST_NAME_BYTES]; /* one a rank; NULL: not known */
  struct ob_comm_end end;
  struct ob_engine *engine; /* the requests that all advance while a rank waits for one of them */
  struct ob_engine own_engine;
  bool progress; /* a thread advances the engine's requests, as this communicator asked */
  /* The batch and the messages of agreements, allocated with the communicator so that an agreement
   * cannot run out of memory. */
  struct ob_batch *control;
  unsigned char *control_memory;
};

/* Makes a communicator of that transport. `host_of` says who shares a host (hosts.h); `engine`
 * NULL: its own. ONEBIT_ERROR_MEMORY; *comm is then NULL, and `state` still the caller's. */
onebit_status_t ob_comm_create(const struct ob_transport *transport, int rank, int size,
                               const int *host_of, void *state, struct ob_engine *engine,
                               onebit_comm_t *comm);

/* Memory for the names of the hosts (ob_agree_names). ONEBIT_ERROR_MEMORY. */
onebit_status_t ob_comm_make_names(onebit_comm_t comm);

/* Returns a tag for the subject of the latest agreement: the same on all ranks, and a new one after
 * each agreement. */
int ob_comm_tag(onebit_comm_t comm);

/* Begins a batch and counts its bytes. */
onebit_status_t ob_comm_begin(struct ob_batch *batch, int tag);

/* The same on a stream of a device (transport.h, put). */
onebit_status_t ob_comm_put(struct ob_batch *batch, void *stream);

/* Count a user of the communicator, and one less. A plan or an optimizer is a user, so the
 * communicator lives on after the caller has destroyed the handle. */
onebit_comm_t ob_comm_add_user(onebit_comm_t comm);
void ob_comm_remove_user(onebit_comm_t comm);

/* Frees the memory that ob_comm_create allocated, but not the transport's state. */
void ob_comm_release(onebit_comm_t comm);

/* True if this process was forked from the one whose network connections it has. */
bool ob_comm_is_foreign(onebit_comm_t comm);

/* Return ONEBIT_ERROR_TRANSPORT once the communicator has ended, and in a forked child of the
 * process that made it, if its connections over a network belong to that process. `check` is called
 * before an operation begins, `health` in waits: it also asks the transport. */
onebit_status_t ob_comm_check(onebit_comm_t comm);
onebit_status_t ob_comm_health(onebit_comm_t comm);

/* Ends the communicator on this rank, and on the others; `text` says why this rank gives up. */
void ob_comm_give_up(onebit_comm_t comm, const char *text);

/* Called when the transport has received the text with which another rank ends the communicator. */
void ob_comm_receive_end(onebit_comm_t comm, const char *text);

/* Returns the name of the rank's host, or "" if it is not known. */
static inline const char *ob_comm_host_name(onebit_comm_t comm, int rank) {
  return comm->host_names ? comm->host_names[rank] : "";
}

/* --- Agreement ---------------------------------------------------------------------------------*/

/*
 * Before anything collective is made, all ranks tell each other what they want and
 * whether they can, so that they fail together, with a message that names the difference, and none
 * is left waiting.
 */

/* A number that must be the same on all ranks. */
struct ob_term {
  const char *name;
  uint64_t value;
};

enum { OB_TERMS = (OB_AGREE_BYTES - 40) / 8 };

/* Collective. `status` is this rank's status so far. Returns ONEBIT_OK if all ranks have that
 * status and all terms are equal; this rank's own error, with its message; ONEBIT_ERROR_MEMORY if
 * another rank has that error, ONEBIT_ERROR_PEER if it has any other; ONEBIT_ERROR_MISMATCH if
 * terms differ; ONEBIT_ERROR_MESSAGE if a rank's message is damaged, has another length, or belongs
 * to another agreement. */
onebit_status_t ob_agree(onebit_comm_t comm, onebit_status_t status, const struct ob_term *terms,
                         size_t count);

/* Does the same, and sends the other ranks a number, `note`, which may differ between ranks. */
onebit_status_t ob_agree_noting(onebit_comm_t comm, onebit_status_t status,
                                const struct ob_term *terms, size_t count, uint64_t note);

/* Compares the proposals of all ranks in comm->control_memory, received as comm->control says:
 * the part of an agreement that follows when they have arrived. The proposals are not trusted.
 * Local. */
onebit_status_t ob_agree_check(onebit_comm_t comm, const struct ob_term *terms, size_t count);

/* Returns the note that a rank sent in the latest agreement, if that ended well. */
uint64_t ob_agree_note(onebit_comm_t comm, int rank);

/* True after an agreement that ended with ONEBIT_ERROR_MISMATCH if this term alone differed. All
 * ranks find the same. */
bool ob_agree_differed_only(onebit_comm_t comm, size_t term);

/* Exchanges the names of the ranks' hosts, for error messages. Collective, once. NULL: the name
 * from gethostname. */
onebit_status_t ob_agree_names(onebit_comm_t comm, const char *name);

/* Logs with ONEBIT_DEBUG=INFO that a communicator is made, once its hosts are known. */
void ob_comm_log(onebit_comm_t comm);

/* Completes a communicator of a transport without collectives of its own, once its ranks can reach
 * each other. Collective, in creation: the ranks agree on `terms`, find out which share a host,
 * take rank 0's costs, and exchange the names of their hosts. `status` is this rank's so far;
 * `host` NULL: gethostname's. comm->host_names has memory already. */
onebit_status_t ob_comm_exchange_setup(onebit_comm_t comm, onebit_status_t status,
                                       const struct ob_term *terms, size_t count, const char *host);

#endif
