/*
 * Waits for other ranks. Every loop of collectives and optimizers that waits for another rank calls
 * these functions. They check regularly that the communicator has not failed. After 10, 60 and 300
 * seconds they print on standard error which rank is waited for. After ONEBIT_TIMEOUT the wait
 * fails, and the communicator is aborted, so that every other rank gets the error too. The drop-ins
 * wait for their agreements in the same way.
 */
#ifndef OB_COLLECTIVES_WATCH_H
#define OB_COLLECTIVES_WATCH_H

#include <stdbool.h>
#include <stddef.h>

#include "onebit/communicator.h"

struct ob_batch;
struct ob_presence;

/* The longest time in seconds that a transport waits before the watch is called again. */
#define OB_WAIT_SLICE 0.02

/* The state of a wait; all zero after progress. */
struct ob_watch {
  double waited; /* seconds; at most one between two checks, so that a process that was stopped or
                    computed in between does not count that time as a wait for other ranks */
  double seen;   /* time of the last check, by ob_seconds; 0: none yet */
  int notices;   /* the number printed so far */
  struct ob_presence *presence; /* for waits before the communicator exists; NULL: none */
};

/* The parts of the text "WHAT: waiting 10 s for rank PEER (DETAIL)". */
struct ob_wait {
  char what[96], detail[48]; /* detail may be empty */
  int peer;                  /* -1: `others` describes the ranks that are waited for */
  const char *others;
};

typedef void ob_wait_describe(const void *waiter, struct ob_wait *wait);

/* Checks a wait that has made no progress since the last check. `grace` is the time in seconds that
 * it may take beyond the timeout. ONEBIT_OK: the caller goes on waiting. ONEBIT_ERROR_TRANSPORT:
 * the communicator has failed, or fails now because the wait was too long. */
onebit_status_t ob_watch_look(struct ob_watch *watch, onebit_comm_t comm, double grace,
                              ob_wait_describe *describe, const void *waiter);

/* Adds the time since the last check. Returns false if that check was less than a millisecond
 * ago. */
bool ob_watch_count(struct ob_watch *watch);

/* Waits until a batch that has begun is complete, but no longer than the timeout. `what` is for the
 * error message. */
onebit_status_t ob_watch_batch(struct ob_batch *batch, const char *what);

/* Checks a wait as ob_watch_look does, before the communicator exists. `what` names the object that
 * has made no progress since the last check. ONEBIT_ERROR_TRANSPORT: the wait was too long. */
onebit_status_t ob_watch_alone(struct ob_watch *watch, double timeout, const char *what);
/* Does the same for a wait whose ranks are known; `whom` is a text such as "rank 2 to join". */
onebit_status_t ob_watch_for(struct ob_watch *watch, double timeout, const char *what,
                             const char *whom);

/* Gets ONEBIT_TIMEOUT in seconds; INFINITY: no timeout. ONEBIT_ERROR_ARGUMENT: it is not a valid
 * number. */
onebit_status_t ob_watch_timeout(double *seconds);

/* Yields the processor, or sleeps, when nothing has advanced `idle` times in a row. A rank that
 * yields notices a message quickly. But if ranks outnumber cores, waiting ranks that yield only
 * take turns with each other; so after a short time they sleep, each time for a small part of a
 * message's time over a network. */
void ob_backoff(unsigned idle);

/* Seconds until the first notice; the second and third come after 6 and 30 times as long. Tests set
 * it. */
extern double ob_watch_notice;

/* --- Files that say what ranks are waiting for -------------------------------------------------*/

/*
 * Publishes the waits of this host's ranks for `onebit status`. Each communicator over a network
 * has a file in /tmp/onebit-UID, which its process locks until it ends. A wait of a second or more
 * is written to the file once a second.
 */

/* One for each communicator; all zero if no file can be made. */
struct ob_presence {
  int file;        /* 0: none */
  unsigned number; /* the number in the file's name */
  int rank, size;
  const char *over; /* the transport's name */
  double written;   /* time of the last write, by ob_seconds */
};

void ob_presence_begin(struct ob_presence *presence, int rank, int size, const char *over);
void ob_presence_end(struct ob_presence *presence);

#endif
