/*
 * Waits for other ranks. Every loop of collectives and optimizers that waits for one looks at the
 * clock here: once in a while it asks whether the communicator is still well, after 10, 60 and 300
 * seconds it says on standard error whom it waits for, and after ONEBIT_TIMEOUT the wait is an
 * error, and the communicator is aborted, so that every other rank hears of it too. The drop-ins
 * wait for what they agree on in the same way.
 */
#ifndef OB_COLLECTIVES_WATCH_H
#define OB_COLLECTIVES_WATCH_H

#include <stdbool.h>
#include <stddef.h>

#include "onebit/communicator.h"

struct ob_batch;
struct ob_presence;

/* The most seconds that a transport waits before the watch is called again. */
#define OB_WAIT_SLICE 0.02

/* A wait: all zero when something has moved. */
struct ob_watch {
  double waited; /* seconds; at most one of them between two looks, so that a process that was
                    stopped, or computed meanwhile, does not blame others for its own absence */
  double seen;   /* when it was last looked at, by ob_seconds; 0: not yet */
  int notices;   /* so far */
  struct ob_presence *presence; /* for waits before there is a communicator; NULL: none */
};

/* The text of a wait: "WHAT: waiting 10 s for rank PEER (DETAIL)". */
struct ob_wait {
  char what[96], detail[48]; /* detail may be empty */
  int peer;                  /* -1: `others` names the ranks that are waited for, as far as known */
  const char *others;
};

typedef void ob_wait_describe(const void *waiter, struct ob_wait *wait);

/* Looks at a wait in which nothing has moved since the last look. `grace`: seconds that it may take
 * beyond the timeout. ONEBIT_OK: go on waiting. ONEBIT_ERROR_TRANSPORT: the communicator has
 * failed, or fails now because this took too long. */
onebit_status_t ob_watch_look(struct ob_watch *watch, onebit_comm_t comm, double grace,
                              ob_wait_describe *describe, const void *waiter);

/* Adds the time since the last look. False: that was less than a millisecond ago. */
bool ob_watch_count(struct ob_watch *watch);

/* Waits for a batch that has begun, no longer than the timeout. `what` is for the error message. */
onebit_status_t ob_watch_batch(struct ob_batch *batch, const char *what);

/* Does the same before there is a communicator: the object named by `what` has made no progress
 * since the last look. ONEBIT_ERROR_TRANSPORT: it took too long. */
onebit_status_t ob_watch_alone(struct ob_watch *watch, double timeout, const char *what);
/* Watches a wait for a known rank: "rank 2 to join". */
onebit_status_t ob_watch_for(struct ob_watch *watch, double timeout, const char *what,
                             const char *whom);

/* ONEBIT_TIMEOUT in seconds, INFINITY for none. ONEBIT_ERROR_ARGUMENT: it is no such number. */
onebit_status_t ob_watch_timeout(double *seconds);

/* Backs off when nothing moved, `idle` times in a row. Yielding is quick to see a message, but
 * where ranks outnumber cores those that wait would take turns with each other; so soon they sleep,
 * a small part of a message's time over a network. */
void ob_backoff(unsigned idle);

/* Seconds until the first notice; the others are 6 and 30 times as late. Tests set it. */
extern double ob_watch_notice;

/* --- Files that say what ranks are waiting for -------------------------------------------------*/

/*
 * Publishes the waits of this host's ranks, for `onebit status`: each communicator over a network
 * has a file in /tmp/onebit-UID, which its process has locked for as long as it lives. A wait of a
 * second and more is written there, once a second.
 */

/* One for each communicator; all zero where no file can be made. */
struct ob_presence {
  int file;        /* 0: none */
  unsigned number; /* of the file, in this process */
  int rank, size;
  const char *over; /* the transport's name */
  double written;   /* by ob_seconds */
};

void ob_presence_begin(struct ob_presence *presence, int rank, int size, const char *over);
void ob_presence_end(struct ob_presence *presence);

#endif
