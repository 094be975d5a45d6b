/*
 * The messages that ranks exchange before they are connected.
 *
 *   rank r -> rank 0   greeting (JOIN): its number, its address, the source of its job's name
 *   rank 0 -> rank r   challenge; rank r -> rank 0: proof that it has the job's name
 *   rank 0 -> rank r   when all have joined: the communicator's key, the addresses of all ranks
 *   rank r -> rank q   for q < r: greeting (STREAM) with the key, on each connection; the answer
 *   rank r -> rank 0   report: rank r is connected with all ranks, or its error
 *   rank 0 -> rank r   verdict: all ranks are connected, or the error
 *
 * So if one rank has an error, all ranks return an error at once, with that rank's message.
 */
#ifndef OB_COLLECTIVES_SOCKETS_RENDEZVOUS_H
#define OB_COLLECTIVES_SOCKETS_RENDEZVOUS_H

#include "collectives/transports/sockets_calls.h"
#include "collectives/transports/sockets_state.h"
#include "collectives/watch.h"

#define OB_GREETING_MAGIC   0x4742314fu /* the bytes "O1BG" */
#define OB_GREETING_VERSION 2

/* --- A job: sockets_join.c ---------------------------------------------------------------------*/

struct ob_job {
  char named[32];   /* the name's source: a variable, the secret; "": no name */
  uint64_t hash[2]; /* of the name */
  bool exact;       /* no other job has this name */
};

/* Finds the job's name: the secret, else ONEBIT_JOB, else the launcher's job number, else none. */
void ob_job_find(const char *secret, struct ob_job *job);

/* Computes the proof for a nonce, which requires the job's name. */
void ob_job_make_proof(const struct ob_job *job, const uint64_t nonce[2], uint64_t proof[2]);

/* --- Messages ----------------------------------------------------------------------------------*/

enum ob_greeting_kind { OB_JOIN = 1, OB_STREAM = 2 };

struct ob_greeting {
  uint32_t magic, version;
  int32_t kind, rank, size, stream;
  uint64_t key[2]; /* of the communicator; in JOIN of the newest communicator here, or zeros */
  char address[OB_ADDRESS_BYTES];
  char named[32]; /* as in ob_job */
};

/* Rank 0's answer, or a member's report. With status ONEBIT_IN_PROGRESS the answer is a challenge,
 * with the nonce in `key`. With ONEBIT_OK the addresses of all ranks follow; after a report nothing
 * follows. With an error `text` is the error message. */
struct ob_answer {
  uint32_t magic, version;
  int32_t status;
  int32_t streams; /* with an error: OB_ANSWER_FOR_NOW if the port may be free later */
  uint64_t key[2];
  char text[256];
};
#define OB_ANSWER_FOR_NOW 1

/* --- State -------------------------------------------------------------------------------------*/

/* The largest number of connections whose rank is not known yet; a new connection replaces the
 * oldest. */
#define OB_VISITORS 128

struct ob_visitor {
  int file; /* -1: none */
  size_t done;
  struct ob_greeting greeting;
  bool challenged;
  uint64_t nonce[2], proof[2];
  size_t proof_done;
};

/* The state on rank 0 of a rank that has joined. */
struct ob_member {
  int file; /* -1: the rank has not joined yet */
  struct ob_answer report;
  size_t done;
  bool connected;
};

struct ob_rendezvous {
  const onebit_sockets_options_t *options;
  int rank, size, streams, listener;
  double timeout;
  struct ob_watch watch;
  struct ob_presence presence;
  struct ob_address at;  /* rank 0's listening address, as this rank reaches it */
  struct ob_address own; /* this rank's address in its connection with rank 0 */
  struct ob_job job;
  uint64_t key[2];
  char (*addresses)[OB_ADDRESS_BYTES];
  struct ob_member *members; /* on rank 0: one for each rank */
  int root;                  /* on the other ranks: the connection with rank 0; -1: none */
  bool joined;               /* rank 0 has this rank's address */
  struct ob_answer verdict;
  size_t verdict_done;
  bool told;               /* the error message came from another rank */
  onebit_status_t refused; /* a visitor's error that makes the communicator fail */
  double complete;         /* on rank 0: the time at which the last rank joined */
  int absence;             /* the errno of the latest attempt to reach rank 0 */
  double refused_since;    /* time of the first refusal by another job's rank 0; 0: none */
  double refused_last;     /* time of its latest refusal, which is in `verdict` */
  struct ob_sockets *sockets;
  struct ob_visitor visitors[OB_VISITORS];
  unsigned next_visitor;
};

/* --- Steps -------------------------------------------------------------------------------------*/

/* Pauses for a millisecond. Fails after the timeout, with the message "WHAT: waited 10 s for
 * WHOM". */
onebit_status_t ob_rendezvous_pause(struct ob_rendezvous *state, const char *what,
                                    const char *whom);

/* Reports a failed call as ob_net_failed does; the message also has the number of files that the
 * connections need. */
onebit_status_t ob_rendezvous_failed(const struct ob_rendezvous *state, const char *call);

/* Reports an error that another rank has sent, with that rank's message. */
onebit_status_t ob_rendezvous_repeat_error(struct ob_rendezvous *state, struct ob_answer *answer);

/* Send and receive exactly `bytes` bytes. ONEBIT_IN_PROGRESS: the connection ended earlier. */
onebit_status_t ob_rendezvous_send(struct ob_rendezvous *state, int file, const void *data,
                                   size_t bytes);
onebit_status_t ob_rendezvous_receive(struct ob_rendezvous *state, int file, void *data,
                                      size_t bytes);

/* Sends a few bytes. Returns true if all were sent at once, which a new connection allows. */
bool ob_send_all(int file, const void *data, size_t bytes);

/* sockets_gather.c: serves connections from other ranks. Calls `accept_one` for each visitor whose
 * greeting is complete, and again when more bytes have arrived. `accept_one` takes over the
 * visitor's file, or returns true to wait for more bytes; otherwise the connection is closed. */
typedef bool ob_visitor_accept(struct ob_rendezvous *state, struct ob_visitor *visitor);
onebit_status_t ob_visitors_serve(struct ob_rendezvous *state, ob_visitor_accept *accept_one);
/* Reads a visitor's greeting. Sets state->refused if the system reports an error. */
bool ob_visitor_read_greeting(struct ob_rendezvous *state, struct ob_visitor *visitor);
void ob_visitor_close(struct ob_visitor *visitor);

/* sockets_gather.c, on rank 0: returns when all ranks have joined and received the list of
 * addresses. */
onebit_status_t ob_join_gather(struct ob_rendezvous *state);
/* Serves a rank that joins. If all ranks have joined already and the job has no exact name, joining
 * fails on all ranks. */
bool ob_join_accept(struct ob_rendezvous *state, struct ob_visitor *visitor);
/* True if rank 0 has waited long enough for ranks of a second job. */
bool ob_join_is_quiet(const struct ob_rendezvous *state);
/* Reads the members' reports. `joining`: a member whose connection ends may still come back. */
onebit_status_t ob_members_read(struct ob_rendezvous *state, bool joining);
/* Returns the lowest rank that has not reported that it is connected with all ranks; -1: none. */
int ob_members_find_unconnected(const struct ob_rendezvous *state);
/* Sends the verdict to all members. If the verdict is an error, ranks that join up to ob_join_last
 * seconds later get it, too. */
void ob_members_send_verdict(struct ob_rendezvous *state, const struct ob_answer *verdict);

/* sockets_join.c, on the other ranks: joins rank 0; returns when this rank has the list of all
 * addresses. */
onebit_status_t ob_join(struct ob_rendezvous *state);
/* Reads the verdict. ONEBIT_IN_PROGRESS: it has not arrived yet. */
onebit_status_t ob_verdict_read(struct ob_rendezvous *state);
/* Reports this rank's error to rank 0. */
void ob_join_report(struct ob_rendezvous *state, const struct ob_answer *report);
/* Called on rank 0 when its port is in use: joins at the port. If another rank 0 listens there,
 * that rank then fails, too. */
void ob_join_as_second_root(struct ob_rendezvous *state);

/* The time in seconds after the last rank has joined in which rank 0 of a job without an exact name
 * waits for ranks of a second job at its port. Tests set it. */
extern double ob_join_quiet;
/* The time in seconds for which a failed rank still answers ranks that connect. */
extern double ob_join_last;

#endif
