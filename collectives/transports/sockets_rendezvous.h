/*
 * Ranks that are not connected yet, and what they tell each other until they are.
 *
 *   rank r -> rank 0   greeting (JOIN): its number, where it listens, by what its job is named
 *   rank 0 -> rank r   challenge; rank r -> rank 0: proof that it has the job's name
 *   rank 0 -> rank r   when all have joined: the key of the communicator, where all listen
 *   rank r -> rank q   for q < r: greeting (STREAM) with the key, on each connection; and back
 *   rank r -> rank 0   report: connected with all, or why not
 *   rank 0 -> rank r   verdict: all are, or why not
 *
 * So whatever one rank lacks is an error on all of them, at once and in its words.
 */
#ifndef OB_COLLECTIVES_SOCKETS_RENDEZVOUS_H
#define OB_COLLECTIVES_SOCKETS_RENDEZVOUS_H

#include "collectives/transports/sockets_calls.h"
#include "collectives/transports/sockets_state.h"
#include "collectives/watch.h"

#define OB_GREETING_MAGIC   0x4742314fu /* the bytes "O1BG" */
#define OB_GREETING_VERSION 2

/* --- A job: sockets_job.c ----------------------------------------------------------------------*/

struct ob_job {
  char named[32];   /* what its name is from: a variable, the secret; "": it has none */
  uint64_t hash[2]; /* of the name */
  bool exact;       /* no other job has this name */
};

/* Finds the job's name: the secret, else ONEBIT_JOB, else the launcher's number, else none. */
void ob_job_find(const char *secret, struct ob_job *job);

/* Makes the proof for a nonce, which takes the job's name. */
void ob_job_prove(const struct ob_job *job, const uint64_t nonce[2], uint64_t proof[2]);

/* --- Messages ----------------------------------------------------------------------------------*/

enum ob_greeting_kind { OB_JOIN = 1, OB_STREAM = 2 };

struct ob_greeting {
  uint32_t magic, version;
  int32_t kind, rank, size, stream;
  uint64_t key[2]; /* the communicator's; JOIN: that of the newest one that it has, or none */
  char address[OB_ADDRESS_BYTES];
  char named[32]; /* ob_job's */
};

/* Rank 0's answer, and a member's report. ONEBIT_IN_PROGRESS: a challenge, the key is the nonce.
 * ONEBIT_OK: the addresses of all follow; to a member that has reported nothing. Else the text
 * says why. */
struct ob_answer {
  uint32_t magic, version;
  int32_t status;
  int32_t streams; /* with an error: OB_ANSWER_FOR_NOW where the port may be free later */
  uint64_t key[2];
  char text[256];
};
#define OB_ANSWER_FOR_NOW 1

/* --- State -------------------------------------------------------------------------------------*/

/* Connections that have not said yet who they are; the oldest makes space. */
#define OB_VISITORS 128

struct ob_visitor {
  int file; /* -1: none */
  size_t done;
  struct ob_greeting greeting;
  bool challenged;
  uint64_t nonce[2], proof[2];
  size_t proof_done;
};

/* A rank that has joined, at rank 0. */
struct ob_member {
  int file; /* -1: not yet */
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
  struct ob_address at;  /* where rank 0 listens, as this rank reaches it */
  struct ob_address own; /* as this rank reaches rank 0 */
  struct ob_job job;
  uint64_t key[2];
  char (*addresses)[OB_ADDRESS_BYTES];
  struct ob_member *members; /* rank 0's, one a rank */
  int root;                  /* the others' connection with rank 0; -1: none */
  bool joined;               /* rank 0 knows of it */
  struct ob_answer verdict;
  size_t verdict_done;
  bool told;               /* the failure is another rank's, in its words */
  onebit_status_t refused; /* of a rank that shows that nothing can come of this */
  double complete;         /* rank 0: when all had joined */
  int absence;             /* the errno of the latest attempt to reach rank 0 */
  double refused_since;    /* rank 0 is another job's since then; 0: it is not */
  struct ob_sockets *sockets;
  struct ob_visitor visitors[OB_VISITORS];
  unsigned next_visitor;
};

/* --- Steps -------------------------------------------------------------------------------------*/

/* Pauses for a millisecond. Fails when the timeout is over: "WHAT: waited 10 s for WHOM". */
onebit_status_t ob_rendezvous_pause(struct ob_rendezvous *state, const char *what,
                                    const char *whom);

/* A call has failed by errno: as ob_net_failed, with how many files the connections want. */
onebit_status_t ob_rendezvous_failed(const struct ob_rendezvous *state, const char *call);

/* Another rank's failure, in its words. */
onebit_status_t ob_rendezvous_hear(struct ob_rendezvous *state, struct ob_answer *answer);

/* The thread's latest error, without "sockets: ". */
const char *ob_rendezvous_plain(void);

/* Sends and receives all of it. ONEBIT_IN_PROGRESS: the connection has ended before. */
onebit_status_t ob_rendezvous_send(struct ob_rendezvous *state, int file, const void *data,
                                   size_t bytes);
onebit_status_t ob_rendezvous_receive(struct ob_rendezvous *state, int file, void *data,
                                      size_t bytes);

/* True: all bytes went out at once, as a few do on a connection that is new. */
bool ob_send_all(int file, const void *data, size_t bytes);

/* sockets_visitors.c: serves those who connect. `accept_one` is called with each that has greeted,
 * and again when more of it has come: it takes the file, or says that it waits for more; otherwise
 * the connection is closed. */
typedef bool ob_visitor_accept(struct ob_rendezvous *state, struct ob_visitor *visitor);
onebit_status_t ob_visitors_serve(struct ob_rendezvous *state, ob_visitor_accept *accept_one);
/* An error of the system is noted in state->refused. */
bool ob_visitor_read_greeting(struct ob_rendezvous *state, struct ob_visitor *visitor);
void ob_visitor_close(struct ob_visitor *visitor);

/* sockets_gather.c, of rank 0. Until all have joined, and have the list of all. */
onebit_status_t ob_join_gather(struct ob_rendezvous *state);
/* Serves one that wants to join, also when all have: of a job without an exact name that is an
 * error on all. */
bool ob_join_accept(struct ob_rendezvous *state, struct ob_visitor *visitor);
/* True if rank 0 has looked for a second job long enough. */
bool ob_join_is_quiet(const struct ob_rendezvous *state);
/* Reads what they report. `joining`: one whose connection ends is not missed yet. */
onebit_status_t ob_members_read(struct ob_rendezvous *state, bool joining);
/* The first that has not reported that it is connected with all; -1: none. */
int ob_members_first_apart(const struct ob_rendezvous *state);
/* Tells them the verdict. If that is an error, those who have not joined, too, for a while. */
void ob_members_tell(struct ob_rendezvous *state, const struct ob_answer *verdict);

/* sockets_join.c, of the others. Joins, until this rank has the list of all. */
onebit_status_t ob_join(struct ob_rendezvous *state);
/* Reads the verdict. ONEBIT_IN_PROGRESS: there is none yet. */
onebit_status_t ob_verdict_read(struct ob_rendezvous *state);
/* Tells rank 0 that this rank cannot go on. */
void ob_join_report(struct ob_rendezvous *state, const struct ob_answer *report);
/* Asks what has rank 0's port when it is taken, and says so if that is another rank 0. */
void ob_join_claim(struct ob_rendezvous *state);

/* For tests: seconds in which rank 0 of a job without an exact name looks for a second job at its
 * port, from when all have joined. */
extern double ob_join_quiet;
/* And in which a rank that has failed looks for those that are to be told. */
extern double ob_join_last;

#endif
