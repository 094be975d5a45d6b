/*
 * The messages of ranks that are not connected yet.
 *
 *   rank r -> rank 0   greeting (JOIN): its number, its address, the source of its job's name
 *   rank 0 -> rank r   challenge; rank r -> rank 0: proof that it has the job's name
 *   rank 0 -> rank r   when all have joined: the key of the communicator, the addresses of all
 *   rank r -> rank q   for q < r: greeting (STREAM) with the key, on each connection; and back
 *   rank r -> rank 0   report: connected with all, or the error
 *   rank 0 -> rank r   verdict: all are connected, or the error
 *
 * So an error of one rank is an error of all ranks, at once and with that rank's message.
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
  char named[32];   /* the source of its name: a variable, the secret; "": it has no name */
  uint64_t hash[2]; /* of the name */
  bool exact;       /* no other job has this name */
};

/* Finds the job's name: the secret, else ONEBIT_JOB, else the launcher's number, else none. */
void ob_job_find(const char *secret, struct ob_job *job);

/* Makes the proof for a nonce; only a rank that has the job's name can. */
void ob_job_make_proof(const struct ob_job *job, const uint64_t nonce[2], uint64_t proof[2]);

/* --- Messages ----------------------------------------------------------------------------------*/

enum ob_greeting_kind { OB_JOIN = 1, OB_STREAM = 2 };

struct ob_greeting {
  uint32_t magic, version;
  int32_t kind, rank, size, stream;
  uint64_t key[2]; /* the communicator's key; in JOIN that of this process's newest one, or zeros */
  char address[OB_ADDRESS_BYTES];
  char named[32]; /* as in ob_job */
};

/* Rank 0's answer, or a member's report. Status ONEBIT_IN_PROGRESS: it is a challenge with the
 * nonce in `key`. ONEBIT_OK: the addresses of all follow, or nothing to a member that has reported.
 * Otherwise `text` is the error message. */
struct ob_answer {
  uint32_t magic, version;
  int32_t status;
  int32_t streams; /* with an error: OB_ANSWER_FOR_NOW if the port may be free later */
  uint64_t key[2];
  char text[256];
};
#define OB_ANSWER_FOR_NOW 1

/* --- State -------------------------------------------------------------------------------------*/

/* The most connections whose rank is unknown yet; a new one replaces the oldest. */
#define OB_VISITORS 128

struct ob_visitor {
  int file; /* -1: none */
  size_t done;
  struct ob_greeting greeting;
  bool challenged;
  uint64_t nonce[2], proof[2];
  size_t proof_done;
};

/* Rank 0's state of a rank that has joined. */
struct ob_member {
  int file; /* -1: it has not joined yet */
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
  int root;                  /* the connection of the other ranks with rank 0; -1: none */
  bool joined;               /* rank 0 has this rank's address */
  struct ob_answer verdict;
  size_t verdict_done;
  bool told;               /* the error message came from another rank */
  onebit_status_t refused; /* the error of a visitor that makes the communicator fail */
  double complete;         /* on rank 0: the time at which all had joined */
  int absence;             /* the errno of the latest attempt to reach rank 0 */
  double refused_since;    /* the time since which a rank 0 of another job answers; 0: none does */
  double refused_last;     /* time of its latest refusal, which is in `verdict` */
  struct ob_sockets *sockets;
  struct ob_visitor visitors[OB_VISITORS];
  unsigned next_visitor;
};

/* --- Steps -------------------------------------------------------------------------------------*/

/* Pauses for a millisecond. Fails after the timeout: "WHAT: waited 10 s for WHOM". */
onebit_status_t ob_rendezvous_pause(struct ob_rendezvous *state, const char *what,
                                    const char *whom);

/* Reports a failed call as ob_net_failed does, with the number of files that the connections
 * need. */
onebit_status_t ob_rendezvous_failed(const struct ob_rendezvous *state, const char *call);

/* Reports another rank's error, with its message. */
onebit_status_t ob_rendezvous_repeat_error(struct ob_rendezvous *state, struct ob_answer *answer);

/* Send and receive all bytes. ONEBIT_IN_PROGRESS: the connection ended before that. */
onebit_status_t ob_rendezvous_send(struct ob_rendezvous *state, int file, const void *data,
                                   size_t bytes);
onebit_status_t ob_rendezvous_receive(struct ob_rendezvous *state, int file, void *data,
                                      size_t bytes);

/* Returns true if all bytes were sent at once, as a few are on a new connection. */
bool ob_send_all(int file, const void *data, size_t bytes);

/* sockets_gather.c: serves connections from other ranks. Calls `accept_one` with each visitor that
 * has sent its greeting, and again when more bytes have arrived. `accept_one` keeps the file, or
 * returns true to wait for more bytes; otherwise the connection is closed. */
typedef bool ob_visitor_accept(struct ob_rendezvous *state, struct ob_visitor *visitor);
onebit_status_t ob_visitors_serve(struct ob_rendezvous *state, ob_visitor_accept *accept_one);
/* Sets state->refused to an error of the system. */
bool ob_visitor_read_greeting(struct ob_rendezvous *state, struct ob_visitor *visitor);
void ob_visitor_close(struct ob_visitor *visitor);

/* sockets_gather.c, on rank 0. Returns when all ranks have joined and received the list. */
onebit_status_t ob_join_gather(struct ob_rendezvous *state);
/* Serves a rank that joins. If all have joined already and the job has no exact name, joining fails
 * on all ranks. */
bool ob_join_accept(struct ob_rendezvous *state, struct ob_visitor *visitor);
/* True if rank 0 has looked for a second job long enough. */
bool ob_join_is_quiet(const struct ob_rendezvous *state);
/* Reads the members' reports. `joining`: a member whose connection ends may still come back. */
onebit_status_t ob_members_read(struct ob_rendezvous *state, bool joining);
/* Returns the first member that has not reported that it is connected with all; -1: none. */
int ob_members_find_unconnected(const struct ob_rendezvous *state);
/* Sends the verdict to all members. If it is an error, ranks that join up to ob_join_last seconds
 * later get it, too. */
void ob_members_send_verdict(struct ob_rendezvous *state, const struct ob_answer *verdict);

/* sockets_join.c, on the other ranks. Joins; returns when this rank has the list of all. */
onebit_status_t ob_join(struct ob_rendezvous *state);
/* Reads the verdict. ONEBIT_IN_PROGRESS: there is none yet. */
onebit_status_t ob_verdict_read(struct ob_rendezvous *state);
/* Reports this rank's error to rank 0. */
void ob_join_report(struct ob_rendezvous *state, const struct ob_answer *report);
/* Called when rank 0's port is in use: joins at the port, and reports an error if another rank 0
 * has it. */
void ob_join_as_second_root(struct ob_rendezvous *state);

/* Seconds after all have joined in which rank 0 of a job without an exact name looks for a second
 * job at its port. Tests set it. */
extern double ob_join_quiet;
/* Seconds for which a failed rank still answers ranks that connect. */
extern double ob_join_last;

#endif
